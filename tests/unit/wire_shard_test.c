/*
 * Shards as bytes: every placement comes back, a regular layout stays small however many layers it has, and everything
 * else is refused.
 */
#include <msgpack.h>

#include "model/match.h"
#include "wire_samples.h"

/* ---- there and back -------------------------------------------------------------------------- */

static void assert_same_share(const kvf_part_share *a, const kvf_part_share *b) {
    assert_range(a->units, b->units.begin, b->units.end);
    assert_int_equal(a->replica, b->replica);
    assert_int_equal(a->replica_count, b->replica_count);
}

static void assert_same_group(const kvf_shard *a, const kvf_shard *b, uint32_t g) {
    const kvf_group_shard_desc *x = &kvf_shard_get(a)->groups[g], *y = &kvf_shard_get(b)->groups[g];
    assert_int_equal(x->tokens_per_block, y->tokens_per_block);
    assert_int_equal(x->kernel_blocks_per_block, y->kernel_blocks_per_block);
    assert_int_equal(x->block_count, y->block_count);
    assert_int_equal(x->tokens.index, y->tokens.index);
    assert_int_equal(x->tokens.count, y->tokens.count);
    assert_int_equal(x->tokens.width, y->tokens.width);
    const kvf_group_desc *group = kvf_model_group(kvf_shard_model(a), g);
    kvf_range layers = kvf_shard_group_layers(a, g);
    assert_range(kvf_shard_group_layers(b, g), layers.begin, layers.end);
    for (uint32_t p = 0; p < group->part_count; p++) {
        assert_same_share(&x->parts[p], &y->parts[p]);
        for (uint32_t layer = layers.begin; layer < layers.end; layer++)
            assert_placement(b, g, layer, p, *kvf_shard_placement(a, g, layer, p));
    }
}

static void assert_same_shard(const kvf_shard *a, const kvf_shard *b) {
    const kvf_shard_desc *x = kvf_shard_get(a), *y = kvf_shard_get(b);
    assert_int_equal(x->rank, y->rank);
    assert_int_equal(x->tp_rank, y->tp_rank);
    assert_int_equal(x->tp_size, y->tp_size);
    assert_int_equal(x->pp_rank, y->pp_rank);
    assert_int_equal(x->pp_size, y->pp_size);
    assert_range(x->layers, y->layers.begin, y->layers.end);
    assert_int_equal(x->region_count, y->region_count);
    if (x->region_count)
        assert_memory_equal(x->region_bytes, y->region_bytes, x->region_count * sizeof *x->region_bytes);
    for (uint32_t g = 0; g < kvf_model_group_count(kvf_shard_model(a)); g++)
        assert_same_group(a, b, g);
}

static kvf_wire_buffer encoded_shard(const kvf_shard *shard) {
    kvf_wire_buffer out = {0};
    assert_ok(kvf_wire_encode_shard(shard, NULL, &out));
    return out;
}

static void check_engine(const kvf_model *model, const kvf_engine_spec *spec) {
    kvf_engine *engine = NULL;
    if (kvf_engine_build(model, spec, &engine) != KVF_OK)
        return; /* not every shape fits every model */
    uint32_t ranks = kvf_engine_rank_count(engine);
    for (uint32_t rank = 0; rank < ranks; rank++) {
        const kvf_shard *shard = kvf_engine_shard(engine, rank);
        kvf_wire_buffer encoded = encoded_shard(shard);
        kvf_shard *read = NULL;
        assert_ok(kvf_wire_decode_shard(model, NULL, (kvf_bytes){encoded.data, encoded.size}, NULL, &read));
        assert_same_shard(shard, read);
        kvf_shard_free(read);
        kvf_wire_buffer_free(&encoded);
    }
    kvf_engine_free(engine);
}

static kvf_model *loaded(const char *name) {
    kvf_model *model = NULL;
    assert_ok(kvf_model_load(name, NULL, &model));
    return model;
}

static void shards_of_every_model_and_many_shapes_read_as_they_were_written(void **state) {
    (void)state;
    const struct {
        uint32_t tp, pp, dcp;
    } shapes[] = {{1, 1, 1}, {2, 2, 1}, {3, 1, 1}, {8, 3, 2}, {16, 1, 2}};
    const char *const orders[] = {NULL, "L|BPNH", "LP|BNH", "LBPHN", "BLHNP", "L|BHNP"};
    const char *name;
    for (uint32_t m = 0; (name = kvf_builtin_model_name(m)); m++) {
        kvf_model *model = loaded(name);
        for (size_t s = 0; s < COUNT_OF(shapes); s++)
            for (size_t o = 0; o < COUNT_OF(orders); o++)
                check_engine(model, ENGINE(.tp_size = shapes[s].tp, .pp_size = shapes[s].pp,
                                           .dcp_size = shapes[s].dcp, .share_pages = o % 2,
                                           .all = {.block_count = 10,
                                                   .order = orders[o],
                                                   .kernel_blocks_per_block = 1 + (uint32_t)(s % 2),
                                                   .page_align = s == 3 ? 4096 : 0},
                                           .state = {.order = s % 2 ? "L|BTNPH" : NULL}));
        kvf_model_free(model);
    }
}

