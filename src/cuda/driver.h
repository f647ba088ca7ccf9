/*
 * The CUDA driver: libcuda.so.1, opened when device memory is first used.
 *
 * kvferry is neither compiled nor linked against CUDA: the few driver functions that it calls are declared here and
 * looked up at run time, so one build serves machines with any driver from 12.0 on, and with none
 * (tests/install/driver_names.sh compares the declarations with CUDA's own headers). Two functions are the entry for
 * other rooms: kvf_cuda_find() gives the driver or the reason why there is none, and kvf_cuda_enter() makes a device
 * current for this thread's calls.
 *
 * A device is used through its primary context, which the process's other users of CUDA (torch, an engine) use too,
 * so their addresses are valid here. It stays until the process ends. A child of fork() cannot use its parent's
 * driver: calls fail with a detail that says so.
 *
 * While an engine captures a CUDA graph, in the mode that torch uses by default, a call such as cuEventQuery() or
 * cuMemAlloc() by any thread fails and spoils the capture, unless that thread's own mode is relaxed. So it is, from
 * kvf_cuda_enter() to kvf_cuda_leave(); calls that need no device are between kvf_cuda_relax() and kvf_cuda_restore().
 *
 * All functions here may be called by any thread.
 */
#ifndef KVF_CUDA_DRIVER_H
#define KVF_CUDA_DRIVER_H

#include "base/base.h"

/* ---- the driver's own names ------------------------------------------------------------------- */

typedef int CUresult; /* 0: success */
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
typedef struct CUmemFabricHandle {
    unsigned char data[64];
} CUmemFabricHandle;
typedef struct CUuuid {
    unsigned char bytes[16];
} CUuuid;
typedef uint64_t CUmemGenericAllocationHandle;
typedef struct CUmemLocation {
    int type, id;
} CUmemLocation;
typedef struct CUmemAllocationFlags {
    unsigned char compressionType, gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
} CUmemAllocationFlags;
typedef struct CUmemAllocationProp {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    CUmemAllocationFlags allocFlags;
} CUmemAllocationProp;
_Static_assert(sizeof(CUmemAllocationFlags) == 8 && sizeof(CUmemAllocationProp) == 32,
               "the sizes of the driver's structs");
