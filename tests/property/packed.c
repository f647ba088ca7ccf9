#include "packed.h"

#include <stdlib.h>
#include <string.h>

#include "../unit/elements.h"
#include "coverage.h"
#include "emulated.h"
#include "forms.h"
#include "plan/plan.h"
#include "random.h"
#include "stage/stream.h"

enum { MOST_CUTS = 24, MOST_CELL_BYTES = 512 };

/* ---- the expected stream ---------------------------------------------------------------------- */

/* A piece of a cell that flows, on one side. */
typedef struct flowing {
    cell_visit at;
    uint32_t group, part, item; /* by the library's numbers */
    uint32_t position;          /* of its step among those that its rank keeps */
} flowing;

typedef struct stream_cells {
    const packed_transfer *t;
    const kvf_selection *selection;
    uint32_t side, rank, source_rank;
    uint32_t group, part_place[MAX_PARTS]; /* of the group being visited */
    uint32_t *positions;                   /* by step */
    flowing *cells;
    uint32_t count, capacity;
    bool lost; /* a cell is in no item */
} stream_cells;

static uint32_t place_in(const uint32_t *order, uint32_t count, uint32_t value) {
    uint32_t i = 0;
    while (i < count && order[i] != value)
        i++;
    return i;
}

static uint32_t local_layer(const world *w, uint32_t group, uint32_t model_layer) {
    const model_world *local = &w->models[LOCAL];
    return place_in(local->layers[group], local->layer_counts[group], model_layer);
}

/* Whether the cell goes from the source to the local rank. */
static bool flows(const stream_cells *s, const cell_visit *cell, uint32_t layer) {
    const packed_transfer *t = s->t;
    const rank_group *own = &t->w->engines[LOCAL].ranks[t->rank].groups[cell->group];
    const rank_group *remote = &t->w->engines[REMOTE].ranks[s->source_rank].groups[cell->group];
    return keeps(own, cell->step) && keeps(remote, cell->step) &&
           is_wanted(t->w, t->ask, t->rank, cell->group, layer) &&
           cell->unit >= own->parts[cell->part].units_begin &&
           cell->unit < own->parts[cell->part].units_end &&
           t->choices->rank[cell->group][layer][cell->part][cell->unit][remote->share_index] ==
               s->source_rank;
}

static bool add_cell(const cell_visit *cell, void *context) {
    stream_cells *s = context;
    const uint32_t layer = local_layer(s->t->w, cell->group, cell->model_layer);
    if (layer == s->t->w->models[LOCAL].layer_counts[cell->group] || !flows(s, cell, layer))
        return true;
    flowing *out = &s->cells[s->count++];
    *out = (flowing){*cell, s->group, s->part_place[cell->part], 0, s->positions[cell->step]};
    const kvf_stream_item *items = s->selection->items;
    while (out->item < s->selection->item_count &&
           !(items[out->item].group == out->group && items[out->item].part == out->part &&
             items[out->item].layers.begin <= layer && layer < items[out->item].layers.end &&
             items[out->item].units.begin <= cell->unit && cell->unit < items[out->item].units.end))
        out->item++;
    s->lost |= out->item == s->selection->item_count;
    return true;
}

static bool count_cell(const cell_visit *cell, void *context) {
    (void)cell;
    ((stream_cells *)context)->capacity++;
    return true;
}

static int in_stream_order(const void *a, const void *b) {
    const flowing *x = a, *y = b;
    const uint32_t p[] = {x->at.model_layer, x->group,  x->part,    x->item,
                          x->at.step,        x->at.row, x->at.unit, x->at.first};
    const uint32_t q[] = {y->at.model_layer, y->group,  y->part,    y->item,
                          y->at.step,        y->at.row, y->at.unit, y->at.first};
    for (size_t i = 0; i < sizeof p / sizeof *p; i++)
        if (p[i] != q[i])
            return p[i] < q[i] ? -1 : 1;
    return 0;
}

