/*
 * Finding and loading UCX: a library that is no UCX, or an unusable one, is named with the reason and does no harm; of
 * several libraries the first usable one is used; and one process may have more than one UCX.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include <kvferry/transport.h>

#include "transport/ucx/ucx.h"

static char fakes[1024]; /* the folder of the fake libraries that the build made */
static char folder[64];  /* for files that the tests make */
static char text[2048];  /* the path in question, or a list of them */

static const char *fake(const char *name) {
    (void)snprintf(text, sizeof text, "%s/libfake_ucx_%s.so", fakes, name);
    return text;
}

static const char *made(const char *name) {
    (void)snprintf(text, sizeof text, "%s/%s", folder, name);
    return text;
}

static void write_file(const char *path, const char *content) {
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(content, file) >= 0 && fclose(file) == 0);
}

static kvf_status open_with(const char *kind, const char *library, kvf_transport **out) {
    kvf_setting setting = {"ucx.library", library};
    kvf_transport_options options = {
        .struct_size = sizeof options, .settings = &setting, .setting_count = library ? 1 : 0};
    return kvf_transport_open(kind, &options, out);
}

static kvf_transport_finding finding_of(kvf_transport *transport, const char *kind) {
    kvf_transport_finding found = {.struct_size = sizeof found};
    for (uint32_t i = 0; kvf_transport_find(transport, i, &found) == KVF_OK; i++)
        if (strcmp(found.kind, kind) == 0)
            return found;
    fail_msg("no finding of %s", kind);
    return found;
}

/* "ucx" cannot be opened with this library, and "auto" goes without it and says why. The detail has both words. */
static void assert_refused(const char *library, const char *word, const char *other) {
    kvf_transport *transport = NULL;
    assert_int_equal(open_with("ucx", library, &transport), KVF_E_UNSUPPORTED);
    if (!strstr(kvf_error_detail(), word) || !strstr(kvf_error_detail(), other))
        fail_msg("\"%s\" has not both \"%s\" and \"%s\"", kvf_error_detail(), word, other);
    assert_int_equal(open_with("auto", library, &transport), KVF_OK);
    kvf_transport_finding found = finding_of(transport, "ucx");
    assert_true(found.asked);
    assert_false(found.works);
    assert_non_null(strstr(found.why_not, word));
    assert_true(finding_of(transport, "shm").works);
    kvf_transport_close(transport);
}

/* Opens this machine's UCX; the test is skipped if the machine has none. */
static kvf_transport *open_real(void) {
    kvf_transport *transport = NULL;
    if (open_with("ucx", NULL, &transport) != KVF_OK) {
        print_message("this machine has no UCX: %s\n", kvf_error_detail());
        skip();
    }
    return transport;
}

/* ---- what cannot be used --------------------------------------------------------------------- */

static void opening_other_kinds_loads_no_ucx(void **state) {
    (void)state;
    const char *kinds[] = {"inproc", "shm"};
    for (size_t i = 0; i < 2; i++) {
        kvf_transport *transport;
        assert_int_equal(open_with(kinds[i], fake("whole"), &transport), KVF_OK);
        kvf_transport_finding found = finding_of(transport, "ucx");
        assert_false(found.asked);
        assert_false(found.works);
        assert_string_equal(found.why_not, "");
        kvf_transport_close(transport);
    }
    assert_null(dlopen("libucp.so.0", RTLD_LAZY | RTLD_NOLOAD));
    assert_null(dlopen(fake("whole"), RTLD_LAZY | RTLD_NOLOAD));
}

static void a_library_that_is_not_there_is_named(void **state) {
    (void)state;
    assert_refused("/no/such/libucp.so.0", "/no/such/libucp.so.0: ", "No such file");
    assert_refused("libno-such-ucp.so.0", "libno-such-ucp.so.0: ", "No such file");
}

static void a_file_that_is_no_library_is_named(void **state) {
    (void)state;
    write_file(made("text"),
               "This is no library, but it is long enough to be looked at as one would be: ...");
    assert_refused(made("text"), text, "invalid ELF header");
    write_file(made("empty"), "");
    assert_refused(made("empty"), text, "file too short");
    assert_refused(folder, folder, "not a regular file");
    assert_int_equal(mkfifo(made("fifo"), 0600), 0);
    assert_refused(made("fifo"), text, "not a regular file");
}

static void a_library_that_is_no_ucx_is_named(void **state) {
    (void)state;
    char path[2048];
    (void)snprintf(path, sizeof path, "%s/libno_ucx.so", fakes);
    assert_refused(path, path, "no ucp_get_version(), so it is no UCX");
    assert_null(dlopen(path, RTLD_LAZY | RTLD_NOLOAD)); /* the library was unloaded */
}

