/*
 * What only the UCX fabric can do or meet, between real processes; see process_pair.h.
 */
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "process_pair.h"
#include "transport/front.h"
#include "transport/ucx/ucx.h"

/* Ways to make a pair for tests that need one kind. */
static const pair_kind tcp_way = {"ucx", {false, false}, "ucx", {"ucx.tls", "tcp,self"}};
static const pair_kind posix_way = {"ucx", {true, true}, "ucx", {"ucx.tls", "posix,self"}};
static const pair_kind sysv_way = {"ucx", {true, true}, "ucx", {"ucx.tls", "sysv,self"}};
static const pair_kind brought_way = {"ucx", {false, false}, "ucx", {"ucx.tls", "posix,self"}};

static void idle_target(process *side) {
    (void)side;
}

/* ---- peers that do not progress -------------------------------------------------------------- */

/* From 1.16 on UCX reads mapped memory by messages to its owner; it still writes to it directly. */
static bool emulates_reads(process *side) {
    const kvf_ucx_endpoint *endpoint = side->transport->fabrics[0].endpoint;
    return endpoint->ucx->minor >= 16;
}

static void one_sided_actor(process *side) {
    static kvf_run runs[256];
    open_side(side, 2, 2);
    connect_side(side);
    if (emulates_reads(side)) {
        (void)fprintf(stderr, "this UCX emulates reads: skipped\n");
        say(side, 'x');
        hear(side, 's');
        say(side, 'w');
        close_side(side);
        return;
    }
    size_t count = make_runs(runs, 200, 3000, 17u);
    submit(side, KVF_READ, runs, 1, NULL);
    await_end(side, 1);
    say(side, 'x');
    hear(side, 's');
    submit(side, KVF_READ, runs, count, NULL);
    await_end(side, 2);
    CHECK(side->ended == KVF_OK);
    CHECK(is_exact(side, runs, count, true, 1, 2));
    say(side, 'w');
    close_side(side);
}

static void memory_that_peers_map_is_read_while_its_owner_does_not_progress(void **state) {
    run_both(*state, sleeping_target, one_sided_actor, false);
}

/* ---- peers that take nothing, and live ------------------------------------------------------- */

/* Then the queue to the peer is full, and UCX gives up no operation. */
#define MANY 1000u

static void progress_for(const process *side, uint64_t ns) {
    for (const uint64_t end = kvf_now(&kvf_monotonic) + ns; kvf_now(&kvf_monotonic) < end;)
        CHECK(kvf_transport_progress(side->transport, NULL) == KVF_OK);
}

/* Has reads under way to a peer that sleeps. */
static void read_of_a_sleeper(process *side) {
    static kvf_run runs[MANY];
    open_side(side, 0, 2);
    connect_side(side);
    const size_t count = make_runs(runs, MANY, 200, 17u);
    submit(side, KVF_READ, runs, 1, NULL);
    await_end(side, 1);
    say(side, 'x');
    hear(side, 's');
    submit(side, KVF_READ, runs, count, NULL);
    progress_for(side, KVF_SECOND / 5);
    CHECK(side->ends == 1);
}

/* Takes memory back, and answers only after that what it was asked before. */
static void late_target(process *side) {
    open_side(side, 0, 1);
    send_card(side);
    serve_until_told(side);
    say(side, 's');
    hear(side, 'u');
    CHECK(kvf_transport_unregister_region(side->transport, REGIONS - 1) == KVF_OK);
    say(side, 'u');
    hear(side, 'w');
    serve_until_told(side);
    close_side(side);
}

static void use_otherwise(process *side) {
    for (uint32_t i = 0; i < REGIONS; i++)
        memset(side->memory[i], 7, REGION_BYTES);
}

static void late_actor(process *side) {
    read_of_a_sleeper(side);
    say(side, 'u');
    hear(side, 'u');
    progress_for(side, KVF_SECOND);
    const bool at_once = side->ends == 2;
    if (at_once)
        use_otherwise(side);
    say(side, 'w');
    await_end(side, 2);
    CHECK(side->ended == KVF_E_PEER_LOST);
    if (!at_once)
        use_otherwise(side);
    progress_for(side, KVF_SECOND / 2);
    for (uint32_t i = 0; i < REGIONS; i++)
        for (size_t at = 0; at < REGION_BYTES; at++)
            CHECK(side->memory[i][at] == 7);
    say(side, 'x');
    close_side(side);
}

