/* What users are told about how a peer is served: the way, why better fabrics cannot serve it, and the bytes moved. */
#include <stdlib.h>

#include "shapes.h"
#include "transport/card.h"
#include "transport/front.h"
#include "transport/shm/shm_wire.h"
#include "transport_pair.h"

#define BYTES 4096u

typedef struct side {
    kvf_transport *transport;
    void *memory;
    bool brought;
    const void *card;
    size_t card_bytes;
} side;

/* Opens a side with the setting `key` = `value`; NULL: without a setting. */
static void open_with(side *self, const char *kind, const char *key, const char *value, bool brought) {
    const kvf_setting setting = {key, value};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = &setting, .setting_count = value != NULL};
    self->brought = brought;
    assert_ok(kvf_transport_open(kind, &options, &self->transport));
    if (brought)
        self->memory = calloc(1, BYTES);
    else
        assert_ok(kvf_transport_allocate(self->transport, KVF_MEMORY_HOST, 0, BYTES, &self->memory));
    const kvf_memory memory = {.struct_size = sizeof memory, .address = self->memory, .bytes = BYTES};
    assert_ok(kvf_transport_register(self->transport, &memory, 1));
    assert_ok(kvf_transport_export(self->transport, &self->card, &self->card_bytes));
}

static void open_side(side *self, const char *kind, const char *direct, bool brought) {
    open_with(self, kind, "shm.direct", direct, brought);
}

static void close_side(side *self) {
    kvf_transport_close(self->transport);
    if (self->brought)
        free(self->memory);
}

static void count_end(void *context, kvf_operation operation, kvf_status status, const char *detail) {
    (void)operation;
    if (status)
        fail_msg("%s", detail);
    ++*(int *)context;
}

/* Reads 1,000 bytes and writes 24. */
static void move_some(side *to, side *from, kvf_peer *peer) {
    const kvf_run runs[] = {{0, 0, 1000, 0, 0}, {2000, 2000, 24, 0, 0}};
    int ended = 0;
    assert_ok(kvf_transport_submit(peer, KVF_READ, &runs[0], 1, count_end, &ended, NULL));
    assert_ok(kvf_transport_submit(peer, KVF_WRITE, &runs[1], 1, count_end, &ended, NULL));
    while (ended < 2) {
        assert_ok(kvf_transport_progress(to->transport, NULL));
        assert_ok(kvf_transport_progress(from->transport, NULL));
    }
}

static kvf_peer_info info_of(const kvf_peer *peer) {
    kvf_peer_info info = {.struct_size = sizeof info};
    assert_ok(kvf_peer_get_info(peer, &info));
    return info;
}

