/*
 * Memory of devices for a worker of the fault harness: of the stand-in for the CUDA driver (tests/fakes/fake_cuda.c), whose
 * devices are late, and which refuses calls by a seed.
 */
#ifndef KVF_FAULTS_WORKER_DEVICES_H
#define KVF_FAULTS_WORKER_DEVICES_H

#include <kvferry/transport.h>

#include "chance.h"

/** Whether this build has code for devices, and the loader finds the stand-in; without starting it. */
bool worker_devices_there(void);

/**
 * Makes memory of a device, which stays until the process ends.
 *
 * @param seen  receives where this process reads and writes it
 * @return KVF_OK; anything else: the detail says why
 */
kvf_status worker_devices_memory(uint32_t device, uint64_t bytes, kvf_memory *out, unsigned char **seen);

/** Now and then: has the next call of some function refused, and devices late by another time. */
void worker_devices_trouble(chance *dice);
/** None from now on. */
void worker_devices_calm(void);

#endif
