/* With a card: many clients, each with as many moves waiting as its socket takes. Each move is a thousand scattered
 * bytes: few bytes, but a lot of work. */
#include <unistd.h>

#include "shm_attack.h"

#define CLIENTS 64u

int main(int argc, char **argv) {
    static kvf_shm_packet packet;
    static kvf_shm_move_message move;
    int fds[CLIENTS], memory;
    uint64_t bytes = 65536;
    unsigned char *address;
    attack a;
    attack_begin(&a, argc, argv);
    if (kvf_shm_make_memory(&bytes, &memory, &address))
        return 1;
    for (uint32_t i = 0; i < CLIENTS; i++)
        if ((fds[i] = attack_client(&a, NULL)) >= 0)
            (void)attack_give_buffer(fds[i], memory, bytes, 1);
    size_t length = attack_move(&a, &move, 0, SHM_PIECES_MAX, 1);
    while (attack_goes_on(&a)) {
        uint64_t before = a.done;
        for (uint32_t i = 0; i < CLIENTS; i++) {
            if (fds[i] < 0)
                continue;
            while (attack_receive(fds[i], &packet, 0))
                ;
            while (attack_send(fds[i], &move, length, -1, 0))
                a.done++;
        }
        if (a.done == before)
            attack_sleep_ms(1);
    }
    return attack_end(&a, NULL);
}
