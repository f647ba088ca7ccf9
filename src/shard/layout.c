/*
 * From an axis order such as "L|BPHN" to strides.
 *
 * The order is walked from outside in; the size of a step of an axis is that of everything inside it. Tensor and part
 * axes put different parts after one another, so inside them the walk goes on with fewer parts. The other axes repeat
 * their content, so all parts that they span must have the same number of steps. Before the '|' the same walk counts
 * regions instead of bytes.
 */
#include "shard/shard.h"

#define MAX_AXES 8

typedef struct layout {
    const kvf_layout_request *request;
    char axes[MAX_AXES + 1]; /* the order without the bar and with T */
    uint32_t bar;            /* axes before it have regions of their own */
    kvf_placement *parts;    /* [part]: the placement in layer 0 */
    uint64_t *layer_stride;  /* [part]: bytes */
    uint64_t *layer_regions; /* [part] */
    uint64_t *region_bytes;  /* [part]: size of the regions of this part */
} layout;

/* The parts an axis spans. */
typedef struct span {
    uint32_t begin, end;
} span;

static kvf_status place(layout *l, uint32_t axis, span parts, uint64_t region, uint64_t offset,
                        uint64_t *size);

static bool is_region(const layout *l, uint32_t axis) {
    return axis < l->bar;
}

static uint64_t unit_count(const layout *l, uint32_t part) {
    kvf_range units = l->request->shares[part].units;
    return units.end - units.begin;
}

static uint64_t row_count(const layout *l, uint32_t part) {
    return (uint64_t)l->request->kernel_steps * l->request->group->parts[part].rows_per_step;
}

/* Places an axis that repeats what is inside it. */
static kvf_status place_repeated(layout *l, uint32_t axis, span parts, uint64_t region, uint64_t offset,
                                 uint64_t *size) {
    const kvf_group_desc *group = l->request->group;
    char letter = l->axes[axis];
    uint64_t inside;
    kvf_status status = place(l, axis + 1, parts, region, offset, &inside);
    if (status)
        return status;
    uint64_t count = 0;
    for (uint32_t p = parts.begin; p < parts.end; p++) {
        uint64_t wanted = letter == 'L'   ? l->request->layer_count
                          : letter == 'B' ? l->request->kernel_blocks
                          : letter == 'H' ? unit_count(l, p)
                                          : row_count(l, p);
        if (p > parts.begin && wanted != count)
            return kvf_fail(
                KVF_E_INVALID,
                "order: axis %c spans part %s with %llu steps and part %s with %llu; put %c inside P", letter,
                group->parts[p - 1].name, (unsigned long long)count, group->parts[p].name,
                (unsigned long long)wanted, letter);
        count = wanted;
    }
    if (letter == 'B') {
        uint64_t align = l->request->spec->page_align ? l->request->spec->page_align : 1;
        uint64_t page = l->request->spec->page_bytes;
        if (page && page < inside)
            return kvf_fail(KVF_E_RANGE, "page_bytes is %llu, but a page has %llu bytes of content",
                            (unsigned long long)page, (unsigned long long)inside);
        inside = kvf_max_u64(page, inside);
        if (!kvf_add(inside, align - 1, &inside))
            return kvf_fail(KVF_E_OVERFLOW, "page_align %llu overflows the page", (unsigned long long)align);
        inside -= inside % align;
    }
    for (uint32_t p = parts.begin; p < parts.end; p++) {
        if (letter == 'L' && is_region(l, axis))
            l->layer_regions[p] = inside;
        else if (letter == 'L')
            l->layer_stride[p] = inside;
        else if (letter == 'B')
            l->parts[p].block_stride = inside;
        else if (letter == 'H')
            l->parts[p].unit_stride = inside;
        else
            l->parts[p].row_stride = inside;
    }
    if (!kvf_mul(count, inside, size))
        return kvf_fail(KVF_E_OVERFLOW, "axis %c: %llu steps of %llu bytes do not fit in 64 bits", letter,
                        (unsigned long long)count, (unsigned long long)inside);
    return KVF_OK;
}

/* One past the parts that share the tensor number of part `begin`: in a model the parts of a tensor are neighbours. */
static uint32_t tensor_end(const kvf_group_desc *group, uint32_t begin, uint32_t end) {
    uint32_t p = begin;
    while (p < end && group->parts[p].tensor == group->parts[begin].tensor)
        p++;
    return p;
}

/* Places an axis that puts different parts after one another. */
static kvf_status place_sequence(layout *l, uint32_t axis, span parts, uint64_t region, uint64_t offset,
                                 uint64_t *size) {
    uint64_t *position = is_region(l, axis) ? &region : &offset;
    *size = 0;
    for (uint32_t p = parts.begin; p < parts.end;) {
        uint32_t end = l->axes[axis] == 'T' ? tensor_end(l->request->group, p, parts.end) : p + 1;
        uint64_t inside;
        kvf_status status = place(l, axis + 1, (span){p, end}, region, offset, &inside);
        if (status)
            return status;
        if (!kvf_add(*size, inside, size) || !kvf_add(*position, inside, position))
            return kvf_fail(KVF_E_OVERFLOW, "the parts of a page do not fit in 64 bits");
        p = end;
    }
    return KVF_OK;
}

