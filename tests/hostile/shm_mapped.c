/* With a card: clients that give the owner buffers as large as it takes, let it fill them, and leave all at
 * once. */
#include <unistd.h>

#include "shm_attack.h"

#define CLIENTS 8u
#define SLOTS 8u
#define SLOT_BYTES (16ull << 20)

/* All pieces together fill the slot. */
static void fill_all(attack *a, int fd) {
    static kvf_shm_packet packet;
    static kvf_shm_move_message move;
    for (uint32_t slot = 0; slot < SLOTS && attack_goes_on(a); slot++) {
        size_t length = attack_move(a, &move, slot, SLOT_BYTES >> 20, 1u << 20);
        if (attack_send(fd, &move, length, -1, 0))
            a->done += attack_receive(fd, &packet, 2000);
    }
}

int main(int argc, char **argv) {
    int fds[CLIENTS], memory;
    uint64_t bytes = SLOTS * SLOT_BYTES;
    unsigned char *address;
    attack a;
    attack_begin(&a, argc, argv);
    if (kvf_shm_make_memory(&bytes, &memory, &address))
        return 1;
    while (attack_goes_on(&a)) {
        for (uint32_t i = 0; i < CLIENTS; i++) {
            fds[i] = attack_goes_on(&a) ? attack_client(&a, NULL) : -1;
            if (fds[i] >= 0 && attack_give_buffer(fds[i], memory, SLOT_BYTES, SLOTS))
                fill_all(&a, fds[i]);
        }
        attack_sleep_ms(250); /* the owner says now and then what it has */
        for (uint32_t i = 0; i < CLIENTS; i++)
            if (fds[i] >= 0)
                (void)close(fds[i]);
    }
    return attack_end(&a, NULL);
}
