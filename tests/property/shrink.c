/*
 * Makes a failing case smaller while it still fails: takes out whole groups, parts, layers and ranks, then tries every
 * number at 0, at 1, at its half and one lower.
 */
#include <string.h>

#include "recipe.h"

_Static_assert(sizeof(recipe) % sizeof(uint32_t) == 0, "a recipe is a list of numbers");

enum { MOST_TRIES = 60000 };

typedef struct shrinking {
    recipe *best;
    bool (*fails)(const recipe *r);
    uint32_t tries;
    bool progress;
} shrinking;

static bool keep_if_fails(shrinking *s, const recipe *smaller) {
    if (s->tries >= MOST_TRIES || !recipe_usable(smaller))
        return false;
    s->tries++;
    if (!s->fails(smaller))
        return false;
    *s->best = *smaller;
    s->progress = true;
    return true;
}

static void remove_item(void *items, uint32_t count, uint32_t at, size_t bytes) {
    unsigned char *data = items;
    memmove(data + at * bytes, data + (at + 1) * bytes, (count - at - 1) * bytes);
    memset(data + (count - 1) * bytes, 0, bytes);
}

static void drop_group(recipe *r, uint32_t g) {
    remove_item(r->groups, MAX_GROUPS, g, sizeof r->groups[0]);
    remove_item(r->requests, MAX_GROUPS, g, sizeof r->requests[0]);
    for (uint32_t side = 0; side < SIDES; side++) {
        engine_recipe *engine = &r->engines[side];
        unlike_recipe *unlike = &engine->unlike;
        uint32_t below = (1u << g) - 1;
        if (engine->per_group)
            remove_item(engine->layouts, MAX_GROUPS, g, sizeof engine->layouts[0]);
        remove_item(unlike->lacks_layers, MAX_GROUPS, g, sizeof unlike->lacks_layers[0]);
        unlike->lacks_groups = (unlike->lacks_groups & below) | (unlike->lacks_groups >> 1 & ~below);
        if (unlike->differs == g + 1)
            unlike->differs = 0;
        else if (unlike->differs > g)
            unlike->differs--;
        for (uint32_t i = 0; i < MAX_HAND_RANKS; i++) {
            remove_item(engine->hands[i].units_begin, MAX_GROUPS, g, sizeof engine->hands[i].units_begin[0]);
            remove_item(engine->hands[i].units_end, MAX_GROUPS, g, sizeof engine->hands[i].units_end[0]);
        }
    }
    r->group_count--;
    if (r->fault_group > g)
        r->fault_group--;
}

static void drop_part(recipe *r, uint32_t g, uint32_t p) {
    group_recipe *group = &r->groups[g];
    remove_item(group->parts, MAX_PARTS, p, sizeof group->parts[0]);
    group->part_count--;
    for (uint32_t side = 0; side < SIDES; side++) {
        for (uint32_t i = 0; i < MAX_HAND_RANKS; i++) {
            hand_rank *hand = &r->engines[side].hands[i];
            remove_item(hand->units_begin[g], MAX_PARTS, p, sizeof hand->units_begin[g][0]);
            remove_item(hand->units_end[g], MAX_PARTS, p, sizeof hand->units_end[g][0]);
        }
    }
}

static void drop_layer(recipe *r, uint32_t layer) {
    uint32_t below = (1u << layer) - 1;
    for (uint32_t g = 0; g < r->group_count; g++) {
        uint32_t mask = r->groups[g].layer_mask;
        r->groups[g].layer_mask = (mask & below) | (mask >> 1 & ~below);
    }
    for (uint32_t side = 0; side < SIDES; side++) {
        engine_recipe *engine = &r->engines[side];
        for (uint32_t i = 0; i < MAX_HAND_RANKS; i++) {
            engine->hands[i].layers_begin -= engine->hands[i].layers_begin > layer;
            engine->hands[i].layers_end -= engine->hands[i].layers_end > layer;
        }
        uint32_t end = 0;
        for (uint32_t stage = 0; stage < MAX_STAGES; stage++) {
            end += engine->stages[stage];
            if (layer < end) {
                engine->stages[stage]--;
                break;
            }
        }
    }
    r->layer_count--;
}

static void shrink_structure(shrinking *s) {
    recipe smaller;
    for (uint32_t g = s->best->group_count; g-- > 0 && s->best->group_count > 1;) {
        smaller = *s->best;
        drop_group(&smaller, g);
        (void)keep_if_fails(s, &smaller);
    }
    for (uint32_t g = 0; g < s->best->group_count; g++) {
        for (uint32_t p = s->best->groups[g].part_count; p-- > 0 && s->best->groups[g].part_count > 1;) {
            smaller = *s->best;
            drop_part(&smaller, g, p);
            (void)keep_if_fails(s, &smaller);
        }
    }
    for (uint32_t layer = s->best->layer_count; layer-- > 0 && s->best->layer_count > 1;) {
        smaller = *s->best;
        drop_layer(&smaller, layer);
        (void)keep_if_fails(s, &smaller);
    }
    for (uint32_t side = 0; side < SIDES; side++) {
        for (uint32_t i = s->best->engines[side].hand_count; i-- > 0;) {
            smaller = *s->best;
            remove_item(smaller.engines[side].hands, MAX_HAND_RANKS, i,
                        sizeof smaller.engines[side].hands[0]);
            smaller.engines[side].hand_count--;
            (void)keep_if_fails(s, &smaller);
        }
    }
}

static void shrink_numbers(shrinking *s) {
    recipe smaller;
    uint32_t *numbers = (uint32_t *)(void *)&smaller;
    for (size_t i = 0; i < sizeof smaller / sizeof *numbers; i++) {
        smaller = *s->best;
        uint32_t value = numbers[i], candidates[] = {0, 1, value / 2, value - 1};
        for (uint32_t c = 0; c < 4 && value; c++) {
            smaller = *s->best;
            numbers[i] = candidates[c];
            if (candidates[c] < value && keep_if_fails(s, &smaller))
                break;
        }
    }
}

uint32_t recipe_shrink(recipe *r, bool (*fails)(const recipe *r)) {
    shrinking s = {.best = r, .fails = fails, .progress = true};
    while (s.progress && s.tries < MOST_TRIES) {
        s.progress = false;
        shrink_structure(&s);
        shrink_numbers(&s);
    }
    return s.tries;
}
