/*
 * Property test: the library moves requests between random models, engines, layouts and block tables, and the result is
 * compared byte by byte with an oracle that lists the address of every cell by counting.
 *
 *   KVF_SEED    seed of the first case (a number; 0x... is hexadecimal)
 *   KVF_CASES   how many cases; 2000 without it
 *
 * A failure prints the seed of its case: KVF_SEED=SEED KVF_CASES=1 runs it alone. The case is then made smaller while
 * it still fails, and printed as C.
 */
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "build.h"
#include "coverage.h"
#include "random.h"
#include "transfer.h"

enum { DEFAULT_CASES = 2000, SHOWN_FAILURES = 3, CASES_THAT_COVER = 2000 };
#define DEFAULT_SEED 20240607u

static uint64_t seed_of_case;
static uint32_t failed_rank;

static bool run_case(const recipe *r) {
    static world w;
    arena_reset();
    failed_rank = 0;
    if (!world_make(r, &w))
        return true; /* too large: only the shrinker makes such cases */
    note_world(&w);
    built objects;
    bool good = build_objects(r, &w, &objects);
    if (good && objects.refused)
        note(r->engines[LOCAL].by_hand || r->engines[REMOTE].by_hand ? KIND_SHARD_REFUSED
                                                                     : KIND_ENGINE_REFUSED);
    if (good && !objects.refused)
        good = transfer_case(r, &w, &objects, &failed_rank);
    free_objects(r, &objects);
    return good;
}

/* The text of the failure, without its digits. */
static char failure[512];

static void keep_words(const char *text, char *out, size_t bytes) {
    size_t n = 0;
    for (; *text && n + 1 < bytes; text++)
        if (*text < '0' || *text > '9')
            out[n++] = *text;
    out[n] = '\0';
}

/* Whether the case fails with the same text: other failures do not count while shrinking. */
static bool case_fails(const recipe *r) {
    char words[sizeof failure];
    if (run_case(r))
        return false;
    keep_words(what_went_wrong(), words, sizeof words);
    return strcmp(words, failure) == 0;
}

/* ---- failures -------------------------------------------------------------------------------- */

static void show_failure(recipe *r) {
    printf("FAILED: KVF_SEED=0x%" PRIx64 " KVF_CASES=1\n  %s\n", seed_of_case, what_went_wrong());
    (void)fflush(stdout);
    keep_words(what_went_wrong(), failure, sizeof failure);
    uint32_t tries = recipe_shrink(r, case_fails);
    (void)run_case(r);
    printf("shrunk in %" PRIu32 " tries to:\n  local rank %" PRIu32 ": %s\n", tries, failed_rank,
           what_went_wrong());
    recipe_print(stdout, r, failed_rank);
    printf("\n");
    (void)fflush(stdout);
}

/* A case that crashes cannot be shrunk in this process, but its seed can be printed. */
static void say_seed(void) {
    char text[] = "crashed in KVF_SEED=0x0000000000000000 KVF_CASES=1\n";
    char *digits = strchr(text, 'x') + 1;
    for (int i = 0; i < 16; i++)
        digits[i] = "0123456789abcdef"[seed_of_case >> (60 - 4 * i) & 15];
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0)
        return;
}

static void on_crash(int number) {
    say_seed();
    (void)signal(number, SIG_DFL);
    (void)raise(number);
}

/* Sanitizers end the process without a signal. */
// NOLINTNEXTLINE(bugprone-reserved-identifier): the sanitizers define the name
__attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)(void));

static void catch_crashes(void) {
    if (__sanitizer_set_death_callback) {
        __sanitizer_set_death_callback(say_seed);
        return;
    }
    const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        (void)signal(signals[i], on_crash);
}

/* ---- running --------------------------------------------------------------------------------- */

static bool read_number(const char *name, uint64_t otherwise, uint64_t *out) {
    const char *text = getenv(name);
    *out = otherwise;
    if (!text || !*text)
        return true;
    char *end;
    *out = strtoull(text, &end, 0);
    if (*end == '\0' && *text != '-')
        return true;
    fprintf(stderr, "%s is \"%s\", which is not a number\n", name, text);
    return false;
}

int main(void) {
    uint64_t seed, cases;
    if (!read_number("KVF_SEED", DEFAULT_SEED, &seed) || !read_number("KVF_CASES", DEFAULT_CASES, &cases))
        return 2;
    printf("KVF_SEED=0x%" PRIx64 " KVF_CASES=%" PRIu64 "\n", seed, cases);
    (void)fflush(stdout);
    catch_crashes();
    uint64_t failed = 0;
    static recipe r;
    for (uint64_t i = 0; i < cases; i++) {
        seed_of_case = i ? mix64(seed + i) : seed;
        recipe_generate(seed_of_case, &r);
        note_recipe(&r);
        if (run_case(&r))
            continue;
        if (failed++ < SHOWN_FAILURES)
            show_failure(&r);
        else
            printf("FAILED: KVF_SEED=0x%" PRIx64 " KVF_CASES=1\n  %s\n", seed_of_case, what_went_wrong());
    }
    uint32_t missing = print_coverage(stdout);
    printf("%" PRIu64 " cases of which each kind above was so often\n", cases);
    if (missing && cases >= CASES_THAT_COVER)
        printf("%" PRIu32 " kinds of case were never made: the generator must be mended\n", missing);
    bool uncovered = missing && cases >= CASES_THAT_COVER;
    printf("%" PRIu64 " passed, %" PRIu64 " failed\n", cases - failed, failed + uncovered);
    return failed || uncovered ? 1 : 0;
}
