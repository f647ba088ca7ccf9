#include "shape.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "folding.h"
#include "numbers.h"
#include "shape_keys.h"
#include "shape_types.h"
#include "shared_pages.h"
#include "words.h"

enum { PLANNED_BLOCKS = 64 };

typedef struct order_name {
    const char *name;
    const char *order;
    const char *meaning;
} order_name;

static const order_name orders[] = {
    {"nhd", "L|BPNH", "a buffer a layer; in a page all of K, then all of V; token before head"},
    {"hnd", "L|BPHN", "the same, head before token"},
    {"packed-nhd", "L|BNHP", "K and V of a token and head side by side; token before head"},
    {"packed-hnd", "L|BHNP", "the same, head before token"},
    {"kv-outer", "LP|BNH", "K and V in buffers of their own; token before head"},
    {"blocks-first", "BLPHN", "one buffer; all layers of a block in one row; head before token"},
    {"layers-first", "LBPHN", "one buffer; all blocks of a layer together; head before token"},
    {"ds", "L|BPHN", "state: each projection of the conv state, channel before step"},
    {"sd", "L|BTNPH", "state: step before channel, the projections of a step side by side"},
};

enum { ORDER_NHD = 0, ORDER_DS = 7 }; /* the defaults of token groups and of state groups */

static const size_t order_count = sizeof orders / sizeof *orders;

/* The short name of an order ("nhd"), or the order itself where it has none. */
static const char *name_of_order(const char *order) {
    for (size_t i = 0; i < order_count; i++)
        if (strcmp(orders[i].order, order) == 0)
            return orders[i].name;
    return order;
}

static const char *order_word(const void *set, uint32_t i) {
    (void)set;
    return i < order_count ? orders[i].name : NULL;
}

/* Reads an order: a name, or axes in either case, with or without the elements of a cell (D) at the end. Axes are
 * changed to capitals in place. NULL: it is neither. */
static const char *order_of(char *value) {
    uint32_t number;
    if (words_find((words){order_word, NULL}, value, &number))
        return orders[number].order;
    size_t length = strlen(value);
    for (size_t i = 0; i < length; i++)
        if (!strchr("LBTPHN|", toupper((unsigned char)value[i])) &&
            (i == 0 || i + 1 < length || toupper((unsigned char)value[i]) != 'D'))
            return NULL;
    for (size_t i = 0; i < length; i++)
        value[i] = (char)toupper((unsigned char)value[i]);
    if (length && value[length - 1] == 'D')
        value[length - 1] = '\0';
    return value;
}

void print_shape_help(void) {
    printf("\nA SHAPE is KEY=VALUE,... with the keys\n"
           "  tp, pp, dcp        tensor, pipeline and decode-context parallel sizes (1)\n"
           "  pp-layers=A+B+..   layers of each pipeline stage\n"
           "  dcp-width=N        neighbouring tokens that stay on one rank (1)\n"
           "  share-pages=yes    all groups keep their blocks in the same memory: an entry\n"
           "                     of a block table is a block of any group, and pages are as\n"
           "                     large as the largest group needs (no)\n"
           "  block=N            tokens of a logical block (16); where several tokens share\n"
           "                     an entry, the next number that is whole entries\n"
           "  kernel=N           kernel blocks of a logical block (1)\n"
           "  blocks=N           logical blocks of the cache (chosen)\n"
           "  page, page-align   bytes of a page; a number that they are rounded up to a\n"
           "                     multiple of\n"
           "  order=ORDER        how a page is laid out (nhd; state groups: ds)\n"
           "  keys=KIND          by-channel: a block keeps one channel of a head's keys for\n"
           "                     all its tokens, then the next channel (in orders such as\n"
           "                     hnd); whole: a token's channels side by side (whole)\n"
           "  dtype=NAME         f32, f16, bf16, fp8 or fp8_e5m2: the type that elements are\n"
           "                     converted to on the way (the model's)\n"
           "The keys from block on may be set for one group, GROUP.KEY, or for all state\n"
           "groups, state.KEY. Numbers may end with k, m, g or t: 1024 of it, and so on.\n\n"
           "An ORDER nests L layer, B block, T tensor, P part, H head or channel, N token or\n"
           "step from the outside in; the axes before | have buffers of their own. Some\n"
           "orders have names, in capitals or not:\n");
    for (size_t i = 0; i < order_count; i++) {
        printf("  %-13s %-8s ", orders[i].name, orders[i].order);
        print_folded(25, 25, orders[i].meaning);
    }
}

/* ---- cutting the text ------------------------------------------------------------------------ */

