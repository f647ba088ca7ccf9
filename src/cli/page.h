/*
 * A page of HTML that stands by itself: one file with its styles inside, without scripts and without anything from
 * elsewhere, which the page also forbids the browser. What is written is well-formed XML, so that any parser can
 * check it.
 */
#ifndef KVFERRY_CLI_PAGE_H
#define KVFERRY_CLI_PAGE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "table.h"
#include "text.h"

/** A page that is being written. Its fields are page.c's. */
typedef struct page {
    FILE *out;
    const char *file;
    bool failed; /* no memory: page_close() says so */
} page;

/**
 * Begins a page: its head, and its title as the heading. Says what is wrong with the file. End it with page_close().
 *
 * @param file  "-": standard output; must live as long as the page
 */
int page_open(const char *file, const char *title, page *out);

/** Writes markup as it is. Names from outside must go through page_text(). */
void page_markup(page *to, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** Writes text, and escapes markup in it. It may stand between tags and in attributes. */
void page_text(page *to, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** Writes a table, which stays the caller's. */
void page_table(page *to, const table *list);

/** The colour of a rank: the same one wherever it is drawn, and unlike that of its neighbours. */
text page_rank_colour(uint32_t rank);

/** Ends the page. Says when writing failed. */
int page_close(page *to);

#endif
