/*
 * The messages of agents, as structs and as bytes (docs/protocol.md has the layout).
 *
 * A message is decoded in two steps. The *envelope* is the same in every version of the protocol: the version, the kind
 * of message, and a body of bytes. The *body* is decoded only if the version is ours.
 *
 * Two engines need not have the same model. The server sends its facts to the client, and both use the server's terms:
 * groups, parts and layers in all messages between the two are numbered as in the server's facts, and the client's
 * shard in JOIN is one of the server's model.
 *
 * Decoding trusts nothing: bytes are checked once before anything is allocated. A count that the following bytes cannot
 * fill, a nesting deeper than the protocol's, a field that is missing, of another type or out of range, and bytes after
 * the end are KVF_E_PARSE with a detail that names message and field. Unknown fields of a body are skipped, so that
 * fields can be added.
 *
 * Encoders check the same ranges, by the same tables (fields.h): what a decoder would refuse is KVF_E_RANGE, or
 * KVF_E_INVALID for a NULL with a count. Names have no control characters, keys are 40 characters of Z85 or empty, and
 * a text of NULL is sent as empty.
 *
 * These functions keep no state; any thread may call them.
 */
#ifndef KVF_WIRE_H
#define KVF_WIRE_H

#include <kvferry/record.h>
#include <kvferry/request.h>

#include "base/base.h"
#include "model/match.h"

#define KVF_WIRE_VERSION 2u
#define KVF_WIRE_MAX_BYTES (1u << 20)       /* of one message */
#define KVF_WIRE_STRANGER_BYTES (64u << 10) /* of one message from a sender without a session */
#define KVF_WIRE_MAX_NAME 255u              /* engine names, endpoints, keys */
#define KVF_WIRE_MAX_REQUEST 1024u          /* bytes of a request id */
#define KVF_WIRE_MAX_RANKS 65536u
#define KVF_WIRE_MAX_DETAIL 4096u         /* bytes of a detail text */
#define KVF_WIRE_MAX_FACTS (256u << 10)   /* bytes of a text of facts */
#define KVF_WIRE_MAX_BLOCKS (192u << 10)  /* block ids in one message, over all groups: 768 KiB at most */
#define KVF_WIRE_MAX_TABLE_IDS (4u << 20) /* block ids in tables that come in parts */
#define KVF_WIRE_DIGEST_BYTES 32u
#define KVF_WIRE_SESSION_BYTES 16u
#define KVF_WIRE_SECRET_BYTES 16u  /* by which a process proves its incarnation */
#define KVF_WIRE_COMMAND_BYTES 16u /* by which repetitions of a command are known */
#define KVF_WIRE_MAX_VERB 64u

/** Bytes that are not owned. Request ids are kept so, because they may contain any bytes. */
typedef struct kvf_bytes {
    const void *data;
    size_t size;
} kvf_bytes;

/** Bytes made by an encoder, owned by the caller: kvf_wire_buffer_free(). */
typedef struct kvf_wire_buffer {
    uint8_t *data;
    size_t size;
} kvf_wire_buffer;

void kvf_wire_buffer_free(kvf_wire_buffer *buffer);

/* ---- what must match ------------------------------------------------------------------------- */

/**
 * Makes the facts of an engine, which describe its elements: one `name: value` a line, in a fixed order; for each group
 * its kind, window, chunk, layers and the types that may be converted, and for each part its dtype, units, cell size
 * and rows. They leave out what kvf_model_compare() does not compare, and everything that an engine may choose
 * (parallel sizes, block sizes, order, padding, how it cuts cells).
 *
 * @param convert  for each group a set, see KVF_DTYPE_BIT(); NULL: none
 * @param own  further facts of the engine's own (weights revision, rotary scaling ...), `name: value` lines, or
 *             NULL. A name that begins with a group's name and a dot is a fact of that group only
 * @param out  receives a text, free with kvf_free()
 */
kvf_status kvf_wire_facts(const kvf_model *model, const uint32_t *convert, const char *own, char **out);

