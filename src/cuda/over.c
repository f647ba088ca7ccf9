#include "cuda/over.h"

/* After these nothing of this process runs on the device. From 700 to 719 they are those of which kvf_cuda_status()
 * says so. */
static bool ends_context(CUresult result) {
    enum { DEINITIALIZED = 4, ECC_UNCORRECTABLE = 214, NVLINK_UNCORRECTABLE = 220, CONTAINED = 226 };
    switch (result) {
    case DEINITIALIZED:
    case ECC_UNCORRECTABLE:
    case NVLINK_UNCORRECTABLE:
    case CONTAINED:
        return true;
    case 704:
    case 705: /* access of peers, enabled already or not yet */
    case 708: /* the context is in use already */
    case 712:
    case 713: /* memory of the host, registered already or not yet */
        return false;
    default:
        return result >= 700 && result <= 719;
    }
}

kvf_status kvf_cuda_over(uint32_t device, CUevent event, const char *doing) {
    const kvf_cuda *cuda;
    const bool entered = kvf_cuda_enter(device, &cuda) == KVF_OK;
    if (!entered && kvf_cuda_find(&cuda))
        return KVF_IN_PROGRESS; /* a child of fork() */
    const CUresult result =
        cuda->cuEventQuery(event); /* without the context it still tells if that has ended */
    if (entered)
        kvf_cuda_leave(cuda);
    return result == 0 || ends_context(result) ? kvf_cuda_status(cuda, result, doing) : KVF_IN_PROGRESS;
}
