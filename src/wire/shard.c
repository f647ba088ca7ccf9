/*
 * A shard as bytes. Layouts are regular: from layer to layer the region or the offset of a part grows by a fixed step.
 * So the placements of a part are runs over layers, each ten numbers,
 *
 *   [count, region, offset, block_stride, row_stride, unit_stride, piece_stride, pieces, region_step,
 *    offset_step]
 *
 * and equal sizes of neighbouring regions are written once, as [count, bytes].
 */
#include "shard/shard.h"
#include "model/model.h"
#include "wire/check.h"
#include "wire/forms.h"

#define MAX_REGIONS (1u << 18)
#define MAX_PLACEMENTS                                                                                       \
    (1u << 18) /* of all parts in all layers: 12 MiB, which a run of ten numbers may stand for */
#define RUN_NUMBERS 10
/* To read so many of them takes as long as to compare a piece. */
#define PLACEMENTS_OF_A_PIECE 16u
#define REGIONS_OF_A_PIECE 128u

static const kvf_wire_field shard_fields[] = {
    KVF_FIELD(U32, kvf_shard_desc, rank, .most = KVF_WIRE_MAX_RANKS - 1),
    KVF_FIELD(U32, kvf_shard_desc, tp_rank),
    KVF_FIELD(U32, kvf_shard_desc, tp_size),
    KVF_FIELD(U32, kvf_shard_desc, pp_rank),
    KVF_FIELD(U32, kvf_shard_desc, pp_size),
    KVF_FIELD(RANGE, kvf_shard_desc, layers),
};

static const kvf_wire_field group_fields[] = {
    KVF_FIELD(U32, kvf_group_shard_desc, tokens_per_block),
    KVF_FIELD(U32, kvf_group_shard_desc, kernel_blocks_per_block),
    KVF_FIELD(U64, kvf_group_shard_desc, block_count),
    KVF_FIELD(U32, kvf_group_shard_desc, tokens.index),
    KVF_FIELD(U32, kvf_group_shard_desc, tokens.count),
    KVF_FIELD(U32, kvf_group_shard_desc, tokens.width),
};

static const kvf_wire_field part_fields[] = {
    KVF_FIELD(RANGE, kvf_part_share, units),
    KVF_FIELD(U32, kvf_part_share, replica),
    KVF_FIELD(U32, kvf_part_share, replica_count),
};

#define FORM(fields)                                                                                         \
    { fields, sizeof(fields) / sizeof(fields)[0], NULL }

static const kvf_body_form shard_form = FORM(shard_fields);
static const kvf_body_form group_form = FORM(group_fields);
static const kvf_body_form part_form = FORM(part_fields);

/* ---- encoding -------------------------------------------------------------------------------- */

/* The placements of one part: every `stride`-th of an array. */
typedef struct sequence {
    const kvf_placement *placements;
    uint32_t count, stride;
} sequence;

static const kvf_placement *element(const sequence *s, uint32_t i) {
    return &s->placements[(size_t)i * s->stride];
}

static bool same_strides(const kvf_placement *a, const kvf_placement *b) {
    return a->block_stride == b->block_stride && a->row_stride == b->row_stride &&
           a->unit_stride == b->unit_stride && a->piece_stride == b->piece_stride && a->pieces == b->pieces;
}

/* b - a; false if it does not fit in an int64_t. */
static bool step_between(uint64_t a, uint64_t b, int64_t *out) {
    uint64_t distance = a < b ? b - a : a - b;
    *out = (int64_t)(b - a);
    return distance <= INT64_MAX;
}

/* How many placements from `first` on are evenly spaced, and their steps. */
static uint32_t run_length(const sequence *s, uint32_t first, int64_t *region_step, int64_t *offset_step) {
    *region_step = *offset_step = 0;
    uint32_t n = 1;
    for (; first + n < s->count; n++) {
        const kvf_placement *a = element(s, first + n - 1), *b = element(s, first + n);
        int64_t region, offset;
        if (!same_strides(a, b) || !step_between(a->region, b->region, &region) ||
            !step_between(a->offset, b->offset, &offset))
            break;
        if (n > 1 && (region != *region_step || offset != *offset_step))
            break;
        *region_step = region;
        *offset_step = offset;
    }
    return n;
}

static uint32_t count_runs(const sequence *s) {
    uint32_t runs = 0;
    int64_t region_step, offset_step;
    for (uint32_t i = 0; i < s->count; runs++)
        i += run_length(s, i, &region_step, &offset_step);
    return runs;
}

