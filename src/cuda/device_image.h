/* Device code that was compiled with the library: cmake/device_code.cmake makes the table from kernels.cu. */
#ifndef KVF_CUDA_DEVICE_IMAGE_H
#define KVF_CUDA_DEVICE_IMAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct kvf_device_image {
    uint32_t major, minor; /**< of the compute capability that it is for: 9 and 0 of sm_90 */
    bool portable;         /**< PTX, which the driver compiles for this and any later one */
    const unsigned char *data;
    size_t bytes;
} kvf_device_image;

/** Ascending; machine code runs where the major number is the same and the minor one is no smaller. */
extern const kvf_device_image kvf_device_images[];
extern const size_t kvf_device_image_count;

/** What a device of this compute capability runs; NULL: nothing of this build. */
const kvf_device_image *kvf_device_image_for(uint32_t major, uint32_t minor);

#endif
