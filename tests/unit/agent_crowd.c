#include "agent_crowd.h"

#include <stdio.h>
#include <time.h>

#include "agent/hear.h"
#include "agent_speaker.h"

#define TRIES 3u

void crowd_says(kvf_agent *agent, const kvf_message *message) {
    static const uint8_t key[KVF_KEY_BYTES] = {1};
    kvf_wire_buffer bytes;
    assert_ok(kvf_wire_encode(message, &bytes));
    kvf_work_take(agent);
    kvf_on_message(agent, &(kvf_letter){.route = 1, .key = key, .data = bytes.data, .bytes = bytes.size});
    kvf_work_give(agent);
    kvf_wire_buffer_free(&bytes);
}

void crowd_greets(kvf_agent *agent, uint32_t number) {
    uint8_t secret[KVF_WIRE_SECRET_BYTES] = {1};
    char name[32];
    memcpy(secret + 1, &number, sizeof number);
    (void)snprintf(name, sizeof name, "greedy-%u", number);
    const kvf_message hello = speaker_hello(name, secret, agent->digest);
    crowd_says(agent, &hello);
}

uint64_t crowd_time(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

void crowd_compare(uint64_t (*time_with)(uint32_t sessions), uint32_t few, uint32_t many, uint32_t times,
                   uint64_t ns) {
    uint64_t with_few = UINT64_MAX, with_many = UINT64_MAX;
    for (uint32_t i = 0; i < TRIES; i++) {
        with_few = kvf_min_u64(with_few, time_with(few));
        with_many = kvf_min_u64(with_many, time_with(many));
    }
    assert_in_range(with_many, 0, times * with_few + ns);
}
