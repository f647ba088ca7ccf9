/*
 * Texts of a peer in messages: cut short, and with control characters written out.
 */
#ifndef KVF_WIRE_SHOW_H
#define KVF_WIRE_SHOW_H

#include "wire/wire.h"

#define KVF_SHOWN_BYTES 40 /* of a name or a value */

/** Room for one name or value in words: dots on both sides, and a zero. */
typedef struct kvf_shown {
    char text[KVF_SHOWN_BYTES + 8];
} kvf_shown;

/** Shows bytes from `skip` on. Those beyond ASCII stay: names may be in any language. Returns out->text. */
const char *kvf_wire_show(kvf_shown *out, const char *text, size_t bytes, size_t skip);

#endif