/* Numbers the steps of a group that the rank keeps. */
static void number_steps(const stream_cells *s, uint32_t group) {
    const rank_group *held = &s->t->w->engines[s->side].ranks[s->rank].groups[group];
    uint32_t position = 0;
    for (uint32_t step = 0; step < s->t->w->tables[group].end; step++) {
        s->positions[step] = position;
        position += keeps(held, step);
    }
}

/* Lists all cells that flow from one source, as they lie on one side, in the order of the stream. */
static bool collect(const packed_transfer *t, const kvf_selection *selection, uint32_t side, uint32_t rank,
                    uint32_t source_rank, stream_cells *out) {
    const model_world *local = &t->w->models[LOCAL];
    *out = (stream_cells){
        .t = t, .selection = selection, .side = side, .rank = rank, .source_rank = source_rank};
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < local->group_count; i++) {
            const uint32_t g = local->group_order[i];
            const group_tables *tables = &t->w->tables[g];
            if (!t->ask->groups[g] || !has_group(t->w, REMOTE, g))
                continue;
            out->group = i;
            for (uint32_t p = 0; p < local->groups[g].part_count; p++)
                out->part_place[p] = place_in(local->part_order[g], local->groups[g].part_count, p);
            out->positions = arena_take(tables->end + 1u, sizeof *out->positions);
            number_steps(out, g);
            (void)visit_cells(t->w, side, rank, g, tables->first, tables->end, pass ? add_cell : count_cell,
                              out);
        }
        if (pass == 0)
            out->cells = arena_take(out->capacity + 1u, sizeof *out->cells);
    }
    qsort(out->cells, out->count, sizeof *out->cells, in_stream_order);
    return out->lost ? wrong("rank %u: a cell that is read from it is in no item", source_rank) : true;
}

/* Converts elements one by one, by their values; returns the bytes written. */
static uint32_t convert(kvf_dtype from, const unsigned char *in, kvf_dtype to, unsigned char *out,
                        uint32_t count) {
    unsigned char *at = out;
    for (uint32_t i = 0; i < count; i++, in += kvf_dtype_bits(from) / 8)
        at += element_move(from, in, to, at);
    return (uint32_t)(at - out);
}

/* Writes the bytes of a piece as they are in the stream; returns their number. */
static uint32_t stream_bytes_of(const stream_cells *s, const flowing *cell, unsigned char *out) {
    const kvf_dtype type = s->selection->items[cell->item].dtype;
    const kvf_dtype own =
        (kvf_dtype)s->t->w->models[s->side].groups[cell->at.group].parts[cell->at.part].dtype;
    unsigned char content[MOST_CELL_BYTES];
    cell_content(&cell->at, content);
    if (type == own) {
        memcpy(out, content, cell->at.bytes);
        return cell->at.bytes;
    }
    const uint32_t count = cell->at.bytes / (kvf_dtype_bits(own) / 8);
    return convert(own, content, type, out, count);
}

/* ---- one end ---------------------------------------------------------------------------------- */

typedef struct stream_end {
    stream_cells cells;
    kvf_stream_map *map;
    kvf_stream *stream;
    uint64_t pieces; /* counted */
} stream_end;

/* A piece is contiguous in memory and in the stream, in one layer of an item, in one logical block, over successive
 * steps. */
static uint64_t count_pieces(const stream_cells *s) {
    uint64_t pieces = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        const flowing *cell = &s->cells[i], *last = i ? cell - 1 : NULL;
        const uint32_t tokens = s->t->w->engines[s->side].tokens[cell->at.group];
        pieces += !last || last->item != cell->item || last->at.model_layer != cell->at.model_layer ||
                  last->position / tokens != cell->position / tokens || last->position + 1 < cell->position ||
                  last->at.at.region != cell->at.at.region ||
                  last->at.at.offset + last->at.bytes != cell->at.at.offset;
    }
    return pieces;
}

