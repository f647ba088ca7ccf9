/*
 * Converts an element to another type by arithmetic: slow, but easy to check by reading. With it the demo verifies
 * elements that were converted on the way.
 */
#ifndef KVFERRY_DEMO_ELEMENT_H
#define KVFERRY_DEMO_ELEMENT_H

#include <stdint.h>

#include <kvferry/model.h>

/** Converts the bits of an f32, f16, bf16, f8_e4m3 or f8_e5m2 to another of these: to the nearest value, ties to even;
 * what is too large becomes the greatest in FP8, and infinity elsewhere. */
uint32_t element_as(kvf_dtype from, uint32_t bits, kvf_dtype to);

#endif
