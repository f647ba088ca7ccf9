/*
 * kvferry doctor: checks the properties of this machine on which moving caches depends, and says how to improve them.
 */
#include <errno.h>
#include <glob.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kvferry/transport.h>

#include "device_words.h"
#include "folding.h"
#include "json.h"
#include "options.h"
#include "table.h"
#include "text.h"

enum {
    DESCRIPTORS_GOOD = 4096,
    MEMORY_FILES_GOOD = 1 << 30,
    CHECKS_MAX = 96,
};

typedef struct check {
    char name[48];
    bool good;
    char found[1200];
    const char *advice;         /* printed if it is not good */
    struct json_object *device; /* owned; the device that was checked; NULL: the check is of something else */
} check;

typedef struct examination {
    check checks[CHECKS_MAX];
    size_t count;
} examination;

static check *add(examination *all, const char *name, bool good, const char *advice) {
    check *made = &all->checks[all->count < CHECKS_MAX - 1 ? all->count++ : CHECKS_MAX - 1];
    *made = (check){.good = good, .advice = advice};
    (void)snprintf(made->name, sizeof made->name, "%s", name);
    return made;
}

__attribute__((format(printf, 2, 3))) static void say_found(check *at, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(at->found, sizeof at->found, format, arguments);
    va_end(arguments);
}

/* The first line of a small file; "" when there is none. */
static void read_line(const char *path, char *out, int bytes) {
    FILE *file = fopen(path, "r");
    if (!file || !fgets(out, bytes, file))
        out[0] = '\0';
    if (file)
        (void)fclose(file);
    out[strcspn(out, "\n")] = '\0';
}

/* ---- reading another process's memory -------------------------------------------------------- */

/* Has one child read the memory of another, as two engines would. Returns 0 or an error number. */
static int try_reading(void) {
    static char word[8] = "before";
    pid_t owner = fork();
    if (owner < 0)
        return errno;
    if (owner == 0) {
        for (;;)
            (void)pause();
    }
    pid_t reader = fork();
    if (reader == 0) {
        char copy[sizeof word];
        struct iovec here = {copy, sizeof copy}, there = {word, sizeof word};
        _exit(process_vm_readv(owner, &here, 1, &there, 1, 0) == sizeof copy ? 0 : errno);
    }
    int status = 0, error = reader < 0 ? errno : 0;
    if (reader > 0 && waitpid(reader, &status, 0) == reader)
        error = WIFEXITED(status) ? WEXITSTATUS(status) : EINTR;
    (void)kill(owner, SIGKILL);
    (void)waitpid(owner, &status, 0);
    return error;
}

static void check_reading(examination *all) {
    int error = try_reading();
    char scope[32];
    read_line("/proc/sys/kernel/yama/ptrace_scope", scope, sizeof scope);
    check *at = add(all, "reading other processes", error == 0,
                    "without process_vm_readv, memory that an engine brings goes through a shared buffer: "
                    "allow it (sysctl kernel.yama.ptrace_scope=0; in a container CAP_SYS_PTRACE), or let "
                    "kvferry allocate the memory");
    say_found(at, "process_vm_readv %s%s%s", error ? strerror(error) : "works",
              scope[0] ? ", kernel.yama.ptrace_scope is " : "", scope);
}

/* ---- limits ---------------------------------------------------------------------------------- */

static const char *limit_words(rlim_t limit, bool bytes, text *out) {
    *out = limit == RLIM_INFINITY ? text_format("unlimited") : bytes ? text_bytes(limit) : text_count(limit);
    return out->text;
}

static void check_descriptors(examination *all) {
    struct rlimit limit;
    text soft, hard;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return;
    check *at = add(all, "file descriptors", limit.rlim_cur >= DESCRIPTORS_GOOD,
                    "raise it (ulimit -n, LimitNOFILE=): a connection takes a few, and UCX 64 to begin with");
    say_found(at, "%s, at most %s", limit_words(limit.rlim_cur, false, &soft),
              limit_words(limit.rlim_max, false, &hard));
}

static size_t count_files(const char *pattern) {
    glob_t found;
    size_t count = glob(pattern, 0, NULL, &found) == 0 ? found.gl_pathc : 0;
    if (count)
        globfree(&found);
    return count;
}