/** The facts of a peer, read. */
typedef struct kvf_facts {
    kvf_model *model;
    uint32_t *convert; /* for each group the types that may be converted: a set, see KVF_DTYPE_BIT() */
    const char *own;   /* points into the text; "" if there are none */
} kvf_facts;

/**
 * Reads facts from a peer, which may be anything.
 *
 * @param text  must live as long as the facts
 * @param out   see kvf_facts_free()
 * @return KVF_OK, KVF_E_PARSE (the detail names the line), KVF_E_UNSUPPORTED (an element type not known here), an error
 *         of kvf_model_create(), KVF_E_NOMEM
 */
kvf_status kvf_wire_read_facts(const char *text, kvf_facts *out);
void kvf_facts_free(kvf_facts *facts);

/**
 * Compares the facts of two engines, group by group.
 *
 * @param out  receives a match, see kvf_match_free()
 * @return KVF_OK if any group is the same, or would be after conversion; KVF_E_MISMATCH if there is no such group, or
 *         if the engines' own facts differ: the detail lists every field that differs, with both values; an error of
 *         kvf_wire_read_facts() for theirs
 */
kvf_status kvf_wire_match(const kvf_facts *ours, const char *theirs, const char *their_name, kvf_match **out);

/**
 * The incarnation that a secret proves: the first eight bytes, little endian, of the SHA-256 of the secret. An
 * incarnation is public; only the process that chose it knows the secret.
 */
uint64_t kvf_wire_incarnation(const uint8_t secret[KVF_WIRE_SECRET_BYTES]);

/** SHA-256 of the facts. */
void kvf_wire_digest(const char *facts, uint8_t digest[KVF_WIRE_DIGEST_BYTES]);

/** Adds a rank and its encoded shard to a sum that begins as the digest of the facts: the new sum is the SHA-256 of the
 * old sum, the rank's number and these bytes. It is never sent. */
void kvf_wire_sum_shard(uint8_t sum[KVF_WIRE_DIGEST_BYTES], uint32_t rank, kvf_bytes shard);

/**
 * Compares two texts of engines' own facts: KVF_OK if they do not differ; otherwise KVF_E_MISMATCH and a detail that
 * lists the first dozen fields that differ, with both values, or that only one side has, and how many more there are.
 * `theirs` came from a peer and may be anything.
 */
kvf_status kvf_wire_compare_own(const char *ours, const char *theirs, const char *their_name);

/* ---- shards ---------------------------------------------------------------------------------- */

/**
 * Encodes a shard. Placements that are evenly spaced over layers are written once, so the size is O(groups x parts +
 * regions), not O(layers), for any regular layout.
 *
 * @param told  the model of the facts that the reader knows: types that differ from it are written. NULL: the shard's
 */
kvf_status kvf_wire_encode_shard(const kvf_shard *shard, const kvf_model *told, kvf_wire_buffer *out);

/**
 * Makes a shard of `model` from bytes of a peer. Everything kvf_shard_create() checks is checked.
 *
 * @param convert  for each group the set of types that parts may have instead of the model's, which must be in the set
 *                 too, see KVF_DTYPE_BIT(). The shard is then one of the model with its own types. NULL: none
 * @param pieces   receives how many pieces of cells were compared, and as many more as it took to read many placements
 *                 and regions, even if the shard is refused; may be NULL
 * @return KVF_OK, KVF_E_PARSE, KVF_E_UNSUPPORTED (a type that is not in `convert`), or an error of kvf_shard_create()
 */
kvf_status kvf_wire_decode_shard(const kvf_model *model, const uint32_t *convert, kvf_bytes bytes,
                                 uint64_t *pieces, kvf_shard **out);

/* ---- messages -------------------------------------------------------------------------------- */

typedef enum kvf_message_kind {
    KVF_MESSAGE_HELLO = 1, /* client to server; answered by WELCOME or REFUSED */
    KVF_MESSAGE_WELCOME,
    KVF_MESSAGE_REFUSED,
    KVF_MESSAGE_CALL,   /* a request that is repeated until answered; `call` has its kind */
    KVF_MESSAGE_ANSWER, /* answers a call */
    KVF_MESSAGE_COMMAND, /* an operator's program asks an engine; needs no session; repeated until replied to */
    KVF_MESSAGE_REPLY    /* replies to a command */
} kvf_message_kind;

