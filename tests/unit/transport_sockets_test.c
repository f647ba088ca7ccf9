/* The TCP sockets of a library that hands out none of them: those that its epolls watch, and no others. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/sockets.h"

static int open_socket(void) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    return fd;
}

static int open_epoll(void) {
    const int fd = epoll_create1(EPOLL_CLOEXEC);
    assert_true(fd >= 0);
    return fd;
}

static void watch(int epoll, int fd) {
    struct epoll_event event = {.events = EPOLLIN};
    assert_int_equal(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event), 0);
}

static unsigned tries_for_ms(int fd) {
    unsigned ms = 0;
    socklen_t bytes = sizeof ms;
    assert_int_equal(getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, &bytes), 0);
    return ms;
}

static void what_epolls_in_an_epoll_watch_tries_for_as_long_as_is_said(void **state) {
    (void)state;
    const int outer = open_epoll(), inner = open_epoll(), one = open_socket(), other = open_socket();
    kvf_sockets sockets = {.late_ms = 12345};
    watch(outer, inner);
    watch(inner, one);
    kvf_sockets_try_often(&sockets, outer);
    assert_int_equal(tries_for_ms(one), 12345);
    assert_int_equal(tries_for_ms(other), 0);
    (void)close(one);
    (void)close(other);
    (void)close(inner);
    (void)close(outer);
}

/* The library has closed its socket, which a forked child keeps: the epoll still lists the number. */
static void a_socket_of_the_program_that_has_the_number_of_a_closed_one_is_left_alone(void **state) {
    (void)state;
    const int epoll = open_epoll(), closed = open_socket(), later = open_socket(), programs = open_socket();
    kvf_sockets sockets = {.late_ms = 12345};
    watch(epoll, closed);
    const int of_child = dup(closed);
    assert_int_equal(dup2(programs, closed), closed);
    watch(epoll, later);
    kvf_sockets_try_often(&sockets, epoll);
    assert_int_equal(tries_for_ms(later), 12345);
    assert_int_equal(tries_for_ms(programs), 0);
    (void)close(of_child);
    (void)close(closed);
    (void)close(later);
    (void)close(programs);
    (void)close(epoll);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_epolls_in_an_epoll_watch_tries_for_as_long_as_is_said),
        cmocka_unit_test(a_socket_of_the_program_that_has_the_number_of_a_closed_one_is_left_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
