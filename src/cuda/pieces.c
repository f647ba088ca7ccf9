#include "cuda/pieces.h"

#define ALIGNMENT 256u

struct kvf_piece {
    uint64_t begin, end;
    kvf_piece *following;
};

static uint64_t align(uint64_t address) {
    return (address + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

uint64_t kvf_pieces_take(kvf_pieces *pieces, uint64_t bytes) {
    uint64_t begin = align(pieces->begin);
    kvf_piece **at = &pieces->taken;
    for (; *at && (*at)->begin - begin < bytes; at = &(*at)->following)
        begin = align((*at)->end);
    if (begin > pieces->end || pieces->end - begin < bytes)
        return 0;
    kvf_piece *made = kvf_alloc(1, sizeof *made);
    if (!made)
        return 0;
    *made = (kvf_piece){begin, begin + bytes, *at};
    *at = made;
    return begin;
}

bool kvf_pieces_give(kvf_pieces *pieces, uint64_t address) {
    kvf_piece **at = &pieces->taken, *found;
    while (*at && (*at)->begin != address)
        at = &(*at)->following;
    found = *at;
    if (!found)
        return false;
    *at = found->following;
    kvf_free(found);
    return true;
}

void kvf_pieces_free(kvf_pieces *pieces) {
    while (pieces->taken)
        (void)kvf_pieces_give(pieces, pieces->taken->begin);
}
