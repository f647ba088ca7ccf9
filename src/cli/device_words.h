/*
 * Descriptions of devices, for people and for programs.
 */
#ifndef KVFERRY_CLI_DEVICE_WORDS_H
#define KVFERRY_CLI_DEVICE_WORDS_H

#include <json-c/json.h>
#include <kvferry/device.h>

/** Writes what a device is and runs: "NVIDIA H100, compute capability 9.0, 132 SMs, 79.6 GiB, code for sm_90". */
void device_describe(const kvf_device_info *device, char *out, size_t bytes);

/** Writes the CUDA of a driver: "12.8". */
void device_version(const kvf_device_info *device, char *out, size_t bytes);

/** A device as an object: number, name, compute_capability, multiprocessors, memory_bytes, driver, code, why_not. */
struct json_object *json_device(uint32_t number, const kvf_device_info *device);

#endif
