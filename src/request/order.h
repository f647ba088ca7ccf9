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

/** Pages of one rule that follow one another in the order. */
typedef struct kvf_layer_stretch {
    uint32_t rule;
    kvf_range lanes;
    uint32_t layer; /* the first model layer of its lanes */
    uint64_t bytes;
} kvf_layer_stretch;

typedef struct kvf_layer_order {
    const kvf_request *request;
    kvf_layer_stretch *stretches;
    uint32_t stretch_count;
    uint64_t
        *whole_after; /* [model layer]: so many bytes of the order bring all of this layer and those before */
    uint32_t layer_count; /* of the model */
} kvf_layer_order;

/**
 * Makes the order of one source. O(lanes log lanes).
 *
 * @param request  over a plan that has runs; must stay unchanged while the order is used
 * @param out      receives an order owned by the caller, see kvf_layer_order_free()
 * @return KVF_OK, KVF_E_NOMEM
 */
kvf_status kvf_layer_order_make(const kvf_request *request, uint32_t source, kvf_layer_order **out);
void kvf_layer_order_free(kvf_layer_order *order); /**< NULL is accepted */

/** How many model layers are whole once the first `bytes` of the order are there; the model's if these are all. */
uint32_t kvf_layer_order_whole(const kvf_layer_order *order, uint64_t bytes);

/** A place in the runs, or nests, of an order. */
typedef struct kvf_layer_cursor {
    const kvf_layer_order *order;
    uint32_t stretch;
    kvf_run_cursor runs; /* of this stretch */
} kvf_layer_cursor;

void kvf_layer_cursor_start(kvf_layer_cursor *cursor, const kvf_layer_order *order);
/** As kvf_run_cursor_next() and kvf_run_cursor_next_nests(): fewer than fit do not mean that the end has come. */
size_t kvf_layer_cursor_next(kvf_layer_cursor *cursor, kvf_run *runs, size_t capacity);
size_t kvf_layer_cursor_next_nests(kvf_layer_cursor *cursor, kvf_run *nests, size_t capacity,
                                   kvf_run_shape *shape);

#endif
