#include "transport/shm/shm_choice.h"

#define SERVED_BYTES_MIN (64u << 10) /* for less the owner need not be woken */
#define FIRST_BYTES (64u << 10)      /* asked of an owner that may be asleep */
#define ASLEEP_NS 500000000u         /* an owner without an answer for this long may be asleep */
#define LOOK_NS 10000u               /* we read at least this long between two looks for answers ... */
#define LATE_NS 200000u              /* an answer is late after this, where reads are slow */
#define LOOK_SHARE 4u                /* ... and this fraction of the time that we have waited for the owner */
#define WHOLE_BYTES_MAX (256u << 10) /* a shorter run is read whole: its rest would be a request of its own */
#define TRY_BYTES (512u << 20)       /* after these the unused way is tried, to measure it; ... */
#define TRY_FIRST_BYTES (64u << 20)  /* ... if it was never measured */
#define MEASURE_NS 1000000u          /* length of a measurement */
#define CLEARLY 0.9f                 /* better: a way with at most this share of the other's cost */
#define LEARN_BYTES_MIN 1024u
#define WINDOW_MAX 7u
/* A way that cannot be better is not tried: reads alone are at most this much faster. */
#define SLOWER 3.0f
/* Measurements of one try: enough to move the median. */
#define TRIES (SHM_MEASUREMENTS / 2 + 1)

static uint64_t mean_run(const kvf_slice *slice) {
    return slice->bytes / (slice->count ? slice->count : 1);
}

static uint32_t length_class(const kvf_slice *slice) {
    uint64_t bytes = mean_run(slice) / 64;
    uint32_t size_class = 0;
    while (bytes > 0 && size_class < SHM_LENGTHS - 1) {
        bytes /= 2;
        size_class++;
    }
    return size_class;
}

/* Until a cost is measured: a system call finds each run's pages, a copy misses the caches. */
static float cost(const kvf_shm_choice *choice, uint32_t size_class, kvf_shm_way way) {
    float measured = choice->lengths[size_class].ways[way].median;
    float run_bytes = (float)(48u << size_class);
    if (measured > 0)
        return measured;
    return way == SHM_WAY_DIRECT ? 250 / run_bytes + 0.15f : 30 / run_bytes + 0.1f;
}

/* The cost of a read, also while the owner works. */
static float reading(const kvf_shm_choice *choice, uint32_t size_class) {
    float measured = choice->lengths[size_class].reads.median;
    return measured > 0 ? measured : cost(choice, size_class, SHM_WAY_DIRECT);
}

static kvf_shm_way other(kvf_shm_way way) {
    return way == SHM_WAY_DIRECT ? SHM_WAY_SERVED : SHM_WAY_DIRECT;
}

static kvf_shm_way better_way(const kvf_shm_choice *choice, uint32_t size_class) {
    kvf_shm_way before = choice->lengths[size_class].better;
    bool changed = cost(choice, size_class, other(before)) < CLEARLY * cost(choice, size_class, before);
    return changed ? other(before) : before;
}

static bool is_due(const kvf_shm_choice *choice, uint32_t size_class, kvf_shm_way way) {
    if (way == SHM_WAY_DIRECT &&
        reading(choice, size_class) > SLOWER * cost(choice, size_class, SHM_WAY_SERVED))
        return false;
    bool known = choice->lengths[size_class].ways[way].measured > 0;
    return choice->lengths[size_class].tries[way] > 0 ||
           choice->lengths[size_class].unused_bytes[way] > (known ? TRY_BYTES : TRY_FIRST_BYTES);
}

static bool should_ask(const kvf_shm_choice *choice, uint32_t size_class) {
    kvf_shm_way way = better_way(choice, size_class);
    return (is_due(choice, size_class, other(way)) ? other(way) : way) == SHM_WAY_SERVED;
}

/* The step while the owner works. If reads are so slow that they would only keep us from the answers of an owner that
 * is awake, they begin when an answer is late. */
static kvf_shm_step meanwhile(const kvf_shm_choice *choice, const kvf_slice *slice, uint64_t now_ns) {
    uint32_t size_class = length_class(slice);
    float together = cost(choice, size_class, SHM_WAY_SERVED), alone = reading(choice, size_class);
    if (alone > SLOWER * together && choice->window > 0) {
        uint64_t late_ns = choice->since_ns + LATE_NS;
        if (now_ns < late_ns)
            return (kvf_shm_step){SHM_WAY_DIRECT, 0, late_ns};
    }
    float ns = (float)kvf_max_u64(LOOK_NS, (now_ns - choice->since_ns) / LOOK_SHARE);
    float fits = ns / alone;
    uint64_t bytes = fits < SHM_SLOT_BYTES ? (uint64_t)fits + 1 : SHM_SLOT_BYTES, run = mean_run(slice);
    return (kvf_shm_step){SHM_WAY_DIRECT, bytes < run && run <= WHOLE_BYTES_MAX ? run : bytes, 0};
}

