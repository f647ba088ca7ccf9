/*
 * The converting loops, written once for every width of vector: to be included by a file that has defined AT_ONCE,
 * read_f32() and write_f32() for so many elements, and end_streaming(); it finds convert_fast() here.
 */
#define LINE ((size_t)64)
#define STREAM_LEAST 256u /* elements */

/* Fewer than are converted at once: beside others of no meaning. */
ALWAYS void convert_few(kvf_dtype from, kvf_dtype to, const unsigned char *in, unsigned char *out,
                        size_t count) {
    const size_t in_bytes = from == KVF_DTYPE_F32 ? 4 : 2, out_bytes = to == KVF_DTYPE_F32 ? 4 : 2;
    unsigned char some[AT_ONCE * 4] = {0}, converted[AT_ONCE * 4];
    memcpy(some, in, count * in_bytes);
    write_f32(to, read_f32(from, some), converted, false);
    memcpy(out, converted, count * out_bytes);
}

/* The types are constants. */
ALWAYS void convert_from_to(kvf_dtype from, kvf_dtype to, const unsigned char *in, unsigned char *out,
                            size_t count, bool past) {
    const size_t in_bytes = from == KVF_DTYPE_F32 ? 4 : 2, out_bytes = to == KVF_DTYPE_F32 ? 4 : 2;
    size_t i = 0;
    if (past && count >= STREAM_LEAST && (uintptr_t)out % out_bytes == 0) {
        const size_t head = (size_t)(-(uintptr_t)out % LINE) / out_bytes; /* not more than two lines of f32 */
        for (; i < head; i += kvf_min_u64(AT_ONCE, head - i))
            convert_few(from, to, in + i * in_bytes, out + i * out_bytes, kvf_min_u64(AT_ONCE, head - i));
        for (; i + AT_ONCE <= count; i += AT_ONCE)
            write_f32(to, read_f32(from, in + i * in_bytes), out + i * out_bytes, true);
        end_streaming();
    }
    for (; i + AT_ONCE <= count; i += AT_ONCE)
        write_f32(to, read_f32(from, in + i * in_bytes), out + i * out_bytes, false);
    if (i < count)
        convert_few(from, to, in + i * in_bytes, out + i * out_bytes, count - i);
}

static void convert_fast(kvf_dtype from, kvf_dtype to, const void *in, void *out, size_t count, bool past) {
    if (from == KVF_DTYPE_F32 && to == KVF_DTYPE_F16)
        convert_from_to(KVF_DTYPE_F32, KVF_DTYPE_F16, in, out, count, past);
    else if (from == KVF_DTYPE_F32)
        convert_from_to(KVF_DTYPE_F32, KVF_DTYPE_BF16, in, out, count, past);
    else if (from == KVF_DTYPE_F16 && to == KVF_DTYPE_F32)
        convert_from_to(KVF_DTYPE_F16, KVF_DTYPE_F32, in, out, count, past);
    else if (from == KVF_DTYPE_F16)
        convert_from_to(KVF_DTYPE_F16, KVF_DTYPE_BF16, in, out, count, past);
    else if (to == KVF_DTYPE_F32)
        convert_from_to(KVF_DTYPE_BF16, KVF_DTYPE_F32, in, out, count, past);
    else
        convert_from_to(KVF_DTYPE_BF16, KVF_DTYPE_F16, in, out, count, past);
}