static const char *const keys[] = {"tp",          "pp",    "pp-layers", "dcp",    "dcp-width",
                                   "share-pages", "block", "kernel",    "blocks", "page",
                                   "page-align",  "order", "keys",      "dtype",  NULL};

const char *shape_key(uint32_t i) {
    return i < sizeof keys / sizeof *keys ? keys[i] : NULL;
}

static bool same_group(const char *a, const char *b) {
    return a && b ? words_same(a, b) : a == b;
}

/* Of two values of one key the first would have no effect. */
static int refuse_twice(const engine_shape *shape, const shape_setting *setting) {
    for (const shape_setting *other = shape->settings; other < setting; other++)
        if (strcmp(other->key, setting->key) == 0 && same_group(other->group, setting->group))
            return usage_error("--%s: %s%s%s is given twice, as \"%s\" and \"%s\"", shape->side,
                               setting->group ? setting->group : "", setting->group ? "." : "", setting->key,
                               other->value, setting->value);
    return EXIT_DONE;
}

static int cut_setting(engine_shape *shape, char *piece) {
    char *equals = strchr(piece, '=');
    if (!equals || equals == piece || !equals[1])
        return usage_error("--%s: \"%s\" is not KEY=VALUE%s", shape->side, piece,
                           *piece ? "" : "; a comma is only between two of them");
    if (shape->setting_count == SHAPE_MAX_SETTINGS)
        return usage_error("--%s: more than %d keys", shape->side, SHAPE_MAX_SETTINGS);
    *equals = '\0';
    shape_setting *setting = &shape->settings[shape->setting_count++];
    *setting = (shape_setting){NULL, piece, equals + 1};
    char *dot = strrchr(piece, '.');
    if (dot) {
        *dot = '\0';
        setting->group = piece;
        setting->key = dot + 1;
    }
    const char *known = words_find(words_of_array(keys), setting->key, NULL);
    if (!known) {
        char list[160];
        words_list(words_of_array(keys), list, sizeof list);
        return usage_error("--%s: there is no key \"%s\"; allowed: %s%s", shape->side, setting->key, list,
                           words_hint(words_of_array(keys), setting->key).text);
    }
    setting->key = known;
    return refuse_twice(shape, setting);
}

static int cut(engine_shape *shape) {
    char *rest = *shape->text ? shape->text : NULL; /* a shape without any key has the defaults */
    int result = EXIT_DONE;
    for (char *piece; !result && (piece = strsep(&rest, ",")) != NULL;)
        result = cut_setting(shape, piece);
    return result;
}

/* ---- numbers of the engine ------------------------------------------------------------------- */

static int read_number(const engine_shape *shape, const shape_setting *setting, uint64_t most,
                       uint64_t *out) {
    if (parse_number(setting->value, out) && *out >= 1 && *out <= most)
        return EXIT_DONE;
    return usage_error("--%s: %s%s%s is \"%s\"; allowed: a whole number from 1 to %llu", shape->side,
                       setting->group ? setting->group : "", setting->group ? "." : "", setting->key,
                       setting->value, (unsigned long long)most);
}

static int read_stages(engine_shape *shape, const char *value) {
    uint32_t count = 1;
    for (const char *c = value; *c; c++)
        count += *c == '+';
    uint32_t *layers = calloc(count, sizeof *layers);
    char *copy = strdup(value);
    if (!layers || !copy) {
        free(layers);
        free(copy);
        return failure("not enough memory");
    }
    int result = EXIT_DONE;
    char *rest = copy;
    for (uint32_t i = 0; i < count && !result; i++) {
        uint64_t number;
        const char *piece = strsep(&rest, "+");
        if (!parse_number(piece, &number) || number == 0 || number > UINT32_MAX)
            result = usage_error("--%s: pp-layers is \"%s\"; allowed: numbers of layers such as 16+16",
                                 shape->side, value);
        else
            layers[i] = (uint32_t)number;
    }
    free(copy);
    if (result) {
        free(layers);
        return result;
    }
    free(shape->pp_layers);
    shape->pp_layers = layers;
    shape->pp_stages = count;
    return EXIT_DONE;
}

static int read_share_pages(engine_shape *shape, const char *value) {
    shape->share_pages = words_same(value, "yes");
    if (shape->share_pages || words_same(value, "no"))
        return EXIT_DONE;
    return usage_error("--%s: share-pages is \"%s\"; allowed: yes and no", shape->side, value);
}

