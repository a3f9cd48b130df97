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
    TSK_WRONG_BYTES = 6,      /* bytes that were copied are not those that were there: a hardware or kernel fault */
    TSK_WRONG_STATE = 7,    /* the call does not fit what was called before, such as a slot in use; nothing was done */
    TSK_OUT_OF_CAPACITY = 8 /* the state has too few pages or sealed rows left for this row; nothing was taken */
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

/* --- streams ------------------------------------------------------------------------------------------------------ */

/* A cudaStream_t of `device` that does not wait for the null stream, and that nobody else has. */
TSK_API tsk_status tsk_stream_create(int32_t device, void** stream);

/* Waits for what it still runs. */
TSK_API tsk_status tsk_stream_destroy(void* stream);

/* --- pinned memory ------------------------------------------------------------------------------------------------ */

typedef struct tsk_pinned tsk_pinned;

/* Takes host memory that every GPU reads in place: zeros, aligned to 2 MiB, in huge pages where the system gives them.
 *
 *   device  whose context registers it
 *   bytes   1 to 2^40 */
TSK_API tsk_status tsk_pinned_create(int32_t device, int64_t bytes, tsk_pinned** pinned);

/* Where it begins: `device_address` for kernels, `host_address` for the CPU. */
TSK_API tsk_status tsk_pinned_address(tsk_pinned const* pinned, uint64_t* device_address, void** host_address);

/* Gives it back. Nothing on any stream may still use it. */
TSK_API tsk_status tsk_pinned_destroy(tsk_pinned* pinned);

/* --- a state: the keys and values of all sequences of one model on one GPU ------------------------------------------
 *
 * Rows are addressed by slot. A row is allocated; its prompt is read, a stretch a pass:
 *
 *   tsk_state_begin_context      host: the next stretch of a row's prompt
 *   tsk_landmark_topk, tsk_key_reconstruct, tsk_sparse_attention   for each layer, with the stretch's tokens as batch
 *
 * (for tests, the caller may fill it instead, tsk_state_describe says where, and load it); tsk_state_seal_prompt seals
 * it where tsk_row says must_seal; and then it grows by one token a step:
 *
 *   tsk_state_begin_generation   host: may these rows take a step? Also before each replay of a captured graph
 *   tsk_step_prologue            at the head of a step
 *   tsk_landmark_topk, tsk_key_reconstruct, tsk_sparse_attention   for each layer, in this order, with the same batch
 *
 * Calls on one state are serialised. `stream` is a cudaStream_t of the state's device, never the null stream. Calls
 * that take one only put work on it, unless they say that they wait, and a step's calls may be captured into a graph;
 * all calls must name the same stream, or be ordered by the caller. Where TSK_CUDA_ERROR comes out of a step, what it
 * captured or launched so far is of no use. Limits are in kernels/decode/view.h.
 */

typedef struct tsk_state tsk_state;

typedef struct
{
    int32_t device;  /* -1: a dry state, which keeps the books of its rows, has no memory and launches nothing */
    int32_t element; /* of queries, keys and values: 0 float16, 1 bfloat16 */
    int32_t landmark_format; /* 0 as element, 1 e4m3 */
    int32_t value_format;    /* of sealed chunks: 0 as element, 1 e4m3 */
    int32_t num_layers;      /* 1 to 1024 */
    int32_t num_heads;       /* 1 to 16 times num_kv_heads */
    int32_t num_kv_heads;    /* 1 to 32 */
    int32_t head_size;       /* 64, 96 or 128 */
    int32_t chunk_size;      /* tokens: 8 or 16 */
    int32_t rank;            /* a multiple of 16, at most 512 and num_kv_heads * head_size */
    int32_t top_k;           /* chunks, 1 to 2048 */
    int32_t outliers;        /* chunks, 1 to 1024 */
    int32_t window;          /* tokens, a multiple of chunk_size */
    int32_t cache_slots;     /* chunks of a KV head, top_k to 8192 */
    int32_t slots;           /* rows at a time, 1 to 65536 */
    int32_t sealed_rows;     /* those of them that may be sealed, 0 to slots */
    int32_t max_batch;       /* rows of a step, padding included, 1 to 1024 */
    int32_t live_pages;      /* pages of 128 tokens, 1 to 2^20 */
    int32_t sealed_pages;    /* pages of 512 tokens, 0 (with sealed_rows 0) to 2^20 */
    int32_t max_tokens;      /* of one row, 1 to 2^21 */
    int32_t row_groups;      /* parts in which a step's rows are scored and fetched, 1 to 8; 0: by the batch size */
    int32_t reserved;        /* 0 */
    int64_t dense_limit;     /* tokens up to which a row stays dense, at least window + chunk_size - 1; -1: infinite */
    float const* inverse_frequencies; /* host [head_size / 2]: radians a position; not needed after the call */
} tsk_state_config;

/* Checks the configuration and takes all memory of the state; nothing for sealed rows where no row can grow beyond
 * dense_limit. Waits until the memory is set up. */
