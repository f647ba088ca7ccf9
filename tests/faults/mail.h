/*
 * Faults of an agent's messages in the fault harness: some are lost, repeated, late, or overtaken.
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

/** A link for this process's agent, with these faults. */
const kvf_link_table *mail_install(const mail_options *options);
/** Ends the faults. */
void mail_calm(void);
/** Sends late messages that are due. While one thread calls it, no other may use the agent. */
void mail_deliver(void);
uint64_t mail_count(mail_fault fault);

#endif