/* Reads a key of the whole engine. `known` receives whether it is one. */
static int read_engine_key(engine_shape *shape, const shape_setting *setting, bool *known) {
    struct {
        const char *key;
        uint32_t *field;
    } sizes[] = {
        {"tp", &shape->tp}, {"pp", &shape->pp}, {"dcp", &shape->dcp}, {"dcp-width", &shape->dcp_width}};
    *known = true;
    if (strcmp(setting->key, "pp-layers") == 0)
        return read_stages(shape, setting->value);
    if (strcmp(setting->key, "share-pages") == 0)
        return read_share_pages(shape, setting->value);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (strcmp(setting->key, sizes[i].key) != 0)
            continue;
        uint64_t number = 0;
        int result = read_number(shape, setting, 65536, &number);
        *sizes[i].field = (uint32_t)number;
        shape->pp_given = shape->pp_given || sizes[i].field == &shape->pp;
        return result;
    }
    *known = false;
    return EXIT_DONE;
}

/* ---- settings of a group --------------------------------------------------------------------- */

static int read_order(const engine_shape *shape, char *value, const char **out) {
    char list[160];
    const words names = {order_word, NULL};
    *out = order_of(value);
    if (*out)
        return EXIT_DONE;
    words_list(names, list, sizeof list);
    return usage_error("--%s: order is \"%s\"; allowed: %s, and axes such as L|BPNH%s", shape->side, value,
                       list, words_hint(names, value).text);
}

static int read_keys(const engine_shape *shape, const char *value, bool *turned) {
    *turned = words_same(value, "by-channel");
    if (*turned || words_same(value, "whole"))
        return EXIT_DONE;
    return usage_error("--%s: keys is \"%s\"; allowed: whole and by-channel", shape->side, value);
}

static int read_dtype(engine_shape *shape, const shape_setting *setting, kvf_dtype *out) {
    shape->retyped = true;
    if (kvf_dtype_by_name(setting->value, out) == KVF_OK && (SHAPE_CONVERTED & KVF_DTYPE_BIT(*out)))
        return EXIT_DONE;
    return usage_error("--%s: dtype is \"%s\"; allowed: f32, f16, bf16, fp8 and fp8_e5m2", shape->side,
                       setting->value);
}

/* The tokens of a block of a group if `tokens` are said of all groups: the next multiple that is whole entries. */
static uint32_t whole_entries(const kvf_group_desc *group, uint32_t tokens) {
    const uint32_t rest = tokens % group->tokens_per_step, missing = rest ? group->tokens_per_step - rest : 0;
    return missing > UINT32_MAX - tokens ? tokens : tokens + missing;
}

static int read_group_key(engine_shape *shape, const kvf_group_desc *desc, const shape_setting *setting,
                          uint32_t group) {
    kvf_group_spec *spec = &shape->groups[group];
    uint64_t number = 0;
    int result = EXIT_DONE;
    if (strcmp(setting->key, "order") == 0) {
        result = read_order(shape, setting->value, &spec->order);
    } else if (strcmp(setting->key, "block") == 0) {
        result = read_number(shape, setting, UINT32_MAX, &number);
        spec->tokens_per_block = setting->group ? (uint32_t)number : whole_entries(desc, (uint32_t)number);
    } else if (strcmp(setting->key, "kernel") == 0) {
        result = read_number(shape, setting, UINT32_MAX, &number);
        spec->kernel_blocks_per_block = (uint32_t)number;
    } else if (strcmp(setting->key, "blocks") == 0) {
        result = read_number(shape, setting, UINT32_MAX - 1, &spec->block_count);
        shape->fixed_blocks[group] = true;
    } else if (strcmp(setting->key, "page") == 0) {
        result = read_number(shape, setting, UINT64_MAX, &spec->page_bytes);
    } else if (strcmp(setting->key, "page-align") == 0) {
        result = read_number(shape, setting, UINT64_MAX, &spec->page_align);
    } else if (strcmp(setting->key, "keys") == 0) {
        result = read_keys(shape, setting->value, &shape->turned_keys[group]);
    } else if (strcmp(setting->key, "dtype") == 0) {
        result = read_dtype(shape, setting, &shape->types[group]);
    } else {
        result = usage_error("--%s: %s is a key of the whole engine, not of group %s", shape->side,
                             setting->key, setting->group);
    }
    return result;
}

/* How closely a setting names a group: 0 not at all, 1 all token groups, 2 all state groups, 3 this group. */
static int closeness(const shape_setting *setting, const kvf_group_desc *group) {
    bool is_state = group->kind == KVF_GROUP_STATE;
    if (!setting->group)
        return is_state ? 0 : 1;
    if (strcmp(setting->group, group->name) == 0)
        return 3;
    return is_state && strcmp(setting->group, "state") == 0 ? 2 : 0;
}

