/* With a card: clients that send as many moves and notifications as their sockets take, and never read an answer. */
#include <unistd.h>

#include "shm_attack.h"

#define CLIENTS 32u
#define SLOT_BYTES 65536u

static void say(attack *a, int fd) {
    static kvf_shm_move_message move;
    static struct {
        kvf_shm_header header;
        unsigned char bytes[4096];
    } notice = {.header = {SHM_NOTICE, 4096}};
    while (attack_goes_on(a) && attack_send(fd, &move, attack_move(a, &move, 0, 16, 4096), -1, 0) &&
           attack_send(fd, &notice, sizeof notice, -1, 0))
        a->done += 2;
}

int main(int argc, char **argv) {
    int fds[CLIENTS], memory;
    uint64_t bytes = SLOT_BYTES;
    unsigned char *address;
    attack a;
    attack_begin(&a, argc, argv);
    if (kvf_shm_make_memory(&bytes, &memory, &address))
        return 1;
    for (uint32_t i = 0; i < CLIENTS; i++)
        fds[i] = -1;
    for (uint32_t i = 0; attack_goes_on(&a); i = (i + 1) % CLIENTS) {
        if (fds[i] < 0 && (fds[i] = attack_client(&a, NULL)) >= 0)
            (void)attack_give_buffer(fds[i], memory, SLOT_BYTES, 1);
        if (fds[i] >= 0)
            say(&a, fds[i]);
        if (i == 0) {
            attack_sleep_ms(1);
            if (fds[0] >= 0 && attack_draw(&a, 200) == 0) { /* leaves everything unread */
                (void)close(fds[0]);
                fds[0] = -1;
            }
        }
    }
    return attack_end(&a, NULL);
}
