/*
 * With a card: a client that claims for ever to be in the middle of a write. It attacks an owner in this program,
 * because an owner that takes a region back ends every honest reader, too. Only the client's death ends its access: so
 * the owner, which wants a region back, must be told at once which process it waits for, must not get the region
 * before, and must get it once the client is dead.
 */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shm_attack.h"

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        if (call) {                                                                                          \
            (void)fprintf(stderr, "shm_gatekeeper: %s\n", kvf_error_detail());                               \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

static void keep_inside(char **argv, const void *card, size_t bytes) {
    static char text[8192];
    char *arguments[] = {argv[0], text, (char *)"1000"};
    kvf_shm_gate *gate = NULL;
    attack a;
    size_t at = (size_t)snprintf(text, sizeof text, "card:");
    for (size_t i = 0; i < bytes; i++)
        at += (size_t)snprintf(text + at, sizeof text - at, "%02x", ((const unsigned char *)card)[i]);
    attack_begin(&a, 3, arguments);
    if (attack_client(&a, &gate) < 0 || !gate)
        _exit(1);
    atomic_store(&gate->inside, 1);
    for (;;)
        (void)pause();
}

/* Whether the owner is told which process it waits for. */
static bool is_named(pid_t client) {
    char process[96];
    (void)snprintf(process, sizeof process, "attacker (process %ld) has been in the middle of a write for",
                   (long)client);
    return strstr(kvf_error_detail(), process) != NULL;
}

/* How long it took, in steps of ten milliseconds; -1: more than `most`; -2: the detail did not name the client. */
static int take_back(kvf_transport *owner, int most, pid_t client) {
    for (int i = 0; i < most; i++) {
        kvf_status status = kvf_transport_unregister_region(owner, 1);
        if (!status)
            return i;
        if (status != KVF_E_AGAIN)
            TRY(status);
        if (!is_named(client))
            return -2;
        TRY(kvf_transport_progress(owner, NULL));
        attack_sleep_ms(10);
    }
    return -1;
}

int main(int argc, char **argv) {
    static unsigned char memory[2][65536];
    kvf_memory regions[2];
    kvf_transport *owner = NULL;
    const void *card;
    size_t bytes;
    attack a;
    attack_begin(&a, argc, argv);
    for (int i = 0; i < 2; i++)
        regions[i] =
            (kvf_memory){.struct_size = sizeof(kvf_memory), .address = memory[i], .bytes = sizeof memory[i]};
    TRY(kvf_transport_open("shm", NULL, &owner));
    TRY(kvf_transport_register(owner, regions, 2));
    TRY(kvf_transport_export(owner, &card, &bytes));
    pid_t child = fork();
    if (child == 0)
        keep_inside(argv, card, bytes);
    for (int i = 0; i < 50; i++) {
        TRY(kvf_transport_progress(owner, NULL));
        attack_sleep_ms(10);
    }
    bool alive = waitpid(child, NULL, WNOHANG) == 0;
    int with = take_back(owner, 100, child);
    (void)kill(child, SIGKILL);
    (void)waitpid(child, NULL, 0);
    int without = with >= 0 ? 0 : take_back(owner, 200, child);
    kvf_transport_close(owner);
    a.done = alive;
    if (!alive)
        return attack_end(&a, "the client was never inside");
    if (with >= 0)
        return attack_end(&a, "a region was given back while a client could write to it");
    if (with == -2 || without == -2)
        return attack_end(&a, "an owner waited for a client and was not told for which");
    return attack_end(&a, without < 0 ? "a region was not given back after the client's death" : NULL);
}
