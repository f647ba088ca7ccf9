/*
 * A link between two network namespaces, for kernels that cannot shape one: wire A B MTU
 *
 * Makes a TUN device "wire" in the namespaces A and B, and carries packets between them with a rate, a delay, jitter,
 * loss and reordering, which commands on standard input change while it runs:
 *
 *   rate MBITS       of each direction; 0: unlimited
 *   delay MS         of each direction
 *   jitter MS        added to the delay, evenly from 0 to this; packets may overtake each other by that
 *   loss PERCENT
 *   reorder PERCENT  of packets, which skip the delay and so overtake others
 *   cut ab|ba|both   loses the packets of that direction from now on, silently
 *   heal             ends every cut
 *   segments on|off  whether the kernel may hand over more than the MTU at once, as with network cards: faster, but
 *                    one loss then takes all of it
 *   count            prints the packets carried, lost, and dropped from a full queue
 *
 * It answers each command with a line, and ends when its standard input does.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    PACKET_BYTES = 10 + 65536, /* with the virtio-net header before the packet */
    HEADER_BYTES = 10,
    BATCH = 64,
    QUEUE_NS = 40 * 1000 * 1000, /* a packet that would wait longer to leave is dropped */
    QUEUE_BYTES = 64 << 20,      /* and so is a packet beyond this much on its way */
};

#define SECOND 1000000000ull
#define MILLISECOND 1000000.0

typedef struct packet {
    uint64_t due, number;
    uint32_t bytes;
    unsigned char *data; /* owned */
} packet;

/* Packets on their way in one direction: a heap by the time of arrival. */
typedef struct direction {
    int from, to;
    packet *heap;
    size_t count, capacity;
    uint64_t bytes;
    uint64_t number;
    uint64_t free_at; /* when the last byte of accepted packets has left */
    bool cut;
    uint64_t carried, lost, dropped;
} direction;

typedef struct wire {
    direction ways[2];
    double rate, delay, jitter, loss, reorder; /* bits per second; ns; ns; fractions; fractions */
    uint64_t random;
} wire;

static uint64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * SECOND + (uint64_t)now.tv_nsec;
}

/* A random number from 0 to 1. */
static double chance(wire *of) {
    of->random += 0x9e3779b97f4a7c15u;
    uint64_t x = of->random;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (double)((x ^ x >> 31) >> 11) / 9007199254740992.0;
}

static int fail(const char *what) {
    (void)fprintf(stderr, "wire: %s: %s\n", what, strerror(errno));
    return -1;
}

/* ---- packets on their way -------------------------------------------------------------------- */

static bool is_before(const packet *a, const packet *b) {
    return a->due != b->due ? a->due < b->due : a->number < b->number;
}

static void swap(packet *a, packet *b) {
    packet kept = *a;
    *a = *b;
    *b = kept;
}

static bool push(direction *way, packet one) {
    if (way->count == way->capacity) {
        size_t capacity = way->capacity ? 2 * way->capacity : 1024;
        packet *heap = realloc(way->heap, capacity * sizeof *heap);
        if (!heap)
            return false;
        way->heap = heap;
        way->capacity = capacity;
    }
    size_t i = way->count++;
    way->heap[i] = one;
    for (; i > 0 && is_before(&way->heap[i], &way->heap[(i - 1) / 2]); i = (i - 1) / 2)
        swap(&way->heap[i], &way->heap[(i - 1) / 2]);
    way->bytes += one.bytes;
    return true;
}

static packet pop(direction *way) {
    packet first = way->heap[0];
    way->heap[0] = way->heap[--way->count];
    for (size_t i = 0, child; (child = 2 * i + 1) < way->count; i = child) {
        if (child + 1 < way->count && is_before(&way->heap[child + 1], &way->heap[child]))
            child++;
        if (!is_before(&way->heap[child], &way->heap[i]))
            break;
        swap(&way->heap[child], &way->heap[i]);
    }
    way->bytes -= first.bytes;
    return first;
}

/* When a packet arrives; 0: never. */
static uint64_t arrival(wire *of, direction *way, uint32_t bytes, uint64_t now) {
    if (way->cut || (of->loss > 0 && chance(of) < of->loss)) {
        way->lost++;
        return 0;
    }
    uint64_t leaves = way->free_at > now ? way->free_at : now;
    if (leaves - now > QUEUE_NS || way->bytes > QUEUE_BYTES) {
        way->dropped++;
        return 0;
    }
    if (of->rate > 0)
        leaves += (uint64_t)(bytes * 8.0 / of->rate * 1e9);
    way->free_at = leaves;
    if (of->reorder > 0 && chance(of) < of->reorder)
        return leaves;
    double jitter = of->jitter > 0 ? chance(of) * of->jitter : 0;
    return leaves + (uint64_t)(of->delay + jitter);
}

static void take_in(wire *of, direction *way) {
    static unsigned char buffer[PACKET_BYTES];
    for (int i = 0; i < BATCH; i++) {
        ssize_t bytes = read(way->from, buffer, sizeof buffer);
        if (bytes <= HEADER_BYTES)
            return;
        uint64_t due = arrival(of, way, (uint32_t)bytes - HEADER_BYTES, now_ns());
        if (due == 0)
            continue;
        packet one = {due, way->number++, (uint32_t)bytes, malloc((size_t)bytes)};
        if (one.data)
            memcpy(one.data, buffer, (size_t)bytes);
        if (!one.data || !push(way, one)) {
            free(one.data);
            way->dropped++;
        }
    }
}

