/*
 * A reader maps nothing before the owner knows of it: an owner that takes memory back waits for the readers it knows,
 * and memory that is freed while a reader has it mapped is undefined behaviour.
 *
 * Memory in segments (cuda/segments.h) has no handle that a card could carry. The reader asks the owner for
 * descriptors, or for fabric handles where there are none, a few at a time, and maps each segment as it comes, so neither
 * side ever has many descriptors. The owner exports each segment when it is asked for, and a client gets each once, in
 * order: so a client cannot keep an owner busy.
 *
 * What a card says of such regions is checked against the device's size, and then by the driver: segments only go
 * where addresses were reserved for them, and only a region that is mapped completely is read.
 */
#include "transport/cuda/cuda.h"

#include <stdio.h>

#include "base/watch.h"

/* ---- the reader: what must be fetched ------------------------------------------------------------ */

static bool is_mapped(const kvf_cuda_link *link, uint32_t region) {
    for (const kvf_cuda_map *map = link->maps; map; map = map->following)
        if (!map->addresses[region])
            return false;
    return true;
}

static bool must_fetch(const kvf_cuda_link *link, const kvf_cuda_region *region, uint32_t i) {
    return region->bytes > 0 && region->segments > 0 && !is_mapped(link, i);
}

static bool must_open(const kvf_cuda_link *link, const kvf_cuda_region *region, uint32_t i) {
    for (const kvf_cuda_map *map = link->maps; map; map = map->following)
        if (kvf_cuda_map_awaits(map, region, i))
            return true;
    return false;
}

static kvf_status check_segments(const kvf_cuda_region *region, uint32_t i) {
    if (region->segments > KVF_SEGMENTS_MAX || region->segments > region->allocation_bytes)
        return kvf_fail(KVF_E_PARSE, "region %u: %llu bytes in %u segments; allowed: up to %u", i,
                        (unsigned long long)region->allocation_bytes, region->segments, KVF_SEGMENTS_MAX);
    return KVF_OK;
}

kvf_status kvf_cuda_fetch_open(kvf_cuda_link *link, const kvf_cuda_region *regions, uint32_t count) {
    bool handles = false, in_segments = false;
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < count && !status; i++) {
        handles = handles || must_open(link, &regions[i], i);
        if (must_fetch(link, &regions[i], i)) {
            status = check_segments(&regions[i], i);
            in_segments = true;
        }
    }
    if (status || (!handles && !in_segments))
        return status;
    link->fetching = kvf_alloc0(1, sizeof *link->fetching);
    if (!link->fetching)
        return kvf_nomem("a peer's memory");
    link->fetching->count = count;
    link->fetching->handles = handles;
    link->fetching->in_segments = in_segments;
    link->fetching->regions = kvf_copy(regions, count, sizeof *regions);
    link->fetching->mappings = kvf_alloc0(count, sizeof(kvf_mapping *));
    return link->fetching->regions && link->fetching->mappings ? KVF_OK : kvf_nomem("a peer's memory");
}

static void unmap(kvf_cuda_fetching *fetching) {
    for (uint32_t i = 0; fetching->mappings && i < fetching->count; i++) {
        kvf_mapping_close(fetching->mappings[i]);
        fetching->mappings[i] = NULL;
    }
}

void kvf_cuda_fetch_close(kvf_cuda_link *link) {
    kvf_cuda_fetching *fetching = link->fetching;
    if (!fetching)
        return;
    unmap(fetching);
    kvf_free(fetching->regions);
    kvf_free(fetching->mappings);
    kvf_free(fetching);
    link->fetching = NULL;
}

/* ---- the reader: fetching ------------------------------------------------------------------------ */

/* The link can still write, and says why it does not read. */
static void give_up(kvf_cuda_link *link) {
    kvf_cuda_fetching *fetching = link->fetching;
    (void)snprintf(fetching->why, sizeof fetching->why, "region %u: %s", fetching->region,
                   kvf_error_detail());
    unmap(fetching);
    link->ready = true;
}

