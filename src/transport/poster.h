/*
 * Posting the runs of batches one by one to a library that completes them one by one: a bounded number in flight for
 * each link, links in turns, and long runs in pieces, so that a batch can be cancelled in the middle of a run.
 *
 *   add -> posting -> all posted -> nothing in flight: ready -> (a write: finished -> ready again) -> ended
 *
 * A fabric has one poster for each endpoint and one queue for each link, which also keeps what all such links have: the
 * peer, a watch of its beacon, and whether it is lost. One thread at a time.
 */
#ifndef KVF_TRANSPORT_POSTER_H
#define KVF_TRANSPORT_POSTER_H

#include "base/wake.h"
#include "transport/beacon.h"
#include "transport/transport.h"

typedef struct kvf_post_queue kvf_post_queue;

/** A batch on its way. */
typedef struct kvf_post_job {
    kvf_batch *batch; /**< NULL: it has ended, and the library may still complete operations of it */
    kvf_post_queue *queue;
    struct kvf_post_job *previous, *following;
    struct kvf_post_job *ready_next;
    bool ready;
    bool stopped;  /**< no more of its runs are posted */
    bool finished; /**< finish() was called */
} kvf_post_job;

/** The most bytes of one operation. */
#define KVF_PIECE_MAX (4u << 20)

/** A part of a run that is posted as one operation. The front has checked the run against the sizes of both regions. */
typedef struct kvf_piece {
    const kvf_run *run;
    uint64_t from; /**< bytes of the run before it */
    uint64_t bytes;
} kvf_piece;

typedef enum kvf_posted {
    KVF_POSTED_DONE,      /**< complete at once, or failed: kvf_batch_fail() was called */
    KVF_POSTED_UNDER_WAY, /**< kvf_post_completed() will be called */
    KVF_POSTED_FULL,      /**< nothing was posted: the library takes no more now */
} kvf_posted;

/** Posts a piece of the first run of a job that is not posted yet. */
typedef kvf_posted kvf_post_function(kvf_post_job *job, const kvf_piece *piece);

/** What differs between fabrics. */
typedef struct kvf_post_actions {
    /** Checks that the peer shows all memory that a batch names. @return KVF_OK or KVF_E_PERMISSION */
    kvf_status (*check)(const kvf_post_queue *queue, const kvf_batch *batch);

    /** Ensures that what a write, or a part of it, has posted is at the peer. Not KVF_POSTED_FULL. NULL: it is when its
     * operations are complete. */
    kvf_posted (*finish)(kvf_post_job *job);

    /** Closes the connection to a peer that is lost, and the watch of it. May lose other peers.
     * @return false: the peer lives, and the library may still access our memory for it; to be called again later */
    bool (*close)(kvf_post_queue *queue);
} kvf_post_actions;

typedef struct kvf_poster {
    const kvf_post_actions *actions;
    uint32_t max_in_flight; /**< operations of one link */
    kvf_wake *wake;         /**< of the endpoint: set when there is something to post */
    bool any_lost;          /**< peers of which the front was not told: kvf_post_tell_lost() */
    bool any_closing;       /**< of them, some whose connections could not be closed yet */
    kvf_post_queue *queues;
    kvf_post_queue *turn;              /**< posts first in the next round; NULL: the first */
    kvf_post_job *ready, **ready_last; /**< jobs with nothing in flight, through `ready_next` */
    kvf_post_job *spare;               /**< through `following` */
} kvf_poster;

/** A link's batches. The first member of the fabric's link, so that the two can be cast. */
struct kvf_post_queue {
    /* Set by the fabric, before the queue is added. */
    kvf_poster *poster;
    kvf_peer *peer;
    kvf_beacon_watch watch;
    unsigned char place[KVF_PLACE_BYTES]; /**< of the peer; zeros: not known */
    bool withholds;                       /**< some of the peer's regions are withheld */

    bool answered; /**< set by the fabric: something has reached the peer */
    bool lost;     /**< nothing more is posted, and no batch ends: kvf_post_lose() */
    bool lost_told;
    char lost_why[KVF_REASON_BYTES];

    kvf_post_queue *previous, *following;
    kvf_post_job *first, *last; /**< in order of submission */
    kvf_post_job *posting;      /**< the first job with runs not yet posted */
    uint64_t posted_bytes;      /**< of the run posting->batch->next, if it is a long one */
    uint32_t in_flight;         /**< operations, of ended batches too */
};

/** @param actions, wake  must live as long as the poster */
void kvf_poster_open(kvf_poster *poster, const kvf_post_actions *actions, uint32_t max_in_flight,
                     kvf_wake *wake);
/** All queues are removed already, and their jobs dropped. */
void kvf_poster_close(kvf_poster *poster);

/** Adds a queue to its poster's. */
void kvf_post_queue_add(kvf_post_queue *queue);
/** Takes it from the turns; its jobs stay. */
void kvf_post_queue_remove(kvf_post_queue *queue);

