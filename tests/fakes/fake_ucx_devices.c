/*
 * The functions of a UCX that claims to take memory of CUDA devices. It moves nothing, completes everything at once,
 * and notes for each of its functions whether a CUDA context was current, as the driver, or the stand-in for it, says.
 * It registers what UCX would of a device's memory, the allocation at its beginning, and refuses reads into other memory.
 * Functions that are not here fail (fake_ucx.c).
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "fake_ucx_devices.h"
#include "transport/ucx/ucx.h"

#define SEEN __attribute__((visibility("default")))
#define FUNCTIONS 32u

static struct {
    const char *name;
    fake_ucx_calls calls;
} noted[FUNCTIONS];

/* A function of the driver; NULL: there is none. */
static void *of_driver(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return library ? dlsym(library, name) : NULL;
}

static bool has_context(void) {
    static CUresult (*ask)(CUcontext * context);
    CUcontext current = NULL;
    if (!ask) {
        void *address = of_driver("cuCtxGetCurrent");
        memcpy(&ask, &address, sizeof ask);
    }
    return ask && ask(&current) == 0 && current;
}

static void note(const char *name) {
    size_t i = 0;
    while (i + 1 < FUNCTIONS && noted[i].name && strcmp(noted[i].name, name) != 0)
        i++;
    noted[i].name = name;
    if (has_context())
        noted[i].calls.with_context++;
    else
        noted[i].calls.without++;
}

fake_ucx_calls fake_ucx_calls_of(const char *function) {
    fake_ucx_calls sum = {0};
    for (size_t i = 0; i < FUNCTIONS && noted[i].name; i++)
        if (!function || strcmp(noted[i].name, function) == 0) {
            sum.with_context += noted[i].calls.with_context;
            sum.without += noted[i].calls.without;
        }
    return sum;
}

void fake_ucx_forget(void) {
    memset(noted, 0, sizeof noted);
}

/* A handle of whatever kind. */
static void *thing(void) {
    static char place[8];
    return place;
}

/* ---- functions that only succeed ---------------------------------------------------------------- */

/* NOLINTBEGIN(misc-*,readability-*): as UCX declares them. */
#define SUCCEED(function, ...)                                                                               \
    SEEN ucs_status_t function(__VA_ARGS__) {                                                                \
        note(__func__);                                                                                      \
        return UCS_OK;                                                                                       \
    }
#define COMPLETE(function, ...)                                                                              \
    SEEN ucs_status_ptr_t function(__VA_ARGS__) {                                                            \
        note(__func__);                                                                                      \
        return NULL;                                                                                         \
    }
#define RETURN(function, ...)                                                                                \
    SEEN void function(__VA_ARGS__) {                                                                        \
        note(__func__);                                                                                      \
    }

#pragma GCC diagnostic ignored "-Wunused-parameter"
RETURN(ucp_config_release, ucp_config_t *config)
RETURN(ucp_cleanup, ucp_context_h context)
RETURN(ucp_worker_destroy, ucp_worker_h worker)
SUCCEED(ucp_worker_set_am_recv_handler, ucp_worker_h worker, const ucp_am_handler_param_t *parameters)
SUCCEED(ucp_worker_arm, ucp_worker_h worker)
RETURN(ucp_worker_release_address, ucp_worker_h worker, ucp_address_t *address)
SUCCEED(ucp_mem_unmap, ucp_context_h context, ucp_mem_h memory)
RETURN(ucp_rkey_buffer_release, void *key)
RETURN(ucp_rkey_destroy, ucp_rkey_h key)
RETURN(ucp_request_free, void *request)
COMPLETE(ucp_ep_flush_nbx, ucp_ep_h ep, const ucp_request_param_t *parameters)
COMPLETE(ucp_ep_close_nbx, ucp_ep_h ep, const ucp_request_param_t *parameters)
COMPLETE(ucp_put_nbx, ucp_ep_h ep, const void *from, size_t bytes, uint64_t to, ucp_rkey_h key,
         const ucp_request_param_t *parameters)
COMPLETE(ucp_am_send_nbx, ucp_ep_h ep, unsigned id, const void *header, size_t header_bytes, const void *data,
         size_t bytes, const ucp_request_param_t *parameters)

/* ---- functions that give something -------------------------------------------------------------- */

/* The value of UCX_TLS in files, and in the configuration that was read last. */
static char tls_of_files[64] = "all", tls[64];

void fake_ucx_configure(const char *value) {
    (void)snprintf(tls_of_files, sizeof tls_of_files, "%s", value);
}

const char *fake_ucx_tls(void) {
    return tls;
}

SEEN ucs_status_t ucp_config_read(const char *prefix, const char *file, ucp_config_t **out) {
    note(__func__);
    const char *of_environment = getenv("UCX_TLS");
    (void)snprintf(tls, sizeof tls, "%s", of_environment ? of_environment : tls_of_files);
    *out = thing();
    return UCS_OK;
}

SEEN void ucp_config_print(const ucp_config_t *config, FILE *stream, const char *title,
                           ucs_config_print_flags_t flags) {
    note(__func__);
    (void)fprintf(stream, "UCX_NET_DEVICES=all\nUCX_TLS=%s\nUCX_SHARE_PD=n\n", tls);
}

