/*
 * Compiles device code at build time: kernels.cu for each target, with NVRTC, into a C file that becomes part of the
 * library. NVRTC is one library that needs neither a CUDA toolkit nor a device. This program opens it by its path, and
 * needs nothing of CUDA to be built.
 *
 *     device_code LIBNVRTC SOURCE OUTPUT        SOURCE: the folder src
 *     device_code --none OUTPUT                 a table without code
 *
 * A compiler warning is a failure.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* Machine code for data-centre devices since 2020, and PTX for all other devices of compute capability 8.0 and up. */
static const struct {
    const char *option;
    unsigned major, minor;
    bool portable;
} targets[] = {
    {"-arch=compute_80", 8, 0, true},
    {"-arch=sm_80", 8, 0, false},
    {"-arch=sm_90", 9, 0, false},
    {"-arch=sm_100", 10, 0, false},
};

/* The headers that kernels.cu includes. */
static const char *const headers[] = {"cuda/kernel_move.h", "cuda/kernel_hash.h", "cuda/kernel_boxes.h",
                                      "kernel/convert_bits.h"};

static struct {
    int (*nvrtcCreateProgram)(void **program, const char *source, const char *name, int header_count,
                              const char *const *header_texts, const char *const *header_names);
    int (*nvrtcDestroyProgram)(void **program);
    int (*nvrtcCompileProgram)(void *program, int option_count, const char *const *options);
    int (*nvrtcGetProgramLogSize)(void *program, size_t *bytes);
    int (*nvrtcGetProgramLog)(void *program, char *text);
    int (*nvrtcGetCUBINSize)(void *program, size_t *bytes);
    int (*nvrtcGetCUBIN)(void *program, char *image);
    int (*nvrtcGetPTXSize)(void *program, size_t *bytes);
    int (*nvrtcGetPTX)(void *program, char *image);
} nvrtc;

static void must(bool well, const char *what, const char *which) {
    if (well)
        return;
    (void)fprintf(stderr, "device_code: %s: %s\n", what, which);
    exit(1);
}

static void find(void *library, const char *name, void *out) {
    void *address = dlsym(library, name);
    must(address != NULL, "NVRTC has no function", name);
    memcpy(out, &address, sizeof address);
}

static void open_nvrtc(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    must(library != NULL, "cannot open NVRTC", library ? path : dlerror());
#define FIND(name) find(library, #name, &nvrtc.name)
    FIND(nvrtcCreateProgram);
    FIND(nvrtcDestroyProgram);
    FIND(nvrtcCompileProgram);
    FIND(nvrtcGetProgramLogSize);
    FIND(nvrtcGetProgramLog);
    FIND(nvrtcGetCUBINSize);
    FIND(nvrtcGetCUBIN);
    FIND(nvrtcGetPTXSize);
    FIND(nvrtcGetPTX);
#undef FIND
}

static void *room(size_t bytes) {
    void *memory = calloc(bytes + 1, 1);
    must(memory != NULL, "no memory for", "a file");
    return memory;
}

static char *read_text(const char *folder, const char *name) {
    char path[4096];
    must((size_t)snprintf(path, sizeof path, "%s/%s", folder, name) < sizeof path, "the path is too long",
         name);
    FILE *file = fopen(path, "rb");
    must(file != NULL, "cannot open", path);
    must(fseek(file, 0, SEEK_END) == 0, "cannot read", path);
    const long bytes = ftell(file);
    must(bytes >= 0 && fseek(file, 0, SEEK_SET) == 0, "cannot read", path);
    char *text = room((size_t)bytes);
    must(fread(text, 1, (size_t)bytes, file) == (size_t)bytes, "cannot read", path);
    (void)fclose(file);
    return text;
}

/* Compiles for one target. Ends the program if the compiler's log is not empty. */
static void compile(void *program, const char *target) {
    const char *const options[] = {target, "--std=c++17"};
    const int result = nvrtc.nvrtcCompileProgram(program, (int)COUNT(options), options);
    size_t bytes = 0;
    must(nvrtc.nvrtcGetProgramLogSize(program, &bytes) == 0, "NVRTC has no log", target);
    char *log = room(bytes);
    must(nvrtc.nvrtcGetProgramLog(program, log) == 0, "NVRTC has no log", target);
    must(result == 0 && log[strspn(log, " \n")] == '\0', target, log);
    free(log);
}

static void write_image(FILE *out, size_t i, const unsigned char *image, size_t bytes) {
    (void)fprintf(out, "static const unsigned char image%zu[] __attribute__((aligned(64))) = {", i);
    for (size_t at = 0; at < bytes; at++)
        (void)fprintf(out, "%s%u,", at % 32 ? "" : "\n    ", image[at]);
    (void)fprintf(out, "};\n\n");
}

static void compile_target(FILE *out, size_t i, const char *source, const char *const *texts, size_t *bytes) {
    void *program = NULL;
    must(nvrtc.nvrtcCreateProgram(&program, source, "kernels.cu", COUNT(headers), texts, headers) == 0,
         "NVRTC refuses a program", targets[i].option);
    compile(program, targets[i].option);
    const bool portable = targets[i].portable;
    must((portable ? nvrtc.nvrtcGetPTXSize : nvrtc.nvrtcGetCUBINSize)(program, bytes) == 0 && *bytes > 0,
         "NVRTC made nothing for", targets[i].option);
    unsigned char *image = room(*bytes);
    must((portable ? nvrtc.nvrtcGetPTX : nvrtc.nvrtcGetCUBIN)(program, (char *)image) == 0,
         "NVRTC made nothing for", targets[i].option);
    write_image(out, i, image, *bytes);
    free(image);
    (void)nvrtc.nvrtcDestroyProgram(&program);
}

static void compile_all(FILE *out, const char *folder) {
    char *texts[COUNT(headers)], *source = read_text(folder, "cuda/kernels.cu");
    size_t bytes[COUNT(targets)];
    for (size_t i = 0; i < COUNT(headers); i++)
        texts[i] = read_text(folder, headers[i]);
    for (size_t i = 0; i < COUNT(targets); i++)
        compile_target(out, i, source, (const char *const *)texts, &bytes[i]);
    (void)fprintf(out, "const kvf_device_image kvf_device_images[] = {\n");
    for (size_t i = 0; i < COUNT(targets); i++)
        (void)fprintf(out, "    {%u, %u, %s, image%zu, %zu},\n", targets[i].major, targets[i].minor,
                      targets[i].portable ? "true" : "false", i, bytes[i]);
    (void)fprintf(out, "};\nconst size_t kvf_device_image_count = %zu;\n", COUNT(targets));
    for (size_t i = 0; i < COUNT(headers); i++)
        free(texts[i]);
    free(source);
}

int main(int argument_count, char **arguments) {
    const bool none = argument_count == 3 && strcmp(arguments[1], "--none") == 0;
    must(none || argument_count == 4, "usage", "device_code LIBNVRTC SOURCE OUTPUT | --none OUTPUT");
    const char *output = arguments[argument_count - 1];
    FILE *out = fopen(output, "w");
    must(out != NULL, strerror(errno), output);
    (void)fprintf(out, "/* Made by tools/device/device_code.c. */\n#include \"cuda/device_image.h\"\n\n");
    if (none) {
        (void)fprintf(out, "const kvf_device_image kvf_device_images[] = {{0}};\n"
                           "const size_t kvf_device_image_count = 0;\n");
    } else {
        open_nvrtc(arguments[1]);
        compile_all(out, arguments[2]);
    }
    must(fclose(out) == 0, "cannot write", output);
    return 0;
}
