/*
 * Owners, readers and writers of device memory when something is in short supply, changes at a bad moment, or ends
 * while something is under way: nothing is repeated for ever, stays lost for longer than it must, or is left behind.
 */
#include <stdio.h>
#include <unistd.h>

#include "cuda/device_image.h"
#include "cuda_ends.h"
#include "cuda_owner.h"

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

int main(int argument_count, char **arguments) {
    if (argument_count == 5 && strcmp(arguments[1], "owner") == 0)
        return owner_main(arguments);
    if (kvf_device_image_count == 0) {
        (void)printf("skipped: this build has no device code (scripts/device-compiler)\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_writer_whose_generation_rises_tells_its_memory_anew),
    };
    devices_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
