/*
 * Devices of the stand-in for the CUDA driver (tests/fakes/fake_cuda.c), and memory on them. Programs that use them
 * are named in cmake/tests.cmake, so that the loader finds the stand-in.
 *
 * If the loader finds a real driver instead (scripts/check-cuda), memory is managed memory, so that tests may look at
 * it as at the stand-in's; there are no delays, and tests that need more of the stand-in say so
 * (DEVICES_ARE_STAND_INS).
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

/** The device with this number, or another if there are fewer devices. */
uint32_t devices_number(uint32_t wanted);

/** Memory of a device, which the caller frees; the host reads and writes it through devices_look(). */
CUdeviceptr device_room(uint32_t device, uint64_t bytes);
void device_room_free(CUdeviceptr address);

#define SEGMENT 65536u /* of the stand-in's memory in segments, the smallest */

/** Memory of a device of the stand-in in segments (cuda/segments.h) of 1, 2, 3, 1, 2 ... times SEGMENT, which the
 * caller frees. devices_look() finds all of it behind each other. `types`: the handle types that it is created with.
 * */
CUdeviceptr device_segments(uint32_t device, uint64_t bytes, int types);
void device_segments_free(CUdeviceptr address, uint64_t bytes);

/** Finds the stand-in if it is there. False: it is not there, or this build has no device code. */
bool devices_present(void);

/** Memory of a device that peers may not use; the test reads and writes it at `seen`. It lasts until devices_free().
 * */
kvf_memory device_memory(uint32_t device, uint64_t bytes, void **seen);

/** Frees all memory of device_memory(). */
void devices_free(void);

/** How many of the driver's objects were made and not freed; 0 with a real driver. */
size_t devices_left(void);

/** See fake_cuda.h. With a real driver only devices_look() does anything. */
void devices_delay(uint64_t ns);
void devices_hasten(void);
void devices_fail(const char *function, int result, unsigned times);
void devices_stick(int result);
void *devices_look(uint64_t address);
void devices_pooled(bool pooled);

#endif
