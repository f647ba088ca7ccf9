#include "cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#include "base/fork.h"
#include "cuda/segments.h"

#define LIBRARY "libcuda.so.1"
#define VERSION_MIN 12000 /* the oldest driver that may run code of the compiler that builds ours */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static kvf_cuda driver;
static enum { UNSEEN, LOADED, FOUND, MISSING } seen; /* FOUND: loaded and started */
static char why_missing[512];
static uint32_t forks; /* kvf_fork_count() when the driver was started */
static bool starting;  /* a thread starts it */

static const struct {
    const char *name;
    size_t at;
    bool needed;
} functions[] = {
#define ENTRY(name, arguments) {#name, offsetof(kvf_cuda, name), true},
    KVF_CUDA_FUNCTIONS(ENTRY)
#undef ENTRY
#define ENTRY(name, arguments) {#name, offsetof(kvf_cuda, name), false},
        KVF_CUDA_LATER_FUNCTIONS(ENTRY)
#undef ENTRY
};

/* ---- captures of graphs ------------------------------------------------------------------------- */

/* Of this thread: pairs that have begun and not ended, and its mode before the first of them. */
static _Thread_local unsigned relaxed;
static _Thread_local int mode_before;

void kvf_cuda_relax(const kvf_cuda *cuda) {
    if (relaxed++ > 0)
        return;
    mode_before = CU_STREAM_CAPTURE_MODE_RELAXED;
    (void)cuda->cuThreadExchangeStreamCaptureMode(&mode_before);
}

void kvf_cuda_restore(const kvf_cuda *cuda) {
    KVF_ASSERT(relaxed > 0);
    if (--relaxed == 0)
        (void)cuda->cuThreadExchangeStreamCaptureMode(&mode_before);
}

/* ---- looking for it ----------------------------------------------------------------------------- */

static kvf_status find_functions(void *library) {
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *address = dlsym(library, functions[i].name);
        if (!address && functions[i].needed)
            return kvf_fail(KVF_E_UNSUPPORTED, "%s has no %s()", LIBRARY, functions[i].name);
        memcpy((char *)&driver + functions[i].at, &address, sizeof address);
    }
    return KVF_OK;
}

static kvf_status check_version(void) {
    int version = 0;
    kvf_status status =
        kvf_cuda_status(KVF_CUDA_DEVICES_MAX, driver.cuDriverGetVersion(&version), "asking its version");
    if (status)
        return status;
    driver.version = (uint32_t)version;
    if (version < VERSION_MIN)
        return kvf_fail(KVF_E_UNSUPPORTED, "the driver is for CUDA %d.%d; allowed: %d.%d and later",
                        version / 1000, version % 1000 / 10, VERSION_MIN / 1000, VERSION_MIN % 1000 / 10);
    return KVF_OK;
}

static kvf_status look_at_device(uint32_t number) {
    kvf_cuda_device *device = &driver.devices[number];
    CUdevice handle = 0;
    int major = 0, minor = 0, multiprocessors = 0;
    CUresult result = driver.cuDeviceGet(&handle, (int)number);
    if (!result)
        result = driver.cuDeviceGetName(device->name, sizeof device->name, handle);
    if (!result)
        result = driver.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle);
    if (!result)
        result = driver.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle);
    if (!result)
        result =
            driver.cuDeviceGetAttribute(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, handle);
    if (!result)
        result = driver.cuDeviceGetUuid_v2(&device->uuid, handle);
    device->major = (uint32_t)major;
    device->minor = (uint32_t)minor;
    device->multiprocessors = (uint32_t)multiprocessors;
    return kvf_cuda_status(number, result, "asking what a device is");
}

static kvf_status look_at_devices(void) {
    int count = 0;
    kvf_status status =
        kvf_cuda_status(KVF_CUDA_DEVICES_MAX, driver.cuDeviceGetCount(&count), "counting devices");
    if (!status && count < 1)
        status = kvf_fail(KVF_E_UNSUPPORTED, "the driver knows no device");
    driver.device_count = (uint32_t)(count < (int)KVF_CUDA_DEVICES_MAX ? count : (int)KVF_CUDA_DEVICES_MAX);
    for (uint32_t i = 0; !status && i < driver.device_count; i++)
        status = look_at_device(i);
    return status;
}

