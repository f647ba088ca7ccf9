#include "port/gate.h"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <sys/socket.h>

/* An account opens once there is room for so much, so that the gate does not open for each connection. */
#define BATCH_NS (KVF_GATE_AT_ONCE_NS / 16)

/* ---- the kernel's filter --------------------------------------------------------------------- */

#define TCP_FLAGS_AT 13u
#define TCP_SYN_FLAG 2u
#define VERSION_AT (uint32_t) SKF_NET_OFF
#define SOURCE4_AT ((uint32_t)SKF_NET_OFF + 12)
#define SOURCE6_AT ((uint32_t)SKF_NET_OFF + 8)
/* Of an attempt to connect: its flags, its version, its source, and what is returned; and for each address. */
#define LINES (12u + 5u * KVF_GATE_ADDRESSES)

typedef struct program {
    struct sock_filter lines[LINES];
    uint16_t count;
} program;

static void add(program *p, struct sock_filter line) {
    p->lines[p->count++] = line;
}

static void add_load(program *p, uint16_t size, uint32_t at) {
    add(p, (struct sock_filter)BPF_STMT(BPF_LD | size | BPF_ABS, at));
}

static void add_return(program *p, uint32_t bytes) {
    add(p, (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, bytes));
}

/* Skips `otherwise` lines if the number that was loaded is another. */
static void add_is(program *p, uint32_t number, uint8_t otherwise) {
    add(p, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, otherwise));
}

static void drop_from_four(program *p, const kvf_gate *gate) {
    add_load(p, BPF_W, SOURCE4_AT);
    for (uint32_t i = 0; i < KVF_GATE_ADDRESSES; i++)
        if (gate->addresses[i].account.is_shut && !gate->addresses[i].is_six) {
            add_is(p, gate->addresses[i].words[0], 1);
            add_return(p, 0);
        }
}

static void drop_from_six(program *p, const kvf_gate *gate) {
    for (uint32_t i = 0; i < KVF_GATE_ADDRESSES; i++)
        if (gate->addresses[i].account.is_shut && gate->addresses[i].is_six) {
            add_load(p, BPF_W, SOURCE6_AT);
            add_is(p, gate->addresses[i].words[0], 3);
            add_load(p, BPF_W, SOURCE6_AT + 4);
            add_is(p, gate->addresses[i].words[1], 1);
            add_return(p, 0);
        }
}

static bool has_shut_addresses(const kvf_gate *gate) {
    for (uint32_t i = 0; i < KVF_GATE_ADDRESSES; i++)
        if (gate->addresses[i].account.is_shut)
            return true;
    return false;
}

static void drop_attempts(program *p, const kvf_gate *gate, uint32_t segment) {
    add_load(p, BPF_B, TCP_FLAGS_AT);
    add(p, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, TCP_SYN_FLAG, 1, 0));
    add_return(p, segment);
    if (gate->all.is_shut) {
        add_return(p, 0);
        return;
    }
    add_load(p, BPF_B, VERSION_AT);
    add(p, (struct sock_filter)BPF_STMT(BPF_ALU | BPF_RSH | BPF_K, 4));
    const uint16_t is_four = p->count;
    add_is(p, 4, 0);
    drop_from_four(p, gate);
    add_return(p, segment);
    p->lines[is_four].jf = (uint8_t)(p->count - is_four - 1);
    drop_from_six(p, gate);
    add_return(p, segment);
}

/*
 * Connections inherit the filter of the socket that listens. Of each segment the kernel receives only the beginning,
 * and the other end sends the rest again, ever more rarely. So a stranger that floods us costs ZeroMQ's thread little,
 * and a greeting, which is short, is not delayed.
 */
static void guard(const kvf_gate *gate) {
    const int none = 0;
    const uint32_t segment = gate->narrow ? gate->narrow : UINT32_MAX;
    const bool drops = gate->all.is_shut || has_shut_addresses(gate);
    program p = {.count = 0};
    if (gate->listener_fd < 0)
        return;
    if (drops)
        drop_attempts(&p, gate, segment);
    else
        add_return(&p, segment);
    const struct sock_fprog filter = {p.count, p.lines};
    if (drops || gate->narrow)
        (void)setsockopt(gate->listener_fd, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter);
    else
        (void)setsockopt(gate->listener_fd, SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof none);
}

