/*
 * The fault harness: engines are real processes that pull from and push to each other. Meanwhile processes are killed,
 * stopped and restarted under the same name; requests are cancelled on either side; messages are lost, repeated, late
 * and overtaken; transport operations fail; peers are slow; and strangers send garbage.
 *
 *   faults [--requests N] [--seed S] [--round N] [--limit SECONDS] [--transport KIND] [--way WAY]
 *         [--from ROUND] [--verbose 1] [--gentle 1] [--devices 1]
 *
 * Whatever happens: every ticket of a living process has one result by its deadline (plus some patience) and gives its
 * blocks back once; a request that is DONE has every byte, then and for as long as its engine keeps it; a FAILED event
 * names the right blocks; nothing is left at the end; a process that was not killed lives; and once the faults are over
 * every request succeeds. Requests come in rounds with different settings, each of which follows from the seed and the
 * number of the round: with --from, the rounds before it are left out.
 *
 * With --devices 1 the caches are in memory of devices: of the stand-in for the CUDA driver, or of a real driver,
 * whichever the loader finds (worker_devices.h).
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <kvferry/agent.h>

#include "sanitized.h"
#include "traffic.h"
#include "vandal.h"
#include "worker_devices.h"

#define MS 1000000ull
#define SECOND 1000000000ull
#define MOST_WORDS 40u /* number of complaints that are printed */
#define MOST_MEMORY (16u << 20)
#define MOST_GROWTH (64u << 20)
#define MOST_GROWTH_REAL (256u << 20) /* a real driver takes memory when it first runs something */
#define MOST_DESCRIPTORS 400u

/* A connection that ends in the middle of a ZeroMQ handshake costs libzmq some bytes in its own thread. */
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void); /* NOLINT */
const char *__lsan_default_suppressions(void) {                                       /* NOLINT */
    return "leak:libzmq\n";
}

typedef struct run {
    uint64_t seed;
    uint32_t requests, per_round, limit_s, intensity;
    bool verbose;          /* prints every failure of a request */
    bool gentle;           /* stops no process in the middle of a write */
    bool devices;          /* the caches are in device memory */
    const char *transport; /* NULL: "shm", "messages" or "auto" */
    int way;               /* -1: some rounds packed, some direct, some as it is chosen */
    chance chance;
    crew crew;
    traffic traffic;
    vandal vandal;
    traffic_counts counts;
    uint64_t kills, stops, stops_avoided, starts, quits, slows, attacks;
    uint64_t mail[MAIL_FAULTS], fabric_faults, leases_expired, peers_lost, peers_evicted, stale, repeated;
    uint64_t most_memory, most_resident_growth;
    uint32_t most_descriptors;
    uint64_t last_work;
    uint32_t wrong, round, calm_failures, stalls;
    uint32_t told; /* the last round whose workers' logs were printed, and 1 */
} run;

/* ---- what is wrong --------------------------------------------------------------------------- */

/* The last lines that the agents of a round have logged, as far as they live. */
static void print_logs(const run *r) {
    for (uint32_t e = 0; e < CONTENT_ENGINES && r->crew.windows; e++)
        for (uint32_t i = 0; i < r->crew.engines[e].rank_count; i++) {
            const worker_window *window = r->crew.engines[e].members[i].window;
            const uint32_t lines = atomic_load(&window->lines);
            for (uint32_t l = lines > WORKER_LINES ? lines - WORKER_LINES : 0; l < lines; l++)
                (void)printf("  log of %s rank %u: %s\n", content_engine_name(e), i,
                             window->line[l % WORKER_LINES]);
        }
}

static void on_wrong(void *context, const char *words) {
    run *r = context;
    if (r->wrong++ < MOST_WORDS)
        (void)printf("WRONG (round %u): %s\n", r->round, words);
    if (r->told < r->round + 1)
        print_logs(r);
    r->told = r->round + 1;
    (void)fflush(stdout);
}

static void on_report(void *context, uint32_t engine, uint32_t rank, const report *what) {
    traffic_report(&((run *)context)->traffic, engine, rank, what);
}

