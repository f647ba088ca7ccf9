/*
 * Structs as msgpack maps. A table gives each field's key, type, offset in the struct and allowed values. Writing and
 * reading use the same table, so a sender checks a message as its receiver will.
 */
#ifndef KVF_WIRE_FIELDS_H
#define KVF_WIRE_FIELDS_H

#include <endian.h>

#include <msgpack.h>

#include "wire/wire.h"

/* ---- memory behind a message ----------------------------------------------------------------- */

/** Allocates memory that lives until kvf_wire_discard(); returns NULL if there is none. `*storage` must be NULL at
 * first. */
void *kvf_wire_keep(void **storage, size_t count, size_t element_bytes);

/**
 * Reserves `bytes` bytes for texts in one piece, so that kvf_free(*storage) frees them all.
 */
kvf_status kvf_wire_keep_room(void **storage, size_t bytes);

/** How many bytes `storage` has allocated. */
uint64_t kvf_wire_kept(const void *storage);

void kvf_wire_discard(void **storage);

/* ---- bytes being written --------------------------------------------------------------------- */

/** The first failure stays in `status`, and nothing is written after it. */
typedef struct kvf_packing {
    kvf_wire_buffer bytes;
    size_t capacity;
    kvf_status status;
    msgpack_packer packer; /* the results of its functions need not be checked: failures go to `status` */
} kvf_packing;

void kvf_packing_start(kvf_packing *packing);

/** Hands over the bytes, or frees them and returns the first failure. */
kvf_status kvf_packing_end(kvf_packing *packing, kvf_wire_buffer *out);

void kvf_pack_key(kvf_packing *packing, const char *key);

/* ---- fields ---------------------------------------------------------------------------------- */

typedef enum kvf_wire_field_type {
    KVF_FIELD_U32, /* least to most; a most of 0 means no upper bound */
    KVF_FIELD_U64, /* the same */
    KVF_FIELD_BOOL,
    KVF_FIELD_STATUS,   /* kvf_status */
    KVF_FIELD_NAME,     /* const char *, least to most bytes, no control characters */
    KVF_FIELD_KEY,      /* const char *, Z85 of 40 characters, or empty */
    KVF_FIELD_TEXT,     /* const char *, least to most bytes */
    KVF_FIELD_SENTENCE, /* the same, and control characters are read as '?' */
    KVF_FIELD_FIXED,    /* an array of `most` bytes */
    KVF_FIELD_BYTES,    /* kvf_bytes, least to most */
    KVF_FIELD_RANGE,    /* kvf_range */
    KVF_FIELD_NUMBERS,  /* const uint64_t *, and a count of `width` numbers each */
    KVF_FIELD_LIST,     /* const kvf_bytes *, and a count */
    KVF_FIELD_GROUPS,   /* const kvf_wire_group *, and a count */
    KVF_FIELD_RECORDS,  /* const kvf_record *, and a count; missing where there are none */
} kvf_wire_field_type;

typedef struct kvf_wire_field {
    const char *key;
    kvf_wire_field_type type;
    size_t offset; /* in the struct */
    uint64_t least, most;
    size_t count_offset; /* of the uint32_t with the count */
    uint32_t width;
    uint32_t kinds; /* bits: the field is there in bodies of these kinds; 0 means in all */
} kvf_wire_field;

/** A body: its fields, and a check across them. */
typedef struct kvf_body_form {
    const kvf_wire_field *fields;
    size_t field_count;
    /** Checks conditions across fields; fails with `bad` and a reason. May be NULL. */
    kvf_status (*check)(const void *body, kvf_status bad);
} kvf_body_form;

/** Whether bodies of this kind have the field. Kinds are below 32. */
static inline bool kvf_wire_field_is_in(const kvf_wire_field *field, uint32_t kind) {
    return !field->kinds || (field->kinds & 1u << kind);
}

/** The largest number a field may have. */
static inline uint64_t kvf_wire_field_most(const kvf_wire_field *field) {
    return field->most ? field->most : field->type == KVF_FIELD_U32 ? UINT32_MAX : UINT64_MAX;
}

/** Writes the fields that bodies of this kind have, as a map, or only as pairs for a map whose head is written
 * already. */
void kvf_wire_fields_write_map(kvf_packing *packing, const kvf_body_form *form, uint32_t kind,
                               const void *body);
uint32_t kvf_wire_fields_count(const kvf_body_form *form, uint32_t kind, const void *body);
void kvf_wire_fields_write(kvf_packing *packing, const kvf_body_form *form, uint32_t kind, const void *body);

/** Reads the fields into a zeroed `body`. Memory that they point to goes into `storage`. */
kvf_status kvf_wire_fields_read(const msgpack_object *map, const kvf_body_form *form, uint32_t kind,
                                void *body, void **storage);

/** Finds a value of a map by its key: KVF_E_PARSE if the key is missing or occurs twice. */
kvf_status kvf_wire_field_find(const msgpack_object *map, const char *key, const msgpack_object **out);

bool kvf_wire_field_has(const msgpack_object *map, const char *key);

/** A number from least to most. */
kvf_status kvf_wire_field_number(const msgpack_object *object, const char *key, uint64_t least, uint64_t most,
                                 uint64_t *out);

/** The elements of an array, which must have least to most of them. */
kvf_status kvf_wire_field_array(const msgpack_object *object, const char *key, uint64_t least, uint64_t most,
                                const msgpack_object **elements, uint32_t *count);

/* The checks that writing and reading share (fields.c); each fails with `bad`. */
kvf_status kvf_wire_field_check_number(const char *key, uint64_t value, uint64_t least, uint64_t most,
                                       kvf_status bad);
kvf_status kvf_wire_field_check_status(const char *key, uint64_t value, kvf_status bad);
kvf_status kvf_wire_field_check_range(const char *key, uint64_t begin, uint64_t end, kvf_status bad);
kvf_status kvf_wire_field_check_size(const char *key, const char *unit, uint64_t size, uint64_t least,
                                     uint64_t most, kvf_status bad);
kvf_status kvf_wire_field_check_text(const kvf_wire_field *field, const char *text, size_t bytes,
                                     kvf_status bad);

/* ---- block tables (blocks.c) ----------------------------------------------------------------- */

kvf_status kvf_wire_groups_write(kvf_packing *packing, const char *key, const kvf_wire_group *groups,
                                 uint32_t count);
kvf_status kvf_wire_groups_read(const msgpack_object *object, const char *key, const kvf_wire_group **groups,
                                uint32_t *count, void **storage);

/* ---- records (records.c) --------------------------------------------------------------------- */

kvf_status kvf_wire_records_write(kvf_packing *packing, const char *key, const kvf_record *records,
                                  uint32_t count);
kvf_status kvf_wire_records_read(const msgpack_object *object, const char *key, const kvf_record **records,
                                 uint32_t *count, void **storage);

/* ---- numbers as bytes ------------------------------------------------------------------------ */

static inline void kvf_put_little32(uint8_t *at, uint32_t number) {
    number = htole32(number);
    memcpy(at, &number, sizeof number);
}

static inline void kvf_put_little64(uint8_t *at, uint64_t number) {
    number = htole64(number);
    memcpy(at, &number, sizeof number);
}

static inline uint32_t kvf_get_little32(const uint8_t *at) {
    uint32_t number;
    memcpy(&number, at, sizeof number);
    return le32toh(number);
}

static inline uint64_t kvf_get_little64(const uint8_t *at) {
    uint64_t number;
    memcpy(&number, at, sizeof number);
    return le64toh(number);
}

#endif