/* A driver that is not started knows no mode of the thread. */
static kvf_status start_driver(void) {
    kvf_status status = kvf_cuda_status(KVF_CUDA_DEVICES_MAX, driver.cuInit(0), "starting the driver");
    if (status)
        return status;
    kvf_cuda_relax(&driver);
    status = look_at_devices();
    kvf_cuda_restore(&driver);
    return status;
}

/* The library stays open: its threads may run, and other users of CUDA have it anyway. */
static kvf_status load(void) {
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        return kvf_fail(KVF_E_UNSUPPORTED, "%s", reason ? reason : LIBRARY " cannot be loaded");
    }
    kvf_status status = find_functions(library);
    return status ? status : check_version();
}

/* Loads, and with `start` starts, the driver, under the lock. A success or a failure is final. */
static void look(bool start) {
    kvf_status status = KVF_OK;
    if (seen == UNSEEN) {
        status = load();
        seen = LOADED;
    }
    if (!status && start && seen == LOADED) {
        starting = true;
        forks = kvf_fork_count();
        status = start_driver();
        starting = false;
        seen = FOUND;
    }
    if (status) {
        (void)snprintf(why_missing, sizeof why_missing, "%s", kvf_error_detail());
        driver.device_count = 0;
        seen = MISSING;
    }
}

/* A thread of the parent may have held the lock, even while it started the driver, which the child cannot use then. */
static void renew(void) {
    (void)pthread_mutex_init(&lock, NULL);
    if (starting)
        seen = FOUND;
}

static void watch_forks(void) {
    kvf_fork_renew(renew);
}

static kvf_status find(bool start, const kvf_cuda **out) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, watch_forks);
    const uint32_t now = kvf_fork_count();
    kvf_status status = KVF_OK;
    (void)pthread_mutex_lock(&lock);
    look(start);
    if (seen == MISSING)
        status = kvf_fail(KVF_E_UNSUPPORTED, "there is no CUDA here: %s", why_missing);
    else if (seen == FOUND && forks != now)
        status = kvf_fail(KVF_E_UNSUPPORTED, "this process was forked from one that uses CUDA");
    (void)pthread_mutex_unlock(&lock);
    if (!status)
        *out = &driver;
    return status;
}

kvf_status kvf_cuda_find(const kvf_cuda **out) {
    return find(true, out);
}

kvf_status kvf_cuda_load(const kvf_cuda **out) {
    return find(false, out);
}

/* ---- using a device ----------------------------------------------------------------------------- */

static kvf_status context_of(uint32_t device, CUcontext *out) {
    kvf_status status = KVF_OK;
    (void)pthread_mutex_lock(&lock);
    if (!driver.contexts[device]) {
        CUdevice handle = 0;
        CUresult result = driver.cuDeviceGet(&handle, (int)device);
        if (!result)
            result = driver.cuDevicePrimaryCtxRetain(&driver.contexts[device], handle);
        status = kvf_cuda_status(device, result, "making a context");
    }
    *out = driver.contexts[device];
    (void)pthread_mutex_unlock(&lock);
    return status;
}

kvf_status kvf_cuda_enter(uint32_t device, const kvf_cuda **out) {
    CUcontext context = NULL;
    kvf_status status = kvf_cuda_find(out);
    if (!status && device >= driver.device_count)
        status = kvf_fail(KVF_E_RANGE, "CUDA device %u; this process sees %u, numbered from 0", device,
                          driver.device_count);
    if (status)
        return status;
    kvf_cuda_relax(&driver);
    status = context_of(device, &context);
    if (!status)
        status = kvf_cuda_status(device, driver.cuCtxPushCurrent_v2(context), "choosing a device");
    if (status)
        kvf_cuda_restore(&driver);
    return status;
}

void kvf_cuda_leave(const kvf_cuda *cuda) {
    CUcontext context = NULL;
    (void)cuda->cuCtxPopCurrent_v2(&context);
    kvf_cuda_restore(cuda);
}

