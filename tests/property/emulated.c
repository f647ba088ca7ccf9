#include "emulated.h"

#include <string.h>

#include "coverage.h"
#include "device_kernels.h"
#include "stage/device.h"

enum { COPIES, CONVERSIONS, LAUNCHES };
enum { MOST_BOXES = 6 /* few, so that many ranges take several launches */, TELLING_BYTES = 8 };

typedef struct launch {
    kvf_cuda_box boxes[MOST_BOXES];
    uint32_t count, tiles;
} launch;

typedef struct emulation {
    kvf_device_table table;
    uint64_t begin;
    unsigned char *out;      /* gathers into it, from `begin` on */
    const unsigned char *in; /* scatters from it; NULL: gathers */
    bool spoils, spoiled;
    launch launches[LAUNCHES];
    kvf_status failed;
    uint64_t by_host; /* where the bytes end that a device refuses, and the host moves */
} emulation;

/* Cells of so many bytes are never the same by chance. */
static void spoil(emulation *e, const kvf_stream_box *box, kvf_cuda_box *made) {
    const uint64_t cell_bytes = box->cells.pieces * box->cells.piece_bytes;
    if (!e->spoils || e->spoiled || box->cells.units == 1 || cell_bytes < TELLING_BYTES)
        return;
    made->from.unit_stride = 0;
    e->spoiled = true;
}

/* Devices convert only elements that lie at multiples of their size. */
static bool is_misaligned(const kvf_stream_box *box, const kvf_stage_cells *cells) {
    const kvf_box *at = &box->cells;
    const uint64_t places = (uint64_t)(uintptr_t)at->memory | at->block_stride | at->row_stride |
                            at->unit_stride | at->piece_stride;
    return places % (kvf_dtype_bits(box->memory_type) / 8) ||
           cells->packed.packed % (kvf_dtype_bits(box->stream_type) / 8);
}

static void leave_to_host(emulation *e, const kvf_stream_box *box, const kvf_stage_cells *cells) {
    if (e->failed != KVF_E_UNSUPPORTED || box->memory_type == box->stream_type || !is_misaligned(box, cells))
        return;
    note(KIND_DEVICE_MISALIGNED);
    e->by_host = box->byte + box->cells.rows * box->cells.units * cells->elements *
                                 (kvf_dtype_bits(box->stream_type) / 8);
}

static bool add_box(void *context, const kvf_stream_box *box) {
    emulation *e = context;
    const unsigned char *slot = e->in ? e->in : e->out;
    const kvf_stage_cells cells = kvf_stage_cells_of(box, &e->table, (uint64_t)(uintptr_t)slot, e->begin);
    const bool convert = box->memory_type != box->stream_type;
    launch *to = &e->launches[convert ? CONVERSIONS : COPIES];
    uint32_t made = 0, tiles = to->tiles;
    e->failed = kvf_device_boxes(e->in ? &cells.packed : &cells.pages, e->in ? &cells.pages : &cells.packed,
                                 box->cells.rows, box->cells.units, cells.elements, to->boxes + to->count,
                                 MOST_BOXES - to->count, &made, &tiles);
    if (e->failed) {
        leave_to_host(e, box, &cells);
        return false;
    }
    if (made > 0 && !convert)
        spoil(e, box, &to->boxes[to->count]);
    to->count += made;
    to->tiles = tiles;
    note_if(KIND_DEVICE_CONVERTED, convert);
    return true;
}

static void run_kernels(const emulation *e, uint32_t blocks) {
    for (int which = 0; which < LAUNCHES; which++) {
        const launch *given = &e->launches[which];
        if (given->count > 0)
            run_move_kernel(given->boxes, given->count, given->tiles, which == CONVERSIONS, blocks);
    }
}

static void move_by_host(const emulation *e, const kvf_stream *stream, const memory *m,
                         kvf_byte_range bytes) {
    const uint64_t at = bytes.begin - e->begin;
    if (e->in)
        kvf_stream_scatter(stream, m->regions, bytes, e->in + at);
    else
        kvf_stream_gather(stream, m->regions, bytes, e->out + at);
}

/* Moves as many bytes from `at` on as a launch takes; returns where they end, or `at` if there are none. */
static uint64_t move_part(emulation *e, const kvf_stream *stream, const memory *m, kvf_byte_range bytes,
                          uint32_t blocks) {
    for (int which = 0; which < LAUNCHES; which++)
        e->launches[which].count = e->launches[which].tiles = 0;
    e->failed = KVF_OK;
    e->by_host = 0;
    uint64_t end = kvf_stream_boxes(stream, m->regions, bytes, add_box, e);
    run_kernels(e, blocks);
    if (e->by_host) {
        move_by_host(e, stream, m, (kvf_byte_range){end, e->by_host});
        end = e->by_host;
    }
    return end;
}

/* As a job of src/stage/device.c: in parts, if there are more boxes than a launch takes. */
static bool move(emulation *e, const kvf_stream *stream, const memory *m, kvf_byte_range bytes,
                 uint32_t blocks) {
    uint64_t count;
    const uint32_t *ids = kvf_stream_table(stream, &count);
    uint32_t *brought = arena_take(count + 1, sizeof *brought);
    memcpy(brought, ids, count * sizeof *ids);
    e->table = (kvf_device_table){(uint64_t)(uintptr_t)brought, ids};
    e->begin = bytes.begin;
    for (uint64_t at = bytes.begin, end; at < bytes.end; at = end) {
        end = move_part(e, stream, m, (kvf_byte_range){at, bytes.end}, blocks);
        note_if(KIND_DEVICE_PARTS, e->failed == KVF_E_LIMIT);
        if (e->failed && !e->by_host && (e->failed != KVF_E_LIMIT || end == at))
            return wrong("byte %llu of a stream cannot be described to a device: %s", (unsigned long long)end,
                         kvf_error_detail());
    }
    return true;
}

bool emulate_gather(const kvf_stream *stream, const memory *m, kvf_byte_range bytes, unsigned char *slot,
                    uint32_t blocks) {
    emulation e = {.in = NULL};
    e.out = slot;
    note(KIND_DEVICE_GATHERED);
    return move(&e, stream, m, bytes, blocks);
}

bool emulate_scatter(const kvf_stream *stream, const memory *m, kvf_byte_range bytes,
                     const unsigned char *slot, uint32_t blocks) {
    emulation e = {.in = slot};
    note(KIND_DEVICE_SCATTERED);
    return move(&e, stream, m, bytes, blocks);
}

bool emulate_spoiled(const kvf_stream *stream, const memory *m, kvf_byte_range bytes, unsigned char *slot,
                     bool *spoiled) {
    emulation e = {.spoils = true};
    e.out = slot;
    const bool good = move(&e, stream, m, bytes, 1);
    *spoiled = e.spoiled;
    return good;
}
