#include "text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

text text_format(const char *format, ...) {
    text out;
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(out.text, sizeof out.text, format, arguments);
    va_end(arguments);
    return out;
}

const char *text_file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

size_t text_character(const char *at) {
    const unsigned char first = (unsigned char)at[0], second = first ? (unsigned char)at[1] : 0;
    const size_t bytes = first == 0                     ? 0
                         : first < 0x80                 ? 1
                         : first < 0xc2 || first > 0xf4 ? 0
                         : first < 0xe0                 ? 2
                         : first < 0xf0                 ? 3
                                                        : 4;
    /* Not in their shortest form, halves of UTF-16, and beyond U+10FFFF. */
    if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
        (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f))
        return 0;
    for (size_t i = 1; i < bytes; i++)
        if (((unsigned char)at[i] & 0xc0) != 0x80)
            return 0;
    return bytes;
}

text text_bytes(uint64_t bytes) {
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    if (bytes < 1024)
        return text_format("%u B", (unsigned)bytes);
    double value = (double)bytes / 1024;
    size_t unit = 0;
    for (; value >= 1023.95 && unit + 1 < sizeof units / sizeof *units; unit++)
        value /= 1024;
    return text_format("%.1f %s", value, units[unit]);
}

text text_time(double ns) {
    if (ns < 1e3)
        return text_format(ns > 0 && ns < 1 ? "%.1f ns" : "%.0f ns", ns);
    if (ns < 1e6)
        return text_format("%.2f us", ns / 1e3);
    if (ns < 1e9)
        return text_format("%.2f ms", ns / 1e6);
    const double s = ns / 1e9, h = s / 3600;
    if (s < 600)
        return text_format("%.2f s", s);
    if (h < 2)
        return text_format("%.1f min", s / 60);
    return h < 48 ? text_format("%.1f h", h) : text_format("%.1f days", h / 24);
}

text text_count(uint64_t count) {
    char digits[24];
    size_t length = (size_t)snprintf(digits, sizeof digits, "%llu", (unsigned long long)count);
    text out;
    size_t n = 0;
    for (size_t i = 0; i < length; i++) {
        if (i && (length - i) % 3 == 0)
            out.text[n++] = ' ';
        out.text[n++] = digits[i];
    }
    out.text[n] = '\0';
    return out;
}

text text_range(kvf_range range) {
    if (range.end - range.begin == 1)
        return text_format("%u", range.begin);
    return text_format("%u-%u", range.begin, range.end - 1);
}

text text_layers(const kvf_group_desc *group, kvf_range layers) {
    const uint32_t *list = group->layers;
    uint32_t count = layers.end - layers.begin;
    uint32_t first = list[layers.begin], last = list[layers.end - 1];
    if (count == 1)
        return text_format("%u", first);
    uint32_t step = list[layers.begin + 1] - first;
    bool even = true;
    for (uint32_t i = layers.begin + 1; i < layers.end; i++)
        even = even && list[i] - list[i - 1] == step;
    if (even && step == 1)
        return text_format("%u-%u", first, last);
    if (even)
        return text_format("%u-%u by %u", first, last, step);
    return text_format("%u of %u-%u", count, first, last);
}

static bool begins_with(const char *name, const char *beginning) {
    return strncmp(name, beginning, strlen(beginning)) == 0;
}

const char *unit_word(const kvf_group_desc *group, const kvf_part_desc *part) {
    if (group->kind == KVF_GROUP_STATE)
        return begins_with(part->name, "conv") ? "channel" : "unit";
    if (part->units == 1 && part->tp_rule == KVF_TP_REPLICATE)
        return "latent";
    return begins_with(part->name, "k") || begins_with(part->name, "v") ? "head" : "unit";
}
