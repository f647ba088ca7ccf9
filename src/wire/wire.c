/*
 * Messages: the envelope, and finding the body's table from it.
 *
 *   [ "kvf", version, kind, digest, body ]      digest: 32 bytes, or none; body: bytes, msgpack in themselves
 */
#include "wire/check.h"
#include "wire/forms.h"

#define MAGIC "kvf"
#define ENVELOPE_FIELDS 5
#define NAME_BYTES 32

const char *kvf_message_kind_name(kvf_message_kind kind) {
    switch (kind) {
    case KVF_MESSAGE_HELLO:
        return "HELLO";
    case KVF_MESSAGE_WELCOME:
        return "WELCOME";
    case KVF_MESSAGE_REFUSED:
        return "REFUSED";
    case KVF_MESSAGE_CALL:
        return "CALL";
    case KVF_MESSAGE_ANSWER:
        return "ANSWER";
    case KVF_MESSAGE_COMMAND:
        return "COMMAND";
    case KVF_MESSAGE_REPLY:
        return "REPLY";
    }
    return "unknown";
}

/* Whether messages of a known kind have a digest. */
static bool has_digest(kvf_message_kind kind) {
    return kind <= KVF_MESSAGE_REFUSED;
}

/* Whether bodies of this kind of message have a kind of call. */
static bool has_call(kvf_message_kind kind) {
    return kind == KVF_MESSAGE_CALL || kind == KVF_MESSAGE_ANSWER;
}

static const kvf_body_form *form_of(kvf_message_kind kind) {
    static const kvf_body_form *const forms[] = {
        [KVF_MESSAGE_HELLO] = &kvf_hello_form,     [KVF_MESSAGE_WELCOME] = &kvf_welcome_form,
        [KVF_MESSAGE_REFUSED] = &kvf_refused_form, [KVF_MESSAGE_CALL] = &kvf_call_form,
        [KVF_MESSAGE_ANSWER] = &kvf_answer_form,   [KVF_MESSAGE_COMMAND] = &kvf_command_form,
        [KVF_MESSAGE_REPLY] = &kvf_reply_form,
    };
    return kind >= KVF_MESSAGE_HELLO && kind <= KVF_MESSAGE_LAST ? forms[kind] : NULL;
}

/* Prefixes the detail with the message: "HELLO", "call ACQUIRE", "answer to ACQUIRE". */
static kvf_status fail_in_message(kvf_status status, kvf_message_kind kind, uint32_t call) {
    if (has_call(kind))
        return kvf_fail_in(status, "%s %s: ", kind == KVF_MESSAGE_CALL ? "call" : "answer to",
                           kvf_call_kind_name((kvf_call_kind)call));
    return kvf_fail_in(status, "%s: ", kvf_message_kind_name(kind));
}

/* The body of a message's kind, and the kind of call it is (0 for messages that are neither a CALL nor an ANSWER). */
static const void *body_of(const kvf_message *message, uint32_t *call) {
    *call = 0;
    switch (message->kind) {
    case KVF_MESSAGE_HELLO:
        return &message->hello;
    case KVF_MESSAGE_WELCOME:
        return &message->welcome;
    case KVF_MESSAGE_REFUSED:
        return &message->refused;
    case KVF_MESSAGE_CALL:
        *call = message->call.kind;
        return &message->call;
    case KVF_MESSAGE_ANSWER:
        *call = message->answer.kind;
        return &message->answer;
    case KVF_MESSAGE_COMMAND:
        return &message->command;
    case KVF_MESSAGE_REPLY:
        return &message->reply;
    }
    return NULL;
}

/* ---- encoding -------------------------------------------------------------------------------- */

