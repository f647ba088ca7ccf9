/*
 * Lists of structs with the members `previous` and `following`, held by a pointer to the first; and queues, which have
 * a pointer to the last as well.
 */
#ifndef KVF_LIST_H
#define KVF_LIST_H

#include "base/base.h"

/** Puts `node`, which must be in no list, before the others. */
#define KVF_LIST_ADD(first, node)                                                                            \
    do {                                                                                                     \
        (node)->previous = NULL;                                                                             \
        (node)->following = (first);                                                                         \
        if (first)                                                                                           \
            (first)->previous = (node);                                                                      \
        (first) = (node);                                                                                    \
    } while (0)

#define KVF_LIST_REMOVE(first, node)                                                                         \
    do {                                                                                                     \
        KVF_ASSERT((node)->previous ? (node)->previous->following == (node) : (first) == (node));            \
        if ((node)->previous)                                                                                \
            (node)->previous->following = (node)->following;                                                 \
        else                                                                                                 \
            (first) = (node)->following;                                                                     \
        if ((node)->following)                                                                               \
            (node)->following->previous = (node)->previous;                                                  \
    } while (0)

/** Puts `node`, which must be in no queue, behind the others. */
#define KVF_QUEUE_ADD(first, last, node)                                                                     \
    do {                                                                                                     \
        (node)->previous = (last);                                                                           \
        (node)->following = NULL;                                                                            \
        if (last)                                                                                            \
            (last)->following = (node);                                                                      \
        else                                                                                                 \
            (first) = (node);                                                                                \
        (last) = (node);                                                                                     \
    } while (0)

#define KVF_QUEUE_REMOVE(first, last, node)                                                                  \
    do {                                                                                                     \
        if (!(node)->following)                                                                              \
            (last) = (node)->previous;                                                                       \
        KVF_LIST_REMOVE(first, node);                                                                        \
    } while (0)

#endif