static void what_is_read_of_an_owner_that_answers_late_does_not_come_after_the_end(void **state) {
    (void)state;
    run_both(&brought_way, late_target, late_actor, false);
}

static void closing_actor(process *side) {
    read_of_a_sleeper(side);
    close_side(side);
    say(side, 'w');
}

static void an_endpoint_closes_while_a_peer_sleeps(void **state) {
    (void)state;
    run_both(&brought_way, sleeping_target, closing_actor, false);
}

/* The peer closes when it wakes: it has not answered, and never will. */
static void parting_actor(process *side) {
    read_of_a_sleeper(side);
    kvf_peer_part(side->peer);
    progress_for(side, KVF_SECOND / 2);
    CHECK(side->ends == 1);
    say(side, 'w');
    await_end(side, 2);
    CHECK(side->ended == KVF_E_CANCELLED);
    close_side(side);
}

static void parting_from_a_peer_that_sleeps_does_not_wait(void **state) {
    (void)state;
    run_both(&brought_way, sleeping_target, parting_actor, false);
}

/* Makes progress of both ends, until an operation of the first has ended. */
static void drive_both(process *side, const process *owner, uint32_t ends) {
    while (side->ends < ends) {
        CHECK(kvf_transport_progress(owner->transport, NULL) == KVF_OK);
        CHECK(kvf_transport_progress(side->transport, NULL) == KVF_OK);
    }
}

/* One thread has both ends. Closing the connection at once would wait for ever, of UCX 1.13. */
static void both_ends_actor(process *side) {
    static kvf_run runs[MANY];
    process owner = {.way = side->way, .line = side->line};
    const void *card;
    size_t bytes;
    kvf_operation operation;
    open_side(&owner, 0, 1);
    open_side(side, 0, 2);
    CHECK(kvf_transport_export(owner.transport, &card, &bytes) == KVF_OK);
    CHECK(kvf_transport_connect(side->transport, card, bytes, &side->peer) == KVF_OK);
    const size_t count = make_runs(runs, MANY, 200, 17u);
    submit(side, KVF_READ, runs, 1, NULL);
    drive_both(side, &owner, 1);
    submit(side, KVF_READ, runs, count, &operation);
    progress_for(side, KVF_SECOND / 5);
    CHECK(side->ends == 1);
    CHECK(kvf_transport_cancel(side->transport, operation) == KVF_OK);
    drive_both(side, &owner, 2);
    CHECK(side->ended == KVF_E_CANCELLED);
    kvf_peer_close(side->peer);
    CHECK(side->ends == 2);
    close_side(&owner);
    close_side(side);
}

static void a_thread_with_both_ends_ends_operations_before_it_closes(void **state) {
    (void)state;
    run_both(&brought_way, idle_target, both_ends_actor, false);
}

/* ---- peers that are lost --------------------------------------------------------------------- */

static struct {
    __typeof__(&ucp_ep_close_nbx) close;
    kvf_ucx_link *other; /* of which UCX reports that it is lost, while it closes the first one */
    unsigned lost;
} closing;

static void count_lost(void *context, kvf_transport *transport, kvf_peer *peer, const char *detail) {
    (void)context, (void)transport, (void)peer, (void)detail;
    closing.lost++;
}

static ucs_status_ptr_t close_and_lose(ucp_ep_h ep, const ucp_request_param_t *param) {
    if (closing.other)
        kvf_post_lose(&closing.other->queue, "lost while another one is closed");
    closing.other = NULL;
    return closing.close(ep, param);
}

/* Connects, and reads once: UCX before 1.14 aborts if a connection ends that is not made yet. */
static kvf_peer *connect_and_read(process *side, const void *card, size_t bytes) {
    const kvf_run run = {.bytes = 1000};
    CHECK(kvf_transport_connect(side->transport, card, bytes, &side->peer) == KVF_OK);
    submit(side, KVF_READ, &run, 1, NULL);
    await_end(side, side->ends + 1);
    CHECK(side->ended == KVF_OK);
    return side->peer;
}

