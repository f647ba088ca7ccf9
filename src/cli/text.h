/*
 * Numbers and lists as people read them.
 */
#ifndef KVFERRY_CLI_TEXT_H
#define KVFERRY_CLI_TEXT_H

#include <kvferry/model.h>
#include <kvferry/shard.h>

/** A text of bounded length, returned by value. */
typedef struct text {
    char text[64];
} text;

text text_format(const char *format, ...) __attribute__((format(printf, 1, 2)));

/** The name of a file, without its folders; inside `path`. */
const char *text_file_name(const char *path);

/** The bytes of the character of UTF-8 that begins here; 0: these bytes are none, or the text is over. */
size_t text_character(const char *at);

/** "512 B", "16.0 MiB". */
text text_bytes(uint64_t bytes);

/** "850 ns", "3.21 ms"; from ten minutes on "10.0 min", "2.0 h", "2.0 days". */
text text_time(double ns);

/** With thousands set apart: "1 048 576". */
text text_count(uint64_t count);

/** A half-open range by its first and last number: "0-7", "3". */
text text_range(kvf_range range);

/** The model layers of a range of a group's layers: "0-31", "5-59 by 6", "12 of 0-40". */
text text_layers(const kvf_group_desc *group, kvf_range layers);

/** The word for a unit of a part: "head", "channel", "latent" or "unit". */
const char *unit_word(const kvf_group_desc *group, const kvf_part_desc *part);

#endif
