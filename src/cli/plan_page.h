/*
 * The report of `kvferry plan` as a page.
 */
#ifndef KVFERRY_CLI_PLAN_PAGE_H
#define KVFERRY_CLI_PLAN_PAGE_H

#include "report.h"

/** Writes the page of a finished report; prints what is wrong if it cannot. The report's options must name a page. */
int plan_page_write(const report *plans, const char *file);

#endif
