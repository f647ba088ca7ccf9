/*
 * The fabrics of this build: the one list of them, their order, the check of their tables, their settings, and what
 * users are told about them.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "transport/card.h"
#include "transport/front.h"

extern const kvf_fabric kvf_fabric_inproc;
extern const kvf_fabric kvf_fabric_shm;
extern const kvf_fabric kvf_fabric_cuda;
#ifdef KVF_HAVE_LIBFABRIC
extern const kvf_fabric kvf_fabric_libfabric;
#endif
#ifdef KVF_HAVE_UCX
extern const kvf_fabric kvf_fabric_ucx;
#endif
#ifdef KVF_HAVE_MESSAGES
extern const kvf_fabric kvf_fabric_messages;
#endif

/* In any order. */
static const kvf_fabric *const fabrics[] = {
    &kvf_fabric_inproc,    &kvf_fabric_shm, &kvf_fabric_cuda,
#ifdef KVF_HAVE_LIBFABRIC
    &kvf_fabric_libfabric,
#endif
#ifdef KVF_HAVE_UCX
    &kvf_fabric_ucx,
#endif
#ifdef KVF_HAVE_MESSAGES
    &kvf_fabric_messages,
#endif
};
#define FABRICS ((uint32_t)(sizeof fabrics / sizeof *fabrics))

/* The fabrics that a build may leave out. */
static const char *const optional[] = {"libfabric", "ucx", "messages"};

/* ---- order ----------------------------------------------------------------------------------- */

static bool is_better(const kvf_transport_kind *a, const kvf_transport_kind *b) {
    if (a->reach != b->reach)
        return a->reach < b->reach;
    if (a->cost.ns_per_byte != b->cost.ns_per_byte)
        return a->cost.ns_per_byte < b->cost.ns_per_byte;
    if (a->cost.ns_per_run != b->cost.ns_per_run)
        return a->cost.ns_per_run < b->cost.ns_per_run;
    return strcmp(a->name, b->name) < 0;
}

const kvf_fabric *kvf_fabric_at(uint32_t i) {
    for (uint32_t at = 0; at < FABRICS; at++) {
        uint32_t better = 0;
        for (uint32_t other = 0; other < FABRICS; other++)
            better += is_better(&fabrics[other]->kind, &fabrics[at]->kind);
        if (better == i)
            return fabrics[at];
    }
    return NULL;
}

/* ---- tables ---------------------------------------------------------------------------------- */

static kvf_status incomplete(const kvf_fabric *fabric, const char *what) {
    return kvf_fail(KVF_E_INVALID, "fabric %s: its table %s", fabric->kind.name, what);
}

static const char *missing_function(const kvf_fabric *fabric) {
    const struct {
        bool there;
        const char *text;
    } needed[] = {
        {fabric->open, "has no open"},
        {fabric->register_region, "has no register_region"},
        {fabric->unregister_region, "has no unregister_region"},
        {fabric->card, "has no card"},
        {fabric->connect, "has no connect"},
        {fabric->submit, "has no submit"},
        {fabric->cancel, "has no cancel"},
        {fabric->notify, "has no notify"},
        {fabric->disconnect, "has no disconnect"},
        {fabric->progress, "has no progress"},
        {fabric->event_fd || fabric->unwatched, "has no event_fd"},
        {fabric->close, "has no close"},
    };
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!needed[i].there)
            return needed[i].text;
    return NULL;
}

static kvf_status check_abilities(const kvf_fabric *fabric) {
    const kvf_transport_kind *kind = &fabric->kind;
    if (kind->memory_kinds == 0 || kind->directions == 0)
        return incomplete(fabric, "names no memory kind or no direction");
    if (!kind->one_sided && !kind->served)
        return incomplete(fabric, "says neither one_sided nor served");
    if ((fabric->allocate != NULL) != (kind->allocates != 0) || (kind->allocates & ~kind->memory_kinds) != 0)
        return incomplete(
            fabric, "has allocate without allocates, or the other way round, or of memory it does not serve");
    if ((fabric->enter != NULL) != (fabric->leave != NULL))
        return incomplete(fabric, "has enter without leave, or the other way round");
    if ((fabric->fence != NULL) != kind->fences || (fabric->admit != NULL) != kind->fences)
        return incomplete(fabric, "has fence and admit without fences, or the other way round");
    if ((fabric->late_ns != NULL) == kind->fences)
        return incomplete(fabric, "has late_ns and fences, or neither");
    if ((fabric->is_apart != NULL) != (fabric->apart.name != NULL))
        return incomplete(fabric, "has is_apart without a name for it, or the other way round");
    if (!(kind->cost.ns_per_run > 0) || !(kind->cost.ns_per_byte > 0) || !(kind->cost.ns_per_source > 0))
        return incomplete(fabric, "has a cost of 0");
    return KVF_OK;
}

