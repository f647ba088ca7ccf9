/* With a card: a client that always has the largest moves waiting. Two of them try to starve an honest reader. */
#include <unistd.h>

#include "shm_attack.h"

#define SLOTS 8u

int main(int argc, char **argv) {
    static kvf_shm_packet packet;
    static kvf_shm_move_message move;
    attack a;
    attack_begin(&a, argc, argv);
    uint64_t slot_bytes = 1u << 20, bytes = SLOTS * slot_bytes;
    uint32_t slots = SLOTS;
    unsigned char *address;
    int memory, fd = -1;
    if (kvf_shm_make_memory(&bytes, &memory, &address))
        return 1;
    while (fd < 0 && attack_goes_on(&a)) /* other attackers may keep it busy */
        fd = attack_client(&a, NULL);
    if (fd < 0 || !attack_lay_buffer(fd, memory, &slot_bytes, &slots))
        return attack_end(&a, NULL);
    for (uint32_t waiting = 0; attack_goes_on(&a);) {
        while (waiting < slots &&
               attack_send(fd, &move, attack_move(&a, &move, waiting, 1, slot_bytes), -1, 0))
            waiting++;
        if (attack_receive(fd, &packet, 100)) {
            waiting--;
            a.done++;
        }
    }
    return attack_end(&a, a.done ? NULL : "a client that asks for a lot was never answered");
}
