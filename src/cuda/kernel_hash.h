/*
 * The kernel that hashes cells where they lie: one thread hashes one cell and adds the hash to the sum of the cell's
 * step.
 *
 * The hash is XXH3 of 64 bits with a seed, as the host's library computes it, for the two are compared. It reads a cell
 * at a few offsets, 4 or 8 bytes at a time; here such a read is put together from *granules*: as many bytes as are
 * contiguous and aligned in every cell of the box, or one element that is converted first. So cells in pieces and cells
 * in other types need no room to be copied to.
 *
 * This header is compiled twice, like kernel_move.h, which the including file includes first. It also defines
 * KVF_CONSTANT (prefix of a table of constants) and KVF_ADD_SUM(address, hash) (adds at an address of a device, which
 * other threads add to).
 */
#ifndef KVF_CUDA_KERNEL_HASH_H
#define KVF_CUDA_KERNEL_HASH_H

#include "cuda/kernel_move.h"

/* ---- reading a cell ----------------------------------------------------------------------------- */

typedef struct kvf_hashed_cell {
    uint64_t address; /* of the first piece */
    uint64_t piece_stride;
    kvf_divisor piece_bytes; /* as the memory has them */
    uint32_t bytes;          /* as they are hashed */
    uint32_t granule;        /* bytes as they are hashed */
    bool converts;
    uint16_t from_type, to_type;
} kvf_hashed_cell;

/* A granule's bits, at most 8 bytes. */
KVF_DEVICE uint64_t kvf_hash_granule(const kvf_hashed_cell *cell, uint32_t at, uint32_t bytes) {
    const uint32_t byte = cell->converts ? at / cell->granule * kvf_element_bytes(cell->from_type) : at;
    const uint32_t piece = kvf_quotient(byte, cell->piece_bytes);
    const uint64_t address =
        cell->address + piece * cell->piece_stride + (byte - piece * cell->piece_bytes.by);
    if (cell->converts) {
        const uint32_t element = kvf_load(address, kvf_element_bytes(cell->from_type)).v4[0];
        return kvf_narrow(kvf_widen(element, cell->from_type), cell->to_type);
    }
    switch (bytes) {
    case 8:
        return KVF_READ(uint64_t, address);
    case 4:
        return KVF_READ(uint32_t, address);
    case 2:
        return KVF_READ(uint16_t, address);
    default:
        return KVF_READ(uint8_t, address);
    }
}

/* Up to 8 bytes of a cell, the first one lowest. */
KVF_DEVICE uint64_t kvf_hash_read(const kvf_hashed_cell *cell, uint32_t at, uint32_t bytes) {
    const uint32_t each = cell->granule < bytes ? cell->granule : bytes;
    uint64_t read = 0;
    for (uint32_t i = 0; i < bytes; i += each)
        read |= kvf_hash_granule(cell, at + i, each) << (8 * i);
    return read;
}

/* ---- XXH3 --------------------------------------------------------------------------------------- */

#define KVF_P32_1 0x9e3779b1u
#define KVF_P32_2 0x85ebca77u
#define KVF_P32_3 0xc2b2ae3du
#define KVF_P64_1 0x9e3779b185ebca87u
#define KVF_P64_2 0xc2b2ae3d27d4eb4fu
#define KVF_P64_3 0x165667b19e3779f9u
#define KVF_P64_4 0x85ebca77c2b2ae63u
#define KVF_P64_5 0x27d4eb2f165667c5u

#define KVF_STRIPE_BYTES 64u
#define KVF_STRIPES 16u /* of a block, after which the lanes are scrambled */

/* The algorithm's 192 bytes of secret, as numbers. */
KVF_CONSTANT uint64_t kvf_hash_secret[24] = {
    0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u, 0x78e5c0cc4ee679cbu,
    0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u, 0xcb00c391bb52283cu, 0xa32e531b8b65d088u,
    0x4ef90da297486471u, 0xd8acdea946ef1938u, 0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au,
    0x647378d9c97e9fc8u, 0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
    0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu};

/* 8 bytes of the secret, whose words have the seed added and subtracted in turn. */
KVF_DEVICE uint64_t kvf_secret_with(uint32_t at, uint64_t seed) {
    const uint32_t word = at / 8, shift = at % 8 * 8;
    const uint64_t low = kvf_hash_secret[word] + (word % 2 ? 0 - seed : seed);
    if (shift == 0)
        return low;
    const uint64_t high = kvf_hash_secret[word + 1] + (word % 2 ? seed : 0 - seed);
    return low >> shift | high << (64 - shift);
}

KVF_DEVICE uint64_t kvf_secret(uint32_t at) {
    return kvf_secret_with(at, 0);
}

