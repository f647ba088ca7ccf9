#include "mail.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "agent/agent.h"

#include "chance.h"

#define MOST_LATE 256u

/* A message that waits: until a time, or until the next one was sent. */
typedef struct letter {
    kvf_link *link;
    kvf_route route;
    kvf_link_send_function send;
    void *data;
    size_t bytes;
    uint64_t due; /* 0: after the next one */
} letter;

static struct {
    mail_options options;
    _Atomic bool calm;
    chance chance;
    letter late[MOST_LATE];
    uint32_t late_count;
    uint64_t counts[MAIL_FAULTS];
} mail;

static bool happens(mail_fault fault) {
    bool now = !atomic_load(&mail.calm) && chance_per_mille(&mail.chance, mail.options.per_mille[fault]);
    mail.counts[fault] += now;
    return now;
}

static void keep(letter l, const void *data) {
    l.data = malloc(l.bytes ? l.bytes : 1);
    if (!l.data || mail.late_count == MOST_LATE) {
        free(l.data);
        return; /* then it is lost */
    }
    memcpy(l.data, data, l.bytes);
    mail.late[mail.late_count++] = l;
}

static void deliver(bool after_another) {
    uint64_t now = kvf_now(&kvf_monotonic);
    for (uint32_t i = 0; i < mail.late_count;) {
        letter l = mail.late[i];
        if (l.due > now || (l.due == 0 && !after_another)) {
            i++;
            continue;
        }
        mail.late[i] = mail.late[--mail.late_count];
        l.send(l.link, l.route, l.data, l.bytes);
        free(l.data);
    }
}

static void tamper(kvf_link *link, kvf_route route, const void *data, size_t bytes,
                   kvf_link_send_function send) {
    letter l = {.link = link, .route = route, .send = send, .bytes = bytes};
    if (happens(MAIL_LOST))
        return;
    if (happens(MAIL_LATE)) {
        l.due =
            kvf_now(&kvf_monotonic) + chance_between(&mail.chance, 1, mail.options.late_ms) * KVF_MILLISECOND;
        keep(l, data);
    } else if (happens(MAIL_OVERTAKEN)) {
        keep(l, data);
    } else {
        send(link, route, data, bytes);
        if (happens(MAIL_REPEATED))
            send(link, route, data, bytes);
        deliver(true);
    }
}

void mail_install(const mail_options *options) {
    mail.options = *options;
    mail.options.late_ms = options->late_ms ? options->late_ms : 1;
    mail.chance.state = options->seed;
    kvf_link_tamper = tamper;
}

void mail_calm(void) {
    atomic_store(&mail.calm, true);
}

void mail_deliver(void) {
    deliver(false);
}

uint64_t mail_count(mail_fault fault) {
    return mail.counts[fault];
}
