/*
 * Events for the engine, kept until it takes them; and the log line of a failure.
 */
#include <stdio.h>

#include <json.h>

#include "agent/peers.h"
#include "agent/trace.h"

#define DRAINED_BYTES 112u /* of the sentence about a drain */
#define NO_SENTENCE "no memory for the sentence that says why"

struct kvf_event_node {
    kvf_event event; /* its pointers are into `storage` */
    kvf_command command;
    void *storage;
    kvf_records records;         /* likewise */
    kvf_event_node **changed_by; /* LAYERS: points here until the event is taken; NULL: it stays as it is */
    kvf_event_node *prev, *next;
};

static size_t text_bytes(const char *text) {
    return (text ? strlen(text) : 0) + 1;
}

static const char *put_text(char **at, const char *text) {
    size_t bytes = text_bytes(text);
    const char *start = *at;
    memcpy(*at, text ? text : "", bytes);
    *at += bytes;
    return start;
}

static size_t count_invalid(const kvf_ticket *ticket) {
    size_t ids = 0;
    for (uint32_t g = 0; g < ticket->group_count; g++) {
        kvf_range wanted = kvf_wanted_entries(ticket->agent->shard, g, &ticket->groups[g]);
        ids += wanted.end - wanted.begin;
    }
    return ids;
}

/* Lists all requested blocks of a failed destination, as it is unknown which of their bytes have come. */
static void put_invalid(const kvf_ticket *ticket, kvf_block_list *lists, uint32_t *ids) {
    for (uint32_t g = 0; g < ticket->group_count; g++) {
        const kvf_group_steps *group = &ticket->groups[g];
        kvf_range wanted = kvf_wanted_entries(ticket->agent->shard, g, group);
        uint32_t n = 0;
        for (uint32_t i = wanted.begin; i < wanted.end; i++)
            if (group->table.ids[i] != KVF_NO_BLOCK)
                ids[n++] = group->table.ids[i];
        lists[g] = (kvf_block_list){ids, n};
        ids += n;
    }
}

static void append(kvf_agent *agent, kvf_event_node *node) {
    DL_APPEND(agent->events, node);
    kvf_wake_set(&agent->told_wake, true);
}

void kvf_event_peer(kvf_agent *agent, kvf_event_kind kind, const char *engine, uint32_t rank,
                    kvf_status status, const char *detail) {
    kvf_log_failure(agent, "peer", NULL, engine, rank, status, detail);
    kvf_event_node *node = kvf_alloc0(1, sizeof *node);
    char *texts = kvf_alloc(text_bytes(engine) + text_bytes(detail), 1);
    if (!node || !texts) {
        kvf_free(node);
        kvf_free(texts);
        return; /* for information only: the affected requests have their own events, made beforehand */
    }
    node->storage = texts;
    node->event = (kvf_event){.kind = kind, .status = status, .rank = rank};
    node->event.engine = put_text(&texts, engine);
    node->event.detail = put_text(&texts, detail);
    append(agent, node);
}

bool kvf_event_reserve_drained(kvf_agent *agent) {
    agent->drained = kvf_alloc0(1, sizeof *agent->drained);
    char *detail = kvf_alloc(DRAINED_BYTES, 1);
    if (!agent->drained || !detail) {
        kvf_free(agent->drained);
        kvf_free(detail);
        agent->drained = NULL;
        return false;
    }
    agent->drained->storage = detail;
    return true;
}

static void write_drained(const kvf_agent *agent, kvf_event_node *node, bool resumed) {
    const uint32_t cancelled = agent->drain_cancelled;
    const char *first = resumed ? "the agent was resumed" : "";
    char *detail = node->storage;
    (void)snprintf(detail, DRAINED_BYTES, "%s", first);
    if (cancelled)
        (void)snprintf(detail, DRAINED_BYTES, "%s%s%u requests were cancelled: they had not ended in time",
                       first, resumed ? "; " : "", cancelled);
    node->event = (kvf_event){.kind = KVF_EVENT_DRAINED,
                              .status = resumed     ? KVF_E_CANCELLED
                                        : cancelled ? KVF_E_TIMEOUT
                                                    : KVF_OK,
                              .rank = KVF_NO_RANK,
                              .detail = detail,
                              .engine = ""};
}

void kvf_event_drained(kvf_agent *agent) {
    write_drained(agent, agent->drained, false);
    append(agent, agent->drained);
    agent->drained = NULL;
}

void kvf_event_resumed(kvf_agent *agent) {
    kvf_event_node *node;
    if (agent->drained)
        kvf_event_drained(agent);
    DL_FOREACH(agent->events, node) {
        if (node->event.kind == KVF_EVENT_DRAINED && node->event.status != KVF_E_CANCELLED)
            write_drained(agent, node, true);
    }
}

