/*
 * What an element becomes in another type, worked out with numbers: slow, and right by inspection. The demo judges by it
 * what was converted on the way.
 */
#ifndef KVFERRY_DEMO_ELEMENT_H
#define KVFERRY_DEMO_ELEMENT_H

#include <stdint.h>

#include <kvferry/model.h>

/** The bits of an element of f32, f16 or bf16 in another of them: the nearest, of two as near the even one. */
uint32_t element_as(kvf_dtype from, uint32_t bits, kvf_dtype to);

#endif
