/*
 * From bytes to msgpack objects, trusting nothing.
 */
#ifndef KVF_WIRE_CHECK_H
#define KVF_WIRE_CHECK_H

#include <msgpack.h>

#include "wire/wire.h"

#define KVF_WIRE_MAX_DEPTH 8u           /* of nested arrays and maps */
#define KVF_WIRE_MAX_OBJECTS (1u << 20) /* in one piece of msgpack: 24 bytes of memory each */

/**
 * Checks that bytes are one msgpack object: complete, with nothing after it, and with no more depth or objects than
 * allowed. Allocates nothing.
 */
kvf_status kvf_wire_check(kvf_bytes bytes);

/**
 * Unpacks bytes after checking them. Texts and bins of the object point into `bytes`, the rest into `zone`, which this
 * function makes; on success the caller must call msgpack_zone_destroy().
 *
 * @return KVF_OK, KVF_E_PARSE, KVF_E_NOMEM
 */
kvf_status kvf_wire_unpack(kvf_bytes bytes, msgpack_zone *zone, msgpack_object *out);

#endif
