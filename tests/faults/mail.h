/*
 * What happens to the messages of an agent in the fault harness: some are lost, repeated, late, or overtaken.
 */
#ifndef KVF_FAULTS_MAIL_H
#define KVF_FAULTS_MAIL_H

#include "link/link.h"

typedef enum mail_fault { MAIL_LOST, MAIL_REPEATED, MAIL_LATE, MAIL_OVERTAKEN, MAIL_FAULTS } mail_fault;

typedef struct mail_options {
    uint64_t seed;
    uint32_t per_mille[MAIL_FAULTS];
    uint32_t late_ms; /* at most */
} mail_options;

/** The link for this process's agent, with that on its way. */
const kvf_link_table *mail_install(const mail_options *options);
/** Nothing happens to messages from here on. */
void mail_calm(void);
/** Sends what was late until now. One thread at a time may do so or use the agent. */
void mail_deliver(void);
uint64_t mail_count(mail_fault fault);

#endif