/* So many groups that each list of them needs memory of its own. */
static kvf_model *with_64_groups(void) {
    enum { GROUPS = 64 };
    static uint32_t layers[GROUPS];
    static char names[GROUPS][4];
    kvf_part_desc part = PART(.name = "k", .units = 2, .cell_elements = 4);
    kvf_group_desc groups[GROUPS];
    for (uint32_t g = 0; g < GROUPS; g++) {
        layers[g] = g;
        (void)snprintf(names[g], sizeof names[g], "%u", g);
        groups[g] = (kvf_group_desc){
            .name = names[g], .layers = &layers[g], .layer_count = 1, .parts = &part, .part_count = 1};
    }
    return model_of(GROUPS, groups, GROUPS);
}

/* The types of its 64 parts fill a piece of memory to the end. */
static void a_shard_of_many_groups_reads_as_it_was_written(void **state) {
    (void)state;
    kvf_model *model = with_64_groups();
    check_engine(model, ENGINE(.all = {.block_count = 3}));
    kvf_model_free(model);
}

/* Returns the size of the encoded shard. */
static size_t check_placements(uint32_t layers, const uint64_t *region_bytes,
                               kvf_placement (*placements)[2]) {
    kvf_model *model = attention(layers, 2, 4);
    kvf_part_share shares[2] = {{.units = {0, 2}}, {.units = {0, 2}}};
    kvf_group_shard_desc group = {
        .tokens_per_block = 16, .block_count = 5, .parts = shares, .placements = placements[0]};
    kvf_shard_desc desc = {.struct_size = sizeof desc,
                           .layers = {0, layers},
                           .region_bytes = region_bytes,
                           .region_count = layers,
                           .groups = &group};
    kvf_shard *shard = NULL, *read = NULL;
    assert_ok(kvf_shard_create(model, &desc, &shard));
    kvf_wire_buffer encoded = encoded_shard(shard);
    assert_ok(kvf_wire_decode_shard(model, NULL, (kvf_bytes){encoded.data, encoded.size}, NULL, &read));
    assert_same_shard(shard, read);
    size_t size = encoded.size;
    kvf_shard_free(read);
    kvf_shard_free(shard);
    kvf_wire_buffer_free(&encoded);
    kvf_model_free(model);
    return size;
}

/* Regions, offsets and strides without any regularity. */
static void a_shard_without_regularity_reads_as_it_was_written(void **state) {
    (void)state;
    enum { LAYERS = 40 };
    uint64_t region_bytes[LAYERS], seed = 5;
    kvf_placement placements[LAYERS][2];
    for (uint32_t i = 0; i < LAYERS; i++) {
        uint32_t region = (i * 7 + 3) % LAYERS;
        region_bytes[i] = 10000 + sample_random(&seed) % 1000;
        uint64_t row = 32 + 8 * (sample_random(&seed) % 4);
        placements[i][0] = PLACED(region, sample_random(&seed) % 100 * 8, row * 20, row, 16);
        placements[i][1] = placements[i][0];
        placements[i][1].offset += 8;
    }
    (void)check_placements(LAYERS, region_bytes, placements);
}

/* K of the second layer differs from that of the first in one number. */
static void layers_that_differ_in_one_stride_read_as_they_were_written(void **state) {
    (void)state;
    const kvf_placement k = {0, 0, 1024, 64, 16, 8, 2}, v = {0, 16384, 1024, 64, 16, 8, 2};
    const kvf_placement others[] = {{1, 0, 2048, 64, 16, 8, 2},
                                    {1, 0, 1024, 48, 16, 8, 2},
                                    {1, 0, 1024, 64, 32, 8, 2},
                                    {1, 0, 1024, 64, 16, 12, 2},
                                    {1, 0, 1024, 64, 16, 8, 1}};
    const uint64_t region_bytes[2] = {32768, 32768};
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        kvf_placement placements[2][2] = {{k, v}, {others[i], v}};
        placements[1][1].region = 1;
        (void)check_placements(2, region_bytes, placements);
    }
}