/* Opens the handles for all our devices; the detail of a failure names the region. */
static kvf_status open_handles(kvf_cuda_link *link) {
    kvf_cuda_fetching *fetching = link->fetching;
    kvf_status status = KVF_OK;
    for (kvf_cuda_map *map = link->maps; map && !status; map = map->following)
        status = kvf_cuda_map_handles(map, fetching->regions, fetching->count);
    fetching->handles = status != KVF_OK;
    (void)snprintf(fetching->why, sizeof fetching->why, "%s", status ? kvf_error_detail() : "");
    for (kvf_cuda_map *map = link->maps; map && status; map = map->following)
        kvf_cuda_map_close_handles(map, fetching->regions, fetching->count);
    return status;
}

/* All segments of a region have come: the maps get its address, and those of later regions in the same segments. */
static kvf_status finish_region(kvf_cuda_link *link) {
    kvf_cuda_fetching *fetching = link->fetching;
    const uint32_t first = fetching->region;
    const kvf_mapping *mapping = fetching->mappings[first];
    uint32_t devices[KVF_CUDA_DEVICES_MAX], device_count = 0;
    if (kvf_mapping_left(mapping) > 0)
        return kvf_fail(KVF_E_PARSE, "%llu bytes less came than the card says",
                        (unsigned long long)kvf_mapping_left(mapping));
    for (const kvf_cuda_map *map = link->maps; map; map = map->following)
        devices[device_count++] = map->device;
    kvf_status status = kvf_mapping_allow(mapping, devices, device_count);
    if (status)
        return status;
    for (uint32_t i = first; i < fetching->count; i++)
        for (kvf_cuda_map *map = link->maps; map; map = map->following)
            if (!map->addresses[i] && must_fetch(link, &fetching->regions[i], i) &&
                kvf_cuda_map_shares(&fetching->regions[first], &fetching->regions[i]))
                map->addresses[i] = kvf_mapping_base(mapping) + fetching->regions[i].offset;
    return KVF_OK;
}

/* Goes to the next region that is not mapped. False: there is none. */
static bool next_region(kvf_cuda_link *link) {
    kvf_cuda_fetching *fetching = link->fetching;
    while (fetching->region < fetching->count &&
           !must_fetch(link, &fetching->regions[fetching->region], fetching->region))
        fetching->region++;
    return fetching->region < fetching->count;
}

static kvf_status open_mapping(const kvf_cuda_link *link, const kvf_cuda_region *region, kvf_mapping **out) {
    const kvf_cuda *cuda;
    kvf_status status = kvf_cuda_find(&cuda);
    return status ? status
                  : kvf_mapping_open(kvf_cuda_device_with(cuda, &region->device), region->allocation_bytes,
                                     link->maps->device, out);
}

/* Asks for the next segments, or ends. */
static void ask(kvf_cuda_link *link) {
    kvf_cuda_fetching *fetching = link->fetching;
    kvf_status status = KVF_OK;
    fetching->due = false;
    if (!next_region(link)) {
        link->ready = true;
        return;
    }
    const kvf_cuda_region *region = &fetching->regions[fetching->region];
    const uint32_t left = region->segments - fetching->segment,
                   count = left < CUDA_FETCH_SEGMENTS ? left : CUDA_FETCH_SEGMENTS;
    const kvf_cuda_fetch message = {
        .header = {CUDA_FETCH, count}, .region = fetching->region, .first = fetching->segment};
    if (!fetching->mappings[fetching->region])
        status = open_mapping(link, region, &fetching->mappings[fetching->region]);
    if (status) {
        give_up(link);
        return;
    }
    status = kvf_cuda_wire_send(link->fd, &message, sizeof message);
    if (status == KVF_E_AGAIN)
        fetching->due = true;
    else if (status)
        kvf_cuda_link_lose(link, kvf_error_detail());
    else
        fetching->asked = count;
}

void kvf_cuda_fetch_begin(kvf_cuda_link *link) {
    if (!link->fetching) {
        link->ready = true;
    } else if (!link->fetching->begun) {
        link->fetching->begun = true;
        if (link->fetching->handles && open_handles(link))
            link->ready = true; /* for writing; reading tries again */
        else
            ask(link);
    }
}

void kvf_cuda_fetch_again(kvf_cuda_link *link) {
    if (!link->fetching || !link->fetching->begun || !link->fetching->handles || open_handles(link))
        return;
    link->ready = false;
    ask(link);
}

void kvf_cuda_fetch_retry(kvf_cuda_link *link) {
    if (link->fetching && link->fetching->due)
        ask(link);
}

