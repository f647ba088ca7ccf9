#include "words.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum { LONGEST = 48 }; /* characters of a name that are compared with a mistake */

static const char *array_word(const void *set, uint32_t i) {
    const char *const *names = set;
    for (uint32_t at = 0; at < i; at++)
        if (!names[at])
            return NULL;
    return names[i];
}

words words_of_array(const char *const *names) {
    return (words){array_word, names};
}

static char plain(char c) {
    return c == '_' ? '-' : (char)tolower((unsigned char)c);
}

bool words_same(const char *a, const char *b) {
    while (*a && plain(*a) == plain(*b))
        a++, b++;
    return !*a && !*b;
}

const char *words_find(words among, const char *written, uint32_t *number) {
    const char *name;
    for (uint32_t i = 0; (name = among.get(among.set, i)) != NULL; i++) {
        if (!words_same(name, written))
            continue;
        if (number)
            *number = i;
        return name;
    }
    return NULL;
}

void words_list(words among, char *out, size_t bytes) {
    size_t length = 0;
    const char *name, *next;
    out[0] = '\0';
    for (uint32_t i = 0; (name = among.get(among.set, i)) != NULL && length < bytes; i++) {
        next = among.get(among.set, i + 1);
        length += (size_t)snprintf(out + length, bytes - length, "%s%s",
                                   i == 0 ? ""
                                   : next ? ", "
                                          : " and ",
                                   name);
    }
}

static unsigned least(unsigned a, unsigned b) {
    return a < b ? a : b;
}

/* The edit distance: the number of letters to add, leave out, change or swap with a neighbour to turn one name into the
 * other. Only three rows of the table are kept. */
static unsigned distance(const char *a, const char *b) {
    unsigned rows[3][LONGEST + 1];
    size_t a_length = strnlen(a, LONGEST), b_length = strnlen(b, LONGEST);
    for (size_t j = 0; j <= b_length; j++)
        rows[0][j] = (unsigned)j;
    for (size_t i = 1; i <= a_length; i++) {
        unsigned *now = rows[i % 3], *before = rows[(i + 2) % 3], *twice_before = rows[(i + 1) % 3];
        now[0] = (unsigned)i;
        for (size_t j = 1; j <= b_length; j++) {
            unsigned changed = before[j - 1] + (plain(a[i - 1]) != plain(b[j - 1]));
            now[j] = least(changed, least(before[j], now[j - 1]) + 1);
            if (i > 1 && j > 1 && plain(a[i - 1]) == plain(b[j - 2]) && plain(a[i - 2]) == plain(b[j - 1]))
                now[j] = least(now[j], twice_before[j - 2] + 1);
        }
    }
    return rows[a_length % 3][b_length];
}

/* How far a written name is from a name. A beginning of two letters or more counts as one wrong letter. */
static unsigned far_from(const char *written, const char *name) {
    size_t length = strlen(written), same = 0;
    while (same < length && plain(written[same]) == plain(name[same]))
        same++;
    return length >= 2 && same == length ? 1 : distance(written, name);
}

text words_hint(words among, const char *written) {
    const char *name, *nearest = NULL;
    unsigned near = ((unsigned)strnlen(written, LONGEST) + 2) / 3; /* one letter in three may be wrong */
    for (uint32_t i = 0; (name = among.get(among.set, i)) != NULL; i++) {
        unsigned far = far_from(written, name);
        if (far > near || (nearest && far == near))
            continue;
        nearest = name;
        near = far;
    }
    return nearest ? text_format(" (do you mean %s?)", nearest) : text_format("%s", "");
}
