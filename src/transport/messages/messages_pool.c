/*
 * The memory that messages are sent from. It is bounded, and used again: the kernel would have to find, zero and take
 * back fresh memory for each message, which costs more than the copy.
 *
 * A slot comes back on ZeroMQ's thread, which puts it on a stack that our side empties as a whole.
 */
#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "transport/messages/messages.h"

#define LINE 64u

kvf_status kvf_messages_pool_open(kvf_messages_pool *pool) {
    pool->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return pool->fd < 0 ? kvf_fail(KVF_E_IO, "eventfd: %s", strerror(errno)) : KVF_OK;
}

static kvf_messages_slot *make_slot(kvf_messages_pool *pool) {
    kvf_messages_slot *slot =
        pool->made < MESSAGES_SLOTS_MAX ? kvf_alloc(1, sizeof *slot + LINE + MESSAGES_BYTES_MAX) : NULL;
    if (!slot)
        return NULL;
    uintptr_t memory = ((uintptr_t)(slot + 1) + LINE - 1) / LINE * LINE;
    *slot = (kvf_messages_slot){.pool = pool};
    slot->memory = (unsigned char *)slot + (memory - (uintptr_t)slot);
    pool->made++;
    return slot;
}

kvf_messages_slot *kvf_messages_pool_take(kvf_messages_pool *pool, uint32_t held) {
    bool scarce = pool->taken >= MESSAGES_SLOTS_MAX / 2;
    if (held >= (scarce ? MESSAGES_PEER_SLOTS_LEAST : MESSAGES_PEER_SLOTS))
        return NULL;
    kvf_messages_slot *slot = pool->free;
    if (slot)
        pool->free = slot->following;
    else
        slot = make_slot(pool);
    pool->taken += slot != NULL;
    return slot;
}

void kvf_messages_pool_want(kvf_messages_pool *pool) {
    uint64_t one = 1;
    atomic_store(&pool->wanted, true);
    /* A slot that came back just before has not seen `wanted`. */
    if (atomic_load(&pool->returned) && atomic_exchange(&pool->wanted, false))
        (void)!write(pool->fd, &one, sizeof one);
}

void kvf_messages_pool_give(kvf_messages_slot *slot) {
    KVF_ASSERT(slot->pool->taken > 0);
    slot->pool->taken--;
    slot->following = slot->pool->free;
    slot->pool->free = slot;
}

kvf_messages_slot *kvf_messages_pool_returned(kvf_messages_pool *pool) {
    return atomic_load(&pool->returned) ? atomic_exchange(&pool->returned, NULL) : NULL;
}

/* Runs mostly on ZeroMQ's thread. */
static void come_back(void *data, void *hint) {
    (void)data;
    kvf_messages_slot *slot = hint;
    kvf_messages_pool *pool = slot->pool;
    uint64_t one = 1;
    kvf_messages_slot *before = atomic_load(&pool->returned);
    do
        slot->following = before;
    while (!atomic_compare_exchange_weak(&pool->returned, &before, slot));
    if (atomic_exchange(&pool->wanted, false))
        (void)!write(pool->fd, &one, sizeof one);
}

kvf_status kvf_messages_pool_message(kvf_messages_slot *slot, size_t begin, size_t bytes, zmq_msg_t *out) {
    return zmq_msg_init_data(out, slot->memory + begin, bytes, come_back, slot) ? kvf_nomem("a message")
                                                                                : KVF_OK;
}

void kvf_messages_pool_close(kvf_messages_pool *pool) {
    kvf_messages_slot *lists[2] = {pool->free, atomic_load(&pool->returned)};
    for (int i = 0; i < 2; i++)
        for (kvf_messages_slot *slot = lists[i], *next; slot; slot = next) {
            next = slot->following;
            kvf_free(slot);
        }
    kvf_fd_close(&pool->fd);
}