/* A step is written as an int64_t. Where the second layer is farther away, each layer is written for itself. */
static void layers_as_far_apart_as_can_be_read_as_they_were_written(void **state) {
    (void)state;
    const uint64_t region_bytes[2] = {UINT64_MAX, UINT64_MAX}, distances[] = {INT64_MAX, UINT64_C(1) << 63};
    size_t up_bytes[2], down_bytes[2];
    for (size_t i = 0; i < COUNT_OF(distances); i++) {
        const uint64_t far = distances[i];
        kvf_placement up[2][2] = {{PLACED(0, 0, 512, 32, 16), PLACED(0, 8, 512, 32, 16)},
                                  {PLACED(1, far, 512, 32, 16), PLACED(1, far + 8, 512, 32, 16)}};
        kvf_placement down[2][2] = {{up[1][0], up[1][1]}, {up[0][0], up[0][1]}};
        up_bytes[i] = check_placements(2, region_bytes, up);
        down_bytes[i] = check_placements(2, region_bytes, down);
    }
    assert_true(up_bytes[0] < up_bytes[1]);
    assert_true(down_bytes[0] < down_bytes[1]);
}

/* A shard of a model with other types than the reader's model, as a joining peer may send it. */
static void check_other_types(const kvf_dtype types[2]) {
    const uint32_t all = KVF_CONVERTED_DTYPES, some = KVF_DTYPE_BIT(KVF_DTYPE_F32);
    kvf_model *told = attention(2, 2, 4), *other = NULL;
    assert_ok(kvf_model_retype(told, types, &other));
    kvf_engine *engine = engine_of(other, ENGINE(.all = {.block_count = 10}));
    const kvf_shard *shard = kvf_engine_shard(engine, 0);
    kvf_wire_buffer encoded = {0};
    assert_ok(kvf_wire_encode_shard(shard, told, &encoded));
    const kvf_bytes bytes = {encoded.data, encoded.size};
    kvf_shard *read = NULL;
    assert_ok(kvf_wire_decode_shard(told, &all, bytes, NULL, &read));
    assert_ok(kvf_model_compare(kvf_shard_model(read), other));
    assert_same_shard(shard, read);
    kvf_shard_free(read);
    assert_fails(kvf_wire_decode_shard(told, NULL, bytes, NULL, &read), KVF_E_UNSUPPORTED,
                 "part k: dtype is f32, but bf16 in the receiver's model");
    assert_fails(kvf_wire_decode_shard(told, &some, bytes, NULL, &read), KVF_E_UNSUPPORTED, "dtype is f32");
    uint8_t *name = memmem(encoded.data, encoded.size, "f32", 3);
    assert_non_null(name);
    name[2] = '9';
    assert_fails(kvf_wire_decode_shard(told, &all, bytes, NULL, &read), KVF_E_PARSE, "dtype is unknown");
    kvf_wire_buffer_free(&encoded);
    kvf_engine_free(engine);
    kvf_model_free(other);
    kvf_model_free(told);
}

static void other_types_are_read_where_they_may_be_converted(void **state) {
    (void)state;
    /* only one of the two parts differs */
    check_other_types((const kvf_dtype[]){KVF_DTYPE_F32, KVF_DTYPE_BF16});
    check_other_types((const kvf_dtype[]){KVF_DTYPE_F32, KVF_DTYPE_F16});
}

static void a_shard_that_holds_no_layer_of_a_group_reads_as_it_was_written(void **state) {
    (void)state;
    kvf_model *model = hybrid(2);
    check_engine(model, ENGINE(.pp_size = 4, .all = {.block_count = 3}));
    kvf_model_free(model);
}

static void a_shard_of_entries_of_several_tokens_reads_as_it_was_written(void **state) {
    (void)state;
    kvf_model *model = compressed();
    check_engine(model,
                 ENGINE(.tp_size = 2, .dcp_size = 2, .dcp_width = 32,
                        .all = {.tokens_per_block = 64, .kernel_blocks_per_block = 2, .block_count = 3}));
    kvf_model_free(model);
}

/* ---- size ------------------------------------------------------------------------------------ */

static size_t size_of(const kvf_model *model, const kvf_engine_spec *spec) {
    kvf_engine *engine = engine_of(model, spec);
    kvf_wire_buffer encoded = encoded_shard(kvf_engine_shard(engine, 0));
    size_t size = encoded.size;
    kvf_wire_buffer_free(&encoded);
    kvf_engine_free(engine);
    return size;
}

static void a_regular_shard_is_as_small_with_many_layers_as_with_few(void **state) {
    (void)state;
    const char *const orders[] = {"L|BPHN", "L|BPNH", "LP|BNH", "LBPHN", "BLHNP"};
    kvf_model *few = attention(4, 8, 128), *many = attention(200, 8, 128);
    for (size_t o = 0; o < COUNT_OF(orders); o++) {
        const kvf_engine_spec *spec = ENGINE(.all = {.block_count = 1000, .order = orders[o]});
        size_t small = size_of(few, spec), large = size_of(many, spec);
        assert_true(large <= small + 24); /* larger numbers take more bytes */
    }
    kvf_model_free(few);
    kvf_model_free(many);
}

