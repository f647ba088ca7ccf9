/*
 * Owners, readers and writers of device memory when something is in short supply, changes at a bad moment, or ends
 * while something is under way: nothing is repeated for ever, stays lost for longer than it must, or is left behind.
 */
#include <fcntl.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#include "cuda/device_image.h"
#include "cuda_ends.h"
#include "cuda_owner.h"

#define DESCRIPTORS 256

/* ---- a process without free descriptors --------------------------------------------------------- */

static int taken[DESCRIPTORS], taken_count;
static struct rlimit descriptors_before;

static void take_all_descriptors(void) {
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &descriptors_before), 0);
    const struct rlimit few = {DESCRIPTORS, descriptors_before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    while ((taken[taken_count] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0)
        taken_count++;
}

static void give_descriptors_back(void) {
    while (taken_count > 0)
        (void)close(taken[--taken_count]);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &descriptors_before), 0);
}

/* ---- writing ------------------------------------------------------------------------------------ */

/* The card that the owner has been told is too old when it connects back. That changes no region that peers may use,
 * and the writer once said nothing when it was asked for its regions anew: the owner asked again, for ever. */
static void a_writer_whose_generation_rises_tells_its_memory_anew(void **state) {
    (void)state;
    outcome noted;
    both_open();
    run_rounds();
    submit(KVF_WRITE, BYTES, &noted);
    assert_ok(kvf_transport_progress(writer.transport, NULL)); /* it tells its memory, and asks */
    assert_ok(kvf_transport_unregister_region(writer.transport, 1));
    run_rounds();
    assert_int_equal(noted.calls, 1);
    assert_int_equal(noted.status, KVF_OK);
    assert_memory_equal(owner.seen[0], writer.seen[0], BYTES);
    both_close();
}

/* Once a connection to the writer had failed, all its later writes did. */
static void an_owner_that_could_not_connect_back_tries_again(void **state) {
    (void)state;
    outcome noted;
    both_open();
    run_rounds();
    submit(KVF_WRITE, BYTES, &noted);
    take_all_descriptors();
    run_rounds();
    give_descriptors_back();
    assert_int_equal(noted.status, KVF_E_IO);
    assert_non_null(strstr(noted.detail, "the owner could not read the data: socket: Too many open files"));
    for (int i = 0; i < 100 && noted.status; i++) {
        (void)usleep(10000);
        submit(KVF_WRITE, BYTES, &noted);
        run_rounds();
        assert_int_equal(noted.calls, 1);
    }
    assert_int_equal(noted.status, KVF_OK);
    assert_memory_equal(owner.seen[0], writer.seen[0], BYTES);
    assert_int_equal(writer.lost, 0);
    both_close();
}

/* ---- closing ------------------------------------------------------------------------------------- */

static void *count_allocate(void *context, size_t bytes) {
    ++*(int64_t *)context;
    return malloc(bytes);
}

static void *count_resize(void *context, void *memory, size_t bytes) {
    *(int64_t *)context += memory == NULL;
    return realloc(memory, bytes);
}

static void count_release(void *context, void *memory) {
    *(int64_t *)context -= memory != NULL;
    free(memory);
}

static void an_owner_that_closes_while_it_reads_frees_what_it_was_asked_for(void **state) {
    enum { LATE_NS = 20000000 };
    (void)state;
    static int64_t allocated;
    const kvf_allocator counting = {count_allocate, count_resize, count_release, &allocated};
    const size_t left = devices_left();
    outcome noted;
    assert_ok(kvf_set_allocator(&counting));
    both_open();
    run_rounds();
    devices_delay(LATE_NS);
    submit(KVF_WRITE, BYTES, &noted);
    run_rounds();
    devices_delay(0);
    assert_int_equal(written(0, BYTES), 0);
    kvf_transport_close(owner.transport);
    kvf_transport_close(writer.transport);
    assert_int_equal(noted.calls, 1);
    devices_free();
    assert_int_equal(devices_left(), left);
    assert_int_equal(allocated, 0);
    assert_ok(kvf_set_allocator(NULL));
}

int main(int argument_count, char **arguments) {
    if (argument_count == 5 && strcmp(arguments[1], "owner") == 0)
        return owner_main(arguments);
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_writer_whose_generation_rises_tells_its_memory_anew),
        cmocka_unit_test(an_owner_that_could_not_connect_back_tries_again),
        cmocka_unit_test(an_owner_that_closes_while_it_reads_frees_what_it_was_asked_for),
    };
    devices_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
