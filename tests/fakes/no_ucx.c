/*
 * A library that is not UCX.
 */
__attribute__((visibility("default"))) int no_ucx_at_all(void);

int no_ucx_at_all(void) {
    return 1;
}
