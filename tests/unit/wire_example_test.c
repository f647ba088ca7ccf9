/*
 * The example of docs/protocol.md: a HELLO, byte for byte.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wire_samples.h"

enum { EXAMPLE_BYTES = 167, MOST_BYTES = 256 };

typedef struct example {
    uint8_t bytes[MOST_BYTES];
    size_t count;
} example;

static void take_byte(example *to, unsigned byte) {
    assert_true(to->count < MOST_BYTES);
    to->bytes[to->count++] = (uint8_t)byte;
}

/* "0000...00" stands for as many zeros as the byte before it says. */
static void take_zeros(example *to) {
    assert_true(to->count > 0);
    for (unsigned left = to->bytes[to->count - 1]; left; left--)
        take_byte(to, 0);
}

/* Takes the bytes of a line, up to what is said of them. Names in quotes stand between them. */
static void take_line(example *to, char *line) {
    char *rest = line;
    for (char *word; (word = strtok_r(rest, " \n", &rest)) != NULL;) {
        if (word[0] == '"')
            continue;
        if (strcmp(word, "0000...00") == 0) {
            take_zeros(to);
            continue;
        }
        if (strlen(word) % 2 != 0 || strspn(word, "0123456789abcdef") != strlen(word))
            return;
        for (; *word; word += 2)
            take_byte(to, (unsigned)strtoul((char[3]){word[0], word[1], '\0'}, NULL, 16));
    }
}

static void read_example(example *out) {
    FILE *document = fopen(KVF_SOURCE_DIR "/docs/protocol.md", "r");
    assert_non_null(document);
    char line[512];
    bool told = false, inside = false;
    *out = (example){0};
    while (fgets(line, sizeof line, document) && !(inside && strncmp(line, "```", 3) == 0)) {
        if (inside)
            take_line(out, line);
        told = told || strncmp(line, "As an example, this HELLO of rank 3 of 8 ", 41) == 0;
        inside = inside || (told && strncmp(line, "```", 3) == 0);
    }
    assert_int_equal(fclose(document), 0);
}

static void the_hello_of_the_document_is_what_is_sent(void **state) {
    (void)state;
    example written;
    read_example(&written);
    const kvf_message hello = {.kind = KVF_MESSAGE_HELLO,
                               .hello = {.engine = "decode-0",
                                         .incarnation = 5,
                                         .rank = 3,
                                         .rank_count = 8,
                                         .wants_ranks = true,
                                         .clock_ns = 1000000007}};
    kvf_wire_buffer sent = sample_encoded(&hello);
    assert_int_equal(written.count, EXAMPLE_BYTES);
    assert_int_equal(sent.size, EXAMPLE_BYTES);
    assert_memory_equal(sent.data, written.bytes, EXAMPLE_BYTES);
    kvf_wire_buffer_free(&sent);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_hello_of_the_document_is_what_is_sent),
    };
    return cmocka_run_group_tests_name("wire_example", tests, NULL, NULL);
}
