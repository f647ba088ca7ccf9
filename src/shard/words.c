/*
 * Ranges, layers and units in words.
 */
#include "shard/shard.h"

void kvf_say_range(kvf_text *text, kvf_range range) {
    kvf_text_add(text, "%u", range.begin);
    if (range.end - range.begin > 1)
        kvf_text_add(text, "-%u", range.end - 1);
}

void kvf_say_numbers(kvf_text *text, const char *one, const char *many, const uint32_t *list,
                     uint32_t count) {
    if (count == 1) {
        kvf_text_add(text, "%s%u", one, list[0]);
        return;
    }
    uint32_t step = list[1] - list[0];
    bool even = true;
    for (uint32_t i = 2; i < count; i++)
        even = even && list[i] - list[i - 1] == step;
    if (even)
        kvf_text_add(text, "%s%u-%u", many, list[0], list[count - 1]);
    else
        kvf_text_add(text, "%u %sof %u-%u", count, many, list[0], list[count - 1]);
    if (even && step > 1)
        kvf_text_add(text, " by %u", step);
}

void kvf_say_layers(kvf_text *text, const kvf_group_desc *group, kvf_range layers) {
    kvf_say_numbers(text, "", "", &group->layers[layers.begin], layers.end - layers.begin);
}

static bool begins_with(const char *name, const char *beginning) {
    return strncmp(name, beginning, strlen(beginning)) == 0;
}

void kvf_say_units(kvf_text *text, const kvf_group_desc *group, const kvf_part_desc *part, uint32_t count) {
    const char *word = "unit";
    if (group->kind == KVF_GROUP_STATE)
        word = begins_with(part->name, "conv") ? "channel" : "head";
    else if (part->units == 1 && part->tp_rule == KVF_TP_REPLICATE)
        word = "latent";
    else if (begins_with(part->name, "k") || begins_with(part->name, "v"))
        word = "head";
    kvf_text_add(text, "%s%s", word, count == 1 ? "" : "s");
}

void kvf_say_bytes(kvf_text *text, uint64_t bytes) {
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    if (bytes < 1024) {
        kvf_text_add(text, "%u B", (unsigned)bytes);
        return;
    }
    double value = (double)bytes / 1024;
    size_t unit = 0;
    for (; value >= 1023.95; unit++) /* no number of bytes is more than 16 EiB */
        value /= 1024;
    kvf_text_add(text, "%.1f %s", value, units[unit]);
}

void kvf_say_count(kvf_text *text, uint64_t count) {
    if (count >= 1000) {
        kvf_say_count(text, count / 1000);
        kvf_text_add(text, " %03u", (unsigned)(count % 1000));
    } else {
        kvf_text_add(text, "%u", (unsigned)count);
    }
}

void kvf_say_time(kvf_text *text, double ns) {
    if (ns < 1e3)
        kvf_text_add(text, "%.0f ns", ns);
    else if (ns < 1e6)
        kvf_text_add(text, "%.2f us", ns / 1e3);
    else if (ns < 1e9)
        kvf_text_add(text, "%.2f ms", ns / 1e6);
    else
        kvf_text_add(text, "%.2f s", ns / 1e9);
}
