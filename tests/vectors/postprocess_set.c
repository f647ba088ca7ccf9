/*
 * postprocess.json: converting received blocks into the wanted form, and copying blocks.
 *
 * One recorded element is one number; here it is an int32_t.
 */
#include <stdio.h>
#include <string.h>

#include <kvferry/connector/postprocess.h>

#include "on_device.h"
#include "vectors.h"

/* ---- numbers and refusals -------------------------------------------------------------------- */

typedef struct elements {
    int32_t *at;
    size_t count;
} elements;

static elements read_elements(vector_case *c, json_object *array) {
    elements list = {.count = read_length(c, array)};
    list.at = read_i32s(c, array, list.count);
    return list;
}

static json_object *json_elements(const elements *list) {
    json_object *array = json_object_new_array();
    for (size_t i = 0; i < list->count; i++)
        json_object_array_add(array, json_object_new_int(list->at[i]));
    return array;
}

typedef struct blocks {
    uint32_t *at;
    size_t count;
} blocks;

static blocks read_blocks(vector_case *c, json_object *array) {
    blocks list = {.count = read_length(c, array)};
    list.at = case_memory(c, list.count, sizeof *list.at);
    for (size_t i = 0; i < list.count; i++) {
        int64_t id = json_object_get_int64(json_object_array_get_idx(array, i));
        /* An invalid id becomes one that no region has. */
        list.at[i] = id >= 0 && id < UINT32_MAX ? (uint32_t)id : UINT32_MAX;
    }
    return list;
}

static answer refused(kvf_status status) {
    answer a = {.refusal = kvf_status_name(status)};
    if (status == KVF_E_NOT_EXPRESSIBLE)
        a.refusal = "block_size_not_divisible";
    if (status == KVF_E_RANGE)
        a.refusal = "block_out_of_range";
    if (status == KVF_E_NOT_FOUND)
        a.refusal = "missing_layer";
    snprintf(a.detail, sizeof a.detail, "%s", kvf_error_detail());
    return a;
}

/* A received page is 1/ratio of a block, which must be a whole number of tokens. */
static bool ratio_divides(vector_case *c, uint64_t *received_tokens) {
    uint64_t tokens = read_u64(c, c->in, "tokens"), ratio = read_u32_or(c, c->in, "ratio", 1);
    *received_tokens = ratio ? tokens / ratio : 0;
    return ratio && tokens % ratio == 0;
}

static answer not_divisible(void) {
    return (answer){.refusal = "block_size_not_divisible",
                    .detail = "a received page does not hold whole tokens"};
}

static kvf_received_shape read_shape(vector_case *c, kvf_page_form received, kvf_page_order wanted) {
    return (kvf_received_shape){.struct_size = sizeof(kvf_received_shape),
                                .heads = read_u64(c, c->in, "heads"),
                                .cell_bytes = read_u64(c, c->in, "elems") * sizeof(int32_t),
                                .received = received,
                                .wanted = {wanted, read_u64(c, c->in, "tokens")}};
}

static kvf_block_region region_of(vector_case *c, const kvf_received_shape *shape, const elements *memory) {
    uint64_t block_bytes = shape->heads * shape->wanted.tokens * shape->cell_bytes;
    return (kvf_block_region){.base = memory->at,
                              .bytes = memory->count * sizeof *memory->at,
                              .block_count = read_u64(c, c->in, "num_blocks"),
                              .block_stride_bytes = block_bytes,
                              .part_bytes = block_bytes};
}

/* ---- conversions ----------------------------------------------------------------------------- */

static answer convert(vector_case *c, kvf_page_order wanted) {
    uint64_t received_tokens;
    if (!ratio_divides(c, &received_tokens))
        return not_divisible();
    kvf_received_shape shape = read_shape(c, (kvf_page_form){KVF_PAGE_HND, received_tokens}, wanted);
    elements memory = read_elements(c, read_field(c, c->in, "before"));
    blocks ids = read_blocks(c, read_field(c, c->in, "block_ids"));
    kvf_block_region region = region_of(c, &shape, &memory);
    region_to_device(&region);
    kvf_status status = kvf_permute_received(&shape, &region, 1, ids.at, ids.count, NULL);
    region_from_device(&region, memory.at);
    if (status)
        return refused(status);
    return answer_with(with(json_object_new_object(), "after", json_elements(&memory)));
}

static answer convert_blksize(vector_case *c) {
    return convert(c, KVF_PAGE_HND);
}

/* Also converts both at once: without a ratio, only the layout changes. */
static answer convert_layout(vector_case *c) {
    return convert(c, KVF_PAGE_NHD);
}

/* ---- the receive step ------------------------------------------------------------------------ */

/* The requests of one group; `covered_sub_blocks` counts received pages. */
static size_t read_requests(vector_case *c, uint64_t group, uint64_t page_tokens, kvf_received_request *out) {
    json_object *list = read_field(c, c->in, "requests");
    size_t count = read_length(c, list), used = 0;
    for (size_t i = 0; i < count; i++) {
        json_object *request = json_object_array_get_idx(list, i);
        if (read_u64(c, request, "group") != group)
            continue;
        blocks ids = read_blocks(c, read_field(c, request, "block_ids"));
        out[used++] = (kvf_received_request){ids.at, ids.count,
                                             read_u64(c, request, "covered_sub_blocks") * page_tokens};
    }
    return used;
}

