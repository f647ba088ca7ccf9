/*
 * The CUDA driver: libcuda.so.1, opened when device memory is first spoken of.
 *
 * kvferry is neither compiled nor linked against CUDA: the few functions of the driver that it calls are declared
 * here and looked up at run time, so one build serves machines with any driver from 12.0 on, and with none. Two
 * functions hide all else from the rooms that use devices: kvf_cuda_find() gives the driver or the reason why there is
 * none, and kvf_cuda_enter() makes a device the one that this thread's calls are about.
 *
 * A device is used through its primary context, which is also that of the process's other users of CUDA (torch, an
 * engine), so their addresses are ours. It stays until the process ends. A child of fork() cannot use the driver of its
 * parent, and is told so.
 *
 * All functions here may be called by any thread.
 */
#ifndef KVF_CUDA_DRIVER_H
#define KVF_CUDA_DRIVER_H

#include "base/base.h"

/* ---- the driver's own names ------------------------------------------------------------------- */

typedef int CUresult; /* 0: all is well */
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUipcMemHandle {
    char bytes[64];
} CUipcMemHandle;
typedef struct CUuuid {
    unsigned char bytes[16];
} CUuuid;

enum {
    CUDA_NOT_READY = 600,                   /* of a stream or an event: there is more to do */
    CUDA_PEER_ACCESS_ALREADY_ENABLED = 704, /* as was wanted */
    /* Values of arguments. */
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_MEMHOST_PORTABLE = 1,
    CU_MEMHOST_DEVICEMAP = 2,
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
    CU_MEMORYTYPE_DEVICE = 2,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
};

/* Each function that is called: its result's name in the library, and its arguments. */
#define KVF_CUDA_FUNCTIONS(F)                                                                                \
    F(cuDriverGetVersion, (int *version))                                                                    \
    F(cuInit, (unsigned flags))                                                                              \
    F(cuGetErrorName, (CUresult result, const char **text))                                                  \
    F(cuGetErrorString, (CUresult result, const char **text))                                                \
    F(cuDeviceGetCount, (int *count))                                                                        \
    F(cuDeviceGet, (CUdevice * device, int number))                                                          \
    F(cuDeviceGetName, (char *name, int bytes, CUdevice device))                                             \
    F(cuDeviceTotalMem_v2, (size_t * bytes, CUdevice device))                                                \
    F(cuDeviceGetAttribute, (int *value, int attribute, CUdevice device))                                    \
    F(cuDeviceGetUuid_v2, (CUuuid * uuid, CUdevice device))                                                  \
    F(cuDeviceCanAccessPeer, (int *can, CUdevice device, CUdevice peer))                                     \
    F(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                                      \
    F(cuCtxPushCurrent_v2, (CUcontext context))                                                              \
    F(cuCtxPopCurrent_v2, (CUcontext * context))                                                             \
    F(cuCtxGetStreamPriorityRange, (int *least, int *greatest))                                              \
    F(cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags))                                               \
    F(cuPointerGetAttribute, (void *value, int attribute, CUdeviceptr address))                              \
    F(cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t * bytes, CUdeviceptr address))                    \
    F(cuMemAlloc_v2, (CUdeviceptr * address, size_t bytes))                                                  \
    F(cuMemFree_v2, (CUdeviceptr address))                                                                   \
    F(cuMemAllocAsync, (CUdeviceptr * address, size_t bytes, CUstream stream))                               \
    F(cuMemFreeAsync, (CUdeviceptr address, CUstream stream))                                                \
    F(cuMemHostAlloc, (void **address, size_t bytes, unsigned flags))                                        \
    F(cuMemFreeHost, (void *address))                                                                        \
    F(cuMemHostRegister_v2, (void *address, size_t bytes, unsigned flags))                                   \
    F(cuMemHostUnregister, (void *address))                                                                  \
    F(cuMemsetD8Async, (CUdeviceptr address, unsigned char value, size_t count, CUstream stream))            \
    F(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream))               \
    F(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t bytes, CUstream stream))                     \
    F(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                      \
    F(cuIpcGetMemHandle, (CUipcMemHandle * handle, CUdeviceptr address))                                     \
    F(cuIpcOpenMemHandle_v2, (CUdeviceptr * address, CUipcMemHandle handle, unsigned flags))                 \
    F(cuIpcCloseMemHandle, (CUdeviceptr address))                                                            \
    F(cuStreamCreateWithPriority, (CUstream * stream, unsigned flags, int priority))                         \
    F(cuStreamDestroy_v2, (CUstream stream))                                                                 \
    F(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))                                   \
    F(cuStreamSynchronize, (CUstream stream))                                                                \
    F(cuEventCreate, (CUevent * event, unsigned flags))                                                      \
    F(cuEventDestroy_v2, (CUevent event))                                                                    \
    F(cuEventRecord, (CUevent event, CUstream stream))                                                       \
    F(cuEventQuery, (CUevent event))                                                                         \
    F(cuModuleLoadData, (CUmodule * module, const void *image))                                              \
    F(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char *name))                       \
    F(cuModuleUnload, (CUmodule module))                                                                     \
    F(cuLaunchKernel, (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,               \
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,          \
                       CUstream stream, void **arguments, void **extra))