static void on_engine(void *context, uint32_t engine, bool up) {
    traffic_engine(&((run *)context)->traffic, engine, up);
}

static void on_alarm(int signal) {
    static const char words[] = "WRONG: the harness has not ended in its time\n";
    (void)signal;
    if (write(STDOUT_FILENO, words, sizeof words - 1) < 0)
        _exit(3);
    _exit(2); /* the workers end with the driver */
}

/* ---- a round --------------------------------------------------------------------------------- */

static const char *const ways[] = {"auto", "direct", "packed"};

/* Memory is read directly in some rounds, and packed over another fabric in the others. There is no faulty fabric, since
 * it does not support withheld memory. Times are longer, because the stand-in is slower than a device, and processes
 * take turns on a real one. */
static void place_on_devices(run *r) {
    worker_setting *s = &r->crew.setting;
    s->on_devices = true;
    s->faulty_fabric = false;
    s->lease_ns = (SANITIZED || worker_devices_are_real() ? 1500 : 600) * MS;
    s->peer_timeout_ns = s->lease_ns * 2 / 3;
    s->shown = r->way < 0 && chance_per_mille(&r->chance, 500);
    if (r->way < 0 && s->way == KVF_WAY_DIRECT)
        s->way = KVF_WAY_AUTO; /* what is withheld does not go direct */
    if (!s->shown)
        return;
    s->way = KVF_WAY_AUTO;
    (void)snprintf(s->transport, sizeof s->transport, "%s",
                   chance_per_mille(&r->chance, 500) ? "cuda" : "auto");
}

/* Each way in any four rounds, and each with and without what every other round has. */
static kvf_way way_of_round(uint32_t round) {
    static const kvf_way turns[] = {KVF_WAY_PACKED, KVF_WAY_DIRECT, KVF_WAY_PACKED, KVF_WAY_AUTO};
    return turns[(round + round / 4) % 4];
}

static void choose_setting(run *r) {
    worker_setting *s = &r->crew.setting;
    chance *dice = &r->chance;
    *s = (worker_setting){.seed = chance_draw(dice),
                          .model = (uint32_t[]){0, 0, 1, 2, 3}[chance_between(dice, 0, 4)],
                          .verify = r->round % 2,
                          .encrypted = chance_per_mille(dice, 250),
                          .faulty_fabric = chance_per_mille(dice, 500),
                          .own_thread = chance_per_mille(dice, 250),
                          .policy = chance_per_mille(dice, 500) ? KVF_FAILURE_FAIL : KVF_FAILURE_RECOMPUTE,
                          .lease_ns = 300 * MS,
                          .heartbeat_ns = 50 * MS,
                          .peer_timeout_ns = 200 * MS,
                          .idle_ns = 1500 * MS};
    static const char *const kinds[] = {"auto", "auto", "auto", "messages", "messages",
                                        "shm",  "shm",  "shm",  "shm"};
    const char *kind = kinds[chance_between(dice, 0, sizeof kinds / sizeof *kinds - 1)];
    (void)snprintf(s->transport, sizeof s->transport, "%s", r->transport ? r->transport : kind);
    uint32_t level = chance_between(dice, 0, 3);
    s->mail = (mail_options){.late_ms = chance_between(dice, 1, 300)};
    for (int i = 0; i < MAIL_FAULTS; i++)
        s->mail.per_mille[i] = (uint32_t[]){0, 15, 30, 90}[level];
    /* Late by a few rounds of a worker, or by so many that requests end meanwhile. */
    s->fabric = (faulty_options){.turns = (uint32_t[]){30, 1000, 10000}[chance_between(dice, 0, 2)]};
    for (int i = 0; i < FAULTY_FAULTS; i++)
        s->fabric.per_mille[i] = chance_between(dice, 0, 15);
    s->fabric.per_mille[FAULTY_LATE_START] = s->fabric.per_mille[FAULTY_LATE_END] =
        chance_between(dice, 50, 300);
    s->fabric.per_mille[FAULTY_DEAF] = chance_between(dice, 0, 200);
    s->way = r->way >= 0 ? (kvf_way)r->way : way_of_round(r->round);
    r->intensity = (uint32_t[]){300, 1000, 1500}[chance_between(dice, 0, 2)];
    if (SANITIZED)
        s->lease_ns = 600 * MS;
    if (r->devices)
        place_on_devices(r);
    (void)printf("round %u: model %u, %s %s, %s, %s, %s, %s, %smessages %u in 1000 of each kind\n", r->round,
                 s->model, s->transport, ways[s->way], s->verify ? "verified" : "not verified",
                 s->encrypted ? "encrypted" : "plain", s->faulty_fabric ? "faulty fabric" : "good fabric",
                 s->own_thread ? "own threads" : "no threads",
                 !s->on_devices ? ""
                 : s->shown     ? "on devices, "
                                : "on devices, withheld, ",
                 s->mail.per_mille[0]);
    (void)fflush(stdout);
}

