/*
 * Agents under test, and what must be true of them whatever peers say: a book of tickets and blocks that is kept
 * beside theirs, from what the engine asked for and was told.
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
    uint32_t blocks[GROUPS]; /* sets of them: what it may read or write */
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
void fuzz_agent_shut(uint32_t which); /**< in the middle of whatever it does */

/** Books a request that the agent took. */
fuzz_ticket *fuzz_book(fuzz_agent *a, uint64_t number, kvf_request_kind kind, const char *id);
/** The n-th, modulo how many there are, of those of a kind (or of any: KVF_REQUEST_NONE) that were not freed. */
fuzz_ticket *fuzz_nth_ticket(fuzz_agent *a, kvf_request_kind kind, uint32_t n);

/** Takes all events, and compares. */
void fuzz_agent_check(fuzz_agent *a);
/** Whether any ticket is left. */
bool fuzz_agent_has_tickets(const fuzz_agent *a);
/** Nothing is left: no request, no lease, no claimed block, and nothing kept for peers. */
void fuzz_agent_is_free(const fuzz_agent *a);

#endif