static bool is_used(uint32_t device) {
    (void)pthread_mutex_lock(&lock);
    const bool used = driver.contexts[device] != NULL;
    (void)pthread_mutex_unlock(&lock);
    return used;
}

/* Whether the primary context of a device is there: of this process's engine, for example. */
static bool is_active(uint32_t device) {
    CUdevice handle = 0;
    unsigned flags = 0;
    int active = 0;
    kvf_cuda_relax(&driver);
    CUresult result = driver.cuDeviceGet(&handle, (int)device);
    if (!result)
        result = driver.cuDevicePrimaryCtxGetState(handle, &flags, &active);
    kvf_cuda_restore(&driver);
    return !result && active;
}

kvf_status kvf_cuda_enter_any(const kvf_cuda **out) {
    kvf_status status = kvf_cuda_find(out);
    if (status)
        return status;
    for (uint32_t i = 0; i < driver.device_count; i++)
        if (is_used(i))
            return kvf_cuda_enter(i, out);
    for (uint32_t i = 0; i < driver.device_count; i++)
        if (is_active(i))
            return kvf_cuda_enter(i, out);
    return kvf_fail(KVF_E_NOT_FOUND, "this process uses no CUDA device");
}

void kvf_cuda_wait_for_devices(void) {
    const kvf_cuda *cuda;
    for (uint32_t i = 0; kvf_cuda_find(&cuda) == KVF_OK && i < cuda->device_count; i++)
        if (is_used(i) && kvf_cuda_enter(i, &cuda) == KVF_OK) {
            (void)cuda->cuCtxSynchronize();
            kvf_cuda_leave(cuda);
        }
}

CUresult kvf_cuda_least_stream(const kvf_cuda *cuda, CUstream *out) {
    int least = 0;
    const CUresult result = cuda->cuCtxGetStreamPriorityRange(&least, NULL);
    return result ? result : cuda->cuStreamCreateWithPriority(out, CU_STREAM_NON_BLOCKING, least);
}

CUresult kvf_cuda_greatest_stream(const kvf_cuda *cuda, CUstream *out) {
    int greatest = 0;
    const CUresult result = cuda->cuCtxGetStreamPriorityRange(NULL, &greatest);
    return result ? result : cuda->cuStreamCreateWithPriority(out, CU_STREAM_NON_BLOCKING, greatest);
}

/* ---- memory ------------------------------------------------------------------------------------- */

uint32_t kvf_cuda_device_with(const kvf_cuda *cuda, const CUuuid *uuid) {
    for (uint32_t i = 0; i < cuda->device_count; i++)
        if (memcmp(cuda->devices[i].uuid.bytes, uuid->bytes, sizeof uuid->bytes) == 0)
            return i;
    return KVF_CUDA_DEVICES_MAX;
}

kvf_status kvf_cuda_check_reach(const kvf_cuda *cuda, uint32_t device, uint32_t other) {
    CUdevice here = 0, there = 0;
    int can = 0;
    if (device == other)
        return KVF_OK;
    kvf_cuda_relax(cuda);
    CUresult result = cuda->cuDeviceGet(&here, (int)device);
    if (!result)
        result = cuda->cuDeviceGet(&there, (int)other);
    if (!result)
        result = cuda->cuDeviceCanAccessPeer(&can, here, there);
    kvf_cuda_restore(cuda);
    kvf_status status = kvf_cuda_status(device, result, "asking what a device reaches");
    if (!status && !can)
        status =
            kvf_fail(KVF_E_UNSUPPORTED, "CUDA device %u cannot reach the memory of device %u", device, other);
    return status;
}

kvf_status kvf_cuda_let_reach(uint32_t device, uint32_t other) {
    const kvf_cuda *cuda;
    CUcontext there = NULL;
    if (device == other)
        return KVF_OK;
    kvf_status status = kvf_cuda_enter(other, &cuda);
    if (status)
        return status;
    kvf_cuda_leave(cuda);
    status = kvf_cuda_check_reach(cuda, device, other);
    if (!status)
        status = context_of(other, &there);
    if (!status)
        status = kvf_cuda_enter(device, &cuda);
    if (status)
        return status;
    const CUresult result = cuda->cuCtxEnablePeerAccess(there, 0);
    kvf_cuda_leave(cuda);
    return kvf_cuda_status(device, result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED ? 0 : result,
                           "letting a device reach another");
}

