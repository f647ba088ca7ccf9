#include "worker.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "agent/agent.h"

#include "chance.h"
#include "worker_devices.h"

/* A request on this rank. */
typedef struct task {
    order start;
    uint64_t ticket;
    uint64_t seed;           /* of the bytes that its blocks should have now */
    bool placed;             /* its destination is known */
    uint32_t results, frees; /* events so far */
    bool failed;
    kvf_status status;
    struct {
        uint64_t began, result, free, refilled, forgotten; /* 0: never */
    } at_ns;
    struct task *next;
} task;

#define KEPT_TASKS 256u /* that are forgotten, for the story of wrong bytes */

typedef struct worker {
    const worker_setting *setting;
    const worker_place *place;
    kvf_model *model;
    kvf_engine *engine;
    kvf_agent *agent;
    const kvf_link_table *mail;
    content_rank rank;
    task *tasks;
    task *past[KEPT_TASKS];
    uint32_t past_count; /* all so far */
    chance chance;
    uint64_t slow_until, slow_us;
    bool calm, quit;
} worker;

static uint64_t now_ns(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void send_report(const worker *w, const report *r) {
    while (send(w->place->fd, r, sizeof *r, MSG_NOSIGNAL) < 0)
        if (errno != EINTR)
            _exit(3); /* the driver has ended */
}

__attribute__((format(printf, 3, 4))) static void wrong(const worker *w, const task *t, const char *format,
                                                        ...) {
    report r = {.kind = REPORT_WRONG, .handle = t ? t->start.handle : 0};
    va_list list;
    va_start(list, format);
    (void)vsnprintf(r.words, sizeof r.words, format, list);
    va_end(list);
    send_report(w, &r);
}

/* ---- the story of wrong bytes ----------------------------------------------------------------- */

static bool has_block(const task *t, uint32_t group, uint32_t block) {
    const content_table *table = &t->start.start.groups[group];
    for (uint32_t i = 0; i < table->count; i++)
        if (table->ids[i] == block)
            return true;
    return false;
}

/* "free 12.3 ms ago" */
static void add_moment(char *words, const char *what, uint64_t at_ns) {
    const size_t used = strlen(words);
    if (at_ns)
        (void)snprintf(words + used, ORDERS_WORDS - used, ", %s %.1f ms ago", what,
                       (double)(now_ns() - at_ns) / 1e6);
}

/* Reports what a request had to do with a wrong cell: its blocks, or its bytes. */
static void tell_of(const worker *w, const task *t, const content_cell *cell) {
    static const char *const kinds[] = {"none", "hold", "pull", "push", "expect", "connect"};
    report r = {.kind = REPORT_STORY, .handle = t->start.handle};
    uint32_t step = 0;
    const char *bytes = content_is_of(cell, t->start.start.seed, &step)     ? "the bytes it moved"
                        : content_is_of(cell, t->seed, &step)               ? "the bytes it was given later"
                        : content_is_of(cell, t->start.start.before, &step) ? "the bytes before it"
                                                                            : NULL;
    const bool had_block = has_block(t, cell->group, cell->block);
    if (!bytes && !had_block)
        return;
    (void)snprintf(r.words, sizeof r.words, "%s %llu, handle %u, ticket %llu: %sstatus %s",
                   kinds[t->start.start.kind], (unsigned long long)t->start.start.id, t->start.handle,
                   (unsigned long long)t->ticket, had_block ? "it has or had the block; " : "",
                   kvf_status_name(t->status));
    add_moment(r.words, "begun", t->at_ns.began);
    add_moment(r.words, "told", t->at_ns.result);
    add_moment(r.words, "free", t->at_ns.free);
    add_moment(r.words, "computed", t->at_ns.refilled);
    add_moment(r.words, "forgotten", t->at_ns.forgotten);
    const size_t used = strlen(r.words);
    if (bytes)
        (void)snprintf(r.words + used, sizeof r.words - used, "; the cell has %s, of step %u", bytes, step);
    send_report(w, &r);
}

/* Who wrote it: the requests whose bytes lie there, and those that had the block. */
static void tell_story(const worker *w, const content_cell *cell) {
    const uint32_t kept = w->past_count < KEPT_TASKS ? w->past_count : KEPT_TASKS;
    report r = {.kind = REPORT_STORY};
    (void)snprintf(r.words, sizeof r.words,
                   "the first wrong cell is in block %u of group %u, its word is %016llx", cell->block,
                   cell->group, (unsigned long long)cell->word);
    send_report(w, &r);
    for (uint32_t i = 0; i < kept; i++)
        tell_of(w, w->past[(w->past_count - kept + i) % KEPT_TASKS], cell);
    for (const task *t = w->tasks; t; t = t->next)
        tell_of(w, t, cell);
}

/* ---- opening --------------------------------------------------------------------------------- */

static _Noreturn void give_up(const char *what) {
    (void)fprintf(stderr, "worker %d: %s: %s\n", (int)getpid(), what, kvf_error_detail());
    exit(4);
}

static void keep_line(void *context, const kvf_log_line *line) {
    worker_window *window = context;
    if (line->text[0] == ' ')
        return; /* of a description, which would push out what happened */
    char *place = window->line[atomic_load(&window->lines) % WORKER_LINES];
    (void)kvf_log_write(line, KVF_LOG_TEXT, place, WORKER_LINE_BYTES, NULL);
    atomic_fetch_add(&window->lines, 1);
}

static kvf_status open_agent(worker *w, const char *listen, const char *public_key, const char *secret_key) {
    const worker_setting *s = w->setting;
    kvf_agent_options options = {.struct_size = sizeof options,
                                 .listen = listen,
                                 .transport = s->transport,
                                 .lease_ns = s->lease_ns,
                                 .heartbeat_ns = s->heartbeat_ns,
                                 .peer_timeout_ns = s->peer_timeout_ns,
                                 .idle_ns = s->idle_ns,
                                 .verify = s->verify,
                                 .policy = s->policy,
                                 .way = s->way,
                                 .slot_bytes = 4096, /* small, so that slots are soon full */
                                 .arena_bytes = 64 * 4096,
                                 .own_thread = s->own_thread,
                                 .log = keep_line,
                                 .log_context = w->place->window,
                                 .public_key = public_key,
                                 .secret_key = secret_key};
    const kvf_surroundings around = {.link = w->mail, .fabric = faulty_fabric(s->transport)};
    return kvf_agent_open_in(&around, w->engine, w->place->rank, &options, &w->agent);
}

static void open_memory(worker *w) {
    w->rank.shard = kvf_engine_shard(w->engine, w->place->rank);
    const kvf_shard_desc *desc = kvf_shard_get(w->rank.shard);
    if (desc->region_count > CONTENT_REGIONS)
        give_up("too many regions");
    if (w->setting->on_devices)
        w->rank.mirror = worker_devices_mirror();
    for (uint32_t i = 0; i < desc->region_count; i++) {
        if (w->setting->on_devices) {
            if (worker_devices_memory(w->place->engine % 2, desc->region_bytes[i], &w->rank.regions[i],
                                      &w->rank.seen[i]))
                give_up("memory of a device");
            w->rank.regions[i].withheld = !w->setting->shown;
            continue;
        }
        w->rank.regions[i] = (kvf_memory){.struct_size = sizeof(kvf_memory), .bytes = desc->region_bytes[i]};
        if (kvf_agent_allocate(w->agent, KVF_MEMORY_HOST, 0, desc->region_bytes[i],
                               &w->rank.regions[i].address))
            give_up("memory");
    }
    if (kvf_agent_register(w->agent, w->rank.regions, desc->region_count))
        give_up("registering");
}

static void open_worker(worker *w) {
    const worker_place *p = w->place;
    report r = {.kind = REPORT_OPEN};
    w->model = content_model(w->setting->model);
    w->engine = w->model ? content_engine(w->model, p->engine) : NULL;
    if (!w->engine)
        give_up("the engine");
    if (w->setting->encrypted) {
        memcpy(r.open.public_key, p->public_key, sizeof p->public_key);
        memcpy(r.open.secret_key, p->secret_key, sizeof p->secret_key);
        if (p->public_key[0] == '\0' && kvf_agent_make_keys(r.open.public_key, r.open.secret_key))
            give_up("keys");
    }
    const char *public_key = w->setting->encrypted ? r.open.public_key : NULL;
    const char *secret_key = w->setting->encrypted ? r.open.secret_key : NULL;
    kvf_status status = open_agent(w, p->listen[0] ? p->listen : NULL, public_key, secret_key);
    if (status && p->listen[0]) /* another process has taken the port meanwhile */
        status = open_agent(w, NULL, public_key, secret_key);
    if (status)
        give_up("the agent");
    open_memory(w);
    const void *bytes;
    size_t size;
    if (kvf_agent_introduction(w->agent, &bytes, &size) || size > sizeof r.open.bytes)
        give_up("the introduction");
    memcpy(r.open.bytes, bytes, size);
    r.open.size = (uint32_t)size;
    (void)snprintf(r.open.endpoint, sizeof r.open.endpoint, "%s", kvf_agent_endpoint(w->agent));
    send_report(w, &r);
}

/* ---- requests -------------------------------------------------------------------------------- */

static bool is_destination(const task *t) {
    return t->start.start.kind == KVF_REQUEST_PULL || t->start.start.kind == KVF_REQUEST_EXPECT;
}

static uint32_t groups_of(const worker *w) {
    return kvf_model_group_count(w->model);
}

static void make_groups(const worker *w, const task *t, kvf_group_steps *groups) {
    for (uint32_t g = 0; g < groups_of(w); g++) {
        const content_table *table = &t->start.start.groups[g];
        groups[g] =
            (kvf_group_steps){{table->ids, table->count, table->first_block}, table->begin, table->end};
    }
}

static task *find_task(const worker *w, uint32_t handle) {
    task *t = w->tasks;
    while (t && t->start.handle != handle)
        t = t->next;
    return t;
}

static task *find_ticket(const worker *w, uint64_t ticket) {
    task *t = w->tasks;
    while (t && t->ticket != ticket)
        t = t->next;
    return t;
}

static void prepare_memory(const worker *w, task *t) {
    for (uint32_t g = 0; g < groups_of(w) && !t->start.start.filled; g++) {
        const content_table *table = &t->start.start.groups[g];
        content_fill(&w->rank, g, table, content_all(&w->rank, g, table), t->start.start.before);
        if (t->start.start.kind == KVF_REQUEST_HOLD)
            content_fill(&w->rank, g, table, content_wanted(&w->rank, g, table), t->start.start.seed);
    }
}

static kvf_status start_request(const worker *w, task *t) {
    kvf_group_steps groups[CONTENT_GROUPS];
    make_groups(w, t, groups);
    const order *o = &t->start;
    kvf_contact contact = {.engine = o->start.engine,
                           .endpoint = o->start.endpoint,
                           .public_key =
                               w->setting->encrypted && o->start.public_key[0] ? o->start.public_key : NULL};
    kvf_agent_request request = {.struct_size = sizeof request,
                                 .id = {&o->start.id, sizeof o->start.id},
                                 .groups = o->start.later ? NULL : groups,
                                 .group_count = o->start.later ? 0 : groups_of(w),
                                 .deadline_ns = o->start.deadline_ns,
                                 .consumers = o->start.consumers,
                                 .contact = contact,
                                 .priority = (int32_t)(o->start.seed % 3),
                                 .bytes_per_second = o->start.seed % 5 ? 0 : 64u << 20};
    switch (o->start.kind) {
    case KVF_REQUEST_HOLD:
        return kvf_agent_hold(w->agent, &request, &t->ticket);
    case KVF_REQUEST_PULL:
        return kvf_agent_pull(w->agent, &request, &t->ticket);
    case KVF_REQUEST_PUSH:
        for (uint32_t g = 0; g < groups_of(w); g++) /* the chunks may bring the blocks */
            groups[g].table.count = o->start.seed % 2 ? groups[g].table.count : 0;
        return kvf_agent_push(w->agent, &request, &t->ticket);
    case KVF_REQUEST_CONNECT:
        return kvf_agent_connect(w->agent, &contact, o->start.deadline_ns, &t->ticket);
    default:
        return kvf_agent_expect(w->agent, &request, &t->ticket);
    }
}

static void on_start(worker *w, const order *o) {
    task *t = calloc(1, sizeof *t);
    if (!t)
        give_up("a task");
    t->start = *o;
    t->seed = o->start.seed;
    t->placed = !o->start.later;
    t->at_ns.began = now_ns();
    t->next = w->tasks;
    w->tasks = t;
    prepare_memory(w, t);
    if (o->start.kind == KVF_REQUEST_PUSH)
        w->place->window->pushes++;
    if (start_request(w, t))
        wrong(w, t, "a request of kind %d was refused: %s", (int)o->start.kind, kvf_error_detail());
}

/* The blocks of a table that have the steps before `end`. */
static kvf_block_table blocks_before(const worker *w, uint32_t group, const content_table *table,
                                     uint32_t end) {
    const uint32_t per_block = content_block_steps(w->rank.shard, group);
    const uint32_t blocks = (end + per_block - 1) / per_block;
    const uint32_t count = blocks > table->first_block ? blocks - table->first_block : 0;
    return (kvf_block_table){table->ids, count < table->count ? count : table->count, table->first_block};
}

/* Computes a part of a push, and says that it is ready, with its blocks and those before it. */
static kvf_status make_ready(const worker *w, const task *t, const order *o) {
    kvf_block_table tables[CONTENT_GROUPS];
    for (uint32_t g = 0; g < groups_of(w); g++) {
        const kvf_group_desc *group = kvf_model_group(w->model, g);
        const content_table *table = &t->start.start.groups[g];
        const uint32_t end = (uint32_t)kvf_group_step_count(group, o->ready.end);
        content_part part = content_wanted(&w->rank, g, table);
        tables[g] = blocks_before(w, g, table, end);
        part.layers = (kvf_range){o->ready.layers_before, o->ready.layers};
        if (group->kind == KVF_GROUP_TOKENS) {
            const uint32_t begin = (uint32_t)kvf_group_step_count(group, o->ready.begin);
            part.begin = part.begin > begin ? part.begin : begin;
            part.end = part.end < end ? part.end : end;
        } else if (!o->ready.last) {
            continue;
        }
        content_fill(&w->rank, g, table, part, t->seed);
    }
    const kvf_push_chunk chunk = {.struct_size = sizeof chunk,
                                  .begin = o->ready.begin,
                                  .end = o->ready.end,
                                  .layers = o->ready.layers,
                                  .tables = tables,
                                  .table_count = groups_of(w)};
    return kvf_agent_push_ready(w->agent, t->ticket, &chunk);
}

/* Passes on a ready part of a push, or the destination of a pull that had none. */
static void on_ready(const worker *w, task *t, const order *o) {
    kvf_group_steps groups[CONTENT_GROUPS];
    kvf_status status;
    if (t->start.start.kind == KVF_REQUEST_PULL) {
        make_groups(w, t, groups);
        status = kvf_agent_pull_into(w->agent, t->ticket, groups, groups_of(w));
        t->placed = !status;
    } else {
        status = make_ready(w, t, o);
    }
    if (status && status != KVF_E_NOT_FOUND)
        wrong(w, t, "what is ready was refused: %s", kvf_error_detail());
}

static void check_bytes(const worker *w, const task *t, const char *when) {
    content_cell first = {0};
    uint32_t cells = 0;
    for (uint32_t g = 0; g < groups_of(w); g++) {
        content_cell here = {0};
        const uint32_t found =
            content_wrong(&w->rank, g, &t->start.start.groups[g], t->seed, t->start.start.before, &here);
        first = cells == 0 ? here : first;
        cells += found;
    }
    if (cells == 0)
        return;
    char words[CONTENT_WORDS];
    content_describe(&first, words);
    wrong(w, t, "%u cells are wrong %s; %s", cells, when, words);
    tell_story(w, &first);
}

static void on_refill(const worker *w, task *t, uint64_t seed) {
    t->seed = seed;
    t->at_ns.refilled = now_ns();
    for (uint32_t g = 0; g < groups_of(w); g++) {
        const content_table *table = &t->start.start.groups[g];
        content_fill(&w->rank, g, table, content_all(&w->rank, g, table), t->start.start.before);
        content_fill(&w->rank, g, table, content_wanted(&w->rank, g, table), seed);
    }
}

static void on_forget(worker *w, task *gone) {
    task **at = &w->tasks;
    while (*at != gone)
        at = &(*at)->next;
    *at = gone->next;
    if (gone->results != 1 || gone->frees != 1)
        wrong(w, gone, "%u results and %u times blocks_free", gone->results, gone->frees);
    task **kept = &w->past[w->past_count++ % KEPT_TASKS];
    gone->at_ns.forgotten = now_ns();
    free(*kept);
    *kept = gone;
}

static uint32_t count_descriptors(void) {
    uint32_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder))
        count++;
    if (folder)
        (void)closedir(folder);
    return count;
}

