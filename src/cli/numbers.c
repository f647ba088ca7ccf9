#include "numbers.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

bool parse_number(const char *text, uint64_t *out) {
    if (!isdigit((unsigned char)text[0]))
        return false;
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno)
        return false;
    static const char suffixes[] = "kmgt";
    const char *suffix = *end ? strchr(suffixes, tolower((unsigned char)*end)) : NULL;
    if (*end && (!suffix || end[1]))
        return false;
    unsigned shift = suffix ? 10 * (unsigned)(suffix - suffixes + 1) : 0;
    if (value > UINT64_MAX >> shift)
        return false;
    *out = (uint64_t)value << shift;
    return true;
}
