/*
 * A server of names, in place of the C library's: "here.test" is this host, "late.test" takes ten seconds and is it
 * too, "slow.test" takes as long and is nobody, and "moves.test" is at first where nobody listens.
 *
 * For one file of a program, whose threads all ask this one.
 */
#ifndef KVF_TESTS_SLOW_NAMES_H
#define KVF_TESTS_SLOW_NAMES_H

#include <netdb.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

static _Atomic uint32_t asked; /* how often somebody has asked for the address of "moves.test" */
static _Atomic bool lets_go;   /* the two take no longer */

/* NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): the C library's are reserved */
int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **out) {
    static struct sockaddr_in addresses[2];
    static struct addrinfo found[2];
    (void)service, (void)hints;
    const bool late = strcmp(host, "late.test") == 0, moves = strcmp(host, "moves.test") == 0;
    for (int i = 0; i < 1000 && (late || strcmp(host, "slow.test") == 0) && !lets_go; i++)
        (void)usleep(10000);
    if (!late && !moves && strcmp(host, "here.test") != 0)
        return EAI_AGAIN;
    const uint32_t i = moves && atomic_fetch_add(&asked, 1) < 2;
    addresses[i] = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK + i)};
    found[i] = (struct addrinfo){.ai_family = AF_INET,
                                 .ai_socktype = SOCK_STREAM,
                                 .ai_addrlen = sizeof addresses[i],
                                 .ai_addr = (struct sockaddr *)&addresses[i]};
    *out = &found[i];
    return 0;
}

/* NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name) */
void freeaddrinfo(struct addrinfo *found) {
    (void)found;
}

#endif