static void write_placements(kvf_packing *packing, const sequence *s) {
    msgpack_packer *packer = &packing->packer;
    msgpack_pack_array(packer, count_runs(s));
    for (uint32_t i = 0, n; i < s->count; i += n) {
        int64_t region_step, offset_step;
        n = run_length(s, i, &region_step, &offset_step);
        const kvf_placement *first = element(s, i);
        msgpack_pack_array(packer, RUN_NUMBERS);
        msgpack_pack_uint32(packer, n);
        msgpack_pack_uint32(packer, first->region);
        msgpack_pack_uint64(packer, first->offset);
        msgpack_pack_uint64(packer, first->block_stride);
        msgpack_pack_uint64(packer, first->row_stride);
        msgpack_pack_uint64(packer, first->unit_stride);
        msgpack_pack_uint64(packer, first->piece_stride);
        msgpack_pack_uint32(packer, first->pieces);
        msgpack_pack_int64(packer, region_step);
        msgpack_pack_int64(packer, offset_step);
    }
}

static void write_group(kvf_packing *packing, const kvf_shard *shard, const kvf_model *told, uint32_t g) {
    const kvf_group_shard_desc *group = &shard->desc.groups[g];
    uint32_t parts = kvf_model_group(shard->model, g)->part_count;
    uint32_t layers = shard->group_layers[g].end - shard->group_layers[g].begin;
    msgpack_pack_map(&packing->packer, (size_t)kvf_wire_fields_count(&group_form, 0, group) + 2);
    kvf_wire_fields_write(packing, &group_form, 0, group);
    kvf_pack_key(packing, "layers");
    msgpack_pack_array(&packing->packer, 2);
    msgpack_pack_uint32(&packing->packer, shard->group_layers[g].begin);
    msgpack_pack_uint32(&packing->packer, shard->group_layers[g].end);
    kvf_pack_key(packing, "parts");
    msgpack_pack_array(&packing->packer, parts);
    for (uint32_t p = 0; p < parts; p++) {
        const kvf_dtype dtype = kvf_model_group(shard->model, g)->parts[p].dtype;
        const bool other = dtype != kvf_model_group(told, g)->parts[p].dtype;
        msgpack_pack_map(&packing->packer,
                         (size_t)kvf_wire_fields_count(&part_form, 0, &group->parts[p]) + 1 + other);
        kvf_wire_fields_write(packing, &part_form, 0, &group->parts[p]);
        if (other) {
            kvf_pack_key(packing, "dtype");
            kvf_pack_key(packing, kvf_dtype_name(dtype));
        }
        kvf_pack_key(packing, "placements");
        sequence s = {layers ? group->placements + p : NULL, layers, parts};
        write_placements(packing, &s);
    }
}

static uint32_t equal_regions(const kvf_shard_desc *desc, uint32_t first) {
    uint32_t n = 1;
    while (first + n < desc->region_count && desc->region_bytes[first + n] == desc->region_bytes[first])
        n++;
    return n;
}

static void write_regions(kvf_packing *packing, const kvf_shard_desc *desc) {
    uint32_t runs = 0;
    for (uint32_t i = 0; i < desc->region_count; runs++)
        i += equal_regions(desc, i);
    msgpack_pack_array(&packing->packer, runs);
    for (uint32_t i = 0, n; i < desc->region_count; i += n) {
        n = equal_regions(desc, i);
        msgpack_pack_array(&packing->packer, 2);
        msgpack_pack_uint32(&packing->packer, n);
        msgpack_pack_uint64(&packing->packer, desc->region_bytes[i]);
    }
}

kvf_status kvf_wire_encode_shard(const kvf_shard *shard, const kvf_model *told, kvf_wire_buffer *out) {
    const kvf_shard_desc *desc = &shard->desc;
    if (desc->region_count > MAX_REGIONS)
        return kvf_fail(KVF_E_RANGE, "shard: region_count is %u; allowed: up to %u", desc->region_count,
                        MAX_REGIONS);
    uint32_t groups = kvf_model_group_count(shard->model);
    uint64_t placed = 0;
    for (uint32_t g = 0; g < groups; g++) {
        const kvf_range held = shard->group_layers[g];
        placed += (uint64_t)kvf_model_group(shard->model, g)->part_count * (held.end - held.begin);
    }
    if (placed > MAX_PLACEMENTS)
        return kvf_fail(KVF_E_RANGE, "shard: it has %llu placements; allowed: up to %u",
                        (unsigned long long)placed, MAX_PLACEMENTS);
    kvf_packing packing;
    kvf_packing_start(&packing);
    msgpack_pack_map(&packing.packer, (size_t)kvf_wire_fields_count(&shard_form, 0, desc) + 2);
    kvf_wire_fields_write(&packing, &shard_form, 0, desc);
    kvf_pack_key(&packing, "regions");
    write_regions(&packing, desc);
    kvf_pack_key(&packing, "groups");
    msgpack_pack_array(&packing.packer, groups);
    for (uint32_t g = 0; g < groups; g++)
        write_group(&packing, shard, told ? told : shard->model, g);
    kvf_wire_buffer made = {0};
    kvf_status status = kvf_packing_end(&packing, &made);
    /* An irregular layout may need more runs than a reader accepts. */
    if (!status && kvf_wire_check((kvf_bytes){made.data, made.size}) != KVF_OK)
        status = kvf_fail(KVF_E_RANGE, "%s", kvf_error_detail());
    if (status) {
        kvf_wire_buffer_free(&made);
        return kvf_fail_in(status, "shard: ");
    }
    *out = made;
    return KVF_OK;
}

