/*
 * The beacon, by which peers on this machine notice that an endpoint is gone: also if a child of its owner still holds
 * the sockets. Owners are processes of their own.
 */
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/watch.h"
#include "transport/beacon.h"

typedef struct beacon_scene {
    pid_t owner;
    int line; /* to the owner, and to its child if it has one */
    unsigned char mark[KVF_BEACON_BYTES];
    int set; /* of this process's watches */
} beacon_scene;

/* A child that holds all that its parent has opened, until the test ends. */
static void leave_child(int line) {
    if (fork() == 0) {
        struct pollfd closed = {line, 0, 0}; /* by the test; words are for its parent */
        (void)poll(&closed, 1, -1);
        _exit(0);
    }
}

static void allow_descriptors(rlim_t count) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit))
        _exit(1);
    limit.rlim_cur = count;
    if (setrlimit(RLIMIT_NOFILE, &limit))
        _exit(1);
}

/* Words: 'f' forks, 'c' closes, 'r' replaces, 't' tends, 'n' allows no more descriptors, 'm' allows more again; each is
 * answered. */
_Noreturn static void own(int line) {
    kvf_beacon beacon = {.listener = -1};
    int set;
    char word;
    if (kvf_watch_open(&set))
        _exit(1);
    kvf_beacon_open(&beacon, set);
    (void)send(line, beacon.mark, sizeof beacon.mark, 0);
    while (recv(line, &word, 1, 0) == 1) {
        if (word == 'f')
            leave_child(line);
        if (word == 'c')
            kvf_beacon_close(&beacon);
        if (word == 'r')
            kvf_beacon_open(&beacon, set);
        if (word == 't')
            kvf_beacon_tend(&beacon);
        if (word == 'n' || word == 'm')
            allow_descriptors(word == 'n' ? 0 : 64);
        struct epoll_event event;
        word = epoll_wait(set, &event, 1, 0) > 0 ? 'b' : 'i'; /* busy or idle */
        (void)send(line, &word, 1, 0);
    }
    _exit(0);
}

static void begin_as(beacon_scene *scene, uid_t user) {
    int lines[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, lines), 0);
    assert_int_equal(kvf_watch_open(&scene->set), KVF_OK);
    scene->owner = fork();
    assert_true(scene->owner >= 0);
    if (scene->owner == 0) {
        (void)close(lines[1]);
        (void)close(scene->set);
        if (user && setuid(user))
            _exit(1);
        own(lines[0]);
    }
    (void)close(lines[0]);
    scene->line = lines[1];
    assert_int_equal(recv(scene->line, scene->mark, sizeof scene->mark, 0), sizeof scene->mark);
}

static void begin(beacon_scene *scene) {
    begin_as(scene, 0);
}

static void end(beacon_scene *scene) {
    (void)close(scene->line);
    (void)close(scene->set);
    (void)waitpid(scene->owner, NULL, 0);
}

/* Has the owner do something; returns whether its set of descriptors has an event afterwards. */
static bool tell(const beacon_scene *scene, char word) {
    assert_int_equal(send(scene->line, &word, 1, 0), 1);
    assert_int_equal(recv(scene->line, &word, 1, 0), 1);
    return word == 'b';
}

static kvf_status watch(beacon_scene *scene, kvf_beacon_watch *out) {
    return kvf_beacon_watch_open(scene->mark, scene->set, scene, out);
}

static bool wakes(const beacon_scene *scene) {
    struct epoll_event event;
    return epoll_wait(scene->set, &event, 1, 10000) == 1 && event.data.ptr == scene;
}

static void a_watch_wakes_when_the_owner_closes(void **state) {
    (void)state;
    beacon_scene scene;
    kvf_beacon_watch seen;
    begin(&scene);
    assert_int_equal(watch(&scene, &seen), KVF_OK);
    assert_true(seen.socket >= 0);
    tell(&scene, 't');
    assert_false(kvf_beacon_is_gone(&seen));
    tell(&scene, 'c');
    assert_true(wakes(&scene));
    assert_true(kvf_beacon_is_gone(&seen));
    assert_true(kvf_beacon_has_ended(&seen));
    kvf_beacon_watch_close(scene.set, &seen);
    assert_int_equal(watch(&scene, &seen), KVF_E_PEER_LOST);
    assert_int_equal(seen.socket, -1);
    end(&scene);
}

/* One watcher is accepted, the other one waits in the queue of the listener. */
static void watch_twice(beacon_scene *scene, kvf_beacon_watch *accepted, kvf_beacon_watch *waiting) {
    assert_int_equal(watch(scene, accepted), KVF_OK);
    tell(scene, 't');
    assert_int_equal(watch(scene, waiting), KVF_OK);
}