kvf_status kvf_event_command(kvf_agent *agent, const kvf_command *command) {
    kvf_event_node *node = kvf_alloc0(1, sizeof *node);
    const kvf_contact *peer = &command->peer;
    const size_t bytes = text_bytes(command->verb) + text_bytes(peer->engine) + text_bytes(peer->endpoint) +
                         text_bytes(peer->public_key) + text_bytes(command->asker) + command->request.size;
    char *at = kvf_alloc(bytes, 1);
    kvf_status status = node && at ? KVF_OK : kvf_nomem("an event");
    if (!status)
        status = kvf_records_add(&node->records, command->records, command->record_count, 0);
    if (status) {
        kvf_free(at);
        kvf_free(node);
        return status;
    }
    node->storage = at;
    node->command = *command;
    node->command.verb = put_text(&at, command->verb);
    node->command.asker = put_text(&at, command->asker);
    node->command.peer.engine = peer->engine ? put_text(&at, peer->engine) : NULL;
    node->command.peer.endpoint = peer->endpoint ? put_text(&at, peer->endpoint) : NULL;
    node->command.peer.public_key = peer->public_key ? put_text(&at, peer->public_key) : NULL;
    node->command.request.data = at;
    if (command->request.size > 0)
        memcpy(at, command->request.data, command->request.size);
    node->command.records = node->records.all;
    node->event = (kvf_event){.kind = KVF_EVENT_COMMAND,
                              .rank = KVF_NO_RANK,
                              .detail = "",
                              .engine = "",
                              .id = node->command.request,
                              .command = &node->command};
    append(agent, node);
    return KVF_OK;
}

bool kvf_events_reserve(kvf_ticket *ticket) {
    ticket->result_event = kvf_alloc0(1, sizeof *ticket->result_event);
    ticket->free_event = kvf_alloc0(1, sizeof *ticket->free_event);
    return ticket->result_event && ticket->free_event;
}

void kvf_event_ticket(kvf_ticket *ticket, kvf_event_kind kind, bool blocks_free) {
    kvf_agent *agent = ticket->agent;
    /* One node was reserved for the result and one for the blocks, so telling the engine needs no memory. */
    kvf_event_node **reserved = kind == KVF_EVENT_BLOCKS_FREE ? &ticket->free_event : &ticket->result_event;
    kvf_event_node *node = *reserved;
    if (!node)
        return;
    *reserved = NULL;
    bool destination = ticket->kind == KVF_REQUEST_PULL || ticket->kind == KVF_REQUEST_EXPECT;
    bool failed = kind == KVF_EVENT_FAILED;
    bool invalid = failed && destination && ticket->groups;
    size_t ids = invalid ? count_invalid(ticket) : 0;
    size_t lists = invalid ? ticket->group_count : 0;
    const char *engine = ticket->peer_engine         ? ticket->peer_engine
                         : kvf_ticket_remote(ticket) ? kvf_ticket_remote(ticket)->name
                                                     : "";
    size_t bytes = lists * sizeof(kvf_block_list) + ids * sizeof(uint32_t) + ticket->id_bytes +
                   text_bytes(engine) + text_bytes(ticket->detail);
    if (kind != KVF_EVENT_BLOCKS_FREE)
        kvf_trace_told(ticket, engine);
    if (blocks_free)
        kvf_trace_reach(ticket, KVF_MOMENT_FREED);
    node->event = (kvf_event){.kind = kind,
                              .request_kind = ticket->kind,
                              .ticket = ticket->number,
                              .status = failed ? ticket->status : KVF_OK,
                              .detail = failed ? NO_SENTENCE : "",
                              .engine = "",
                              .rank = ticket->peer_rank,
                              .blocks_free = blocks_free,
                              .bytes = ticket->bytes,
                              .runs = ticket->runs,
                              .bytes_packed = ticket->packed};
    if (destination && kind == KVF_EVENT_DONE) {
        node->records = ticket->records;
        ticket->records = (kvf_records){0};
        node->event.records = node->records.all;
        node->event.record_count = node->records.count;
    }
    char *at = node->storage = kvf_alloc(bytes, 1);
    if (at) {
        kvf_block_list *groups = (kvf_block_list *)(void *)at;
        at += lists * sizeof *groups;
        if (invalid) {
            put_invalid(ticket, groups, (uint32_t *)(void *)at);
            node->event.invalid = groups;
            node->event.group_count = ticket->group_count;
            at += ids * sizeof(uint32_t);
        }
        node->event.id = (kvf_request_id){at, ticket->id_bytes};
        if (ticket->id_bytes > 0)
            memcpy(at, ticket->id, ticket->id_bytes);
        at += ticket->id_bytes;
        node->event.engine = put_text(&at, engine);
        if (failed && ticket->detail)
            node->event.detail = put_text(&at, ticket->detail);
        /* Without the list of blocks the engine would keep invalid ones: then the request must fail. */
        node->event.recompute = failed && agent->options.policy == KVF_FAILURE_RECOMPUTE;
    }
    append(agent, node);
}