static bool belongs_to(const char *key, const char *kind, size_t kind_bytes) {
    return strncmp(key, kind, kind_bytes) == 0 && key[kind_bytes] == '.' && key[kind_bytes + 1];
}

kvf_status kvf_fabric_check(const kvf_fabric *fabric) {
    const kvf_transport_kind *kind = &fabric->kind;
    if (!kind->name || !*kind->name || strlen(kind->name) > KVF_CARD_KIND_MAX || strchr(kind->name, '.'))
        return kvf_fail(KVF_E_INVALID,
                        "fabric: its name is \"%s\"; allowed: 1 to %d characters without a dot",
                        kind->name ? kind->name : "", KVF_CARD_KIND_MAX);
    const char *missing = missing_function(fabric);
    if (missing)
        return incomplete(fabric, missing);
    for (const char *const *key = kind->settings; key && *key; key++)
        if (!belongs_to(*key, kind->name, strlen(kind->name)))
            return incomplete(fabric, "has a setting that does not begin with its name and a dot");
    return check_abilities(fabric);
}

/* ---- settings -------------------------------------------------------------------------------- */

const char *kvf_setting_of(const kvf_transport_options *options, const char *key) {
    for (uint32_t i = options->setting_count; i-- > 0;) /* the last one counts */
        if (strcmp(options->settings[i].key, key) == 0)
            return options->settings[i].value;
    return NULL;
}

kvf_status kvf_setting_up_to(const kvf_transport_options *options, const char *key, uint32_t most,
                             uint32_t *out) {
    const char *text = kvf_setting_of(options, key);
    char *end;
    if (!text)
        return KVF_OK;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno || value < 1 || value > most)
        return kvf_fail(KVF_E_INVALID, "transport setting %s is \"%s\"; allowed: 1 to %u", key,
                        kvf_excerpt_of(text, 40).text, most);
    *out = (uint32_t)value;
    return KVF_OK;
}

kvf_status kvf_setting_number(const kvf_transport_options *options, const char *key, uint32_t *out) {
    return kvf_setting_up_to(options, key, UINT32_MAX, out);
}

/* Whether a fabric has this setting; if not, adds the settings that it has to the text. */
static bool has_setting(const kvf_fabric *fabric, const char *key, kvf_text *known) {
    for (const char *const *own = fabric->kind.settings; own && *own; own++) {
        if (strcmp(key, *own) == 0)
            return true;
        kvf_text_add(known, "%s%s", known->length ? ", " : "", *own);
    }
    return false;
}

static bool is_left_out(const char *key) {
    for (size_t i = 0; i < sizeof optional / sizeof *optional; i++)
        if (belongs_to(key, optional[i], strlen(optional[i])) && !kvf_fabric_named(optional[i]))
            return true;
    return false;
}

static kvf_status check_key(const char *key, const kvf_fabric *in_front) {
    kvf_text known = {0};
    bool found = is_left_out(key) || (in_front && has_setting(in_front, key, &known));
    for (uint32_t i = 0; i < FABRICS && !found; i++)
        found = has_setting(fabrics[i], key, &known);
    kvf_status status = found ? KVF_OK
                              : kvf_fail(KVF_E_NOT_FOUND, "transport setting \"%s\"; allowed: %s", key,
                                         known.data ? known.data : "none");
    kvf_text_free(&known);
    return status;
}

kvf_status kvf_front_check_settings(const kvf_transport_options *options, const kvf_fabric *in_front) {
    if (options->setting_count > 0 && !options->settings)
        return kvf_fail(KVF_E_INVALID, "transport options: settings is NULL, but setting_count is %u",
                        options->setting_count);
    for (uint32_t i = 0; i < options->setting_count; i++) {
        const kvf_setting *setting = &options->settings[i];
        if (!setting->key || !setting->value)
            return kvf_fail(KVF_E_INVALID, "transport setting %u: %s is NULL", i,
                            setting->key ? "value" : "key");
        kvf_status status = check_key(setting->key, in_front);
        if (status)
            return status;
    }
    return KVF_OK;
}