static void a_rank_of_a_large_model_fits_in_a_kilobyte(void **state) {
    (void)state;
    kvf_model *model = loaded("llama-3.1-70b");
    assert_true(size_of(model, ENGINE(.tp_size = 8, .all = {.block_count = 20000})) < 600);
    kvf_model_free(model);
    model = loaded("nemotron-h-56b");
    assert_true(size_of(model, ENGINE(.tp_size = 8, .all = {.block_count = 20000})) < 1500);
    kvf_model_free(model);
}

/* ---- what is refused ------------------------------------------------------------------------- */

/* A shard of two layers with one part, K of 2 heads of 8 bytes, in a buffer of 96 bytes a layer; written as numbers, of
 * which a test changes one. */
typedef struct parcel {
    uint32_t rank, model_layers, layers[2], group_layers[2], regions, run_count;
    uint64_t region_bytes;
    int64_t run[10];
    int huge;                                 /* which of these is 2^64-1 instead, counted from 1; 0: none */
    const char *skip;                         /* a field to leave out */
    const char *dtype;                        /* the type of its elements; NULL: not given */
    bool dtype_is_bin, region_bytes_are_text; /* written as another type */
    uint32_t parts;
    uint32_t group_count;
    uint32_t region_runs;                   /* each run has `regions` regions */
    uint32_t region_numbers, layer_numbers; /* numbers in each array, normally two */
} parcel;

static parcel good_parcel(void) {
    return (parcel){.model_layers = 2,
                    .layers = {0, 2},
                    .group_layers = {0, 2},
                    .regions = 2,
                    .run_count = 1,
                    .region_bytes = 96,
                    .run = {2, 0, 0, 32, 8, 16, 0, 1, 1, 0},
                    .parts = 1,
                    .group_count = 1,
                    .region_runs = 1,
                    .region_numbers = 2,
                    .layer_numbers = 2};
}

static void key(msgpack_packer *to, const char *text) {
    msgpack_pack_str_with_body(to, text, strlen(text));
}

static void number_field(msgpack_packer *to, const parcel *p, const char *name, uint64_t value) {
    key(to, p->skip && strcmp(p->skip, name) == 0 ? "something else" : name);
    msgpack_pack_uint64(to, value);
}

static void pack_part(msgpack_packer *to, const parcel *p) {
    msgpack_pack_map(to, p->dtype ? 5 : 4);
    if (p->dtype) {
        key(to, "dtype");
        if (p->dtype_is_bin)
            msgpack_pack_bin_with_body(to, p->dtype, strlen(p->dtype));
        else
            key(to, p->dtype);
    }
    key(to, "units");
    msgpack_pack_array(to, 2);
    msgpack_pack_uint32(to, 0);
    msgpack_pack_uint32(to, 2);
    number_field(to, p, "replica", 0);
    number_field(to, p, "replica_count", 1);
    key(to, "placements");
    msgpack_pack_array(to, p->run_count);
    for (uint32_t r = 0; r < p->run_count; r++) {
        msgpack_pack_array(to, 10);
        for (int i = 0; i < 10; i++) {
            if (i + 1 == p->huge)
                msgpack_pack_uint64(to, UINT64_MAX);
            else
                msgpack_pack_int64(to, p->run[i]);
        }
    }
}

static void pack_parcel(msgpack_packer *to, const parcel *p) {
    msgpack_pack_map(to, 8);
    number_field(to, p, "rank", p->rank);
    number_field(to, p, "tp_rank", 0);
    number_field(to, p, "tp_size", 1);
    number_field(to, p, "pp_rank", 0);
    number_field(to, p, "pp_size", 1);
    key(to, "layers");
    msgpack_pack_array(to, 2);
    msgpack_pack_uint32(to, p->layers[0]);
    msgpack_pack_uint32(to, p->layers[1]);
    key(to, "regions");
    msgpack_pack_array(to, p->region_runs);
    for (uint32_t r = 0; r < p->region_runs; r++) {
        msgpack_pack_array(to, p->region_numbers);
        msgpack_pack_uint32(to, p->regions);
        if (p->region_bytes_are_text)
            key(to, "96");
        else if (p->region_numbers > 1)
            msgpack_pack_uint64(to, p->region_bytes);
        if (p->region_numbers > 2)
            msgpack_pack_uint64(to, 0);
    }
    key(to, "groups");
    msgpack_pack_array(to, p->group_count);
    for (uint32_t g = 0; g < p->group_count; g++) {
        msgpack_pack_map(to, 8);
        key(to, "layers");
        msgpack_pack_array(to, p->layer_numbers);
        for (uint32_t i = 0; i < p->layer_numbers; i++)
            msgpack_pack_uint32(to, p->group_layers[i > 0]);
        number_field(to, p, "tokens_per_block", 2);
        number_field(to, p, "kernel_blocks_per_block", 1);
        number_field(to, p, "block_count", 3);
        number_field(to, p, "tokens.index", 0);
        number_field(to, p, "tokens.count", 1);
        number_field(to, p, "tokens.width", 1);
        key(to, "parts");
        msgpack_pack_array(to, p->parts);
        for (uint32_t part = 0; part < p->parts; part++)
            pack_part(to, p);
    }
}