#define STALL (500 * MS)

/* A request is not overdue because the machine itself stood still for a while. */
static void excuse_stalls(run *r) {
    uint64_t now = crew_now(), gap = r->last_work ? now - r->last_work : 0;
    r->last_work = now;
    if (gap < STALL)
        return;
    r->stalls++;
    for (uint32_t e = 0; e < CONTENT_ENGINES; e++)
        for (uint32_t i = 0; i < CREW_RANKS; i++)
            r->crew.engines[e].members[i].stopped_ns += gap;
}

static void work(run *r, int wait_ms) {
    excuse_stalls(r);
    crew_work(&r->crew, wait_ms);
    traffic_work(&r->traffic);
    vandal_leave(&r->vandal, crew_now());
}

static void spoil_something(run *r) {
    chance *dice = &r->chance;
    uint32_t engine = chance_between(dice, 0, CONTENT_ENGINES - 1);
    uint32_t rank = chance_between(dice, 0, r->crew.engines[engine].rank_count - 1);
    uint32_t what = chance_between(dice, 0, 999) * 1000 / r->intensity;
    if (what < 20) {
        crew_kill(&r->crew, engine, rank, dice);
    } else if (what < 90) {
        uint32_t lease_ms = (uint32_t)(r->crew.setting.lease_ns / MS);
        (void)crew_stop(&r->crew, engine, rank,
                        chance_per_mille(dice, 500) ? chance_between(dice, 1, lease_ms / 2)
                                                    : chance_between(dice, lease_ms, 3 * lease_ms));
    } else if (what < 130) {
        order o = {.kind = ORDER_SLOW};
        o.slow.total_ms = chance_between(dice, 20, 600);
        o.slow.sleep_us = chance_between(dice, 1000, 60000);
        crew_send(&r->crew, engine, rank, &o);
        r->slows++;
    } else if (what < 190) {
        vandal_attack(&r->vandal, r->crew.engines[engine].members[rank].opened.open.endpoint, dice);
    }
}

static bool wait_until(run *r, bool (*condition)(run *), uint64_t patience_ns, const char *what) {
    for (uint64_t end = crew_now() + patience_ns; !condition(r);) {
        if (crew_now() > end) {
            on_wrong(r, what);
            return false;
        }
        work(r, 5);
    }
    return true;
}

static bool is_up(run *r) {
    return crew_up(&r->crew);
}

static bool is_idle(run *r) {
    return r->traffic.part_count == 0 && crew_up(&r->crew);
}

static bool is_gone(run *r) {
    return crew_gone(&r->crew);
}

static bool has_looked(run *r) {
    for (uint32_t e = 0; e < CONTENT_ENGINES; e++)
        for (uint32_t i = 0; i < r->crew.engines[e].rank_count; i++)
            if (!r->crew.engines[e].members[i].has_looked)
                return false;
    return true;
}

