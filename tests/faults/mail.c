#include "mail.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "agent/agent.h"

#include "chance.h"

#define MOST_LATE 256u

/* A message that waits until a given time, or until the next message was sent. */
typedef struct letter {
    kvf_link *link;
    kvf_route route;
    void *data;
    size_t bytes;
    uint64_t due; /* 0: after the next message */
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
        return; /* the message is lost */
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
        (void)kvf_link_zmq.send(l.link, l.route, l.data, l.bytes);
        free(l.data);
    }
}

static kvf_status tamper(kvf_link *link, kvf_route route, const void *data, size_t bytes) {
    letter l = {.link = link, .route = route, .bytes = bytes};
    if (happens(MAIL_LOST))
        return KVF_OK;
    if (happens(MAIL_LATE)) {
        l.due =
            kvf_now(&kvf_monotonic) + chance_between(&mail.chance, 1, mail.options.late_ms) * KVF_MILLISECOND;
        keep(l, data);
    } else if (happens(MAIL_OVERTAKEN)) {
        keep(l, data);
    } else {
        (void)kvf_link_zmq.send(link, route, data, bytes);
        if (happens(MAIL_REPEATED))
            (void)kvf_link_zmq.send(link, route, data, bytes);
        deliver(true);
    }
    return KVF_OK;
}

const kvf_link_table *mail_install(const mail_options *options) {
    static kvf_link_table tampered;
    mail.options = *options;
    mail.options.late_ms = options->late_ms ? options->late_ms : 1;
    mail.chance.state = options->seed;
    tampered = kvf_link_zmq;
    tampered.send = tamper;
    return &tampered;
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