/* Tells how many pieces of cells were compared, too. */
static kvf_status try_counted(parcel p, uint64_t *pieces) {
    kvf_part_desc part = PART(.name = "k", .units = 2, .cell_elements = 4);
    kvf_model *model =
        one_group(p.model_layers, (kvf_group_desc){.name = "full", .parts = &part, .part_count = 1});
    msgpack_sbuffer buffer;
    msgpack_sbuffer_init(&buffer);
    msgpack_packer packer;
    msgpack_packer_init(&packer, &buffer, msgpack_sbuffer_write);
    pack_parcel(&packer, &p);
    kvf_bytes exact = sample_exact(buffer.data, buffer.size);
    kvf_shard *shard = NULL;
    kvf_status status = kvf_wire_decode_shard(model, NULL, exact, pieces, &shard);
    if (status)
        assert_null(shard);
    kvf_shard_free(shard);
    free((void *)exact.data);
    msgpack_sbuffer_destroy(&buffer);
    kvf_model_free(model);
    return status;
}

static kvf_status try_parcel(parcel p) {
    return try_counted(p, NULL);
}

static void a_shard_written_by_another_hand_is_read(void **state) {
    (void)state;
    assert_ok(try_parcel(good_parcel()));
}

/* A peer is charged for what the check of its shard costs, even if the shard is refused. */
static void the_pieces_that_were_compared_are_counted(void **state) {
    (void)state;
    kvf_model *model = latent(2);
    kvf_shard *shard = NULL;
    uint64_t pieces = 77;
    parcel p = good_parcel();
    assert_ok(try_counted(p, &pieces));
    assert_int_equal(pieces, 0); /* each layer has a region of its own */
    p.regions = 1;
    p.region_bytes = 192;
    p.run[3] = 64; /* each block of the one layer is followed by a block of the other */
    p.run[8] = 0;
    p.run[9] = 32;
    assert_ok(try_counted(p, &pieces));
    assert_int_equal(pieces, 2);
    p.run[9] = 31;
    assert_fails(try_counted(p, &pieces), KVF_E_OVERLAP, "shard: ");
    assert_int_equal(pieces, 2);
    p = good_parcel();
    p.regions = 262144; /* of which a few bytes tell: they are written, too */
    assert_ok(try_counted(p, &pieces));
    assert_int_equal(pieces, 262144 / 128);
    p.regions = p.model_layers = p.layers[1] = p.group_layers[1] = 160;
    p.run[0] = 160;
    assert_ok(try_counted(p, &pieces));
    assert_int_equal(pieces, 160 / 16 + 160 / 128);
    assert_fails(kvf_wire_decode_shard(model, NULL, (kvf_bytes){"\xc1", 1}, &pieces, &shard), KVF_E_PARSE,
                 "shard: ");
    assert_int_equal(pieces, 0);
    kvf_model_free(model);
}

static void a_field_that_is_missing_is_named(void **state) {
    (void)state;
    const char *const fields[] = {
        "rank",        "tp_size",       "tokens_per_block", "kernel_blocks_per_block",
        "block_count", "tokens.index",  "tokens.count",     "tokens.width",
        "replica",     "replica_count", "pp_rank",          "pp_size"};
    for (size_t i = 0; i < COUNT_OF(fields); i++) {
        parcel p = good_parcel();
        p.skip = fields[i];
        char wanted[64];
        (void)snprintf(wanted, sizeof wanted, "%s is missing", fields[i]);
        assert_fails(try_parcel(p), KVF_E_PARSE, "shard: ", wanted);
    }
}

static void placements_that_are_not_of_the_held_layers_are_refused(void **state) {
    (void)state;
    parcel p = good_parcel();
    p.run[0] = 1;
    assert_fails(try_parcel(p), KVF_E_PARSE, "group full: part k: ", "for 1 layers", "holds 2");
    p.run[0] = 3;
    assert_fails(try_parcel(p), KVF_E_PARSE, "count is 3", "1 to 2");
    p = good_parcel();
    p.run_count = 3;
    assert_fails(try_parcel(p), KVF_E_PARSE, "placements has 3 elements");
    p.run_count = 2;
    assert_fails(try_parcel(p), KVF_E_PARSE, "count is 2");
    p.run[0] = 1; /* both runs have one layer, the same one, which is refused for another reason */
    assert_fails(try_parcel(p), KVF_E_OVERLAP, "shard: ");
    p.run[0] = 0;
    assert_fails(try_parcel(p), KVF_E_PARSE, "count is 0", "1 to 2");
    p = good_parcel();
    p.layers[1] = 4000000000;
    assert_fails(try_parcel(p), KVF_E_RANGE, "layers are [0, 4000000000)");
    p.layers[0] = 2;
    p.layers[1] = 1;
    assert_fails(try_parcel(p), KVF_E_PARSE, "layers is [2, 1)");
}