typedef struct CUmemAccessDesc {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

enum {
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEINITIALIZED = 4, /* the process is ending */
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_IMAGE = 200, /* device code */
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_ECC_UNCORRECTABLE = 214,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_INVALID_PTX = 218,
    CUDA_ERROR_NVLINK_UNCORRECTABLE = 220,
    CUDA_ERROR_JIT_COMPILER_NOT_FOUND = 221,
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222, /* newer than the driver */
    CUDA_ERROR_JIT_COMPILATION_DISABLED = 223,
    CUDA_ERROR_CONTAINED = 226,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600, /* of a stream or an event: not finished */
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_TIMEOUT = 702,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704, /* counts as success */
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_ASSERT = 710,
    CUDA_ERROR_TOO_MANY_PEERS = 711, /* of a device, which has no room for one more */
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HARDWARE_STACK_ERROR = 714,
    CUDA_ERROR_ILLEGAL_INSTRUCTION = 715,
    CUDA_ERROR_MISALIGNED_ADDRESS = 716,
    CUDA_ERROR_INVALID_ADDRESS_SPACE = 717,
    CUDA_ERROR_INVALID_PC = 718,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_TENSOR_MEMORY_LEAK = 721,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_MPS_CLIENT_TERMINATED = 810,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906, /* the default stream would have to wait for a captured one */
    CUDA_ERROR_CAPTURED_EVENT = 907,          /* the event was last recorded while its stream was captured */
    CUDA_ERROR_EXTERNAL_DEVICE = 911,
    CUDA_ERROR_UNKNOWN = 999,
    /* Values of arguments. */
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_STREAM_CAPTURE_MODE_RELAXED = 2,
    CU_MEMHOSTALLOC_PORTABLE = 1,
    CU_MEMHOSTALLOC_DEVICEMAP = 2,
    CU_MEMHOSTREGISTER_PORTABLE = 1,
    CU_MEMHOSTREGISTER_DEVICEMAP = 2,
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
    CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE = 15,
    CU_MEMORYTYPE_DEVICE = 2,
    CU_MEM_ALLOCATION_TYPE_PINNED = 1,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    CU_MEM_HANDLE_TYPE_FABRIC = 8,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
    CU_STREAM_WAIT_VALUE_GEQ = 0,         /* by the sign of the difference, so that numbers may wrap */
    CU_STREAM_WAIT_VALUE_FLUSH = 1 << 30, /* then, of writes from outside */
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
    CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES = 98,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
    CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124,
};

/* Each function that is called: its name in the library, and its arguments. */
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
    F(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned *flags, int *active))                           \
    F(cuCtxPushCurrent_v2, (CUcontext context))                                                              \
    F(cuCtxPopCurrent_v2, (CUcontext * context))                                                             \
    F(cuCtxSynchronize, (void))                                                                              \
    F(cuCtxGetStreamPriorityRange, (int *least, int *greatest))                                              \
    F(cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags))                                               \
    F(cuPointerGetAttribute, (void *value, int attribute, CUdeviceptr address))                              \
    F(cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t * bytes, CUdeviceptr address))                    \
    F(cuMemAlloc_v2, (CUdeviceptr * address, size_t bytes))                                                  \
    F(cuMemFree_v2, (CUdeviceptr address))                                                                   \
    F(cuMemHostAlloc, (void **address, size_t bytes, unsigned flags))                                        \
    F(cuMemFreeHost, (void *address))                                                                        \
    F(cuMemHostRegister_v2, (void *address, size_t bytes, unsigned flags))                                   \
    F(cuMemHostUnregister, (void *address))                                                                  \
    F(cuMemHostGetDevicePointer_v2, (CUdeviceptr * address, void *memory, unsigned flags))                   \
    F(cuMemsetD8Async, (CUdeviceptr address, unsigned char value, size_t count, CUstream stream))            \
    F(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream))               \
    F(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t bytes, CUstream stream))                     \
    F(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                      \
    F(cuIpcGetMemHandle, (CUipcMemHandle * handle, CUdeviceptr address))                                     \
    F(cuIpcOpenMemHandle_v2, (CUdeviceptr * address, CUipcMemHandle handle, unsigned flags))                 \
    F(cuIpcCloseMemHandle, (CUdeviceptr address))                                                            \
    F(cuMemGetAllocationGranularity, (size_t * bytes, const CUmemAllocationProp *properties, int which))     \
    F(cuMemCreate, (CUmemGenericAllocationHandle * handle, size_t bytes,                                     \
                    const CUmemAllocationProp *properties, unsigned long long flags))                        \
    F(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle * handle, void *address))                   \
    F(cuMemRelease, (CUmemGenericAllocationHandle handle))                                                   \
    F(cuMemGetAllocationPropertiesFromHandle,                                                                \
      (CUmemAllocationProp * properties, CUmemGenericAllocationHandle handle))                               \
    F(cuMemExportToShareableHandle,                                                                          \
      (void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags))            \
    F(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle * handle, void *shareable, int type))    \
    F(cuMemAddressReserve,                                                                                   \
      (CUdeviceptr * address, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags)) \
    F(cuMemAddressFree, (CUdeviceptr address, size_t bytes))                                                 \
    F(cuMemMap, (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,      \
                 unsigned long long flags))                                                                  \
    F(cuMemUnmap, (CUdeviceptr address, size_t bytes))                                                       \
    F(cuMemSetAccess, (CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count))      \
    F(cuStreamCreateWithPriority, (CUstream * stream, unsigned flags, int priority))                         \
    F(cuStreamDestroy_v2, (CUstream stream))                                                                 \
    F(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))                                   \
    F(cuStreamWaitValue32_v2, (CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags))        \
    F(cuStreamIsCapturing, (CUstream stream, int *status))                                                   \
    F(cuStreamSynchronize, (CUstream stream))                                                                \
    F(cuThreadExchangeStreamCaptureMode, (int *mode))                                                        \
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

/* Functions of later drivers, which are NULL where there is none. */
#define KVF_CUDA_LATER_FUNCTIONS(F) F(cuFuncLoad, (CUfunction function)) /* 12.4 */

/* ---- finding driver and devices ----------------------------------------------------------------- */

#define KVF_CUDA_DEVICES_MAX 64u

typedef struct kvf_cuda_device {
    char name[64];
    uint32_t major, minor;    /**< compute capability: 9 and 0 for sm_90 */
    uint32_t multiprocessors; /**< SMs */
    CUuuid uuid;              /**< the same in all processes, however they number devices */
} kvf_cuda_device;

/** The driver's functions and devices. Never freed. */
typedef struct kvf_cuda {
#define MEMBER(name, arguments) CUresult(*name) arguments; /* NOLINT(bugprone-macro-parentheses) */
    KVF_CUDA_FUNCTIONS(MEMBER)
    KVF_CUDA_LATER_FUNCTIONS(MEMBER)
#undef MEMBER
    uint32_t version; /**< 1000 * major + 10 * minor, as the driver says */
    uint32_t device_count;
    kvf_cuda_device devices[KVF_CUDA_DEVICES_MAX];
    CUcontext contexts[KVF_CUDA_DEVICES_MAX]; /**< of the devices that were entered; for driver.c */
} kvf_cuda;

/**
 * Gives the driver of this process. The first call looks for it, as the loader finds libcuda.so.1.
 *
 * @return KVF_OK, or KVF_E_UNSUPPORTED; the detail names the cause: no library, one that is too old or lacks a
 *         function, no device, or a process that inherited it by fork()
 */