static void a_watch_wakes_when_the_owner_closes_though_its_child_holds_the_sockets(void **state) {
    (void)state;
    beacon_scene scene;
    kvf_beacon_watch accepted, waiting, late;
    begin(&scene);
    watch_twice(&scene, &accepted, &waiting);
    tell(&scene, 'f');
    assert_false(kvf_beacon_is_gone(&accepted));
    assert_false(kvf_beacon_is_gone(&waiting));
    assert_false(tell(&scene, 'c')); /* the owner's set does not have the listener any more */
    assert_true(wakes(&scene));
    assert_true(kvf_beacon_is_gone(&accepted));
    assert_true(kvf_beacon_is_gone(&waiting));
    assert_int_equal(watch(&scene, &late), KVF_E_PEER_LOST);
    kvf_beacon_watch_close(scene.set, &accepted);
    kvf_beacon_watch_close(scene.set, &waiting);
    end(&scene);
}

static void a_beacon_that_is_replaced_is_gone_and_its_owner_is_not(void **state) {
    (void)state;
    beacon_scene scene;
    kvf_beacon_watch accepted, waiting, late;
    begin(&scene);
    watch_twice(&scene, &accepted, &waiting);
    tell(&scene, 'r');
    assert_true(wakes(&scene));
    assert_true(kvf_beacon_is_gone(&accepted));
    assert_true(kvf_beacon_is_gone(&waiting));
    assert_int_equal(watch(&scene, &late), KVF_E_PEER_LOST);
    assert_false(kvf_beacon_has_ended(&accepted));
    assert_false(kvf_beacon_has_ended(&waiting));
    struct epoll_event event;
    assert_int_equal(epoll_wait(scene.set, &event, 1, 0), 0);
    tell(&scene, 'c');
    assert_true(wakes(&scene));
    assert_true(kvf_beacon_has_ended(&accepted));
    assert_true(kvf_beacon_has_ended(&waiting));
    kvf_beacon_watch_close(scene.set, &accepted);
    kvf_beacon_watch_close(scene.set, &waiting);
    end(&scene);
}

/* Without descriptors of processes (Linux before 5.3) the sockets of the child keep the watch alive. */
static void a_watch_wakes_when_the_owner_dies_though_its_child_lives(void **state) {
    (void)state;
    beacon_scene scene;
    kvf_beacon_watch seen, late;
    begin(&scene);
    assert_int_equal(watch(&scene, &seen), KVF_OK);
    if (seen.process < 0) {
        end(&scene);
        skip();
    }
    tell(&scene, 'f');
    assert_int_equal(kill(scene.owner, SIGKILL), 0);
    assert_true(wakes(&scene));
    assert_true(kvf_beacon_is_gone(&seen));
    assert_int_equal(waitpid(scene.owner, NULL, 0), scene.owner);
    assert_int_equal(watch(&scene, &late), KVF_E_PEER_LOST);
    kvf_beacon_watch_close(scene.set, &seen);
    end(&scene);
}

/* The owner hangs up on strangers, because they could fill its descriptor table. */
static void the_beacon_of_another_user_is_not_watched(void **state) {
    (void)state;
    beacon_scene scene;
    int status;
    if (geteuid() != 0)
        skip();
    begin_as(&scene, 1001);
    pid_t stranger = fork();
    assert_true(stranger >= 0);
    if (stranger == 0) {
        kvf_beacon_watch seen;
        _exit(setuid(1002) || watch(&scene, &seen) || seen.socket != -1 || kvf_beacon_is_gone(&seen));
    }
    assert_int_equal(waitpid(stranger, &status, 0), stranger);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    end(&scene);
}

/* The watcher that cannot be accepted must not keep the owner awake; it notices the owner's end all the same. */
static void an_owner_without_descriptors_sleeps_and_accepts_later(void **state) {
    (void)state;
    beacon_scene scene;
    kvf_beacon_watch early, late;
    begin(&scene);
    tell(&scene, 'n');
    assert_int_equal(watch(&scene, &early), KVF_OK);
    assert_true(tell(&scene, 'n'));
    assert_false(tell(&scene, 't'));
    tell(&scene, 'm');
    tell(&scene, 't');
    tell(&scene, 'n');
    assert_int_equal(watch(&scene, &late), KVF_OK);
    assert_false(kvf_beacon_is_gone(&early));
    assert_false(kvf_beacon_is_gone(&late));
    tell(&scene, 'c');
    assert_true(wakes(&scene));
    assert_true(kvf_beacon_is_gone(&early));
    while (!kvf_beacon_is_gone(&late))
        (void)poll(NULL, 0, 1);
    kvf_beacon_watch_close(scene.set, &early);
    kvf_beacon_watch_close(scene.set, &late);
    end(&scene);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_watch_wakes_when_the_owner_closes),
        cmocka_unit_test(a_watch_wakes_when_the_owner_closes_though_its_child_holds_the_sockets),
        cmocka_unit_test(a_beacon_that_is_replaced_is_gone_and_its_owner_is_not),
        cmocka_unit_test(a_watch_wakes_when_the_owner_dies_though_its_child_lives),
        cmocka_unit_test(the_beacon_of_another_user_is_not_watched),
        cmocka_unit_test(an_owner_without_descriptors_sleeps_and_accepts_later),
    };
    (void)alarm(60); /* a watch that does not wake fails the test */
    return cmocka_run_group_tests_name("transport_beacon", tests, NULL, NULL);
}
