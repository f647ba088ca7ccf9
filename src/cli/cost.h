/*
 * What moving costs on each transport, as the library assumes it: stated with every prediction.
 */
#ifndef KVFERRY_CLI_COST_H
#define KVFERRY_CLI_COST_H

#include <kvferry/plan.h>

typedef struct transport_cost {
    const char *transport;
    kvf_cost_model cost;
} transport_cost;

/** The assumed cost of a transport that an option may name; "auto" stands for peers on one host. */
transport_cost cost_of(const char *transport);

#endif
