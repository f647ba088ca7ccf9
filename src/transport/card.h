/*
 * The outer card: an endpoint's description of itself for endpoints that may connect to it.
 *
 *   magic, version | name | generation | for each region: size, sort | for each fabric: kind, its part | checksum
 *
 * The sort of a region is 0 (memory of the host, or not registered), 1 (withheld), 2 (memory of a device) or 3 (an
 * arena in memory of a device).
 *
 * All numbers are little endian. Cards come from other processes: reading one trusts nothing in it.
 */
#ifndef KVF_TRANSPORT_CARD_H
#define KVF_TRANSPORT_CARD_H

#include "transport/transport.h"

#define KVF_CARD_NAME_MAX 255 /**< bytes of an endpoint's name */
#define KVF_CARD_KIND_MAX 15  /**< bytes of a fabric's kind */

/** The part that one fabric wrote. */
typedef struct kvf_card_part {
    char kind[KVF_CARD_KIND_MAX + 1];
    const void *data;
    size_t bytes;
} kvf_card_part;

/** A card. The parts of a card that was read point into the bytes it was read from. */
typedef struct kvf_card {
    char name[KVF_CARD_NAME_MAX + 1];
    uint64_t generation;       /**< of the memory */
    uint64_t *region_bytes;    /**< 0: not registered, or withheld */
    bool *region_withheld;     /**< NULL: none is */
    bool *region_on_device;    /**< a device's, and not an arena; NULL: none is */
    bool *region_device_arena; /**< NULL: none is */
    uint32_t region_count;
    kvf_card_part *parts; /**< up to 255, no two of one kind */
    uint32_t part_count;
} kvf_card;

/** Appends `card`, encoded, to `out`. */
kvf_status kvf_card_write(const kvf_card *card, kvf_buffer *out);

/**
 * Reads a card.
 *
 * @param out  zeroed on failure; otherwise freed by kvf_card_free()
 * @return KVF_OK, KVF_E_PARSE (not a card, cut off, damaged, or with two parts of one kind), KVF_E_UNSUPPORTED
 *         (another version), KVF_E_NOMEM
 */
kvf_status kvf_card_read(const void *data, size_t bytes, kvf_card *out);

void kvf_card_free(kvf_card *card);

/** The part that the fabric of this kind wrote; NULL: it wrote none. */
const kvf_card_part *kvf_card_part_of(const kvf_card *card, const char *kind);

/** Whether two cards are of one endpoint, as far as they tell: the part of one kind is the same in both, and such a part
 * names its endpoint by random bytes. */
bool kvf_card_is_of_same(const void *a, size_t a_bytes, const void *b, size_t b_bytes);

/** An identity that all processes of this boot of this machine share, and no others; zeros if unknown. */
void kvf_host_identity(unsigned char out[KVF_HOST_ID_BYTES]);

#endif
