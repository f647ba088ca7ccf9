/*
 * A libfabric that takes memory of CUDA devices, over the stand-in for the CUDA driver: which CUDA context is current
 * while libfabric is called. The provider of this machine takes no such memory: the test says that it does, and registers
 * the memory where the host sees it.
 */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "devices.h"
#include "shapes.h"
#include "transport/front.h"
#include "transport/libfabric/libfabric.h"

#define BYTES 65536u

/* ---- libfabric's functions, each with a look at the context before ------------------------------ */

static CUresult (*get_current)(CUcontext *context);

static int refusal; /* of memory of a device */

/* Calls since the test began to count. */
static struct { unsigned registered, freed, read, without; } calls;

static void look(unsigned *count) {
    CUcontext current = NULL;
    assert_int_equal(get_current(&current), 0);
    ++*count;
    calls.without += current == NULL;
}

static struct fi_ops_mr real_mr, our_mr;
static struct fi_ops_cq real_cq, our_cq;
static struct fi_ops real_memory, our_memory;

static int free_memory(struct fid *memory) {
    look(&calls.freed);
    return real_memory.close(memory);
}

static int register_memory(struct fid *domain, const struct fi_mr_attr *attributes, uint64_t flags,
                           struct fid_mr **out) {
    struct fi_mr_attr seen = *attributes;
    struct iovec where = *attributes->mr_iov;
    look(&calls.registered);
    if (attributes->iface == FI_HMEM_CUDA && refusal)
        return refusal;
    if (attributes->iface == FI_HMEM_CUDA) {
        where.iov_base = devices_look((uint64_t)(uintptr_t)where.iov_base);
        seen.mr_iov = &where;
        seen.iface = FI_HMEM_SYSTEM;
        seen.device.cuda = 0;
    }
    const int failed = real_mr.regattr(domain, &seen, flags, out);
    if (failed)
        return failed;
    real_memory = our_memory = *(*out)->fid.ops;
    our_memory.close = free_memory;
    (*out)->fid.ops = &our_memory;
    return 0;
}

static ssize_t read_queue(struct fid_cq *queue, void *out, size_t count) {
    look(&calls.read);
    return real_cq.read(queue, out, count);
}

static void watch(kvf_libfabric_endpoint *endpoint) {
    real_mr = our_mr = *endpoint->domain->mr;
    our_mr.regattr = register_memory;
    endpoint->domain->mr = &our_mr;
    real_cq = our_cq = *endpoint->port.cq->ops;
    our_cq.read = read_queue;
    endpoint->port.cq->ops = &our_cq;
    endpoint->info->caps |= FI_HMEM;
    memset(&calls, 0, sizeof calls);
}

/* ---- tests -------------------------------------------------------------------------------------- */

static kvf_transport *open_watched(void) {
    const kvf_transport_options options = {.struct_size = sizeof options};
    kvf_transport *transport;
    if (kvf_transport_open("libfabric", &options, &transport) != KVF_OK) {
        print_message("%s\n", kvf_error_detail());
        skip();
    }
    watch(transport->fabrics[0].endpoint);
    return transport;
}

static void use(const kvf_memory *memory) {
    kvf_transport *transport = open_watched();
    assert_int_equal(kvf_transport_register(transport, memory, 1), KVF_OK);
    for (int i = 0; i < 100; i++)
        assert_int_equal(kvf_transport_progress(transport, NULL), KVF_OK);
    kvf_transport_close(transport);
    assert_true(calls.registered > 0 && calls.read > 0 && calls.freed > 0);
}

static void with_memory_of_a_device_calls_of_libfabric_have_a_context(void **unused) {
    (void)unused;
    CUcontext current = NULL;
    void *seen;
    kvf_memory memory = device_memory(1, BYTES, &seen);
    memory.withheld = false;
    use(&memory);
    assert_int_equal(calls.without, 0);
    assert_int_equal(get_current(&current), 0);
    assert_null(current);
    devices_free();
}

static void without_memory_of_a_device_no_context_is_entered(void **unused) {
    (void)unused;
    static unsigned char bytes[BYTES];
    const kvf_memory memory = {.struct_size = sizeof memory, .address = bytes, .bytes = BYTES};
    use(&memory);
    assert_int_equal(calls.without, calls.registered + calls.read + calls.freed);
}

static void a_refusal_says_whether_the_memory_was_created_for_network_cards(void **unused) {
    (void)unused;
    const CUdeviceptr segments = device_segments(0, SEGMENT, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    const kvf_memory memory = {.struct_size = sizeof memory,
                               .address = (void *)(uintptr_t)segments,
                               .bytes = SEGMENT,
                               .kind = KVF_MEMORY_CUDA};
    kvf_transport *transport = open_watched();
    refusal = -FI_EINVAL;
    assert_fails(kvf_transport_register(transport, &memory, 1), KVF_E_UNSUPPORTED,
                 "cuMemCreate() without allocFlags.gpuDirectRDMACapable",
                 "create it with that, or register it as withheld: libfabric registration: ");
    refusal = 0;
    assert_ok(kvf_transport_register(transport, &memory, 1));
    kvf_transport_close(transport);
    device_segments_free(segments, SEGMENT);
}

/* As torch's expandable segments are. Nothing of it is registered, for that would keep EFA from registering arenas. */
static void memory_in_several_segments_is_refused(void **unused) {
    (void)unused;
    const uint64_t bytes = 3 * (uint64_t)SEGMENT; /* one of 1, one of 2 */
    const CUdeviceptr segments = device_segments(0, bytes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    kvf_memory memory = {.struct_size = sizeof memory,
                         .address = (void *)(uintptr_t)segments,
                         .bytes = bytes,
                         .kind = KVF_MEMORY_CUDA};
    kvf_transport *transport = open_watched();
    assert_fails(kvf_transport_register(transport, &memory, 1), KVF_E_UNSUPPORTED,
                 "region 0 is memory of CUDA device 0 in several segments of cuMemCreate()");
    assert_int_equal(calls.registered, 0);
    memory.bytes = SEGMENT;
    assert_ok(kvf_transport_register(transport, &memory, 1));
    kvf_transport_close(transport);
    device_segments_free(segments, bytes);
}

/* The provider over TCP emulates. */
static void memory_of_a_device_is_withheld_as_that_of_the_host(void **unused) {
    (void)unused;
    void *seen;
    for (int withheld = 0; withheld < 2; withheld++) {
        kvf_memory memory = device_memory(0, BYTES, &seen);
        memory.withheld = false;
        kvf_transport *transport = open_watched();
        kvf_transport_withhold_emulated(transport, withheld);
        assert_ok(kvf_transport_register(transport, &memory, 1));
        const kvf_libfabric_endpoint *endpoint = transport->fabrics[0].endpoint;
        assert_true(endpoint->emulates);
        assert_int_equal(endpoint->regions[0].withheld, withheld);
        kvf_transport_close(transport);
        devices_free();
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(with_memory_of_a_device_calls_of_libfabric_have_a_context),
        cmocka_unit_test(without_memory_of_a_device_no_context_is_entered),
        cmocka_unit_test(a_refusal_says_whether_the_memory_was_created_for_network_cards),
        cmocka_unit_test(memory_in_several_segments_is_refused),
        cmocka_unit_test(memory_of_a_device_is_withheld_as_that_of_the_host),
    };
    devices_open();
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *address = NULL;
    if (library)
        address = dlsym(library, "cuCtxGetCurrent");
    memcpy(&get_current, &address, sizeof get_current);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
