/* Samples of transfers, reduced to the figures that operators read. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <kvferry/connector/transfer_summary.h>

#include "base/base.h"

#define MB 1048576.0

/* The nearest number with `decimals` decimals; of two equally near ones the even one. Printing does this exactly,
 * multiplying does not. */
static double rounded(double value, int decimals) {
    char text[400]; /* the largest double has 309 digits before the point */
    snprintf(text, sizeof text, "%.*f", decimals, value);
    return strtod(text, NULL);
}

static double sum_of(const double *samples, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += samples[i];
    return sum;
}

static int compare_samples(const void *a, const void *b) {
    const double *left = a, *right = b;
    return (*left > *right) - (*left < *right);
}

/* The 90th percentile, interpolated linearly between the samples around rank 0.9 * (count - 1). */
static double p90_of(double *sorted, const double *samples, size_t count) {
    memcpy(sorted, samples, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, compare_samples);
    double rank = 0.9 * (double)(count - 1);
    size_t below = (size_t)rank;
    double low = sorted[below], high = sorted[below + 1 < count ? below + 1 : below];
    return low + (high - low) * (rank - (double)below);
}

static kvf_status check_samples(const double *samples, size_t count, const char *what) {
    if (!samples)
        return kvf_fail(KVF_E_INVALID, "%s is NULL and count is %zu", what, count);
    for (size_t i = 0; i < count; i++)
        if (!isfinite(samples[i]) || samples[i] < 0)
            return kvf_fail(KVF_E_INVALID, "%s[%zu] is %g; allowed: finite numbers from 0", what, i,
                            samples[i]);
    return KVF_OK;
}

static kvf_status reduce(const kvf_transfer_samples *s, kvf_transfer_summary *out) {
    kvf_status status = check_samples(s->transfer_seconds, s->count, "transfer_seconds");
    if (!status)
        status = check_samples(s->post_seconds, s->count, "post_seconds");
    if (!status)
        status = check_samples(s->bytes, s->count, "bytes");
    if (!status)
        status = check_samples(s->descriptors, s->count, "descriptors");
    if (status)
        return status;
    double *sorted = kvf_alloc(s->count, sizeof *sorted);
    if (!sorted)
        return kvf_nomem("samples");
    double count = (double)s->count;
    double seconds = sum_of(s->transfer_seconds, s->count), megabytes = sum_of(s->bytes, s->count) / MB;
    out->average_transfer_ms = rounded(seconds / count * 1e3, 3);
    out->p90_transfer_ms = rounded(p90_of(sorted, s->transfer_seconds, s->count) * 1e3, 3);
    out->average_post_ms = rounded(sum_of(s->post_seconds, s->count) / count * 1e3, 3);
    out->p90_post_ms = rounded(p90_of(sorted, s->post_seconds, s->count) * 1e3, 3);
    out->average_mb = rounded(megabytes / count, 3);
    out->throughput_mb_per_s = seconds > 0 ? rounded(megabytes / seconds, 3) : 0;
    out->average_descriptors = rounded(sum_of(s->descriptors, s->count) / count, 1);
    kvf_free(sorted);
    return KVF_OK;
}

kvf_status kvf_transfer_summarise(const kvf_transfer_samples *samples, kvf_transfer_summary *out) {
    if (!samples || !out)
        return kvf_fail(KVF_E_INVALID, "kvf_transfer_summarise: samples or out is NULL");
    kvf_transfer_summary summary = {
        .transfers = samples->count, .expired = samples->expired, .late = samples->late};
    if (!kvf_add(samples->failed_transfers, samples->failed_handshakes, &summary.failed) ||
        !kvf_add(summary.failed, samples->failed_notifications, &summary.failed))
        return kvf_fail(KVF_E_OVERFLOW,
                        "%llu transfers, %llu handshakes and %llu notifications failed: "
                        "their sum does not fit in 64 bits",
                        (unsigned long long)samples->failed_transfers,
                        (unsigned long long)samples->failed_handshakes,
                        (unsigned long long)samples->failed_notifications);
    summary.empty = !summary.transfers && !summary.failed && !summary.expired && !summary.late;
    kvf_status status = samples->count ? reduce(samples, &summary) : KVF_OK;
    if (!status)
        *out = summary;
    return status;
}

size_t kvf_transfer_summary_text(const kvf_transfer_summary *s, char *text, size_t text_bytes) {
    int length = snprintf(
        text, text_bytes,
        "transfers=%llu transfer_ms=%.3f transfer_p90_ms=%.3f post_ms=%.3f post_p90_ms=%.3f mb=%.3f "
        "mb_per_s=%.3f descriptors=%.1f failed=%llu expired=%llu late=%llu",
        (unsigned long long)s->transfers, s->average_transfer_ms, s->p90_transfer_ms, s->average_post_ms,
        s->p90_post_ms, s->average_mb, s->throughput_mb_per_s, s->average_descriptors,
        (unsigned long long)s->failed, (unsigned long long)s->expired, (unsigned long long)s->late);
    return length > 0 ? (size_t)length : 0;
}