static bool look(run *r) {
    const order o = {.kind = ORDER_LOOK};
    for (uint32_t e = 0; e < CONTENT_ENGINES; e++) {
        for (uint32_t i = 0; i < r->crew.engines[e].rank_count; i++)
            r->crew.engines[e].members[i].has_looked = false;
        crew_send_all(&r->crew, e, &o);
    }
    return wait_until(r, has_looked, 10 * SECOND, "a worker does not report");
}

/* Nothing may be left of any request. `words` receives what is left. */
static bool is_clean(const crew_member *m, char *words, size_t bytes) {
    const kvf_agent_stats *s = &m->looked.look.stats;
    uint64_t requests = 0;
    for (int i = 0; i < 6; i++)
        requests += s->requests_now[i];
    (void)snprintf(
        words, bytes,
        "left at the end: %llu requests, %llu leases, blocks: %llu held, %llu filling, %llu in doubt",
        (unsigned long long)requests, (unsigned long long)s->leases_now,
        (unsigned long long)s->blocks_held_now, (unsigned long long)s->blocks_filling_now,
        (unsigned long long)s->blocks_in_doubt_now);
    return requests + s->leases_now + s->blocks_held_now + s->blocks_filling_now + s->blocks_in_doubt_now ==
           0;
}

static void check_clean(run *r) {
    char words[300] = "";
    for (uint64_t end = crew_now() + 3 * SECOND;;) {
        bool clean = look(r);
        for (uint32_t e = 0; e < CONTENT_ENGINES; e++)
            for (uint32_t i = 0; i < r->crew.engines[e].rank_count && clean; i++)
                clean = is_clean(&r->crew.engines[e].members[i], words, sizeof words);
        if (clean)
            return;
        if (crew_now() > end)
            break;
        work(r, 20);
    }
    on_wrong(r, words);
}

static void add_looks(run *r) {
    const uint64_t most_growth = worker_devices_are_real() ? MOST_GROWTH_REAL : MOST_GROWTH;
    for (uint32_t e = 0; e < CONTENT_ENGINES; e++) {
        for (uint32_t i = 0; i < r->crew.engines[e].rank_count; i++) {
            const crew_member *m = &r->crew.engines[e].members[i];
            const kvf_agent_stats *s = &m->looked.look.stats;
            for (int k = 0; k < MAIL_FAULTS; k++)
                r->mail[k] += m->looked.look.tampered[k];
            r->fabric_faults += m->looked.look.fabric_faults;
            r->leases_expired += s->leases_expired;
            r->peers_lost += s->peers_lost;
            r->peers_evicted += s->peers_evicted;
            r->stale += s->messages_stale;
            r->repeated += s->messages_repeated;
            if (s->memory_now_bytes > r->most_memory)
                r->most_memory = s->memory_now_bytes;
            uint64_t growth = m->looked.look.resident_bytes - m->first_resident_bytes;
            if (m->looked.look.resident_bytes > m->first_resident_bytes && growth > r->most_resident_growth)
                r->most_resident_growth = growth;
            if (m->looked.look.descriptors > r->most_descriptors)
                r->most_descriptors = m->looked.look.descriptors;
            if (m->looked.look.descriptors > MOST_DESCRIPTORS)
                on_wrong(r, "a worker has too many descriptors open");
            if (growth > most_growth && m->looked.look.resident_bytes > m->first_resident_bytes && !SANITIZED)
                on_wrong(r, "a worker grows");
            if (s->memory_now_bytes > MOST_MEMORY)
                on_wrong(r, "an agent keeps too much for its peers");
            if (s->checksums_wrong > 0)
                on_wrong(r, "checksums were wrong");
        }
    }
}

/* On a busy machine a lease may run out through no fault of the agents. An attempt in which a worker had to wait for a
 * processor for a third of a lease says nothing; but such attempts have an end. */
#define CALM_ATTEMPTS 3
#define SLOW_ATTEMPTS 10

/* The longest round of a worker since this was last called. */
static uint64_t take_slowest(run *r) {
    uint64_t slowest = 0;
    for (uint32_t i = 0; i < CONTENT_ENGINES * CREW_RANKS; i++) {
        const uint64_t took = atomic_exchange(&r->crew.windows[i].slowest_ns, 0);
        slowest = took > slowest ? took : slowest;
    }
    return slowest;
}