static void twice_lost_actor(process *side) {
    static unsigned char card[65536];
    open_side(side, 0, 2);
    const size_t bytes = receive_card(side, card, sizeof card);
    const kvf_peer *first = connect_and_read(side, card, bytes);
    const kvf_peer *second = connect_and_read(side, card, bytes);
    const kvf_ucx_endpoint *endpoint = side->transport->fabrics[0].endpoint;
    CHECK(endpoint->links == second->link); /* so that it is looked at before the first one */
    kvf_ucx_library *ucx = (kvf_ucx_library *)(uintptr_t)endpoint->ucx;
    closing.close = ucx->ucp_ep_close_nbx;
    closing.other = second->link;
    ucx->ucp_ep_close_nbx = close_and_lose;
    side->transport->options.on_peer_lost = count_lost;
    kvf_post_lose(first->link, "the first");
    while (closing.lost < 2)
        (void)kvf_transport_progress(side->transport, NULL);
    say(side, 'x');
    close_side(side);
}

static void a_peer_that_is_lost_while_another_one_is_closed_is_not_forgotten(void **state) {
    (void)state;
    run_both(&tcp_way, serving_target, twice_lost_actor, false);
}

/* ---- what this machine or build cannot do ---------------------------------------------------- */

/* Without a choice of the user, kvferry leaves out a transport that this UCX need not have. 1.13 to 1.16 warn of
 * that; without UCX_LOG_LEVEL it is never seen. */
static void open_as_it_is(process *side) {
    (void)unsetenv("UCX_TLS");
    (void)unsetenv("UCX_NET_DEVICES");
    (void)setenv("UCX_LOG_LEVEL", "warn", 1);
    const kvf_setting setting = {"ucx.library", getenv("KVF_UCX_LIBRARY")};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = &setting, .setting_count = setting.value ? 1 : 0};
    CHECK(kvf_transport_open("ucx", &options, &side->transport) == KVF_OK);
    const kvf_ucx_endpoint *endpoint = side->transport->fabrics[0].endpoint;
    char ways[4096];
    kvf_ucx_resources(endpoint->ucx, endpoint->context, ways, sizeof ways);
    CHECK(strstr(ways, "tcp/"));
    CHECK(!strstr(ways, "cuda_ipc"));
    kvf_transport_close(side->transport);
}

static void open_actor(process *side) {
    char text[4096] = "";
    FILE *printed = tmpfile();
    CHECK(printed);
    const int kept = dup(1);
    CHECK(dup2(fileno(printed), 1) == 1); /* where UCX logs */
    open_as_it_is(side);
    (void)fflush(NULL);
    CHECK(dup2(kept, 1) == 1);
    rewind(printed);
    (void)fread(text, 1, sizeof text - 1, printed);
    CHECK(!strstr(text, "cuda_ipc"));
    (void)fclose(printed);
}

static void open_with_nonsense(process *side) {
    kvf_setting setting = {"ucx.tls", "no_such_transport"};
    kvf_transport_options options = {.struct_size = sizeof options, .settings = &setting, .setting_count = 1};
    CHECK(kvf_transport_open("ucx", &options, &side->transport) == KVF_E_UNSUPPORTED);
    CHECK(strstr(kvf_error_detail(), "UCX"));
}

static void nonsense_actor(process *side) {
    silent(side, open_with_nonsense);
}

static void transports_that_are_left_out_need_not_be_there_and_no_warning_names_them(void **state) {
    (void)state;
    run_both(&tcp_way, idle_target, open_actor, false);
}

static void an_unknown_transport_is_unsupported_and_nothing_is_printed(void **state) {
    (void)state;
    run_both(&tcp_way, idle_target, nonsense_actor, false);
}

static void tcp_target(process *side) {
    side->way = &tcp_way;
    serving_target(side);
}