static answer receive_step(vector_case *c) {
    uint64_t page_tokens;
    if (!ratio_divides(c, &page_tokens))
        return not_divisible();
    kvf_page_order order = strcmp(read_text(c, c->in, "memory_order"), "NHD") ? KVF_PAGE_HND : KVF_PAGE_NHD;
    /* Without conversion the blocks arrive in the wanted form. */
    kvf_page_form received = {order, read_u64(c, c->in, "tokens")};
    if (read_bool(c, c->in, "convert"))
        received = (kvf_page_form){read_bool(c, c->in, "permute") ? KVF_PAGE_HND : order, page_tokens};
    kvf_received_shape shape = read_shape(c, received, order);
    json_object *groups = read_field(c, c->in, "before_per_group"), *after = json_object_new_array();
    kvf_received_request *requests =
        case_memory(c, read_length(c, read_field(c, c->in, "requests")), sizeof *requests);
    for (size_t g = 0; g < read_length(c, groups); g++) {
        elements memory = read_elements(c, json_object_array_get_idx(groups, g));
        kvf_block_region region = region_of(c, &shape, &memory);
        size_t count = read_requests(c, g, page_tokens, requests);
        region_to_device(&region);
        kvf_status status = kvf_finish_received(&shape, &region, 1, requests, count, NULL);
        region_from_device(&region, memory.at);
        if (status) {
            json_object_put(after);
            return refused(status);
        }
        json_object_array_add(after, json_elements(&memory));
    }
    return answer_with(with(json_object_new_object(), "after_per_group", after));
}

/* ---- copying --------------------------------------------------------------------------------- */

/* A tensor: the axes before the block index are parts of a block, the axes after it are the bytes of a part. */
static kvf_block_region read_region(vector_case *c, const char *shape_name) {
    kvf_ids shape = read_ids(c, read_field(c, c->in, shape_name));
    uint64_t dim = read_u64(c, c->in, "block_dim"), parts = 1, count = 0, bytes = sizeof(int32_t);
    for (size_t i = 0; i < shape.count; i++) {
        if (i < dim)
            parts *= shape.at[i];
        else if (i == dim)
            count = shape.at[i];
        else
            bytes *= shape.at[i];
    }
    return (kvf_block_region){.block_count = count,
                              .block_stride_bytes = bytes,
                              .part_count = parts,
                              .part_stride_bytes = count * bytes,
                              .part_bytes = bytes};
}

typedef struct layers {
    kvf_block_region *regions;
    elements *memory;
    size_t count;
} layers;

static layers read_layers(vector_case *c, const char *name, const char *shape_name) {
    kvf_block_region region = read_region(c, shape_name);
    json_object *object = read_field(c, c->in, name);
    size_t count = (size_t)json_object_object_length(object);
    layers list = {case_memory(c, count, sizeof region), case_memory(c, count, sizeof(elements)), 0};
    json_object_object_foreach(object, layer, values) {
        elements memory = read_elements(c, values);
        region.layer = layer;
        region.base = memory.at;
        region.bytes = memory.count * sizeof *memory.at;
        list.regions[list.count] = region;
        list.memory[list.count++] = memory;
    }
    return list;
}

/* Both directions are the same copy; on a device, the side that need not be the host is there. */
static answer copy_blocks(vector_case *c) {
    layers source = read_layers(c, "src", "src_shape"), destination = read_layers(c, "dst", "dst_shape");
    blocks from = read_blocks(c, read_field(c, c->in, "src_block_ids"));
    blocks to = read_blocks(c, read_field(c, c->in, "dst_block_ids"));
    kvf_copy_direction direction =
        strcmp(read_text(c, c->in, "direction"), "h2d") == 0 ? KVF_COPY_H2D : KVF_COPY_D2H;
    layers *there = direction == KVF_COPY_H2D ? &destination : &source;
    for (size_t i = 0; i < there->count; i++)
        region_to_device(&there->regions[i]);
    kvf_status status = kvf_copy_blocks(source.regions, source.count, destination.regions, destination.count,
                                        from.at, from.count, to.at, to.count, direction, NULL);
    for (size_t i = 0; i < there->count; i++)
        region_from_device(&there->regions[i], there->memory[i].at);
    if (status)
        return refused(status);
    json_object *after = json_object_new_object();
    for (size_t i = 0; i < destination.count; i++)
        with(after, destination.regions[i].layer, json_elements(&destination.memory[i]));
    return answer_with(with(json_object_new_object(), "dst", after));
}

/* Suspects here were refused although there is a sensible answer, which is the recorded one. */
const vector_op postprocess_ops[] = {
    {"convert_blksize", convert_blksize, true},
    {"convert_layout", convert_layout, true},
    {"convert_blksize_and_layout", convert_layout, true},
    {"receive_step", receive_step, true},
    {"copy_blocks", copy_blocks, true},
    {NULL, NULL, false},
};