static bool launch_calm(run *r) {
    r->traffic.calm_failures = 0;
    for (uint64_t end = crew_now() + 6 * r->crew.setting.lease_ns; crew_now() < end;)
        work(r, 5);
    for (int launched = 0; launched < 10; work(r, 1))
        launched += traffic_launch(&r->traffic);
    return wait_until(r, is_idle, 40 * SECOND, "requests do not end though nothing is wrong");
}

/* However slow the machine is, wrong bytes are wrong: add_looks() reports them. */
static bool has_wrong_bytes(run *r) {
    uint64_t wrong = 0;
    (void)look(r);
    for (uint32_t e = 0; e < CONTENT_ENGINES; e++)
        for (uint32_t i = 0; i < r->crew.engines[e].rank_count; i++)
            wrong += r->crew.engines[e].members[i].looked.look.stats.checksums_wrong;
    return wrong > 0;
}

/* Once the faults are over, everything must work again. Leases of requests on devices are longer. */
static void be_calm(run *r) {
    const order o = {.kind = ORDER_CALM};
    if (!wait_until(r, is_idle, (r->devices ? 40 : 20) * SECOND, "requests do not end"))
        return;
    for (uint32_t e = 0; e < CONTENT_ENGINES; e++)
        crew_send_all(&r->crew, e, &o);
    vandal_leave(&r->vandal, UINT64_MAX);
    r->traffic.calm = true;
    for (int failed = 0, slow = 0; failed < CALM_ATTEMPTS && slow < SLOW_ATTEMPTS;) {
        (void)take_slowest(r);
        if (!launch_calm(r) || !r->traffic.calm_failures || has_wrong_bytes(r))
            break;
        const uint64_t slowest = take_slowest(r);
        const bool was_slow = slowest > r->crew.setting.lease_ns / 3;
        r->calm_failures++;
        slow += was_slow;
        failed += !was_slow;
        (void)printf("though calm: %s; the longest round of a worker took %llu ms%s\n", r->traffic.calm_words,
                     (unsigned long long)(slowest / MS), was_slow ? ": the machine is slow" : "");
        if (failed == CALM_ATTEMPTS || slow == SLOW_ATTEMPTS)
            on_wrong(r, r->traffic.calm_words);
    }
    check_clean(r);
    add_looks(r);
}

static void make_trouble(run *r, uint32_t requests) {
    uint32_t most = chance_between(&r->chance, 10, 60);
    for (uint32_t launched = 0; launched < requests; work(r, 1)) {
        for (int i = 0; i < 4 && launched < requests && r->traffic.part_count < most; i++) {
            if (!traffic_launch(&r->traffic))
                break;
            launched++;
            spoil_something(r);
        }
    }
}

static void add_counts(run *r) {
    uint64_t *to = (uint64_t *)&r->counts;
    const uint64_t *from = (const uint64_t *)&r->traffic.counts;
    uint64_t result = r->counts.latest_result_ns, free_ns = r->counts.latest_free_ns;
    for (size_t i = 0; i < sizeof r->counts / sizeof *to; i++)
        to[i] += from[i];
    const traffic_counts *c = &r->traffic.counts;
    r->counts.latest_result_ns = result > c->latest_result_ns ? result : c->latest_result_ns;
    r->counts.latest_free_ns = free_ns > c->latest_free_ns ? free_ns : c->latest_free_ns;
    r->kills += r->crew.kills;
    r->stops += r->crew.stops;
    r->stops_avoided += r->crew.stops_avoided;
    r->starts += r->crew.starts;
    r->quits += r->crew.quits;
}