TSK_API tsk_status tsk_state_create(tsk_state_config const* config, tsk_state** state);

/* Waits for the device and gives everything back; unbinds it first. */
TSK_API tsk_status tsk_state_destroy(tsk_state* state);

/* Plugins of a TensorRT engine that are enqueued on `stream` work on this state from now on, and until it is unbound or
 * destroyed. One state a stream, one stream a state; never one of CUDA's default streams. */
TSK_API tsk_status tsk_state_bind(tsk_state* state, void* stream);

/* Waits for plugins that are being enqueued; nothing to do where it is not bound. */
TSK_API tsk_status tsk_state_unbind(tsk_state* state);

/* kernels::View of kernels/decode/view.h, which says what the sizes mean and how the arrays are laid out. Addresses are
 * of device memory; 0 where there is no such array (also everywhere in a dry state). */
typedef struct
{
    int32_t element, landmark_format, value_format;
    int32_t layers, heads, kv_heads, group, head_size, chunk_size, chunk_shift, rank;
    int32_t top_k, outliers, window, cache_slots;
    int32_t slots, sealed_rows, max_batch, live_pages, sealed_pages, live_table_stride, sealed_table_stride;
    int32_t multiprocessors, logit_stride;
    float scale;
    int32_t ring; /* live pages that a sealed row keeps */
    uint64_t rows, live_table, sealed_table, value_region, counters, residuals, fault;
    uint64_t live;
    uint64_t factor_a, landmarks, landmark_scales, value_scales, excluded;
    uint64_t factor_b, centres, outlier_ids, outlier_keys, outlier_values, cache_keys, cache_values, cache_order;
    uint64_t rope_turns, rope_steps;
    uint64_t steps, logits, logit_sums, hit_counts, miss_counts, entries, partials;
    uint64_t device_bytes; /* of all arrays together; also of a dry state: what one with a device would take */
} tsk_buffers;

TSK_API tsk_status tsk_state_describe(tsk_state* state, tsk_buffers* buffers);

/* Gives `slot` to a row and reserves all pages that it will ever need.
 *
 *   prompt_tokens    1 to total_tokens
 *   total_tokens     up to which it may grow, at most max_tokens
 *   top_k            chunks to select, 1 to the state's
 *   dense            1: exact attention whatever its length
 *   value_addresses  host [num_layers]: device address of each layer's values, a multiple of 16, room for
 *                    num_kv_heads * value_stride chunks; host memory must be pinned. Null where the row is never
 *                    sealed, which is where it is dense or total_tokens <= dense_limit
 *   value_stride     chunks from a KV head's values to the next one's: at least max(0, total_tokens + 1 - window) /
 *                    chunk_size, because a chunk is sealed one step before it leaves the window */
TSK_API tsk_status tsk_state_allocate(tsk_state* state, int32_t slot, int32_t prompt_tokens, int32_t total_tokens,
    int32_t top_k, int32_t dense, uint64_t const* value_addresses, int32_t value_stride, void* stream);

/* Declares the row's first `length` tokens to be in place: token p in entry p / 128 of its live pages, and, where it
 * must be sealed at this length (length + 1 > dense_limit), also its sealed state: everything of the first
 * (length + 1 - window) / chunk_size chunks, and min(outliers, chunks) outlier ids, keys and values. Its live pages are
 * then cut down to those of the window. Once, and again as long as the row is not sealed.
 *
 *   length  1 to what the row may hold unsealed: its prompt or, where that is more, dense_limit; total_tokens where it
 *           is never sealed */
TSK_API tsk_status tsk_state_load_row(tsk_state* state, int32_t slot, int32_t length, void* stream);

/* Takes back everything a slot holds; nothing to do where it holds nothing. No step with it may still be running. */
TSK_API tsk_status tsk_state_release(tsk_state* state, int32_t slot);

typedef struct
{
    int32_t length;        /* tokens, after the last tsk_state_begin_generation */
    int32_t prompt_tokens; /* as allocated, as are the next three */
    int32_t total_tokens;
    int32_t top_k;
    int32_t dense;
    int32_t loaded;
    int32_t sealed;
    int32_t must_seal;     /* one more token is over its dense limit: it takes no step before it is loaded as sealed */
    int32_t published;     /* sealed chunks that may be selected */
    int32_t prompt_chunks; /* those of them that were sealed when it was loaded */
    int32_t live_pages;    /* pages it holds */
    int32_t sealed_pages;
    int32_t sealed_row;   /* -1: it is never sealed */
    int32_t value_stride; /* 0 where it is never sealed */
} tsk_row;

/* The books on a slot's row. */
TSK_API tsk_status tsk_state_row(tsk_state* state, int32_t slot, tsk_row* row);

/* Page ids in the order of the row's table: kind 0 live, 1 sealed. Writes the first min(count, capacity) of them to
 * `ids` (null where capacity is 0), and how many there are to `count`. */
TSK_API tsk_status tsk_state_pages(
    tsk_state* state, int32_t slot, int32_t kind, int32_t* ids, int32_t capacity, int32_t* count);

