/*
 * Loading libfabric when it is first needed, and what its providers are to kvferry.
 *
 * kvferry is not linked against libfabric: one build serves machines with any libfabric from 1.17 on, and with none.
 * Structs that kvferry makes itself are those of the interface of 1.17, which it asks for; all others libfabric makes.
 *
 * Providers whose name has a ';' are layers over others, such as "tcp;ofi_rxm". They are not used: rxm of libfabric
 * 1.17 crashes when a port is closed while reads are under way, and closing a port is how kvferry ends a link.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "transport/libfabric/libfabric.h"
#include "transport/libraries.h"

#define CANDIDATES_DEFAULT "libfabric.so.1"
#define INTERFACE FI_VERSION(KVF_LIBFABRIC_MAJOR, KVF_LIBFABRIC_MINOR_MIN)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static kvf_libfabric_library *all_loaded;
static kvf_library_owner owner;

/* ---- network cards --------------------------------------------------------------------------- */

/* The driver of a device with a verbs interface; "" if unknown. */
static void driver_of(const char *verbs, const char *device, char out[PATH_MAX]) {
    char link[PATH_MAX + NAME_MAX + sizeof "//device/driver"], path[PATH_MAX];
    out[0] = '\0';
    (void)snprintf(link, sizeof link, "%s/%s/device/driver", verbs, device);
    if (realpath(link, path))
        (void)snprintf(out, PATH_MAX, "%s", strrchr(path, '/') + 1);
}

bool kvf_libfabric_has_cards(const char *devices) {
    char driver[PATH_MAX], slingshot[PATH_MAX], verbs[PATH_MAX];
    (void)snprintf(slingshot, sizeof slingshot, "%s/cxi", devices);
    (void)snprintf(verbs, sizeof verbs, "%s/infiniband", devices);
    bool found = access(slingshot, F_OK) == 0;
    DIR *folder = opendir(verbs);
    for (const struct dirent *entry; folder && !found && (entry = readdir(folder)) != NULL;) {
        driver_of(verbs, entry->d_name, driver);
        found = entry->d_name[0] != '.' && strcmp(driver, "efa") == 0;
    }
    if (folder)
        (void)closedir(folder);
    return found;
}

/* ---- loading --------------------------------------------------------------------------------- */

static const kvf_library_function functions[] = {
#define NEEDED(function) {#function, offsetof(kvf_libfabric_library, function), false},
    KVF_LIBFABRIC_FUNCTIONS(NEEDED)
#undef NEEDED
};

static kvf_status check_version(kvf_libfabric_library *library) {
    const uint32_t version = library->fi_version();
    (void)snprintf(library->version, sizeof library->version, "%u.%u", FI_MAJOR(version), FI_MINOR(version));
    if (FI_VERSION_LT(version, INTERFACE))
        return kvf_fail(KVF_E_UNSUPPORTED, "it is libfabric %s; allowed: %d.%d and later", library->version,
                        KVF_LIBFABRIC_MAJOR, KVF_LIBFABRIC_MINOR_MIN);
    return KVF_OK;
}

static kvf_status find_path(void *handle, kvf_libfabric_library *library) {
    char path[PATH_MAX];
    kvf_library_file_of(dlsym(handle, "fi_version"), path);
    library->path = kvf_strdup(path);
    return library->path ? KVF_OK : kvf_nomem("a library's path");
}

static void drop(kvf_libfabric_library *library) {
    kvf_free(library->path);
    kvf_free(library);
}

static kvf_status examine(void *handle, const kvf_libfabric_library **out) {
    kvf_libfabric_library *made = kvf_alloc0(1, sizeof *made);
    if (!made)
        return kvf_nomem("a library's functions");
    kvf_status status = kvf_library_find(handle, functions, sizeof functions / sizeof *functions, made);
    if (!status)
        status = check_version(made);
    if (!status)
        status = find_path(handle, made);
    if (status) {
        drop(made);
        return status;
    }
    for (kvf_libfabric_library *known = all_loaded; known; known = known->following)
        if (strcmp(known->path, made->path) == 0) {
            drop(made);
            *out = known;
            return KVF_OK;
        }
    made->following = all_loaded;
    all_loaded = made;
    *out = made;
    return KVF_OK;
}

