/*
 * A summary of transfers for operators, as vLLM's connector writes it to its log.
 *
 * An agent's own statistics are in agent.h. Any thread may call; a call uses only its arguments.
 */
#ifndef KVFERRY_CONNECTOR_TRANSFER_SUMMARY_H
#define KVFERRY_CONNECTOR_TRANSFER_SUMMARY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <kvferry/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Samples of transfers, one entry each. */
typedef struct kvf_transfer_samples {
    const double *transfer_seconds;
    const double *post_seconds;
    const double *bytes;
    const double *descriptors;
    size_t count;
    uint64_t failed_transfers, failed_handshakes, failed_notifications;
    uint64_t expired; /**< requests whose blocks no consumer read in time */
    uint64_t late;    /**< notifications that came after their request had expired */
} kvf_transfer_samples;

/** The summary. Rounded to three decimals, descriptors to one; 1 MB is 2^20 bytes. */
typedef struct kvf_transfer_summary {
    uint64_t transfers;
    double average_transfer_ms, p90_transfer_ms; /**< 90th percentile, interpolated between samples */
    double average_post_ms, p90_post_ms;
    double average_mb, throughput_mb_per_s; /**< bytes over the sum of transfer times; 0 when that is 0 */
    double average_descriptors;
    uint64_t failed; /**< transfers, handshakes and notifications together, as vLLM's connector counts them */
    uint64_t expired, late;
    bool empty; /**< all counts are 0 */
} kvf_transfer_summary;

/**
 * @return KVF_OK, KVF_E_INVALID (a list is NULL; a sample is negative or not finite), KVF_E_OVERFLOW (the
 *         failures together), KVF_E_NOMEM
 */
KVF_API kvf_status kvf_transfer_summarise(const kvf_transfer_samples *samples, kvf_transfer_summary *out);

/**
 * Writes a summary as one line of `name=value` pairs.
 *
 * @return the length of the whole line, as snprintf() does
 */
KVF_API size_t kvf_transfer_summary_text(const kvf_transfer_summary *summary, char *text, size_t text_bytes);

#ifdef __cplusplus
}
#endif

#endif
