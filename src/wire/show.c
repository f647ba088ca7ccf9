#include "wire/show.h"

#include <stdio.h>

const char *kvf_wire_show(kvf_shown *out, const char *text, size_t bytes, size_t skip) {
    size_t length = 0;
    if (skip)
        length += (size_t)snprintf(out->text, sizeof out->text, "...");
    for (size_t i = skip; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        bool control = kvf_is_control((char)c);
        if (length + (control ? 4 : 1) > KVF_SHOWN_BYTES) {
            (void)snprintf(out->text + length, sizeof out->text - length, "...");
            return out->text;
        }
        if (control)
            length += (size_t)snprintf(out->text + length, sizeof out->text - length, "\\x%02x", c);
        else
            out->text[length++] = (char)c;
    }
    out->text[length] = '\0';
    return out->text;
}