/* Sums over layers and KV heads since the row was allocated. */
typedef struct
{
    int64_t hits, misses;     /* selected chunks that were, or were not, in the chunk cache */
    int64_t bytes_fetched;    /* of values, from where the caller keeps them into the chunk cache */
    int64_t sealed_tokens;    /* in published chunks */
    int64_t generated_sealed; /* those of them that were sealed one chunk at a time */
    double residual_lost;     /* ||K - A B||^2 and ||K||^2 of chunks sealed one at a time */
    double residual_total;
} tsk_statistics;

/* Waits for the stream. */
TSK_API tsk_status tsk_state_statistics(tsk_state* state, int32_t slot, tsk_statistics* statistics, void* stream);

/* Reads and clears kernels::Fault bits: kernels found wrong positions (1) or slots (2), or keys to seal that are not
 * finite (4). Waits for the stream. */
TSK_API tsk_status tsk_state_fault(tsk_state* state, uint32_t* fault, void* stream);

/* For tests: fills pools, unless a slot is in use, and what is rewritten in each layer of a step with bytes 0xff. Waits
 * until that is done; no step may be running. */
TSK_API tsk_status tsk_state_poison(tsk_state* state);

/* --- a prompt ----------------------------------------------------------------------------------------------------- */

/* Announces tokens [start, start + length) of the row's prompt: start is its length so far. The pass's ops then take
 * qkv, positions, q and out of `length` tokens; `selection`, which may be null, is set to -1. The row's prompt is done
 * with its last token. Where a pass fails, the row is of no use and is to be released. */
TSK_API tsk_status tsk_state_begin_context(tsk_state* state, int32_t slot, int32_t start, int32_t length, void* stream);

/* Seals a row of which tsk_row says must_seal: factors, landmarks, outlier chunks, values; its live pages but those of
 * the window are free for other rows, whose work on the same stream comes later. A row whose sealing fails is released. Keys that are not finite set fault
 * bit 4, and the row is of no use. Not to be captured. */
TSK_API tsk_status tsk_state_seal_prompt(tsk_state* state, int32_t slot, void* stream);

/* --- a step ------------------------------------------------------------------------------------------------------- */

/* Announces one token for each row of `slots` (host [batch], -1: a padding row): they must be allocated, distinct,
 * loaded, of fewer than total_tokens tokens, and need no sealing first. Advances the books of all, or of none.
 * positions: host [batch], the position of each row's token, 0 of a padding row; may be null. */
TSK_API tsk_status tsk_state_begin_generation(
    tsk_state* state, int32_t const* slots, int32_t batch, int32_t* positions);

/* slots: device [batch] int32, the same as announced. */
TSK_API tsk_status tsk_step_prologue(tsk_state* state, int32_t const* slots, int32_t batch, void* stream);

/* RoPE, append, seal; scores, selection and the start of the fetch, row group by row group.
 *
 *   qkv        device [batch, (Hq + 2 Hkv) D], Q then K then V, pre-RoPE
 *   positions  device [batch] int32: the row's length - 1, 0 for a padding row
 *   q          device [batch, Hq D], post-RoPE
 *   selection  device [batch, Hkv, top_k] int32: ascending chunk ids, padded with -1. May be null where no row of this
 *              state can be sealed
 *
 * Device addresses of 16-bit elements are multiples of 16, those of int32 multiples of 4. */
TSK_API tsk_status tsk_landmark_topk(tsk_state* state, int32_t layer, void const* qkv, int32_t const* positions,
    int32_t batch, void* q, int32_t* selection, void* stream);

/* Keys of the selected chunks that are not in the chunk cache. */
TSK_API tsk_status tsk_key_reconstruct(tsk_state* state, int32_t layer, int32_t batch, void* stream);

/* Attention; `q` as tsk_landmark_topk wrote it, `out` device [batch, Hq D]. */
TSK_API tsk_status tsk_sparse_attention(
    tsk_state* state, int32_t layer, void const* q, int32_t batch, void* out, void* stream);

typedef enum
{
    TSK_STAGE_APPEND = 0, /* appendTokens, and so on, of kernels/decode/decode.h */
    TSK_STAGE_SEAL = 1,
    TSK_STAGE_SCORE = 2,
    TSK_STAGE_SELECT = 3,
    TSK_STAGE_FETCH = 4,
    TSK_STAGE_REBUILD = 5,
    TSK_STAGE_ATTEND_RESIDENT = 6,
    TSK_STAGE_ATTEND_FETCHED = 7,
    TSK_STAGE_MERGE = 8
} tsk_stage;

/* For tests and benches: one kernel by itself, on `stream` alone, for batch rows [begin, end) of a step (append and
 * seal take the whole batch). Arguments that the stage has no use for are not looked at. */
TSK_API tsk_status tsk_state_stage(tsk_state* state, int32_t stage, int32_t layer, int32_t begin, int32_t end,
    int32_t batch, void const* qkv, int32_t const* positions, void* q, int32_t* selection, void* out, void* stream);

#ifdef __cplusplus
}
#endif

#endif