#define KVF_MESSAGE_LAST KVF_MESSAGE_REPLY

/** The kinds of calls. Each side may call the other. */
typedef enum kvf_call_kind {
    KVF_CALL_JOIN = 1, /* client: here is my shard and my card, so that you can write to me */
    KVF_CALL_ACQUIRE,  /* consumer: I want to read this request; answer: a lease and the block tables */
    KVF_CALL_RELEASE,  /* consumer: I have read it, or need not, or gave up */
    KVF_CALL_BEAT,     /* consumer: keep these leases and expectations alive; answer: those that have ended */
    KVF_CALL_EXPECT,   /* consumer: write this request to these blocks of mine */
    KVF_CALL_WRITTEN,  /* producer: everything is written, or never will be */
    KVF_CALL_WITHDRAW, /* consumer: write no more; answered when nothing can be written any more */
    KVF_CALL_CHECKSUM, /* consumer: checksums of cells under a lease */
    KVF_CALL_PROBE,    /* producer: are you still there? Another process claims your name */
} kvf_call_kind;

#define KVF_CALL_LAST KVF_CALL_PROBE

/** One group of a request: a block table of the sender, and the steps it holds (or wants). */
typedef kvf_group_steps kvf_wire_group;

/** The introduction of one rank of an engine; contains no secret. */
typedef struct kvf_introduction {
    const char *engine;   /* its name */
    uint64_t incarnation; /* chosen anew by each process */
    uint32_t rank, rank_count;
    const char *endpoint;                  /* where its agent listens, "tcp://10.0.0.1:5555" */
    const char *public_key;                /* Z85, 40 characters; "" without encryption */
    uint8_t digest[KVF_WIRE_DIGEST_BYTES]; /* of the facts that the shard refers to */
    kvf_bytes shard;                       /* of kvf_wire_encode_shard() */
    const char *facts;                     /* for a directory, which has no facts of its own; "" for peers */
} kvf_introduction;

typedef struct kvf_hello {
    const char *engine;
    uint64_t incarnation;
    uint32_t rank, rank_count;
    bool wants_ranks;                      /* asks for the introductions of all ranks that the server knows */
    uint32_t first_rank;                   /* with wants_ranks: from this rank on, as many as fit */
    bool wants_card;                       /* asks for the card of the server's memory */
    uint8_t secret[KVF_WIRE_SECRET_BYTES]; /* with wants_card: proves the incarnation; otherwise zeros */
    uint64_t clock_ns;
} kvf_hello;

typedef struct kvf_welcome {
    uint8_t session[KVF_WIRE_SESSION_BYTES];
    const char *engine;
    uint64_t incarnation;
    uint32_t rank, rank_count; /* rank is UINT32_MAX of a directory, which holds no memory */
    uint64_t clock_ns;         /* of the server */
    uint64_t lease_ns;   /* how long it keeps a client's leases without a heartbeat; 0 without a session */
    kvf_bytes card;      /* size 0 if not asked for */
    uint32_t first_rank; /* of the first introduction; the others follow in order */
    const kvf_bytes *introductions; /* each of kvf_wire_encode_introduction() */
    uint32_t introduction_count;
    /* The server's facts, if ranks were asked for and the digests differ; otherwise "". */
    const char *facts;
} kvf_welcome;

typedef struct kvf_refused {
    kvf_status status;
    const char *detail;
} kvf_refused;

/** Whether a refusal is temporary, so that the client asks again. */
static inline bool kvf_refused_for_now(kvf_status status) {
    return status == KVF_E_AGAIN || status == KVF_E_LIMIT;
}

