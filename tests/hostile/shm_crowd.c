/* With a card: processes with as many clients as the owner lets in, which stay and do nothing. */
#include <sys/wait.h>
#include <unistd.h>

#include "shm_attack.h"

#define PROCESSES 12u
#define CLIENTS 1500u

int main(int argc, char **argv) {
    attack a;
    attack_begin(&a, argc, argv);
    uint32_t children = 0;
    pid_t child = 1;
    while (child > 0 && ++children < PROCESSES)
        child = fork();
    if (child < 0)
        return 1;
    a.random += (uint64_t)getpid();
    while (attack_goes_on(&a)) {
        if (a.done < CLIENTS && attack_client(&a, NULL) >= 0)
            a.done++;
        else
            attack_sleep_ms(5);
    }
    if (child == 0)
        _exit(0);
    while (wait(NULL) > 0)
        ;
    return attack_end(&a, NULL);
}
