#include "verify.h"

#include <stdio.h>
#include <string.h>

#include "element.h"
#include "pattern.h"
#include "text.h"

enum { SCAN_BYTES = 16 << 20 };

typedef struct verification {
    live_rank *of;
    verdict *out;
    uint64_t wanted_bytes; /* about, for progress */
} verification;

/* ---- cells ----------------------------------------------------------------------------------- */

/* An element of up to 8 bytes as hexadecimal digits, the most significant first. */
static text element_text(const uint8_t *cell, uint32_t element, uint32_t bits) {
    if (bits < 8)
        return text_format("0x%x",
                           ((unsigned)cell[element * bits / 8] >> element * bits % 8) & ((1u << bits) - 1));
    uint64_t value = 0;
    for (uint32_t i = bits / 8; i-- > 0;)
        value = value << 8 | cell[(size_t)element * bits / 8 + i];
    return text_format("0x%0*llx", (int)bits / 4, (unsigned long long)value);
}

/* The bits of an element as it was sent; its type has whole bytes. */
static uint32_t sent_element(const logical_cell *at, uint32_t element) {
    const uint32_t bytes = kvf_dtype_bits(at->sent) / 8;
    uint32_t bits = 0;
    for (uint32_t i = bytes; i-- > 0;)
        bits = bits << 8 | pattern_byte(at->key, (size_t)element * bytes + i);
    return bits;
}

/* The expected value of byte `offset` of a cell. */
static uint8_t expected_byte(const logical_cell *at, size_t offset) {
    if (at->dtype == at->sent)
        return pattern_byte(at->key, offset);
    const uint32_t bytes = kvf_dtype_bits(at->dtype) / 8;
    const uint32_t element = (uint32_t)(offset / bytes);
    return (uint8_t)(element_as(at->sent, sent_element(at, element), at->dtype) >> offset % bytes * 8);
}

static bool is_right(const logical_cell *at) {
    if (at->dtype == at->sent)
        return pattern_matches(at->address, at->bytes, at->key);
    const uint32_t bytes = kvf_dtype_bits(at->dtype) / 8;
    for (uint32_t element = 0; element < at->bytes / bytes; element++) {
        const uint32_t expected = element_as(at->sent, sent_element(at, element), at->dtype);
        if (memcmp(at->address + (size_t)element * bytes, &expected, bytes) != 0)
            return false;
    }
    return true;
}

static void describe_wrong_cell(const verification *v, const logical_cell *at) {
    const kvf_group_desc *group = kvf_model_group(kvf_shard_model(v->of->shard), at->group);
    const kvf_part_desc *part = &group->parts[at->part];
    uint32_t bits = kvf_dtype_bits(part->dtype);
    size_t wrong = 0;
    while (at->address[wrong] == expected_byte(at, wrong))
        wrong++;
    uint32_t element = (uint32_t)(wrong * 8 / bits);
    if (bits < 8 && ((at->address[wrong] ^ expected_byte(at, wrong)) & ((1u << bits) - 1)) == 0)
        element++; /* the low half is right */
    uint8_t expected[8] = {0}, found[8] = {0};
    size_t first = (size_t)element * bits / 8;
    for (size_t i = 0; i < (bits + 7) / 8; i++) {
        expected[i] = expected_byte(at, first + i);
        found[i] = at->address[first + i];
    }
    uint32_t in_byte = bits < 8 ? element % (8 / bits) : 0;
    const char *row = group->kind == KVF_GROUP_STATE ? "row" : group->tokens_per_step > 1 ? "entry" : "token";
    (void)snprintf(
        v->out->text, sizeof v->out->text,
        "decode rank %u: request %u, layer %u, part %s, %s %llu, %s %u, element %u: expected %s, found "
        "%s",
        v->of->seat->rank, at->request, at->layer, part->name, row,
        (unsigned long long)(at->row / (group->kind == KVF_GROUP_STATE ? 1 : part->rows_per_step)),
        unit_word(group, part), at->unit, element, element_text(expected, in_byte, bits).text,
        element_text(found, in_byte, bits).text);
    const uint64_t order[] = {at->request, at->layer, at->group, at->part, at->row, at->unit};
    memcpy(v->out->order, order, sizeof order);
    v->out->wrong = true;
}

static bool check_cell(void *context, const logical_cell *at) {
    verification *v = context;
    if (!is_right(at)) {
        describe_wrong_cell(v, at);
        return false;
    }
    memset(at->address, PATTERN_UNUSED_DECODE, at->bytes);
    v->out->bytes += at->bytes;
    if ((v->out->bytes & 0xfffff) < at->bytes)
        rank_progress(v->of, v->out->bytes, v->wanted_bytes);
    return true;
}

