/* With a card: a client that scribbles over all memory that it shares with the owner, except the caches, which it may
 * write: its gate, and its slots while the owner copies. It reconnects under new names. */
#include <sys/mman.h>
#include <unistd.h>

#include "shm_attack.h"

#define SLOTS 4u
#define SLOT_BYTES (1u << 20)

static void scribble(attack *a, kvf_shm_gate *gate, unsigned char *slots) {
    for (int i = 0; i < 2000; i++) {
        if (gate) {
            atomic_store(&gate->inside, (uint32_t)attack_draw(a, UINT32_MAX));
            atomic_store(&gate->shut, (uint32_t)attack_draw(a, 2));
        }
        memset(slots + attack_draw(a, SLOTS * (uint64_t)SLOT_BYTES - 256), 0xee, 256);
        a->done++;
    }
}

int main(int argc, char **argv) {
    static kvf_shm_packet packet;
    static kvf_shm_move_message move;
    uint64_t bytes = SLOTS * (uint64_t)SLOT_BYTES;
    unsigned char *slots;
    int memory;
    attack a;
    attack_begin(&a, argc, argv);
    if (kvf_shm_make_memory(&bytes, &memory, &slots))
        return 1;
    while (attack_goes_on(&a)) {
        kvf_shm_gate *gate = NULL;
        int fd = attack_client(&a, &gate);
        if (fd >= 0 && attack_give_buffer(fd, memory, SLOT_BYTES, SLOTS))
            for (uint32_t slot = 0; slot < SLOTS; slot++) {
                (void)attack_send(fd, &move, attack_move(&a, &move, slot, 64, 4096), -1, 0);
                scribble(&a, gate, slots);
                while (attack_receive(fd, &packet, 0))
                    ;
            }
        if (fd >= 0)
            (void)close(fd);
        if (gate)
            (void)munmap(gate, sizeof *gate);
    }
    return attack_end(&a, NULL);
}
