/*
 * The shape of Gemma 4: sliding layers with many small heads, full layers with few large ones, in pages of one size
 * that both share. So a page of one group holds another number of tokens than a page of the other group, and both
 * numbers change with the number of ranks: in the same request some pages hold several of the other side's pages, and
 * some hold a part of one.
 *
 * Every pair of tensor-parallel sizes, both ways, is moved for real and compared byte by byte. The test works out where
 * each cell must be from the meaning of the orders; it asks the library for none of it.
 */
#include "shapes.h"

enum {
    GROUPS = 2,
    SWA = 0,
    FULL = 1,
    LAYERS = 3, /* 0 and 2 slide, 1 is full */
    MOST_RANKS = 8,
    MOST_REGIONS = 3,
    MOST_BLOCKS = 256,
};

static const uint32_t layer_numbers[GROUPS][2] = {{0, 2}, {1}};
static const uint32_t layer_counts[GROUPS] = {2, 1};

/* One side of a case. */
typedef struct side {
    uint32_t tp;
    uint32_t tokens[GROUPS]; /* of a block */
    bool head_first;         /* HND, otherwise NHD */
    bool shared;             /* both groups in the same buffers, in pages of one size */
} side;

/* A model and two engines. */
typedef struct world {
    uint32_t heads[GROUPS], cell[GROUPS]; /* heads of the model; bytes of a cell */
    uint32_t window;                      /* the window of the sliding group; 0: none */
    side sides[2];
    kvf_model *model;
    kvf_engine *engines[2];
} world;

enum { LOCAL = 0, REMOTE = 1 };

/* ---- what must be where ---------------------------------------------------------------------- */

static kvf_range heads_of(uint32_t heads, uint32_t tp, uint32_t rank) {
    if (tp > heads)
        return (kvf_range){rank * heads / tp, rank * heads / tp + 1};
    return (kvf_range){rank * heads / tp, (rank + 1) * heads / tp};
}

static uint32_t head_count(const world *w, uint32_t s, uint32_t group, uint32_t rank) {
    kvf_range heads = heads_of(w->heads[group], w->sides[s].tp, rank);
    return heads.end - heads.begin;
}

static uint64_t content_bytes(const world *w, uint32_t s, uint32_t group, uint32_t rank) {
    return (uint64_t)2 * w->sides[s].tokens[group] * head_count(w, s, group, rank) * w->cell[group];
}

/* If groups share pages, their content has the same size on every rank: the cases are chosen so. */
static uint64_t page_bytes(const world *w, uint32_t s, uint32_t group, uint32_t rank) {
    return content_bytes(w, s, group, rank);
}

typedef struct place {
    uint32_t region;
    uint64_t offset;
} place;

/* A cell: `layer` is an index into the group's layers, `head` into the model's heads. */
typedef struct cell {
    uint32_t group, layer, part, head, token;
} cell;

/* The place of a cell in block `id`. */
static place place_of(const world *w, uint32_t s, uint32_t rank, const cell *c, uint32_t id) {
    const side *of = &w->sides[s];
    uint64_t heads = head_count(w, s, c->group, rank), tokens = of->tokens[c->group];
    uint64_t head = c->head - heads_of(w->heads[c->group], of->tp, rank).begin, token = c->token % tokens;
    uint64_t in_part = of->head_first ? head * tokens + token : token * heads + head;
    uint32_t first_region = of->shared || c->group == 0 ? 0 : layer_counts[0];
    return (place){first_region + c->layer, id * page_bytes(w, s, c->group, rank) +
                                                (c->part * heads * tokens + in_part) * w->cell[c->group]};
}

static unsigned char byte_of(const cell *c, uint32_t byte) {
    uint64_t mixed = ((((uint64_t)c->group * 7 + c->layer) * 5 + c->part) * 31 + c->head) * 4099 + c->token;
    mixed = (mixed * 64 + byte + 1) * 0x9e3779b97f4a7c15u;
    return (unsigned char)(mixed >> 32);
}

/* ---- one request ----------------------------------------------------------------------------- */

typedef struct memory {
    unsigned char *regions[MOST_REGIONS];
    uint64_t bytes[MOST_REGIONS];
    uint32_t count;
} memory;

typedef struct move {
    uint32_t end, hit; /* tokens of the prompt; tokens that the local side has already */
    uint32_t ids[2][GROUPS][MOST_BLOCKS];
    uint32_t counts[2][GROUPS], firsts[2][GROUPS]; /* the size and the first block of each table */
} move;

