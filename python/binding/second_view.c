/*
 * A second mapping of shared memory.
 *
 * Arrays over memory that a transport has allocated may live longer than the transport. They therefore use their
 * own mapping of the same pages, which is unmapped with the last array.
 */
#include <errno.h>
#include <sys/mman.h>

/* Returns the new address; NULL if the memory is not shared or there is no room: errno says which. */
static void *python_second_view(void *address, size_t bytes) {
    void *view = mremap(address, 0, bytes, MREMAP_MAYMOVE);
    return view == MAP_FAILED ? NULL : view;
}

static void python_drop_view(void *view, size_t bytes) {
    (void)munmap(view, bytes);
}
