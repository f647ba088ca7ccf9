#include "device_words.h"

#include <stdio.h>

#include "json.h"
#include "text.h"

void device_describe(const kvf_device_info *device, char *out, size_t bytes) {
    (void)snprintf(out, bytes, "%s, compute capability %u.%u, %u SMs, %s, %s%s", device->name, device->major,
                   device->minor, device->multiprocessors, text_bytes(device->memory_bytes).text,
                   device->code[0] ? "code for " : "", device->code[0] ? device->code : device->why_not);
}

void device_version(const kvf_device_info *device, char *out, size_t bytes) {
    (void)snprintf(out, bytes, "%u.%u", device->driver_version / 1000, device->driver_version % 1000 / 10);
}

struct json_object *json_device(uint32_t number, const kvf_device_info *device) {
    struct json_object *out = json_object_new_object();
    char words[32];
    json_count(out, "number", number);
    json_text(out, "name", device->name);
    (void)snprintf(words, sizeof words, "%u.%u", device->major, device->minor);
    json_text(out, "compute_capability", words);
    json_count(out, "multiprocessors", device->multiprocessors);
    json_count(out, "memory_bytes", device->memory_bytes);
    device_version(device, words, sizeof words);
    json_text(out, "driver", words);
    json_text(out, "code", device->code);
    json_text(out, "why_not", device->why_not);
    return out;
}