static kvf_status place(layout *l, uint32_t axis, span parts, uint64_t region, uint64_t offset,
                        uint64_t *size) {
    char letter = l->axes[axis];
    if (letter == '\0') {
        kvf_placement *placement = &l->parts[parts.begin];
        placement->region =
            (uint32_t)region; /* below the number of regions, which kvf_layout_place() bounds */
        placement->offset = offset;
        *size = kvf_part_cell_bytes(&l->request->group->parts[parts.begin]);
        return KVF_OK;
    }
    bool first_in_region = axis == l->bar;
    kvf_status status = letter == 'T' || letter == 'P' ? place_sequence(l, axis, parts, region, offset, size)
                                                       : place_repeated(l, axis, parts, region, offset, size);
    if (!status && first_in_region) {
        for (uint32_t p = parts.begin; p < parts.end; p++)
            l->region_bytes[p] = *size;
        *size = 1; /* from here outwards the unit is regions */
    }
    return status;
}

/* Parses an order: every letter exactly once; T goes just outside P unless it is given. */
static kvf_status parse_order(const char *order, layout *l) {
    static const char known[] = "LBTPHN";
    uint32_t n = 0;
    bool bar = false, tensor = strchr(order, 'T') != NULL;
    l->bar = 0;
    for (const char *c = order; *c; c++) {
        if (*c == '|') {
            if (bar)
                return kvf_fail(KVF_E_INVALID, "order is \"%s\"; only one '|' is allowed", order);
            bar = true;
            l->bar = n;
            continue;
        }
        if (!strchr(known, *c) || memchr(l->axes, *c, n))
            return kvf_fail(
                KVF_E_INVALID,
                "order is \"%s\"; it needs each of L, B, P, H, N once, T at most once, and no '%c'%s", order,
                *c, strchr(known, *c) ? " again" : "");
        if (*c == 'P' && !tensor)
            l->axes[n++] = 'T';
        l->axes[n++] = *c;
        bool own_buffer_forbidden = *c == 'B' || *c == 'H' || *c == 'N';
        if (own_buffer_forbidden && !bar && strchr(c, '|'))
            return kvf_fail(KVF_E_INVALID, "order is \"%s\"; only L, T and P may have buffers of their own",
                            order);
    }
    if (n != sizeof known - 1)
        return kvf_fail(KVF_E_INVALID, "order is \"%s\"; it needs each of L, B, P, H and N", order);
    l->axes[n] = '\0';
    const char *t = memchr(l->axes, 'T', n), *p = memchr(l->axes, 'P', n);
    if (t > p)
        return kvf_fail(KVF_E_INVALID, "order is \"%s\"; T must stand outside P", order);
    return KVF_OK;
}

static kvf_status spread_over_layers(const layout *l, uint64_t regions, kvf_placement *placements,
                                     uint64_t *region_bytes) {
    uint32_t parts = l->request->group->part_count;
    for (uint32_t layer = 0; layer < l->request->layer_count; layer++) {
        for (uint32_t p = 0; p < parts; p++) {
            kvf_placement *placement = &placements[(size_t)layer * parts + p];
            *placement = l->parts[p];
            placement->region += (uint32_t)(layer * l->layer_regions[p]);
            placement->offset +=
                layer * l->layer_stride[p]; /* cannot overflow, as the region's size did not */
            if (placement->region >= regions)
                return kvf_fail(KVF_E_RANGE, "layer %u: region is %u; the rank has %llu", layer,
                                placement->region, (unsigned long long)regions);
            region_bytes[placement->region] = l->region_bytes[p];
        }
    }
    return KVF_OK;
}

kvf_status kvf_layout_place(const kvf_layout_request *request, kvf_placement *placements,
                            uint64_t **region_bytes, uint32_t *region_count) {
    const kvf_group_desc *group = request->group;
    *region_bytes = NULL;
    *region_count = 0;
    layout l = {.request = request};
    kvf_status status = parse_order(request->spec->order ? request->spec->order : "L|BPHN", &l);
    if (status)
        return status;
    if (request->layer_count == 0)
        return KVF_OK;
    l.parts = kvf_alloc0(group->part_count, sizeof *l.parts);
    uint64_t *numbers = kvf_alloc0(group->part_count, 3 * sizeof *numbers);
    uint64_t *sizes = NULL;
    uint64_t regions = 0;
    if (!l.parts || !numbers) {
        status = kvf_nomem("a layout");
        goto done;
    }
    l.layer_stride = numbers;
    l.layer_regions = numbers + group->part_count;
    l.region_bytes = numbers + 2 * (size_t)group->part_count;
    if ((status = place(&l, 0, (span){0, group->part_count}, 0, 0, &regions)))
        goto done;
    /* At most one region for each layer and part. */
    sizes = kvf_alloc0((size_t)regions, sizeof *sizes);
    if (!sizes) {
        status = kvf_nomem("a layout");
        goto done;
    }
    if ((status = spread_over_layers(&l, regions, placements, sizes)))
        goto done;
    *region_bytes = sizes;
    *region_count = (uint32_t)regions;
    sizes = NULL;
done:
    kvf_free(sizes);
    kvf_free(numbers);
    kvf_free(l.parts);
    return status;
}
