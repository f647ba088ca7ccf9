#include "vandal.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent/agent.h"

#define MOST_BYTES 8192u

typedef struct speech {
    uint8_t bytes[MOST_BYTES];
    size_t count;
} speech;

static void say(speech *s, const void *data, size_t bytes) {
    size_t room = sizeof s->bytes - s->count;
    bytes = bytes < room ? bytes : room;
    memcpy(s->bytes + s->count, data, bytes);
    s->count += bytes;
}

static void say_garbage(speech *s, chance *dice, uint32_t most) {
    uint32_t bytes = chance_between(dice, 1, most);
    for (uint32_t i = 0; i < bytes; i++) {
        uint8_t byte = (uint8_t)chance_draw(dice);
        say(s, &byte, 1);
    }
}

/* The first bytes of a ZeroMQ peer (ZMTP 3, mechanism NULL). */
static void say_greeting(speech *s) {
    uint8_t greeting[64] = {0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0, 'N', 'U', 'L', 'L'};
    say(s, greeting, sizeof greeting);
}

static void say_ready(speech *s) {
    static const uint8_t ready[] = {4,   26,  5,   'R', 'E', 'A', 'D', 'Y', 11, 'S', 'o', 'c', 'k', 'e',
                                    't', '-', 'T', 'y', 'p', 'e', 0,   0,   0,  6,   'D', 'E', 'A', 'L'};
    static const uint8_t rest[] = {'E', 'R'};
    uint8_t head[sizeof ready];
    memcpy(head, ready, sizeof ready);
    head[1] = (uint8_t)(sizeof ready - 2 + sizeof rest);
    say(s, head, sizeof head);
    say(s, rest, sizeof rest);
}

static void say_frame(speech *s, const void *data, size_t bytes) {
    uint8_t head[9] = {2, 0, 0, 0, 0, 0, 0, (uint8_t)(bytes >> 8), (uint8_t)bytes};
    say(s, head, sizeof head);
    say(s, data, bytes);
}

/* A greeting of kvferry's own protocol, with another model, and perhaps cut off. */
static void say_hello(speech *s, chance *dice) {
    kvf_message message = {.kind = KVF_MESSAGE_HELLO,
                           .hello = {.engine = "X",
                                     .incarnation = chance_draw(dice),
                                     .rank = chance_between(dice, 0, 9),
                                     .rank_count = chance_between(dice, 0, 9),
                                     .wants_ranks = chance_per_mille(dice, 500),
                                     .wants_card = chance_per_mille(dice, 500)}};
    kvf_wire_buffer bytes;
    if (kvf_wire_encode(&message, &bytes))
        return;
    size_t cut = chance_per_mille(dice, 500) ? bytes.size : chance_draw(dice) % (bytes.size + 1);
    say_frame(s, bytes.data, cut);
    kvf_wire_buffer_free(&bytes);
}

static void think_of(speech *s, chance *dice) {
    static const uint8_t huge[] = {2, 0x0f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 2, 3};
    speech garbage = {.count = 0};
    uint32_t kind = chance_between(dice, 0, 7);
    if (kind == 0)
        return;
    if (kind == 1) {
        say_garbage(s, dice, 4000);
        return;
    }
    say_greeting(s);
    if (kind == 2)
        s->count = chance_between(dice, 1, 63);
    if (kind == 3)
        say_garbage(s, dice, 300);
    if (kind < 4)
        return;
    say_ready(s);
    say_garbage(&garbage, dice, 500);
    for (uint32_t i = chance_between(dice, 0, 5); i > 0; i--) {
        if (kind == 4)
            say_frame(s, garbage.bytes, garbage.count);
        else
            say_hello(s, dice);
    }
    if (kind == 6)
        say(s, huge, sizeof huge);
    if (kind == 7 && s->count > 1)
        s->count -= chance_between(dice, 1, 90);
}

void vandal_attack(vandal *v, const char *endpoint, chance *dice) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const char *colon = strrchr(endpoint, ':');
    unsigned long port = colon ? strtoul(colon + 1, NULL, 10) : 0;
    uint32_t place = 0;
    while (place < VANDAL_MOST && v->lines[place].fd)
        place++;
    if (port == 0 || port > 65535 || place == VANDAL_MOST)
        return;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    to.sin_port = htons((uint16_t)port);
    (void)connect(fd, (struct sockaddr *)&to, sizeof to); /* on loopback this succeeds at once, or never */
    speech s = {.count = 0};
    think_of(&s, dice);
    if (s.count > 0)
        (void)send(fd, s.bytes, s.count, MSG_NOSIGNAL);
    v->lines[place].fd = fd;
    v->lines[place].close_at = kvf_now(&kvf_monotonic) + chance_between(dice, 0, 1500) * KVF_MILLISECOND;
    v->attacks++;
}

void vandal_leave(vandal *v, uint64_t now) {
    for (uint32_t i = 0; i < VANDAL_MOST; i++) {
        if (!v->lines[i].fd || now < v->lines[i].close_at)
            continue;
        (void)close(v->lines[i].fd);
        v->lines[i].fd = 0;
    }
}