static const char *group_word(const void *model, uint32_t i) {
    const kvf_group_desc *group = kvf_model_group(model, i);
    return group ? group->name : NULL;
}

bool shape_keeps_state(const kvf_model *model) {
    bool keeps = false;
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++)
        keeps = keeps || kvf_model_group(model, g)->kind == KVF_GROUP_STATE;
    return keeps;
}

static int check_group_names(engine_shape *shape, const kvf_model *model) {
    const words groups = {group_word, model};
    char list[256];
    for (uint32_t i = 0; i < shape->setting_count; i++) {
        shape_setting *setting = &shape->settings[i];
        const char *name = setting->group ? words_find(groups, setting->group, NULL) : NULL;
        if (name)
            setting->group = name;
        if (name || !setting->group)
            continue;
        words_list(groups, list, sizeof list);
        if (strcmp(setting->group, "state") != 0)
            return usage_error("--%s: there is no group \"%s\"; the model has %s%s", shape->side,
                               setting->group, list, words_hint(groups, setting->group).text);
        if (!shape_keeps_state(model))
            return usage_error("--%s: state.%s has no effect: the model keeps no state, and has %s",
                               shape->side, setting->key, list);
    }
    return EXIT_DONE;
}

/* Checks keys of the engine that depend on each other. */
static int check_together(engine_shape *shape) {
    if (shape->pp_layers && shape->pp_given && shape->pp != shape->pp_stages)
        return usage_error("--%s: pp is %u, but pp-layers has %u stages; leave pp out, or let the two agree",
                           shape->side, shape->pp, shape->pp_stages);
    if (shape->pp_layers)
        shape->pp = shape->pp_stages;
    for (uint32_t i = 0; i < shape->setting_count; i++)
        if (shape->dcp == 1 && strcmp(shape->settings[i].key, "dcp-width") == 0)
            return usage_error(
                "--%s: dcp-width has no effect without dcp=2 or more: tokens are not shared out",
                shape->side);
    return EXIT_DONE;
}

/* Groups without keys, such as latents, stay as they are. */
static int check_keys(engine_shape *shape, const kvf_model *model) {
    bool asked = false, turns = false;
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        asked = asked || shape->turned_keys[g];
        shape->turned_keys[g] = shape->turned_keys[g] && shape_has_keys(kvf_model_group(model, g));
        turns = turns || shape->turned_keys[g];
    }
    shape->turns_keys = turns;
    return asked && !turns
               ? usage_error("--%s: keys=by-channel has no effect: no keys are cached", shape->side)
               : EXIT_DONE;
}

static int apply(engine_shape *shape, const kvf_model *model) {
    shape_setting *engine_wide[SHAPE_MAX_SETTINGS] = {0};
    for (uint32_t i = 0; i < shape->setting_count; i++) {
        shape_setting *setting = &shape->settings[i];
        bool known = false;
        int result = setting->group ? EXIT_DONE : read_engine_key(shape, setting, &known);
        if (result)
            return result;
        engine_wide[i] = known ? setting : NULL;
    }
    int together = check_together(shape);
    if (together)
        return together;
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++) {
        const kvf_group_desc *group = kvf_model_group(model, g);
        bool is_state = group->kind == KVF_GROUP_STATE;
        shape->groups[g] = (kvf_group_spec){.tokens_per_block = is_state ? 1 : whole_entries(group, 16),
                                            .kernel_blocks_per_block = 1,
                                            .order = orders[is_state ? ORDER_DS : ORDER_NHD].order};
        for (int close = 1; close <= 3; close++)
            for (uint32_t i = 0; i < shape->setting_count; i++) {
                const shape_setting *setting = &shape->settings[i];
                if (engine_wide[i] || closeness(setting, group) != close)
                    continue;
                int result = read_group_key(shape, group, setting, g);
                if (result)
                    return result;
            }
    }
    return check_keys(shape, model);
}

/* ---- whole shapes ---------------------------------------------------------------------------- */

int shape_parse(const char *side, const char *written, const kvf_model *model, engine_shape *out) {
    uint32_t groups = kvf_model_group_count(model);
    *out = (engine_shape){.side = side, .tp = 1, .pp = 1, .dcp = 1, .dcp_width = 1};
    out->text = strdup(written);
    out->written = strdup(written);
    out->groups = calloc(groups, sizeof *out->groups);
    out->fixed_blocks = calloc(groups, sizeof *out->fixed_blocks);
    out->types = calloc(groups, sizeof *out->types);
    out->turned_keys = calloc(groups, sizeof *out->turned_keys);
    if (!out->text || !out->written || !out->groups || !out->fixed_blocks || !out->types || !out->turned_keys)
        return failure("not enough memory");
    int result = cut(out);
    if (!result)
        result = check_group_names(out, model);
    if (!result)
        result = apply(out, model);
    out->is_read = result == EXIT_DONE;
    if (!result && out->share_pages)
        result = shared_pages_fit(out, model);
    return result;
}

