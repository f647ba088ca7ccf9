#include "files.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "cli.h"

int file_read(const char *option, const char *path, char *out, size_t room, size_t *bytes) {
    FILE *file = fopen(path, "r");
    int error = file ? 0 : errno;
    *bytes = file ? fread(out, 1, room, file) : 0;
    if (file && ferror(file))
        error = errno;
    if (file)
        (void)fclose(file);
    return error ? failure("--%s: %s: %s", option, path, strerror(error)) : EXIT_DONE;
}

int file_check(const char *path) {
    struct stat about;
    /* A pipe whose writer comes and goes is over for its reader, and the text would wait for another one. */
    if (strcmp(path, "-") == 0 || (stat(path, &about) == 0 && S_ISFIFO(about.st_mode)))
        return EXIT_DONE;
    const bool is_new = lstat(path, &about) != 0; /* a command that fails does not leave it, empty */
    FILE *out = fopen(path, "a");
    const bool can = out && fclose(out) == 0 && (!is_new || remove(path) == 0);
    return can ? EXIT_DONE : failure("%s: %s", path, strerror(errno));
}

bool file_is_same(const char *a, const char *b) {
    struct stat of_a, of_b;
    if (strcmp(a, "-") == 0 || strcmp(b, "-") == 0)
        return false;
    const bool is_new = lstat(a, &of_a) != 0; /* then it is made for a moment: two names may lead there */
    FILE *made = is_new ? fopen(a, "a") : NULL;
    const bool same = stat(a, &of_a) == 0 && stat(b, &of_b) == 0 && of_a.st_dev == of_b.st_dev &&
                      of_a.st_ino == of_b.st_ino && S_ISREG(of_a.st_mode);
    if (made) {
        (void)fclose(made);
        (void)remove(a);
    }
    return same;
}

int file_write(const char *path, const char *text) {
    if (strcmp(path, "-") == 0)
        return fputs(text, stdout) != EOF && fflush(stdout) == 0 ? EXIT_DONE : EXIT_FAILED;
    FILE *out = fopen(path, "w");
    if (!out)
        return failure("%s: %s", path, strerror(errno));
    int error = fputs(text, out) == EOF ? errno : 0;
    if (fclose(out) != 0 && !error)
        error = errno;
    if (!error)
        return EXIT_DONE;
    struct stat about;
    if (lstat(path, &about) == 0 && S_ISREG(about.st_mode))
        (void)remove(path);
    return failure("%s: %s", path, strerror(error));
}
