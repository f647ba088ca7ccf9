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

kvf_status kvf_device_code_load(const kvf_cuda *cuda, uint32_t device, CUmodule *out) {
    const kvf_cuda_device *known = &cuda->devices[device];
    const kvf_device_image *image = kvf_device_image_for(known->major, known->minor);
    if (!image)
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "this build has no code for CUDA device %u, %s, of compute capability %u.%u", device,
                        known->name, known->major, known->minor);
    return kvf_cuda_status(device, cuda->cuModuleLoadData(out, image->data), "loading device code");
}

kvf_status kvf_device_kernel(const kvf_cuda *cuda, uint32_t device, CUmodule module, const char *name,
                             CUfunction *out) {
    CUresult result = cuda->cuModuleGetFunction(out, module, name);
    if (!result && cuda->cuFuncLoad)
        result = cuda->cuFuncLoad(*out);
    return kvf_cuda_status(device, result, "loading device code");
}