static void a_peer_says_its_fabric_its_way_and_what_has_moved(void **state) {
    (void)state;
    static const struct {
        const char *kind, *direct;
        bool brought;
        const char *served_by, *way;
    } cases[] = {
        {"auto", NULL, false, "inproc", "memory of this process"},
        {"shm", NULL, false, "shm", "mapped memory"},
        {"shm", NULL, true, "shm", "process_vm_readv, and meanwhile a shared buffer"},
        {"shm", "on", true, "shm", "process_vm_readv"},
        {"shm", "off", true, "shm", "a shared buffer, because shm.direct is off"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        side a, b;
        kvf_peer *peer;
        open_side(&a, cases[i].kind, cases[i].direct, cases[i].brought);
        open_side(&b, cases[i].kind, cases[i].direct, cases[i].brought);
        assert_ok(kvf_transport_connect(a.transport, b.card, b.card_bytes, &peer));
        move_some(&a, &b, peer);
        kvf_peer_info info = info_of(peer);
        assert_string_equal(info.kind, cases[i].served_by);
        assert_string_equal(info.way, cases[i].way);
        assert_string_equal(info.passed_over, "");
        assert_int_equal(info.bytes_read, 1000);
        assert_int_equal(info.bytes_written, 24);
        close_side(&a);
        close_side(&b);
    }
}

/* Mapped memory is read and written in place, and counts as moved; brought memory is not mapped, and costs more. */
static void mapped_memory_is_touched_in_place(void **state) {
    (void)state;
    for (int brought = 0; brought < 2; brought++) {
        side a, b;
        kvf_peer *peer;
        kvf_cost_model cost;
        open_side(&a, "shm", NULL, brought);
        open_side(&b, "shm", NULL, brought);
        assert_ok(kvf_transport_connect(a.transport, b.card, b.card_bytes, &peer));
        assert_string_equal(kvf_peer_costs(peer, &cost), brought ? "shm/brought" : "shm");
        assert_int_equal(kvf_peer_is_brought(peer), brought);
        assert_null(kvf_peer_enter(peer, 0, KVF_READ)); /* the owner has not told yet where it is */
        move_some(&a, &b, peer);
        unsigned char *mapped = kvf_peer_enter(peer, 0, KVF_WRITE);
        assert_int_equal(mapped != NULL, !brought);
        if (mapped) {
            assert_ptr_not_equal(mapped, b.memory);
            memset(mapped + 3000, 0x77, 10);
            assert_ok(kvf_peer_leave(peer, KVF_WRITE, 10));
            assert_memory_equal((const unsigned char *)b.memory + 2999,
                                "\0\x77\x77\x77\x77\x77\x77\x77\x77\x77\x77\0", 12);
            assert_int_equal(info_of(peer).bytes_written, 34);
        }
        close_side(&a);
        close_side(&b);
    }
}

static void a_writer_that_is_shut_out_writes_nothing_in_place(void **state) {
    (void)state;
    side a, b;
    kvf_peer *peer;
    open_side(&a, "shm", NULL, false);
    open_side(&b, "shm", NULL, false);
    assert_ok(kvf_transport_connect(a.transport, b.card, b.card_bytes, &peer));
    move_some(&a, &b, peer);
    assert_non_null(kvf_peer_enter(peer, 0, KVF_WRITE));
    assert_fails(kvf_transport_fence(b.transport, a.card, a.card_bytes), KVF_E_AGAIN,
                 "in the middle of a write");
    assert_fails(kvf_peer_leave(peer, KVF_WRITE, 0), KVF_E_PEER_LOST, "lost while its memory was written");
    assert_ok(kvf_transport_fence(b.transport, a.card, a.card_bytes));
    assert_null(kvf_peer_enter(peer, 0, KVF_WRITE));
    close_side(&a);
    close_side(&b);
}

static void bytes_read_in_place_of_a_peer_that_goes_do_not_count(void **state) {
    (void)state;
    side a, b;
    kvf_peer *peer;
    open_side(&a, "shm", NULL, false);
    open_side(&b, "shm", NULL, false);
    assert_ok(kvf_transport_connect(a.transport, b.card, b.card_bytes, &peer));
    move_some(&a, &b, peer);
    assert_non_null(kvf_peer_enter(peer, 0, KVF_READ));
    close_side(&b);
    assert_fails(kvf_peer_leave(peer, KVF_READ, 100), KVF_E_PEER_LOST, "was lost while its memory was read");
    assert_int_equal(info_of(peer).bytes_read, 1000);
    assert_null(kvf_peer_enter(peer, 0, KVF_READ));
    close_side(&a);
}

static void a_caller_gets_what_it_knows_be_it_older_or_newer(void **state) {
    (void)state;
    side a, b;
    kvf_peer *peer;
    open_side(&a, "inproc", NULL, false);
    open_side(&b, "inproc", NULL, false);
    assert_ok(kvf_transport_connect(a.transport, b.card, b.card_bytes, &peer));
    kvf_peer_info info = {.struct_size = offsetof(kvf_peer_info, way), .way = "untouched"};
    assert_ok(kvf_peer_get_info(peer, &info));
    assert_string_equal(info.kind, "inproc");
    assert_string_equal(info.way, "untouched");
    info.struct_size = 0;
    assert_fails(kvf_peer_get_info(peer, &info), KVF_E_INVALID, "struct_size");
    assert_fails(kvf_peer_get_info(peer, NULL), KVF_E_INVALID, "info");
    assert_fails(kvf_peer_get_info(NULL, &info), KVF_E_INVALID, "peer");
    kvf_transport_info all = {.struct_size = offsetof(kvf_transport_info, clients_max), .clients_max = 7};
    assert_ok(kvf_transport_get_info(a.transport, &all));
    assert_int_equal(all.clients, 0);
    assert_int_equal(all.clients_max, 7);
    all.struct_size = 0;
    assert_fails(kvf_transport_get_info(a.transport, &all), KVF_E_INVALID, "struct_size");
    assert_fails(kvf_transport_get_info(a.transport, NULL), KVF_E_INVALID, "info");
    assert_fails(kvf_transport_get_info(NULL, &all), KVF_E_INVALID, "transport");
    /* A newer one finds 0 in what this library does not know. */
    struct {
        kvf_peer_info known;
        uint64_t more;
    } newer_peer = {.known.struct_size = sizeof newer_peer, .more = 7};
    struct {
        kvf_transport_info known;
        uint64_t more;
    } newer_all = {.known.struct_size = sizeof newer_all, .more = 7};
    assert_ok(kvf_peer_get_info(peer, &newer_peer.known));
    assert_ok(kvf_transport_get_info(a.transport, &newer_all.known));
    assert_string_equal(newer_peer.known.kind, "inproc");
    assert_int_equal(newer_peer.more, 0);
    assert_int_equal(newer_all.more, 0);
    close_side(&a);
    close_side(&b);
}

/* The card of `b`, changed as if it came from another machine. */
static void move_far_away(const side *b, kvf_buffer *out) {
    static kvf_shm_card changed;
    kvf_card card;
    assert_ok(kvf_card_read(b->card, b->card_bytes, &card));
    uint32_t kept = 0;
    for (uint32_t i = 0; i < card.part_count; i++) {
        if (strcmp(card.parts[i].kind, "inproc") == 0)
            continue;
        card.parts[kept] = card.parts[i];
        if (strcmp(card.parts[i].kind, "shm") == 0) {
            memcpy(&changed, card.parts[i].data, sizeof changed);
            changed.place.host[0] ^= 1;
            card.parts[kept].data = &changed;
        }
        kept++;
    }
    card.part_count = kept;
    assert_ok(kvf_card_write(&card, out));
    kvf_card_free(&card);
}

/* What serves a peer on another machine, with this value of "ucx.emulated". */
static kvf_peer_info far_away_info(const char *emulated) {
    side a, b;
    kvf_peer *peer;
    kvf_buffer card = {0};
    open_with(&a, "auto", "ucx.emulated", emulated, false);
    open_with(&b, "auto", "ucx.emulated", emulated, false);
    move_far_away(&b, &card);
    assert_ok(kvf_transport_connect(a.transport, card.data, card.length, &peer));
    kvf_peer_info info = info_of(peer);
    kvf_buffer_free(&card);
    close_side(&a);
    close_side(&b);
    return info;
}

static void a_better_fabric_that_cannot_is_named_with_its_reason(void **state) {
    (void)state;
    if (!kvf_fabric_named("ucx"))
        skip();
    kvf_peer_info info = far_away_info("on");
    assert_string_equal(info.kind, "ucx");
    assert_non_null(strstr(info.passed_over, "shm: the peer is on another host"));
}

static kvf_transport_finding finding_of_ucx(const char *kind, const char *emulated) {
    side self;
    kvf_transport_finding found = {.struct_size = sizeof found};
    open_with(&self, kind, "ucx.emulated", emulated, false);
    for (uint32_t i = 0; kvf_transport_find(self.transport, i, &found) == KVF_OK; i++)
        if (strcmp(found.kind, "ucx") == 0)
            break;
    close_side(&self);
    return found;
}

static void without_rdma_peers_on_other_machines_are_reached_by_messages(void **state) {
    (void)state;
    if (!kvf_fabric_named("ucx") || !kvf_fabric_named("messages"))
        skip();
    assert_string_equal(far_away_info(NULL).kind, "messages");
    assert_string_equal(far_away_info("off").kind, "messages");
    kvf_transport_finding found = finding_of_ucx("auto", NULL);
    assert_true(found.asked && !found.works);
    assert_non_null(strstr(found.why_not, "no RDMA among "));
    assert_non_null(strstr(found.why_not, "tcp/"));
    assert_non_null(strstr(found.why_not, "ucx.emulated to \"on\""));
    assert_true(finding_of_ucx("auto", "on").works);
    assert_true(finding_of_ucx("ucx", NULL).works); /* naming "ucx" is enough to get it */
}

static void the_setting_for_what_is_emulated_is_checked(void **state) {
    (void)state;
    if (!kvf_fabric_named("ucx"))
        skip();
    const kvf_setting setting = {"ucx.emulated", "perhaps"};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = &setting, .setting_count = 1};
    kvf_transport *transport = NULL;
    assert_fails(kvf_transport_open("auto", &options, &transport), KVF_E_INVALID,
                 "ucx.emulated is \"perhaps\"; allowed: on, off");
}

