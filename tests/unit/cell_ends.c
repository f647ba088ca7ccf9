#include "cell_ends.h"

#include <poll.h>

#include <kvferry/transport.h>

#define ENDS_MAX 16u

static void *allocate(void *context, uint64_t bytes) {
    void *memory = NULL;
    assert_ok(kvf_transport_allocate(context, KVF_MEMORY_HOST, 0, bytes, &memory));
    return memory;
}

void end_open(cell_end *end, const kvf_fabric *over, const char *kind, const kvf_shard *shard,
              const cell_sequence *sequence) {
    assert_ok(kvf_transport_open_over(over, kind, NULL, &end->transport));
    rank_open(&end->cells, shard, sequence, allocate, end->transport);
    assert_ok(kvf_transport_register(end->transport, end->cells.regions, end->cells.region_count));
}

void end_close(cell_end *end) {
    rank_close(&end->cells);
    kvf_transport_close(end->transport);
    end->transport = NULL;
}

kvf_status end_connect(const cell_end *from, const cell_end *to, kvf_peer **out) {
    const void *card;
    size_t bytes;
    assert_ok(kvf_transport_export(to->transport, &card, &bytes));
    return kvf_transport_connect(from->transport, card, bytes, out);
}

bool ends_work(const cell_end *const *ends, size_t count, int timeout_ms) {
    struct pollfd fds[ENDS_MAX];
    assert_true(count <= ENDS_MAX);
    for (size_t i = 0; i < count; i++)
        fds[i] =
            (struct pollfd){ends[i]->transport ? kvf_transport_event_fd(ends[i]->transport) : -1, POLLIN, 0};
    bool worked = poll(fds, count, timeout_ms) > 0;
    for (size_t i = 0; i < count; i++)
        if (fds[i].revents)
            assert_ok(kvf_transport_progress(ends[i]->transport, NULL));
    return worked;
}