/** What a JOIN says about its sender's stage. */
typedef enum kvf_join_stage {
    KVF_JOIN_UNSTAGED = 0, /**< the sender takes no flows that the receiver opens */
    KVF_JOIN_STAGED = 1,   /**< the sender takes them */
    /** The sender takes them from now on. It has joined this session before, and writes to it go on. */
    KVF_JOIN_ADDS_STAGE = 2,
} kvf_join_stage;

/** One call. `kind` decides which fields are used; the others are zero. */
typedef struct kvf_call_body {
    uint8_t session[KVF_WIRE_SESSION_BYTES];
    uint64_t number; /* counts the caller's calls in this session; the answer repeats it */
    kvf_call_kind kind;
    kvf_bytes request; /* ACQUIRE, RELEASE, EXPECT, WRITTEN, WITHDRAW */
    /* EXPECT, WRITTEN, WITHDRAW: of the expectation. RELEASE, CHECKSUM: of the lease. JOIN: of the sender's regions,
     * which is higher after each change. */
    uint64_t generation;
    uint64_t time_ns; /* ACQUIRE: how long to wait for the request. EXPECT: until when writing is allowed,
                            on the receiver's clock */
    uint64_t earlier; /* RELEASE, WITHDRAW: number of the ACQUIRE or EXPECT that this ends, 0: of none.
                            Should that one come late, it is ignored. Below `number` */
    /* ACQUIRE, RELEASE, EXPECT: how many ranks of the sender's engine send this call to this agent */
    uint32_t rank_count;
    kvf_status status;         /* RELEASE, WRITTEN: KVF_OK, or why not */
    const char *detail;        /* WRITTEN */
    uint64_t bytes;            /* WRITTEN */
    const kvf_record *records; /* WRITTEN: what travels with the cache; `rank` is not told */
    uint32_t record_count;
    const kvf_wire_group *groups; /* EXPECT; one for each group of the model, or none: nothing to write */
    uint32_t group_count;
    /* For tables larger than a message. EXPECT: the number of the first id in `groups`, counted over all groups, and
     * whether another EXPECT with more follows. ACQUIRE: the number of the first id wanted. */
    uint32_t first_id;
    bool more;
    kvf_bytes introduction; /* JOIN */
    kvf_bytes card;         /* JOIN */
    kvf_join_stage stage;   /* JOIN */
    uint32_t packed;        /* EXPECT: 1: the blocks are written only by flows, never directly */
    const uint64_t *leases; /* BEAT: generations of leases */
    uint32_t lease_count;
    const uint64_t *expectations; /* BEAT: pairs of a generation and an end time on the receiver's clock */
    uint32_t expectation_count;   /* pairs */
    uint64_t clock_ns;            /* BEAT: of the sender */
    /* CHECKSUM */
    uint32_t group, part;
    kvf_range layers, units;
    uint64_t begin, end;
} kvf_call_body;

typedef struct kvf_answer {
    uint8_t session[KVF_WIRE_SESSION_BYTES];
    uint64_t number;
    kvf_call_kind kind; /* of the call */
    kvf_status status;
    const char *detail;
    uint64_t generation;          /* ACQUIRE: of the lease */
    uint64_t time_ns;             /* ACQUIRE, BEAT: how long a lease lasts from now */
    const kvf_wire_group *groups; /* ACQUIRE */
    uint32_t group_count;
    uint32_t first_id;         /* ACQUIRE: number of the first id in `groups` */
    bool more;                 /* ACQUIRE: more follow, and another ACQUIRE asks for them */
    const kvf_record *records; /* ACQUIRE, with the first id 0: what travels with it; `rank` is not told */
    uint32_t record_count;
    uint32_t stage;       /* JOIN: 1: the answering side takes flows that the caller opens */
    const uint64_t *gone; /* BEAT: leases and expectations that have ended */
    uint32_t gone_count;
    const uint64_t *sums; /* CHECKSUM: one for each step */
    uint32_t sum_count;
    uint64_t clock_ns; /* BEAT: of the sender */
} kvf_answer;

