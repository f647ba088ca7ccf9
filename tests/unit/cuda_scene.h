/*
 * A reader on device 1, if there are two, and an owner in another process on device 0 (cuda_owner.h): connected, and
 * with data moved between them.
 */
#ifndef CUDA_SCENE_H
#define CUDA_SCENE_H

#include "cuda_owner.h"

typedef struct test_scene {
    device_engines known;
    device_cache here;
    owner_process owner;
    kvf_peer *peer;
    kvf_request *request;
    kvf_plan *plan;
    uint32_t lost;
    char lost_detail[256];
} test_scene;

/** Whose cache is in segments; whether these have fabric handles, and no descriptors; whether the owner's device is
 * not seen here. */
#define OURS_IN_SEGMENTS 1u
#define THEIRS_IN_SEGMENTS 2u
#define BY_FABRIC 4u
#define THEIRS_UNSEEN 8u

test_scene *scene_open(const char *kind);
/** @param setting  of this side's transport; NULL: none */
test_scene *scene_open_with(const char *kind, const kvf_setting *setting, unsigned where);
kvf_status scene_connect(test_scene *scene);
/** @param killed  the other process is gone already */
void scene_close(test_scene *scene, bool killed);

/** Begins to move the request; the caller frees the transfer. */
kvf_transfer *scene_begin(const test_scene *scene, kvf_direction direction);
/** Waits for something to do, and does it. */
void scene_step(const test_scene *scene);
/** Moves the request to its end. */
kvf_status scene_move(const test_scene *scene, kvf_direction direction, char detail[512]);
kvf_status scene_pull(const test_scene *scene, char detail[512]);
/** Fills the reader's cells anew, and writes them into the owner's memory. */
kvf_status scene_push(const test_scene *scene, char detail[512]);

#endif