/* Two regions filled with 1 and 2; the first is withheld if the fabric emulates. */
static void open_withholding(side *self, const char *kind, const char *emulated) {
    const kvf_setting setting = {"ucx.emulated", emulated ? emulated : "off"};
    const kvf_transport_options options = {
        .struct_size = sizeof options, .settings = &setting, .setting_count = 1};
    *self = (side){0};
    assert_ok(kvf_transport_open(kind, &options, &self->transport));
    assert_ok(kvf_transport_allocate(self->transport, KVF_MEMORY_HOST, 0, 2 * BYTES, &self->memory));
    for (uint32_t i = 0; i < 2; i++) {
        unsigned char *begin = (unsigned char *)self->memory + (size_t)i * BYTES;
        const kvf_memory memory = {.struct_size = sizeof memory, .address = begin, .bytes = BYTES};
        memset(begin, (int)i + 1, BYTES);
        kvf_transport_withhold_emulated(self->transport, i == 0);
        assert_ok(kvf_transport_register_region(self->transport, i, &memory));
    }
    assert_ok(kvf_transport_export(self->transport, &self->card, &self->card_bytes));
}

/* Reads 10 bytes of a region to the beginning of the reader's; returns the status of submitting. */
static kvf_status read_region(side *to, side *from, kvf_peer *peer, uint32_t region) {
    const kvf_run run = {0, 20, 10, 0, region};
    int ended = 0;
    kvf_status status = kvf_transport_submit(peer, KVF_READ, &run, 1, count_end, &ended, NULL);
    while (!status && ended == 0) {
        assert_ok(kvf_transport_progress(to->transport, NULL));
        assert_ok(kvf_transport_progress(from->transport, NULL));
    }
    return status;
}