static void steps_that_leave_the_range_of_their_numbers_are_refused(void **state) {
    (void)state;
    parcel p = good_parcel();
    p.run[1] = 1; /* from region 1 down to region 0 */
    p.run[8] = -1;
    assert_ok(try_parcel(p));
    p = good_parcel();
    p.regions = 1;
    p.region_bytes = 192;
    p.run[8] = 0;
    p.run[9] = 96; /* both layers in one region, one after the other */
    assert_ok(try_parcel(p));
    p.run[2] = 96; /* from offset 96 down to offset 0 */
    p.run[9] = -96;
    assert_ok(try_parcel(p));
    p.run[9] = -97;
    assert_fails(try_parcel(p), KVF_E_PARSE, "offset 96 on", "steps of 0 and -97");
    p = good_parcel();
    p.run[8] = -1;
    assert_fails(try_parcel(p), KVF_E_PARSE, "steps of -1");
    p.run[8] = UINT32_MAX;
    assert_fails(try_parcel(p), KVF_E_RANGE, "region is 4294967295");
    p.run[8] = INT64_MIN;
    assert_fails(try_parcel(p), KVF_E_PARSE, "leave the range");
    p = good_parcel();
    p.run[9] = -8;
    assert_fails(try_parcel(p), KVF_E_PARSE, "steps of 1 and -8");
    p.run[2] = 8;
    p.region_bytes = 200;
    p.run[9] = INT64_MAX;
    assert_fails(try_parcel(p), KVF_E_RANGE, "9223372036854775911");
    p = good_parcel();
    p.huge = 9;
    assert_fails(try_parcel(p), KVF_E_PARSE, "region_step is 18446744073709551615");
    p.huge = 10;
    assert_fails(try_parcel(p), KVF_E_PARSE, "offset_step is 18446744073709551615");
    p = good_parcel(); /* two steps of 2^63, which are 2^64: none, if it were cut to 64 bits */
    p.model_layers = p.layers[1] = p.group_layers[1] = 3;
    p.run[0] = 3;
    p.run[8] = 0;
    p.run[9] = INT64_MIN;
    assert_fails(try_parcel(p), KVF_E_PARSE, "leave the range");
}

static void a_placement_outside_its_region_is_refused(void **state) {
    (void)state;
    parcel p = good_parcel();
    p.region_bytes = 95;
    assert_fails(try_parcel(p), KVF_E_RANGE, "layer 0, part k", "which has 95");
    p = good_parcel();
    p.regions = 1;
    assert_fails(try_parcel(p), KVF_E_RANGE, "region is 1");
}

static void cells_that_share_bytes_are_refused(void **state) {
    (void)state;
    parcel p = good_parcel();
    p.run[8] = 0;
    assert_fails(try_parcel(p), KVF_E_OVERLAP, "shard: ");
}

static void a_huge_number_of_regions_is_refused(void **state) {
    (void)state;
    parcel p = good_parcel();
    p.regions = UINT32_MAX;
    assert_fails(try_parcel(p), KVF_E_PARSE, "a run of regions is 4294967295", "262144");
    p.regions = 0;
    assert_fails(try_parcel(p), KVF_E_PARSE, "a run of regions is 0");
    p.regions = 2;
    p.region_numbers = 3;
    assert_fails(try_parcel(p), KVF_E_PARSE, "a run of regions has 3 elements; allowed: 2 to 2");
    p.region_numbers = 1;
    assert_fails(try_parcel(p), KVF_E_PARSE, "a run of regions has 1 elements");
    p.region_numbers = 2;
    p.region_bytes_are_text = true;
    assert_fails(try_parcel(p), KVF_E_PARSE, "the bytes of a region is a text; it must be a number");
    p.region_bytes_are_text = false;
    p.regions = 262144;
    assert_ok(try_parcel(p));
    p.regions = 131072;
    p.region_runs = 2;
    assert_ok(try_parcel(p));
    p.regions++;
    assert_fails(try_parcel(p), KVF_E_PARSE, "regions has 262146 elements", "0 to 262144");
}

