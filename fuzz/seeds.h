/*
 * Writes seeds.
 */
#ifndef KVF_FUZZ_SEEDS_H
#define KVF_FUZZ_SEEDS_H

#include "fuzz.h"

/** Writes `folder`/`target`/`name`.hex. */
void seed_write(const char *target, const char *name, const void *data, size_t size);

/** seeds_agent.c, seeds_card.c, seeds_cuda.c, seeds_shm.c and seeds_batches.c. */
void seed_agent(void);
void seed_cards(void);
void seed_cuda(void);
void seed_shm(void);
void seed_batches(void);

#endif
