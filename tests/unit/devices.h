/*
 * Devices of the stand-in for the CUDA driver (tests/fakes/fake_cuda.c), and memory on them. Programs that use them are
 * named in cmake/tests.cmake, so that the loader finds the stand-in.
 */
#ifndef DEVICES_H
#define DEVICES_H

#include <kvferry/transport.h>

#include "cuda/driver.h"

/** Finds the stand-in; before all else. */
void devices_open(void);

/** Finds it where it is. False: it is not, or this build has no device code. */
bool devices_present(void);

/** Memory of a device, kept from peers; `seen`: where the test reads and writes it. Stays until devices_free(). */
kvf_memory device_memory(uint32_t device, uint64_t bytes, void **seen);

/** Frees all memory of device_memory(). */
void devices_free(void);

/** What of the driver's was made and is not freed. */
size_t devices_left(void);

/** See fake_cuda.h. */
void devices_delay(uint64_t ns);
void devices_fail(const char *function, int result, unsigned times);
void devices_stick(int result);
void *devices_look(uint64_t address);
void devices_vmm(bool vmm);

#endif
