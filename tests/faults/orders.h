/*
 * Messages between the driver of the fault harness and its workers, over a SOCK_SEQPACKET pair: the driver sends
 * orders, a worker sends reports, one message each.
 */
#ifndef KVF_FAULTS_ORDERS_H
#define KVF_FAULTS_ORDERS_H

#include "content.h"

#define ORDERS_ENDPOINT 128u
#define ORDERS_CARD 6000u /* bytes of an introduction, at most */
#define ORDERS_WORDS 400u

typedef enum order_kind {
    ORDER_INTRODUCE = 1, /* a sibling */
    ORDER_START,         /* a request */
    ORDER_READY,         /* part of a push is ready, or a pull's destination */
    ORDER_CANCEL,
    ORDER_CHECK,  /* check the bytes of a request again */
    ORDER_REFILL, /* compute a destination that failed */
    ORDER_FORGET, /* its blocks may go to another request from now on */
    ORDER_SLOW,   /* sleep between rounds for a while */
    ORDER_CALM,   /* no more lost messages and failed operations */
    ORDER_LOOK,   /* report statistics, by REPORT_LOOK */
    ORDER_QUIT,
} order_kind;

typedef struct order {
    order_kind kind;
    uint32_t handle; /* names the request, the same on all ranks */
    union {
        struct {
            char bytes[ORDERS_CARD];
            uint32_t size;
        } introduction;
        struct {
            kvf_request_kind kind;
            uint64_t id, seed, before; /* before: of the bytes in the blocks beforehand */
            uint64_t deadline_ns;
            uint32_t consumers, group_count;
            bool filled; /* a hold of blocks that were received */
            bool later;  /* a pull that gets its destination later: ORDER_READY */
            content_table groups[CONTENT_GROUPS];
            char engine[8], endpoint[ORDERS_ENDPOINT], public_key[41];
        } start;
        struct {
            uint32_t begin, end, layers_before, layers; /* UINT32_MAX: all */
            bool last;
        } ready;
        struct {
            uint32_t total_ms, sleep_us;
        } slow;
        uint64_t seed; /* REFILL */
    };
} order;

typedef enum report_kind {
    REPORT_OPEN = 1, /* the agent is open */
    REPORT_EVENT,
    REPORT_CHECKED,
    REPORT_LOOK,
    REPORT_WRONG, /* something that must not happen; see `words` */
    REPORT_STORY, /* what may explain it */
} report_kind;

typedef struct report {
    report_kind kind;
    uint32_t handle;
    union {
        struct {
            char bytes[ORDERS_CARD];
            uint32_t size;
            char endpoint[ORDERS_ENDPOINT], public_key[41], secret_key[41];
        } open;
        struct {
            kvf_event_kind kind;
            kvf_request_kind request_kind;
            kvf_status status;
            bool blocks_free;
            uint64_t bytes;
        } event;
        struct {
            kvf_agent_stats stats;
            uint64_t resident_bytes, tampered[4], fabric_faults;
            uint32_t descriptors;
        } look;
    };
    char words[ORDERS_WORDS];
} report;

#endif
