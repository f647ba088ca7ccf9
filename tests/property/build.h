/*
 * Builds the library's objects for a case, and compares them with the world.
 */
#ifndef KVF_PROPERTY_BUILD_H
#define KVF_PROPERTY_BUILD_H

#include <kvferry/request.h>

#include "world.h"

/** Records what went wrong and returns false. */
bool wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));

/** The last text that wrong() recorded. */
const char *what_went_wrong(void);

typedef struct built {
    kvf_model *models[SIDES];
    kvf_engine *local_engine; /* NULL if the local shards are made by hand */
    kvf_engine *remote;
    kvf_shard *hand_made[MAX_RANKS];
    const kvf_shard *local[MAX_RANKS];
    bool refused; /* an engine was refused, and rightly so */
} built;

/** Makes the objects and checks them. False, after wrong(), if the library is wrong. */
bool build_objects(const recipe *r, const world *w, built *out);

void free_objects(const recipe *r, built *b);

#endif