KVF_DEVICE uint64_t kvf_fold(uint64_t a, uint64_t b) {
#ifdef __CUDACC_RTC__
    return a * b ^ __umul64hi(a, b);
#else
    __extension__ const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#endif
}

KVF_DEVICE uint64_t kvf_rotate(uint64_t bits, uint32_t by) {
    return bits << by | bits >> (64 - by);
}

KVF_DEVICE uint64_t kvf_swap(uint64_t bits, uint32_t bytes) {
    uint64_t swapped = 0;
    for (uint32_t i = 0; i < bytes; i++)
        swapped = swapped << 8 | (bits >> (8 * i) & 0xff);
    return swapped;
}

KVF_DEVICE uint64_t kvf_avalanche(uint64_t hash) {
    hash = (hash ^ hash >> 37) * 0x165667919e3779f9u;
    return hash ^ hash >> 32;
}

KVF_DEVICE uint64_t kvf_avalanche_short(uint64_t hash) {
    hash = (hash ^ hash >> 33) * KVF_P64_2;
    hash = (hash ^ hash >> 29) * KVF_P64_3;
    return hash ^ hash >> 32;
}

/* 0 to 16 bytes. */
KVF_DEVICE uint64_t kvf_hash_short(const kvf_hashed_cell *cell, uint64_t seed) {
    const uint32_t bytes = cell->bytes;
    if (bytes > 8) {
        const uint64_t low = kvf_hash_read(cell, 0, 8) ^ ((kvf_secret(24) ^ kvf_secret(32)) + seed);
        const uint64_t high = kvf_hash_read(cell, bytes - 8, 8) ^ ((kvf_secret(40) ^ kvf_secret(48)) - seed);
        return kvf_avalanche(bytes + kvf_swap(low, 8) + high + kvf_fold(low, high));
    }
    if (bytes >= 4) {
        seed ^= kvf_swap((uint32_t)seed, 4) << 32;
        const uint64_t read = kvf_hash_read(cell, bytes - 4, 4) + (kvf_hash_read(cell, 0, 4) << 32);
        uint64_t hash = read ^ ((kvf_secret(8) ^ kvf_secret(16)) - seed);
        hash = (hash ^ kvf_rotate(hash, 49) ^ kvf_rotate(hash, 24)) * 0x9fb21c651e98df25u;
        hash = (hash ^ ((hash >> 35) + bytes)) * 0x9fb21c651e98df25u;
        return hash ^ hash >> 28;
    }
    if (bytes > 0) {
        const uint64_t all = kvf_hash_read(cell, 0, bytes), first = all & 0xff,
                       middle = all >> (8 * (bytes / 2)) & 0xff, last = all >> (8 * (bytes - 1));
        const uint64_t flip = ((uint32_t)kvf_secret(0) ^ (uint32_t)kvf_secret(4)) + seed;
        return kvf_avalanche_short((first << 16 | middle << 24 | last | (uint64_t)bytes << 8) ^ flip);
    }
    return kvf_avalanche_short(seed ^ kvf_secret(56) ^ kvf_secret(64));
}

KVF_DEVICE uint64_t kvf_hash_mix(const kvf_hashed_cell *cell, uint32_t at, uint32_t secret, uint64_t seed) {
    return kvf_fold(kvf_hash_read(cell, at, 8) ^ (kvf_secret(secret) + seed),
                    kvf_hash_read(cell, at + 8, 8) ^ (kvf_secret(secret + 8) - seed));
}

/* 17 to 240 bytes. */
KVF_DEVICE uint64_t kvf_hash_middle(const kvf_hashed_cell *cell, uint64_t seed) {
    const uint32_t bytes = cell->bytes;
    uint64_t hash = bytes * KVF_P64_1;
    if (bytes <= 128) {
        for (uint32_t i = 0; i < (bytes + 31) / 32; i++)
            hash += kvf_hash_mix(cell, 16 * i, 32 * i, seed) +
                    kvf_hash_mix(cell, bytes - 16 * (i + 1), 32 * i + 16, seed);
        return kvf_avalanche(hash);
    }
    for (uint32_t i = 0; i < 8; i++)
        hash += kvf_hash_mix(cell, 16 * i, 16 * i, seed);
    hash = kvf_avalanche(hash);
    for (uint32_t i = 8; i < bytes / 16; i++)
        hash += kvf_hash_mix(cell, 16 * i, 16 * (i - 8) + 3, seed);
    return kvf_avalanche(hash + kvf_hash_mix(cell, bytes - 16, 136 - 17, seed));
}

