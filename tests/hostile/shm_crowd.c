/* With a card: as many clients as the owner lets in, which do nothing, and stay. */
#include <unistd.h>

#include "shm_attack.h"

int main(int argc, char **argv) {
    attack a;
    attack_begin(&a, argc, argv);
    while (attack_goes_on(&a)) {
        if (a.done < 1500 && attack_client(&a, NULL) >= 0)
            a.done++;
        else
            attack_sleep_ms(5);
    }
    return attack_end(&a, NULL);
}