/* Of the fabric's table, see kvf_fabric: a link is a queue. */
kvf_status kvf_post_submit(void *link, kvf_batch *batch);
void kvf_post_cancel(void *link, kvf_batch *batch);
bool kvf_post_withholds(const void *link);
const unsigned char *kvf_post_place(const void *link);

/** An operation is complete; if it failed, the fabric has called kvf_batch_fail() before, unless the batch is NULL.
 * May be called from inside the library. */
void kvf_post_completed(kvf_post_job *job);

/** Ends the batches of jobs that are ready, or finishes their writes. */
void kvf_post_end_ready(kvf_poster *poster);

/** Forgets the batches of a queue. Jobs with operations in flight stay until the next call with none in flight. */
void kvf_post_drop(kvf_post_queue *queue);

/* ---- peers that are gone ------------------------------------------------------------------------ */

/** Notes that the peer is lost; the first reason stays. Safe inside the library: kvf_post_tell_lost() does the rest. */
void kvf_post_lose(kvf_post_queue *queue, const char *why);

/** Whether the beacon of the peer is gone; then the peer is lost. */
bool kvf_post_is_gone(kvf_post_queue *queue);

/** Closes the links whose peer is lost, and tells the front, which ends their batches. To be called in each progress(). */
void kvf_post_tell_lost(kvf_poster *poster);

/* ---- posting ------------------------------------------------------------------------------------ */

/* Each run costs a call of the library and these lines, so they are compiled into the fabric. */

/** The most bytes that are copied in one round, and the most operations that it posts. */
#define KVF_POST_BYTES_A_ROUND (4u << 20)
#define KVF_POST_OPERATIONS_A_ROUND 4096u

/** No more of the job's runs are posted: it was cancelled, or has failed. */
void kvf_post_stop(kvf_post_job *job);

/** The job's runs are posted, or it was stopped. */
void kvf_post_posted(kvf_post_job *job);

static inline void kvf_post_under_way(kvf_post_job *job) {
    job->queue->in_flight++;
    job->batch->in_flight++;
}

/** Posts the next piece of a run; adds to `*at_once` what completed at once. */
static inline kvf_posted kvf_post_piece(kvf_post_job *job, kvf_post_function *post, uint64_t *at_once) {
    kvf_post_queue *queue = job->queue;
    kvf_batch *batch = job->batch;
    const kvf_run *run = &batch->runs[batch->next];
    const uint64_t left = run->bytes - queue->posted_bytes;
    const kvf_piece piece = {run, queue->posted_bytes, kvf_min_u64(left, KVF_PIECE_MAX)};
    const kvf_posted posted = piece.bytes > 0 ? post(job, &piece) : KVF_POSTED_DONE;
    if (posted == KVF_POSTED_FULL)
        return posted;
    if (posted == KVF_POSTED_UNDER_WAY)
        kvf_post_under_way(job);
    else
        *at_once += piece.bytes;
    if (piece.bytes < left) {
        queue->posted_bytes += piece.bytes;
    } else {
        queue->posted_bytes = 0;
        batch->next++;
    }
    return posted;
}

/** Posts a link's runs; returns whether the budget ended it. */
static inline bool kvf_post_link(kvf_post_queue *queue, kvf_post_function *post, uint64_t *bytes_left,
                                 uint32_t *operations_left) {
    kvf_post_job *job;
    while ((job = queue->posting) && !queue->lost) {
        const kvf_batch *batch = job->batch;
        while (batch->next < batch->count) {
            uint64_t at_once = 0;
            if (batch->cancelled || batch->failed) {
                kvf_post_stop(job);
                break;
            }
            if (queue->in_flight >= queue->poster->max_in_flight)
                return false;
            if (*bytes_left == 0 || *operations_left == 0)
                return true;
            if (kvf_post_piece(job, post, &at_once) == KVF_POSTED_FULL)
                return false;
            *bytes_left -= kvf_min_u64(*bytes_left, at_once);
            --*operations_left;
        }
        kvf_post_posted(job);
    }
    return false;
}

/**
 * Posts at most some megabytes of runs, of all links; returns whether there is more to post at once.
 *
 * @param post  known to the compiler where this is called
 */
static inline bool kvf_post_round(kvf_poster *poster, kvf_post_function *post) {
    uint64_t bytes = KVF_POST_BYTES_A_ROUND;
    uint32_t operations = KVF_POST_OPERATIONS_A_ROUND;
    kvf_post_queue *begin = poster->turn ? poster->turn : poster->queues;
    kvf_post_queue *queue = begin;
    while (queue) {
        kvf_post_queue *following = queue->following ? queue->following : poster->queues;
        if (kvf_post_link(queue, post, &bytes, &operations)) {
            poster->turn = following;
            return true;
        }
        queue = following == begin ? NULL : following;
    }
    return false;
}

#endif