static kvf_status pack_body(const kvf_message *message, kvf_wire_buffer *out) {
    uint32_t call;
    const void *body = body_of(message, &call);
    if (call == 0 && has_call(message->kind))
        return kvf_fail(KVF_E_RANGE, "kind is 0; allowed: %d to %d", KVF_CALL_JOIN, KVF_CALL_LAST);
    if (call && !kvf_call_kind_is_known(call))
        return kvf_fail(KVF_E_RANGE, "kind is %u; allowed: %d to %d", call, KVF_CALL_JOIN, KVF_CALL_LAST);
    kvf_packing packing;
    kvf_packing_start(&packing);
    kvf_wire_fields_write_map(&packing, form_of(message->kind), call, body);
    kvf_status status = kvf_packing_end(&packing, out);
    return status ? fail_in_message(status, message->kind, call) : KVF_OK;
}

kvf_status kvf_wire_encode(const kvf_message *message, kvf_wire_buffer *out) {
    if (!form_of(message->kind))
        return kvf_fail(KVF_E_RANGE, "message: kind is %u; allowed: %d to %d", message->kind,
                        KVF_MESSAGE_HELLO, KVF_MESSAGE_LAST);
    kvf_wire_buffer body = {0};
    kvf_status status = pack_body(message, &body);
    if (status)
        return status;
    kvf_packing packing;
    kvf_packing_start(&packing);
    msgpack_pack_array(&packing.packer, ENVELOPE_FIELDS);
    kvf_pack_key(&packing, MAGIC);
    msgpack_pack_uint32(&packing.packer, KVF_WIRE_VERSION);
    msgpack_pack_uint32(&packing.packer, message->kind);
    msgpack_pack_bin_with_body(&packing.packer, message->digest,
                               has_digest(message->kind) ? KVF_WIRE_DIGEST_BYTES : 0);
    msgpack_pack_bin_with_body(&packing.packer, body.data, body.size);
    kvf_wire_buffer_free(&body);
    status = kvf_packing_end(&packing, out);
    return status ? kvf_fail_in(status, "%s: ", kvf_message_kind_name(message->kind)) : KVF_OK;
}

/* The session is the first field of both bodies: its key is a short text, and its length fits in one byte. */
void kvf_wire_set_session(kvf_wire_buffer *message, const uint8_t session[KVF_WIRE_SESSION_BYTES]) {
    static const uint8_t key[] = {0xa7, 's', 'e', 's', 's', 'i', 'o', 'n', 0xc4, KVF_WIRE_SESSION_BYTES};
    uint8_t *at = memmem(message->data, message->size, key, sizeof key);
    KVF_ASSERT(at && at + sizeof key + KVF_WIRE_SESSION_BYTES <= message->data + message->size);
    if (at)
        memcpy(at + sizeof key, session, KVF_WIRE_SESSION_BYTES);
}

/* ---- decoding -------------------------------------------------------------------------------- */

static kvf_status take_digest(const msgpack_object *field, kvf_message *out) {
    if (field->type != MSGPACK_OBJECT_BIN)
        return kvf_fail(KVF_E_PARSE, "digest is not a msgpack bin");
    uint32_t size = field->via.bin.size;
    bool ours = out->version == KVF_WIRE_VERSION;
    uint32_t wanted = ours && !has_digest(out->kind) ? 0 : KVF_WIRE_DIGEST_BYTES;
    if (size != wanted && (ours || size != 0))
        return kvf_fail(KVF_E_PARSE, "digest has %u bytes; allowed: %u", size, wanted);
    if (size)
        memcpy(out->digest, field->via.bin.ptr, size);
    return KVF_OK;
}

