/*
 * The cache of the pair of stages, for both halves (stage_honest.c) and for attackers with the card (stage_attack.c): a
 * latent, which the holder keeps in small blocks and the reader in large ones.
 */
#ifndef STAGE_PAIR_H
#define STAGE_PAIR_H

#include <kvferry/stage.h>

#include "content.h"

#define STAGE_PAIR_TOKENS 160u
#define STAGE_PAIR_CONNECTIONS "256" /* as CONNECTIONS in run.py */
#define STAGE_PAIR_KEY_TEXT 41u      /* bytes of a Z85 key, with its NUL */

/** The engines of both sides. stage_pair_open() ends the program if it fails. */
typedef struct stage_pair {
    kvf_model *model;
    kvf_engine *owner, *reader;
} stage_pair;

void stage_pair_open(stage_pair *pair);
void stage_pair_close(stage_pair *pair);

/** The blocks of the `nth` request that fits into a rank's cache. */
void stage_pair_table(const kvf_shard *shard, uint32_t nth, content_table *out);

/** A transport for messages over loopback. `secret_key` may be NULL. */
kvf_status stage_pair_transport(const char *name, const char *secret_key, void *context, kvf_transport **out,
                                void (*on_notify)(void *context, kvf_transport *transport, const char *sender,
                                                  const void *data, size_t bytes),
                                void (*on_peer_lost)(void *context, kvf_transport *transport, kvf_peer *peer,
                                                     const char *detail));

/** Allocates and registers the memory of a rank. */
kvf_status stage_pair_register(kvf_transport *transport, const kvf_shard *shard, content_rank *out);

/** Sends our card to a peer, in a notification of "card" and its bytes. KVF_E_AGAIN: the peer takes none now. */
kvf_status stage_pair_introduce(kvf_transport *transport, kvf_peer *peer);

/** Reads a card in hexadecimal digits; returns its bytes. */
size_t stage_pair_read_card(const char *text, unsigned char *out, size_t room);

uint64_t stage_pair_now(void);

#endif
