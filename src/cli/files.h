/*
 * Files that the user names. They are read whole, and written whole or not at all.
 */
#ifndef KVFERRY_CLI_FILES_H
#define KVFERRY_CLI_FILES_H

#include <stdbool.h>
#include <stddef.h>

/**
 * Reads a file, at most `room` bytes of it. Prints what is wrong and returns EXIT_FAILED if it cannot be read.
 *
 * @param option  that names the file, such as "groups"
 */
int file_read(const char *option, const char *path, char *out, size_t room, size_t *bytes);

/** Checks that file_write() will be able to write a file, and leaves it as it is; prints what is wrong if it cannot. */
int file_check(const char *path);

/** Whether two names are those of one file, there or to be written. Names of a device, such as /dev/null, are not, nor
 * is "-". */
bool file_is_same(const char *a, const char *b);

/**
 * Writes a text ("-": to the standard output). Prints what is wrong if it cannot, and then leaves no part of a file
 * behind. What the standard output does not take is said by main().
 */
int file_write(const char *path, const char *text);

#endif
