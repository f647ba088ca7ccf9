/*
 * kvferry transports: the kinds of transport of this build, which of them work on this machine and with which devices,
 * and why others do not.
 */
#include <stdio.h>
#include <string.h>

#include <kvferry/transport.h>

#include "device_words.h"
#include "folding.h"
#include "json.h"
#include "options.h"
#include "table.h"

static const char *reach_word(kvf_reach reach) {
    switch (reach) {
    case KVF_REACH_PROCESS:
        return "process";
    case KVF_REACH_HOST:
        return "host";
    case KVF_REACH_NETWORK:
        return "network";
    }
    return "";
}

/* ---- text ------------------------------------------------------------------------------------ */

static const char *memory_words(uint32_t kinds) {
    const bool host = kinds & 1u << KVF_MEMORY_HOST, cuda = kinds & 1u << KVF_MEMORY_CUDA;
    return host && cuda ? "host, CUDA" : cuda ? "CUDA" : "host";
}

static void add_row(table *list, const kvf_transport_kind *kind, const kvf_transport_finding *found) {
    table_cell(list, kind->name);
    table_cell(list, reach_word(kind->reach));
    table_cell(list, memory_words(kind->memory_kinds));
    table_cell(list, found->works ? "yes" : "no");
    table_cell(list, found->version);
    table_cell(list, found->library);
}

static void print_details(const kvf_transport_finding *found) {
    if (found->ways[0]) {
        printf("\n");
        print_paragraph("%s finds %s", found->kind, found->ways);
    }
    if (found->why_not[0]) {
        printf("\n");
        print_paragraph("%s does not work here: %s", found->kind, found->why_not);
    }
}

/* Prints why "auto" leaves out a kind that works. */
static void print_left_out(kvf_transport *automatic, const kvf_transport_finding *found, uint32_t i) {
    kvf_transport_finding taken = {.struct_size = sizeof taken};
    if (!found->works || kvf_transport_find(automatic, i, &taken) || taken.works)
        return;
    printf("\n");
    print_paragraph("\"auto\" does not use %s: %s", taken.kind, taken.why_not);
}

/* Memory of devices needs no transport of its own kind: it moves packed, if kvferry has code for the device. */
static void print_devices(void) {
    uint32_t count = 0;
    char words[512];
    kvf_device_info device = {.struct_size = sizeof device};
    if (kvf_device_count(KVF_MEMORY_CUDA, &count)) {
        char why[512];
        (void)snprintf(why, sizeof why, "%s", kvf_error_detail());
        printf("\n");
        print_paragraph("device memory does not move: %s", why);
        return;
    }
    printf("\nmemory of devices moves packed, by every kind:\n");
    for (uint32_t i = 0; i < count; i++) {
        if (kvf_device_get_info(KVF_MEMORY_CUDA, i, &device))
            (void)snprintf(words, sizeof words, "%s", kvf_error_detail());
        else
            device_describe(&device, words, sizeof words);
        printf("  CUDA device %u: %s\n", i, words);
    }
}

static int print_all(kvf_transport *transport, kvf_transport *automatic) {
    table list;
    kvf_transport_kind kind = {.struct_size = sizeof kind};
    kvf_transport_finding found = {.struct_size = sizeof found};
    table_start(&list, "kind|reaches|memory|works here|version|library");
    for (uint32_t i = 0; kvf_transport_describe(i, &kind) == KVF_OK; i++)
        if (kvf_transport_find(transport, i, &found) == KVF_OK)
            add_row(&list, &kind, &found);
    if (!table_print(&list, 0))
        return failure("not enough memory");
    for (uint32_t i = 0; kvf_transport_find(transport, i, &found) == KVF_OK; i++) {
        print_details(&found);
        print_left_out(automatic, &found, i);
    }
    print_devices();
    return EXIT_DONE;
}

/* ---- JSON ------------------------------------------------------------------------------------ */

/* The words of a text, as a list. */
static struct json_object *json_words(const char *text) {
    struct json_object *list = json_object_new_array();
    for (size_t length; *text; text += length + (text[length] == ' ')) {
        length = strcspn(text, " ");
        json_object_array_add(list, json_object_new_string_len(text, (int)length));
    }
    return list;
}

static struct json_object *json_memory(uint32_t kinds) {
    struct json_object *list = json_object_new_array();
    if (kinds & 1u << KVF_MEMORY_HOST)
        json_object_array_add(list, json_object_new_string("host"));
    if (kinds & 1u << KVF_MEMORY_CUDA)
        json_object_array_add(list, json_object_new_string("cuda"));
    return list;
}

static struct json_object *json_all(kvf_transport *transport, kvf_transport *automatic) {
    struct json_object *all = json_object_new_array();
    kvf_transport_kind kind = {.struct_size = sizeof kind};
    kvf_transport_finding found = {.struct_size = sizeof found}, taken = {.struct_size = sizeof taken};
    for (uint32_t i = 0; kvf_transport_describe(i, &kind) == KVF_OK; i++) {
        if (kvf_transport_find(transport, i, &found) != KVF_OK ||
            kvf_transport_find(automatic, i, &taken) != KVF_OK)
            continue;
        struct json_object *one = json_object_new_object();
        json_text(one, "kind", kind.name);
        json_text(one, "reaches", reach_word(kind.reach));
        json_object_object_add(one, "memory", json_memory(kind.memory_kinds));
        json_object_object_add(one, "works", json_object_new_boolean(found.works));
        json_object_object_add(one, "auto", json_object_new_boolean(taken.works));
        json_text(one, "why_not", taken.why_not);
        json_text(one, "version", found.version);
        json_text(one, "library", found.library);
        json_object_object_add(one, "finds", json_words(found.ways));
        json_object_array_add(all, one);
    }
    return all;
}

int run_transports(int argc, char **argv) {
    options asked;
    int result = options_parse(argc, argv, COMMAND_TRANSPORTS, &asked);
    if (result)
        return result;
    kvf_transport *transport = NULL, *automatic = NULL;
    kvf_status status = options_open_transport(&asked, true, &transport);
    if (!status)
        status = options_open_transport(&asked, false, &automatic);
    result = status ? library_error(status, "transports") : EXIT_DONE;
    if (!result && options_want_text(&asked))
        result = print_all(transport, automatic);
    if (!result && asked.json)
        result = json_write(json_all(transport, automatic), asked.json);
    kvf_transport_close(automatic);
    kvf_transport_close(transport);
    return result;
}
