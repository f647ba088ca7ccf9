/*
 * A library that is no UCX.
 */
__attribute__((visibility("default"))) int no_ucx_at_all(void);

int no_ucx_at_all(void) {
    return 1;
}