static uint32_t first_wanted(const world *w, const move *q, uint32_t group) {
    uint32_t window = group == SWA ? w->window : 0;
    uint32_t seen = window && q->end > window ? q->end - window : 0;
    return seen > q->hit ? seen : q->hit;
}

/* Gives the blocks scattered ids, which are never the same in two groups. */
static void number_blocks(const world *w, move *q, uint32_t s) {
    for (uint32_t g = 0; g < GROUPS; g++) {
        uint32_t tokens = w->sides[s].tokens[g];
        uint32_t first = s == LOCAL ? q->hit / tokens : 0, end = (q->end + tokens - 1) / tokens;
        q->firsts[s][g] = first;
        q->counts[s][g] = end > first ? end - first : 0;
        assert_in_range(q->counts[s][g], 0, MOST_BLOCKS / 2 - 1);
        for (uint32_t i = 0; i < q->counts[s][g]; i++)
            q->ids[s][g][i] = (i * 37 + 11 + s * 5) % (MOST_BLOCKS / 2) * 2 + g;
    }
}

static memory take_memory(const kvf_shard *shard, unsigned char seed) {
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    memory m = {.count = desc->region_count};
    assert_in_range(m.count, 1, MOST_REGIONS);
    for (uint32_t r = 0; r < m.count; r++) {
        m.bytes[r] = desc->region_bytes[r];
        m.regions[r] = malloc(m.bytes[r]);
        assert_non_null(m.regions[r]);
        memset(m.regions[r], (unsigned char)(seed + r), m.bytes[r]);
    }
    return m;
}

static void free_memory(memory *m) {
    for (uint32_t r = 0; r < m->count; r++)
        free(m->regions[r]);
}

/* Writes the cells of the wanted tokens on one rank of a side. */
static void write_cells(const world *w, const move *q, uint32_t s, uint32_t rank, memory *m) {
    for (uint32_t g = 0; g < GROUPS; g++) {
        kvf_range heads = heads_of(w->heads[g], w->sides[s].tp, rank);
        uint32_t first = s == LOCAL ? first_wanted(w, q, g) : 0;
        for (cell c = {.group = g}; c.layer < layer_counts[g]; c.layer++)
            for (c.part = 0; c.part < 2; c.part++)
                for (c.head = heads.begin; c.head < heads.end; c.head++)
                    for (c.token = first; c.token < q->end; c.token++) {
                        uint32_t block = c.token / w->sides[s].tokens[g] - q->firsts[s][g];
                        place at = place_of(w, s, rank, &c, q->ids[s][g][block]);
                        assert_true(at.offset + w->cell[g] <= m->bytes[at.region]);
                        for (uint32_t i = 0; i < w->cell[g]; i++)
                            m->regions[at.region][at.offset + i] = byte_of(&c, i);
                    }
    }
}

static void copy_runs(const kvf_plan *plan, const kvf_request *request, const memory *remote, memory *local) {
    for (uint32_t source = 0; source < kvf_plan_source_count(plan); source++) {
        const memory *from = &remote[kvf_plan_source_rank(plan, source)];
        kvf_run runs[64];
        kvf_run_cursor cursor;
        kvf_run_cursor_start(&cursor, request, source);
        for (size_t n; (n = kvf_run_cursor_next(&cursor, runs, COUNT_OF(runs))) > 0;)
            for (size_t i = 0; i < n; i++) {
                const kvf_run *run = &runs[i];
                assert_true(run->local_region < local->count && run->remote_region < from->count);
                assert_true(run->local_offset + run->bytes <= local->bytes[run->local_region]);
                assert_true(run->remote_offset + run->bytes <= from->bytes[run->remote_region]);
                memcpy(local->regions[run->local_region] + run->local_offset,
                       from->regions[run->remote_region] + run->remote_offset, run->bytes);
            }
    }
}

