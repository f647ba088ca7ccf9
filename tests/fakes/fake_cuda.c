/*
 * A stand-in for the CUDA driver: a library named libcuda.so.1, for machines without devices.
 *
 * "Device" memory is a file in memory, mapped twice: without any access rights at the address that callers are given,
 * so that a host that dereferences it crashes, and at another address for this library's own use. Other processes map
 * it by handles, or segment by segment by descriptors. A stream is a list of actions. Due actions run when a caller
 * queries or waits, and a delay can postpone them: a copy reads host memory when it runs, not when it is put on a
 * stream, so a buffer that is reused too early spoils bytes. Kernels are the library's own, run thread by thread. A
 * capture of a graph keeps nothing of what is put on its stream; it only sees what must not happen meanwhile.
 *
 * Environment variables: FAKE_CUDA_DEVICES is the number of devices of the machine (2), of which a process sees those
 * in CUDA_VISIBLE_DEVICES (all), FAKE_CUDA_VERSION the CUDA version of the driver, FAKE_CUDA_MULTIPROCESSORS the
 * multiprocessors of each device (4); with FAKE_CUDA_APART no device reaches another's memory; with FAKE_CUDA_RDMA=0 no
 * device has memory of cuMemCreate() for network cards; with FAKE_CUDA_DMA_BUF=0 the driver has no dma-buf; with
 * FAKE_CUDA_NO_CHANNEL the process may not use fabric handles; with FAKE_CUDA_ALIASED=1 devices reach registered memory
 * of the host at other addresses than the host, as with WSL 2; of what every FAKE_CUDA_SPOIL-th launch of a kernel has
 * moved, a bit is wrong; with FAKE_CUDA_STRICT=1000 calls wait as after fake_cuda_strict(1), but streams have room for
 * 1000 actions; with FAKE_CUDA_DELAY=200 actions run 200 us after they were put on a stream, or later; with
 * FAKE_CUDA_POOLS=0 devices have no pools of memory; with FAKE_CUDA_QUEUES=8 the streams of one priority share 8
 * queues, where what is behind a stream that waits waits, too.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "fake_cuda_inside.h"

#define STREAM_ROOM 16u

fake_cuda fake = {.lock = PTHREAD_MUTEX_INITIALIZER};
_Thread_local CUcontext fake_current[DEPTH];
_Thread_local unsigned fake_depth;

static struct CUctx_st contexts[KVF_CUDA_DEVICES_MAX];
static bool made[KVF_CUDA_DEVICES_MAX]; /* the device's context, which then stays */
static char failing[64];
static int failing_result;
static unsigned failing_times;
static unsigned countdown; /* to the call that fails, whatever it calls; 0: none does */
static int countdown_result;
static char failed[64];

/* ---- what tests set ------------------------------------------------------------------------------ */

void fake_cuda_fail(const char *function, int result, unsigned times) {
    (void)snprintf(failing, sizeof failing, "%s", function);
    failing_result = result;
    failing_times = times;
}

void fake_cuda_fail_nth(unsigned number, int result) {
    countdown = number;
    countdown_result = result;
    failed[0] = '\0';
}

const char *fake_cuda_failed(void) {
    return failed;
}

void fake_cuda_delay(uint64_t ns) {
    fake.delay_ns = ns;
}

size_t fake_cuda_left(void) {
    return fake.left;
}

void fake_cuda_strict(int strict) {
    fake.strict = strict != 0;
    fake.room = STREAM_ROOM;
}

unsigned fake_cuda_waiting(void) {
    return fake.waiting;
}

void fake_cuda_stick(int result) {
    fake.stuck = result;
}

/* If one of these fails, its caller cannot undo what was done before. */
static bool ends_something(const char *function) {
    static const char *const parts[] = {"Free",    "Destroy", "Unregister",  "Unload",     "Unmap",
                                        "Release", "Close",   "Synchronize", "PushCurrent"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strstr(function, parts[i]))
            return true;
    return false;
}

CUresult fake_told(const char *function) {
    if (failing_times > 0 && strcmp(failing, function) == 0) {
        failing_times--;
        return failing_result;
    }
    if (countdown == 0 || ends_something(function) || --countdown > 0)
        return 0;
    (void)snprintf(failed, sizeof failed, "%s", function);
    return countdown_result;
}

/* ---- devices and contexts ----------------------------------------------------------------------- */

int fake_number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? (int)strtol(text, NULL, 10) : otherwise;
}

CUresult cuDriverGetVersion(int *version) {
    *version = fake_number("FAKE_CUDA_VERSION", 12080);
    return fake_told(__func__);
}

