/*
 * The public functions about devices (kvferry/device.h).
 */
#include <kvferry/device.h>
#include <stdio.h>

#include "cuda/device_image.h"
#include "cuda/driver.h"

static kvf_status find(kvf_memory_kind kind, const kvf_cuda **out) {
    if (kind != KVF_MEMORY_CUDA)
        return kvf_fail(KVF_E_INVALID, "memory kind is %d; allowed: %d (CUDA)", (int)kind,
                        (int)KVF_MEMORY_CUDA);
    return kvf_cuda_find(out);
}

kvf_status kvf_device_count(kvf_memory_kind kind, uint32_t *out) {
    const kvf_cuda *cuda;
    if (!out)
        return kvf_fail(KVF_E_INVALID, "counting devices: out is NULL");
    kvf_status status = find(kind, &cuda);
    if (!status)
        *out = cuda->device_count;
    return status;
}

/* ---- one device --------------------------------------------------------------------------------- */

static void say_code(kvf_device_info *info) {
    const kvf_device_image *image = kvf_device_image_for(info->major, info->minor);
    if (image)
        (void)snprintf(info->code, sizeof info->code, "%s%u%u", image->portable ? "PTX of compute_" : "sm_",
                       image->major, image->minor);
    else if (kvf_device_image_count == 0)
        (void)snprintf(info->why_not, sizeof info->why_not, "this build has no device code");
    else
        (void)snprintf(info->why_not, sizeof info->why_not,
                       "this build has no code for compute capability %u.%u, but for %u.%u and later",
                       info->major, info->minor, kvf_device_images[0].major, kvf_device_images[0].minor);
}

kvf_status kvf_device_get_info(kvf_memory_kind kind, uint32_t device, kvf_device_info *out) {
    const kvf_cuda *cuda;
    kvf_status status = kvf_check_out(out, "kvf_device_info");
    if (!status)
        status = find(kind, &cuda);
    if (!status && device >= cuda->device_count)
        status = kvf_fail(KVF_E_RANGE, "CUDA device %u; this process sees %u, numbered from 0", device,
                          cuda->device_count);
    if (status)
        return status;
    const kvf_cuda_device *known = &cuda->devices[device];
    kvf_device_info info = {.struct_size = sizeof info,
                            .major = known->major,
                            .minor = known->minor,
                            .multiprocessors = known->multiprocessors,
                            .driver_version = cuda->version};
    size_t bytes = 0;
    CUdevice handle = 0;
    kvf_cuda_relax(cuda);
    CUresult result = cuda->cuDeviceGet(&handle, (int)device);
    if (!result)
        result = cuda->cuDeviceTotalMem_v2(&bytes, handle);
    kvf_cuda_restore(cuda);
    status = kvf_cuda_status(device, result, "asking for a device's memory");
    if (status)
        return status;
    info.memory_bytes = bytes;
    (void)snprintf(info.name, sizeof info.name, "%s", known->name);
    say_code(&info);
    kvf_fill_out(out, &info, sizeof info);
    return KVF_OK;
}

/* ---- addresses ---------------------------------------------------------------------------------- */

/* The answer does not depend on the current context, but there must be one; a thread without one borrows one that this
 * process has. Without any, no address is a device's. */
static CUresult ask(const kvf_cuda *cuda, const void *address, int attribute, int *value) {
    const CUdeviceptr at = (CUdeviceptr)(uintptr_t)address;
    const kvf_cuda *entered;
    CUresult result = cuda->cuPointerGetAttribute(value, attribute, at);
    if (result != CUDA_ERROR_INVALID_CONTEXT && result != CUDA_ERROR_NOT_INITIALIZED)
        return result;
    const kvf_status status = kvf_cuda_enter_any(&entered);
    if (status)
        return status == KVF_E_NOT_FOUND ? CUDA_ERROR_INVALID_VALUE : result;
    result = cuda->cuPointerGetAttribute(value, attribute, at);
    kvf_cuda_leave(cuda);
    return result;
}

kvf_status kvf_device_of(kvf_memory_kind kind, const void *address, uint32_t *device) {
    const kvf_cuda *cuda;
    int type = 0, number = -1;
    if (!device)
        return kvf_fail(KVF_E_INVALID, "looking for an address: device is NULL");
    kvf_status status = find(kind, &cuda);
    if (status)
        return status;
    kvf_cuda_relax(cuda);
    CUresult result = ask(cuda, address, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, &type);
    if (!result && type == CU_MEMORYTYPE_DEVICE)
        result = ask(cuda, address, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, &number);
    kvf_cuda_restore(cuda);
    if (result == CUDA_ERROR_INVALID_VALUE || (!result && (type != CU_MEMORYTYPE_DEVICE || number < 0)))
        return kvf_fail(KVF_E_NOT_FOUND, "no CUDA device of this process has memory at %p", address);
    status = kvf_cuda_status(KVF_CUDA_DEVICES_MAX, result, "looking for an address");
    if (!status)
        *device = (uint32_t)number;
    return status;
}