/* Envelopes of other versions have the same form, but may have other kinds. */
static kvf_status read_envelope(const msgpack_object *envelope, kvf_message *out) {
    const msgpack_object *fields;
    uint32_t count;
    uint64_t number;
    kvf_status status =
        kvf_wire_field_array(envelope, "the envelope", ENVELOPE_FIELDS, ENVELOPE_FIELDS, &fields, &count);
    if (status)
        return status;
    if (fields[0].type != MSGPACK_OBJECT_STR || fields[0].via.str.size != strlen(MAGIC) ||
        memcmp(fields[0].via.str.ptr, MAGIC, strlen(MAGIC)) != 0)
        return kvf_fail(KVF_E_PARSE, "the envelope does not begin with \"%s\"", MAGIC);
    if ((status = kvf_wire_field_number(&fields[1], "version", 1, UINT32_MAX, &number)))
        return status;
    out->version = (uint32_t)number;
    bool ours = out->version == KVF_WIRE_VERSION;
    status = kvf_wire_field_number(&fields[2], "kind", ours ? KVF_MESSAGE_HELLO : 0,
                                   ours ? KVF_MESSAGE_LAST : INT32_MAX, &number);
    if (status)
        return status;
    out->kind = (kvf_message_kind)number;
    if ((status = take_digest(&fields[3], out)))
        return status;
    if (fields[4].type != MSGPACK_OBJECT_BIN)
        return kvf_fail(KVF_E_PARSE, "body is not a msgpack bin");
    out->body = (kvf_bytes){fields[4].via.bin.ptr, fields[4].via.bin.size};
    return KVF_OK;
}

kvf_status kvf_wire_open(kvf_bytes bytes, kvf_message *out) {
    *out = (kvf_message){0};
    if (bytes.size > KVF_WIRE_MAX_BYTES)
        return kvf_fail(KVF_E_PARSE, "message: it has %zu bytes; allowed: up to %u", bytes.size,
                        KVF_WIRE_MAX_BYTES);
    msgpack_zone zone;
    msgpack_object envelope;
    kvf_status status = kvf_wire_unpack(bytes, &zone, &envelope);
    if (!status) {
        status = read_envelope(&envelope, out);
        msgpack_zone_destroy(&zone);
    }
    if (!status)
        return KVF_OK;
    *out = (kvf_message){0};
    return kvf_fail_in(status, "message: ");
}

/* The kind comes first: it says which other fields there are. */
static kvf_status read_kind(const msgpack_object *map, kvf_message_kind kind, uint32_t *out) {
    const msgpack_object *object;
    uint64_t number;
    *out = 0;
    if (!has_call(kind))
        return KVF_OK;
    kvf_status status = kvf_wire_field_find(map, "kind", &object);
    if (!status)
        status = kvf_wire_field_number(object, "kind", KVF_CALL_JOIN, KVF_CALL_LAST, &number);
    if (!status)
        *out = (uint32_t)number;
    return status;
}

/* Clears what an earlier read left in the union. */
static void clear_body(kvf_message *message) {
    kvf_message_free(message);
    size_t begin = offsetof(kvf_message, hello);
    memset((uint8_t *)message + begin, 0, offsetof(kvf_message, storage) - begin);
}

kvf_status kvf_wire_read(kvf_message *message) {
    if (message->version != KVF_WIRE_VERSION)
        return kvf_fail(KVF_E_UNSUPPORTED, "message: version is %u; this library speaks version %u",
                        message->version, KVF_WIRE_VERSION);
    const kvf_body_form *form = form_of(message->kind);
    if (!form)
        return kvf_fail(KVF_E_PARSE, "message: kind is %u; allowed: %d to %d", message->kind,
                        KVF_MESSAGE_HELLO, KVF_MESSAGE_LAST);
    clear_body(message);
    msgpack_zone zone;
    msgpack_object map;
    uint32_t call = 0, unused;
    kvf_status status = kvf_wire_unpack(message->body, &zone, &map);
    if (!status) {
        status = read_kind(&map, message->kind, &call);
        if (!status)
            status =
                kvf_wire_fields_read(&map, form, call, (void *)body_of(message, &unused), &message->storage);
        msgpack_zone_destroy(&zone);
    }
    if (!status)
        return KVF_OK;
    clear_body(message);
    return fail_in_message(status, message->kind, call);
}

uint64_t kvf_message_kept(const kvf_message *message) {
    return kvf_wire_kept(message->storage);
}

void kvf_message_free(kvf_message *message) {
    kvf_wire_discard(&message->storage);
}
