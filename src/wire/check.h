/*
 * From bytes to msgpack objects, trusting nothing.
 */
#ifndef KVF_WIRE_CHECK_H
#define KVF_WIRE_CHECK_H

#include <msgpack.h>

#include "wire/wire.h"

#define KVF_WIRE_MAX_DEPTH 8u           /* of arrays and maps in each other */
#define KVF_WIRE_MAX_OBJECTS (1u << 20) /* in one piece of msgpack: 24 bytes of memory each */

/**
 * Walks over bytes that should be one msgpack object: nothing is missing, nothing follows, nothing is nested
 * deeper or has more objects than allowed. Allocates nothing.
 */
kvf_status kvf_wire_check(kvf_bytes bytes);

/**
 * Unpacks bytes after checking them. Texts and bins of the object point into `bytes`, the rest into `zone`,
 * which this function makes; msgpack_zone_destroy() it on success.
 *
 * @return KVF_OK, KVF_E_PARSE, KVF_E_NOMEM
 */
kvf_status kvf_wire_unpack(kvf_bytes bytes, msgpack_zone *zone, msgpack_object *out);

#endif
