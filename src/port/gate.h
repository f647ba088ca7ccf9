/*
 * The gate of a socket that listens by TCP: which attempts to connect the kernel drops, and how much it receives of a
 * stranger's segments. TCP repeats a dropped attempt after a second, and then ever more rarely.
 *
 * There is an account for all connections, and one for each address whose connections were cut off lately. Each is shut
 * while it is overdrawn. So an address that sends messages without an end does not keep others out. Of IPv6 the network
 * counts, the first 64 bits, for a host has as many addresses of it as it likes.
 */
#ifndef KVF_PORT_GATE_H
#define KVF_PORT_GATE_H

#include "base/base.h"

/** How many connections are let in a second, if the owner has no other wish; and where they are dear: with keys, where
 * shaking hands takes ZeroMQ's thread a third of a millisecond and more, and while others wait for that thread. */
#define KVF_GATE_RATE 1000u
#define KVF_GATE_DEAR_RATE 250u
/** Each costs its share of a second. So much may be spent at once. */
#define KVF_GATE_AT_ONCE_NS UINT64_C(1000000000)
/** What one that was cut off costs: it has taken much time, and comes back. */
#define KVF_GATE_CUT_OFF_NS (KVF_GATE_AT_ONCE_NS / 4)
/** An account is overdrawn by no more, so that it is open again some time after its last connection. */
#define KVF_GATE_LONGEST_NS UINT64_C(60000000000)
/** Addresses that have an account at once. If there are more, the others are charged to all. */
#define KVF_GATE_ADDRESSES 16u

typedef struct kvf_gate_account {
    uint64_t paid_ns; /* by then everything is paid for */
    bool is_shut;
} kvf_gate_account;

typedef struct kvf_gate_address {
    bool is_six;
    uint32_t words[2]; /* of IPv4 the first; of IPv6 the network */
    kvf_gate_account account;
} kvf_gate_address;

/** All zero, except for `listener_fd`, which is -1, before it is opened. */
typedef struct kvf_gate {
    int listener_fd; /* where we listen, of ZeroMQ; -1: nothing is dropped */
    uint32_t narrow; /* bytes of a TCP segment that are received from strangers, with its header; 0: all */
    uint32_t rate;   /* connections that are let in a second, and as many at once; its owner may change it */
    kvf_gate_account all;
    kvf_gate_address addresses[KVF_GATE_ADDRESSES];
} kvf_gate;

/** Begins to guard a listening socket. `rate` and `narrow` are set. */
void kvf_gate_open(kvf_gate *gate, int listener_fd);

/** A connection came in. */
void kvf_gate_count(kvf_gate *gate, uint64_t now);

/** A connection from an address, as text without its port, was cut off. */
void kvf_gate_charge(kvf_gate *gate, const char *address, uint64_t now);

/** Opens what is no longer overdrawn. */
void kvf_gate_tick(kvf_gate *gate, uint64_t now);
/** When kvf_gate_tick() must be called; UINT64_MAX: not before something happens. */
uint64_t kvf_gate_due(const kvf_gate *gate);

#endif
