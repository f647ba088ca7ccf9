/* The C++ half: the headers must declare everything with C linkage. */
#include <cstring>

#include "every_header.h"

extern "C" int same_version_in_cxx(const char *wanted) {
    return std::strcmp(kvf_version(), wanted) == 0;
}