/* ---- memory outside the requests ------------------------------------------------------------- */

/* Finds the cell of one layer and part that has the byte, by trying all blocks. */
static bool find_in_part(const live_rank *of, uint32_t group, uint32_t layer, uint32_t part, uint64_t offset,
                         logical_cell *out, uint64_t *block) {
    const kvf_part_desc *desc = &kvf_model_group(kvf_shard_model(of->shard), group)->parts[part];
    const kvf_group_shard_desc *held = &kvf_shard_get(of->shard)->groups[group];
    const kvf_placement *at = kvf_shard_placement(of->shard, group, layer, part);
    kvf_range units = held->parts[part].units;
    uint64_t rows =
        (uint64_t)steps_in_block(of->shard, group) / held->kernel_blocks_per_block * desc->rows_per_step;
    uint64_t blocks = held->block_count * held->kernel_blocks_per_block;
    for (*block = 0; *block < blocks; ++*block)
        for (out->row = 0; out->row < rows; out->row++)
            for (out->unit = units.begin; out->unit < units.end; out->unit++) {
                uint64_t first = at->offset + *block * at->block_stride + out->row * at->row_stride +
                                 (out->unit - units.begin) * at->unit_stride;
                if (cell_has(at, kvf_part_cell_bytes(desc), first, offset))
                    return true;
            }
    return false;
}

/* Names the cell that has a byte. Slow, but called at most once, for the error message. */
static bool name_cell(const live_rank *of, uint32_t region, uint64_t offset, char *out, size_t bytes) {
    const kvf_model *model = kvf_shard_model(of->shard);
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        kvf_range layers = kvf_shard_group_layers(of->shard, g);
        for (uint32_t layer = layers.begin; layer < layers.end; layer++)
            for (uint32_t p = 0; p < group->part_count; p++) {
                logical_cell at = {0};
                uint64_t block;
                if (kvf_shard_placement(of->shard, g, layer, p)->region != region ||
                    !find_in_part(of, g, layer, p, offset, &at, &block))
                    continue;
                (void)snprintf(out, bytes, "group %s, layer %u, part %s, kernel block %llu, row %llu, %s %u",
                               group->name, group->layers[layer], group->parts[p].name,
                               (unsigned long long)block, (unsigned long long)at.row,
                               unit_word(group, &group->parts[p]), at.unit);
                return true;
            }
    }
    return false;
}

static void describe_touched(const verification *v, uint32_t region, uint64_t offset) {
    char where[200];
    if (!name_cell(v->of, region, offset, where, sizeof where))
        (void)snprintf(where, sizeof where, "between the cells");
    (void)snprintf(
        v->out->text, sizeof v->out->text,
        "decode rank %u: region %u, byte %llu (%s) belongs to no request but was written: expected "
        "0x%02x, found 0x%02x",
        v->of->seat->rank, region, (unsigned long long)offset, where, PATTERN_UNUSED_DECODE,
        v->of->regions[region][offset]);
    memset(v->out->order, 0xff, sizeof v->out->order);
    v->out->wrong = true;
}

/* Call it after check_cell() has put back all cells: the whole memory must then be as it was. */
static void check_untouched(const verification *v) {
    const kvf_shard_desc *shard = kvf_shard_get(v->of->shard);
    for (uint32_t region = 0; region < shard->region_count; region++) {
        uint64_t bytes = shard->region_bytes[region];
        for (uint64_t at = 0; at < bytes; at += SCAN_BYTES) {
            uint64_t length = bytes - at < SCAN_BYTES ? bytes - at : SCAN_BYTES;
            uint64_t other = pattern_first_other(v->of->regions[region] + at, length, PATTERN_UNUSED_DECODE);
            if (other < length) {
                describe_touched(v, region, at + other);
                return;
            }
            rank_progress(v->of, v->wanted_bytes, v->wanted_bytes);
        }
    }
    v->out->untouched_bytes = v->of->total_bytes - v->out->bytes;
}

void verify_memory(live_rank *of, verdict *out) {
    *out = (verdict){0};
    verification v = {of, out, of->total_bytes};
    const workload *work = &of->job->work;
    cell_memory memory = rank_memory(of);
    for (uint32_t r = 0; r < work->request_count && !out->wrong; r++)
        (void)cells_visit(&memory, CELLS_OF_DECODE, r, workload_request(work, r), check_cell, &v);
    if (!out->wrong)
        check_untouched(&v);
}