static void a_ucx_that_is_too_old_or_of_another_major_version_is_named_with_its_version(void **state) {
    (void)state;
    assert_refused(fake("old"), text, "it is UCX 1.12.7; allowed: 1.13 and later versions of 1");
    assert_refused(fake("next"), text, "it is UCX 2.0.7; allowed: 1.13");
}

static void a_ucx_without_a_function_is_named_with_that(void **state) {
    (void)state;
    assert_refused(fake("lacking"), text, "it has no ucp_put_nbx()");
}

static void every_library_that_was_tried_is_named(void **state) {
    (void)state;
    char list[4096];
    (void)snprintf(list, sizeof list, "/no/such/file:%s/libfake_ucx_old.so:%s/libno_ucx.so", fakes, fakes);
    assert_refused(list, "/no/such/file: ", "No such file");
    assert_refused(list, "libfake_ucx_old.so: ", "UCX 1.12.7");
    assert_refused(list, "libno_ucx.so: ", "no UCX");
}

static void an_empty_name_is_invalid(void **state) {
    (void)state;
    const char *lists[] = {"", ":", "/no/such/file:", ":libucp.so.0"};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        kvf_transport *transport = NULL;
        assert_int_equal(open_with("ucx", lists[i], &transport), KVF_E_INVALID);
        assert_non_null(strstr(kvf_error_detail(), "ucx.library is \""));
    }
}

/* If the program has loaded a UCX with global symbols, these take precedence over those of every other UCX and of the
 * modules that the other opens: only the global one can be used. */
static void run_beside_global_one(void) {
    const kvf_ucx_library *ucx = NULL;
    if (!dlopen(fake("whole"), RTLD_NOW | RTLD_GLOBAL))
        _exit(2);
    for (int i = 0; i < 2; i++)
        if (kvf_ucx_load(i ? "libucp.so.0" : fake("next"), &ucx) != KVF_E_UNSUPPORTED ||
            !strstr(kvf_error_detail(), "another UCX among its global names"))
            _exit(3);
    _exit(kvf_ucx_load(fake("whole"), &ucx) != KVF_OK || strcmp(ucx->version, "1.99.7") != 0);
}

