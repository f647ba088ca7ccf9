/*
 * kvferry transports: which kinds of transport this build has, which work on this machine, with what, and why others
 * do not.
 */
#include <stdio.h>
#include <string.h>

#include <kvferry/transport.h>

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

static void add_row(table *list, const kvf_transport_kind *kind, const kvf_transport_finding *found) {
    table_cell(list, kind->name);
    table_cell(list, reach_word(kind->reach));
    table_cell(list, found->works ? "yes" : "no");
    table_cell(list, found->version);
    table_cell(list, found->library);
}

static void print_details(const kvf_transport_finding *found) {
    if (found->ways[0])
        printf("\n%s finds %s\n", found->kind, found->ways);
    if (found->why_not[0])
        printf("\n%s does not work here: %s\n", found->kind, found->why_not);
}

static int print_all(kvf_transport *transport) {
    table list;
    kvf_transport_kind kind = {.struct_size = sizeof kind};
    kvf_transport_finding found = {.struct_size = sizeof found};
    table_start(&list, "kind|reaches|works here|version|library");
    for (uint32_t i = 0; kvf_transport_describe(i, &kind) == KVF_OK; i++)
        if (kvf_transport_find(transport, i, &found) == KVF_OK)
            add_row(&list, &kind, &found);
    if (!table_print(&list, 0))
        return failure("not enough memory");
    for (uint32_t i = 0; kvf_transport_find(transport, i, &found) == KVF_OK; i++)
        print_details(&found);
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

static struct json_object *json_all(kvf_transport *transport) {
    struct json_object *all = json_object_new_array();
    kvf_transport_kind kind = {.struct_size = sizeof kind};
    kvf_transport_finding found = {.struct_size = sizeof found};
    for (uint32_t i = 0; kvf_transport_describe(i, &kind) == KVF_OK; i++) {
        if (kvf_transport_find(transport, i, &found) != KVF_OK)
            continue;
        struct json_object *one = json_object_new_object();
        json_text(one, "kind", kind.name);
        json_text(one, "reaches", reach_word(kind.reach));
        json_object_object_add(one, "works", json_object_new_boolean(found.works));
        json_text(one, "why_not", found.why_not);
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
    kvf_transport *transport = NULL;
    result = options_open_transport(&asked, &transport);
    if (result)
        return result;
    result = asked.json ? json_write(json_all(transport), "-") : print_all(transport);
    kvf_transport_close(transport);
    return result;
}