static void run_round(run *r, uint32_t requests) {
    r->chance.state = chance_mix(chance_mix(r->seed) + r->round);
    memset(&r->crew, 0, sizeof r->crew);
    memset(&r->traffic, 0, sizeof r->traffic);
    r->crew.gentle = r->gentle;
    r->crew.on_report = on_report;
    r->crew.on_engine = on_engine;
    r->crew.on_wrong = r->traffic.on_wrong = on_wrong;
    r->crew.context = r->traffic.context = r;
    choose_setting(r);
    r->traffic.crew = &r->crew;
    r->traffic.chance.state = chance_draw(&r->chance);
    r->traffic.verbose = r->verbose;
    r->traffic.lease_ns = r->crew.setting.lease_ns;
    r->traffic.patience_ns = (SANITIZED ? 8 : 4) * SECOND * (r->devices ? 3 : 1); /* leases are longer */
    bool open = traffic_open(&r->traffic) && crew_open(&r->crew);
    if (!open)
        on_wrong(r, "the engines cannot be started");
    if (open && wait_until(r, is_up, 30 * SECOND, "the engines do not come up")) {
        (void)look(r);
        make_trouble(r, requests);
        be_calm(r);
        crew_quit(&r->crew);
        (void)wait_until(r, is_gone, 20 * SECOND, "the workers do not end");
    }
    add_counts(r);
    traffic_close(&r->traffic);
    crew_close(&r->crew);
    vandal_leave(&r->vandal, UINT64_MAX);
}

/* ---- the end --------------------------------------------------------------------------------- */

static void print_counts(const run *r, uint64_t ns) {
    static const char *const kinds[] = {"", "holds", "pulls", "pushes", "expects", "meetings"};
    const traffic_counts *c = &r->counts;
    (void)printf("requests %llu in %.1f s, as %llu parts of engines (%llu of engines that were lost), %llu "
                 "second turns, %.1f MB arrived\n",
                 (unsigned long long)c->requests, (double)ns / 1e9, (unsigned long long)c->parts,
                 (unsigned long long)c->dropped, (unsigned long long)c->second_turns, (double)c->bytes / 1e6);
    for (int k = 1; k < 6; k++)
        (void)printf("%-8s per rank: %llu done, %llu failed\n", kinds[k], (unsigned long long)c->done[k],
                     (unsigned long long)c->failed[k]);
    for (uint32_t s = 1; s < TRAFFIC_STATUSES; s++)
        if (c->failed_by_status[s])
            (void)printf("failed with %s: %llu\n", kvf_status_name((kvf_status)s),
                         (unsigned long long)c->failed_by_status[s]);
    (void)printf(
        "faults: %llu killed, %llu restarted, %llu quit, %llu stopped (%llu times not, amid a write), "
        "%llu slow, %llu cancelled, %llu strangers\n",
        (unsigned long long)r->kills, (unsigned long long)r->starts, (unsigned long long)r->quits,
        (unsigned long long)r->stops, (unsigned long long)r->stops_avoided, (unsigned long long)r->slows,
        (unsigned long long)c->cancelled, (unsigned long long)r->vandal.attacks);
    (void)printf(
        "of those who lived to the end: messages lost %llu, repeated %llu, late %llu, overtaken %llu; "
        "operations spoilt %llu; leases expired %llu, peers lost %llu, evicted %llu; messages stale "
        "%llu, sent again %llu\n",
        (unsigned long long)r->mail[MAIL_LOST], (unsigned long long)r->mail[MAIL_REPEATED],
        (unsigned long long)r->mail[MAIL_LATE], (unsigned long long)r->mail[MAIL_OVERTAKEN],
        (unsigned long long)r->fabric_faults, (unsigned long long)r->leases_expired,
        (unsigned long long)r->peers_lost, (unsigned long long)r->peers_evicted, (unsigned long long)r->stale,
        (unsigned long long)r->repeated);
    (void)printf(
        "failed with blocks in doubt %llu, computed anew %llu; latest result %.1f ms after its deadline, "
        "latest blocks %.1f ms after their result; memory for peers at most %llu KiB, process growth at "
        "most %llu KiB, descriptors at most %u; failed though calm: %u times; this process stood still: %u "
        "times\n",
        (unsigned long long)c->in_doubt, (unsigned long long)c->refilled, (double)c->latest_result_ns / 1e6,
        (double)c->latest_free_ns / 1e6, (unsigned long long)r->most_memory >> 10,
        (unsigned long long)r->most_resident_growth >> 10, r->most_descriptors, r->calm_failures, r->stalls);
}