kvf_status kvf_cuda_find(const kvf_cuda **out);

/**
 * Gives the driver without starting it, because children of fork() cannot use a started driver: `version` is known,
 * and `device_count` is 0 unless the driver was started before.
 *
 * @return as kvf_cuda_find(), but does not find faults of devices
 */
kvf_status kvf_cuda_load(const kvf_cuda **out);

/**
 * Makes a device current for this thread, and its calls harmless to captures of graphs, until kvf_cuda_leave().
 * Pairs may be nested.
 *
 * @return KVF_OK, KVF_E_RANGE (no such device; the detail says how many there are), and the results of
 *         kvf_cuda_find() and kvf_cuda_status()
 */
kvf_status kvf_cuda_enter(uint32_t device, const kvf_cuda **out);

/**
 * As kvf_cuda_enter(), of any device that this process has a primary context of, whoever made it: for questions to the
 * driver that need a context, but no certain one. A context takes some hundred MiB of its device, so none is made.
 *
 * @return KVF_OK, KVF_E_NOT_FOUND (there is none), and the results of kvf_cuda_find() and kvf_cuda_status()
 */
kvf_status kvf_cuda_enter_any(const kvf_cuda **out);

/** Restores the context that was current, and the capture mode that the thread had, before kvf_cuda_enter(). */
void kvf_cuda_leave(const kvf_cuda *cuda);

/** Waits until all devices have done what this process has put on them, for as long as that takes. */
void kvf_cuda_wait_for_devices(void);

/** Keeps this thread's calls from spoiling the capture of a graph, until kvf_cuda_restore(). Pairs may be nested. */
void kvf_cuda_relax(const kvf_cuda *cuda);
void kvf_cuda_restore(const kvf_cuda *cuda);

/** Makes a stream of the lowest priority on the device that is entered: it yields to the device's other work. */
CUresult kvf_cuda_least_stream(const kvf_cuda *cuda, CUstream *out);

/** Makes one of the highest priority, for what takes nothing of the device: a driver has a few queues for the streams
 * of one priority, and what waits there would hold up copies. */
CUresult kvf_cuda_greatest_stream(const kvf_cuda *cuda, CUstream *out);

/** The number of a device in this process; KVF_CUDA_DEVICES_MAX: this process does not see it. */
uint32_t kvf_cuda_device_with(const kvf_cuda *cuda, const CUuuid *uuid);

/**
 * Checks that kernels of a device can reach the memory of another device, over NVLink or PCIe, or its own.
 *
 * @return KVF_OK, KVF_E_UNSUPPORTED (the detail names both)
 */
kvf_status kvf_cuda_check_reach(const kvf_cuda *cuda, uint32_t device, uint32_t other);

/**
 * Lets kernels of a device reach this process's memory on another device, from now on.
 *
 * @return KVF_OK (also if they can already), KVF_E_RANGE, KVF_E_UNSUPPORTED, KVF_E_IO
 */
kvf_status kvf_cuda_let_reach(uint32_t device, uint32_t other);

/** An allocation, and where an address lies in it. */
typedef struct kvf_cuda_place {
    CUdeviceptr base;
    uint64_t bytes;    /**< of the allocation, or of all segments */
    uint64_t offset;   /**< of the address */
    uint32_t segments; /**< the memory is in so many segments, see segments.h; 0: it is one allocation */
} kvf_cuda_place;

/**
 * Finds the allocation of this process, or the segments, that contain an address: allocators of engines give out
 * parts of larger allocations.
 *
 * @param device  the device whose memory it must be
 * @param bytes   how many bytes from the address on must be in the allocation
 * @return KVF_OK, KVF_E_INVALID (freed or never allocated, the host's, another device's, or not that many bytes; the
 *         detail says which), and the results of kvf_cuda_enter() and kvf_cuda_status()
 */
kvf_status kvf_cuda_place_of(uint32_t device, CUdeviceptr address, uint64_t bytes, kvf_cuda_place *out);

/** Whether the driver, asked about an address, says that it has no such memory there. */
bool kvf_cuda_is_unknown(CUresult result);

/**
 * Translates a result of the driver; the error detail has its name and sentence: "CUDA device 1: copying:
 * CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)".
 *
 * @param device  which it is about; KVF_CUDA_DEVICES_MAX: no certain one
 * @return KVF_OK, KVF_E_NOMEM, KVF_E_PERMISSION, KVF_E_UNSUPPORTED, or KVF_E_IO: the device may then be unusable for
 *         this process, which the detail says if it is known. CUDA_ERROR_NOT_READY is KVF_E_IO, too: callers that ask
 *         whether something is over see to it before
 */
kvf_status kvf_cuda_status(uint32_t device, CUresult result, const char *doing);

/** Whether, after this result, every call that uses the context fails with it until the process ends. */
bool kvf_cuda_stays(CUresult result);

#endif