static void give_out(direction *way) {
    uint64_t now = now_ns();
    for (int i = 0; i < BATCH && way->count > 0 && way->heap[0].due <= now; i++) {
        packet one = pop(way);
        if (way->cut)
            way->lost++; /* packets on their way are lost with the link */
        else if (write(way->to, one.data, one.bytes) == (ssize_t)one.bytes)
            way->carried++;
        else
            way->dropped++;
        free(one.data);
    }
}

/* ---- devices --------------------------------------------------------------------------------- */

static void let_segment(int fd, bool on) {
    (void)ioctl(fd, TUNSETOFFLOAD, on ? TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 : 0u);
}

/* Makes the device in a namespace of `ip netns`, sets its MTU, and brings it up. */
static int open_device(const char *namespace, int mtu) {
    char path[256];
    (void)snprintf(path, sizeof path, "/run/netns/%s", namespace);
    int space = open(path, O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET) != 0)
        return fail(path);
    (void)close(space);
    struct ifreq device = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    (void)snprintf(device.ifr_name, sizeof device.ifr_name, "wire");
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &device) != 0)
        return fail("/dev/net/tun");
    int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    device.ifr_mtu = mtu;
    bool good = control >= 0 && ioctl(control, SIOCSIFMTU, &device) == 0;
    device.ifr_flags = IFF_UP | IFF_RUNNING;
    good = good && ioctl(control, SIOCSIFFLAGS, &device) == 0;
    if (control >= 0)
        (void)close(control);
    let_segment(fd, true);
    return good ? fd : fail("setting the device up");
}

/* ---- commands -------------------------------------------------------------------------------- */

static void print_counts(const wire *of) {
    for (int i = 0; i < 2; i++)
        (void)printf("%s carried %llu lost %llu dropped %llu%s", i ? "ba" : "ab",
                     (unsigned long long)of->ways[i].carried, (unsigned long long)of->ways[i].lost,
                     (unsigned long long)of->ways[i].dropped, i ? "\n" : ", ");
}

static bool obey(wire *of, const char *name, const char *value) {
    double number = strtod(value, NULL);
    if (strcmp(name, "rate") == 0)
        of->rate = number * 1e6;
    else if (strcmp(name, "delay") == 0)
        of->delay = number * MILLISECOND;
    else if (strcmp(name, "jitter") == 0)
        of->jitter = number * MILLISECOND;
    else if (strcmp(name, "loss") == 0)
        of->loss = number / 100;
    else if (strcmp(name, "reorder") == 0)
        of->reorder = number / 100;
    else if (strcmp(name, "cut") == 0 || strcmp(name, "heal") == 0)
        for (int i = 0; i < 2; i++)
            of->ways[i].cut =
                name[0] == 'c' && (strcmp(value, "both") == 0 || strcmp(value, i ? "ba" : "ab") == 0);
    else if (strcmp(name, "segments") == 0)
        for (int i = 0; i < 2; i++)
            let_segment(of->ways[i].from, strcmp(value, "on") == 0);
    else
        return false;
    return true;
}

/* Returns false at the end of the input. */
static bool take_commands(wire *of) {
    static char line[256];
    static size_t length;
    ssize_t bytes = read(STDIN_FILENO, line + length, sizeof line - 1 - length);
    if (bytes <= 0)
        return false;
    length += (size_t)bytes;
    line[length] = '\0';
    for (char *end; (end = strchr(line, '\n'));) {
        char name[32] = "", value[32] = "";
        *end = '\0';
        (void)sscanf(line, "%31s %31s", name, value);
        if (strcmp(name, "count") == 0)
            print_counts(of);
        else
            (void)printf(obey(of, name, value) ? "ok\n" : "unknown: %s\n", line);
        (void)fflush(stdout);
        length -= (size_t)(end + 1 - line);
        memmove(line, end + 1, length + 1);
    }
    return length < sizeof line - 1;
}

static void sleep_until_needed(const wire *of, struct pollfd polled[3]) {
    uint64_t due = UINT64_MAX, now = now_ns();
    for (int i = 0; i < 2; i++)
        if (of->ways[i].count > 0 && of->ways[i].heap[0].due < due)
            due = of->ways[i].heap[0].due;
    uint64_t left = due > now ? due - now : 0;
    struct timespec wait = {(time_t)(left / SECOND), (long)(left % SECOND)};
    (void)ppoll(polled, 3, due == UINT64_MAX ? NULL : &wait, NULL);
}

int main(int argc, char **argv) {
    if (argc != 4)
        return fprintf(stderr, "wire A B MTU\n"), 2;
    int mtu = (int)strtol(argv[3], NULL, 10), a = open_device(argv[1], mtu), b = open_device(argv[2], mtu);
    if (a < 0 || b < 0)
        return 1;
    wire of = {.ways = {{.from = a, .to = b}, {.from = b, .to = a}}, .random = 1};
    struct pollfd polled[3] = {
        {.fd = a, .events = POLLIN}, {.fd = b, .events = POLLIN}, {.fd = STDIN_FILENO, .events = POLLIN}};
    (void)printf("ready\n");
    (void)fflush(stdout);
    for (bool more = true; more;) {
        sleep_until_needed(&of, polled);
        for (int i = 0; i < 2; i++) {
            if (polled[i].revents)
                take_in(&of, &of.ways[i]);
            give_out(&of.ways[i]);
        }
        more = !polled[2].revents || take_commands(&of);
    }
    return 0;
}