kvf_shm_step kvf_shm_choice_make(const kvf_shm_choice *choice, const kvf_slice *slice,
                                 const kvf_shm_load *load, uint64_t now_ns) {
    uint32_t size_class = length_class(slice);
    bool asleep = load->waiting == 0 && now_ns - choice->answered_ns > ASLEEP_NS;
    uint32_t window = asleep ? 1 : choice->window + 1;
    window = window < load->slots ? window : load->slots;
    bool enough = load->waiting > 0 || slice->bytes >= SERVED_BYTES_MIN;
    /* Never ask an owner that may be asleep for everything: it gets the time in which we read the rest. */
    uint64_t most = window == 1 ? kvf_min_u64(FIRST_BYTES, slice->bytes / 2) : SHM_SLOT_BYTES;
    if (enough && load->abandoned == 0 && load->waiting < window && should_ask(choice, size_class))
        return (kvf_shm_step){SHM_WAY_SERVED, most, 0};
    if (load->waiting > 0)
        return meanwhile(choice, slice, now_ns);
    return (kvf_shm_step){SHM_WAY_DIRECT, SHM_SLOT_BYTES, 0};
}

/* With too few measurements the previous belief fills the rest, so that a single measurement changes little. */
static void add(kvf_shm_price *price, float believed, float now) {
    float sorted[SHM_MEASUREMENTS] = {0};
    for (uint32_t i = price->measured; i < SHM_MEASUREMENTS; i++)
        price->last[i] = believed;
    price->last[price->measured % SHM_MEASUREMENTS] = now;
    price->measured++;
    for (uint32_t i = 0; i < SHM_MEASUREMENTS; i++) {
        uint32_t at = i;
        for (; at > 0 && sorted[at - 1] > price->last[i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = price->last[i];
    }
    price->median = sorted[SHM_MEASUREMENTS / 2];
}

/* A try goes on while its way looks better: disturbances only make measurements longer, never shorter. */
static void learn(kvf_shm_choice *choice, uint32_t size_class, kvf_shm_way way, float now) {
    uint32_t *tries = &choice->lengths[size_class].tries[way];
    bool promises = now < CLEARLY * cost(choice, size_class, other(way));
    *tries = is_due(choice, size_class, way) && promises ? (*tries + 1) % TRIES : 0;
    add(&choice->lengths[size_class].ways[way], cost(choice, size_class, way), now);
    choice->lengths[size_class].unused_bytes[way] = 0;
    choice->lengths[size_class].better = better_way(choice, size_class);
}

/* The cost of a way is measured over a time in which only this way was used. */
static void count(kvf_shm_choice *choice, const kvf_slice *slice, uint64_t now_ns) {
    uint32_t size_class = length_class(slice);
    choice->lengths[size_class].unused_bytes[SHM_WAY_SERVED] += slice->bytes;
    choice->lengths[size_class].unused_bytes[SHM_WAY_DIRECT] += slice->bytes;
    choice->bytes += slice->bytes;
    bool whole = choice->begin_ns && choice->size_class == size_class;
    if (whole && now_ns - choice->begin_ns < MEASURE_NS)
        return;
    if (whole) {
        learn(choice, size_class, choice->asked ? SHM_WAY_SERVED : SHM_WAY_DIRECT,
              (float)(now_ns - choice->begin_ns) / (float)choice->bytes);
        choice->together = choice->asked;
    }
    choice->begin_ns = now_ns;
    choice->bytes = 0;
    choice->size_class = size_class;
    choice->asked = false;
}

void kvf_shm_choice_read(kvf_shm_choice *choice, const kvf_slice *slice, uint64_t ns, uint64_t now_ns) {
    uint32_t size_class = length_class(slice);
    if (slice->bytes >= LEARN_BYTES_MIN)
        add(&choice->lengths[size_class].reads, reading(choice, size_class), (float)ns / (float)slice->bytes);
    count(choice, slice, now_ns);
}

void kvf_shm_choice_taken(kvf_shm_choice *choice, const kvf_slice *slice, uint64_t now_ns) {
    choice->asked = true;
    count(choice, slice, now_ns);
}

void kvf_shm_choice_idle(kvf_shm_choice *choice) {
    choice->begin_ns = 0;
}

uint64_t kvf_shm_choice_direct_ns(const kvf_shm_choice *choice, const kvf_slice *slice) {
    return (uint64_t)((float)slice->bytes * reading(choice, length_class(slice)));
}

void kvf_shm_choice_asked(kvf_shm_choice *choice, bool waiting, uint64_t now_ns) {
    if (!choice->together)
        choice->begin_ns = 0; /* what we read alone until now does not count in this measurement */
    choice->together = choice->asked = true;
    if (!waiting)
        choice->since_ns = now_ns;
}

void kvf_shm_choice_answered(kvf_shm_choice *choice, bool wanted, uint64_t now_ns) {
    choice->answered_ns = choice->since_ns = now_ns;
    if (wanted && choice->window < WINDOW_MAX)
        choice->window = 2 * choice->window + 1;
}

void kvf_shm_choice_abandoned(kvf_shm_choice *choice) {
    choice->window /= 2;
}
