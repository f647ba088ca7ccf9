/* With a card: a client that is stopped while the owner copies for it, and killed a little later; meanwhile its memory
 * is taken away under the copies. */
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shm_attack.h"

#define SLOTS 8u
#define SLOT_BYTES (1u << 20)

static void ask_and_stop(attack *a, int memory) {
    static kvf_shm_move_message move;
    int fd = attack_client(a, NULL);
    uint64_t slot_bytes = SLOT_BYTES;
    uint32_t slots = SLOTS;
    if (fd < 0 || !attack_lay_buffer(fd, memory, &slot_bytes, &slots))
        _exit(1);
    for (uint32_t slot = 0; slot < slots; slot++) {
        size_t length = attack_move(a, &move, slot, 4, slot_bytes / 4);
        move.direction = KVF_READ;
        (void)attack_send(fd, &move, length, -1, 0);
    }
    (void)raise(SIGSTOP);
    _exit(0);
}

int main(int argc, char **argv) {
    attack a;
    uint64_t bytes = SLOTS * (uint64_t)SLOT_BYTES;
    unsigned char *address;
    int memory;
    attack_begin(&a, argc, argv);
    if (kvf_shm_make_memory(&bytes, &memory, &address))
        return 1;
    while (attack_goes_on(&a)) {
        pid_t child = fork();
        if (child < 0)
            return 1;
        if (child == 0)
            ask_and_stop(&a, memory);
        for (int i = 0; i < 50; i++) {
            (void)fallocate(memory, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)bytes);
            attack_sleep_ms(1);
        }
        (void)kill(child, SIGKILL);
        (void)waitpid(child, NULL, 0);
        (void)attack_draw(&a, 2); /* another name for the next client */
        a.done++;
    }
    return attack_end(&a, NULL);
}
