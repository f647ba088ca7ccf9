/* Device code compiled with the library: cmake/device_code.cmake makes the table from kernels.cu. */
#ifndef KVF_CUDA_DEVICE_IMAGE_H
#define KVF_CUDA_DEVICE_IMAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda/driver.h"

typedef struct kvf_device_image {
    uint32_t major, minor; /**< compute capability for which it was compiled: 9 and 0 for sm_90 */
    bool portable;         /**< PTX, which the driver compiles for this and any later one */
    const unsigned char *data;
    size_t bytes;
} kvf_device_image;

/** Ascending; machine code runs on devices of the same major number and the same or a larger minor one. */
extern const kvf_device_image kvf_device_images[];
extern const size_t kvf_device_image_count;

/** The image for a device of this compute capability; NULL: this build has none. */
const kvf_device_image *kvf_device_image_for(uint32_t major, uint32_t minor);

/**
 * Loads the code for a device, which must be entered.
 *
 * @return KVF_OK, KVF_E_UNSUPPORTED (this build has no code for it), and the results of kvf_cuda_status()
 */
kvf_status kvf_device_code_load(const kvf_cuda *cuda, uint32_t device, CUmodule *out);

/** Finds a kernel, and has it loaded: by default the driver would do so at the first launch, and might then wait until
 * the device has done all its work. @return as kvf_cuda_status() */
kvf_status kvf_device_kernel(const kvf_cuda *cuda, uint32_t device, CUmodule module, const char *name,
                             CUfunction *out);

#endif
