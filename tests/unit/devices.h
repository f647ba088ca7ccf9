/*
 * Devices of the stand-in for the CUDA driver (tests/fakes/fake_cuda.c), and memory on them. Programs that use them are
 * named in cmake/tests.cmake, so that the loader finds the stand-in.
 *
 * Where the loader finds a real driver instead (scripts/check-cuda), memory is managed by it, so that tests may look at it
 * as at the stand-in's; delays are none, and tests that need more of the stand-in say so (DEVICES_ARE_STAND_INS).
 */
#ifndef DEVICES_H
#define DEVICES_H

#include <kvferry/transport.h>

#include "cuda/driver.h"

/** Finds the stand-in, or a driver; before all else. Ends the program where there is neither. */
void devices_open(void);

/** Whether they are real ones. */
bool devices_are_real(void);

/** At the beginning of a test: what it does, no real device can be made to do. */
#define DEVICES_ARE_STAND_INS()                                                                              \
    do {                                                                                                     \
        if (devices_are_real())                                                                              \
            skip();                                                                                          \
    } while (0)

/** A device with this number, or, where there are fewer, another one. */
uint32_t devices_number(uint32_t wanted);

/** Memory of a device, which the caller frees; the host looks at it by devices_look(). */
CUdeviceptr device_room(uint32_t device, uint64_t bytes);
void device_room_free(CUdeviceptr address);

/** Finds it where it is. False: it is not, or this build has no device code. */
bool devices_present(void);

/** Memory of a device, withheld from peers; `seen`: where the test reads and writes it. Stays until devices_free(). */
kvf_memory device_memory(uint32_t device, uint64_t bytes, void **seen);

/** Frees all memory of device_memory(). */
void devices_free(void);

/** What of the driver's was made and is not freed; 0 where it is real. */
size_t devices_left(void);

/** See fake_cuda.h; of a real driver none but the last does anything. */
void devices_delay(uint64_t ns);
void devices_hasten(void);
void devices_fail(const char *function, int result, unsigned times);
void devices_stick(int result);
void *devices_look(uint64_t address);
void devices_vmm(bool vmm);

#endif
