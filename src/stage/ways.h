/*
 * Functions of a stage that only agents use: agents bring a clock, know which moves are more urgent, and give
 * permissions.
 */
#ifndef KVF_STAGE_WAYS_H
#define KVF_STAGE_WAYS_H

#include <kvferry/stage.h>

#include "base/clock.h"
#include "transport/transfer.h"

/** Whether kvf_stage_open() takes these options: KVF_OK, or KVF_E_INVALID, whose detail names the option. */
kvf_status kvf_stage_check_options(const kvf_stage_options *options);

/** kvf_stage_open() with the caller's own clock. */
kvf_status kvf_stage_open_at(kvf_transport *transport, const kvf_shard *shard,
                             const kvf_stage_options *options, const kvf_clock *clock, kvf_stage **out);

/** Why a stage whose cells are in memory of a device has no arena there; NULL: it has, or its cells are the host's. */
const char *kvf_stage_without_device(const kvf_stage *stage);

/** Why a stage whose cells are in memory of a device has no arena on the host that the device reaches, though the
 * transport gave one; NULL: it has, or needs none. */
const char *kvf_stage_without_host(const kvf_stage *stage);

/** Why it has a smaller one there than its options say; NULL: it has all, or none. */
const char *kvf_stage_short_of_host(const kvf_stage *stage);

/** The peer that has joined by this name; NULL: none. */
kvf_peer *kvf_stage_peer_named(const kvf_stage *stage, const char *name);

/** Whether any flow uses this peer's connection. One that only waits for the peer's END does not: a peer that has
 * forgotten it may never send that. */
bool kvf_stage_peer_moves(const kvf_stage *stage, const kvf_peer *peer);

/** Whether any flow with this peer goes on. One that has ended does not, though its last operations may hang in the
 * connection. */
bool kvf_stage_peer_goes_on(const kvf_stage *stage, const kvf_peer *peer);

/** Calls `visit` with the permission of each flow by which a peer reads from us, and which goes on. */
void kvf_stage_each_read(const kvf_stage *stage, const kvf_peer *peer,
                         void (*visit)(void *context, uint64_t permission), void *context);

/** Ends the flows by which we read from a peer, which has forgotten them. The thread's error detail is the reason. */
void kvf_stage_stop_reading(const kvf_stage *stage, const kvf_peer *peer, kvf_status status);

/** Whether the last kvf_stage_progress() said that there is more to do only because of messages that could not be sent: a
 * peer that is stopped may take none for long. A caller that can sleep for a moment does so before it tries again. */
bool kvf_stage_only_repeats(const kvf_stage *stage);

/** Whether the stage has no flow: then no timeout is pending. */
bool kvf_stage_is_idle(const kvf_stage *stage);

/** As kvf_stage_pull(), and the options of kvf_transfer_start_held(), for packed sources too. */
kvf_status kvf_stage_pull_held(kvf_stage *stage, const kvf_request *request, kvf_peer *const *peers,
                               const kvf_move_options *options, kvf_transfer_start_options start,
                               kvf_move **out);
/** As kvf_stage_push(); with `held`, nothing moves before the move is released. */
kvf_status kvf_stage_push_held(kvf_stage *stage, const kvf_request *request, uint32_t source, kvf_peer *peer,
                               const kvf_move_options *options, bool held, kvf_move **out);

/** Holds a move, or releases it. A held move starts no operations by itself; those under way go on. */
void kvf_move_hold(kvf_move *move, bool held);

/**
 * Lets a held move begin `bytes` more bytes, of all sources in turn. Direct sources cut a run where the bytes end;
 * packed ones begin whole slots, as soon as enough bytes for a slot have been allowed.
 *
 * @return how many bytes were used
 */
uint64_t kvf_move_advance(kvf_move *move, uint64_t bytes);

/** As kvf_transfer_was_cut(), of the sources that go directly. What goes packed reaches only slots of the other side,
 * which its stage keeps as long as they are in doubt. */
bool kvf_move_was_cut(const kvf_move *move);

/** How many bytes of a source have moved packed. */
uint64_t kvf_move_packed(const kvf_move *move, uint32_t source);

/** How many of the first model layers of a pull are whole, those of which nothing moves too; UINT32_MAX: all. */
uint32_t kvf_move_layers(const kvf_move *move);

/**
 * From now on counts, by model layer, the bytes that the flows of one peer bring by a permission, once they are in the
 * shard's memory. Flows that were accepted before are not counted. A flow brings no byte of its stream twice; but a peer
 * may open several flows for the same cells, and then these are counted several times.
 *
 * @param peer      the name of its endpoint; copied
 * @param by_layer  of the caller, an element for each layer of the model, to which bytes are added, until
 *                  kvf_stage_count_no_more()
 * @return KVF_OK, KVF_E_NOMEM
 */
kvf_status kvf_stage_count(kvf_stage *stage, const char *peer, uint64_t permission, uint64_t *by_layer);

/** No bytes of the permission are counted any more, of any peer, and no array is touched again. */
void kvf_stage_count_no_more(kvf_stage *stage, uint64_t permission);

/** For a `permit` that returns false: the flow ends with this status instead of KVF_E_PERMISSION. */
void kvf_stage_refuse_with(kvf_stage *stage, kvf_status status);

/** Operations completed: runs of direct sources, slots of packed ones. */
uint64_t kvf_move_operations(const kvf_move *move);

#endif
