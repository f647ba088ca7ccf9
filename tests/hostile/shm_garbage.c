/* Without a card: messages that are random, nearly valid, cut off, and repeated, as many as a socket takes. */
#include <unistd.h>

#include "shm_attack.h"

#define KINDS 12u

static size_t make(attack *a, unsigned char *out, size_t room) {
    kvf_shm_hello hello = attack_hello(a);
    size_t bytes = sizeof hello;
    uint64_t which = attack_draw(a, KINDS);
    if (which == 0)
        hello.version = (uint32_t)attack_draw(a, 10);
    if (which == 1) /* half a message */
        bytes = attack_draw(a, sizeof hello);
    if (which >= 2)
        hello.header = (kvf_shm_header){(uint32_t)attack_draw(a, KINDS), (uint32_t)attack_draw(a, 2000)};
    memcpy(out, &hello, sizeof hello);
    if (which >= 4) {
        bytes = attack_draw(a, which == 5 ? room : 600);
        for (size_t i = sizeof hello.header; i < bytes; i++)
            out[i] = (unsigned char)attack_draw(a, 256);
    }
    return bytes;
}

int main(int argc, char **argv) {
    static unsigned char message[40000];
    attack a;
    attack_begin(&a, argc, argv);
    while (attack_goes_on(&a)) {
        int fd = attack_connect(&a);
        if (fd < 0) {
            attack_sleep_ms(1);
            continue;
        }
        size_t bytes = make(&a, message, sizeof message);
        for (int i = 0; i < 300 && attack_send(fd, message, bytes, -1, 0); i++)
            a.done++;
        (void)close(fd);
    }
    return attack_end(&a, NULL);
}
