/* The C ABI of libtrtllm_shadowkv.so: what Python reaches through ctypes (trtllm_shadowkv/library.py).
 *
 * A function returns TSK_OK or another tsk_status and never lets a C++ exception out; tsk_last_error() has the words.
 * Every function may be called from any thread, also from several at once. None changes the caller's current device.
 */
#ifndef TRTLLM_SHADOWKV_C_API_H
#define TRTLLM_SHADOWKV_C_API_H

#include <stdint.h>

#ifdef __cplusplus
extern "C"
{
#endif

#define TSK_API __attribute__((visibility("default")))

typedef enum
{
    TSK_OK = 0,
    TSK_INVALID_ARGUMENT = 1, /* a null pointer or a number out of range; nothing was done */
    TSK_NO_DRIVER = 2,        /* no CUDA driver, or one too old for the runtime inside this library */
    TSK_NO_DEVICE = 3,        /* a driver, but no GPU that this process may use */
    TSK_CUDA_ERROR = 4,       /* a CUDA call failed; the message names the call and CUDA's own text */
    TSK_SYSTEM_ERROR = 5,     /* host memory, threads */
    TSK_WRONG_BYTES = 6       /* bytes that were copied are not those that were there: a hardware or kernel fault */
} tsk_status;

typedef struct
{
    char name[256];        /* "NVIDIA H200", ends with a zero */
    char pci_bus_id[32];   /* "0000:45:00.0", ends with a zero */
    int64_t memory_bytes;  /* all of the device's memory */
    int64_t l2_bytes;      /* L2 cache */
    int32_t compute_major; /* compute capability 9.0: 9 */
    int32_t compute_minor; /* and 0 */
    int32_t multiprocessors;
    int32_t driver_version;  /* CUDA version of the driver, 1000 * major + 10 * minor */
    int32_t runtime_version; /* of the CUDA runtime inside this library, likewise */
} tsk_device;

/* Version of the package that this library was built for, "0.1.0". Never null. */
TSK_API char const* tsk_version(void);

/* Why this thread's last call failed, in one line; empty where it succeeded. Valid until this thread's next call. */
TSK_API char const* tsk_last_error(void);

/* GPUs that this process may use, at least 1: none at all is TSK_NO_DRIVER or TSK_NO_DEVICE. */
TSK_API tsk_status tsk_device_count(int32_t* count);

/* What `device` (0 to count - 1) is. Creates no CUDA context. */
TSK_API tsk_status tsk_device_info(int32_t device, tsk_device* info);

/* Measures how fast `device` gathers chunks that lie at random in pinned host memory, in 10^9 bytes a second.
 *
 *   chunk_bytes      a multiple of 16 from 128 to 8192
 *   footprint_bytes  host memory over which the chunks are spread, 2^24 to 2^36; the caller sees to it that the host
 *                    has as much to spare. What limits small chunks is address translation on the link, so the result
 *                    depends on it
 *
 * Gathers up to 256 MiB of distinct chunks, seven times, gives the median, and compares every byte that arrived with
 * the host's. All memory it takes is given back before it returns, also when it fails. */
TSK_API tsk_status tsk_measure_link(
    int32_t device, int64_t chunk_bytes, int64_t footprint_bytes, double* gigabytes_per_second);

#ifdef __cplusplus
}
#endif

#endif
