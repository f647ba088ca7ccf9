#include "plan/walk.h"

/* The first step at or after `step` that the side keeps; UINT64_MAX if there is none below 2^64. */
static uint64_t first_kept(const kvf_walk_side *side, uint64_t step) {
    const kvf_token_share *s = &side->share;
    if (s->count == 1)
        return step;
    KVF_ASSERT(s->index < s->count && s->width > 0);
    uint64_t period = (uint64_t)s->width * s->count;
    uint64_t begin = (uint64_t)s->width * s->index; /* of the kept steps in each period */
    uint64_t in_period = step % period;
    if (in_period >= begin && in_period < begin + s->width)
        return step;
    uint64_t skip = in_period < begin ? begin - in_period : period - in_period + begin;
    uint64_t kept;
    return kvf_add(step, skip, &kept) ? kept : UINT64_MAX;
}

/* How many steps from `step` on, which is kept, are neighbours in one kernel block. */
static uint64_t contiguous_steps(const kvf_walk_side *side, uint64_t step, uint64_t position) {
    uint64_t in_block = side->kernel_steps - position % side->kernel_steps;
    if (side->share.count == 1)
        return in_block;
    return kvf_min_u64(in_block, side->share.width - step % side->share.width);
}

uint64_t kvf_walk_position(const kvf_walk_side *side, uint64_t step) {
    const kvf_token_share *s = &side->share;
    if (s->count == 1)
        return step;
    uint64_t period = (uint64_t)s->width * s->count;
    uint64_t begin = (uint64_t)s->width * s->index;
    uint64_t in_period = step % period;
    uint64_t kept = in_period <= begin ? 0 : kvf_min_u64(in_period - begin, s->width);
    return step / period * s->width + kept;
}

bool kvf_walk_next(kvf_walk *walk, kvf_walk_piece *piece) {
    KVF_ASSERT(walk->local.kernel_steps > 0 && walk->remote.kernel_steps > 0);
    uint64_t step = walk->at;
    for (;;) {
        uint64_t local = first_kept(&walk->local, step);
        uint64_t both = first_kept(&walk->remote, local);
        if (both >= walk->end) {
            walk->at = walk->end;
            return false;
        }
        step = both;
        if (both == local)
            break;
    }
    piece->step = step;
    piece->local_position = kvf_walk_position(&walk->local, step);
    piece->remote_position = kvf_walk_position(&walk->remote, step);
    uint64_t steps = kvf_min_u64(contiguous_steps(&walk->local, step, piece->local_position),
                                 contiguous_steps(&walk->remote, step, piece->remote_position));
    piece->steps = (uint32_t)kvf_min_u64(steps, walk->end - step);
    walk->at = step + piece->steps;
    KVF_ASSERT(piece->steps > 0 && walk->at <= walk->end);
    KVF_ASSERT(piece->local_position % walk->local.kernel_steps + piece->steps <= walk->local.kernel_steps);
    KVF_ASSERT(piece->remote_position % walk->remote.kernel_steps + piece->steps <=
               walk->remote.kernel_steps);
    return true;
}

/*
 * a keeps [x, x + wa) modulo pa, b keeps [y, y + wb) modulo pb. Some a-token equals some b-token exactly when
 * a difference of the two intervals, one of x - y - (wb - 1) ... x - y + (wa - 1), is a multiple of gcd(pa,
 * pb). All terms fit in 64 bits for any share: x and y + wb are at most a period, below 2^64.
 */
bool kvf_shares_meet(kvf_token_share a, kvf_token_share b) {
    if (a.count <= 1 || b.count <= 1)
        return true;
    KVF_ASSERT(a.width > 0 && a.index < a.count && b.width > 0 && b.index < b.count);
    uint64_t g = kvf_gcd((uint64_t)a.width * a.count, (uint64_t)b.width * b.count);
    uint64_t first = (uint64_t)a.width * a.index % g;
    uint64_t last = ((uint64_t)b.width * b.index + (b.width - 1)) % g;
    uint64_t to_multiple = last >= first ? last - first : g - (first - last);
    return to_multiple <= (uint64_t)a.width + b.width - 2;
}
