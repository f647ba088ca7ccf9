/*
 * Cases of postprocess.json on a CUDA device: with KVF_VECTORS_DEVICE in the environment, regions are copied to device 0
 * before a call, and back after it. tests/fakes/fake_cuda.c is a stand-in for the driver.
 */
#ifndef ON_DEVICE_H
#define ON_DEVICE_H

#include <kvferry/connector/postprocess.h>

/** Copies a region to the device, where it lies from now on. Does nothing unless it is asked for. */
void region_to_device(kvf_block_region *region);

/** Copies it back to `memory`, where it was, and frees it on the device. */
void region_from_device(kvf_block_region *region, void *memory);

/** How many regions came back from the device. */
unsigned regions_on_device(void);

#endif
