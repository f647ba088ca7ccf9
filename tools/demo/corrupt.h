/*
 * Spoiling one element of a prefill cache on purpose, to prove that verification can fail.
 */
#ifndef KVFERRY_DEMO_CORRUPT_H
#define KVFERRY_DEMO_CORRUPT_H

#include "cells.h"
#include "workload.h"

/** One element, and the prefill rank that spoils it. */
typedef struct corruption {
    bool wanted;
    uint32_t rank;
    uint32_t request;
    uint32_t group;
    uint32_t layer; /* an index in the group */
    uint32_t part;
    uint64_t row;
    uint32_t unit;
    uint32_t element;
} corruption;

/**
 * Reads "REQUEST,LAYER,PART,TOKEN,UNIT,ELEMENT" and finds the lowest prefill rank that holds the element; LAYER is
 * of the model, TOKEN may be a row of a state. Prints what is wrong with the text.
 */
int corruption_parse(const char *text, const engines *all, const workload *work, corruption *out);

/** Flips a bit of the element. */
void corruption_apply(const corruption *what, const cell_memory *memory, const workload *work);

#endif