static bool take_number(const char *name, const char *text, uint64_t *out) {
    char *end = NULL;
    *out = text ? strtoull(text, &end, 0) : 0;
    if (text && *text != '\0' && *end == '\0')
        return true;
    (void)fprintf(stderr, "faults: %s needs a number\n", name);
    return false;
}

static bool take_options(run *r, int argc, char **argv) {
    for (int i = 1; i < argc; i += 2) {
        uint64_t number;
        if (strcmp(argv[i], "--transport") == 0 && i + 1 < argc) {
            r->transport = argv[i + 1];
            continue;
        }
        if (strcmp(argv[i], "--way") == 0 && i + 1 < argc) {
            for (r->way = KVF_WAY_PACKED; r->way >= 0 && strcmp(argv[i + 1], ways[r->way]) != 0; r->way--)
                continue;
            if (r->way >= 0)
                continue;
            (void)fprintf(stderr, "faults: --way is auto, direct or packed\n");
            return false;
        }
        if (!take_number(argv[i], i + 1 < argc ? argv[i + 1] : NULL, &number))
            return false;
        if (strcmp(argv[i], "--requests") == 0)
            r->requests = (uint32_t)number;
        else if (strcmp(argv[i], "--seed") == 0)
            r->seed = number;
        else if (strcmp(argv[i], "--round") == 0)
            r->per_round = (uint32_t)number;
        else if (strcmp(argv[i], "--from") == 0)
            r->round = (uint32_t)number;
        else if (strcmp(argv[i], "--limit") == 0)
            r->limit_s = (uint32_t)number;
        else if (strcmp(argv[i], "--verbose") == 0)
            r->verbose = number > 0;
        else if (strcmp(argv[i], "--gentle") == 0)
            r->gentle = number > 0;
        else if (strcmp(argv[i], "--devices") == 0)
            r->devices = number > 0;
        else {
            (void)fprintf(stderr, "usage: faults [--requests N] [--seed S] [--round N] [--limit SECONDS] "
                                  "[--transport KIND] [--way WAY] [--from ROUND] [--verbose 1] [--gentle 1] "
                                  "[--devices 1]\n");
            return false;
        }
    }
    return r->requests > 0 && r->per_round > 0;
}

int main(int argc, char **argv) {
    static run r = {.requests = 200, .per_round = 50, .way = -1};
    r.seed = crew_now();
    if (!take_options(&r, argc, argv))
        return 2;
    if (r.devices && !worker_devices_there()) {
        (void)printf("skipped: no device code in this build, or neither a driver nor a stand-in for one\n");
        return 77;
    }
    if (!r.limit_s)
        r.limit_s = 240 + r.requests / 4;
    (void)setvbuf(stdout, NULL, _IOLBF, 0); /* a run that is ended has said its seed, to a file, too */
    (void)signal(SIGALRM, on_alarm);
    (void)alarm(r.limit_s);
    (void)printf("faults: seed %llu\n", (unsigned long long)r.seed);
    uint64_t start = crew_now();
    const uint32_t first = r.round;
    for (uint32_t left = r.requests; left > 0 && r.wrong < MOST_WORDS; r.round++) {
        uint32_t requests = left < r.per_round ? left : r.per_round;
        run_round(&r, requests);
        left -= requests;
    }
    print_counts(&r, crew_now() - start);
    if (r.wrong)
        (void)printf("%u things are wrong; again: faults --requests %u --round %u --seed %llu --from %u\n",
                     r.wrong, r.requests, r.per_round, (unsigned long long)r.seed, first);
    (void)printf("%s\n", r.wrong ? "FAILED" : "passed");
    return r.wrong ? 1 : 0;
}
