/*
 * A plan as a picture: the cells that the ranks of both sides hold, and which rank reads which from which.
 */
#ifndef KVFERRY_CLI_PLAN_PICTURE_H
#define KVFERRY_CLI_PLAN_PICTURE_H

#include "page.h"
#include "report.h"

/**
 * Draws one picture for each group of layers and for its parts that are cut alike. A box is a rank, its height are the
 * layers of the group, its width the units of the whole model, each with its shares of the tokens:
 *
 *      prefill 0                            decode 0
 *     | h0 h1 . . |  ------------------->  | h0 h1 h2 h3 |   in the colours of the ranks that they are read from
 *      prefill 1                      ,->
 *     | . . h2 h3 |  ----------------'
 */
void plan_picture(page *to, const report *plans);

/** Draws the predicted time of each decode rank as a bar, in which each source has a piece in its rank's colour. */
void plan_picture_times(page *to, const report *plans);

#endif
