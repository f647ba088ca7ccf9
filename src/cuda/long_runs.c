#include "cuda/long_runs.h"

uint64_t kvf_rows_together(const kvf_box *pages, uint64_t row, uint64_t rows, uint64_t row_bytes) {
    const uint64_t begin = row;
    const unsigned char *end = kvf_box_row(pages, row);
    do {
        const uint64_t in_block = pages->block_rows - (pages->first_row + row) % pages->block_rows;
        const uint64_t more = pages->row_stride == row_bytes ? kvf_min_u64(in_block, rows - row) : 1;
        row += more;
        end += more * row_bytes;
    } while (row < rows && kvf_box_row(pages, row) == end);
    return row - begin;
}

bool kvf_rows_are_whole(const kvf_box *pages, uint64_t units, uint64_t cell_bytes) {
    return (pages->pieces == 1 || pages->piece_stride == pages->piece_bytes) &&
           (units == 1 || pages->unit_stride == cell_bytes);
}

bool kvf_has_long_runs(const kvf_box *pages, uint64_t rows, uint64_t row_bytes, uint64_t least) {
    bool any = false;
    uint32_t count = 0;
    for (uint64_t row = 0, together; row < rows; row += together) {
        together = kvf_rows_together(pages, row, rows, row_bytes);
        const bool is_long = together * row_bytes >= least, inside = row > 0 && row + together < rows;
        if (together == rows)
            return true;
        if ((inside && !is_long) || ++count > KVF_LONG_RUNS)
            return false;
        any = any || is_long;
    }
    return any;
}
