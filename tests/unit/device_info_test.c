/*
 * What callers can learn about devices (kvferry/device.h), over the stand-in for the driver.
 */
#include <kvferry/device.h>
#include <stdio.h>

#include "devices.h"
#include "shapes.h"

static void devices_are_counted_and_described(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    uint32_t count = 0;
    kvf_device_info info = {.struct_size = sizeof info};
    assert_ok(kvf_device_count(KVF_MEMORY_CUDA, &count));
    assert_int_equal(count, 2);
    assert_ok(kvf_device_get_info(KVF_MEMORY_CUDA, 1, &info));
    assert_string_equal(info.name, "stand-in 1");
    assert_int_equal(info.major, 9);
    assert_int_equal(info.minor, 0);
    assert_int_equal(info.multiprocessors, 4);
    assert_int_equal(info.driver_version, 12080);
    assert_int_equal(info.memory_bytes, 1u << 30);
    /* A build without the compiler for device code has no device code, and says so. */
    assert_string_equal(info.code, info.why_not[0] ? "" : "sm_90");
    assert_string_equal(info.why_not, info.code[0] ? "" : "this build has no device code");
}

static void a_caller_that_knows_less_of_a_device_is_told_less(void **unused) {
    (void)unused;
    kvf_device_info info;
    memset(&info, 0x5a, sizeof info);
    info.struct_size = offsetof(kvf_device_info, memory_bytes);
    assert_ok(kvf_device_get_info(KVF_MEMORY_CUDA, 0, &info));
    assert_true(info.name[0] != 0x5a);
    assert_int_equal(info.memory_bytes, 0x5a5a5a5a5a5a5a5au);
}

static void wrong_arguments_are_refused(void **unused) {
    (void)unused;
    uint32_t number = 0;
    kvf_device_info info = {.struct_size = sizeof info};
    assert_fails(kvf_device_count(KVF_MEMORY_HOST, &number), KVF_E_INVALID,
                 "memory kind is 0; allowed: 1 (CUDA)");
    assert_fails(kvf_device_count(KVF_MEMORY_CUDA, NULL), KVF_E_INVALID, "out is NULL");
    assert_fails(kvf_device_get_info(KVF_MEMORY_CUDA, 99, &info), KVF_E_RANGE,
                 "CUDA device 99; this process sees");
    assert_fails(kvf_device_of(KVF_MEMORY_CUDA, &info, NULL), KVF_E_INVALID, "device is NULL");
    info.struct_size = 0;
    assert_fails(kvf_device_get_info(KVF_MEMORY_CUDA, 0, &info), KVF_E_INVALID, "struct_size");
}

static void an_address_is_known_by_its_device_until_it_is_freed(void **unused) {
    (void)unused;
    enum { BYTES = 4096 };
    uint32_t device = 99;
    for (uint32_t wanted = 0; wanted < 2; wanted++) {
        const CUdeviceptr address = device_room(wanted, BYTES);
        assert_ok(kvf_device_of(KVF_MEMORY_CUDA, (const void *)(uintptr_t)(address + BYTES - 1), &device));
        assert_int_equal(device, devices_number(wanted));
        device_room_free(address);
        assert_fails(kvf_device_of(KVF_MEMORY_CUDA, (const void *)(uintptr_t)address, &device),
                     KVF_E_NOT_FOUND, "no CUDA device of this process has memory at 0x");
        assert_int_equal(device, devices_number(wanted));
    }
    assert_fails(kvf_device_of(KVF_MEMORY_CUDA, &device, &device), KVF_E_NOT_FOUND, "no CUDA device");
}

static bool has_context(const kvf_cuda *cuda, CUdevice device) {
    unsigned flags;
    int active;
    assert_int_equal(cuda->cuDevicePrimaryCtxGetState(device, &flags, &active), 0);
    return active;
}

/* Must be the first test: no device is used before. A context takes half a GiB of a device: one was made on device 0 by
 * every process that asked on a thread without one. */
static void asking_for_the_device_of_an_address_makes_no_context(void **unused) {
    (void)unused;
    DEVICES_ARE_STAND_INS();
    const kvf_cuda *cuda;
    CUcontext of_engine;
    CUdeviceptr address;
    uint32_t device = 99;
    assert_ok(kvf_cuda_find(&cuda));
    assert_fails(kvf_device_of(KVF_MEMORY_CUDA, &device, &device), KVF_E_NOT_FOUND, "no CUDA device");
    assert_false(has_context(cuda, 0));
    assert_false(has_context(cuda, 1));
    /* An engine on device 1. */
    assert_int_equal(cuda->cuDevicePrimaryCtxRetain(&of_engine, 1), 0);
    assert_int_equal(cuda->cuCtxPushCurrent_v2(of_engine), 0);
    assert_int_equal(cuda->cuMemAlloc_v2(&address, 4096), 0);
    assert_int_equal(cuda->cuCtxPopCurrent_v2(&of_engine), 0);
    assert_ok(kvf_device_of(KVF_MEMORY_CUDA, (const void *)(uintptr_t)address, &device));
    assert_int_equal(device, 1);
    assert_fails(kvf_device_of(KVF_MEMORY_CUDA, &device, &device), KVF_E_NOT_FOUND, "no CUDA device");
    assert_false(has_context(cuda, 0));
    assert_int_equal(cuda->cuCtxPushCurrent_v2(of_engine), 0);
    assert_int_equal(cuda->cuMemFree_v2(address), 0);
    assert_int_equal(cuda->cuCtxPopCurrent_v2(&of_engine), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(asking_for_the_device_of_an_address_makes_no_context),
        cmocka_unit_test(devices_are_counted_and_described),
        cmocka_unit_test(a_caller_that_knows_less_of_a_device_is_told_less),
        cmocka_unit_test(wrong_arguments_are_refused),
        cmocka_unit_test(an_address_is_known_by_its_device_until_it_is_freed),
    };
    devices_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