void kvf_event_layers(kvf_ticket *ticket, uint32_t layers, kvf_event_node **waits) {
    kvf_event_node *node = *waits;
    if (!node) {
        node = kvf_alloc0(1, sizeof *node);
        char *id = node ? kvf_alloc(ticket->id_bytes, 1) : NULL;
        if (!id) {
            kvf_free(node);
            return; /* the next layers, or the request's end, are told */
        }
        memcpy(id, ticket->id, ticket->id_bytes);
        node->storage = id;
        node->event = (kvf_event){.kind = KVF_EVENT_LAYERS,
                                  .request_kind = ticket->kind,
                                  .ticket = ticket->number,
                                  .id = {id, ticket->id_bytes},
                                  .rank = KVF_NO_RANK,
                                  .detail = "",
                                  .engine = ""};
        node->changed_by = waits;
        *waits = node;
        append(ticket->agent, node);
    }
    node->event.layers = layers;
}

void kvf_event_stay(kvf_event_node *waits) {
    if (waits)
        waits->changed_by = NULL;
}

static void free_node(kvf_event_node *node) {
    if (!node)
        return;
    kvf_free(node->storage);
    kvf_records_free(&node->records);
    kvf_free(node);
}

void kvf_events_free(kvf_agent *agent) {
    free_node(agent->told);
    free_node(agent->drained);
    agent->told = agent->drained = NULL;
    while (agent->events) {
        kvf_event_node *node = agent->events;
        DL_DELETE(agent->events, node);
        free_node(node);
    }
}

bool kvf_event_take(kvf_agent *agent, kvf_event *out) {
    free_node(agent->told);
    agent->told = NULL;
    kvf_event_node *node = agent->events;
    if (!node)
        return false;
    DL_DELETE(agent->events, node);
    agent->told = node;
    if (node->changed_by)
        *node->changed_by = NULL;
    node->changed_by = NULL;
    kvf_trace_noticed(agent, &node->event);
    kvf_fill_out(out, &node->event, sizeof node->event);
    if (!agent->events && !agent->stopping) /* threads that wait must see that it stops */
        kvf_wake_set(&agent->told_wake, false);
    return true;
}

/* ---- the log --------------------------------------------------------------------------------- */

static void add(struct json_object *line, const char *name, struct json_object *value) {
    if (!value || json_object_object_add(line, name, value) != 0)
        json_object_put(value);
}

void kvf_log_failure(kvf_agent *agent, const char *what, const kvf_ticket *ticket, const char *engine,
                     uint32_t rank, kvf_status status, const char *detail) {
    if (engine && detail) /* every failure comes through here */
        kvf_peers_failed(agent, engine, rank, detail);
    if (!kvf_agent_logs(agent, KVF_LOG_WARNING))
        return;
    struct json_object *line = json_object_new_object();
    if (!line)
        return;
    add(line, "failure", json_object_new_string(what));
    add(line, "engine", kvf_visible_text(agent->name ? agent->name : ""));
    add(line, "rank", json_object_new_int64(agent->rank));
    if (ticket) {
        add(line, "kind", json_object_new_string(kvf_request_kind_name(ticket->kind)));
        add(line, "ticket", json_object_new_uint64(ticket->number));
        add(line, "request", kvf_visible_id(ticket->id, ticket->id_bytes));
        add(line, "bytes", json_object_new_uint64(ticket->bytes));
        add(line, "age_ms",
            json_object_new_uint64((kvf_agent_now(agent) - ticket->created) / KVF_MILLISECOND));
    }
    if (engine)
        add(line, "peer", kvf_visible_text(engine));
    if (engine && rank != KVF_NO_RANK)
        add(line, "peer_rank", json_object_new_int64(rank));
    add(line, "status", json_object_new_string(kvf_status_name(status)));
    add(line, "detail", kvf_visible_text(detail ? detail : ""));
    const char *text =
        json_object_to_json_string_ext(line, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE);
    if (text)
        kvf_agent_log(agent, KVF_LOG_WARNING, text);
    json_object_put(line);
}
