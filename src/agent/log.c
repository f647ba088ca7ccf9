/*
 * The log: lines with a level and a time, for whoever opened the agent.
 */
#include <time.h>

#include "agent/agent.h"

bool kvf_agent_logs(const kvf_agent *agent, kvf_log_level level) {
    return agent->options.log && level >= agent->options.log_level;
}

uint64_t kvf_wall_clock(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * KVF_SECOND + (uint64_t)now.tv_nsec;
}

void kvf_agent_log(kvf_agent *agent, kvf_log_level level, const char *text) {
    if (!kvf_agent_logs(agent, level))
        return;
    char *copy = kvf_strdup(text), *rest = copy;
    if (!copy)
        return;
    uint64_t time_ns = kvf_wall_clock();
    for (char *one; (one = strsep(&rest, "\n")) != NULL;)
        if (one[0])
            kvf_log_line_add(agent, level, time_ns, one);
    kvf_free(copy);
}