KVF_DEVICE void kvf_hash_stripe(const kvf_hashed_cell *cell, uint32_t at, uint32_t secret, uint64_t seed,
                                uint64_t lanes[8]) {
    KVF_UNROLL
    for (uint32_t i = 0; i < 8; i++) {
        const uint64_t read = kvf_hash_read(cell, at + 8 * i, 8),
                       key = read ^ kvf_secret_with(secret + 8 * i, seed);
        lanes[i ^ 1] += read;
        lanes[i] += (key & 0xffffffffu) * (key >> 32);
    }
}

/* More than 240 bytes. */
KVF_DEVICE uint64_t kvf_hash_long(const kvf_hashed_cell *cell, uint64_t seed) {
    const uint32_t bytes = cell->bytes, stripes = (bytes - 1) / KVF_STRIPE_BYTES;
    uint64_t lanes[8] = {KVF_P32_3, KVF_P64_1, KVF_P64_2, KVF_P64_3,
                         KVF_P64_4, KVF_P32_2, KVF_P64_5, KVF_P32_1};
    for (uint32_t i = 0; i < stripes; i++) {
        kvf_hash_stripe(cell, i * KVF_STRIPE_BYTES, 8 * (i % KVF_STRIPES), seed, lanes);
        if (i % KVF_STRIPES < KVF_STRIPES - 1)
            continue;
        KVF_UNROLL
        for (uint32_t lane = 0; lane < 8; lane++)
            lanes[lane] =
                (lanes[lane] ^ lanes[lane] >> 47 ^ kvf_secret_with(128 + 8 * lane, seed)) * KVF_P32_1;
    }
    kvf_hash_stripe(cell, bytes - KVF_STRIPE_BYTES, 192 - 64 - 7, seed, lanes);
    uint64_t hash = bytes * KVF_P64_1;
    KVF_UNROLL
    for (uint32_t i = 0; i < 4; i++)
        hash += kvf_fold(lanes[2 * i] ^ kvf_secret_with(11 + 16 * i, seed),
                         lanes[2 * i + 1] ^ kvf_secret_with(11 + 16 * i + 8, seed));
    return kvf_avalanche(hash);
}

KVF_DEVICE uint64_t kvf_hash_cell(const kvf_hashed_cell *cell, uint64_t seed) {
    return cell->bytes <= 16    ? kvf_hash_short(cell, seed)
           : cell->bytes <= 240 ? kvf_hash_middle(cell, seed)
                                : kvf_hash_long(cell, seed);
}

/* ---- a launch ----------------------------------------------------------------------------------- */

/* Hashes cell `index` of a box, and adds the hash to its sum. Callers pass a constant as `convert`: without conversions
 * the code is a fifth as long. */
KVF_DEVICE void kvf_hash_one(const kvf_cuda_box *box, bool convert, uint32_t index) {
    const kvf_cuda_sums *sums = &box->sums;
    const uint32_t row = kvf_quotient(index, box->units), unit = index - row * box->units.by;
    const uint32_t at = sums->first_row + row, kept = kvf_quotient(at, sums->rows),
                   round = kvf_quotient(kept, sums->width);
    const uint64_t step = (uint64_t)round * sums->round_steps + (kept - round * sums->width.by);
    kvf_hashed_cell cell;
    cell.address = kvf_address(&box->from, row, unit, 0);
    cell.piece_stride = box->from.piece_stride;
    cell.piece_bytes = box->from.piece_bytes;
    cell.bytes = sums->cell_bytes;
    cell.granule = box->to_bytes;
    cell.converts = convert && box->from_type != box->to_type;
    cell.from_type = box->from_type;
    cell.to_type = box->to_type;
    const uint64_t seed = sums->seed + step * sums->step_seed + (at - kept * sums->rows.by) * sums->row_seed +
                          unit * sums->unit_seed;
    KVF_ADD_SUM(sums->address + step * sums->step_bytes + unit * sums->unit_bytes,
                kvf_hash_cell(&cell, seed));
}

/* All work of one thread of `blocks` times 256: a tile is 256 cells. A launch that does not convert has no box that is
 * converted. */
KVF_DEVICE void kvf_hash_thread(const kvf_cuda_box *boxes, uint32_t count, uint32_t tiles, bool convert,
                                uint32_t block, uint32_t blocks, uint32_t thread) {
    for (uint32_t tile = block; tile < tiles; tile += blocks) {
        const kvf_cuda_box *box = &boxes[kvf_box_of_tile(boxes, count, tile)];
        const uint32_t index = (tile - box->first_tile) * KVF_TILE_THREADS + thread;
        if (index < box->items)
            kvf_hash_one(box, convert, index);
    }
}

#endif
