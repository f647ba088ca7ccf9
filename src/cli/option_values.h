/*
 * How values of options are read: each function is an option_take, see option_table.h. Numbers and names go to the
 * field that the row names.
 */
#ifndef KVFERRY_CLI_OPTION_VALUES_H
#define KVFERRY_CLI_OPTION_VALUES_H

#include "option_table.h"

int take_text(const option_row *row, const char *written, options *out);
int take_flag(const option_row *row, const char *written, options *out);

/** A number from 1 to row->most. */
int take_number(const option_row *row, const char *written, options *out);

/** Any number. */
int take_seed(const option_row *row, const char *written, options *out);

/** One of row->words, stored as its number. */
int take_word(const option_row *row, const char *written, options *out);

int take_dtype(const option_row *row, const char *written, options *out);
int take_scales(const option_row *row, const char *written, options *out);

/** One of row->words, stored as a text. */
int take_name(const option_row *row, const char *written, options *out);

int take_cuda_memory(const option_row *row, const char *written, options *out);
int take_die(const option_row *row, const char *written, options *out);
int take_hang(const option_row *row, const char *written, options *out);
int take_key(const option_row *row, const char *written, options *out);

/* ---- allowed values: each function is a word_of that does not use its set ----------------------- */

const char *way_word(const void *set, uint32_t i);
const char *replicas_word(const void *set, uint32_t i);
const char *cuda_memory_word(const void *set, uint32_t i);
const char *dtype_word(const void *set, uint32_t i);
const char *transport_word(const void *set, uint32_t i);

/** Sorts of a kind of transport that have costs of their own, such as "shm/brought"; those of this build. */
const char *sort_word(const void *set, uint32_t i);

/** The words of transport_word(), and those of sort_word(). */
const char *costs_word(const void *set, uint32_t i);

const char *model_word(const void *set, uint32_t i);

/** The keys of shapes: "tp" and so on. */
const char *shape_word(const void *set, uint32_t i);

#endif
