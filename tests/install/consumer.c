/* The C half of a program that uses an installed kvferry. Its argument is the version it must find. */
#include <stdio.h>
#include <string.h>

#include "every_header.h"

int same_version_in_cxx(const char *wanted);

int main(int argc, char **argv) {
    if (argc != 2) {
        (void)fprintf(stderr, "usage: consumer VERSION\n");
        return 2;
    }
    if (strcmp(kvf_version(), argv[1]) != 0) {
        (void)fprintf(stderr, "linked with kvferry %s, wanted %s\n", kvf_version(), argv[1]);
        return 1;
    }
    return same_version_in_cxx(argv[1]) ? 0 : 1;
}
