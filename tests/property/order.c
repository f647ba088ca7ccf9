/*
 * Addresses of the cells of a built engine: an axis order is a nest of loops, and cells get addresses in the order in
 * which the loops reach them.
 */
#include <string.h>

#include "world.h"

static const char letters[] = "LBPHN";

static void remove_at(char *text, uint32_t at) {
    memmove(text + at, text + at + 1, strlen(text + at + 1) + 1);
}

static void insert_at(char *text, uint32_t at, char letter) {
    memmove(text + at + 1, text + at, strlen(text + at) + 1);
    text[at] = letter;
}

void order_text(const layout_recipe *layout, char out[ORDER_TEXT]) {
    memset(out, 0, ORDER_TEXT);
    if (layout->order == 0)
        return;
    char rest[] = "LBPHN";
    uint32_t number = layout->order - 1;
    for (uint32_t left = 5; left > 0; left--) {
        uint32_t pick = number % left;
        number /= left;
        out[5 - left] = rest[pick];
        remove_at(rest, pick);
    }
    uint32_t part = (uint32_t)(strchr(out, 'P') - out);
    if (layout->order_fault == ORDER_TENSOR_INSIDE)
        insert_at(out, part + 1, 'T');
    else if (layout->tensor_axis)
        insert_at(out, layout->tensor_axis - 1 > part ? 0 : part - (layout->tensor_axis - 1), 'T');
    if (layout->bar && layout->bar - 1 <= strlen(out))
        insert_at(out, layout->bar - 1, '|');
    if (layout->order_fault == ORDER_MISSING)
        remove_at(out, (uint32_t)(strpbrk(out, letters) - out));
    if (layout->order_fault == ORDER_TWICE)
        insert_at(out, 0, 'N');
    if (layout->order_fault == ORDER_UNKNOWN)
        insert_at(out, 2, 'X');
    if (layout->order_fault == ORDER_TWO_BARS) {
        insert_at(out, 1, '|');
        insert_at(out, 1, '|');
    }
}

/* An order with its T added, and the letters before the bar, which have their own buffers. */
typedef struct axes {
    char letters[ORDER_TEXT];
    uint32_t bar;
} axes;

static const char *read_order(const char *text, axes *out) {
    memset(out, 0, sizeof *out);
    if (!*text)
        text = "L|BPHN";
    uint32_t n = 0, bars = 0;
    for (const char *c = text; *c; c++) {
        if (*c == '|') {
            bars++;
            out->bar = n;
            continue;
        }
        if (*c == 'P' && !strchr(text, 'T'))
            out->letters[n++] = 'T';
        out->letters[n++] = *c;
    }
    if (bars > 1)
        return "two bars";
    for (const char *c = "LBTPHN"; *c; c++) {
        const char *found = strchr(out->letters, *c);
        if (!found || strchr(found + 1, *c))
            return "a letter is missing, or there twice";
    }
    if (n != 6)
        return "a letter that is no axis";
    if (strchr(out->letters, 'T') > strchr(out->letters, 'P'))
        return "T inside P";
    for (uint32_t i = 0; i < out->bar; i++)
        if (!strchr("LTP", out->letters[i]))
            return "buffers of their own for B, H or N";
    return NULL;
}

typedef struct counting {
    const recipe *r;
    const group_recipe *group;
    engine_world *engine;
    rank_world *rank;
    rank_group *held;
    uint32_t group_index;
    axes axes;
    uint32_t page_bytes, page_align;
    const uint32_t *parts; /* in the model's order; `part` arguments below are indices into it */
    uint32_t tensor_of[MAX_PARTS];
    bool store; /* otherwise only sizes are computed */
    uint32_t layer, block, unit, row;
    uint32_t region;
    uint64_t offset;
    const char *fault;
} counting;

static uint32_t rows_of(const counting *c, uint32_t part) {
    return kernel_tokens_of(c->engine, c->group_index) * c->group->parts[c->parts[part]].rows;
}