/* ---- what there is ------------------------------------------------------------------------------ */

#define KVF_CUDA_DEVICES_MAX 64u

typedef struct kvf_cuda_device {
    char name[64];
    uint32_t major, minor;    /**< compute capability: 9 and 0 of sm_90 */
    uint32_t multiprocessors; /**< SMs */
    CUuuid uuid;              /**< the same in all processes, however they number what they see */
} kvf_cuda_device;

/** The driver, as it was found. Never freed. */
typedef struct kvf_cuda {
#define MEMBER(name, arguments) CUresult(*name) arguments; /* NOLINT(bugprone-macro-parentheses) */
    KVF_CUDA_FUNCTIONS(MEMBER)
#undef MEMBER
    uint32_t version; /**< 1000 * major + 10 * minor, as the driver says */
    uint32_t device_count;
    kvf_cuda_device devices[KVF_CUDA_DEVICES_MAX];
    CUcontext contexts[KVF_CUDA_DEVICES_MAX]; /**< of the devices that were entered; for driver.c */
} kvf_cuda;

/**
 * Gives the driver of this process. It is looked for once, as the loader finds libcuda.so.1.
 *
 * @return KVF_OK, or KVF_E_UNSUPPORTED; the detail says what was tried and what is missing: no library, one that is too
 *         old or lacks a function, no device, a process that inherited it by fork()
 */
kvf_status kvf_cuda_find(const kvf_cuda **out);

/**
 * Gives it without starting it, for which it would keep children of fork() from it: `version` is known, and
 * `device_count` is 0 unless somebody has started it.
 *
 * @return as kvf_cuda_find(), but for what is wrong with devices
 */
kvf_status kvf_cuda_load(const kvf_cuda **out);

/**
 * Makes a device current for this thread, until kvf_cuda_leave(). Pairs may be nested.
 *
 * @return KVF_OK, KVF_E_RANGE (no such device; the detail says how many there are), and what kvf_cuda_find() and
 *         kvf_cuda_status() say
 */
kvf_status kvf_cuda_enter(uint32_t device, const kvf_cuda **out);

/** Makes current what was so before. */
void kvf_cuda_leave(const kvf_cuda *cuda);

/** The number by which this process knows a device; KVF_CUDA_DEVICES_MAX: it does not see it. */
uint32_t kvf_cuda_device_with(const kvf_cuda *cuda, const CUuuid *uuid);

/**
 * Whether kernels of a device can reach the memory of another one, or of itself: over NVLink or PCIe.
 *
 * @return KVF_OK, KVF_E_UNSUPPORTED (the detail names both)
 */
kvf_status kvf_cuda_check_reach(const kvf_cuda *cuda, uint32_t device, uint32_t other);

/**
 * Lets kernels of a device reach the memory that this process has on another one, from now on.
 *
 * @return KVF_OK, also where it is so already, KVF_E_RANGE, KVF_E_UNSUPPORTED, KVF_E_IO
 */
kvf_status kvf_cuda_let_reach(uint32_t device, uint32_t other);

/** An allocation, and where an address lies in it. */
typedef struct kvf_cuda_place {
    CUdeviceptr base;
    uint64_t bytes;  /**< of the allocation */
    uint64_t offset; /**< of the address */
} kvf_cuda_place;

/**
 * Finds the allocation of this process that an address lies in, wherever in it: allocators of engines give out parts of
 * larger ones.
 *
 * @param device  whose memory it must be
 * @param bytes   that must lie in it from the address on
 * @return KVF_OK, KVF_E_INVALID (freed or never allocated, the host's, another device's, or not that many bytes; the
 *         detail says which), and what kvf_cuda_enter() says
 */
kvf_status kvf_cuda_place_of(uint32_t device, CUdeviceptr address, uint64_t bytes, kvf_cuda_place *out);

/**
 * What a result of the driver means, in a detail with its name and sentence: "copying: CUDA_ERROR_ILLEGAL_ADDRESS (an
 * illegal memory access was encountered)".
 *
 * @return KVF_OK, KVF_IN_PROGRESS (CUDA_NOT_READY, no detail), KVF_E_NOMEM, KVF_E_PERMISSION, KVF_E_UNSUPPORTED, or
 *         KVF_E_IO: with that a device may be of no more use to this process, as the detail says where it is known
 */
kvf_status kvf_cuda_status(const kvf_cuda *cuda, CUresult result, const char *doing);

#endif