static bool check_sizes(const stream_end *end, const kvf_group_steps *groups, uint64_t bytes) {
    const world *w = end->cells.t->w;
    kvf_step_span spans[MAX_GROUPS];
    for (uint32_t i = 0; i < w->models[LOCAL].group_count; i++)
        spans[i] = (kvf_step_span){groups[i].begin, groups[i].end};
    if (kvf_stream_bytes(end->stream) != bytes)
        return wrong("rank %u: kvf_stream_bytes() is %llu; its cells have %llu", end->cells.rank,
                     (unsigned long long)kvf_stream_bytes(end->stream), (unsigned long long)bytes);
    const kvf_stream_size size = kvf_stream_map_size(end->map, spans);
    const uint64_t pieces = count_pieces(&end->cells);
    note_if(KIND_PACKED_SIZED, bytes > 0);
    if (size.bytes != bytes || size.pieces != pieces)
        return wrong("rank %u: kvf_stream_map_size() is %llu bytes in %llu pieces; there are %llu in %llu",
                     end->cells.rank, (unsigned long long)size.bytes, (unsigned long long)size.pieces,
                     (unsigned long long)bytes, (unsigned long long)pieces);
    return true;
}

static bool open_end(stream_end *end, const kvf_shard *shard, const kvf_selection *selection,
                     const kvf_group_steps *groups, uint32_t group_count) {
    kvf_status status = kvf_stream_map_create(shard, selection, &end->map);
    if (!status)
        status = kvf_stream_create(end->map, groups, group_count, &end->stream);
    return status ? wrong("a stream gives %s: %s", kvf_status_name(status), kvf_error_detail()) : true;
}

static void close_end(const stream_end *end) {
    kvf_stream_free(end->stream);
    kvf_stream_map_free(end->map);
}

/* ---- moving ----------------------------------------------------------------------------------- */

/* Gathers (into `out`) or scatters a range, by the host's loops or by a device's kernels. */
static bool move_range(const stream_end *end, const memory *m, kvf_byte_range range, unsigned char *out,
                       const unsigned char *in, rng *random) {
    const bool by_kernels = rng_chance(random, 50);
    const uint32_t blocks = rng_between(random, 1, 3);
    if (by_kernels)
        return out ? emulate_gather(end->stream, m, range, out + range.begin, blocks)
                   : emulate_scatter(end->stream, m, range, in + range.begin, blocks);
    if (out)
        kvf_stream_gather(end->stream, m->regions, range, out + range.begin);
    else
        kvf_stream_scatter(end->stream, m->regions, range, in + range.begin);
    return true;
}

/* Gathers (into `out`) or scatters a whole stream, in ranges of any size and in any order. */
static bool move_ranges(const stream_end *end, const memory *m, unsigned char *out, const unsigned char *in,
                        rng *random) {
    kvf_byte_range ranges[MOST_CUTS];
    const uint64_t bytes = kvf_stream_bytes(end->stream);
    uint32_t n = 0;
    for (uint64_t at = 0; at < bytes; n++) {
        const uint64_t most = n + 1 == MOST_CUTS ? bytes : 16 + rng_below(random, (uint32_t)(bytes / 3 + 40));
        const uint64_t got = kvf_stream_cut(end->stream, at, most);
        if (got == 0 || got > most || (got + 8 <= most && at + got != bytes))
            return wrong("kvf_stream_cut() gives %llu of %llu", (unsigned long long)got,
                         (unsigned long long)most);
        ranges[n] = (kvf_byte_range){at, at + got};
        at += got;
    }
    for (; n > 0; n--) {
        const uint32_t pick = rng_below(random, n);
        const kvf_byte_range range = ranges[pick];
        ranges[pick] = ranges[n - 1];
        if (!move_range(end, m, range, out, in, random))
            return false;
    }
    return true;
}

static bool check_stream(const stream_end *holder, const unsigned char *got, const unsigned char *wanted,
                         uint64_t bytes) {
    if (memcmp(got, wanted, bytes) == 0)
        return true;
    uint64_t at = 0, begin = 0;
    while (got[at] == wanted[at])
        at++;
    for (uint32_t i = 0; i < holder->cells.count; i++) {
        unsigned char content[MOST_CELL_BYTES];
        const flowing *cell = &holder->cells.cells[i];
        const uint32_t n = stream_bytes_of(&holder->cells, cell, content);
        if (at < begin + n)
            return wrong(
                "byte %llu of the stream of rank %u is wrong: layer %u, group %u, part %u, step %u, row %u, "
                "unit %u",
                (unsigned long long)at, holder->cells.rank, cell->at.model_layer, cell->at.group,
                cell->at.part, cell->at.step, cell->at.row, cell->at.unit);
        begin += n;
    }
    return wrong("the stream is too long");
}

