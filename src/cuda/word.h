/*
 * A word: a number in pinned memory of the host that the host counts up, and that streams of devices wait for.
 *
 *     kvf_cuda_word_take(32, 60 * KVF_SECOND, &word);        numbers from 0 to 32, for a minute at most
 *     kvf_cuda_mark mark = kvf_cuda_word_mark(word, 5);
 *     kvf_cuda_mark_await(&mark, device, stream);            the stream goes on once the number is 5 or more
 *     kvf_cuda_word_set(word, 5);
 *     kvf_cuda_word_give(word);                              whatever still waits for it goes on
 *
 * A stream may come to its wait long after the word was given back, and the word may have a new owner by then. So what
 * a stream compares is never set back: an owner's numbers begin where those of the owner before ended. A stream that
 * comes to its wait 2^31 numbers later would wait for its time to come again.
 *
 * Words are of the process, a page of them at a time, and stay until it ends: nothing tells when the last stream has
 * looked.
 *
 * The driver may make its caller wait for streams: for room on one, or until a device has done all its work. So who sets
 * words must not wait for the driver, nor for a lock of somebody who does. kvf_cuda_words_add() and
 * kvf_cuda_mark_await() call the driver, and are called without locks; what is called by whoever sets words does not.
 * Other calls of the driver may wait for a whole device, such as those that unmap memory: their callers put them off while
 * kvf_cuda_words_awaited().
 *
 * Even so, who sets words may not come to it: drivers keep a lock of the context while some calls of the engine wait for
 * a stream, and every other call of the process waits for that lock. Then nobody would ever set the word. So each has a
 * time, after which the guard, a thread that calls no driver, lets its streams go; who gives it back is told.
 *
 * All functions may be called by any thread; one thread at a time uses a word.
 */
#ifndef KVF_CUDA_WORD_H
#define KVF_CUDA_WORD_H

#include "cuda/driver.h"

#define KVF_CUDA_WORD_MOST (1u << 20)

typedef struct kvf_cuda_word kvf_cuda_word;

/** The number that a stream waits for. A mark stays valid when its word is given back: the stream then goes on. */
typedef struct kvf_cuda_mark {
    const uint32_t *shown; /**< NULL: nothing to wait for */
    uint32_t value;
} kvf_cuda_mark;

/**
 * Adds a page of words. Called without locks: the driver may wait for streams.
 *
 * @param device  any device
 * @return KVF_OK, KVF_E_NOMEM, and the results of kvf_cuda_enter() and kvf_cuda_status()
 */
kvf_status kvf_cuda_words_add(uint32_t device);

/**
 * Takes a word, whose number is 0.
 *
 * @param most     the highest number that it will have, up to KVF_CUDA_WORD_MOST
 * @param wait_ns  when this time is over, the guard lets all its streams go; UINT64_MAX: never
 * @return KVF_OK; KVF_E_AGAIN: none is left, kvf_cuda_words_add() makes more; the results of kvf_cuda_find()
 */
kvf_status kvf_cuda_word_take(uint32_t most, uint64_t wait_ns, kvf_cuda_word **out);

/** Says that a stream is going to wait until the number is at least `number`; gives what it waits for. */
kvf_cuda_mark kvf_cuda_word_mark(kvf_cuda_word *word, uint32_t number);

/**
 * Makes a stream wait for a mark, and then see what others had written to the device's memory before the number was
 * set. Called without locks: if the stream has no room left, the driver waits until it has.
 *
 * @param device  the stream's
 * @param stream  NULL: the default stream
 * @return KVF_OK, KVF_E_INVALID (a graph is captured from the stream), and the results of kvf_cuda_enter() and
 *         kvf_cuda_status()
 */
kvf_status kvf_cuda_mark_await(const kvf_cuda_mark *mark, uint32_t device, CUstream stream);

/** Sets the number, which never falls. What this thread has written before is seen by whoever has waited. Does nothing
 * once the guard has let the streams go. */
void kvf_cuda_word_set(kvf_cuda_word *word, uint32_t number);

/** Gives it back, at its highest number; NULL is accepted. False: the guard had let its streams go before. */
bool kvf_cuda_word_give(kvf_cuda_word *word);

/** Whether a stream of this process may be waiting for a word. */
bool kvf_cuda_words_awaited(void);

/**
 * Starts the guard of all words of the process; each success needs its kvf_cuda_guard_stop(). Without one, no time ends.
 *
 * @return KVF_OK; KVF_E_IO: there can be no further thread
 */
kvf_status kvf_cuda_guard_start(void);

/** Ends what kvf_cuda_guard_start() has begun. Who calls it has given its words back. */
void kvf_cuda_guard_stop(void);

#endif