static kvf_status load_one(const char *name, void *out) {
    void *handle;
    kvf_status status = kvf_library_check_file(name);
    if (!status)
        status = kvf_library_open(name, &handle);
    if (status)
        return status;
    status = examine(handle, out);
    if (status)
        (void)dlclose(handle);
    return status;
}

kvf_status kvf_libfabric_load(const char *candidates, const kvf_libfabric_library **out) {
    const kvf_libfabric_library *found = NULL;
    kvf_status status = kvf_library_claim(&owner, "libfabric");
    if (status)
        return status;
    (void)pthread_mutex_lock(&lock);
    status = kvf_library_load_first("libfabric", "libfabric.library",
                                    candidates ? candidates : CANDIDATES_DEFAULT, load_one, &found);
    if (!all_loaded)
        kvf_library_disclaim(&owner);
    (void)pthread_mutex_unlock(&lock);
    *out = found;
    return status;
}

/* ---- providers ------------------------------------------------------------------------------- */

/* Those of network cards first. TCP without a layer is "net" in libfabric 1.17, and "tcp" later. */
static const char *const known[] = {"efa", "cxi", "tcp", "net"};
#define KNOWN_OF_CARDS 2u

/* FI_OPT_EFA_EMULATED_READ and _WRITE of libfabric's headers from 1.19 on. */
#define EFA_EMULATED_READ ((int)-(0xefa << 16) + 1)
#define EFA_EMULATED_WRITE ((int)-(0xefa << 16) + 2)

/* Older versions do not say. */
static bool efa_emulates(struct fid_ep *ep, int option) {
    bool emulates = true;
    size_t bytes = sizeof emulates;
    return fi_getopt(&ep->fid, FI_OPT_ENDPOINT, option, &emulates, &bytes) != 0 || emulates;
}

bool kvf_libfabric_emulates(const struct fi_info *info, struct fid_ep *ep) {
    if (strcmp(info->fabric_attr->prov_name, "efa") == 0)
        return efa_emulates(ep, EFA_EMULATED_READ) || efa_emulates(ep, EFA_EMULATED_WRITE);
    return strcmp(info->fabric_attr->prov_name, "cxi") != 0;
}

/* Searches for a provider, best first: one that takes memory of devices, and keys that we choose. cxi takes such keys
 * unless it may choose them itself, and access by keys that it chose does not end with the registration. EFA always
 * chooses. */
static const struct look {
    uint64_t abilities;
    int keys;
} looks[] = {{FI_HMEM, 0}, {FI_HMEM, FI_MR_PROV_KEY}, {0, 0}, {0, FI_MR_PROV_KEY}};

static void ask_for(struct fi_info *hints, const struct look *look) {
    hints->caps = FI_MSG | FI_RMA | look->abilities;
    hints->mode = FI_CONTEXT | FI_CONTEXT2; /* each operation has such a struct */
    hints->ep_attr->type = FI_EP_RDM;
    hints->ep_attr->max_msg_size = KVF_PIECE_MAX;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | look->keys |
                                  FI_MR_ENDPOINT | (look->abilities & FI_HMEM ? FI_MR_HMEM : 0);
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
    hints->tx_attr->msg_order = FI_ORDER_SAS;
    hints->rx_attr->msg_order = FI_ORDER_SAS;
}

/* Frees all descriptions but one. */
static struct fi_info *keep_one(const kvf_libfabric_library *library, struct fi_info *all,
                                const struct fi_info *chosen) {
    struct fi_info *kept = chosen ? library->fi_dupinfo(chosen) : NULL;
    library->fi_freeinfo(all);
    return kept;
}

/* An address of IPv6 that means something only with the name of its interface, which is another one on the peer. */
static bool is_of_one_link(const struct fi_info *info) {
    struct sockaddr_in6 address;
    if (info->addr_format != FI_SOCKADDR_IN6 || !info->src_addr || info->src_addrlen < sizeof address)
        return false;
    memcpy(&address, info->src_addr, sizeof address);
    return IN6_IS_ADDR_LINKLOCAL(&address.sin6_addr);
}