static void beside_a_ucx_among_the_global_names_no_other_is_loaded(void **state) {
    (void)state;
    (void)fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        run_beside_global_one();
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

/* ---- what can be used -------------------------------------------------------------------------------- */

static void a_finding_is_asked_for_rightly(void **state) {
    (void)state;
    kvf_transport *transport;
    kvf_transport_finding found = {.struct_size = 0};
    assert_int_equal(kvf_transport_open("inproc", NULL, &transport), KVF_OK);
    assert_int_equal(kvf_transport_find(transport, 0, &found), KVF_E_INVALID);
    assert_int_equal(kvf_transport_find(transport, 0, NULL), KVF_E_INVALID);
    found.struct_size = sizeof found;
    assert_int_equal(kvf_transport_find(NULL, 0, &found), KVF_E_INVALID);
    assert_int_equal(kvf_transport_find(transport, 99, &found), KVF_E_NOT_FOUND);
    assert_int_equal(kvf_transport_find(transport, 0, &found), KVF_OK);
    assert_string_equal(found.kind, "inproc");
    assert_true(found.works);
    assert_string_equal(found.library, "");
    kvf_transport_close(transport);
}

static void the_first_that_can_be_used_is_used(void **state) {
    (void)state;
    kvf_transport_close(open_real());
    char list[4096];
    (void)snprintf(list, sizeof list, "/no/such/file:%s/libfake_ucx_old.so:libucp.so.0:%s/libno_ucx.so",
                   fakes, fakes);
    kvf_transport *transport;
    assert_int_equal(open_with("ucx", list, &transport), KVF_OK);
    kvf_transport_close(transport);
}

static void the_loaded_library_is_told_with_version_and_ways(void **state) {
    (void)state;
    kvf_transport *transport = open_real();
    kvf_transport_finding found = finding_of(transport, "ucx");
    assert_true(found.works);
    assert_non_null(strstr(found.library, "/libucp.so"));
    const kvf_ucx_library *ucx = NULL;
    assert_int_equal(kvf_ucx_load(NULL, &ucx), KVF_OK);
    assert_string_equal(found.version, ucx->version);
    assert_true(ucx->major == KVF_UCX_MAJOR && ucx->minor >= KVF_UCX_MINOR_MIN);
    assert_non_null(strstr(found.ways, "tcp/lo"));
    kvf_transport_close(transport);
}

static void a_file_is_loaded_once_by_whatever_name(void **state) {
    (void)state;
    kvf_transport *transport = open_real();
    kvf_transport_finding found = finding_of(transport, "ucx");
    const kvf_ucx_library *by_name = NULL, *by_path = NULL, *by_link = NULL;
    assert_int_equal(kvf_ucx_load(NULL, &by_name), KVF_OK);
    assert_int_equal(kvf_ucx_load(found.library, &by_path), KVF_OK);
    assert_int_equal(symlink(found.library, made("link")), 0);
    assert_int_equal(kvf_ucx_load(text, &by_link), KVF_OK);
    assert_ptr_equal(by_name, by_path);
    assert_ptr_equal(by_name, by_link);
    kvf_transport_close(transport);
}

/* Two complete UCX libraries in one process: each endpoint goes on with its own. */
static void a_second_ucx_does_not_disturb_the_first(void **state) {
    (void)state;
    kvf_transport *first = open_real(), *second = NULL;
    assert_int_equal(open_with("ucx", fake("whole"), &second), KVF_E_UNSUPPORTED);
    assert_non_null(strstr(kvf_error_detail(), "this is a fake"));
    const kvf_ucx_library *real = NULL, *other = NULL;
    assert_int_equal(kvf_ucx_load(NULL, &real), KVF_OK);
    assert_int_equal(kvf_ucx_load(fake("whole"), &other), KVF_OK);
    assert_ptr_not_equal(real, other);
    assert_string_equal(other->version, "1.99.7");
    assert_string_equal(real->ucs_status_string(UCS_OK), "Success");
    assert_string_equal(other->ucs_status_string(UCS_OK), "this is a fake");
    assert_int_equal(open_with("ucx", NULL, &second), KVF_OK);
    kvf_transport_close(second);
    assert_int_equal(kvf_transport_progress(first, NULL), KVF_OK);
    kvf_transport_close(first);
}

static void copy_file(const char *from, const char *to) {
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    assert_true(in && out);
    char bytes[65536];
    for (size_t got; (got = fread(bytes, 1, sizeof bytes, in)) > 0;)
        assert_int_equal(fwrite(bytes, 1, got, out), got);
    assert_int_equal(fclose(in), 0);
    assert_int_equal(fclose(out), 0);
}

static void a_ucx_that_would_be_mixed_with_one_that_is_loaded_is_refused(void **state) {
    (void)state;
    kvf_transport *transport = open_real();
    kvf_transport_finding found = finding_of(transport, "ucx");
    copy_file(found.library, made("libucp.so.0"));
    assert_refused(text, text, "this process has the libucs.so");
    kvf_transport_close(transport);
}

/* ---- all ------------------------------------------------------------------------------------- */

static int prepare(void **state) {
    (void)state;
    char program[sizeof fakes - 16] = "";
    if (readlink("/proc/self/exe", program, sizeof program - 1) <= 0)
        return -1;
    for (int up = 0; up < 2; up++)
        *strrchr(program, '/') = '\0';
    (void)snprintf(fakes, sizeof fakes, "%s/fakes", program);
    (void)snprintf(folder, sizeof folder, "/tmp/kvferry-library-XXXXXX");
    (void)setenv("UCX_NET_DEVICES", "lo", 1);
    return mkdtemp(folder) ? 0 : -1;
}

static int clear_up(void **state) {
    (void)state;
    static const char *const names[] = {"text", "empty", "fifo", "link", "libucp.so.0"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        (void)unlink(made(names[i]));
    return rmdir(folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(opening_other_kinds_loads_no_ucx),
        cmocka_unit_test(beside_a_ucx_among_the_global_names_no_other_is_loaded),
        cmocka_unit_test(a_library_that_is_not_there_is_named),
        cmocka_unit_test(a_file_that_is_no_library_is_named),
        cmocka_unit_test(a_library_that_is_no_ucx_is_named),
        cmocka_unit_test(a_ucx_that_is_too_old_or_of_another_major_version_is_named_with_its_version),
        cmocka_unit_test(a_ucx_without_a_function_is_named_with_that),
        cmocka_unit_test(every_library_that_was_tried_is_named),
        cmocka_unit_test(an_empty_name_is_invalid),
        cmocka_unit_test(a_finding_is_asked_for_rightly),
        cmocka_unit_test(the_first_that_can_be_used_is_used),
        cmocka_unit_test(the_loaded_library_is_told_with_version_and_ways),
        cmocka_unit_test(a_file_is_loaded_once_by_whatever_name),
        cmocka_unit_test(a_second_ucx_does_not_disturb_the_first),
        cmocka_unit_test(a_ucx_that_would_be_mixed_with_one_that_is_loaded_is_refused),
    };
    return cmocka_run_group_tests(tests, prepare, clear_up);
}