typedef struct kvf_command_body {
    uint8_t id[KVF_WIRE_COMMAND_BYTES]; /* random; repetitions have the same */
    const char *verb;
    kvf_bytes request;         /* may be empty */
    const char *engine;        /* another engine that it is about; all "": none */
    const char *endpoint;      /* where that one is met */
    const char *public_key;    /* Z85, 40 characters; "" without encryption */
    uint64_t time_ns;          /* how long the engine may take */
    const kvf_record *records; /* `rank` is not told */
    uint32_t record_count;
} kvf_command_body;

typedef struct kvf_reply {
    uint8_t id[KVF_WIRE_COMMAND_BYTES]; /* of the command */
    /* KVF_E_AGAIN: the engine has it, and has not replied yet. KVF_E_LIMIT: there is no room for it now. Others are
     * final. */
    kvf_status status;
    const char *detail;
    const kvf_record *records;
    uint32_t record_count;
} kvf_reply;

typedef struct kvf_message {
    /* envelope */
    uint32_t version;
    kvf_message_kind kind;
    uint8_t digest
        [KVF_WIRE_DIGEST_BYTES]; /* HELLO, WELCOME, REFUSED: of the sender's facts; of the receiver's in a
                                              HELLO that asks for a session */
    kvf_bytes body;              /* after kvf_wire_open(): still encoded */
    /* body */
    union {
        kvf_hello hello;
        kvf_welcome welcome;
        kvf_refused refused;
        kvf_call_body call;
        kvf_answer answer;
        kvf_command_body command;
        kvf_reply reply;
    };
    void *storage; /* what kvf_wire_read() allocated */
} kvf_message;

/** Encodes a message whole; `version` and `body` are filled in by this function. */
kvf_status kvf_wire_encode(const kvf_message *message, kvf_wire_buffer *out);

/**
 * Selects the part of block tables that fits into one message: from id number `first_id` on, counted over all groups.
 *
 * @param part  receives `count` groups, whose tables point into those of `groups`
 * @return whether others follow
 */
bool kvf_wire_part(const kvf_wire_group *groups, uint32_t count, uint32_t first_id, kvf_wire_group *part);

/** Replaces the session in a call or an answer that kvf_wire_encode() made; all sessions are equally long. */
void kvf_wire_set_session(kvf_wire_buffer *message, const uint8_t session[KVF_WIRE_SESSION_BYTES]);

/**
 * First step: the envelope. Succeeds for other versions of the protocol too: check `version` and `digest`. `body`
 * points into `bytes`.
 */
kvf_status kvf_wire_open(kvf_bytes bytes, kvf_message *out);

/**
 * Second step: the body, into the union. Texts end in a zero byte and have none inside. Memory that the message points
 * to is owned by it, see kvf_message_free(), or lies in the bytes given to kvf_wire_open().
 *
 * @return KVF_OK, KVF_E_PARSE, KVF_E_UNSUPPORTED (another version), KVF_E_NOMEM
 */
kvf_status kvf_wire_read(kvf_message *message);

/** How many bytes kvf_wire_read() allocated: a few bytes of a message may stand for many block ids. */
uint64_t kvf_message_kept(const kvf_message *message);

/** Frees what kvf_wire_read() allocated; a zeroed message is accepted. */
void kvf_message_free(kvf_message *message);

/**
 * What holds of records wherever they come from: how many, how large, their names and ranges.
 *
 * @return KVF_OK, `bad`, or KVF_E_INVALID for a NULL with a size or a count
 */
kvf_status kvf_wire_check_records(const kvf_record *records, uint32_t count, kvf_status bad);

kvf_status kvf_wire_encode_introduction(const kvf_introduction *introduction, kvf_wire_buffer *out);

/** Decodes an introduction; it points into `bytes` and into `*storage`, which the caller frees (kvf_free). */
kvf_status kvf_wire_decode_introduction(kvf_bytes bytes, kvf_introduction *out, void **storage);

/** "HELLO", "ACQUIRE" ... for messages; "unknown" for any other number. */
const char *kvf_message_kind_name(kvf_message_kind kind);
const char *kvf_call_kind_name(kvf_call_kind kind);

#endif
