/* For builds without devices (KVF_CORE_ONLY): every region of a device is refused when it is checked. */
#include "connector/postprocess_device.h"

static kvf_status refuse(void) {
    return kvf_fail(KVF_E_UNSUPPORTED, "this build has no devices (KVF_CORE_ONLY)");
}

kvf_status kvf_check_device_memory(const kvf_block_region *region) {
    (void)region;
    return refuse();
}

/* No region lies on a device. */
kvf_status kvf_finish_on_devices(const kvf_received *received, kvf_device_limits limits) {
    (void)received;
    (void)limits;
    return KVF_OK;
}

kvf_status kvf_copy_layer_on_device(const kvf_block_region *from, const kvf_block_region *to,
                                    const uint32_t *from_ids, const uint32_t *to_ids, size_t count,
                                    kvf_device_limits limits) {
    (void)from;
    (void)to;
    (void)from_ids;
    (void)to_ids;
    (void)count;
    (void)limits;
    return refuse();
}
