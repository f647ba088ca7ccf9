#include "transport/slices.h"

#include "kernel/kernel.h"

void kvf_slices_add(kvf_slices *slices, kvf_batch *batch) {
    if (!slices->current) {
        slices->current = batch;
        slices->offset = 0;
    }
}

void kvf_slices_cancel(kvf_slices *slices) {
    slices->cancelled = true;
}

kvf_batch *kvf_slices_drop_current(kvf_slices *slices) {
    kvf_batch *batch = slices->current;
    slices->current = batch->following;
    slices->offset = 0;
    return batch;
}

bool kvf_slices_is_over(kvf_slices *slices, const kvf_batch *batch) {
    if (batch->failed && batch == slices->current)
        (void)kvf_slices_drop_current(slices);
    return batch->in_flight == 0 && batch != slices->current;
}

void kvf_slices_end(kvf_batch *batch) {
    if (batch->cancelled)
        kvf_batch_fail(batch, KVF_E_CANCELLED, KVF_REASON_CANCELLED);
    kvf_batch_end(batch);
}

void kvf_slices_forget(const kvf_slices *slices, kvf_batch *batch) {
    if (--batch->in_flight == 0 && batch != slices->current)
        kvf_slices_end(batch);
}

void kvf_slices_reap(kvf_slices *slices) {
    if (!slices->cancelled)
        return;
    slices->cancelled = false;
    for (kvf_batch *batch = slices->current, *next; batch; batch = next) {
        next = batch->following;
        if (!batch->cancelled)
            continue;
        if (batch == slices->current)
            (void)kvf_slices_drop_current(slices);
        if (batch->in_flight == 0)
            kvf_slices_end(batch);
    }
}

void kvf_slices_peek(const kvf_slices *slices, uint64_t budget, size_t runs, kvf_slice *out) {
    const kvf_batch *batch = slices->current;
    const kvf_run *first = &batch->runs[batch->next];
    size_t left = batch->count - batch->next;
    if (left > runs)
        left = runs;
    out->runs = first;
    out->count = 0;
    out->bytes = 0;
    if (batch->shape && first->bytes > budget) {
        out->count = 1;
        out->bytes = first->bytes;
        return;
    }
    if (slices->offset > 0 || first->bytes > budget) {
        out->part = *first;
        out->part.local_offset += slices->offset;
        out->part.remote_offset += slices->offset;
        out->part.bytes = kvf_min_u64(first->bytes - slices->offset, budget);
        out->bytes = out->part.bytes;
        return;
    }
    while (out->count < left && first[out->count].bytes <= budget - out->bytes)
        out->bytes += first[out->count++].bytes;
}

bool kvf_slices_next(const kvf_slices *slices, const kvf_transport *transport, uint64_t moved,
                     uint64_t budget, kvf_slice *out) {
    const kvf_batch *batch = slices->current;
    if (!batch || moved >= budget || (moved > 0 && kvf_transport_hurried(transport)))
        return false;
    if (moved > 0 && slices->offset == 0 && batch->runs[batch->next].bytes > budget - moved)
        return false;
    kvf_slices_peek(slices, kvf_min_u64(budget - moved, KVF_COPY_BYTES), KVF_SLICE_RUNS, out);
    return true;
}

bool kvf_slices_advance(kvf_slices *slices, const kvf_slice *slice) {
    kvf_batch *batch = slices->current;
    if (slice->count > 0) {
        batch->next += slice->count;
    } else {
        slices->offset += slice->part.bytes;
        if (slices->offset == batch->runs[batch->next].bytes) {
            slices->offset = 0;
            batch->next++;
        }
    }
    if (batch->next < batch->count)
        return false;
    (void)kvf_slices_drop_current(slices);
    return true;
}

/* ---- packed ---------------------------------------------------------------------------------- */

#define PACKED_RUNS 256u /* copied by one call of the kernel */

/* The analyser does not see that `data` is written through &data. */
/* NOLINTNEXTLINE(readability-non-const-parameter) */
static void copy_packed(const kvf_slice *slice, unsigned char *const *bases, unsigned char *data, bool pack) {
    kvf_run laid_out[PACKED_RUNS];
    size_t left, here;
    const kvf_run *runs = kvf_slice_runs(slice, &left);
    uint64_t at = 0;
    for (; left > 0; left -= here, runs += here) {
        here = left < PACKED_RUNS ? left : PACKED_RUNS;
        for (size_t i = 0; i < here; i++) {
            laid_out[i] = (kvf_run){runs[i].local_offset, at, runs[i].bytes, runs[i].local_region, 0};
            at += runs[i].bytes;
        }
        if (pack)
            kvf_kernel_pack_runs(KVF_COPY_TO_REMOTE, (kvf_copy_bases){&data, bases}, laid_out, here);
        else
            kvf_kernel_copy_runs(KVF_COPY_TO_LOCAL, (kvf_copy_bases){bases, &data}, laid_out, here,
                                 slice->bytes);
    }
}

void kvf_slice_pack(const kvf_slice *slice, unsigned char *const *bases, unsigned char *data) {
    copy_packed(slice, bases, data, true);
}

void kvf_slice_unpack(const kvf_slice *slice, unsigned char *const *bases, unsigned char *data) {
    copy_packed(slice, bases, data, false);
}
