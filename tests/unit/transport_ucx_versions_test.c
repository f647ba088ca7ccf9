/*
 * Different versions of UCX that talk to each other: every ordered pair of the libraries that the environment variable
 * KVF_UCX_LIBRARIES names (files, separated by ':'), in two processes, and in one process if their files have different
 * names. Without the variable nothing is tested; scripts/check-ucx sets it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "process_pair.h"
#include "transport/ucx/ucx.h"

#define LIBRARIES_MAX 8

static const pair_kind tcp_way = {"ucx", {false, false}, "ucx", {"ucx.tls", "tcp,self"}};
static const pair_kind posix_way = {"ucx", {true, true}, "ucx", {"ucx.tls", "posix,self"}};

static char *libraries[LIBRARIES_MAX];
static size_t library_count;
static const char *of_target, *of_actor; /* the libraries of the pair under test */

/* ---- two processes --------------------------------------------------------------------------- */

static void target(process *side) {
    static kvf_run runs[256];
    side->library = of_target;
    open_side(side, 0, 1);
    send_card(side);
    while (side->notes < 1) {
        if (heard(side)) { /* the actor was refused */
            close_side(side);
            return;
        }
        progress(side);
    }
    CHECK(is_exact(side, runs, make_runs(runs, 200, 4000, 7u), false, 2, 1));
    fill(side, 1);
    say(side, 'n');
    serve_until_told(side);
    close_side(side);
}

/* Versions that do not understand each other are refused by name; another version is refused for no other reason. */
static bool connect_or_be_refused(kvf_transport *transport, const void *card, size_t bytes, kvf_peer **peer) {
    kvf_status status = kvf_transport_connect(transport, card, bytes, peer);
    if (status == KVF_OK)
        return true;
    CHECK(status == KVF_E_UNSUPPORTED);
    CHECK(strstr(kvf_error_detail(), "do not understand each other"));
    CHECK(strcmp(of_target, of_actor) != 0);
    (void)fprintf(stderr, "  refused: %s\n", kvf_error_detail());
    return false;
}

static void actor(process *side) {
    static kvf_run runs[256];
    static unsigned char card[65536];
    side->library = of_actor;
    open_side(side, 0, 2);
    if (!connect_or_be_refused(side->transport, card, receive_card(side, card, sizeof card), &side->peer)) {
        say(side, 'x');
        close_side(side);
        return;
    }
    submit(side, KVF_WRITE, runs, make_runs(runs, 200, 4000, 7u), NULL);
    await_end(side, 1);
    CHECK(side->ended == KVF_OK);
    notify(side, 0, 100);
    char word = 0;
    while (recv(side->line, &word, 1, MSG_DONTWAIT) < 0)
        progress(side);
    CHECK(word == 'n');
    size_t count = make_runs(runs, 200, 4000, 8u);
    submit(side, KVF_READ, runs, count, NULL);
    await_end(side, 2);
    CHECK(side->ended == KVF_OK);
    CHECK(is_exact(side, runs, count, true, 1, 2));
    say(side, 'x');
    close_side(side);
}

static void for_every_pair(void (*test)(void)) {
    if (library_count < 2) {
        print_message("KVF_UCX_LIBRARIES does not name several libraries\n");
        skip();
    }
    for (size_t i = 0; i < library_count; i++)
        for (size_t j = 0; j < library_count; j++) {
            of_target = libraries[i];
            of_actor = libraries[j];
            print_message("memory of %s, moved by %s\n", of_target, of_actor);
            test();
        }
}

static void run_by_tcp(void) {
    run_both(&tcp_way, target, actor, false);
}

static void run_by_posix(void) {
    run_both(&posix_way, target, actor, false);
}

static void every_version_moves_bytes_of_every_other_by_tcp(void **state) {
    (void)state;
    for_every_pair(run_by_tcp);
}

static void every_version_moves_bytes_of_every_other_by_shared_memory(void **state) {
    (void)state;
    for_every_pair(run_by_posix);
}

/* ---- one process ----------------------------------------------------------------------------- */

static const char *file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Both ends in this process, each with its own UCX. */
static void move_within(process *owner, process *mover) {
    static kvf_run runs[256];
    const void *card;
    size_t bytes, count = make_runs(runs, 200, 4000, 9u);
    open_side(owner, 0, 1);
    open_side(mover, 0, 2);
    CHECK(kvf_transport_export(owner->transport, &card, &bytes) == KVF_OK);
    bool connected = connect_or_be_refused(mover->transport, card, bytes, &mover->peer);
    if (connected)
        submit(mover, KVF_READ, runs, count, NULL);
    while (connected && mover->ends == 0) {
        CHECK(kvf_transport_progress(owner->transport, NULL) == KVF_OK);
        CHECK(kvf_transport_progress(mover->transport, NULL) == KVF_OK);
    }
    CHECK(mover->ended == KVF_OK);
    CHECK(is_exact(mover, runs, connected ? count : 0, true, 1, 2));
    close_side(mover);
    close_side(owner);
}

static void run_in_one_process(void) {
    (void)fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        (void)alarm(ALARM_SECONDS);
        process owner = {.way = &tcp_way, .library = of_target},
                mover = {.way = &tcp_way, .library = of_actor};
        const kvf_ucx_library *first, *second;
        CHECK(kvf_ucx_load(of_target, &first) == KVF_OK);
        kvf_status status = kvf_ucx_load(of_actor, &second);
        if (strcmp(file_name(of_target), file_name(of_actor)) == 0 && strcmp(of_target, of_actor) != 0) {
            CHECK(status == KVF_E_UNSUPPORTED || first == second);
            exit(0);
        }
        CHECK(status == KVF_OK);
        CHECK((first == second) == (strcmp(of_target, of_actor) == 0));
        move_within(&owner, &mover);
        exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void two_versions_work_side_by_side_in_one_process(void **state) {
    (void)state;
    for_every_pair(run_in_one_process);
}

int main(void) {
    char *names = getenv("KVF_UCX_LIBRARIES");
    names = strdup(names ? names : "");
    char *rest = names;
    for (char *name; (name = strsep(&rest, ":")) != NULL && library_count < LIBRARIES_MAX;)
        if (*name)
            libraries[library_count++] = name;
    (void)setenv("UCX_NET_DEVICES", "lo", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_version_moves_bytes_of_every_other_by_tcp),
        cmocka_unit_test(every_version_moves_bytes_of_every_other_by_shared_memory),
        cmocka_unit_test(two_versions_work_side_by_side_in_one_process),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(names);
    return failed;
}
