/*
 * A stranger that connects to agents by TCP and sends what no peer would: nothing, garbage, half of a greeting, half of
 * a message, messages of another model.
 */
#ifndef KVF_FAULTS_VANDAL_H
#define KVF_FAULTS_VANDAL_H

#include "chance.h"

#define VANDAL_MOST 32u

typedef struct vandal {
    struct {
        int fd; /* 0: none */
        uint64_t close_at;
    } lines[VANDAL_MOST];
    uint64_t attacks;
} vandal;

/** Connects to "tcp://127.0.0.1:port", sends something, and stays for a while. */
void vandal_attack(vandal *v, const char *endpoint, chance *dice);
/** Closes connections that have stayed long enough; with `now` UINT64_MAX, all of them. */
void vandal_leave(vandal *v, uint64_t now);

#endif
