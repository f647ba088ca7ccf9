/*
 * A word: a number in pinned memory of the host that the host counts up, and that streams of devices wait for.
 *
 *     kvf_cuda_word_take(device, 32, &word);            numbers from 0 to 32
 *     kvf_cuda_word_await(word, device, stream, 5);     the stream goes on once the number is 5 or more
 *     kvf_cuda_word_set(word, 5);
 *     kvf_cuda_word_give(word);                         whatever still waits for it goes on
 *
 * A stream may come to its wait long after the word was given back, and the word may have a new owner by then. So what
 * a stream compares is never set back: an owner's numbers begin where those of the owner before ended. A stream that
 * comes to its wait 2^31 numbers later would wait for its time to come again.
 *
 * Words are of the process, a page of them at a time, and stay until it ends: nothing tells when the last stream has
 * looked. All functions may be called by any thread; one thread at a time sets a word.
 */
#ifndef KVF_CUDA_WORD_H
#define KVF_CUDA_WORD_H

#include "cuda/driver.h"

#define KVF_CUDA_WORD_MOST (1u << 20)

typedef struct kvf_cuda_word kvf_cuda_word;

/**
 * Takes a word, whose number is 0.
 *
 * @param device  any device; used where a page is allocated
 * @param most    the highest number that it will have, up to KVF_CUDA_WORD_MOST
 * @return KVF_OK, KVF_E_NOMEM, and the results of kvf_cuda_enter() and kvf_cuda_status()
 */
kvf_status kvf_cuda_word_take(uint32_t device, uint32_t most, kvf_cuda_word **out);

/**
 * Makes a stream wait until the number is at least `number`, and then see what others had written to the device's memory
 * before it was set.
 *
 * @param device  the stream's
 * @param stream  NULL: the default stream
 * @return KVF_OK, KVF_E_INVALID (a graph is captured from the stream), and the results of kvf_cuda_enter() and
 *         kvf_cuda_status()
 */
kvf_status kvf_cuda_word_await(const kvf_cuda_word *word, uint32_t device, CUstream stream, uint32_t number);

/** Sets the number, which never falls. What this thread has written before is seen by whoever has waited. */
void kvf_cuda_word_set(kvf_cuda_word *word, uint32_t number);

/** Gives it back, at its highest number; NULL is accepted. */
void kvf_cuda_word_give(kvf_cuda_word *word);

#endif
