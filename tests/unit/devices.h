/*
 * Devices of the stand-in for the CUDA driver (tests/fakes/fake_cuda.c), and memory on them. Programs that use them
 * are named in cmake/tests.cmake, so that the loader finds the stand-in.
 *
 * If the loader finds a real driver instead (scripts/check-cuda), the host cannot look at the memory: tests look at a
 * copy, which devices_get() and devices_put() bring from the device and back. Streams are late only by
 * devices_hold_up(), and tests that need more of the stand-in say so (DEVICES_ARE_STAND_INS). With the environment
 * variable KVF_TEST_DEVICES_AS_REAL the stand-in is used as a real driver would be, to test on a machine without devices
 * what tests do with them.
 */
#ifndef DEVICES_H
#define DEVICES_H

#include <kvferry/transport.h>

#include "cuda/driver.h"

/** Finds the stand-in or a driver; call it before everything else. Ends the program if there is neither. */
void devices_open(void);

/** Whether the devices are real. */
bool devices_are_real(void);

/** Skips a test that no real device can be made to run; stands at the test's beginning. */
#define DEVICES_ARE_STAND_INS()                                                                              \
    do {                                                                                                     \
        if (devices_are_real())                                                                              \
            skip();                                                                                          \
    } while (0)

/** The device with this number, or another if there are fewer devices; the first if the two are real, and do not reach
 * each other's memory, as over PCIe in many machines. */
uint32_t devices_number(uint32_t wanted);

/** Skips a test that would be like others on a machine with one device, or whose devices do not reach each other; stands
 * at the test's beginning. */
#define DEVICES_ARE_SEVERAL()                                                                                \
    do {                                                                                                     \
        if (devices_number(1) == 0)                                                                          \
            skip();                                                                                          \
    } while (0)

/** Memory of a device, zeroed, which the caller frees; the host reads and writes it through devices_look(). */
CUdeviceptr device_room(uint32_t device, uint64_t bytes);
void device_room_free(CUdeviceptr address);

/** Lets a test look at memory of a device that it has allocated in another way, until device_hide(), which
 * returns the device. devices_get() brings what is there already. */
void device_show(uint32_t device, CUdeviceptr address, uint64_t bytes);
uint32_t device_hide(CUdeviceptr address);

/** Brings the allocation that is seen at `seen`, all of it, from the device to the copy, or back; waits for no stream.
 * Does nothing with the stand-in, where the host sees the memory itself, nor with other memory of the host. Nobody else
 * may write meanwhile what this writes. */
void devices_get(const void *seen);
void devices_put(const void *seen);

#define SEGMENT 65536u /* of the stand-in's memory in segments, the smallest */

/** How many bytes the smallest segment of the devices here has: SEGMENT, or more of real ones. */
uint64_t devices_segment(void);

/** Memory of a device in segments (cuda/segments.h) of 1, 2, 3, 1, 2 ... times devices_segment(), zeroed, which the
 * caller frees. devices_look() finds all of it behind each other. `types`: the handle types that it is created with.
 * */
CUdeviceptr device_segments(uint32_t device, uint64_t bytes, int types);
void device_segments_free(CUdeviceptr address, uint64_t bytes);

/** Finds the stand-in if it is there. False: it is not there, or this build has no device code. */
bool devices_present(void);

/** Memory of a device that peers may not use, zeroed; the test reads and writes it at `seen`. It lasts until
 * devices_free(). */
kvf_memory device_memory(uint32_t device, uint64_t bytes, void **seen);

/** The same of the first, and of the second device: places for the memory of a rank. */
kvf_memory device_memory_first(uint64_t bytes, void **seen);
kvf_memory device_memory_second(uint64_t bytes, void **seen);

/** Frees all memory of device_memory(). */
void devices_free(void);

/** How many of the driver's objects were made and not freed; 0 with a real driver. */
size_t devices_left(void);

/** Holds up what is put on a stream from now on, until devices_hasten(); with the stand-in, what is put on any stream,
 * until devices_delay(0). The stream's device must be entered. Meanwhile nothing may be freed on a real device: the
 * driver would wait for the stream. */
void devices_hold_up(const kvf_cuda *cuda, CUstream stream);

/** Begins to capture a graph from a stream, as torch does: until devices_capture_end(), a call of any thread that does
 * not relax may spoil it. The stream's device must be entered. */
void devices_capture(CUstream stream);

/** Ends the capture; returns the driver's result, 0 if nothing has spoilt it. */
int devices_capture_end(CUstream stream);

/** Calls of the driver by this process that succeeded: kernels launched, the blocks of threads of the latest one, and
 * copies put on streams by cuMemcpyAsync(). */
uint32_t devices_launches(void);
uint32_t devices_grid(void);
uint32_t devices_copies(void);

/** The next `times` calls of a function of the driver return this result and do nothing; UINT32_MAX: until
 * devices_fail("", 0, 0). Only one function at a time is refused, and none is called meanwhile by another thread. */
void devices_fail(const char *function, int result, unsigned times);

/** With the stand-in only, see fake_cuda.h. */
void devices_fail_nth(unsigned number, int result);
const char *devices_failed(void);

/** Of the next copies by cuMemcpyAsync(), so many are put on streams; the one after them returns this result, and is
 * not. */
void devices_fail_copy(uint32_t good, int result);

/** See fake_cuda.h. With a real driver only two do anything: devices_hasten(), after devices_hold_up(), and
 * devices_look(), for memory of the functions above. */
void devices_delay(uint64_t ns);
void devices_hasten(void);
void devices_stick(int result);
void *devices_look(uint64_t address);
void devices_strict(bool strict);
uint32_t devices_waiting(void);

#endif