CUresult cuInit(unsigned flags) {
    (void)flags;
    const CUresult told = fake_told(__func__);
    fake.started = fake.started || !told;
    if (getenv("FAKE_CUDA_DELAY"))
        fake.delay_ns = 1000u * (uint64_t)fake_number("FAKE_CUDA_DELAY", 0);
    if (getenv("FAKE_CUDA_STRICT")) {
        fake.strict = true;
        fake.room = (unsigned)fake_number("FAKE_CUDA_STRICT", STREAM_ROOM);
    }
    return told;
}

CUresult cuGetErrorName(CUresult result, const char **text) {
    *text = result == OUT_OF_MEMORY                   ? "CUDA_ERROR_OUT_OF_MEMORY"
            : result == ILLEGAL_ADDRESS               ? "CUDA_ERROR_ILLEGAL_ADDRESS"
            : result == CUDA_ERROR_MISALIGNED_ADDRESS ? "CUDA_ERROR_MISALIGNED_ADDRESS"
                                                      : "CUDA_ERROR_OF_THE_STAND_IN";
    return 0;
}

CUresult cuGetErrorString(CUresult result, const char **text) {
    *text = result == OUT_OF_MEMORY                   ? "out of memory"
            : result == ILLEGAL_ADDRESS               ? "an illegal memory access was encountered"
            : result == CUDA_ERROR_MISALIGNED_ADDRESS ? "misaligned address"
                                                      : "something else";
    return 0;
}

/* As with the driver, the list ends before the first device that is not there. */
int fake_of_machine(int device) {
    const int all = fake_number("FAKE_CUDA_DEVICES", 2);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible)
        return device < all ? device : -1;
    for (int i = 0;; i++) {
        char *end;
        const long number = strtol(visible, &end, 10);
        if (end == visible || number < 0 || number >= all)
            return -1;
        if (i == device)
            return (int)number;
        visible = *end == ',' ? end + 1 : end;
    }
}

int fake_of_process(int machines) {
    for (int device = 0, found; (found = fake_of_machine(device)) >= 0; device++)
        if (found == machines)
            return device;
    return -1;
}

CUresult cuDeviceGetCount(int *count) {
    if (!fake.started)
        return CUDA_ERROR_NOT_INITIALIZED;
    *count = 0;
    while (fake_of_machine(*count) >= 0)
        ++*count;
    return fake_told(__func__);
}

CUresult cuDeviceGet(CUdevice *device, int number) {
    const CUresult told = fake_told(__func__);
    if (told)
        return told;
    *device = number;
    return !fake.started ? CUDA_ERROR_NOT_INITIALIZED : fake_of_machine(number) >= 0 ? 0 : INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *name, int bytes, CUdevice device) {
    (void)snprintf(name, (size_t)bytes, "stand-in %d", fake_of_machine(device));
    return 0;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    (void)device;
    *bytes = MEMORY_OF_DEVICE;
    return fake_told(__func__);
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    (void)device;
    *value = attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
                 ? fake_number("FAKE_CUDA_MULTIPROCESSORS", 4)
             : attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
                 ? !fake_number("FAKE_CUDA_ALIASED", 0)
             : attribute == CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES  ? 1
             : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? fake_number("FAKE_CUDA_MAJOR", 9)
             : attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
                 ? fake_number("FAKE_CUDA_RDMA", 1)
             : attribute == CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED ? fake_number("FAKE_CUDA_DMA_BUF", 1)
                                                                  : 0;
    return fake_told(__func__);
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    (void)snprintf((char *)uuid->bytes, sizeof uuid->bytes, "stand-in %d", fake_of_machine(device));
    return fake_told(__func__);
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    *can = device != peer && !getenv("FAKE_CUDA_APART");
    return fake_told(__func__);
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    BEGIN;
    const int device = fake_current[fake_depth - 1]->device;
    bool *now = &fake.peers[device][peer->device];
    if (flags || device == peer->device)
        return flags ? INVALID_VALUE : INVALID_CONTEXT;
    if (getenv("FAKE_CUDA_APART"))
        return PEER_ACCESS_UNSUPPORTED;
    if (*now)
        return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    *now = true;
    return 0;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    const CUresult told = fake_told(__func__);
    contexts[device].device = device;
    if (!told)
        *context = &contexts[device];
    made[device] = made[device] || !told;
    return told ? told : fake_unsafe();
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = made[device];
    return fake_told(__func__);
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    const CUresult told = fake_told(__func__);
    if (told || fake_depth == DEPTH)
        return told ? told : OUT_OF_MEMORY;
    fake_current[fake_depth++] = context;
    return 0;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (fake_depth == 0)
        return INVALID_CONTEXT;
    *context = fake_current[--fake_depth];
    return 0;
}

/* Found by name only: libraries of networks ask. */
__attribute__((visibility("default"))) CUresult cuCtxGetCurrent(CUcontext *context);

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = fake_depth > 0 ? fake_current[fake_depth - 1] : NULL;
    return 0;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    BEGIN;
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return 0;
}
