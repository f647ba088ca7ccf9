/*
 * Models by name: a file, or one of the configurations that come with the library.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/config.h"

const char *kvf_builtin_model_name(uint32_t i) {
    for (uint32_t row = 0; kvf_builtin_models[row].name; row++)
        if (row == i)
            return kvf_builtin_models[row].name;
    return NULL;
}

static const kvf_builtin_model *find_builtin(const char *name) {
    for (const kvf_builtin_model *model = kvf_builtin_models; model->name; model++)
        if (strcmp(model->name, name) == 0)
            return model;
    return NULL;
}

static kvf_status io_failure(const char *path, const char *call) {
    return kvf_fail(KVF_E_IO, "%s: %s: %s", kvf_excerpt_of(path, 200).text, call, strerror(errno));
}

static kvf_status check_file(const char *path, int file, size_t *bytes) {
    struct stat about;
    if (fstat(file, &about))
        return io_failure(path, "fstat");
    if (!S_ISREG(about.st_mode))
        return kvf_fail(KVF_E_IO, "%s is %s; it must be a file", kvf_excerpt_of(path, 200).text,
                        S_ISDIR(about.st_mode) ? "a directory" : "not a regular file");
    if (about.st_size <= 0 || about.st_size > (off_t)KVF_CONFIG_MAX_BYTES)
        return kvf_fail(KVF_E_RANGE, "%s has %lld bytes; allowed: 1 to %u", kvf_excerpt_of(path, 200).text,
                        (long long)about.st_size, KVF_CONFIG_MAX_BYTES);
    *bytes = (size_t)about.st_size;
    return KVF_OK;
}

static kvf_status read_all(const char *path, int file, char *text, size_t bytes) {
    for (size_t have = 0; have < bytes;) {
        ssize_t got = read(file, text + have, bytes - have);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return io_failure(path, "read");
        if (got == 0)
            return kvf_fail(KVF_E_IO, "%s ended after %zu of %zu bytes", kvf_excerpt_of(path, 200).text, have,
                            bytes);
        have += (size_t)got;
    }
    return KVF_OK;
}

static kvf_status load_file(const char *path, int file, const kvf_config_options *options, kvf_model **out) {
    size_t bytes = 0;
    kvf_status status = check_file(path, file, &bytes);
    if (status)
        return status;
    char *text = kvf_alloc(bytes, 1);
    if (!text)
        return kvf_nomem("a configuration");
    status = read_all(path, file, text, bytes);
    if (!status) {
        status = kvf_model_from_config(text, bytes, options, out);
        if (status)
            (void)kvf_fail_in(status, "%s: ", kvf_excerpt_of(path, 200).text);
    }
    kvf_free(text);
    return status;
}

static kvf_status load_builtin(const kvf_builtin_model *model, const kvf_config_options *options,
                               kvf_model **out) {
    return kvf_model_from_config((const char *)model->text, model->bytes, options, out);
}

static bool is_directory(int file) {
    struct stat about;
    return fstat(file, &about) == 0 && S_ISDIR(about.st_mode);
}

kvf_status kvf_model_load(const char *path_or_name, const kvf_config_options *options, kvf_model **out) {
    if (!path_or_name || !out)
        return kvf_fail(KVF_E_INVALID, "model: %s is NULL", path_or_name ? "out" : "path_or_name");
    const kvf_builtin_model *builtin = find_builtin(path_or_name);
    /* Without O_NONBLOCK, open() would block on a named pipe before it can be refused. */
    int file = open(path_or_name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0 && builtin)
        return load_builtin(builtin, options, out);
    if (file < 0 && (errno == ENOENT || errno == ENOTDIR))
        return kvf_fail(KVF_E_NOT_FOUND, "%s is neither a file nor a model that comes with the library",
                        kvf_excerpt_of(path_or_name, 200).text);
    if (file < 0)
        return io_failure(path_or_name, "open");
    kvf_status status = builtin && is_directory(file) ? load_builtin(builtin, options, out)
                                                      : load_file(path_or_name, file, options, out);
    (void)close(file);
    return status;
}
