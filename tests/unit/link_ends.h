/*
 * Links for the tests of links: ends that keep the messages they receive, which one thread drives in turn until the
 * event that the test waits for has happened.
 */
#ifndef KVF_TEST_LINK_ENDS_H
#define KVF_TEST_LINK_ENDS_H

#include <poll.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "link/link.h"
#include "shapes.h"

#define KEPT_MESSAGES 64u
#define KEPT_BYTES 64u
#define PATIENCE_S 60 /* how long a test waits before it fails; nothing should take longer than a second */

typedef struct end_message {
    kvf_route route;
    size_t bytes;
    char text[KEPT_BYTES];      /* its beginning, as text */
    uint8_t key[KVF_KEY_BYTES]; /* the sender's key; zeros: none */
} end_message;

typedef struct end {
    kvf_link *link;
    end_message messages[KEPT_MESSAGES]; /* the first ones */
    uint32_t message_count;
    const char *listened_for; /* a text to count among all messages; NULL: none */
    uint32_t heard_count;     /* how often that text came */
    bool answers;             /* sends every message back */
    uint32_t broken_count;
    uint32_t messages_at_break; /* how many messages had come when the last break was reported */
    kvf_route broken_route;
    kvf_status broken_status;
    char broken_detail[512];
    void (*on_broken)(struct end *end); /* what the test does at a break, or NULL */
} end;

static inline void keep_message(void *context, const kvf_letter *letter) {
    end *self = context;
    const kvf_route route = letter->route;
    const size_t bytes = letter->bytes;
    if (self->message_count < KEPT_MESSAGES) {
        end_message *message = &self->messages[self->message_count];
        message->route = route;
        message->bytes = bytes;
        size_t kept = bytes < KEPT_BYTES ? bytes : KEPT_BYTES - 1;
        memcpy(message->text, letter->data, kept);
        if (letter->key)
            memcpy(message->key, letter->key, sizeof message->key);
        message->text[kept] = '\0';
    }
    self->message_count++;
    self->heard_count += self->listened_for && bytes == strlen(self->listened_for) &&
                         memcmp(letter->data, self->listened_for, bytes) == 0;
    if (self->answers)
        assert_ok(kvf_link_send(self->link, route, letter->data, bytes));
}

static inline void keep_break(void *context, kvf_route route, kvf_status status, const char *detail) {
    end *self = context;
    self->broken_count++;
    self->messages_at_break = self->message_count;
    self->broken_route = route;
    self->broken_status = status;
    (void)snprintf(self->broken_detail, sizeof self->broken_detail, "%s", detail);
    if (self->on_broken)
        self->on_broken(self);
}

/** Opens an end; fills in callbacks and context. */
static inline kvf_status try_open_end(end *self, kvf_link_options options) {
    memset(self, 0, sizeof *self);
    options.on_message = keep_message;
    options.on_broken = keep_break;
    options.context = self;
    return kvf_link_open(&options, &self->link);
}

static inline void open_end(end *self, kvf_link_options options) {
    assert_ok(try_open_end(self, options));
}

#define OWN_PLACE_BYTES 32u

/** Where an end listens by TCP if another end is to listen there after it: a loopback address of this process's own. At
 * 127.0.0.1 any connection on the machine may get the port in between. */
static inline const char *own_place(char out[OWN_PLACE_BYTES]) {
    const unsigned id = (unsigned)getpid();
    (void)snprintf(out, OWN_PLACE_BYTES, "tcp://127.%u.%u.%u:*", 64 + (id >> 16) % 64, (id >> 8) % 256,
                   id % 256);
    return out;
}

static inline kvf_route connect_end(end *self, const char *endpoint) {
    kvf_route route = 0;
    assert_ok(kvf_link_connect(self->link, endpoint, NULL, &route));
    assert_int_not_equal(route, 0);
    return route;
}

static inline void send_text(end *self, kvf_route route, const char *text) {
    assert_ok(kvf_link_send(self->link, route, text, strlen(text)));
}

/** Sleeps until a descriptor of the link reports something, or it is time to dial. */
static inline void wait_for_link(const kvf_link *link, uint64_t most_ns) {
    int fds[KVF_LINK_FDS];
    struct pollfd polled[KVF_LINK_FDS];
    uint32_t count = kvf_link_fds(link, fds);
    for (uint32_t i = 0; i < count; i++)
        polled[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
    uint64_t now = kvf_now(&kvf_monotonic), due = kvf_link_due(link), left = most_ns;
    if (due != UINT64_MAX)
        left = kvf_min_u64(left, due > now ? due - now : 0);
    struct timespec timeout = {(time_t)(left / 1000000000u), (long)(left % 1000000000u)};
    (void)ppoll(polled, count, left == UINT64_MAX ? NULL : &timeout, NULL);
}

static inline void progress_all(end *const *ends, size_t count) {
    bool more = false;
    for (size_t i = 0; i < count; i++) {
        bool has_more;
        kvf_link_progress(ends[i]->link, &has_more);
        more = more || has_more;
    }
    for (size_t i = 0; i < count && !more; i++)
        wait_for_link(ends[i]->link, 1000000);
}

/** Lets the listed ends work until the condition holds; the test fails if it never does. */
#define work_until(condition, ...)                                                                           \
    do {                                                                                                     \
        end *ends_[] = {__VA_ARGS__};                                                                        \
        time_t begun_ = time(NULL);                                                                          \
        while (!(condition)) {                                                                               \
            progress_all(ends_, COUNT_OF(ends_));                                                            \
            if (time(NULL) - begun_ > PATIENCE_S)                                                            \
                fail_msg("never: %s", #condition);                                                           \
        }                                                                                                    \
    } while (0)

static inline bool has_message(const end *self, const char *text) {
    for (uint32_t i = 0; i < self->message_count && i < KEPT_MESSAGES; i++) {
        if (strcmp(self->messages[i].text, text) == 0)
            return true;
    }
    return false;
}

/** A message that is sent while a connection comes and goes may be lost, so it is sent again until an answer comes.
 * Many answers may come and only the first are kept, so the client drops the earlier ones first. */
static inline void ask_until_answered(end *client, end *server, kvf_route route, const char *text) {
    const time_t begun = time(NULL);
    server->answers = true;
    client->message_count = 0;
    while (!has_message(client, text)) {
        if (time(NULL) - begun > PATIENCE_S)
            fail_msg("never: an answer to \"%s\", and %u breaks", text, client->broken_count);
        send_text(client, route, text);
        progress_all((end *[]){server, client}, 2);
    }
}

#endif