/* Maps a segment; the last one of a region completes it. */
static kvf_status take_segment(kvf_cuda_link *link, kvf_cuda_segment *segment, int fd) {
    kvf_cuda_fetching *fetching = link->fetching;
    segment->reason[sizeof segment->reason - 1] = '\0';
    if (segment->header.count)
        return kvf_fail(KVF_E_UNSUPPORTED, "the owner could not share it: %s", segment->reason);
    const kvf_segment_handle handle = {.fd = fd, .fabric = segment->fabric};
    kvf_status status = kvf_mapping_add(fetching->mappings[fetching->region], &handle, segment->bytes);
    if (status || ++fetching->segment < fetching->regions[fetching->region].segments)
        return status;
    status = finish_region(link);
    fetching->segment = 0;
    return status;
}

bool kvf_cuda_fetch_take(kvf_cuda_link *link, kvf_cuda_packet *packet, int fd) {
    kvf_cuda_fetching *fetching = link->fetching;
    kvf_cuda_segment *segment = &packet->as.segment;
    if (packet->bytes != sizeof *segment || !fetching || fetching->asked == 0)
        return false;
    fetching->asked--;
    if (*fetching->why)
        return true; /* it was asked for before */
    if (segment->region != fetching->region || segment->number != fetching->segment ||
        (fd >= 0) != (segment->header.count == 0 && !segment->has_fabric))
        return false;
    if (take_segment(link, segment, fd))
        give_up(link);
    else if (fetching->asked == 0)
        ask(link);
    return true;
}

bool kvf_cuda_fetch_miss(kvf_cuda_link *link, const kvf_cuda_packet *packet) {
    kvf_cuda_fetching *fetching = link->fetching;
    if (packet->as.header.kind != CUDA_SEGMENT || packet->bytes != sizeof packet->as.segment || !fetching ||
        fetching->asked == 0)
        return false;
    fetching->asked--;
    if (!*fetching->why)
        give_up(link);
    return true;
}

/* ---- the owner ----------------------------------------------------------------------------------- */

/* Sends one segment, or why it cannot be sent. */
static kvf_status send_segment(kvf_cuda_client *client, const kvf_cuda_region *region) {
    const kvf_cuda_endpoint *endpoint = client->endpoint;
    kvf_cuda_segment segment = {
        .header = {CUDA_SEGMENT, KVF_OK}, .region = client->fetch_region, .number = client->fetch_segment};
    kvf_segment_handle handle;
    kvf_status failed =
        kvf_segment_export(endpoint->devices[client->fetch_region], region->base + client->fetch_offset,
                           region->allocation_bytes - client->fetch_offset, &segment.bytes, &handle);
    if (failed) {
        segment.header.count = failed;
        (void)snprintf(segment.reason, sizeof segment.reason, "%s", kvf_error_detail());
    } else if (handle.fd < 0) {
        segment.has_fabric = 1;
        segment.fabric = handle.fabric;
    }
    kvf_status status = kvf_cuda_owner_tell(client, &segment, sizeof segment, handle.fd);
    kvf_fd_close(&handle.fd);
    client->fetch_segment++;
    client->fetch_offset += segment.bytes;
    return status ? status : failed;
}

/* A client begins each region at its first segment, and never goes back. */
static bool begins(kvf_cuda_client *client, const kvf_cuda_fetch *fetch) {
    if (fetch->region > client->fetch_region && fetch->first == 0) {
        client->fetch_region = fetch->region;
        client->fetch_segment = 0;
        client->fetch_offset = 0;
    }
    return fetch->region == client->fetch_region && fetch->first == client->fetch_segment;
}

bool kvf_cuda_fetch_asked(kvf_cuda_client *client, const kvf_cuda_packet *packet) {
    const kvf_cuda_endpoint *endpoint = client->endpoint;
    const kvf_cuda_fetch *fetch = &packet->as.fetch;
    const uint32_t count = fetch->header.count;
    if (packet->bytes != sizeof *fetch || count < 1 || count > CUDA_FETCH_SEGMENTS ||
        fetch->region >= endpoint->region_count || !begins(client, fetch))
        return false;
    const kvf_cuda_region *region = &endpoint->regions[fetch->region];
    if (count > region->segments - kvf_min_u64(region->segments, fetch->first))
        return false;
    for (uint32_t i = 0; i < count; i++)
        if (send_segment(client, region))
            break;
    return true;
}