/* The control: a kernel with a wrong stride must gather other bytes. */
static bool check_spoiled(const stream_end *holder, const memory *m, const unsigned char *wanted,
                          uint64_t bytes, rng *random) {
    if (!rng_chance(random, 20))
        return true;
    unsigned char *got = arena_take(bytes + 1, 1);
    bool spoiled;
    if (!emulate_spoiled(holder->stream, m, (kvf_byte_range){0, bytes}, got, &spoiled))
        return false;
    note_if(KIND_DEVICE_SPOILED, spoiled);
    return !spoiled || memcmp(got, wanted, bytes) != 0 ||
           wrong("a kernel that takes one unit for all gathers the same from rank %u", holder->cells.rank);
}

/* The ranges of the layers, one after the other, must be the whole stream. */
static bool check_layers(const stream_end *end) {
    uint64_t at = 0;
    for (uint32_t layer = 0; layer < end->cells.t->w->models[LOCAL].layer_count; layer++) {
        uint64_t bytes = 0;
        for (uint32_t i = 0; i < end->cells.count; i++) {
            unsigned char content[MOST_CELL_BYTES];
            if (end->cells.cells[i].at.model_layer == layer)
                bytes += stream_bytes_of(&end->cells, &end->cells.cells[i], content);
        }
        const kvf_byte_range range = kvf_stream_layers(end->stream, (kvf_range){layer, layer + 1});
        if (range.begin != at || range.end != at + bytes)
            return wrong("layer %u is bytes [%llu, %llu) of the stream; expected [%llu, %llu)", layer,
                         (unsigned long long)range.begin, (unsigned long long)range.end,
                         (unsigned long long)at, (unsigned long long)at + bytes);
        at += bytes;
    }
    return true;
}

/* ---- a selection that differs -------------------------------------------------------------- */

/* Selects the same cells, but cuts the first possible item in two, which changes the order. Returns the item; NO_ID:
 * none. */
static uint32_t mutate(const kvf_model *model, const kvf_selection *selection, kvf_selection **out) {
    kvf_stream_item *items = arena_take(selection->item_count + 1u, sizeof *items);
    uint32_t n = 0, cut = NO_ID;
    for (uint32_t i = 0; i < selection->item_count; i++) {
        items[n] = selection->items[i];
        const kvf_stream_item *next = i + 1 < selection->item_count ? &selection->items[i + 1] : NULL;
        const bool last = !next || next->group != items[n].group || next->part != items[n].part;
        if (cut == NO_ID && last && items[n].units.begin + 1 < items[n].units.end) {
            items[n + 1] = items[n];
            items[n].units.end = items[n].units.begin + 1;
            items[++n].units.begin++;
            cut = i;
        }
        n++;
    }
    return kvf_selection_check(model, items, n, out) ? NO_ID : cut;
}

/* Whether the bytes show the order of an item's cells: two rows or more, cells of 8 bytes or more, not converted. */
static bool shows_order(const stream_cells *s, uint32_t item) {
    const kvf_stream_item *of = &s->selection->items[item];
    uint32_t rows = 0, bytes = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        const flowing *cell = &s->cells[i];
        if (cell->item != item || cell->at.unit != of->units.begin || cell->at.first != 0)
            continue;
        const part_recipe *part = &s->t->w->models[LOCAL].groups[cell->at.group].parts[cell->at.part];
        if ((kvf_dtype)part->dtype != of->dtype)
            return false;
        bytes = cell_bytes_of(part);
        rows++;
    }
    return rows >= 2 * (of->layers.end - of->layers.begin) && bytes >= 8;
}

