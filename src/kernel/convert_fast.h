/*
 * The converting loops, written once for all vector widths. A file that includes this one first defines AT_ONCE,
 * read_f32() and write_f32() for AT_ONCE elements, and end_streaming(); it gets convert_fast().
 */
#define LINE ((size_t)64)
#define STREAM_LEAST 256u   /* elements */
#define PAGE ((size_t)4096) /* processors foresee reads up to the end of a page */

ALWAYS size_t bytes_of(kvf_dtype type) {
    return type == KVF_DTYPE_F32 ? 4 : type == KVF_DTYPE_F16 || type == KVF_DTYPE_BF16 ? 2 : 1;
}

/* The types are constants. The rest at the end is converted together with elements before it that are done already, to
 * make AT_ONCE elements: their result is the same. */
ALWAYS void convert_from_to(kvf_dtype from, kvf_dtype to, const unsigned char *in, unsigned char *out,
                            size_t count, bool past) {
    const size_t in_bytes = bytes_of(from), out_bytes = bytes_of(to);
    size_t i = 0;
    if (count < AT_ONCE) {
        kvf_convert_plain.convert(from, to, in, out, count, false);
        return;
    }
    if (past && count >= STREAM_LEAST && (uintptr_t)out % out_bytes == 0) {
        const size_t head = (size_t)(-(uintptr_t)out % LINE) / out_bytes;
        for (size_t at = 0; at < head; at += AT_ONCE)
            write_f32(to, read_f32(from, in + at * in_bytes), out + at * out_bytes, false);
        for (i = head; i + AT_ONCE <= count; i += AT_ONCE)
            write_f32(to, read_f32(from, in + i * in_bytes), out + i * out_bytes, true);
        end_streaming();
    }
    for (; i + AT_ONCE <= count; i += AT_ONCE) {
        __builtin_prefetch(in + i * in_bytes + PAGE, 0, 2);
        write_f32(to, read_f32(from, in + i * in_bytes), out + i * out_bytes, false);
    }
    i = count - AT_ONCE;
    write_f32(to, read_f32(from, in + i * in_bytes), out + i * out_bytes, false);
}

ALWAYS void convert_from(kvf_dtype from, kvf_dtype to, const void *in, void *out, size_t count, bool past) {
    switch ((int)to) {
    case KVF_DTYPE_F32:
        convert_from_to(from, KVF_DTYPE_F32, in, out, count, past);
        break;
    case KVF_DTYPE_F16:
        convert_from_to(from, KVF_DTYPE_F16, in, out, count, past);
        break;
    case KVF_DTYPE_BF16:
        convert_from_to(from, KVF_DTYPE_BF16, in, out, count, past);
        break;
    case KVF_DTYPE_F8_E4M3:
        convert_from_to(from, KVF_DTYPE_F8_E4M3, in, out, count, past);
        break;
    default:
        convert_from_to(from, KVF_DTYPE_F8_E5M2, in, out, count, past);
    }
}

static void convert_fast(kvf_dtype from, kvf_dtype to, const void *in, void *out, size_t count, bool past) {
    switch ((int)from) {
    case KVF_DTYPE_F32:
        convert_from(KVF_DTYPE_F32, to, in, out, count, past);
        break;
    case KVF_DTYPE_F16:
        convert_from(KVF_DTYPE_F16, to, in, out, count, past);
        break;
    case KVF_DTYPE_BF16:
        convert_from(KVF_DTYPE_BF16, to, in, out, count, past);
        break;
    case KVF_DTYPE_F8_E4M3:
        convert_from(KVF_DTYPE_F8_E4M3, to, in, out, count, past);
        break;
    default:
        convert_from(KVF_DTYPE_F8_E5M2, to, in, out, count, past);
    }
}
