#include "link/link_post.h"

#include <errno.h>
#include <stdlib.h>

/* The memory that a message takes besides its bytes. */
#define MESSAGE_BYTES 256u
#define FIRST_SWEEP 64u
#define LOOK_NS (100 * KVF_MILLISECOND)

/* What is in front of the bytes of a message. */
typedef struct posted {
    kvf_post *post;
    kvf_post_box *box;
    uint64_t bytes; /* that it counts for */
} posted;

/* Called by ZeroMQ, in a thread of its own or in ours. The box may be freed as soon as it is empty. */
static void leave(void *data, void *hint) {
    posted *message = hint;
    kvf_post_box *box = message->box;
    const uint64_t bytes = message->bytes;
    (void)data;
    atomic_fetch_sub(&message->post->bytes, bytes);
    free(message);
    if (atomic_load(&box->bytes) == bytes) /* what is added meanwhile was sent after all had left */
        atomic_store(&box->was_empty, true);
    atomic_fetch_sub(&box->bytes, bytes);
}

static void free_empty(kvf_post *post) {
    kvf_post_box *box, *next;
    HASH_ITER(hh, post->boxes, box, next) {
        if (atomic_load(&box->bytes) > 0)
            continue;
        HASH_DEL(post->boxes, box); /* NOLINT(clang-analyzer-core.NullDereference): it is in the table */
        kvf_free(box);
    }
}

static kvf_post_box *box_of(kvf_post *post, kvf_route route) {
    kvf_post_box *box = NULL;
    HASH_FIND(hh, post->boxes, &route, sizeof route, box);
    if (box)
        return box;
    if (HASH_COUNT(post->boxes) >= post->sweep_at) {
        free_empty(post);
        post->sweep_at = 2 * HASH_COUNT(post->boxes) + FIRST_SWEEP;
    }
    box = kvf_alloc0(1, sizeof *box);
    if (!box)
        return NULL;
    box->route = route;
    HASH_ADD(hh, post->boxes, route, sizeof box->route, box);
    if (box->hh.tbl)
        return box;
    kvf_free(box);
    return NULL;
}

static bool has_room(kvf_post *post, kvf_post_box *box, uint64_t bytes) {
    const uint64_t room = KVF_POST_BYTES - kvf_min_u64(atomic_load(&post->bytes), KVF_POST_BYTES);
    return kvf_is_fair(atomic_load(&box->bytes), bytes, room);
}

int kvf_post_write(kvf_post *post, kvf_route route, const void *data, size_t bytes, zmq_msg_t *out) {
    const uint64_t counted = bytes + MESSAGE_BYTES;
    kvf_post_box *box = box_of(post, route);
    if (!box)
        return ENOMEM;
    if (!has_room(post, box, counted)) {
        post->dropped++;
        return ENOBUFS;
    }
    /* From the C library, as ZeroMQ's own messages: ZeroMQ frees it. */
    posted *message = malloc(sizeof *message + bytes);
    if (!message)
        return ENOMEM;
    *message = (posted){post, box, counted};
    if (bytes > 0)
        memcpy(message + 1, data, bytes);
    if (zmq_msg_init_data(out, message + 1, bytes, leave, message)) {
        free(message);
        return ENOMEM;
    }
    atomic_fetch_add(&box->bytes, counted);
    atomic_fetch_add(&post->bytes, counted);
    return 0;
}

kvf_route kvf_post_stuck(kvf_post *post, uint64_t now) {
    kvf_post_box *box;
    kvf_route stuck = 0;
    uint64_t most = 0;
    if (now < post->look_ns)
        return 0;
    post->look_ns = now + LOOK_NS;
    for (box = post->boxes; box; box = box->hh.next) {
        const uint64_t bytes = atomic_load(&box->bytes);
        if (atomic_exchange(&box->was_empty, false) || !box->stuck_ns || bytes == 0)
            box->stuck_ns = now;
        if (now - box->stuck_ns >= KVF_POST_STUCK_NS && bytes > most) {
            most = bytes;
            stuck = box->route;
        }
    }
    return stuck;
}

void kvf_post_free(kvf_post *post) {
    kvf_post_box *box, *next;
    KVF_ASSERT(atomic_load(&post->bytes) == 0);
    HASH_ITER(hh, post->boxes, box, next) {
        HASH_DEL(post->boxes, box);
        kvf_free(box);
    }
}