/* Providers take these names for hints, and may offer others. */
static bool is_wanted(const struct fi_info *info, const char *provider, const char *domain) {
    return strcmp(info->fabric_attr->prov_name, provider) == 0 && !is_of_one_link(info) &&
           (!domain || strcmp(info->domain_attr->name, domain) == 0);
}

/* A description of a provider of this name; NULL: it has none that can be used. */
static struct fi_info *look_at(const kvf_libfabric_library *library, const char *provider, const char *domain,
                               const struct look *look) {
    struct fi_info *hints = library->fi_dupinfo(NULL), *found = NULL;
    if (!hints)
        return NULL;
    ask_for(hints, look);
    hints->fabric_attr->prov_name = strdup(provider); /* freed with the hints, as is the next */
    hints->domain_attr->name = domain ? strdup(domain) : NULL;
    int failed = library->fi_getinfo(INTERFACE, NULL, NULL, 0, hints, &found);
    library->fi_freeinfo(hints);
    if (failed)
        return NULL;
    const struct fi_info *at = found;
    while (at && !is_wanted(at, provider, domain))
        at = at->next;
    return keep_one(library, found, at);
}

kvf_status kvf_libfabric_choose(const kvf_libfabric_library *library, const char *provider, bool only_cards,
                                const char *domain, struct fi_info **out) {
    const size_t count = only_cards ? KNOWN_OF_CARDS : sizeof known / sizeof *known;
    *out = NULL;
    for (size_t i = 0; i < count && !*out; i++) {
        const char *name = provider ? provider : known[i];
        for (size_t l = 0; l < sizeof looks / sizeof *looks && !*out; l++)
            *out = look_at(library, name, domain, &looks[l]);
        if (provider)
            break;
    }
    if (*out)
        return KVF_OK;
    return kvf_fail(
        KVF_E_UNSUPPORTED,
        "libfabric %s (%s) has no provider %s%s%s with reliable datagrams and one-sided operations "
        "of its own%s%s",
        library->version, library->path, provider ? "\"" : "among ",
        provider     ? provider
        : only_cards ? "efa, cxi"
                     : "efa, cxi, tcp, net",
        provider ? "\"" : "", domain ? " for the interface " : "", domain ? domain : "");
}

/* ---- words ----------------------------------------------------------------------------------- */

static kvf_status status_of(int error) {
    switch (error) {
    case FI_ENOMEM:
        return KVF_E_NOMEM;
    case FI_ENOSYS:
    case FI_EOPNOTSUPP:
    case FI_ENODEV:
        return KVF_E_UNSUPPORTED;
    case FI_EACCES:
    case FI_EPERM:
    case FI_EKEYREJECTED:
        return KVF_E_PERMISSION;
    default:
        return kvf_libfabric_means_lost(error) ? KVF_E_PEER_LOST : KVF_E_IO;
    }
}

bool kvf_libfabric_means_lost(int error) {
    static const int lost[] = {FI_ECANCELED, FI_ECONNABORTED, FI_ECONNREFUSED, FI_ECONNRESET, FI_EHOSTUNREACH,
                               FI_EHOSTDOWN, FI_ENETUNREACH,  FI_ENOTCONN,     FI_ESHUTDOWN,  FI_ETIMEDOUT,
                               EPIPE};
    for (size_t i = 0; i < sizeof lost / sizeof *lost; i++)
        if (error == lost[i])
            return true;
    return false;
}

kvf_status kvf_libfabric_fail(const kvf_libfabric_library *library, ssize_t error, const char *what) {
    const int number = (int)(error < 0 ? -error : error);
    return kvf_fail(status_of(number), "libfabric %s: %s", what, library->fi_strerror(number));
}

kvf_status kvf_libfabric_refuse(const kvf_libfabric_library *library, ssize_t error, const char *what) {
    (void)kvf_libfabric_fail(library, error, what);
    return KVF_E_UNSUPPORTED;
}