static void move_to_rank(const world *w, const move *q, uint32_t rank, const memory *remote) {
    const kvf_shard *shard = kvf_engine_shard(w->engines[LOCAL], rank);
    memory local = take_memory(shard, 0xa0), expected = take_memory(shard, 0xa0);
    write_cells(w, q, LOCAL, rank, &expected);

    kvf_plan *plan = NULL;
    assert_ok(kvf_plan_build(shard, w->engines[REMOTE], NULL, &plan));
    assert_ok(kvf_plan_verify(plan));
    kvf_request *request = request_of(plan);
    kvf_group_request groups[GROUPS];
    for (uint32_t g = 0; g < GROUPS; g++)
        groups[g] = (kvf_group_request){
            .local = {q->ids[LOCAL][g], q->counts[LOCAL][g], q->firsts[LOCAL][g]},
            .remote = {q->ids[REMOTE][g], q->counts[REMOTE][g], q->firsts[REMOTE][g]},
            .begin = q->hit,
            .end = q->end,
        };
    assert_ok(kvf_request_set(request, groups, GROUPS));
    copy_runs(plan, request, remote, &local);
    for (uint32_t r = 0; r < local.count; r++)
        if (memcmp(local.regions[r], expected.regions[r], local.bytes[r]) != 0)
            fail_msg(
                "TP %u to %u, %u and %u tokens a block to %u and %u, prompt %u, hit %u: rank %u, buffer %u",
                w->sides[REMOTE].tp, w->sides[LOCAL].tp, w->sides[REMOTE].tokens[SWA],
                w->sides[REMOTE].tokens[FULL], w->sides[LOCAL].tokens[SWA], w->sides[LOCAL].tokens[FULL],
                q->end, q->hit, rank, r);
    kvf_request_free(request);
    kvf_plan_free(plan);
    free_memory(&local);
    free_memory(&expected);
}

/* ---- engines --------------------------------------------------------------------------------- */

static kvf_model *make_model(const world *w) {
    kvf_part_desc parts[GROUPS][2];
    kvf_group_desc groups[GROUPS];
    for (uint32_t g = 0; g < GROUPS; g++) {
        for (uint32_t p = 0; p < 2; p++)
            parts[g][p] = (kvf_part_desc){.name = p ? "v" : "k",
                                          .dtype = KVF_DTYPE_U8,
                                          .units = w->heads[g],
                                          .cell_elements = w->cell[g]};
        groups[g] = (kvf_group_desc){.name = g == SWA ? "swa" : "full",
                                     .window_tokens = g == SWA ? w->window : 0,
                                     .layers = layer_numbers[g],
                                     .layer_count = layer_counts[g],
                                     .parts = parts[g],
                                     .part_count = 2};
    }
    return model_of(LAYERS, groups, GROUPS);
}

static kvf_engine *make_engine(const world *w, uint32_t s) {
    const side *of = &w->sides[s];
    kvf_group_spec groups[GROUPS];
    for (uint32_t g = 0; g < GROUPS; g++)
        groups[g] = (kvf_group_spec){.tokens_per_block = of->tokens[g],
                                     .block_count = MOST_BLOCKS,
                                     .order = of->head_first ? "L|BPHN" : "L|BPNH"};
    return engine_of(w->model, ENGINE(.tp_size = of->tp, .groups = groups, .share_pages = of->shared));
}

/*
 * Blocks have `tokens` tokens in sliding layers, and in full layers as many tokens as fill a page of the same size.
 * Heads that do not divide evenly over the ranks make pages that differ from rank to rank; then each group has memory
 * of its own.
 */
static side side_of(const world *w, uint32_t s, uint32_t tp, uint32_t tokens, bool head_first) {
    world probe = *w;
    probe.sides[s] = (side){.tp = tp, .tokens = {tokens, tokens}, .head_first = head_first};
    side out = probe.sides[s];
    uint64_t page = content_bytes(&probe, s, SWA, 0), full = content_bytes(&probe, s, FULL, 0) / tokens;
    bool even = tp >= w->heads[SWA] || w->heads[SWA] % tp == 0;
    even = even && (tp >= w->heads[FULL] || w->heads[FULL] % tp == 0);
    out.shared = even && page % full == 0;
    out.tokens[FULL] = page % full == 0 ? (uint32_t)(page / full) : tokens;
    return out;
}

