#include "cuda_scene.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

static void on_peer_lost(void *context, kvf_transport *transport, kvf_peer *peer, const char *detail) {
    test_scene *scene = context;
    (void)transport, (void)peer;
    scene->lost++;
    (void)snprintf(scene->lost_detail, sizeof scene->lost_detail, "%s", detail);
}

test_scene *scene_open_with(const char *kind, const kvf_setting *setting, unsigned where) {
    test_scene *scene = calloc(1, sizeof *scene);
    assert_non_null(scene);
    const kvf_transport_options options = {.struct_size = sizeof options,
                                           .settings = setting,
                                           .setting_count = setting ? 1 : 0,
                                           .on_peer_lost = on_peer_lost,
                                           .context = scene};
    engines_open(&scene->known);
    const int types =
        where & BY_FABRIC ? CU_MEM_HANDLE_TYPE_FABRIC : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    owner_start(&scene->owner, kind, where & THEIRS_IN_SEGMENTS ? types : 0, where & THEIRS_UNSEEN);
    cache_open(&scene->here, kind, &options, kvf_engine_shard(scene->known.engines.local, 0),
               &scene->known.here, 1, where & OURS_IN_SEGMENTS ? types : 0);
    scene->plan = plan_of(&scene->known.engines, 0);
    scene->request = request_of(scene->plan);
    set_sequences(scene->request, &scene->known.here, &scene->known.there);
    return scene;
}

test_scene *scene_open(const char *kind) {
    return scene_open_with(kind, NULL, 0);
}

kvf_status scene_connect(test_scene *scene) {
    return kvf_transport_connect(scene->here.transport, scene->owner.card, scene->owner.card_bytes,
                                 &scene->peer);
}

void scene_close(test_scene *scene, bool killed) {
    kvf_request_free(scene->request);
    kvf_plan_free(scene->plan);
    cache_close(&scene->here);
    if (!killed)
        owner_end(&scene->owner, false);
    engines_close(&scene->known);
    free(scene);
}

kvf_transfer *scene_begin(const test_scene *scene, kvf_direction direction) {
    kvf_transfer *transfer = NULL;
    assert_ok(kvf_transfer_start(scene->request, direction, &scene->peer, &transfer));
    return transfer;
}

void scene_step(const test_scene *scene) {
    struct pollfd fd = {kvf_transport_event_fd(scene->here.transport), POLLIN, 0};
    assert_true(poll(&fd, 1, 60000) > 0);
    assert_ok(kvf_transport_progress(scene->here.transport, NULL));
}

kvf_status scene_move(const test_scene *scene, kvf_direction direction, char detail[512]) {
    kvf_transfer *transfer = scene_begin(scene, direction);
    kvf_status status;
    while ((status = kvf_transfer_status(transfer)) == KVF_IN_PROGRESS)
        scene_step(scene);
    (void)snprintf(detail, 512, "%s", kvf_transfer_detail(transfer));
    kvf_transfer_free(transfer);
    return status;
}

kvf_status scene_pull(const test_scene *scene, char detail[512]) {
    return scene_move(scene, KVF_READ, detail);
}

kvf_status scene_push(const test_scene *scene, char detail[512]) {
    cache_fill(&scene->here, 2);
    return scene_move(scene, KVF_WRITE, detail);
}
