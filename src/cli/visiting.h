/*
 * Visiting running engines, for several commands: the endpoint and keys to meet an engine with, and the model by which
 * the other side's shape is laid out.
 */
#ifndef KVFERRY_CLI_VISITING_H
#define KVFERRY_CLI_VISITING_H

#include <kvferry/visit.h>

#include "options.h"

/** The command's own keys; empty: none. */
typedef struct key_pair {
    char public_key[KEY_CHARACTERS + 1], secret_key[KEY_CHARACTERS + 1];
} key_pair;

/** Reads an object of JSON with both keys; without a path they are empty. Prints what is wrong with the file. */
int keys_read(const char *path, key_pair *out);

/** "ENDPOINT" or "ENDPOINT,KEY", taken apart. */
typedef struct meeting_place {
    char *endpoint;  /* owned */
    const char *key; /* inside `endpoint`; NULL: none */
} meeting_place;

/** Free with place_free() in either case. */
int place_read(const char *text, meeting_place *out);
void place_free(meeting_place *place);

/**
 * Visits the engine at a place; prints why if it cannot. Free the visit with kvf_visited_free().
 *
 * @param name       of the command, for messages
 * @param patience_s  how long to wait for an answer
 * @param greetings  further greetings, to measure the round-trip time
 */
int place_visit(const options *asked, const char *name, const meeting_place *place, uint32_t patience_s,
                uint32_t greetings, kvf_visited **out);

/**
 * The model that shapes are laid out with: the visited engine's, which must equal the model that the user named, if
 * any. Prints what is wrong if it cannot; free the model with kvf_model_free().
 *
 * @param key  the option that has the shape: "decode"
 */
int visited_model(const options *asked, const char *key, const kvf_engine *visited, kvf_model **out);

#endif
