#include "stage/kept.h"

static bool same_share(kvf_token_share a, kvf_token_share b) {
    return a.count == b.count && a.width == b.width && a.index == b.index;
}

/* One stretch of `steps` positions from `first` on, in a period of `positions`. */
static kvf_status one_stretch(uint64_t positions, uint64_t first, uint64_t steps, kvf_kept *out) {
    out->stretches = kvf_alloc(1, sizeof *out->stretches);
    if (!out->stretches)
        return kvf_nomem("token shares");
    out->stretches[0] = (kvf_kept_stretch){first, 0};
    out->count = 1;
    out->positions = positions;
    out->steps = steps;
    return KVF_OK;
}

static void add_stretch(kvf_kept *kept, uint64_t position, uint64_t steps) {
    const kvf_kept_stretch *last = kept->count ? &kept->stretches[kept->count - 1] : NULL;
    if (!last || last->position + (kept->steps - last->before) != position)
        kept->stretches[kept->count++] = (kvf_kept_stretch){position, kept->steps};
    kept->steps += steps;
}

/* Both ranks share tokens: walk one period to find the common steps. */
static kvf_status many_stretches(kvf_token_share own, kvf_token_share other, uint32_t tokens_per_step,
                                 kvf_kept *out) {
    const uint64_t own_period = (uint64_t)own.width * own.count;
    const uint64_t other_period = (uint64_t)other.width * other.count;
    const uint64_t divisor = kvf_gcd(own_period, other_period);
    uint64_t period, turns = other_period / divisor + own_period / divisor; /* ours and theirs */
    if (turns > KVF_KEPT_MAX_STRETCHES || !kvf_mul(own_period, other_period / divisor, &period))
        return kvf_fail(
            KVF_E_LIMIT,
            "tokens are shared by %u in turns of %llu locally and by %u in turns of %llu remotely; "
            "together these repeat after %llu turns; allowed: up to %u",
            own.count, (unsigned long long)own.width * tokens_per_step, other.count,
            (unsigned long long)other.width * tokens_per_step, (unsigned long long)turns,
            KVF_KEPT_MAX_STRETCHES);
    out->stretches = kvf_alloc(turns, sizeof *out->stretches);
    if (!out->stretches)
        return kvf_nomem("token shares");
    out->positions = other_period / divisor * own.width;
    /* With the longest possible blocks, pieces end at the end of a turn, and rarely elsewhere. */
    kvf_walk walk = {{UINT32_MAX, own}, {UINT32_MAX, other}, 0, period};
    kvf_walk_piece piece;
    while (kvf_walk_next(&walk, &piece))
        add_stretch(out, piece.local_position, piece.steps);
    KVF_ASSERT(out->count <= turns && out->steps <= out->positions);
    return KVF_OK;
}

kvf_status kvf_kept_make(kvf_token_share own, kvf_token_share other, uint32_t tokens_per_step,
                         kvf_kept *out) {
    *out = (kvf_kept){.own = own};
    if (other.count == 1 || same_share(own, other))
        return one_stretch(1, 0, 1, out);
    if (own.count == 1)
        return one_stretch((uint64_t)other.width * other.count, (uint64_t)other.width * other.index,
                           other.width, out);
    return many_stretches(own, other, tokens_per_step, out);
}

void kvf_kept_free(kvf_kept *kept) {
    kvf_free(kept->stretches);
    *kept = (kvf_kept){.positions = 0};
}

/* Common steps of stretch `i`. */
static uint64_t steps_of(const kvf_kept *kept, uint32_t i) {
    return (i + 1 < kept->count ? kept->stretches[i + 1].before : kept->steps) - kept->stretches[i].before;
}

uint64_t kvf_kept_before(const kvf_kept *kept, uint64_t position) {
    if (kept->steps == kept->positions)
        return position;
    const uint64_t in_period = position % kept->positions;
    uint32_t low = 0, high = kept->count; /* how many stretches begin before it */
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (kept->stretches[middle].position < in_period)
            low = middle + 1;
        else
            high = middle;
    }
    uint64_t before = position / kept->positions * kept->steps;
    if (low > 0) {
        const kvf_kept_stretch *last = &kept->stretches[low - 1];
        before += last->before + kvf_min_u64(in_period - last->position, steps_of(kept, low - 1));
    }
    return before;
}

kvf_kept_place kvf_kept_find(const kvf_kept *kept, uint64_t i) {
    KVF_ASSERT(kept->steps > 0);
    if (kept->steps == kept->positions)
        return (kvf_kept_place){i, UINT64_MAX};
    const uint64_t in_period = i % kept->steps;
    uint32_t low = 0, high = kept->count; /* the last stretch that begins at or before it */
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        if (kept->stretches[middle].before <= in_period)
            low = middle;
        else
            high = middle;
    }
    const kvf_kept_stretch *at = &kept->stretches[low];
    const uint64_t inside = in_period - at->before;
    return (kvf_kept_place){i / kept->steps * kept->positions + at->position + inside,
                            steps_of(kept, low) - inside};
}

/* ---- counting --------------------------------------------------------------------------------- */

__extension__ typedef unsigned __int128 wide;

/* The sum of (a*k + b) / m, rounded down, over k below n. Each step of Euclid's algorithm counts the points below a
 * line from the other axis. */
static wide floor_sum(wide n, wide m, wide a, wide b) {
    wide sum = 0;
    while (n > 0) {
        sum += n * (n - 1) / 2 * (a / m) + n * (b / m);
        a %= m;
        b %= m;
        const wide last = a * n + b;
        n = last / m;
        b = last % m;
        const wide swap = m;
        m = a;
        a = swap;
    }
    return sum;
}

/* How many multiples of `tokens` are in both ranges, not counting the first position of their intersection. */
static uint64_t multiples(uint64_t begin, uint64_t end, uint64_t from, uint64_t to, uint64_t tokens) {
    begin = kvf_max_u64(begin, from);
    end = kvf_min_u64(end, to);
    return begin < end ? (end - 1) / tokens - begin / tokens : 0;
}

uint64_t kvf_kept_edges(const kvf_kept *kept, uint64_t first, uint64_t steps, uint64_t tokens) {
    if (steps == 0)
        return 0;
    const uint64_t from = kvf_kept_find(kept, first).position;
    const uint64_t to = kvf_kept_find(kept, first + steps - 1).position + 1;
    if (kept->steps == kept->positions)
        return multiples(from, to, from, to, tokens);
    const uint64_t period = kept->positions, begin = from / period, last = (to - 1) / period;
    wide edges = 0;
    for (uint32_t i = 0; i < kept->count; i++) { /* the edges in the first period, in the last, and between */
        const uint64_t at = kept->stretches[i].position, end = at + steps_of(kept, i);
        edges += multiples(begin * period + at, begin * period + end, from, to, tokens);
        if (last > begin)
            edges += multiples(last * period + at, last * period + end, from, to, tokens);
        if (last > begin + 1)
            edges += floor_sum(last - begin - 1, tokens, period, (begin + 1) * period + end - 1) -
                     floor_sum(last - begin - 1, tokens, period, (begin + 1) * period + at);
    }
    const kvf_kept_stretch *end = &kept->stretches[kept->count - 1];
    if (kept->stretches[0].position == 0 && end->position + (kept->steps - end->before) == period) {
        const uint64_t turns =
            tokens / kvf_gcd(tokens, period); /* a period begins at a multiple this often */
        edges += last / turns - begin / turns;
    }
    return (uint64_t)edges;
}
