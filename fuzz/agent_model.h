/*
 * Agents under test, and a model of what must be true of them whatever peers send: tickets and blocks, from the
 * engine's calls and the agents' events.
 */
#ifndef KVF_FUZZ_AGENT_MODEL_H
#define KVF_FUZZ_AGENT_MODEL_H

#include <kvferry/agent.h>

#include "fuzz.h"

#define AGENTS 2u
#define GROUPS 2u /* attention, and states */
#define BLOCKS 12u
#define BLOCK_TOKENS 16u
#define TICKETS_MAX 96u
#define FUZZ_BUDGET (192u << 10)
#define FUZZ_SECOND 1000000000ull

typedef struct fuzz_ticket {
    uint64_t number;
    kvf_request_kind kind;
    char id[2];
    uint32_t blocks[GROUPS]; /* sets of blocks that it may read or write */
    bool told, failed, freed;
} fuzz_ticket;

typedef struct fuzz_agent {
    kvf_agent *agent;
    const char *name, *endpoint;
    void *memory[8];
    uint64_t bytes[8];
    uint32_t region_count;
    fuzz_ticket tickets[TICKETS_MAX];
    uint32_t ticket_count;
} fuzz_agent;

extern fuzz_agent fuzz_agents[AGENTS];

void fuzz_agent_open(uint32_t which);
void fuzz_agent_shut(uint32_t which); /**< whatever it is doing */

/** Records a request that the agent accepted. */
fuzz_ticket *fuzz_book(fuzz_agent *a, uint64_t number, kvf_request_kind kind, const char *id);
/** The n-th (modulo their number) of the tickets of a kind that are not freed; KVF_REQUEST_NONE: of any kind. */
fuzz_ticket *fuzz_nth_ticket(fuzz_agent *a, kvf_request_kind kind, uint32_t n);

/** Takes all events, and compares the agent with the model. */
void fuzz_agent_check(fuzz_agent *a);
/** Whether any ticket is left. */
bool fuzz_agent_has_tickets(const fuzz_agent *a);
/** Checks that nothing is left: no request, no lease, no claimed block, and no memory kept for peers. */
void fuzz_agent_is_free(const fuzz_agent *a);

#endif