static bool takes_whole_allocations = true;

SEEN ucs_status_t ucp_config_modify(ucp_config_t *config, const char *name, const char *value) {
    note(__func__);
    if (strcmp(name, "CUDA_COPY_REG_WHOLE_ALLOC") == 0)
        takes_whole_allocations = strcmp(value, "off") != 0;
    if (strcmp(name, "TLS") == 0)
        (void)snprintf(tls, sizeof tls, "%s", value);
    return UCS_OK;
}

SEEN ucs_status_t ucp_init_version(unsigned major, unsigned minor, const ucp_params_t *parameters,
                                   const ucp_config_t *config, ucp_context_h *out) {
    note(__func__);
    *out = thing();
    return UCS_OK;
}

static bool card_given;

void fake_ucx_give_card(int has_card) {
    card_given = has_card;
}

SEEN void ucp_context_print_info(const ucp_context_h context, FILE *stream) {
    note(__func__);
    (void)fprintf(stream, "#   resource  0  :  md 0  dev 0  flags -- tcp/eth0\n%s",
                  card_given ? "#   resource  1  :  md 1  dev 1  flags -- rc_mlx5/mlx5_0:1\n" : "");
}

SEEN ucs_status_t ucp_context_query(ucp_context_h context, ucp_context_attr_t *out) {
    note(__func__);
    out->memory_types = UCS_BIT(UCS_MEMORY_TYPE_HOST) | UCS_BIT(UCS_MEMORY_TYPE_CUDA);
    return UCS_OK;
}

static ucs_status_t of_workers = UCS_OK;

void fake_ucx_refuse_workers(int result) {
    of_workers = (ucs_status_t)result;
}

SEEN ucs_status_t ucp_worker_create(ucp_context_h context, const ucp_worker_params_t *parameters,
                                    ucp_worker_h *out) {
    note(__func__);
    if (of_workers == UCS_OK)
        *out = thing();
    return of_workers;
}

/* Never readable; it stays open as long as the process. */
SEEN ucs_status_t ucp_worker_get_efd(ucp_worker_h worker, int *out) {
    note(__func__);
    *out = eventfd(0, EFD_CLOEXEC);
    return *out >= 0 ? UCS_OK : UCS_ERR_NO_RESOURCE;
}

static bool hangs;

void fake_ucx_hang(int hanging) {
    hangs = hanging;
}

SEEN unsigned ucp_worker_progress(ucp_worker_h worker) {
    note(__func__);
    return hangs ? (unsigned)UCS_ERR_IO_ERROR : 0;
}

SEEN ucs_status_t ucp_worker_get_address(ucp_worker_h worker, ucp_address_t **out, size_t *bytes) {
    note(__func__);
    *out = thing();
    *bytes = 8;
    return UCS_OK;
}

static ucs_status_t refusal = UCS_OK;

void fake_ucx_refuse(int result) {
    refusal = (ucs_status_t)result;
}

/* Of the device, what was registered last. */
static struct { uint64_t begin, bytes; } registered;

static void find_allocation(void) {
    CUresult (*find)(CUdeviceptr *, size_t *, CUdeviceptr);
    void *address = of_driver("cuMemGetAddressRange_v2");
    CUdeviceptr begin;
    size_t bytes;
    memcpy(&find, &address, sizeof find);
    if (address && find(&begin, &bytes, registered.begin) == 0) {
        registered.begin = begin;
        registered.bytes = bytes;
    }
}

SEEN ucs_status_t ucp_mem_map(ucp_context_h context, const ucp_mem_map_params_t *parameters, ucp_mem_h *out) {
    note(__func__);
    *out = thing();
    if (parameters->memory_type != UCS_MEMORY_TYPE_CUDA)
        return UCS_OK;
    registered.begin = (uintptr_t)parameters->address;
    registered.bytes = parameters->length;
    if (takes_whole_allocations)
        find_allocation();
    return refusal;
}

SEEN ucs_status_ptr_t ucp_get_nbx(ucp_ep_h ep, void *to, size_t bytes, uint64_t from, ucp_rkey_h key,
                                  const ucp_request_param_t *parameters) {
    note(__func__);
    const uint64_t at = (uintptr_t)to - registered.begin;
    if (parameters->memory_type == UCS_MEMORY_TYPE_CUDA &&
        (at >= registered.bytes || bytes > registered.bytes - at))
        return UCS_STATUS_PTR(UCS_ERR_CONNECTION_RESET);
    return hangs ? thing() : NULL;
}

SEEN ucs_status_t ucp_rkey_pack(ucp_context_h context, ucp_mem_h memory, void **out, size_t *bytes) {
    note(__func__);
    *out = thing();
    *bytes = 8;
    return UCS_OK;
}

SEEN ucs_status_t ucp_ep_create(ucp_worker_h worker, const ucp_ep_params_t *parameters, ucp_ep_h *out) {
    note(__func__);
    *out = thing();
    return UCS_OK;
}

SEEN ucs_status_t ucp_ep_rkey_unpack(ucp_ep_h ep, const void *packed, ucp_rkey_h *out) {
    note(__func__);
    *out = thing();
    return UCS_OK;
}
/* NOLINTEND(misc-*,readability-*) */