static void check_locked_memory(examination *all) {
    struct rlimit limit;
    text soft, hard;
    const size_t devices = count_files("/sys/class/infiniband/*");
    if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0)
        return;
    check *at = add(all, "locked memory", devices == 0 || limit.rlim_cur == RLIM_INFINITY,
                    "raise it (ulimit -l unlimited, LimitMEMLOCK=infinity): RDMA locks the whole cache");
    say_found(at, "%s, at most %s, RDMA devices: %zu", limit_words(limit.rlim_cur, true, &soft),
              limit_words(limit.rlim_max, true, &hard), devices);
}

static void check_shared_memory(examination *all) {
    struct statvfs files;
    if (statvfs("/dev/shm", &files) != 0)
        return;
    uint64_t bytes = (uint64_t)files.f_bavail * files.f_frsize;
    const bool read_only = files.f_flag & ST_RDONLY;
    check *at =
        add(all, "/dev/shm", bytes >= MEMORY_FILES_GOOD && !read_only,
            "UCX may run out of it (in a container: --shm-size); kvferry's own shared memory is not there");
    say_found(at, "%s free%s", text_bytes(bytes).text, read_only ? ", read-only" : "");
}

/* ---- devices --------------------------------------------------------------------------------- */

static void check_device(examination *all, uint32_t number) {
    kvf_device_info device = {.struct_size = sizeof device};
    char name[48];
    (void)snprintf(name, sizeof name, "CUDA device %u", number);
    const kvf_status status = kvf_device_get_info(KVF_MEMORY_CUDA, number, &device);
    check *at = add(all, name, status == KVF_OK && device.code[0],
                    "memory of this device cannot move: build on a machine that has libnvrtc.so.12 "
                    "(scripts/device-compiler), or install a wheel, which has code for devices of compute "
                    "capability 8.0 and later");
    if (status) {
        say_found(at, "%s", kvf_error_detail());
        return;
    }
    device_describe(&device, at->found, sizeof at->found);
    at->device = json_device(number, &device);
}

static void check_devices(examination *all) {
    uint32_t count = 0;
    const size_t files = count_files("/dev/nvidia[0-9]*");
    kvf_device_info first = {.struct_size = sizeof first};
    kvf_status status = kvf_device_count(KVF_MEMORY_CUDA, &count);
    if (!status)
        status = kvf_device_get_info(KVF_MEMORY_CUDA, 0, &first);
    check *at =
        add(all, "CUDA", status == KVF_OK || files == 0,
            "there are devices but no driver for this process: install libcuda.so.1 of 12.0 or later; in a "
            "container start it with the GPUs (--gpus all)");
    if (status) {
        say_found(at, "%s; devices in /dev: %zu", kvf_error_detail(), files);
        return;
    }
    char version[32];
    device_version(&first, version, sizeof version);
    say_found(at, "a driver for CUDA %s, devices: %u", version, count);
    for (uint32_t i = 0; i < count; i++)
        check_device(all, i);
}

/* ---- clocks ---------------------------------------------------------------------------------- */

static void check_clocks(examination *all) {
    char source[32];
    read_line("/sys/devices/system/clocksource/clocksource0/current_clocksource", source, sizeof source);
    bool slow =
        strcmp(source, "hpet") == 0 || strcmp(source, "acpi_pm") == 0 || strcmp(source, "jiffies") == 0;
    check *at =
        add(all, "clock source", !slow, "each reading of the clock takes a system call or more: use tsc");
    say_found(at, "%s", source[0] ? source : "not known");
    struct timex how = {0};
    int state = adjtimex(&how);
    if (state < 0)
        return; /* the kernel does not tell */
    at = add(all, "wall clock", state != TIME_ERROR && !(how.status & STA_UNSYNC),
             "only the times in logs of several machines are affected: run chrony or ntpd on the host");
    say_found(at, "%s", at->good ? "synchronised" : "the kernel says that it is not synchronised");
}

/* ---- transports ------------------------------------------------------------------------------ */