/* ---- descriptions for users ------------------------------------------------------------------ */

const char *kvf_transport_kind_name(uint32_t i) {
    const kvf_fabric *fabric = kvf_fabric_at(i);
    return fabric ? fabric->kind.name : NULL;
}

kvf_status kvf_transport_describe(uint32_t i, kvf_transport_kind *out) {
    static const char *const no_settings[] = {NULL};
    kvf_status status = kvf_check_out(out, "kvf_transport_kind");
    if (status)
        return status;
    const kvf_fabric *fabric = kvf_fabric_at(i);
    if (!fabric)
        return kvf_fail(KVF_E_NOT_FOUND, "describe: kind %u; this build has %u", i, FABRICS);
    kvf_transport_kind known = fabric->kind;
    known.settings = known.settings ? known.settings : no_settings;
    kvf_fill_out(out, &known, sizeof known);
    return KVF_OK;
}

kvf_status kvf_front_note_absent(kvf_transport *transport, const kvf_fabric *fabric) {
    kvf_front_absent *grown = kvf_resize(transport->absent, transport->absent_count + 1, sizeof *grown);
    if (!grown)
        return kvf_nomem("a transport");
    transport->absent = grown;
    grown[transport->absent_count++] = (kvf_front_absent){fabric, kvf_strdup(kvf_error_detail())};
    return KVF_OK;
}

void kvf_front_free_absent(kvf_transport *transport) {
    for (uint32_t i = 0; i < transport->absent_count; i++)
        kvf_free(transport->absent[i].why);
    kvf_free(transport->absent);
}

static void find_out(const kvf_transport *transport, const kvf_fabric *fabric, kvf_transport_finding *out) {
    for (uint32_t i = 0; i < transport->absent_count; i++) {
        const kvf_front_absent *absent = &transport->absent[i];
        if (absent->fabric != fabric)
            continue;
        out->asked = true;
        (void)snprintf(out->why_not, sizeof out->why_not, "%s", absent->why ? absent->why : "");
    }
    for (uint32_t i = 0; i < transport->fabric_count; i++) {
        const kvf_front_fabric *front = &transport->fabrics[i];
        if (front->fabric != fabric)
            continue;
        out->asked = out->works = true;
        if (fabric->found)
            fabric->found(front->endpoint, out);
    }
}

kvf_status kvf_transport_find(kvf_transport *transport, uint32_t i, kvf_transport_finding *out) {
    if (!transport)
        return kvf_fail(KVF_E_INVALID, "find: transport is NULL");
    kvf_status status = kvf_check_out(out, "kvf_transport_finding");
    if (!status)
        status = kvf_front_check_process(transport, "find");
    if (status)
        return status;
    const kvf_fabric *fabric = kvf_fabric_at(i);
    if (!fabric)
        return kvf_fail(KVF_E_NOT_FOUND, "find: kind %u; this build has %u", i, FABRICS);
    kvf_transport_finding found = {0};
    (void)snprintf(found.kind, sizeof found.kind, "%s", fabric->kind.name);
    find_out(transport, fabric, &found);
    kvf_fill_out(out, &found, sizeof found);
    return KVF_OK;
}

const kvf_fabric *kvf_fabric_named(const char *kind) {
    for (uint32_t i = 0; i < FABRICS; i++)
        if (strcmp(fabrics[i]->kind.name, kind) == 0)
            return fabrics[i];
    return NULL;
}

kvf_status kvf_front_check_kind(const char *kind) {
    if (kvf_fabric_named(kind))
        return KVF_OK;
    for (size_t i = 0; i < sizeof optional / sizeof *optional; i++)
        if (strcmp(kind, optional[i]) == 0)
            return kvf_fail(KVF_E_UNSUPPORTED, "transport kind %s: this build of the library is without it",
                            kind);
    kvf_text known = {0};
    for (uint32_t i = 0; i < FABRICS; i++)
        kvf_text_add(&known, ", %s", kvf_transport_kind_name(i));
    kvf_status status = kvf_fail(KVF_E_NOT_FOUND, "transport kind is \"%s\"; allowed: auto%s", kind,
                                 known.data ? known.data : "");
    kvf_text_free(&known);
    return status;
}