/* ---- decoding -------------------------------------------------------------------------------- */

static kvf_status read_regions(const msgpack_object *map, kvf_shard_desc *desc, void **storage) {
    const msgpack_object *object, *runs, *run;
    uint32_t run_count, numbers;
    kvf_status status = kvf_wire_field_find(map, "regions", &object);
    if (!status)
        status = kvf_wire_field_array(object, "regions", 0, MAX_REGIONS, &runs, &run_count);
    if (status)
        return status;
    uint64_t total = 0, count, bytes;
    for (uint32_t i = 0; i < run_count; i++) {
        if ((status = kvf_wire_field_array(&runs[i], "a run of regions", 2, 2, &run, &numbers)) ||
            (status = kvf_wire_field_number(&run[0], "a run of regions", 1, MAX_REGIONS, &count)) ||
            (status = kvf_wire_field_number(&run[1], "the bytes of a region", 0, UINT64_MAX, &bytes)))
            return status;
        total += count;
        if ((status = kvf_wire_field_check_size("regions", "elements", total, 0, MAX_REGIONS, KVF_E_PARSE)))
            return status;
    }
    uint64_t *region_bytes = kvf_wire_keep(storage, total, sizeof *region_bytes);
    if (!region_bytes)
        return kvf_nomem("a shard");
    desc->region_bytes = region_bytes;
    desc->region_count = (uint32_t)total;
    for (uint32_t i = 0; i < run_count; i++)
        for (uint64_t n = runs[i].via.array.ptr[0].via.u64; n > 0; n--)
            *region_bytes++ = runs[i].via.array.ptr[1].via.u64;
    return KVF_OK;
}

static kvf_status read_step(const msgpack_object *object, const char *key, int64_t *out) {
    if (object->type == MSGPACK_OBJECT_NEGATIVE_INTEGER) {
        *out = object->via.i64;
        return KVF_OK;
    }
    uint64_t number;
    kvf_status status = kvf_wire_field_number(object, key, 0, INT64_MAX, &number);
    *out = (int64_t)number;
    return status;
}

/* Whether first + times * step is within 0 to most. */
static bool stays_within(uint64_t first, int64_t step, uint64_t times, uint64_t most) {
    uint64_t size = step < 0 ? 0 - (uint64_t)step : (uint64_t)step, way;
    return kvf_mul(size, times, &way) && way <= (step < 0 ? first : most - first);
}

/* Reads the numbers of one run, and checks that those of its last placement are in range; then so are those between. */
static kvf_status read_run(const msgpack_object *object, uint64_t left, uint64_t *count, kvf_placement *first,
                           int64_t *region_step, int64_t *offset_step) {
    static const char *const keys[RUN_NUMBERS] = {
        "count",       "region",       "offset", "block_stride", "row_stride",
        "unit_stride", "piece_stride", "pieces", "region_step",  "offset_step"};
    const uint64_t most[RUN_NUMBERS - 2] = {left,       UINT32_MAX, UINT64_MAX, UINT64_MAX,
                                            UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT32_MAX};
    const msgpack_object *numbers;
    uint32_t number_count;
    uint64_t values[RUN_NUMBERS - 2];
    kvf_status status = kvf_wire_field_array(object, "a run of placements", RUN_NUMBERS, RUN_NUMBERS,
                                             &numbers, &number_count);
    for (uint32_t i = 0; i < RUN_NUMBERS - 2 && !status; i++)
        status = kvf_wire_field_number(&numbers[i], keys[i], i == 0 ? 1 : 0, most[i], &values[i]);
    if (!status)
        status = read_step(&numbers[RUN_NUMBERS - 2], keys[RUN_NUMBERS - 2], region_step);
    if (!status)
        status = read_step(&numbers[RUN_NUMBERS - 1], keys[RUN_NUMBERS - 1], offset_step);
    if (status)
        return status;
    *count = values[0];
    *first = (kvf_placement){(uint32_t)values[1], values[2], values[3],          values[4],
                             values[5],           values[6], (uint32_t)values[7]};
    if (!stays_within(first->region, *region_step, *count - 1, UINT32_MAX) ||
        !stays_within(first->offset, *offset_step, *count - 1, UINT64_MAX))
        return kvf_fail(KVF_E_PARSE,
                        "%llu placements from region %u, offset %llu on, by steps of %lld and %lld, "
                        "leave the range of these numbers",
                        (unsigned long long)*count, first->region, (unsigned long long)first->offset,
                        (long long)*region_step, (long long)*offset_step);
    return KVF_OK;
}

