/*
 * Engines that keep keys channel by channel, as vLLM does on CPUs. A head has the same bytes of a kernel block, which
 * hold the other axis first:
 *
 *   whole        | t0: c0 c1 .. | t1: c0 c1 .. | ..
 *   by channel   | c0: t0 t1 .. | c1: t0 t1 .. | ..
 */
#ifndef KVFERRY_CLI_SHAPE_KEYS_H
#define KVFERRY_CLI_SHAPE_KEYS_H

#include <kvferry/shard.h>

/** Whether a group has keys: a part "k". */
bool shape_has_keys(const kvf_group_desc *group);

/**
 * Replaces an engine by one that keeps the keys of some groups channel by channel.
 *
 * @param side    for messages
 * @param turned  by group
 * @return EXIT_DONE, or says why not and returns EXIT_USAGE (a head's tokens are not side by side) or EXIT_FAILED
 */
int shape_turn_keys(const char *side, const bool *turned, kvf_engine **engine);

#endif