void kvf_gate_open(kvf_gate *gate, int listener_fd) {
    gate->listener_fd = listener_fd;
    guard(gate);
}

/* ---- accounts -------------------------------------------------------------------------------- */

static uint64_t opens_ns(const kvf_gate_account *account) {
    return account->paid_ns - kvf_min_u64(account->paid_ns, KVF_GATE_AT_ONCE_NS - BATCH_NS);
}

static void spend(kvf_gate *gate, kvf_gate_account *account, uint64_t cost, uint64_t now) {
    account->paid_ns = kvf_min_u64(kvf_max_u64(account->paid_ns, now) + cost, now + KVF_GATE_LONGEST_NS);
    if (account->is_shut || account->paid_ns - now <= KVF_GATE_AT_ONCE_NS)
        return;
    account->is_shut = true;
    guard(gate);
}

static bool open_if_paid(kvf_gate_account *account, uint64_t now) {
    if (!account->is_shut || now < opens_ns(account))
        return false;
    account->is_shut = false;
    return true;
}

void kvf_gate_tick(kvf_gate *gate, uint64_t now) {
    bool opened = open_if_paid(&gate->all, now);
    for (uint32_t i = 0; i < KVF_GATE_ADDRESSES; i++)
        opened = open_if_paid(&gate->addresses[i].account, now) || opened;
    if (opened)
        guard(gate);
}

static uint64_t due_of(const kvf_gate_account *account) {
    return account->is_shut ? opens_ns(account) : UINT64_MAX;
}

uint64_t kvf_gate_due(const kvf_gate *gate) {
    uint64_t due = due_of(&gate->all);
    for (uint32_t i = 0; i < KVF_GATE_ADDRESSES; i++)
        due = kvf_min_u64(due, due_of(&gate->addresses[i].account));
    return due;
}

void kvf_gate_count(kvf_gate *gate, uint64_t now) {
    spend(gate, &gate->all, KVF_GATE_AT_ONCE_NS / gate->rate, now);
}

/* ---- addresses ------------------------------------------------------------------------------- */

/* False: it is no address. A peer by IPv4 may have come to a socket of IPv6. */
static bool read_address(const char *text, kvf_gate_address *out) {
    struct in6_addr six;
    uint32_t words[4];
    *out = (kvf_gate_address){.is_six = false};
    if (inet_pton(AF_INET, text, &words[0]) == 1) {
        out->words[0] = ntohl(words[0]);
        return true;
    }
    if (inet_pton(AF_INET6, text, &six) != 1)
        return false;
    memcpy(words, six.s6_addr, sizeof words);
    out->is_six = !IN6_IS_ADDR_V4MAPPED(&six);
    out->words[0] = ntohl(words[out->is_six ? 0 : 3]);
    out->words[1] = out->is_six ? ntohl(words[1]) : 0;
    return true;
}

/* NULL: all accounts are in use. */
static kvf_gate_account *account_of(kvf_gate *gate, const kvf_gate_address *address, uint64_t now) {
    kvf_gate_address *free = NULL;
    for (uint32_t i = 0; i < KVF_GATE_ADDRESSES; i++) {
        kvf_gate_address *one = &gate->addresses[i];
        if (one->account.paid_ns <= now && !one->account.is_shut)
            free = one;
        else if (one->is_six == address->is_six && memcmp(one->words, address->words, sizeof one->words) == 0)
            return &one->account;
    }
    if (free)
        *free = *address;
    return free ? &free->account : NULL;
}

void kvf_gate_charge(kvf_gate *gate, const char *address, uint64_t now) {
    kvf_gate_address from;
    kvf_gate_account *account = read_address(address, &from) ? account_of(gate, &from, now) : NULL;
    spend(gate, account ? account : &gate->all, KVF_GATE_CUT_OFF_NS, now);
}
