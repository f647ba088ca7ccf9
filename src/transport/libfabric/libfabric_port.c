/*
 * Ports. Each link has one for its operations, because there is no other way to make libfabric forget operations that
 * do not complete: closing a port ends them, and memory that they name is free again. Each port also has a table of
 * addresses: EFA of libfabric 1.17 to 2.1 refuses a second endpoint at the same table, and later versions do not count
 * how often an address was put into one, so that a link that closes would take the address from another link.
 *
 * A port's descriptor counts when it becomes readable, not while it is: over TCP it stayed readable once it was, before
 * libfabric 1.19.
 */
#include "transport/libfabric/libfabric.h"

static kvf_status open_queue(kvf_libfabric_endpoint *endpoint, kvf_libfabric_port *port) {
    struct fi_cq_attr attributes = {
        .format = FI_CQ_FORMAT_MSG,
        .wait_obj = endpoint->poll_us ? FI_WAIT_NONE : FI_WAIT_FD,
    };
    int failed = fi_cq_open(endpoint->domain, &attributes, &port->cq, NULL);
    if (!failed && !endpoint->poll_us)
        failed = fi_control(&port->cq->fid, FI_GETWAIT, &port->fd);
    return failed ? kvf_libfabric_refuse(endpoint->library, failed, "completion queue") : KVF_OK;
}

static kvf_status open_ep(kvf_libfabric_endpoint *endpoint, kvf_libfabric_port *port) {
    struct fi_av_attr table = {.type = FI_AV_TABLE};
    int failed = fi_av_open(endpoint->domain, &table, &port->addresses, NULL);
    if (!failed)
        failed = fi_endpoint(endpoint->domain, endpoint->info, &port->ep, NULL);
    if (!failed)
        failed = fi_ep_bind(port->ep, &port->addresses->fid, 0);
    if (!failed)
        failed = fi_ep_bind(port->ep, &port->cq->fid, FI_TRANSMIT | FI_RECV);
    if (!failed)
        failed = fi_enable(port->ep);
    return failed ? kvf_libfabric_refuse(endpoint->library, failed, "endpoint") : KVF_OK;
}

kvf_status kvf_libfabric_port_open(kvf_libfabric_endpoint *endpoint, kvf_libfabric_port *port) {
    *port = (kvf_libfabric_port){.fd = -1};
    kvf_status status = open_queue(endpoint, port);
    if (!status)
        status = open_ep(endpoint, port);
    if (!status && port->fd >= 0)
        status = kvf_watch_edges(endpoint->event_fd, port->fd, endpoint);
    if (status)
        kvf_libfabric_port_close(endpoint, port);
    return status;
}

void kvf_libfabric_port_close(kvf_libfabric_endpoint *endpoint, kvf_libfabric_port *port) {
    if (port->fd >= 0)
        kvf_watch_remove(endpoint->event_fd, port->fd); /* the descriptor is the queue's */
    if (port->ep)
        (void)fi_close(&port->ep->fid);
    if (port->cq)
        (void)fi_close(&port->cq->fid);
    if (port->addresses)
        (void)fi_close(&port->addresses->fid);
    *port = (kvf_libfabric_port){.fd = -1};
}

/* Takes one that failed. */
static ssize_t take_failed(const kvf_libfabric_port *port) {
    struct fi_cq_err_entry entry = {0};
    ssize_t got = fi_cq_readerr(port->cq, &entry, 0);
    if (got == 1 && entry.op_context) {
        kvf_libfabric_operation *operation = entry.op_context;
        operation->done(operation, 0, entry.err ? entry.err : FI_EIO);
    }
    return got;
}

kvf_status kvf_libfabric_port_poll(const kvf_libfabric_endpoint *endpoint, const kvf_libfabric_port *port,
                                   size_t *moved) {
    struct fi_cq_msg_entry entries[KVF_LIBFABRIC_COMPLETIONS];
    ssize_t got = fi_cq_read(port->cq, entries, KVF_LIBFABRIC_COMPLETIONS);
    for (ssize_t i = 0; i < got; i++) {
        kvf_libfabric_operation *operation = entries[i].op_context;
        if (operation) /* NULL: a peer's write brought a number for our queue, as any holder of a card may do */
            operation->done(operation, entries[i].len, 0);
    }
    if (got == -FI_EAVAIL)
        got = take_failed(port);
    if (got > 0)
        *moved += (size_t)got;
    return got >= 0 || got == -FI_EAGAIN ? KVF_OK
                                         : kvf_libfabric_fail(endpoint->library, got, "completion queue");
}

bool kvf_libfabric_port_rests(const kvf_libfabric_endpoint *endpoint, const kvf_libfabric_port *port) {
    struct fid *queue = &port->cq->fid;
    return port->fd < 0 || fi_trywait(endpoint->fabric, &queue, 1) == 0;
}
