/* What a test asks of the UCX that claims to take memory of CUDA devices (fake_ucx_devices.c), by dlsym(). */
#ifndef KVF_TESTS_FAKE_UCX_DEVICES_H
#define KVF_TESTS_FAKE_UCX_DEVICES_H

/** How often a function was called since fake_ucx_forget() while a CUDA context was current, and while none was. */
typedef struct fake_ucx_calls {
    unsigned with_context, without;
} fake_ucx_calls;

/** @param function  its name; NULL: all together */
__attribute__((visibility("default"))) fake_ucx_calls fake_ucx_calls_of(const char *function);
__attribute__((visibility("default"))) void fake_ucx_forget(void);

/** From now on memory of a device is registered with this result: a ucs_status_t, 0 for success. */
__attribute__((visibility("default"))) void fake_ucx_refuse(int result);

/** Workers are opened with this result from now on, likewise. */
__attribute__((visibility("default"))) void fake_ucx_refuse_workers(int result);

/** What UCX_TLS is in UCX's files from now on, at first "all", and what it is for the context that was opened last. */
__attribute__((visibility("default"))) void fake_ucx_configure(const char *value);
__attribute__((visibility("default"))) const char *fake_ucx_tls(void);

/** Whether contexts have an InfiniBand card. */
__attribute__((visibility("default"))) void fake_ucx_give_card(int has_card);

/** Whether reads from now on are under way forever, as copies of a device whose context has ended by an error. UCX's
 * progress then says each time that something has moved, as that of UCX 1.18. */
__attribute__((visibility("default"))) void fake_ucx_hang(int hanging);

#endif
