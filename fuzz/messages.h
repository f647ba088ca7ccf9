/*
 * Reads a message and everything in it.
 */
#ifndef KVF_FUZZ_MESSAGES_H
#define KVF_FUZZ_MESSAGES_H

#include "fuzz.h"

#include "wire/wire.h"

/** The model that shards are decoded for: it has groups of tokens and of states. */
const kvf_model *fuzz_model(void);

/** Reads an opened message, its introductions and their shards, and frees it. A message that is written, read and
 * written again must have the same bytes. */
void fuzz_read(kvf_message *message);

void fuzz_introduction(kvf_bytes bytes);
void fuzz_shard(kvf_bytes bytes);

#endif