/* The shard has one layer, in the first of many regions. */
static void a_shard_with_more_regions_than_are_read_is_not_sent(void **state) {
    (void)state;
    enum { MOST = 262144 };
    kvf_model *model = latent(1);
    uint64_t *region_bytes = calloc(MOST + 1, sizeof *region_bytes);
    assert_non_null(region_bytes);
    region_bytes[0] = 1000;
    kvf_placement placement = PLACED(0, 0, 32, 8, 8);
    kvf_part_share share = {.units = {0, 1}};
    kvf_group_shard_desc group = {
        .tokens_per_block = 4, .block_count = 5, .parts = &share, .placements = &placement};
    kvf_shard_desc desc = {.struct_size = sizeof desc,
                           .layers = {0, 1},
                           .region_bytes = region_bytes,
                           .region_count = MOST,
                           .groups = &group};
    kvf_shard *shard = NULL, *read = NULL;
    assert_ok(kvf_shard_create(model, &desc, &shard));
    kvf_wire_buffer encoded = encoded_shard(shard);
    assert_ok(kvf_wire_decode_shard(model, NULL, (kvf_bytes){encoded.data, encoded.size}, NULL, &read));
    assert_same_shard(shard, read);
    kvf_wire_buffer_free(&encoded);
    kvf_shard_free(read);
    kvf_shard_free(shard);
    desc.region_count++;
    assert_ok(kvf_shard_create(model, &desc, &shard));
    assert_fails(kvf_wire_encode_shard(shard, NULL, &encoded), KVF_E_RANGE, "shard: region_count is 262145",
                 "up to 262144");
    kvf_shard_free(shard);
    free(region_bytes);
    kvf_model_free(model);
}

/* A peer says how many layers and parts its model has, and a run of ten numbers stands for as many placements. */
static void a_shard_with_a_huge_number_of_placements_is_neither_read_nor_sent(void **state) {
    (void)state;
    enum { PARTS = 64, LAYERS = 4097 };
    static uint32_t all[LAYERS];
    static char names[PARTS][8];
    kvf_part_desc parts[PARTS];
    memory_count memory;
    for (uint32_t i = 0; i < LAYERS; i++)
        all[i] = i;
    for (uint32_t i = 0; i < PARTS; i++) {
        (void)snprintf(names[i], sizeof names[i], "p%u", i);
        parts[i] = PART(.name = names[i], .units = 2, .cell_elements = 4);
    }
    const kvf_group_desc group = {
        .name = "full", .parts = parts, .part_count = PARTS, .layers = all, .layer_count = LAYERS};
    kvf_model *model = model_of(LAYERS, &group, 1);
    parcel p = good_parcel();
    p.layers[1] = p.group_layers[1] = LAYERS;
    p.run[0] = LAYERS;
    p.run[8] = 0;
    p.parts = PARTS;
    msgpack_sbuffer buffer;
    msgpack_sbuffer_init(&buffer);
    msgpack_packer packer;
    msgpack_packer_init(&packer, &buffer, msgpack_sbuffer_write);
    pack_parcel(&packer, &p);
    kvf_shard *shard = NULL;
    count_memory(&memory);
    assert_fails(kvf_wire_decode_shard(model, NULL, (kvf_bytes){buffer.data, buffer.size}, NULL, &shard),
                 KVF_E_PARSE, "group full: placements has 262208 elements", "0 to 262144");
    assert_in_range(memory.largest, 0, 1 << 16);
    assert_ok(kvf_set_allocator(NULL));
    kvf_engine *engine = engine_of(model, ENGINE(.name = "P", .all = {.block_count = 1, .order = "LPBHN"}));
    kvf_wire_buffer encoded;
    assert_fails(kvf_wire_encode_shard(kvf_engine_shard(engine, 0), NULL, &encoded), KVF_E_RANGE,
                 "shard: it has 262208 placements", "up to 262144");
    kvf_engine_free(engine);
    msgpack_sbuffer_destroy(&buffer);
    kvf_model_free(model);
}

static void held_layers_are_of_the_group(void **state) {
    (void)state;
    parcel p = good_parcel();
    p.layer_numbers = 3;
    assert_fails(try_parcel(p), KVF_E_PARSE, "layers has 3 elements; allowed: 2 to 2");
    p.layer_numbers = 1;
    assert_fails(try_parcel(p), KVF_E_PARSE, "layers has 1 elements");
    p.layer_numbers = 2;
    p.group_layers[1] = 3;
    assert_fails(try_parcel(p), KVF_E_PARSE, "the end of layers is 3", "0 to 2");
    p.group_layers[0] = 3;
    assert_fails(try_parcel(p), KVF_E_PARSE, "the first of layers is 3", "0 to 2");
    p.group_layers[0] = 2;
    p.group_layers[1] = 1;
    assert_fails(try_parcel(p), KVF_E_PARSE, "the end of layers is 1", "2 to 2");
    p = good_parcel(); /* no layer at all */
    p.layers[0] = p.group_layers[0] = 2;
    p.run_count = 0;
    assert_ok(try_parcel(p));
    p.region_runs = 0; /* and no memory */
    assert_ok(try_parcel(p));
}

