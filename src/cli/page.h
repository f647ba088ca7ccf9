/*
 * A self-contained page of HTML: one file with its styles inside, without scripts. The page also forbids the browser to
 * load anything from elsewhere. Pages are well-formed XML, so that any parser can check them.
 */
#ifndef KVFERRY_CLI_PAGE_H
#define KVFERRY_CLI_PAGE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "table.h"
#include "text.h"

/** A page that is being made, in memory. Only page.c may use its fields. It stays where it was opened. */
typedef struct page {
    FILE *out;
    char *text;
    size_t bytes;
    const char *file;
    bool failed; /* no memory; page_close() prints it */
} page;

/**
 * Begins a page: its head, and its title as the heading. End it with page_close().
 *
 * @param file  "-": standard output; must live as long as the page
 */
int page_open(const char *file, const char *title, page *out);

/** Writes markup as it is. Names from outside must go through page_text(). */
void page_markup(page *to, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** Writes text, and escapes markup in it. It may stand between tags and in attributes. */
void page_text(page *to, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** Writes a table, which the caller keeps. */
void page_table(page *to, const table *list);

/** The colour of a rank: the same everywhere in a page, and clearly different from its neighbours' colours. */
text page_rank_colour(uint32_t rank);

/** Ends the page, and writes it as file_write() does. */
int page_close(page *to);

#endif