static uint32_t steps_of(const counting *c, char letter, uint32_t part) {
    switch (letter) {
    case 'L':
        return layers_of(c->held);
    case 'B':
        return c->held->block_count * c->engine->kernel_blocks[c->group_index];
    case 'H':
        return units_of(&c->held->parts[c->parts[part]]);
    default:
        return rows_of(c, part);
    }
}

static void count_axis(counting *c, uint32_t axis, uint32_t begin, uint32_t end);

static void count_cell(counting *c, uint32_t part) {
    rank_part *p = &c->held->parts[c->parts[part]];
    uint32_t blocks = steps_of(c, 'B', part), rows = rows_of(c, part), units = units_of(p);
    if (c->store)
        p->cells[((c->layer * blocks + c->block) * rows + c->row) * units + c->unit] =
            (place){c->region, (uint32_t)c->offset};
    c->offset += cell_bytes_of(&c->group->parts[c->parts[part]]);
}

/* Ends a page: the rest of its stride stays free. */
static void close_page(counting *c, uint64_t start) {
    uint64_t content = c->offset - start;
    if (content > c->engine->page_content[c->group_index])
        c->engine->page_content[c->group_index] = (uint32_t)content;
    uint64_t stride = content;
    if (c->page_bytes) {
        if (c->page_bytes < content)
            c->fault = "a page is smaller than its content";
        stride = c->page_bytes;
    }
    while (c->page_align && stride % c->page_align != 0)
        stride++;
    c->offset = start + stride;
}

static void count_repeated(counting *c, uint32_t axis, uint32_t begin, uint32_t end) {
    char letter = c->axes.letters[axis];
    uint32_t count = steps_of(c, letter, begin);
    for (uint32_t p = begin; p < end; p++)
        if (steps_of(c, letter, p) != count)
            c->fault = "an axis spans parts with different numbers of steps";
    uint32_t *index = letter == 'L'   ? &c->layer
                      : letter == 'B' ? &c->block
                      : letter == 'H' ? &c->unit
                                      : &c->row;
    for (uint32_t i = 0; i < count && !c->fault; i++) {
        uint64_t start = c->offset;
        *index = i;
        count_axis(c, axis + 1, begin, end);
        if (letter == 'B')
            close_page(c, start);
    }
    *index = 0;
}

static void count_sequence(counting *c, uint32_t axis, uint32_t begin, uint32_t end) {
    for (uint32_t p = begin; p < end && !c->fault;) {
        uint32_t next = p + 1;
        while (c->axes.letters[axis] == 'T' && next < end && c->tensor_of[next] == c->tensor_of[p])
            next++;
        count_axis(c, axis + 1, p, next);
        p = next;
    }
}

static void count_axis(counting *c, uint32_t axis, uint32_t begin, uint32_t end) {
    char letter = c->axes.letters[axis];
    if (axis == c->axes.bar)
        c->offset = 0;
    if (!letter)
        count_cell(c, begin);
    else if (letter == 'T' || letter == 'P')
        count_sequence(c, axis, begin, end);
    else
        count_repeated(c, axis, begin, end);
    if (axis == c->axes.bar) {
        uint32_t *bytes = &c->rank->region_bytes[c->region++];
        if (c->store && c->offset > *bytes)
            *bytes = (uint32_t)c->offset;
    }
}

static void count_group(const world *w, uint32_t side, engine_world *e, rank_world *rank, uint32_t group,
                        const char **fault, bool store) {
    const recipe *r = w->recipe;
    const layout_recipe *layout = &r->engines[side].layouts[layout_of(r, side, group)];
    counting c = {.r = r,
                  .group = &w->models[side].groups[group],
                  .parts = w->models[side].part_order[group],
                  .engine = e,
                  .rank = rank,
                  .held = &rank->groups[group],
                  .group_index = group,
                  .page_bytes = store ? e->page_bytes[group] : 0,
                  .page_align = layout->page_align,
                  .store = store};
    *fault = read_order(e->orders[group], &c.axes);
    if (*fault || layers_of(c.held) == 0)
        return;
    c.region = r->engines[side].share_pages ? 0 : rank->region_count;
    for (uint32_t p = 1; p < c.group->part_count; p++)
        c.tensor_of[p] = c.tensor_of[p - 1] + (c.group->parts[c.parts[p]].new_tensor != 0);
    for (uint32_t p = 0; p < c.group->part_count && store; p++)
        c.held->parts[c.parts[p]].cells = arena_take((size_t)layers_of(c.held) * steps_of(&c, 'B', p) *
                                                         rows_of(&c, p) * steps_of(&c, 'H', p),
                                                     sizeof(place));
    count_axis(&c, 0, 0, c.group->part_count);
    *fault = c.fault;
    if (store && c.region > rank->region_count)
        rank->region_count = c.region;
}

