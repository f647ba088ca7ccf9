/*
 * What a test tells the stand-in for the CUDA driver, beyond the driver's own functions: found by dlsym() in the library
 * that stands in (fake_cuda.c).
 */
#ifndef KVF_TESTS_FAKE_CUDA_H
#define KVF_TESTS_FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>

#define FAKE_API __attribute__((visibility("default")))

/** The next `times` calls of a function give this result and do nothing. */
FAKE_API void fake_cuda_fail(const char *function, int result, unsigned times);

/** Everything that is put on a stream from now on is done so much later at the earliest. */
FAKE_API void fake_cuda_delay(uint64_t ns);

/** What is on streams now is late no more. */
FAKE_API void fake_cuda_hasten(void);

/** Where the host finds what a device has at an address; NULL: nothing is there. */
FAKE_API void *fake_cuda_look(uint64_t address);

/** The address that a device knows what fake_cuda_look() gave by; 0: by none. */
FAKE_API uint64_t fake_cuda_address(const void *found);

/** Allocations, streams, events and pinned ranges that were made and not freed. */
FAKE_API size_t fake_cuda_left(void);

/** Whether what is allocated from now on is as of cuMemCreate(): no handle is given for it. */
FAKE_API void fake_cuda_vmm(int vmm);

/** Every later call fails as after an illegal address, until it is set to 0. */
FAKE_API void fake_cuda_stick(int result);

#endif
