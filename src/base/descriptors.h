/*
 * Whether there are file descriptors left for libraries that abort when there are none.
 */
#ifndef KVF_BASE_DESCRIPTORS_H
#define KVF_BASE_DESCRIPTORS_H

#include "base/base.h"

/**
 * Whether this process can open so many file descriptors now: it opens and closes them.
 *
 * @param who     who needs them, for the message
 * @param needed  at most 256
 * @return KVF_OK or KVF_E_IO
 */
kvf_status kvf_descriptors_check(const char *who, uint32_t needed);

#endif
