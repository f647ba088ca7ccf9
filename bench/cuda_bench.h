/*
 * What the parts of the benchmark of devices share: one device, caches in memory of several forms, whose cells tell
 * their token and head, and moving all cells from one form to another.
 *
 *     bench_gpu_open();
 *     bench_shape s = bench_shape_of(256, bench_gpu.bytes);
 *     bench_cells_fill(&s, HEADS_FIRST);
 *     bench_cells_clear(&s, PACKED);
 *     double ns = bench_move_ns(bench_gpu.copiers[0], &s, HEADS_FIRST, PACKED);
 *     bench_gpu.spoiled = bench_gpu.spoiled || bench_cells_wrong(&s, PACKED) > 0;
 *     bench_gpu_close();
 *
 * A failure in any of these functions ends the program.
 */
#ifndef BENCH_CUDA_BENCH_H
#define BENCH_CUDA_BENCH_H

#include "cuda/copier.h"
#include "report.h"

#define HEADS 8ull
#define ROWS 16ull /* tokens in a block */
#define SHORTEST 64u
#define LONGEST 65536u
#define MEGABYTE (1u << 20)
#define LAYERS 32u /* of a request of several layers */
#define ROUNDS_MAX 64u
#define CHECKED_EACH                                                                                         \
    7u /* tokens of which one is checked: a sample that meets every row of a block and every head */

/** How cells lie in memory: in blocks, by heads or by tokens first; packed; or packed in memory of the host. */
typedef enum bench_form { HEADS_FIRST, TOKENS_FIRST, PACKED, ON_HOST, FORMS } bench_form;

/** Numbers of blocks of threads that copiers may use; 0 stands for one on each multiprocessor. */
#define BENCH_CAPS 5u
extern const uint32_t bench_caps[BENCH_CAPS];

extern struct bench_gpu {
    const kvf_cuda *cuda;
    kvf_copier *copiers[BENCH_CAPS]; /* of two jobs; NULL: the device has fewer multiprocessors */
    CUstream stream;                 /* for the driver's copies */
    CUevent over;
    CUdeviceptr memory[FORMS]; /* ON_HOST: pinned memory of the host, under the same address */
    uint64_t room;             /* of each */
    unsigned char *seen;       /* pinned, for the host to write and check the device's bytes */
    uint64_t bytes;            /* moved at once, roughly */
    uint32_t rounds;
    bool spoiled; /* something has written wrong bytes */
} bench_gpu;

/** Reads KVF_BENCH_BYTES and KVF_BENCH_ROUNDS. */
void bench_gpu_settings(void);
/** Makes device 0 current for this thread, with the stream and `seen`. */
void bench_gpu_enter(void);
/** The same, with memory of all forms and the copiers. */
void bench_gpu_open(void);
void bench_gpu_close(void);
/** Ends the program unless the driver's call has succeeded. */
void bench_driver(CUresult result, const char *doing);
/** Waits for all that is on `stream`, without sleeping. */
void bench_stream_wait(void);

/** A cache of one layer, with its blocks in random order. */
typedef struct bench_shape {
    uint64_t run; /* bytes of one head of a token */
    uint32_t tokens, blocks;
    uint32_t *ids; /* for free() */
} bench_shape;

/** @param bytes  of its cells, roughly; at least one token */
bench_shape bench_shape_of(uint64_t run, uint64_t bytes);
/** Bytes of its cells. */
uint64_t bench_shape_bytes(const bench_shape *s);
/** Bytes of its blocks, of which the last one may be half empty. */
uint64_t bench_shape_span(const bench_shape *s);
/** Where a cell begins in the memory of a form. */
uint64_t bench_place_of(const bench_shape *s, bench_form in, uint32_t token, uint32_t head);
/** Its pages in memory of a form that has pages. */
kvf_box bench_pages_of(const bench_shape *s, bench_form in, CUdeviceptr memory);

/** Writes all cells, in memory of the host. */
void bench_cells_write(const bench_shape *s, bench_form in, unsigned char *memory);
void bench_cells_fill(const bench_shape *s, bench_form in);
void bench_cells_clear(const bench_shape *s, bench_form in);
/** The number of wrong cells in every 7th token. */
uint64_t bench_cells_wrong(const bench_shape *s, bench_form in);
/** Clears a cache, for a case that fills it. The control: the check must find the cleared cells wrong. */
void bench_cells_control(const bench_shape *s, bench_form in);

/** Waits until a started job is over, without sleeping. */
void bench_job_finish(kvf_copy_job *job);
/**
 * Moves all cells from one side to the other, as one request: from its table to its last byte.
 *
 * @param cell_elements  in elements of the sides' types; in bytes if these are the same
 */
double bench_sides_ns(kvf_copier *copier, const bench_shape *s, kvf_device_side from, kvf_device_side to,
                      uint64_t cell_elements);
/** The same, as bytes, from one form to another. */
double bench_move_ns(kvf_copier *copier, const bench_shape *s, bench_form from, bench_form to);
/** The driver's copy of as many bytes, between other memory of the same device or host. */
double bench_copy_ns(const bench_shape *s, bench_form from, bench_form to);

/**
 * Writes five cells: the rate of copies, then the rate of the work beside them with its lowest and highest, and the work
 * as a share of a copy. GB/s and medians of the rounds, of which each made one copy and did the work once.
 *
 * @param bytes  of a copy, and of the work
 */
void bench_beside_copies(bench_report *report, double bytes, const double *copy_ns, const double *work_ns);

/** Runs for the driver's copies. */
typedef struct bench_runs {
    size_t count;
    CUdeviceptr *from, *to;
    size_t *bytes;
} bench_runs;

/** Makes room for runs, all 0. */
bench_runs bench_runs_of(size_t count);
void bench_runs_free(bench_runs *runs);
/** Puts all of them on `stream` by one call of cuMemcpyBatchAsync(), or, `second`, cuMemcpyBatchAsync_v2(). */
CUresult bench_runs_batched(void *call, bool second, const bench_runs *runs);

/** The driver's copies of many places in one call: cuda_batches.c. */
void bench_batches(bench_report *report);
/** The link between device and host, in long runs: cuda_link.c. */
void bench_link(bench_report *report);
/** Cells that are converted: cuda_converted.c. */
void bench_converted(bench_report *report);
/** Received blocks that are permuted, and blocks that are copied: cuda_received.c. */
void bench_received(bench_report *report);
/** A product of matrices beside the copy engine: cuda_beside.c. */
void bench_beside(bench_report *report);
/** Two processes: cuda_peers.c. */
void bench_peers(bench_report *report);
/** Starts the second process of bench_peers(), before anything starts the driver, which does not outlive a fork. */
void bench_peers_start(void);

#endif
