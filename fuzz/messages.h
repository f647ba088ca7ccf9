/*
 * Reading a message and everything in it.
 */
#ifndef KVF_FUZZ_MESSAGES_H
#define KVF_FUZZ_MESSAGES_H

#include "fuzz.h"

#include "wire/wire.h"

/** The model shards are decoded for: it has groups of tokens and of states. */
const kvf_model *fuzz_model(void);

/** Reads a message that was opened, its introductions and their shards, and frees it. What is sent back must
 * read as the same bytes. */
void fuzz_read(kvf_message *message);

void fuzz_introduction(kvf_bytes bytes);
void fuzz_shard(kvf_bytes bytes);

#endif