static void a_type_is_said_by_its_name(void **state) {
    (void)state;
    parcel p = good_parcel();
    p.dtype = "bf16"; /* the model's own type: nothing is converted */
    assert_ok(try_parcel(p));
    p.dtype = "f16";
    assert_fails(try_parcel(p), KVF_E_UNSUPPORTED, "part k: dtype is f16, but bf16 in the receiver's model");
    const char *const unknown[] = {
        "", "f6", "bf16 ", "a type of 15 by", "a type of 16 byt", "a type of 17 byte"};
    for (size_t i = 0; i < COUNT_OF(unknown); i++) {
        p.dtype = unknown[i];
        assert_fails(try_parcel(p), KVF_E_PARSE, "part k: dtype is unknown");
    }
    p.dtype = "bf16";
    p.dtype_is_bin = true;
    assert_fails(try_parcel(p), KVF_E_PARSE, "part k: dtype is unknown");
}

static void ranks_are_below_the_most_that_there_are(void **state) {
    (void)state;
    parcel p = good_parcel();
    p.rank = 65535;
    assert_ok(try_parcel(p));
    p.rank = 65536;
    assert_fails(try_parcel(p), KVF_E_PARSE, "rank is 65536", "0 to 65535");
}

static void other_numbers_of_groups_and_parts_are_refused(void **state) {
    (void)state;
    parcel p = good_parcel();
    p.group_count = 2;
    assert_fails(try_parcel(p), KVF_E_PARSE, "groups has 2 elements", "1 to 1");
    p = good_parcel();
    p.parts = 2;
    assert_fails(try_parcel(p), KVF_E_PARSE, "group full", "parts has 2 elements", "1 to 1");
}

static kvf_status decode_again(void *subject) {
    const kvf_shard *shard = subject;
    kvf_wire_buffer encoded = {0};
    kvf_shard *read = NULL;
    kvf_status status = kvf_wire_encode_shard(shard, NULL, &encoded);
    if (!status)
        status = kvf_wire_decode_shard(kvf_shard_model(shard), NULL, (kvf_bytes){encoded.data, encoded.size},
                                       NULL, &read);
    kvf_shard_free(read);
    kvf_wire_buffer_free(&encoded);
    return status;
}

static void nothing_leaks_where_memory_ends(void **state) {
    (void)state;
    memory_count memory;
    count_memory(&memory);
    kvf_model *const models[] = {hybrid(2), with_64_groups()};
    for (size_t i = 0; i < COUNT_OF(models); i++) {
        kvf_engine *engine = engine_of(models[i], ENGINE(.all = {.block_count = 3}));
        survive_every_refusal(&memory, decode_again, (void *)kvf_engine_shard(engine, 0));
        kvf_engine_free(engine);
        kvf_model_free(models[i]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards_of_every_model_and_many_shapes_read_as_they_were_written),
        cmocka_unit_test(a_shard_of_many_groups_reads_as_it_was_written),
        cmocka_unit_test(a_shard_without_regularity_reads_as_it_was_written),
        cmocka_unit_test(layers_that_differ_in_one_stride_read_as_they_were_written),
        cmocka_unit_test(layers_as_far_apart_as_can_be_read_as_they_were_written),
        cmocka_unit_test(other_types_are_read_where_they_may_be_converted),
        cmocka_unit_test(a_shard_that_holds_no_layer_of_a_group_reads_as_it_was_written),
        cmocka_unit_test(a_shard_of_entries_of_several_tokens_reads_as_it_was_written),
        cmocka_unit_test(a_regular_shard_is_as_small_with_many_layers_as_with_few),
        cmocka_unit_test(a_rank_of_a_large_model_fits_in_a_kilobyte),
        cmocka_unit_test(a_shard_written_by_another_hand_is_read),
        cmocka_unit_test(the_pieces_that_were_compared_are_counted),
        cmocka_unit_test(a_field_that_is_missing_is_named),
        cmocka_unit_test(placements_that_are_not_of_the_held_layers_are_refused),
        cmocka_unit_test(steps_that_leave_the_range_of_their_numbers_are_refused),
        cmocka_unit_test(a_placement_outside_its_region_is_refused),
        cmocka_unit_test(cells_that_share_bytes_are_refused),
        cmocka_unit_test(a_huge_number_of_regions_is_refused),
        cmocka_unit_test(a_shard_with_more_regions_than_are_read_is_not_sent),
        cmocka_unit_test(a_shard_with_a_huge_number_of_placements_is_neither_read_nor_sent),
        cmocka_unit_test(held_layers_are_of_the_group),
        cmocka_unit_test(a_type_is_said_by_its_name),
        cmocka_unit_test(ranks_are_below_the_most_that_there_are),
        cmocka_unit_test(other_numbers_of_groups_and_parts_are_refused),
        cmocka_unit_test_teardown(nothing_leaks_where_memory_ends, stop_counting_memory),
    };
    return cmocka_run_group_tests_name("wire_shard", tests, NULL, NULL);
}
