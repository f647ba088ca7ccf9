/* Without a card: silent connections, as many as there is room for; some are kept, some closed at once. */
#include <unistd.h>

#include "shm_attack.h"

#define KEPT 4000u

int main(int argc, char **argv) {
    static int kept[KEPT];
    attack a;
    attack_begin(&a, argc, argv);
    for (uint32_t i = 0; i < KEPT; i++)
        kept[i] = -1;
    while (attack_goes_on(&a)) {
        int fd = attack_connect(&a);
        if (fd < 0) { /* the queue is full until the owner accepts */
            attack_sleep_ms(1);
            continue;
        }
        uint32_t at = (uint32_t)(a.done++ % KEPT);
        if (a.done % 3 == 0) {
            (void)close(fd);
            continue;
        }
        if (kept[at] >= 0)
            (void)close(kept[at]);
        kept[at] = fd;
    }
    return attack_end(&a, NULL);
}