static void move_requests(world *w) {
    static const uint32_t prompts[][2] = {
        {1, 0},    /* one token */
        {64, 0},   /* whole blocks of most sizes */
        {93, 0},   /* the last blocks are filled in part */
        {93, 32},  /* a prefix hit at the end of a block of most sizes */
        {93, 41},  /* a prefix hit inside a block */
        {120, 92}, /* only the tail is missing */
    };
    w->model = make_model(w);
    for (uint32_t s = 0; s < 2; s++)
        w->engines[s] = make_engine(w, s);
    for (size_t i = 0; i < COUNT_OF(prompts); i++) {
        move q = {.end = prompts[i][0], .hit = prompts[i][1]};
        memory remote[MOST_RANKS];
        number_blocks(w, &q, LOCAL);
        number_blocks(w, &q, REMOTE);
        for (uint32_t rank = 0; rank < w->sides[REMOTE].tp; rank++) {
            remote[rank] = take_memory(kvf_engine_shard(w->engines[REMOTE], rank), (unsigned char)(rank * 3));
            write_cells(w, &q, REMOTE, rank, &remote[rank]);
        }
        for (uint32_t rank = 0; rank < w->sides[LOCAL].tp; rank++)
            move_to_rank(w, &q, rank, remote);
        for (uint32_t rank = 0; rank < w->sides[REMOTE].tp; rank++)
            free_memory(&remote[rank]);
    }
    for (uint32_t s = 0; s < 2; s++)
        kvf_engine_free(w->engines[s]);
    kvf_model_free(w->model);
}

/* How many groups have remote blocks that hold several local ones, local blocks that hold several remote ones, and
 * neither. */
typedef struct tally {
    uint32_t split, gather, uneven;
    uint32_t different; /* the groups' ratios are not the same */
    uint32_t shared;    /* on both sides */
} tally;

static void count(const world *w, tally *t) {
    const side *l = &w->sides[LOCAL], *r = &w->sides[REMOTE];
    for (uint32_t g = 0; g < GROUPS; g++) {
        t->split += r->tokens[g] > l->tokens[g] && r->tokens[g] % l->tokens[g] == 0;
        t->gather += l->tokens[g] > r->tokens[g] && l->tokens[g] % r->tokens[g] == 0;
        t->uneven += r->tokens[g] % l->tokens[g] != 0 && l->tokens[g] % r->tokens[g] != 0;
    }
    t->shared += l->shared && r->shared;
    t->different += l->tokens[SWA] * r->tokens[FULL] != l->tokens[FULL] * r->tokens[SWA];
}

static tally move_every_pair(uint32_t sliding_heads, uint32_t full_heads, uint32_t window) {
    static const uint32_t tps[] = {1, 2, 3, 4, 6, 8};
    static const uint32_t blocks[][2] = {{4, 4}, {16, 16}, {4, 8}, {16, 4}, {2, 16}, {8, 12}, {7, 5}};
    tally t = {0};
    for (size_t a = 0; a < COUNT_OF(tps); a++)
        for (size_t b = 0; b < COUNT_OF(tps); b++)
            for (size_t i = 0; i < COUNT_OF(blocks); i++) {
                world w = {.heads = {sliding_heads, full_heads}, .cell = {2, 4}, .window = window};
                w.sides[LOCAL] = side_of(&w, LOCAL, tps[a], blocks[i][0], (a + b + i) % 2 == 0);
                w.sides[REMOTE] = side_of(&w, REMOTE, tps[b], blocks[i][1], (a + i) % 2 == 0);
                count(&w, &t);
                move_requests(&w);
            }
    return t;
}

/* The cases must include both directions, and requests whose groups have different ratios. */
static void assert_met(tally t) {
    assert_in_range(t.split, 40, UINT32_MAX);
    assert_in_range(t.gather, 40, UINT32_MAX);
    assert_in_range(t.uneven, 40, UINT32_MAX);
    assert_in_range(t.different, 40, UINT32_MAX);
    assert_in_range(t.shared, 40, UINT32_MAX);
}

static void eight_and_two_heads_arrive_whole_between_every_pair_of_sizes(void **state) {
    (void)state;
    assert_met(move_every_pair(8, 2, 0));
}

static void sixteen_and_four_heads_arrive_whole_between_every_pair_of_sizes(void **state) {
    (void)state;
    assert_met(move_every_pair(16, 4, 0));
}

static void a_window_clips_its_own_group_only(void **state) {
    (void)state;
    assert_met(move_every_pair(8, 2, 30));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(eight_and_two_heads_arrive_whole_between_every_pair_of_sizes),
        cmocka_unit_test(sixteen_and_four_heads_arrive_whole_between_every_pair_of_sizes),
        cmocka_unit_test(a_window_clips_its_own_group_only),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
