#include "base/bytes.h"

const void *kvf_take_bytes(kvf_byte_reader *from, size_t bytes) {
    if (from->cut_off || bytes > from->left) {
        from->cut_off = true;
        from->left = 0;
        return NULL;
    }
    const unsigned char *taken = from->at;
    from->at += bytes;
    from->left -= bytes;
    return taken;
}

uint64_t kvf_take_number(kvf_byte_reader *from, size_t width) {
    const unsigned char *little = kvf_take_bytes(from, width);
    uint64_t number = 0;
    for (size_t i = 0; little && i < width; i++)
        number |= (uint64_t)little[i] << (8 * i);
    return number;
}

void kvf_put_number(unsigned char *to, uint64_t number, size_t width) {
    for (size_t i = 0; i < width; i++)
        to[i] = (unsigned char)(number >> (8 * i));
}

uint64_t kvf_byte_sum(uint64_t sum, const void *data, size_t bytes) {
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++)
        sum = (sum ^ at[i]) * UINT64_C(0x100000001b3);
    return sum;
}