/* Fills every `stride`-th of `placements`, `layers` of them. */
static kvf_status read_placements(const msgpack_object *map, uint32_t layers, uint32_t stride,
                                  kvf_placement *placements) {
    const msgpack_object *object, *runs;
    uint32_t run_count, filled = 0;
    kvf_status status = kvf_wire_field_find(map, "placements", &object);
    if (!status)
        status = kvf_wire_field_array(object, "placements", 0, layers, &runs, &run_count);
    if (status)
        return status;
    for (uint32_t r = 0; r < run_count; r++) {
        uint64_t count;
        kvf_placement first;
        int64_t region_step, offset_step;
        if ((status = read_run(&runs[r], layers - filled, &count, &first, &region_step, &offset_step)))
            return status;
        for (uint32_t i = 0; i < count; i++, filled++) {
            kvf_placement *out = &placements[(size_t)filled * stride];
            *out = first;
            out->region += (uint32_t)((uint64_t)region_step * i);
            out->offset += (uint64_t)offset_step * i;
        }
    }
    if (filled != layers)
        return kvf_fail(KVF_E_PARSE, "placements are for %u layers, but the rank holds %u", filled, layers);
    return KVF_OK;
}

static kvf_status read_layers(const msgpack_object *map, const kvf_group_desc *group, kvf_range *out) {
    const msgpack_object *object, *ends;
    uint32_t count;
    uint64_t begin, end;
    kvf_status status = kvf_wire_field_find(map, "layers", &object);
    if (!status)
        status = kvf_wire_field_array(object, "layers", 2, 2, &ends, &count);
    if (!status)
        status = kvf_wire_field_number(&ends[0], "the first of layers", 0, group->layer_count, &begin);
    if (!status)
        status = kvf_wire_field_number(&ends[1], "the end of layers", begin, group->layer_count, &end);
    if (!status)
        *out = (kvf_range){(uint32_t)begin, (uint32_t)end};
    return status;
}

/* Reads the type of a part's elements, if the sender's differs from the model's. */
static kvf_status read_dtype(const msgpack_object *map, uint32_t convert, kvf_dtype *dtype) {
    const msgpack_object *object;
    if (!kvf_wire_field_has(map, "dtype"))
        return KVF_OK;
    kvf_status status = kvf_wire_field_find(map, "dtype", &object);
    if (status)
        return status;
    char name[16] = "";
    if (object->type == MSGPACK_OBJECT_STR && object->via.str.size < sizeof name)
        memcpy(name, object->via.str.ptr, object->via.str.size);
    kvf_dtype said;
    if (kvf_dtype_by_name(name, &said) != KVF_OK)
        return kvf_fail(KVF_E_PARSE, "dtype is unknown");
    const uint32_t both = KVF_DTYPE_BIT(said) | KVF_DTYPE_BIT(*dtype);
    if (said != *dtype && (convert & both) != both)
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "dtype is %s, but %s in the receiver's model; this conversion is not allowed",
                        kvf_dtype_name(said), kvf_dtype_name(*dtype));
    *dtype = said;
    return KVF_OK;
}

/* `types` has those of the group's parts, and is changed for parts whose type differs at the sender. `placed` counts the
 * placements of all groups. */
