/*
 * Gathering and scattering: a range of bytes is split into boxes, which the kernels move.
 *
 * In a lane, a range may begin and end anywhere in a row, a cell or a piece. Rows, cells and pieces that it contains
 * whole are moved whole:
 *
 *     row 0        row 1        row 2                  range: from the third element of row 0's second cell
 *     |u0 |u1 |u2 ||u0 |u1 |u2 ||u0 |u1 |u2 |                 to the second of row 2's second
 *           ^-- ---  -----------  --- -^
 *           1   2   3            4   5               1, 5: elements   2, 4: cells   3: rows
 */
#include "kernel/box.h"
#include "kernel/convert.h"
#include "stage/inside.h"

/* Elements that are converted at once, in their memory type. */
#define ASIDE_BYTES 16384u
#define LINE_BYTES 64u

/* Ranges of this size and more are written past the caches: shorter ones may stay in the second level until they are
 * read. */
#define PAST_BYTES (256u << 10)

/* Packed bytes: `in` is NULL when gathering, `out` when scattering. */
typedef struct packed {
    unsigned char *out;
    const unsigned char *in;
    bool past; /* write past the caches: the bytes are not read soon */
} packed;

static packed after(packed at, uint64_t bytes) {
    return (packed){at.out ? at.out + bytes : NULL, at.in ? at.in + bytes : NULL, at.past};
}

static void move_box(const kvf_box *box, packed at) {
    if (at.out)
        kvf_kernel_gather(box, at.out, at.past);
    else
        kvf_kernel_scatter(box, at.in, at.past);
}

/* A lane of one request. */
typedef struct lane_walk {
    const kvf_item_shape *shape;
    const kvf_kept *kept;
    const kvf_stream_group *group;
    uint64_t piece_atoms;
    uint32_t region;
    kvf_box whole; /* a box for all rows, without its first row */
} lane_walk;

static lane_walk walk_lane(const kvf_stream *stream, const kvf_lane *lane, unsigned char *const *bases) {
    const kvf_stream_map *map = stream->map;
    const kvf_stream_item *item = &map->selection->items[lane->item];
    const kvf_held_group *held = &map->shard->groups[item->group];
    const kvf_placement *placement = kvf_lane_placement(map, lane);
    const kvf_part_desc *part = &kvf_model_group(map->shard->model, item->group)->parts[item->part];
    const uint64_t units_before = item->units.begin - held->parts[item->part].units.begin;
    lane_walk walk = {.shape = &map->shapes[lane->item],
                      .kept = &map->kept[item->group],
                      .group = &stream->groups[item->group]};
    walk.region = placement->region;
    walk.piece_atoms = walk.shape->cell_atoms / placement->pieces;
    walk.whole = (kvf_box){.memory = bases[placement->region] + placement->offset +
                                     units_before * placement->unit_stride,
                           .block_stride = placement->block_stride,
                           .row_stride = placement->row_stride,
                           .unit_stride = placement->unit_stride,
                           .piece_stride = placement->piece_stride,
                           .blocks = walk.group->ids,
                           .kernel_blocks = held->kernel_blocks_per_block,
                           .block_rows = kvf_kernel_rows(held, part),
                           .rows = 1,
                           .units = walk.shape->units,
                           .pieces = placement->pieces,
                           .piece_bytes = kvf_piece_bytes(part, placement)};
    return walk;
}

/* Puts a box at a row of the lane; returns how many rows from there on are at neighbouring positions. */
static uint64_t put_at_row(const lane_walk *walk, uint64_t row, kvf_box *box) {
    const uint64_t rows = walk->shape->rows_per_step, step = row / rows, in_step = row % rows;
    const kvf_kept_place place = kvf_kept_find(walk->kept, walk->group->first + step);
    box->first_row = (place.position - walk->group->position) * rows + in_step;
    return kvf_min_u64(place.steps, walk->group->steps - step) * rows - in_step;
}

/* Puts a box at the first of a row's atoms [begin, end), over as many as one box can take. Returns how many. */
static uint64_t part_of_row(const lane_walk *walk, uint64_t begin, uint64_t end, kvf_box *box) {
    const uint64_t cell = walk->shape->cell_atoms, piece = walk->piece_atoms;
    const uint64_t in_cell = begin % cell, in_piece = in_cell % piece;
    box->memory += begin / cell * box->unit_stride;
    box->units = (end - begin) / cell;
    if (in_cell == 0 && box->units > 0)
        return box->units * cell;
    box->units = 1;
    box->memory += in_cell / piece * box->piece_stride;
    box->pieces = (kvf_min_u64(end - begin, cell - in_cell)) / piece;
    if (in_piece == 0 && box->pieces > 0)
        return box->pieces * piece;
    box->pieces = 1;
    box->memory += in_piece * walk->shape->memory_atom;
    const uint64_t atoms = kvf_min_u64(end - begin, piece - in_piece);
    box->piece_bytes = atoms * walk->shape->memory_atom;
    return atoms;
}

