/*
 * Functions by which a test controls the stand-in for the CUDA driver (fake_cuda.c), beyond the driver's own. Tests
 * find them in that library by dlsym().
 */
#ifndef KVF_TESTS_FAKE_CUDA_H
#define KVF_TESTS_FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>

#define FAKE_API __attribute__((visibility("default")))

/** The next `times` calls of a function return this result and do nothing. */
FAKE_API void fake_cuda_fail(const char *function, int result, unsigned times);

/** The call by this process that comes after number - 1 others returns this result and does nothing; 0: none does. Calls
 * that take something back, and those before that, are not counted: their callers could only leave it. */
FAKE_API void fake_cuda_fail_nth(unsigned number, int result);

/** The name of the function that did so; "": none has been called so late. */
FAKE_API const char *fake_cuda_failed(void);

/** Actions that are put on a stream from now on run at least `ns` later. */
FAKE_API void fake_cuda_delay(uint64_t ns);

/** Actions that are on streams now are due at once. */
FAKE_API void fake_cuda_hasten(void);

/** Where the host can read the memory that a device has at an address; NULL: nothing is there. */
FAKE_API void *fake_cuda_look(uint64_t address);

/** The reverse of fake_cuda_look(): the device's address of memory of the host; 0: none. */
FAKE_API uint64_t fake_cuda_address(const void *found);

/** Allocations, streams, events, pinned ranges, reserved addresses, mapped segments and handles of them that were
 * made and not freed. */
FAKE_API size_t fake_cuda_left(void);

/** Whether calls wait as they may with the driver: for room on a stream, which has 16 actions then; until a stream is
 * idle where a copy is put on it of memory of the host that is not pinned; and until all streams are idle where memory
 * is freed or unmapped, where code is loaded, and where a kernel is launched that was not, or memory set for the first
 * time. While a call waits for more than room, all calls of other
 * threads wait for it. */
FAKE_API void fake_cuda_strict(int strict);

/** How many calls wait so now, for more than room. */
FAKE_API unsigned fake_cuda_waiting(void);

/* Segments are multiples of so many bytes: less than with devices, so that small memory has several. */
#define FAKE_SEGMENT 65536u

/** Writes the handle of memory that another process has as a file: a CUipcMemHandle. */
FAKE_API void fake_cuda_handle(long process, int file, uint64_t bytes, void *handle);

/** Every later call fails with `result`, as after an illegal address, until it is set to 0. */
FAKE_API void fake_cuda_stick(int result);

#endif