static kvf_status read_group(const msgpack_object *map, const kvf_group_desc *group, uint32_t convert,
                             kvf_dtype *types, kvf_group_shard_desc *out, kvf_range *held, uint64_t *placed,
                             void **storage) {
    kvf_status status = kvf_wire_fields_read(map, &group_form, 0, out, storage);
    if (!status)
        status = read_layers(map, group, held);
    const msgpack_object *object, *parts;
    uint32_t count;
    if (!status)
        status = kvf_wire_field_find(map, "parts", &object);
    if (!status)
        status = kvf_wire_field_array(object, "parts", group->part_count, group->part_count, &parts, &count);
    if (status)
        return status;
    uint32_t held_count = held->end - held->begin;
    *placed += (uint64_t)count * held_count;
    status = kvf_wire_field_check_size("placements", "elements", *placed, 0, MAX_PLACEMENTS, KVF_E_PARSE);
    if (status)
        return status;
    kvf_part_share *shares = kvf_wire_keep(storage, count, sizeof *shares);
    kvf_placement *placements = kvf_wire_keep(storage, (size_t)count * held_count, sizeof *placements);
    if (!shares || !placements)
        return kvf_nomem("a shard");
    out->parts = shares;
    out->placements = placements;
    for (uint32_t p = 0; p < count && !status; p++) {
        status = kvf_wire_fields_read(&parts[p], &part_form, 0, &shares[p], storage);
        if (!status)
            status = read_placements(&parts[p], held_count, count, placements + p);
        if (!status)
            status = read_dtype(&parts[p], convert, &types[p]);
        if (status)
            status = kvf_fail_in(status, "part %s: ", group->parts[p].name);
    }
    return status;
}

/* The parts of a shard that is being read. */
typedef struct read_shard {
    kvf_shard_desc desc;
    kvf_range *layers; /* by group */
    kvf_dtype *types;  /* of all parts, group by group */
    uint64_t placed;   /* placements of all groups */
    bool retyped;      /* some types differ from the model's */
} read_shard;

static kvf_status read_groups(const msgpack_object *map, const kvf_model *model, const uint32_t *convert,
                              read_shard *out, void **storage) {
    const msgpack_object *object, *elements;
    uint32_t groups = kvf_model_group_count(model), count;
    kvf_status status = kvf_wire_field_find(map, "groups", &object);
    if (!status)
        status = kvf_wire_field_array(object, "groups", groups, groups, &elements, &count);
    if (status)
        return status;
    kvf_group_shard_desc *made = kvf_wire_keep(storage, groups, sizeof *made);
    out->layers = kvf_wire_keep(storage, groups, sizeof *out->layers);
    out->types = kvf_wire_keep(storage, kvf_model_part_count(model), sizeof *out->types);
    if (!made || !out->layers || !out->types)
        return kvf_nomem("a shard");
    memset(made, 0, groups * sizeof *made);
    out->desc.groups = made;
    kvf_dtype *types = out->types;
    for (uint32_t g = 0; g < groups && !status; g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        for (uint32_t p = 0; p < group->part_count; p++)
            types[p] = group->parts[p].dtype;
        status = read_group(&elements[g], group, convert ? convert[g] : 0, types, &made[g], &out->layers[g],
                            &out->placed, storage);
        for (uint32_t p = 0; p < group->part_count; p++)
            out->retyped = out->retyped || types[p] != group->parts[p].dtype;
        types += group->part_count;
        if (status)
            status = kvf_fail_in(status, "group %s: ", group->name);
    }
    return status;
}

static kvf_status make_shard(const kvf_model *model, const read_shard *read, uint64_t *pieces,
                             kvf_shard **out) {
    uint64_t left = KVF_OVERLAP_FOREIGN;
    kvf_model *retyped = NULL;
    kvf_status status = read->retyped ? kvf_model_retype(model, read->types, &retyped) : KVF_OK;
    if (!status)
        status = kvf_shard_make(retyped ? retyped : model, &read->desc, read->layers, &left, out);
    if (pieces)
        *pieces = KVF_OVERLAP_FOREIGN - left + read->placed / PLACEMENTS_OF_A_PIECE +
                  read->desc.region_count / REGIONS_OF_A_PIECE;
    kvf_model_free(retyped);
    return status;
}

kvf_status kvf_wire_decode_shard(const kvf_model *model, const uint32_t *convert, kvf_bytes bytes,
                                 uint64_t *pieces, kvf_shard **out) {
    msgpack_zone zone;
    msgpack_object map;
    if (pieces)
        *pieces = 0;
    kvf_status status = kvf_wire_unpack(bytes, &zone, &map);
    if (status)
        return kvf_fail_in(status, "shard: ");
    void *storage = NULL;
    read_shard read = {.desc = {.struct_size = sizeof read.desc}};
    status = kvf_wire_fields_read(&map, &shard_form, 0, &read.desc, &storage);
    if (!status)
        status = read_regions(&map, &read.desc, &storage);
    if (!status)
        status = read_groups(&map, model, convert, &read, &storage);
    if (!status)
        status = make_shard(model, &read, pieces, out);
    kvf_wire_discard(&storage);
    msgpack_zone_destroy(&zone);
    return status ? kvf_fail_in(status, "shard: ") : KVF_OK;
}