/* The advice for a kind of transport that does not work. */
static const char *way_to(const char *kind) {
    if (strcmp(kind, "ucx") == 0)
        return "for RDMA and CUDA memory: mend what the reason names, or install UCX 1.13 or later (Debian: "
               "libucx0; Python: libucx-cu12), or name its libucp with --ucx-library and the setting "
               "ucx.library";
    if (strcmp(kind, "libfabric") == 0)
        return "nothing, unless this machine has network cards of EFA or Slingshot: then install libfabric "
               "1.17 or later (Debian: libfabric1), or name it with --libfabric-library and the setting "
               "libfabric.library";
    if (strcmp(kind, "cuda") == 0)
        return "nothing, unless this machine has an NVIDIA GPU: then see what is said of CUDA";
    if (strcmp(kind, "messages") == 0)
        return "without it machines reach each other by ucx or libfabric only: mend what the reason names";
    return "without it slower kinds serve: mend what the reason names";
}

static void check_kinds(examination *all, kvf_transport *transport) {
    kvf_transport_finding found = {.struct_size = sizeof found};
    for (uint32_t i = 0; kvf_transport_find(transport, i, &found) == KVF_OK; i++) {
        char name[48];
        (void)snprintf(name, sizeof name, "transport %s", found.kind);
        check *at = add(all, name, found.works, way_to(found.kind));
        if (!found.works)
            say_found(at, "%s", found.why_not);
        else if (found.library[0])
            say_found(at, "%s, %s%s%s", found.version, found.library, found.ways[0] ? ", finds " : "",
                      found.ways);
        else
            say_found(at, "works");
    }
}

/* A machine that lacks something is a finding; a wrong option is refused. */
static int check_transports(examination *all, const options *asked) {
    kvf_transport *transport = NULL;
    const kvf_status status = options_open_transport(asked, true, &transport);
    if (status == KVF_E_IO)
        say_found(
            add(all, "transports", false, "nothing moves here: mend what the reason names, and look again"),
            "%s", kvf_error_detail());
    else if (status)
        return library_error(status, "transports");
    else
        check_kinds(all, transport);
    kvf_transport_close(transport);
    return EXIT_DONE;
}

/* ---- printing -------------------------------------------------------------------------------- */

static int print_all(const examination *all) {
    table list;
    table_start(&list, "|what|found");
    for (size_t i = 0; i < all->count; i++) {
        table_cell(&list, all->checks[i].good ? "ok" : "look");
        table_cell(&list, all->checks[i].name);
        table_cell(&list, all->checks[i].found);
    }
    if (!table_print(&list, 0))
        return failure("not enough memory");
    for (size_t i = 0; i < all->count; i++)
        if (!all->checks[i].good) {
            printf("\n");
            print_paragraph("%s: %s", all->checks[i].name, all->checks[i].advice);
        }
    return EXIT_DONE;
}

static struct json_object *json_all(const examination *all) {
    struct json_object *list = json_object_new_array();
    for (size_t i = 0; i < all->count; i++) {
        struct json_object *one = json_object_new_object();
        json_text(one, "what", all->checks[i].name);
        json_object_object_add(one, "good", json_object_new_boolean(all->checks[i].good));
        json_text(one, "found", all->checks[i].found);
        json_text(one, "advice", all->checks[i].good ? "" : all->checks[i].advice);
        if (all->checks[i].device)
            json_object_object_add(one, "device", json_object_get(all->checks[i].device));
        json_object_array_add(list, one);
    }
    return list;
}

int run_doctor(int argc, char **argv) {
    options asked;
    int result = options_parse(argc, argv, COMMAND_DOCTOR, &asked);
    if (result)
        return result;
    examination all = {.count = 0};
    check_reading(&all); /* forks, and so comes before the transport is open */
    result = check_transports(&all, &asked);
    if (result)
        return result;
    check_devices(&all);
    check_descriptors(&all);
    check_locked_memory(&all);
    check_shared_memory(&all);
    check_clocks(&all);
    result = options_want_text(&asked) ? print_all(&all) : EXIT_DONE;
    if (!result && asked.json)
        result = json_write(json_all(&all), asked.json);
    for (size_t i = 0; i < all.count; i++)
        json_object_put(all.checks[i].device);
    return result;
}