static void connect_in_vain(process *side) {
    static unsigned char card[65536];
    size_t bytes = receive_card(side, card, sizeof card);
    CHECK(kvf_transport_connect(side->transport, card, bytes, &side->peer) == KVF_E_UNSUPPORTED);
    CHECK(strstr(kvf_error_detail(), "no active messages transport"));
}

static void stranger_actor(process *side) {
    open_side(side, 2, 2);
    silent(side, connect_in_vain);
    say(side, 'x');
    close_side(side);
}

static void peers_without_a_transport_in_common_are_unsupported_and_nothing_is_printed(void **state) {
    (void)state;
    run_both(&posix_way, tcp_target, stranger_actor, false);
}

/* ---- sockets --------------------------------------------------------------------------------- */

static void bytes_that_wait_in_connections_by_tcp_are_sent_often(void **state) {
    (void)state;
    run_both(&tcp_way, serving_target, trying_actor, false);
}

/* ---- devices --------------------------------------------------------------------------------- */

static void cuda_actor(process *side) {
    kvf_setting setting = {"ucx.tls", "tcp,self"};
    kvf_transport_options options = {.struct_size = sizeof options, .settings = &setting, .setting_count = 1};
    CHECK(kvf_transport_open("ucx", &options, &side->transport) == KVF_OK);
    const kvf_ucx_endpoint *endpoint = side->transport->fabrics[0].endpoint;
    if (endpoint->memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) {
        kvf_transport_close(side->transport);
        exit(0); /* UCX can do it; testing that needs CUDA memory */
    }
    unsigned char bytes[64] = {0};
    kvf_memory regions[2] = {
        {.struct_size = sizeof(kvf_memory), .address = bytes, .bytes = 32},
        {.struct_size = sizeof(kvf_memory), .address = bytes + 32, .bytes = 32, .kind = KVF_MEMORY_CUDA}};
    CHECK(kvf_transport_register(side->transport, regions, 2) == KVF_E_UNSUPPORTED);
    CHECK(strstr(kvf_error_detail(), "region 1"));
    CHECK(strstr(kvf_error_detail(), "CUDA"));
    /* No region stayed registered. */
    regions[1].kind = KVF_MEMORY_HOST;
    CHECK(kvf_transport_register(side->transport, regions, 2) == KVF_OK);
    kvf_transport_close(side->transport);
}

static void cuda_memory_without_cuda_is_unsupported_and_nothing_stays_registered(void **state) {
    (void)state;
    run_both(&tcp_way, idle_target, cuda_actor, false);
}

/* ---- all of them ----------------------------------------------------------------------------- */

#define BY(test, way_name)                                                                                   \
    { #test " by " #way_name, test, NULL, NULL, (void *)(uintptr_t)&way_name##_way }

int main(void) {
    const struct CMUnitTest tests[] = {
        BY(memory_that_peers_map_is_read_while_its_owner_does_not_progress, posix),
        BY(memory_that_peers_map_is_read_while_its_owner_does_not_progress, sysv),
        cmocka_unit_test(what_is_read_of_an_owner_that_answers_late_does_not_come_after_the_end),
        cmocka_unit_test(an_endpoint_closes_while_a_peer_sleeps),
        cmocka_unit_test(parting_from_a_peer_that_sleeps_does_not_wait),
        cmocka_unit_test(a_thread_with_both_ends_ends_operations_before_it_closes),
        cmocka_unit_test(a_peer_that_is_lost_while_another_one_is_closed_is_not_forgotten),
        cmocka_unit_test(transports_that_are_left_out_need_not_be_there_and_no_warning_names_them),
        cmocka_unit_test(an_unknown_transport_is_unsupported_and_nothing_is_printed),
        cmocka_unit_test(peers_without_a_transport_in_common_are_unsupported_and_nothing_is_printed),
        cmocka_unit_test(bytes_that_wait_in_connections_by_tcp_are_sent_often),
        cmocka_unit_test(cuda_memory_without_cuda_is_unsupported_and_nothing_stays_registered),
    };
    (void)transport_variant_count(); /* sets the environment, so that tests stay on this machine */
    return cmocka_run_group_tests_name("transport_ucx", tests, NULL, NULL);
}
