/*
 * A peer's texts in messages: cut short, and with control characters escaped.
 */
#ifndef KVF_WIRE_SHOW_H
#define KVF_WIRE_SHOW_H

#include "wire/wire.h"

#define KVF_SHOWN_BYTES 40 /* of a name or a value */

/** Room for one shown name or value: with dots on both sides, and a zero byte. */
typedef struct kvf_shown {
    char text[KVF_SHOWN_BYTES + 8];
} kvf_shown;

/** Shows bytes from `skip` on. Bytes beyond ASCII stay, because names may be in any language. Returns out->text. */
const char *kvf_wire_show(kvf_shown *out, const char *text, size_t bytes, size_t skip);

#endif
