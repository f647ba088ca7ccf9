/*
 * The agent's lock: turns of threads, waking sleepers, and logging outside of the lock.
 */
#include <stdio.h>

#include "agent/agent.h"
#include "transport/transport.h"

struct kvf_log_entry {
    kvf_log_entry *prev, *next;
    kvf_log_level level;
    uint64_t time_ns;
    char text[];
};

/* ---- turns ----------------------------------------------------------------------------------- */

/* Every thread that comes is counted before it waits for the lock, so that others can let it go first. */
void kvf_turn_take(kvf_agent *agent) {
    (void)atomic_fetch_add(&agent->arrived, 1);
    (void)pthread_mutex_lock(&agent->lock);
    agent->entered++;
    if (agent->entered >= agent->gives_way_to)
        (void)pthread_cond_broadcast(&agent->turn);
}

/*
 * Between two rounds, lets threads go first that have come meanwhile. With a mutex alone, the thread that gave it up
 * takes it again long before a thread that sleeps on it has woken.
 */
void kvf_turn_give(kvf_agent *agent) {
    uint64_t came = atomic_load(&agent->arrived);
    while (agent->entered < came) {
        agent->gives_way_to = kvf_max_u64(agent->gives_way_to, came);
        (void)pthread_cond_wait(&agent->turn, &agent->lock);
    }
}

/* ---- the work ---------------------------------------------------------------------------------- */

void kvf_work_take(kvf_agent *agent) {
    uint64_t turn = agent->work_asked++;
    if (agent->work_given != turn && agent->transport)
        kvf_transport_hurry(agent->transport);
    while (agent->work_given != turn)
        (void)pthread_cond_wait(&agent->worked, &agent->lock);
    agent->worker = pthread_self();
}

void kvf_work_give(kvf_agent *agent) {
    KVF_ASSERT(kvf_work_is_ours(agent));
    agent->work_given++;
    if (agent->work_given != agent->work_asked)
        (void)pthread_cond_broadcast(&agent->worked);
}

bool kvf_work_is_ours(const kvf_agent *agent) {
    return agent->work_given != agent->work_asked && pthread_equal(agent->worker, pthread_self());
}

/* ---- the log ----------------------------------------------------------------------------------- */

/* Leaves the lock while a line is logged, as the function may call the agent. One thread at a time does this, so that
 * lines come in order; it also logs lines that others, or the function itself, add meanwhile. */
void kvf_log_deliver(kvf_agent *agent) {
    if (agent->logging || !agent->lines)
        return;
    char detail[KVF_DETAIL_BYTES]; /* of the engine's call, and not of calls of the function */
    (void)snprintf(detail, sizeof detail, "%s", kvf_error_detail());
    agent->logging = true;
    while (agent->lines) {
        kvf_log_entry *line = agent->lines;
        DL_DELETE(agent->lines, line);
        (void)pthread_mutex_unlock(&agent->lock);
        const kvf_log_line told = {sizeof told, line->level, line->time_ns, line->text};
        agent->options.log(agent->options.log_context, &told);
        kvf_free(line);
        kvf_turn_take(agent);
    }
    agent->logging = false;
    kvf_error_restore(detail);
}

void kvf_log_line_add(kvf_agent *agent, kvf_log_level level, uint64_t time_ns, const char *text) {
    size_t bytes = strlen(text) + 1;
    kvf_log_entry *line = kvf_alloc(1, sizeof *line + bytes);
    if (!line)
        return;
    line->level = level;
    line->time_ns = time_ns;
    memcpy(line->text, text, bytes);
    DL_APPEND(agent->lines, line);
}

/* ---- sleepers ---------------------------------------------------------------------------------- */

uint64_t kvf_next_due(const kvf_agent *agent) {
    uint64_t due = kvf_min_u64(kvf_min_u64(agent->due, agent->pace_due), kvf_link_due(agent->link));
    due = kvf_min_u64(due, agent->tickets_due);
    due = kvf_min_u64(due, kvf_sweep_next(&agent->session_sweep));
    due = kvf_min_u64(due, kvf_alarms_next(&agent->session_times));
    due = kvf_min_u64(due, kvf_alarms_next(&agent->remote_times));
    due = kvf_min_u64(due, kvf_sweep_next(&agent->early_sweep));
    return kvf_min_u64(due, kvf_sweep_next(&agent->flow_sweep));
}

/* Makes the descriptor readable if, and only if, there is work. A timer that is set too early is left as it is: it
 * costs one idle round when it fires, and setting it costs time too. */
void kvf_work_show(kvf_agent *agent) {
    uint64_t due = kvf_next_due(agent), now = kvf_agent_now(agent);
    bool waits = agent->stopping || agent->again || due <= now || kvf_link_pending(agent->link);
    kvf_wake_set(&agent->wake, waits);
    if (!waits && (due < agent->timer.at_ns || agent->timer.at_ns <= now) &&
        agent->clock.now == kvf_monotonic.now)
        kvf_timer_set(&agent->timer, due);
}

kvf_status kvf_agent_lock(kvf_agent *agent) {
    if (!agent)
        return kvf_fail(KVF_E_INVALID, "agent is NULL");
    if (agent->forks != kvf_fork_count())
        return kvf_fail(KVF_E_INVALID, "the agent belongs to process %ld, which forked this one",
                        (long)agent->process);
    kvf_turn_take(agent);
    agent->users++;
    return KVF_OK;
}

void kvf_agent_unlock(kvf_agent *agent) {
    kvf_work_show(agent);
    kvf_log_deliver(agent);
    agent->users--;
    if (agent->stopping)
        (void)pthread_cond_broadcast(&agent->turn);
    (void)pthread_mutex_unlock(&agent->lock);
}