/* The control: a reader with another selection must get other cells. */
static bool check_mutant(const packed_transfer *t, const kvf_selection *selection,
                         const kvf_group_steps *groups, const stream_end *reader,
                         const unsigned char *stream) {
    kvf_selection *mutant = NULL;
    const uint32_t cut = mutate(kvf_shard_model(t->shard), selection, &mutant);
    stream_end other = {.cells = reader->cells};
    const uint64_t bytes = kvf_stream_bytes(reader->stream);
    bool good = true;
    if (cut != NO_ID && shows_order(&reader->cells, cut)) {
        unsigned char *again = arena_take(bytes + 1, 1);
        memory m;
        for (uint32_t i = 0; i < kvf_shard_get(t->shard)->region_count; i++)
            m.regions[i] = arena_take(kvf_shard_get(t->shard)->region_bytes[i] + 1, 1);
        good = open_end(&other, t->shard, mutant, groups, t->w->models[LOCAL].group_count);
        if (good) {
            kvf_stream_scatter(other.stream, m.regions, (kvf_byte_range){0, bytes}, stream);
            kvf_stream_gather(reader->stream, m.regions, (kvf_byte_range){0, bytes}, again);
            note(KIND_PACKED_MUTANT);
            if (memcmp(again, stream, bytes) == 0)
                good = wrong("a reader whose item %u is cut in two gets the same cells", cut);
        }
    }
    close_end(&other);
    kvf_selection_free(mutant);
    return good;
}

/* ---- one source ------------------------------------------------------------------------------- */

/* Lets some items travel in another type. */
static bool choose_types(const packed_transfer *t, uint32_t source, rng *random, kvf_selection **out) {
    kvf_selection *planned = NULL;
    kvf_status status = kvf_selection_of_plan(t->plan, source, &planned);
    if (status)
        return wrong("kvf_selection_of_plan() gives %s: %s", kvf_status_name(status), kvf_error_detail());
    kvf_stream_item *items = arena_take(planned->item_count + 1u, sizeof *items);
    memcpy(items, planned->items, planned->item_count * sizeof *items);
    const kvf_dtype types[] = {KVF_DTYPE_F32, KVF_DTYPE_F16, KVF_DTYPE_BF16, KVF_DTYPE_F8_E4M3,
                               KVF_DTYPE_F8_E5M2};
    for (uint32_t i = 0; i < planned->item_count; i++) {
        const kvf_dtype type = types[rng_below(random, sizeof types / sizeof *types)];
        if (kvf_stream_converts(items[i].dtype, type) && rng_chance(random, 30)) {
            note_if(KIND_PACKED_CONVERTED, items[i].dtype != type);
            items[i].dtype = type;
        }
    }
    status = kvf_selection_check(kvf_shard_model(t->shard), items, planned->item_count, out);
    kvf_selection_free(planned);
    return status ? wrong("kvf_selection_check() gives %s: %s", kvf_status_name(status), kvf_error_detail())
                  : true;
}

static void fill_steps(const packed_transfer *t, uint32_t side, kvf_group_steps out[MAX_GROUPS]) {
    kvf_group_request groups[MAX_GROUPS];
    fill_request_form(t->w, t->ask, groups);
    for (uint32_t i = 0; i < t->w->models[LOCAL].group_count; i++)
        out[i] = (kvf_group_steps){side == LOCAL ? groups[i].local : groups[i].remote, groups[i].begin,
                                   groups[i].end};
}

/* Writes the cells that the reader must then have. */
static void expect_cells(const stream_end *reader, const unsigned char *stream, const memory *expected) {
    const stream_cells *s = &reader->cells;
    uint64_t at = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        const flowing *cell = &s->cells[i];
        const kvf_dtype type = s->selection->items[cell->item].dtype;
        const kvf_dtype own =
            (kvf_dtype)s->t->w->models[LOCAL].groups[cell->at.group].parts[cell->at.part].dtype;
        unsigned char *to = expected->regions[cell->at.at.region] + cell->at.at.offset;
        unsigned char content[MOST_CELL_BYTES];
        const uint32_t n = stream_bytes_of(s, cell, content);
        if (type == own)
            memcpy(to, stream + at, n);
        else
            (void)convert(type, stream + at, own, to, n / (kvf_dtype_bits(type) / 8));
        at += n;
    }
}

