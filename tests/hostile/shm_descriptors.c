/* Without a card: messages with unwanted descriptors: one, two, or as many as a message can carry. They are of memory,
 * and of the connection itself, which is then kept open by its own queue. */
#include <unistd.h>

#include "shm_attack.h"

int main(int argc, char **argv) {
    static const unsigned counts[] = {1, 2, 3, 253};
    attack a;
    uint64_t bytes = 4096;
    unsigned char *address;
    int memory;
    attack_begin(&a, argc, argv);
    if (kvf_shm_make_memory(&bytes, &memory, &address))
        return 1;
    while (attack_goes_on(&a)) {
        int fd = attack_connect(&a);
        const kvf_shm_hello hello = attack_hello(&a);
        if (fd < 0) {
            attack_sleep_ms(1);
            continue;
        }
        int passed = attack_draw(&a, 4) ? memory : fd;
        for (int i = 0; i < 4; i++)
            a.done += attack_send(fd, &hello, attack_draw(&a, 2) ? sizeof hello : sizeof hello.header, passed,
                                  counts[attack_draw(&a, 4)]);
        (void)close(fd);
    }
    return attack_end(&a, NULL);
}
