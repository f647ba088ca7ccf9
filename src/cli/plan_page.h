/*
 * What `kvferry plan` says, as a page.
 */
#ifndef KVFERRY_CLI_PLAN_PAGE_H
#define KVFERRY_CLI_PLAN_PAGE_H

#include "report.h"

/** Writes the page of a report that was made; says what went wrong. The report must have been asked for as a page. */
int plan_page_write(const report *plans, const char *file);

#endif