void shape_free(engine_shape *shape) {
    free(shape->text);
    free(shape->written);
    free(shape->pp_layers);
    free(shape->groups);
    free(shape->fixed_blocks);
    free(shape->types);
    free(shape->turned_keys);
    *shape = (engine_shape){0};
}

void shape_fill_blocks(engine_shape *shape, const kvf_model *model) {
    for (uint32_t g = 0; g < kvf_model_group_count(model); g++)
        if (!shape->fixed_blocks[g])
            shape->groups[g].block_count = PLANNED_BLOCKS;
}

int shape_build(const engine_shape *shape, const kvf_model *model, kvf_engine **out) {
    kvf_engine_spec spec = {
        .struct_size = sizeof spec,
        .name = shape->name ? shape->name : shape->side,
        .tp_size = shape->tp,
        .pp_size = shape->pp,
        .pp_layers = shape->pp_layers,
        .dcp_size = shape->dcp,
        .dcp_width = shape->dcp_width,
        .groups = shape->groups,
        .share_pages = shape->share_pages,
    };
    kvf_model *retyped = NULL;
    kvf_status status = shape->retyped ? shape_retype(model, shape->types, &retyped) : KVF_OK;
    if (!status)
        status = kvf_engine_build(retyped ? retyped : model, &spec, out);
    kvf_model_free(retyped);
    if (status) /* the library calls fields by its own names, and this shows what became of which key */
        return library_error(status, "--%s%s%s", shape->side, shape->written[0] ? " " : "", shape->written);
    const int result = shape->turns_keys ? shape_turn_keys(shape->side, shape->turned_keys, out) : EXIT_DONE;
    if (result) {
        kvf_engine_free(*out);
        *out = NULL;
    }
    return result;
}

uint32_t shape_stage_layers(const engine_shape *shape, const kvf_engine *engine, uint32_t stage) {
    /* Ranks are numbered stage by stage. */
    const uint32_t rank = stage * (kvf_engine_rank_count(engine) / shape->pp);
    const kvf_range layers = kvf_shard_get(kvf_engine_shard(engine, rank))->layers;
    return layers.end - layers.begin;
}

void shape_describe_stages(const engine_shape *shape, const kvf_engine *engine, char *out, size_t bytes) {
    size_t length = 0;
    bool uneven = false;
    out[0] = '\0';
    for (uint32_t stage = 0; stage < shape->pp && length < bytes; stage++) {
        uint32_t layers = shape_stage_layers(shape, engine, stage);
        uneven = uneven || layers != shape_stage_layers(shape, engine, 0);
        length += (size_t)snprintf(out + length, bytes - length, "%s%u", stage ? "+" : "", layers);
    }
    if (!uneven)
        out[0] = '\0';
}

/* Whether two groups are described in the same words. */
static bool is_alike(const engine_shape *shape, uint32_t a, uint32_t b) {
    return shape->groups[a].tokens_per_block == shape->groups[b].tokens_per_block &&
           shape->groups[a].order == shape->groups[b].order && shape->turned_keys[a] == shape->turned_keys[b];
}

void shape_describe_groups(const engine_shape *shape, const kvf_model *model, char *out, size_t bytes) {
    size_t length = 0;
    out[0] = '\0';
    uint32_t last = 0;
    for (uint32_t g = 0; g < kvf_model_group_count(model) && length < bytes; g++) {
        const kvf_group_spec *spec = &shape->groups[g];
        if (g > 0 && is_alike(shape, last, g))
            continue;
        const kvf_group_desc *group = kvf_model_group(model, g);
        bool is_state = group->kind == KVF_GROUP_STATE;
        char size[16] = "";
        if (!is_state)
            (void)snprintf(size, sizeof size, "%u ", spec->tokens_per_block);
        const char *order = name_of_order(spec->order);
        if (is_state && strcmp(order, "hnd") == 0)
            order = "ds"; /* the same strides, in the words for states */
        length += (size_t)snprintf(out + length, bytes - length, "%s%s%s%s%s%s", g ? ", " : "",
                                   g ? group->name : "", g ? " " : "", size, order,
                                   shape->turned_keys[g] ? " with keys by channel" : "");
        last = g;
    }
}