/* The second number of statm counts resident pages. */
static uint64_t count_resident(void) {
    char line[128] = "", *second = line;
    FILE *file = fopen("/proc/self/statm", "re");
    if (file && fgets(line, sizeof line, file))
        (void)strtoull(line, &second, 10);
    if (file)
        (void)fclose(file);
    return strtoull(second, NULL, 10) * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void on_look(const worker *w) {
    report r = {.kind = REPORT_LOOK, .look.stats.struct_size = sizeof r.look.stats};
    if (kvf_agent_get_stats(w->agent, &r.look.stats))
        wrong(w, NULL, "statistics: %s", kvf_error_detail());
    r.look.resident_bytes = count_resident();
    r.look.descriptors = count_descriptors();
    for (int i = 0; i < MAIL_FAULTS; i++)
        r.look.tampered[i] = mail_count((mail_fault)i);
    for (int i = 0; i < FAULTY_FAULTS && w->setting->faulty_fabric; i++)
        r.look.fabric_faults += faulty_count((faulty_fault)i);
    send_report(w, &r);
}

/* ---- events ---------------------------------------------------------------------------------- */

/* Checks that a failed destination lists exactly the blocks of the cells that it wanted. */
static void check_invalid(const worker *w, const task *t, const kvf_event *event) {
    for (uint32_t g = 0; g < groups_of(w); g++) {
        const content_table *table = &t->start.start.groups[g];
        uint32_t per_block = content_block_steps(w->rank.shard, g);
        content_part part = content_wanted(&w->rank, g, table);
        uint32_t from = part.begin / per_block, to = (part.end + per_block - 1) / per_block, count = 0;
        const kvf_block_list *got = g < event->group_count ? &event->invalid[g] : NULL;
        bool same = true;
        for (uint32_t b = from; b < to; b++, count++)
            same = same && got && count < got->count && got->ids[count] == table->ids[b - table->first_block];
        if (!same || (got && got->count != count))
            wrong(w, t, "group %u: %u blocks are invalid, and %u are said to be, or others", g, count,
                  got ? got->count : 0);
    }
}

static void check_free(const worker *w, const task *t) {
    for (uint32_t g = 0; g < groups_of(w); g++) {
        const content_table *table = &t->start.start.groups[g];
        for (uint32_t i = 0; i < table->count; i++) {
            kvf_block_state state = KVF_BLOCK_FREE;
            uint32_t requests = 0;
            if (table->ids[i] == KVF_NO_BLOCK)
                continue;
            if (kvf_agent_block(w->agent, g, table->ids[i], &state, &requests) || state != KVF_BLOCK_FREE ||
                requests)
                wrong(w, t, "group %u, block %u was said to be free, and is in state %d of %u requests", g,
                      table->ids[i], (int)state, requests);
        }
    }
}

static void check_event(const worker *w, task *t, const kvf_event *event) {
    bool connects = t->start.start.kind == KVF_REQUEST_CONNECT;
    bool done = event->kind == (connects ? KVF_EVENT_PEER_READY : KVF_EVENT_DONE);
    bool result = done || event->kind == KVF_EVENT_FAILED;
    t->results += result;
    t->frees += event->blocks_free;
    if (t->results > 1 || t->frees > 1 || (!result && event->kind != KVF_EVENT_BLOCKS_FREE))
        wrong(w, t, "event %d: %u results and %u times blocks_free", (int)event->kind, t->results, t->frees);
    size_t id_bytes = connects ? 0 : sizeof t->start.start.id;
    if (event->request_kind != t->start.start.kind || event->id.size != id_bytes ||
        memcmp(event->id.data, &t->start.start.id, id_bytes) != 0)
        wrong(w, t, "event %d is of another request", (int)event->kind);
    if (done && (event->status || !event->blocks_free))
        wrong(w, t, "DONE with status %d, blocks_free %d", (int)event->status, event->blocks_free);
    if (event->kind == KVF_EVENT_FAILED && (!event->status || event->detail[0] == '\0'))
        wrong(w, t, "FAILED with status %d and detail \"%s\"", (int)event->status, event->detail);
    if (event->recompute != (event->kind == KVF_EVENT_FAILED && w->setting->policy == KVF_FAILURE_RECOMPUTE))
        wrong(w, t, "event %d: recompute is %d", (int)event->kind, event->recompute);
    t->failed = t->failed || event->kind == KVF_EVENT_FAILED;
    t->status = event->kind == KVF_EVENT_FAILED ? event->status : t->status;
    t->at_ns.result = result ? now_ns() : t->at_ns.result;
    t->at_ns.free = event->blocks_free ? now_ns() : t->at_ns.free;
    if (is_destination(t) && done)
        check_bytes(w, t, "in what is DONE");
    if (is_destination(t) && event->kind == KVF_EVENT_FAILED && t->placed)
        check_invalid(w, t, event);
    if (t->start.start.kind == KVF_REQUEST_HOLD && event->blocks_free)
        check_bytes(w, t, "in what was held");
    if (event->blocks_free && (t->placed || !is_destination(t)))
        check_free(w, t);
}

static void take_events(worker *w) {
    kvf_event event = {.struct_size = sizeof event};
    while (kvf_agent_next_event(w->agent, &event) == KVF_OK) {
        if (event.ticket == 0)
            continue; /* an event about a peer */
        task *t = find_ticket(w, event.ticket);
        if (!t) {
            wrong(w, NULL, "event %d of ticket %llu, which has had all its events", (int)event.kind,
                  (unsigned long long)event.ticket);
            continue;
        }
        check_event(w, t, &event);
        if (t->start.start.kind == KVF_REQUEST_PUSH && event.blocks_free)
            w->place->window->pushes--;
        report r = {.kind = REPORT_EVENT,
                    .handle = t->start.handle,
                    .event = {event.kind, event.request_kind, event.status, event.blocks_free, event.bytes}};
        (void)snprintf(r.words, sizeof r.words, "%s", event.detail);
        send_report(w, &r);
    }
}

/* ---- the loop -------------------------------------------------------------------------------- */

static void on_task_order(worker *w, const order *o) {
    task *t = find_task(w, o->handle);
    if (!t) {
        wrong(w, NULL, "order %d of request %u, which is none", (int)o->kind, o->handle);
        return;
    }
    kvf_status status;
    report checked = {.kind = REPORT_CHECKED, .handle = o->handle};
    switch (o->kind) {
    case ORDER_READY:
        on_ready(w, t, o);
        break;
    case ORDER_CANCEL:
        status = kvf_agent_cancel(w->agent, t->ticket);
        if (status && status != KVF_E_NOT_FOUND)
            wrong(w, t, "cancelling: %s", kvf_error_detail());
        break;
    case ORDER_CHECK:
        check_bytes(w, t, t->failed ? "after it was computed" : "some time after DONE");
        send_report(w, &checked);
        break;
    case ORDER_REFILL:
        on_refill(w, t, o->seed);
        break;
    default:
        on_forget(w, t);
        break;
    }
}

static void take_order(worker *w, const order *o) {
    switch (o->kind) {
    case ORDER_INTRODUCE:
        if (kvf_agent_introduce(w->agent, o->introduction.bytes, o->introduction.size))
            wrong(w, NULL, "introducing: %s", kvf_error_detail());
        break;
    case ORDER_START:
        on_start(w, o);
        break;
    case ORDER_SLOW:
        w->slow_until = now_ns() + o->slow.total_ms * 1000000ull;
        w->slow_us = o->slow.sleep_us;
        break;
    case ORDER_CALM:
        mail_calm();
        if (w->setting->faulty_fabric)
            faulty_remove();
        w->calm = true;
        if (w->setting->on_devices)
            worker_devices_calm();
        break;
    case ORDER_LOOK:
        on_look(w);
        break;
    case ORDER_QUIT:
        w->quit = true;
        break;
    default:
        on_task_order(w, o);
        break;
    }
}

static void take_orders(worker *w) {
    static order o;
    ssize_t got;
    while ((got = recv(w->place->fd, &o, sizeof o, MSG_DONTWAIT)) > 0)
        take_order(w, &o);
    if (got == 0)
        _exit(3); /* the driver has ended */
}

/* Lets the agent work in one of the three ways that an engine can. */
static void work(worker *w) {
    worker_window *window = w->place->window;
    struct pollfd fds[] = {{.fd = w->place->fd, .events = POLLIN},
                           {.fd = kvf_agent_event_fd(w->agent), .events = POLLIN}};
    if (w->setting->own_thread) {
        window->working = 1;
        (void)poll(fds, 2, 20);
        return;
    }
    bool busy = false;
    if (w->setting->on_devices && !w->calm)
        worker_devices_trouble(&w->chance);
    window->working = 1;
    mail_deliver();
    if (window->pushes == 0 && chance_per_mille(&w->chance, 300))
        (void)kvf_agent_wait(w->agent, 500000);
    else
        (void)kvf_agent_progress(w->agent, &busy);
    window->working = 0;
    if (!busy)
        (void)poll(fds, 1, 1);
}

static void close_worker(worker *w) {
    kvf_agent_close(w->agent);
    while (w->tasks) {
        task *t = w->tasks;
        w->tasks = t->next;
        free(t);
    }
    for (uint32_t i = 0; i < KEPT_TASKS; i++)
        free(w->past[i]);
    kvf_engine_free(w->engine);
    kvf_model_free(w->model);
}

void worker_run(const worker_setting *setting, const worker_place *place) {
    uint64_t seed = chance_mix(setting->seed ^ (place->life << 16 | place->engine << 8 | place->rank));
    worker w = {.setting = setting, .place = place, .chance = {seed}};
    mail_options mail = setting->mail;
    mail.seed = chance_mix(seed);
    w.mail = mail_install(&mail);
    if (setting->faulty_fabric) {
        faulty_options fabric = setting->fabric;
        fabric.seed = chance_mix(mail.seed);
        faulty_install(&fabric);
    }
    if (setting->on_devices && !worker_devices_there())
        give_up("devices");
    open_worker(&w);
    for (uint64_t began = now_ns(); !w.quit; began = now_ns()) {
        take_orders(&w);
        work(&w);
        take_events(&w);
        if (w.slow_us && now_ns() < w.slow_until)
            (void)nanosleep(&(struct timespec){0, (long)w.slow_us * 1000}, NULL);
        const uint64_t took = now_ns() - began;
        if (w.calm && took > atomic_load(&place->window->slowest_ns))
            atomic_store(&place->window->slowest_ns, took);
    }
    close_worker(&w);
    exit(0);
}