/* Makes the first box of atoms [begin, end) of a lane; returns how many atoms it has. */
static uint64_t next_box(const lane_walk *walk, uint64_t begin, uint64_t end, kvf_box *box) {
    const uint64_t row_atoms = walk->shape->row_atoms, row = begin / row_atoms, in_row = begin % row_atoms;
    *box = walk->whole;
    const uint64_t rows = put_at_row(walk, row, box);
    uint64_t atoms;
    if (in_row == 0 && end - begin >= row_atoms) {
        box->rows = kvf_min_u64(rows, (end - begin) / row_atoms);
        atoms = box->rows * row_atoms;
    } else {
        atoms = part_of_row(walk, in_row, kvf_min_u64(in_row + (end - begin), row_atoms), box);
    }
    KVF_ASSERT(kvf_box_bytes(box) == atoms * walk->shape->memory_atom);
    return atoms;
}

/* Moves atoms [begin, end) of a lane, in the type they have in memory. */
static void move_atoms(const lane_walk *walk, uint64_t begin, uint64_t end, packed at) {
    while (begin < end) {
        kvf_box box;
        const uint64_t atoms = next_box(walk, begin, end, &box);
        move_box(&box, at);
        at = after(at, atoms * walk->shape->memory_atom);
        begin += atoms;
    }
}

/* How many atoms are converted at once: whole rows if one fits, and a power of two of them, which most likely divides
 * blocks. */
static uint64_t converted_at_once(const kvf_item_shape *shape) {
    const uint64_t atoms = ASIDE_BYTES / shape->memory_atom, rows = atoms / shape->row_atoms;
    uint64_t power = 1;
    while (2 * power <= rows)
        power *= 2;
    return rows > 0 ? power * shape->row_atoms : atoms;
}

/* The same for elements that have another type in the stream: through a buffer that stays in the first-level cache. */
static void convert_atoms(const lane_walk *walk, uint64_t begin, uint64_t end, packed at) {
    const kvf_item_shape *shape = walk->shape;
    const uint64_t at_once = converted_at_once(shape);
    unsigned char room[ASIDE_BYTES + LINE_BYTES], *aside = room + -(uintptr_t)room % LINE_BYTES;
    while (begin < end) {
        const uint64_t next = kvf_min_u64(end, (begin / at_once + 1) * at_once), atoms = next - begin;
        if (at.out) {
            move_atoms(walk, begin, next, (packed){.out = aside});
            kvf_kernel_convert(shape->memory_type, shape->stream_type, aside, at.out, atoms, at.past);
        } else {
            kvf_kernel_convert(shape->stream_type, shape->memory_type, at.in, aside, atoms, false);
            move_atoms(walk, begin, next, (packed){.in = aside, .past = at.past});
        }
        at = after(at, atoms * shape->stream_atom);
        begin = next;
    }
}

static void move(const kvf_stream *stream, unsigned char *const *bases, kvf_byte_range bytes, packed at) {
    KVF_ASSERT(bytes.begin <= bytes.end && bytes.end <= kvf_stream_bytes(stream));
    const kvf_stream_map *map = stream->map;
    for (uint32_t i = kvf_stream_lane(stream, bytes.begin); bytes.begin < bytes.end; i++) {
        const lane_walk walk = walk_lane(stream, &map->lanes[i], bases);
        const uint64_t atom = walk.shape->stream_atom;
        const uint64_t end = kvf_min_u64(bytes.end, stream->begins[i + 1]);
        const uint64_t from = bytes.begin - stream->begins[i], to = end - stream->begins[i];
        KVF_ASSERT(from % atom == 0 && to % atom == 0);
        if (walk.shape->memory_type == walk.shape->stream_type)
            move_atoms(&walk, from / atom, to / atom, at);
        else
            convert_atoms(&walk, from / atom, to / atom, at);
        at = after(at, end - bytes.begin);
        bytes.begin = end;
    }
}

void kvf_stream_gather(const kvf_stream *stream, unsigned char *const *bases, kvf_byte_range bytes,
                       void *out) {
    move(stream, bases, bytes, (packed){.out = out, .past = bytes.end - bytes.begin >= PAST_BYTES});
}

void kvf_stream_scatter(const kvf_stream *stream, unsigned char *const *bases, kvf_byte_range bytes,
                        const void *in) {
    move(stream, bases, bytes, (packed){.in = in, .past = bytes.end - bytes.begin >= PAST_BYTES});
}

uint64_t kvf_stream_boxes(const kvf_stream *stream, unsigned char *const *bases, kvf_byte_range bytes,
                          kvf_stream_visit *visit, void *context) {
    KVF_ASSERT(bytes.begin <= bytes.end && bytes.end <= kvf_stream_bytes(stream));
    uint64_t at = bytes.begin;
    for (uint32_t i = kvf_stream_lane(stream, at); at < bytes.end; i++) {
        const lane_walk walk = walk_lane(stream, &stream->map->lanes[i], bases);
        const uint64_t atom = walk.shape->stream_atom, end = kvf_min_u64(bytes.end, stream->begins[i + 1]);
        while (at < end) {
            kvf_stream_box found = {.region = walk.region,
                                    .byte = at,
                                    .memory_type = walk.shape->memory_type,
                                    .stream_type = walk.shape->stream_type};
            const uint64_t atoms = next_box(&walk, (at - stream->begins[i]) / atom,
                                            (end - stream->begins[i]) / atom, &found.cells);
            if (!visit(context, &found))
                return at;
            at += atoms * atom;
        }
    }
    return at;
}
