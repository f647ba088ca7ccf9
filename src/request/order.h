/*
 * The runs of a request from one source, layer by layer: in an order in which the first model layers are whole as early
 * as possible, and with the bytes after which each is.
 *
 * The rules of a plan go one after the other, each through all layers of its group. So without an order the first layer
 * is whole only when the last rule begins. An order visits the pages of all rules by their first layer instead. Lanes
 * that share a page on both sides stay together: what they bring arrives at once.
 *
 *     rules      groups A and B, of which A has layers 0 and 2, and B layers 1 and 3
 *     plain      A0 A2 B1 B3
 *     an order   A0 B1 A2 B3        1, 2, 3 and 4 layers are whole after these bytes
 */
#ifndef KVF_REQUEST_ORDER_H
#define KVF_REQUEST_ORDER_H

#include "request/request.h"

typedef struct kvf_layer_order {
    /** The same request over a plan of one source, 0, whose rules are stretches of the given plan's, in the order:
     * cursors over it give the runs, or nests. */
    kvf_request request;
    kvf_plan plan;
    kvf_range rules; /* of the source: all */
    uint64_t
        *whole_after; /* [model layer]: so many bytes of the order bring all of this layer and those before */
    uint32_t layer_count; /* of the model */
} kvf_layer_order;

/**
 * Makes the order of one source. O(lanes log lanes).
 *
 * @param request  over a plan that has runs; both must stay unchanged while the order is used
 * @param out      receives an order owned by the caller, see kvf_layer_order_free()
 * @return KVF_OK, KVF_E_NOMEM
 */
kvf_status kvf_layer_order_make(const kvf_request *request, uint32_t source, kvf_layer_order **out);
void kvf_layer_order_free(kvf_layer_order *order); /**< NULL is accepted */

/** How many model layers are whole once the first `bytes` of the order are there; the model's if these are all. */
uint32_t kvf_layer_order_whole(const kvf_layer_order *order, uint64_t bytes);

#endif