static bool move_source(const packed_transfer *t, uint32_t source, const kvf_selection *selection,
                        stream_end ends[SIDES], const memory *local, const memory *expected, rng *random) {
    const uint32_t rank = kvf_plan_source_rank(t->plan, source),
                   group_count = t->w->models[LOCAL].group_count;
    const uint32_t ranks[SIDES] = {t->rank, rank};
    const kvf_shard *shards[SIDES] = {t->shard, t->plan->remote->shards[rank]};
    kvf_group_steps groups[SIDES][MAX_GROUPS];
    for (uint32_t side = 0; side < SIDES; side++) {
        fill_steps(t, side, groups[side]);
        if (!collect(t, selection, side, ranks[side], rank, &ends[side].cells) ||
            !open_end(&ends[side], shards[side], selection, groups[side], group_count))
            return false;
    }
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < ends[REMOTE].cells.count; i++) {
        unsigned char content[MOST_CELL_BYTES];
        bytes += stream_bytes_of(&ends[REMOTE].cells, &ends[REMOTE].cells.cells[i], content);
    }
    unsigned char *wanted = arena_take(bytes + 1, 1), *got = arena_take(bytes + 1, 1);
    bytes = 0;
    for (uint32_t i = 0; i < ends[REMOTE].cells.count; i++)
        bytes += stream_bytes_of(&ends[REMOTE].cells, &ends[REMOTE].cells.cells[i], wanted + bytes);
    memset(got, 0xee, bytes + 1);
    if (!check_sizes(&ends[REMOTE], groups[REMOTE], bytes) ||
        !check_sizes(&ends[LOCAL], groups[LOCAL], bytes) || !check_layers(&ends[LOCAL]) ||
        !move_ranges(&ends[REMOTE], &t->remote[rank], got, NULL, random) ||
        !check_stream(&ends[REMOTE], got, wanted, bytes) ||
        !check_spoiled(&ends[REMOTE], &t->remote[rank], wanted, bytes, random))
        return false;
    if (got[bytes] != 0xee)
        return wrong("the stream of rank %u is written over its end", rank);
    note_if(KIND_PACKED, bytes > 0);
    expect_cells(&ends[LOCAL], wanted, expected);
    return move_ranges(&ends[LOCAL], local, NULL, got, random) &&
           check_mutant(t, selection, groups[LOCAL], &ends[LOCAL], got);
}

static bool compare(const packed_transfer *t, const memory *local, const memory *expected) {
    const kvf_shard_desc *desc = kvf_shard_get(t->shard);
    for (uint32_t i = 0; i < desc->region_count; i++)
        for (uint64_t at = 0; at < desc->region_bytes[i]; at++)
            if (local->regions[i][at] != expected->regions[i][at])
                return wrong("scattering leaves region %u, byte %llu wrong", i, (unsigned long long)at);
    return true;
}

bool move_packed(const packed_transfer *t) {
    rng random = {mix64(t->w->recipe->ids_seed + 1000 + t->rank)};
    memory local, expected;
    const kvf_shard_desc *desc = kvf_shard_get(t->shard);
    for (uint32_t i = 0; i < desc->region_count; i++) {
        local.regions[i] = arena_take(desc->region_bytes[i] + 1, 1);
        expected.regions[i] = arena_take(desc->region_bytes[i] + 1, 1);
        for (uint64_t at = 0; at < desc->region_bytes[i]; at++)
            local.regions[i][at] = expected.regions[i][at] = (unsigned char)(at * 151 + i);
    }
    for (uint32_t source = 0; source < kvf_plan_source_count(t->plan); source++) {
        stream_end ends[SIDES] = {{.map = NULL}, {.map = NULL}};
        kvf_selection *selection = NULL;
        bool good = choose_types(t, source, &random, &selection) &&
                    move_source(t, source, selection, ends, &local, &expected, &random);
        for (uint32_t side = 0; side < SIDES; side++)
            close_end(&ends[side]);
        kvf_selection_free(selection);
        if (!good)
            return false;
    }
    return compare(t, &local, &expected);
}