enum { MOST_PADDED = 512 << 10 };

bool has_whole_pages(const layout_recipe *layout) {
    char order[ORDER_TEXT];
    order_text(layout, order);
    const char *block = strchr(order, 'B'), *head = strchr(order, 'H'), *token = strchr(order, 'N');
    return !*order || (block && head > block && token > block);
}

/* Makes all logical blocks equally large: the smallest size that holds a block of any group and is divisible by each
 * group's number of kernel blocks. Pages stay as they are if that makes the case too large. */
static void even_pages(const recipe *r, uint32_t side, engine_world *e) {
    uint32_t page = 1;
    bool whole = true;
    for (uint32_t g = 0; g < r->group_count; g++) {
        uint32_t bytes = e->page_content[g] * e->kernel_blocks[g];
        page = bytes > page ? bytes : page;
        whole &= has_whole_pages(&r->engines[side].layouts[layout_of(r, side, g)]);
    }
    for (bool fits = false; !fits; page += !fits) {
        fits = true;
        for (uint32_t g = 0; g < r->group_count; g++)
            fits &= page % e->kernel_blocks[g] == 0;
    }
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < e->rank_count; i++)
        for (uint32_t g = 0; g < r->group_count; g++)
            bytes += (uint64_t)layers_of(&e->ranks[i].groups[g]) * e->block_count[g] * page;
    for (uint32_t g = 0; g < r->group_count && whole && bytes <= MOST_PADDED; g++)
        e->page_bytes[g] = page / e->kernel_blocks[g];
}

/* Groups with the same layout have one page size. */
static void choose_pages(const recipe *r, uint32_t side, engine_world *e) {
    if (r->engines[side].even_pages && r->engines[side].per_group) {
        even_pages(r, side, e);
        return;
    }
    for (uint32_t g = 0; g < r->group_count; g++) {
        uint32_t layout = layout_of(r, side, g), most = 0;
        for (uint32_t other = 0; other < r->group_count; other++)
            if (layout_of(r, side, other) == layout && e->page_content[other] > most)
                most = e->page_content[other];
        const layout_recipe *wanted = &r->engines[side].layouts[layout];
        if (wanted->page_short)
            e->page_bytes[g] = most - 1;
        else if (wanted->page_extra)
            e->page_bytes[g] = most + wanted->page_extra - 1;
    }
}

void place_by_order(const recipe *r, uint32_t side, world *w) {
    engine_world *e = &w->engines[side];
    const model_world *model = &w->models[side];
    bool pages = r->engines[side].even_pages != 0;
    for (uint32_t g = 0; g < r->group_count; g++) {
        const layout_recipe *layout = &r->engines[side].layouts[layout_of(r, side, g)];
        order_text(layout, e->orders[g]);
        pages |= layout->page_extra || layout->page_short;
    }
    for (uint32_t pass = pages ? 0 : 1; pass < 2; pass++) {
        for (uint32_t i = 0; i < e->rank_count; i++) {
            for (uint32_t g = 0; g < model->group_count; g++) {
                const char *fault;
                count_group(w, side, e, &e->ranks[i], model->group_order[g], &fault, pass == 1);
                if (fault && !e->illegal)
                    e->illegal = fault;
            }
        }
        if (pass == 0)
            choose_pages(r, side, e);
    }
}
