/*
 * Runs of a move that the driver's own copies take instead of a kernel. Between a device and pinned memory of the host
 * these are made by copy engines: they take no multiprocessor, and wait for no kernel of the engine that occupies all
 * of them. But each costs the host a call, so only long runs go by them. Only arithmetic: no driver, no device.
 *
 *     memory   block 7: | state, 2 MiB     |      a slot of 1 MiB begins in the middle of a cell
 *     packed                | 1 MiB |
 *     boxes                 | |   | |             a part of a cell, cells, a part of a cell: one run
 */
#ifndef KVF_CUDA_LONG_RUNS_H
#define KVF_CUDA_LONG_RUNS_H

#include "cuda/device_box.h"

/** The shortest run, unless the caller says otherwise. A copy in a batch took 4.4 us of the host's time on an H100
 * (docs/performance.md); 256 KiB take 4.8 us at the 55 GB/s of PCIe 5, so the host keeps up. Not measured itself. */
#define KVF_LONG_RUN_BYTES (256u << 10)

/** The most of a job; what is more goes by the kernel. */
#define KVF_LONG_RUNS 16u

/** Bytes that are contiguous on both sides, in one region of the pages. */
typedef struct kvf_long_run {
    uint64_t from, to, bytes;
    uint32_t region;
} kvf_long_run;

/**
 * Counts the rows of pages, from a row on, that lie one behind the other.
 *
 * @param pages      its rows and units are not read
 * @param row        below `rows`
 * @param row_bytes  of its units, which lie one behind the other: kvf_rows_are_whole()
 */
uint64_t kvf_rows_together(const kvf_box *pages, uint64_t row, uint64_t rows, uint64_t row_bytes);

/** Whether the cells of a row lie one behind the other. */
bool kvf_rows_are_whole(const kvf_box *pages, uint64_t units, uint64_t cell_bytes);

/**
 * Whether pages go by runs: they are one run, of any length, which may be a part of a longer one; or a few, all of at
 * least `least` bytes but the first and the last, and one of them at least.
 */
bool kvf_has_long_runs(const kvf_box *pages, uint64_t rows, uint64_t row_bytes, uint64_t least);

#endif
