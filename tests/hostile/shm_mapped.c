/* With a card: clients that give the owner buffers as large as it takes, now and then larger ones, let it fill them,
 * and then all leave at once. */
#include <unistd.h>

#include "shm_attack.h"

#define CLIENTS 60u
#define SLOTS 8u
#define SLOT_BYTES (1ull << 20)
#define PIECES 16u

/* Fills each slot, with all pieces of a move together. */
static void fill_all(attack *a, int fd, uint64_t slot_bytes, uint32_t slots) {
    static kvf_shm_packet packet;
    static kvf_shm_move_message move;
    for (uint32_t slot = 0; slot < slots && attack_goes_on(a); slot++) {
        size_t length = attack_move(a, &move, slot, PIECES, slot_bytes / PIECES);
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
            uint64_t slot_bytes = attack_draw(&a, 8) ? SLOT_BYTES : SLOTS * SLOT_BYTES;
            uint32_t slots = SLOTS;
            if (fds[i] >= 0 && attack_lay_buffer(fds[i], memory, &slot_bytes, &slots))
                fill_all(&a, fds[i], slot_bytes, slots);
        }
        attack_sleep_ms(250); /* long enough for the owner to print its figures */
        for (uint32_t i = 0; i < CLIENTS; i++)
            if (fds[i] >= 0)
                (void)close(fds[i]);
    }
    return attack_end(&a, NULL);
}
