/*
 * Computes the checksums of an area, some of which may be in memory of devices: these hash their own cells, and only the
 * sums come back.
 *
 *     kvf_summing *summing = NULL;
 *     kvf_summing_make(&summing);
 *     status = kvf_summing_start(summing, &area, &places);
 *     while (status == KVF_IN_PROGRESS) status = kvf_summing_poll(summing);      nothing here waits for a device
 *
 * One area at a time, and one thread at a time.
 */
#ifndef KVF_AGENT_SUMMING_H
#define KVF_AGENT_SUMMING_H

#include "agent/area.h"
#include "cuda/hasher.h"

typedef struct kvf_summing kvf_summing;

/** The most steps of an area that is started. */
#define KVF_SUMMING_STEPS KVF_HASHER_SUMS

/** Makes it, unless `*summing` is one already. Opens nothing yet on devices. @return KVF_OK, KVF_E_NOMEM */
kvf_status kvf_summing_make(kvf_summing **summing);

/** Opens a device, unless that was done. The driver may wait meanwhile until the device has done all its work.
 * @return as kvf_hasher_open() */
kvf_status kvf_summing_open(kvf_summing *summing, uint32_t device);

/** Whether an area needs a device that is not open; kvf_summing_start() would open it. */
bool kvf_summing_must_open(const kvf_summing *summing, const kvf_area *area);

/** Frees it, and waits for what a device still computes, but not for a device that hangs. NULL is accepted. */
void kvf_summing_free(kvf_summing *summing);

/**
 * Starts to add the hashes of an area to sums.
 *
 * @param area    checked; copied, with the entries of its table that are needed. Memory and shard must stay
 * @param places  copied; the sums must stay until this has ended
 * @return KVF_OK: all is done; KVF_IN_PROGRESS; KVF_E_AGAIN (a device still computes for an area that was not polled to
 *         its end: retry), KVF_E_NOMEM, KVF_E_LIMIT (cells that a device does not number), KVF_E_UNSUPPORTED (no code
 *         for the device), KVF_E_IO (of the driver; or the device has not finished for 30 s)
 */
kvf_status kvf_summing_start(kvf_summing *summing, const kvf_area *area, const kvf_sum_places *places);

/** Goes on. Whoever wants the sums no longer stops calling this. @return as kvf_summing_start(), but not KVF_E_AGAIN */
kvf_status kvf_summing_poll(kvf_summing *summing);

/** Whether a device still reads memory for an area, though nobody may want the sums any more. NULL: no. */
bool kvf_summing_is_busy(kvf_summing *summing);

/** Does all of this at once, for an area of any number of steps; the caller waits. */
kvf_status kvf_summing_wait(const kvf_area *area, const kvf_sum_places *places);

#endif