static void ucx_without_rdma_gives_no_key_to_what_is_withheld(void **state) {
    (void)state;
    if (!kvf_fabric_named("ucx"))
        skip();
    for (int taken = 0; taken < 2; taken++) {
        side owner, reader;
        kvf_peer *peer;
        open_withholding(&owner, "ucx", taken ? "on" : NULL);
        open_side(&reader, "ucx", NULL, false);
        const unsigned char *read = reader.memory;
        assert_ok(kvf_transport_connect(reader.transport, owner.card, owner.card_bytes, &peer));
        assert_int_equal(kvf_peer_withholds(peer), !taken);
        assert_int_equal(memmem(owner.card, owner.card_bytes, &owner.memory, sizeof owner.memory) != NULL,
                         taken);
        assert_int_equal(read_region(&reader, &owner, peer, 0), taken ? KVF_OK : KVF_E_PERMISSION);
        if (!taken)
            assert_non_null(strstr(kvf_error_detail(), "region 0: its owner withholds it"));
        assert_int_equal(read[9], taken ? 1 : 0);
        assert_ok(read_region(&reader, &owner, peer, 1));
        assert_int_equal(read[9], 2);
        close_side(&reader);
        close_side(&owner);
    }
}

static void libfabric_without_rdma_gives_no_key_to_what_is_withheld(void **state) {
    (void)state;
    if (!kvf_fabric_named("libfabric"))
        skip();
    side owner, reader;
    kvf_peer *peer;
    open_withholding(&owner, "libfabric", NULL);
    open_side(&reader, "libfabric", NULL, false);
    const unsigned char *read = reader.memory;
    assert_ok(kvf_transport_connect(reader.transport, owner.card, owner.card_bytes, &peer));
    assert_true(kvf_peer_withholds(peer));
    assert_int_equal(read_region(&reader, &owner, peer, 0), KVF_E_PERMISSION);
    assert_non_null(strstr(kvf_error_detail(), "region 0: its owner withholds it"));
    assert_int_equal(read[9], 0);
    assert_ok(read_region(&reader, &owner, peer, 1));
    assert_int_equal(read[9], 2);
    close_side(&reader);
    close_side(&owner);
}

int main(void) {
    (void)setenv("UCX_TLS", "tcp,self", 1); /* also on machines with RDMA */
    (void)transport_variant_count();        /* sets the environment, so that tests stay on this machine */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_peer_says_its_fabric_its_way_and_what_has_moved),
        cmocka_unit_test(mapped_memory_is_touched_in_place),
        cmocka_unit_test(a_writer_that_is_shut_out_writes_nothing_in_place),
        cmocka_unit_test(bytes_read_in_place_of_a_peer_that_goes_do_not_count),
        cmocka_unit_test(a_caller_gets_what_it_knows_be_it_older_or_newer),
        cmocka_unit_test(a_better_fabric_that_cannot_is_named_with_its_reason),
        cmocka_unit_test(without_rdma_peers_on_other_machines_are_reached_by_messages),
        cmocka_unit_test(the_setting_for_what_is_emulated_is_checked),
        cmocka_unit_test(ucx_without_rdma_gives_no_key_to_what_is_withheld),
        cmocka_unit_test(libfabric_without_rdma_gives_no_key_to_what_is_withheld),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
