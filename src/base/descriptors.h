/*
 * Checks that enough file descriptors are left, for libraries that abort without them.
 */
#ifndef KVF_BASE_DESCRIPTORS_H
#define KVF_BASE_DESCRIPTORS_H

#include "base/base.h"

/**
 * Checks whether this process can open `needed` file descriptors now, by opening and closing them.
 *
 * @param who     the library that needs them, for the message
 * @param needed  at most 256
 * @return KVF_OK or KVF_E_IO
 */
kvf_status kvf_descriptors_check(const char *who, uint32_t needed);

#endif
