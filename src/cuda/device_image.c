#include "cuda/device_image.h"

static bool runs_on(const kvf_device_image *image, uint32_t major, uint32_t minor) {
    return (image->major == major && image->minor <= minor) || (image->portable && image->major < major);
}

/* Prefers machine code to PTX, and of each the newest. */
const kvf_device_image *kvf_device_image_for(uint32_t major, uint32_t minor) {
    const kvf_device_image *found = NULL;
    for (size_t i = 0; i < kvf_device_image_count; i++) {
        const kvf_device_image *image = &kvf_device_images[i];
        if (runs_on(image, major, minor) && (!found || found->portable || !image->portable))
            found = image;
    }
    return found;
}
