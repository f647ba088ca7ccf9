/*
 * Peers without an agent: they speak the protocol over the simulated network, and send what the input says. Each
 * listens and connects, so that it can be a client and a server of the agents under test.
 */
#ifndef KVF_FUZZ_AGENT_PEER_H
#define KVF_FUZZ_AGENT_PEER_H

#include "agent_model.h"
#include "link/link.h"
#include "wire/wire.h"

#define PEERS 3u /* the first two have their own keys, the last has none */
#define LATEST 8u

/** What a peer knows of one agent. */
typedef struct fuzz_acquaintance {
    kvf_route route, from;                   /* to the agent; from the agent, 0: it has not sent anything */
    uint8_t session[KVF_WIRE_SESSION_BYTES]; /* of the peer as the agent's client */
    uint64_t number;                         /* of the peer's last call */
    uint64_t leases[LATEST], expectations[LATEST];
    uint32_t lease_count, expectation_count;
    uint64_t called; /* number of the agent's latest call, as the peer's client */
    kvf_call_kind call;
} fuzz_acquaintance;

typedef struct fuzz_peer {
    const char *name;
    kvf_link *link; /* NULL: the peer has hung up */
    uint32_t manners;
    uint8_t secret[KVF_WIRE_SECRET_BYTES], serves[KVF_WIRE_SESSION_BYTES];
    fuzz_acquaintance agents[AGENTS];
    kvf_wire_buffer introduction;
    kvf_wire_buffer said; /* the last message, and where it went */
    kvf_route said_to;
} fuzz_peer;

extern fuzz_peer fuzz_peers[PEERS];

const char *fuzz_peer_endpoint(uint32_t which);
void fuzz_peer_open(uint32_t which);
void fuzz_peer_hang_up(uint32_t which);
void fuzz_peer_close(uint32_t which); /**< and forget everything it knew */

/** Does one of the steps STEP_GREET to STEP_COMMAND; agent_steps.h describes the bytes. */
void fuzz_peer_step(uint32_t which, const uint8_t *step);

#endif