static kvf_status find_place(const kvf_cuda *cuda, uint32_t device, CUdeviceptr address, uint64_t bytes,
                             kvf_cuda_place *out) {
    const unsigned long long at = address;
    int kind = 0, ordinal = -1;
    size_t found = 0;
    CUresult result = cuda->cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
    if (!result)
        result = cuda->cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
    if (!result && kind != CU_MEMORYTYPE_DEVICE)
        return kvf_fail(KVF_E_INVALID,
                        "address 0x%llx is memory of the host; allowed: memory of CUDA device %u", at,
                        device);
    if (!result && ordinal != (int)device)
        return kvf_fail(KVF_E_INVALID,
                        "address 0x%llx is memory of CUDA device %d; allowed: memory of device %u", at,
                        ordinal, device);
    if (!result)
        result = cuda->cuMemGetAddressRange_v2(&out->base, &found, address);
    if (kvf_cuda_is_unknown(result))
        return kvf_fail(KVF_E_INVALID,
                        "address 0x%llx is not memory of CUDA device %u, or it was freed (error %d)", at,
                        device, result);
    if (result) /* this says nothing about the address */
        return kvf_cuda_status(device, result, "asking whose memory an address is");
    out->bytes = found;
    out->offset = address - out->base;
    out->segments = 0;
    kvf_segments_find(cuda, device, address, bytes, out);
    if (bytes > out->bytes - out->offset)
        return kvf_fail(KVF_E_INVALID, "%llu bytes at address 0x%llx; its allocation ends after %llu",
                        (unsigned long long)bytes, at, (unsigned long long)(out->bytes - out->offset));
    return KVF_OK;
}

kvf_status kvf_cuda_place_of(uint32_t device, CUdeviceptr address, uint64_t bytes, kvf_cuda_place *out) {
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_enter(device, &cuda);
    if (status)
        return status;
    status = find_place(cuda, device, address, bytes, out);
    kvf_cuda_leave(cuda);
    return status;
}

bool kvf_cuda_is_unknown(CUresult result) {
    return result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_NOT_FOUND;
}

/* ---- failures ----------------------------------------------------------------------------------- */

static kvf_status meaning(CUresult result) {
    switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
        return KVF_E_NOMEM;
    case CUDA_ERROR_NOT_PERMITTED:
        return KVF_E_PERMISSION;
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED:
    case CUDA_ERROR_INVALID_PTX:
    case CUDA_ERROR_JIT_COMPILER_NOT_FOUND:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_JIT_COMPILATION_DISABLED:
    case CUDA_ERROR_TOO_MANY_PEERS:
    case CUDA_ERROR_NOT_SUPPORTED:
        return KVF_E_UNSUPPORTED;
    default:
        return KVF_E_IO;
    }
}

/* Those of which the driver's manual says that any further work returns them too, and the end of a context. */
bool kvf_cuda_stays(CUresult result) {
    switch (result) {
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_TENSOR_MEMORY_LEAK:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED:
    case CUDA_ERROR_EXTERNAL_DEVICE:
        return true;
    default:
        return false;
    }
}

kvf_status kvf_cuda_status(uint32_t device, CUresult result, const char *doing) {
    const char *name = NULL, *text = NULL;
    char where[32] = "";
    if (result == 0)
        return KVF_OK;
    if (device < KVF_CUDA_DEVICES_MAX)
        (void)snprintf(where, sizeof where, "CUDA device %u: ", device);
    if (driver.cuGetErrorName(result, &name) != 0 || driver.cuGetErrorString(result, &text) != 0 || !name ||
        !text)
        return kvf_fail(meaning(result), "%s%s: error %d of the CUDA driver", where, doing, result);
    return kvf_fail(meaning(result), "%s%s: %s (%s)%s", where, doing, name, text,
                    kvf_cuda_stays(result) ? "; this process cannot use the device any more" : "");
}
