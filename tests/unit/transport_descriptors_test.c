/*
 * Few file descriptors are left: "auto" goes without UCX, which aborts if it cannot open some, and everything else that
 * cannot be opened is an error with a sentence. Each count runs in a child process; this process never opens UCX.
 */
#include <kvferry/transport.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { WORKS, REFUSED, WITHOUT_UCX, WRONG };

/* Lets this process open so many more descriptors. */
static void leave(int left) {
    int next = dup(STDIN_FILENO); /* all lower numbers are open */
    (void)close(next);
    struct rlimit limit = {(rlim_t)(next + left), (rlim_t)(next + left)};
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
        _exit(WRONG);
}

static bool has(const void *card, size_t bytes, const char *kind) {
    const char *data = card;
    size_t length = strlen(kind);
    for (size_t i = 0; i + length <= bytes; i++)
        if (memcmp(data + i, kind, length) == 0)
            return true;
    return false;
}

/* Registers memory and connects to itself. */
static kvf_status use(kvf_transport *transport, const void **card, size_t *bytes) {
    void *address;
    kvf_peer *peer;
    kvf_status status = kvf_transport_allocate(transport, KVF_MEMORY_HOST, 0, 4096, &address);
    kvf_memory memory = {.struct_size = sizeof memory, .bytes = 4096};
    if (status)
        return status;
    memory.address = address;
    status = kvf_transport_register(transport, &memory, 1);
    if (!status)
        status = kvf_transport_export(transport, card, bytes);
    return status ? status : kvf_transport_connect(transport, *card, *bytes, &peer);
}

static int open_with(const char *kind, int left) {
    (void)alarm(60);
    leave(left);
    kvf_transport *transport;
    const void *card = NULL;
    size_t bytes = 0;
    const kvf_setting setting = {"ucx.emulated", "on"};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = &setting, .setting_count = 1};
    kvf_status status = kvf_transport_open(kind, &options, &transport);
    if (status)
        return status == KVF_E_IO || status == KVF_E_UNSUPPORTED ? *kvf_error_detail() ? REFUSED : WRONG
                                                                 : WRONG;
    status = use(transport, &card, &bytes);
    int seen = status ? REFUSED : has(card, bytes, "ucx") ? WORKS : WITHOUT_UCX;
    kvf_transport_close(transport);
    return !status || status == KVF_E_IO ? seen : WRONG;
}

static int outcome(const char *kind, int left) {
    (void)fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        _exit(open_with(kind, left));
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status))
        print_error("%s died with %d descriptors left\n", kind, left);
    assert_true(WIFEXITED(status));
    assert_int_not_equal(WEXITSTATUS(status), WRONG);
    return WEXITSTATUS(status);
}

static bool has_ucx(void) {
    for (uint32_t i = 0; kvf_transport_kind_name(i); i++)
        if (strcmp(kvf_transport_kind_name(i), "ucx") == 0)
            return true;
    return false;
}

static void with_few_descriptors_left_a_transport_goes_without_ucx(void **state) {
    (void)state;
    for (int left = 0; left < 100; left++) {
        int seen = outcome("auto", left);
        assert_true(left < 20 || seen != REFUSED);
        assert_true(left >= 60 || seen != WORKS); /* it must not work by chance */
    }
    assert_int_equal(outcome("auto", 200), has_ucx() ? WORKS : WITHOUT_UCX);
}

static void with_few_descriptors_left_ucx_is_refused(void **state) {
    (void)state;
    for (int left = 0; left < 60; left++)
        assert_int_equal(outcome("ucx", left), REFUSED);
}

int main(void) {
    (void)setenv("UCX_NET_DEVICES", "lo", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(with_few_descriptors_left_a_transport_goes_without_ucx),
        cmocka_unit_test(with_few_descriptors_left_ucx_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
