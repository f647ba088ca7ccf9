/*
 * Devices: which exist, whether this library can move the contents of their memory, and which device owns an address.
 *
 *     uint32_t count;
 *     if (kvf_device_count(KVF_MEMORY_CUDA, &count))
 *         puts(kvf_error_detail());                       why there is none
 *     kvf_device_info info = {.struct_size = sizeof info};
 *     kvf_device_get_info(KVF_MEMORY_CUDA, 0, &info);
 *
 * The library is not linked against CUDA: the first call that needs the driver, libcuda.so.1, opens it, and it stays
 * open. Any thread may call these functions.
 */
#ifndef KVFERRY_DEVICE_H
#define KVFERRY_DEVICE_H

#include <kvferry/memory.h>
#include <kvferry/status.h>

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** One device. Texts are cut to fit. */
typedef struct kvf_device_info {
    size_t struct_size; /**< sizeof(kvf_device_info), set by the caller */
    char name[64];
    uint32_t major, minor;    /**< compute capability: 9 and 0 of sm_90 */
    uint32_t multiprocessors; /**< SMs */
    uint32_t driver_version;  /**< 1000 * major + 10 * minor of the driver's CUDA version: 12080 */
    uint64_t memory_bytes;
    char code[32]; /**< the kernels of this build that it runs: "sm_90", or "PTX of compute_100"; "": none */
    char why_not[256]; /**< why it cannot gather and scatter; "" where it can */
} kvf_device_info;

/**
 * Counts the devices whose memory is of a kind.
 *
 * @param kind  KVF_MEMORY_CUDA
 * @return KVF_OK; KVF_E_UNSUPPORTED (the detail says what was tried and what is missing: no library, a driver that is too
 *         old, no device, a process that inherited the driver by fork()); KVF_E_INVALID (no device has memory of this
 *         kind; out is NULL)
 */
KVF_API kvf_status kvf_device_count(kvf_memory_kind kind, uint32_t *out);

/**
 * Describes a device. Creates no context on it and uses none of its memory.
 *
 * @param device  its number, as the driver counts devices in this process
 * @param out     struct_size is set by the caller; the rest is filled in
 * @return as kvf_device_count(), KVF_E_RANGE (no such device), KVF_E_IO (the driver refuses to answer)
 */
KVF_API kvf_status kvf_device_get_info(kvf_memory_kind kind, uint32_t device, kvf_device_info *out);

/**
 * Finds the device that owns an address, for callers that have a bare pointer. Creates no context on any device.
 *
 * @param address  anywhere in an allocation; it is not dereferenced
 * @param device   receives the number
 * @return as kvf_device_count(), KVF_E_NOT_FOUND (the memory is the host's, was freed, or is another process's),
 *         KVF_E_IO
 */
KVF_API kvf_status kvf_device_of(kvf_memory_kind kind, const void *address, uint32_t *device);

#ifdef __cplusplus
}
#endif

#endif
