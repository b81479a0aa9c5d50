/*
 * The C control interface of libgpupool.so. Generated from src/shim/control; do not edit.
 *
 * Programs need not link the library. Where it is preloaded, look a function up with dlsym(RTLD_DEFAULT, "gpupool_trim")
 * and call it when it is there. Where it is not, gpupool_malloc and its kin serve a program that opened the library with
 * dlopen; it stays loaded until the process ends. Any thread may call any function at any time, also in a forked child.
 * Examples: include/examples.
 */

#ifndef GPUPOOL_H
#define GPUPOOL_H

#include <stddef.h>
#include <stdint.h>

// What part gpupool plays in this process.
typedef enum {
  // No function of the CUDA driver was called yet, so nothing was decided. (A state; the setting of this name says when freed memory goes home.)
  GPUPOOL_IDLE = 0,
  // It takes part; `gpupool_mode` says how.
  GPUPOOL_ACTIVE = 1,
  // It failed inside: memory handed out stays valid, new memory comes from the driver.
  GPUPOOL_CLOSED = 2,
  // Memory of GPUs is the driver's: switched off, a setting that cannot be used, here or on any machine, no pool on this machine, or the child of a
  // fork; `gpupool_why` says which. What only the first allocation finds out is `GPUPOOL_ACTIVE` before it, and contexts are watched all the same.
  GPUPOOL_PASSING = 3,
} gpupool_state;

// Why a call did nothing. Functions that return `int` return 0 for success, one of these, or a `CUresult` (above 0)
// where the driver was asked and refused.
typedef enum {
  // gpupool has no part in this process, or no pool yet: `gpupool_get_state` and `gpupool_why` tell.
  GPUPOOL_NOT_ACTIVE = -1,
  // A pointer to something of the caller's is NULL, a size is 0, or a number is none of those that the function knows or no place of this pool. NULL as an address of
  // memory is one that lies in no block.
  GPUPOOL_INVALID_ARGUMENT = -2,
  // The address lies in no live block of the pool's.
  GPUPOOL_NOT_POOLED = -3,
  // This kind of memory cannot do that.
  GPUPOOL_NOT_SUPPORTED = -4,
  // gpupool failed; the log says where.
  GPUPOOL_INTERNAL = -5,
  // Some of the memory stayed where it was: `gpupool_pieces` tells where it lies, and what must stay.
  GPUPOOL_STAYED = -6,
  // A label would have more on its GPU than `gpupool_label_budget` allows.
  GPUPOOL_OVER_BUDGET = -7,
  // What `gpupool run --restore` was to bring back by this name did not come back; the log says why.
  GPUPOOL_NOT_RESTORED = -8,
} gpupool_error;

// What can be said of memory; the numbers of `CUmem_advise`. What each means for memory of the pool: see `gpupool_advise`.
typedef enum {
  // Mostly read: every processor that reads gets a copy. The place means nothing.
  GPUPOOL_READ_MOSTLY = 1,
  // Takes `GPUPOOL_READ_MOSTLY` back.
  GPUPOOL_NOT_READ_MOSTLY = 2,
  // Keep it at the place, and let others that can reach it there.
  GPUPOOL_PREFERRED_LOCATION = 3,
  // Takes `GPUPOOL_PREFERRED_LOCATION` back. The place means nothing.
  GPUPOOL_NO_PREFERRED_LOCATION = 4,
  // Map it for the processor at the place, wherever it is.
  GPUPOOL_ACCESSED_BY = 5,
  // Takes `GPUPOOL_ACCESSED_BY` back.
  GPUPOOL_NOT_ACCESSED_BY = 6,
} gpupool_advice;

// A part of a block that lies at one place.
typedef struct {
  // Its first byte.
  uint64_t address;
  // Its size.
  uint64_t bytes;
  // Where it is: a GPU's CUDA ordinal, or -1 less the number of a host NUMA node; `INT_MIN` on a disk, while the program is
  // suspended to one.
  int place;
  // Why it must stay on the physical memory it is on, 0 where it may move: 1 shared with other processes by CUDA IPC, 2
  // its physical handle was retained, 4 a descriptor of it was given out, 8 `gpupool_anchor` or
  // `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`; added up.
  unsigned int anchors;
} gpupool_piece;

// What has a label, in bytes that were asked for.
typedef struct {
  // The label, ended by NUL.
  char label[64];
  // Live blocks that have it.
  uint64_t blocks;
  // Their bytes: the sum of the next three.
  uint64_t bytes;
  // What of it lies on the GPU that was current when each block was allocated.
  uint64_t at_home;
  // On other GPUs.
  uint64_t on_peers;
  // On the host.
  uint64_t on_host;
  // The most that may be `at_home`; `UINT64_MAX` without a budget.
  uint64_t budget;
} gpupool_label_usage;

// The pool of this process in numbers. Fields are only ever added at the end.
typedef struct {
  // Set to `sizeof(gpupool_statistics)` by the caller; what is written back is how much of it this library filled.
  size_t size;
  // Blocks that the program holds.
  uint64_t live_blocks;
  // Bytes it asked for in them.
  uint64_t live_bytes;
  // The most that `live_bytes` ever was. It may be somewhat more where there were blocks under `GPUPOOL_MIN_SIZE`: threads take and free these
  // without meeting, so that the most that each of them had, and the most that there was of larger blocks, are added up.
  uint64_t peak_live_bytes;
  // Bytes of physical memory that the pool holds on the GPUs: live blocks, and freed ones that it keeps.
  uint64_t held_on_gpus;
  // Bytes held on the host.
  uint64_t held_on_host;
  // Blocks served so far.
  uint64_t allocations;
  // Blocks so far that took no new memory of the driver's: they were served from freed memory, or from what was left of memory that was taken
  // for another block, as all but the first of many small ones.
  uint64_t reuses;
  // Bytes of blocks, and of handles of `cuMemCreate`, that were not on the GPU that asked when they were made, over the life of the process: a block counts
  // each time that it is made, also where freed memory serves it. What moved since is not in it; `gpupool_labels` and `gpupool_pieces` tell where memory lies.
  uint64_t spilled_bytes;
  // Bytes that went back to the driver so far.
  uint64_t trimmed_bytes;
} gpupool_statistics;

// One place's memory, in bytes.
typedef struct {
  // A GPU's CUDA ordinal, or -1 less the number of a host NUMA node (-1 is node 0).
  int place;
  // Live blocks stand on this much of `held`.
  uint64_t used;
  // Physical memory that the pool holds there.
  uint64_t held;
  // The most that `used` ever was.
  uint64_t peak_used;
  // The most that the pool may hold there.
  uint64_t limit;
} gpupool_place;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// This library's version, a string that is never freed.
const char *gpupool_version(void);

// The names of all hooked driver functions, separated by NUL and ended by two.
const char *gpupool_hook_names(void);

// Returns all freed memory that the pools of device and of pinned memory keep to the driver, and says how many bytes that
// was. Of device memory that was freed without waiting it returns what the GPU of the current context is done with, which is
// waited for, or what another GPU is known to be done with.
uint64_t gpupool_trim(void);

// Allocates `bytes` on GPU `device` (-1: that of the current context; a lower number is none), from the pool or the driver as
// `cuMemAlloc` would with the library preloaded. Without a context of that GPU its primary one is made, as the runtime's
// `cudaMalloc` does.
// `stream` is the one that uses the memory first (NULL: the legacy stream): it is asked whether it is being captured.
//
// Works without `LD_PRELOAD`, in a program that opened the library. Returns 0, a `CUresult`, or a `gpupool_error`: 0 bytes are
// `GPUPOOL_INVALID_ARGUMENT`, and a GPU that the program does not see is the driver's 101 (`CUDA_ERROR_INVALID_DEVICE`).
//
// # Safety
// `pointer` points to a pointer, or is NULL; `stream` is a stream of that GPU's context.
int gpupool_malloc(void **pointer,
                   size_t bytes,
                   int device,
                   void *stream);

// Frees what `gpupool_malloc` or `cuMemAlloc` gave, as `cuMemFree` would with the library preloaded: waits for the
// device unless `GPUPOOL_FREE` is `lazy`, also while `stream` is being captured. NULL is nothing.
//
// Without `LD_PRELOAD`, what is waited for are the current context and the primary contexts; other contexts of the
// program's must be done with the memory. Returns 0, a `CUresult`, or a `gpupool_error`.
//
// # Safety
// Nothing uses the memory after this call; `stream` is a stream of that GPU's context.
int gpupool_free(void *pointer,
                 int device,
                 void *stream);

// `gpupool_malloc` in the shape of `torch.cuda.memory.CUDAPluggableAllocator`, which has no way to report a failure:
// NULL, and an error in the log.
//
// # Safety
// As `gpupool_malloc`.
void *gpupool_torch_malloc(ptrdiff_t size,
                           int device,
                           void *stream);

// `gpupool_free` in the shape of `torch.cuda.memory.CUDAPluggableAllocator`.
//
// # Safety
// As `gpupool_free`.
void gpupool_torch_free(void *ptr, ptrdiff_t size, int device, void *stream);

// Writes where the parts of `bytes` from `pointer` on lie, in address order, as far as the block that `pointer` lies in
// goes; of managed memory, where it was placed. `count` holds the room of `pieces` before the call, and how many there are
// after it. Returns 0 or a `gpupool_error`; memory that the driver serves is `GPUPOOL_NOT_POOLED`.
//
// # Safety
// `count` points to a number or is NULL, and `pieces` has room for that many.
int gpupool_pieces(const void *pointer,
                   size_t bytes,
                   gpupool_piece *pieces,
                   size_t *count);

// Keeps `bytes` from `pointer` on, which must lie in one block, on the physical memory that they are on, until
// `gpupool_release_anchor` or the end of the block: for memory that something outside CUDA knows by its physical pages, as a network
// adapter does. `gpupool_prefetch` leaves it where it is. Returns 0 or a `gpupool_error`.
//
// # Safety
// None: any address may be asked about.
int gpupool_anchor(const void *pointer,
                   size_t bytes);

// Takes back one `gpupool_anchor` of exactly this range. Returns 0 or a `gpupool_error`, of a range that has no such anchor `GPUPOOL_NOT_POOLED`.
//
// # Safety
// None: any address may be asked about.
int gpupool_release_anchor(const void *pointer,
                           size_t bytes);

// Gives advice (a `gpupool_advice`) on `bytes` from `pointer` on.
//
// Of memory of the pool, `GPUPOOL_PREFERRED_LOCATION` moves the range to the place and has it stay there, for as long as `gpupool_prefetch` does.
// `GPUPOOL_NO_PREFERRED_LOCATION` moves nothing; from then on `GPUPOOL_MOVE` may. `GPUPOOL_ACCESSED_BY` answers 0
// where the GPU can reach the memory, which it may use as soon as it has a context, and `GPUPOOL_NOT_SUPPORTED` where it cannot, and for the host;
// `GPUPOOL_NOT_ACCESSED_BY` changes nothing and answers 0. A GPU that the program does not see is `GPUPOOL_INVALID_ARGUMENT` for both. There is one copy of memory of the pool, so that
// `GPUPOOL_READ_MOSTLY` and `GPUPOOL_NOT_READ_MOSTLY` are `GPUPOOL_NOT_SUPPORTED`.
//
// Memory that the program made by `cuMemCreate` goes to a `GPUPOOL_PREFERRED_LOCATION`, too; other advice on it is the driver's to
// answer. On managed memory, gpupool's or the program's own, it is `cuMemAdvise` with a place; so it is on plain memory of the process where
// the driver places that, too (`CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS`). All else is `GPUPOOL_NOT_POOLED`: other memory that the driver
// serves, freed memory, an address where there is no memory, NULL, and a range that goes on past the end of the block of the pool that it begins in.
// Returns 0, a `CUresult` or a `gpupool_error`.
//
// # Safety
// What is said of memory of the pool at `gpupool_prefetch`, where it moves; any address may be asked about.
int gpupool_advise(const void *pointer,
                   size_t bytes,
                   int advice,
                   int place);

// Moves `bytes` from `pointer` on, which must lie in one block, to a place.
//
// Memory of the pool lies there when the call returns; its addresses and contents stay. `GPUPOOL_MOVE=auto` moves other memory by itself and leaves this
// where it is. It leaves that place where the program says something else, for a drain, a suspension, a lower limit or a GPU that lends no more
// (`gpupool set`), and where another program needs the GPU. What moves are the pages of 2 MiB that lie wholly in the range, the last one of a block included where the range has the block's last byte. The call waits for all
// work that was submitted before, on every GPU. Nothing may use the chunks (`gpupool_pieces`) that the range touches from the call to its
// return, and nobody may free their block; all other memory may be in use, also by kernels that run meanwhile. Room for both copies is
// needed while they are made. A chunk that the range covers in part is divided: the rest of it stays at its place and needs room
// there once more. What stays elsewhere is told by `GPUPOOL_STAYED`: memory that must keep its physical pages, chunks that
// another block stands on, too, and a range without a whole page; the other chunks moved. What lies at the place already is 0, whatever it is. Freed memory on a chunk that moves goes
// with what the chunk vacates: back to the driver, or to the next move, and is freed memory of the pool until then. Where a place has
// no room the answer is 2 (`CUDA_ERROR_OUT_OF_MEMORY`), and while any stream is being captured 900
// (`CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`); then nothing has moved. A place that the block's GPU cannot reach or may not borrow from is
// `GPUPOOL_NOT_SUPPORTED`, and one that the settings have left out of the pool (`GPUPOOL_DEVICES`, `GPUPOOL_HOST_LIMIT=0`) `GPUPOOL_INVALID_ARGUMENT`.
//
// Memory that the program made by `cuMemCreate` moves in the same way, a whole handle at a time wherever it is mapped: the handles of
// which a mapping lies wholly in the range. Nothing may use them meanwhile, at any of their addresses. Numbers, addresses, contents and
// what the driver says of them stay the program's. Handles that another process made, of which one was given a descriptor, that
// are mapped in part or that only one place can have are `GPUPOOL_STAYED`, and so is a range with no more than a part of a mapping; what this process made and lies
// at the place already is 0.
//
// Managed memory, gpupool's or the program's own, moves in the order of the stream: `cuMemPrefetchAsync`; plain memory of the process, too, where
// the driver places that. Other memory that the driver serves, as small blocks for which the pool had no room, stays where it is:
// `GPUPOOL_NOT_POOLED`, which is the answer, too, for freed memory, an address where there is no memory, NULL, and a range that goes on past the end of the
// block of the pool that it begins in.
// Returns 0, a `CUresult` or a `gpupool_error`.
//
// # Safety
// `stream` is a stream of the current context, or NULL; what is said above of the memory of the pool holds.
int gpupool_prefetch(const void *pointer,
                     size_t bytes,
                     int place,
                     void *stream);

// Gives the block of the pool that `pointer` lies in a label, in place of any it had; NULL takes it back. It ends with the block. It
// is told in the log's events of that block, by `gpupool report` and by `gpupool_labels`.
//
// A label of which more would lie on its GPU than `gpupool_label_budget` allows has this block moved to the next place with room, as by
// `gpupool_prefetch`, with what is said there of its use meanwhile. Where it cannot move, the block has the label all the same, and
// the answer is `GPUPOOL_OVER_BUDGET`. Returns 0, a `CUresult` or a `gpupool_error`; a label has 1 to 63 bytes of UTF-8.
//
// # Safety
// `label` ends with NUL, or is NULL.
int gpupool_label(const void *pointer,
                  const char *label);

// Says how many bytes of the blocks with a label may lie on the GPU that was current when they were allocated; `UINT64_MAX` takes
// that back. It is enforced at two moments: when a block gets the label (`gpupool_label`), and when one is moved home, where `gpupool_prefetch` answers
// `GPUPOOL_OVER_BUDGET` and moves nothing. What lies there at the moment of this call stays. Returns 0 or a `gpupool_error`.
//
// # Safety
// `label` ends with NUL, or is NULL.
int gpupool_label_budget(const char *label,
                         uint64_t bytes);

// From now on, blocks of the pool that the calling thread allocates have a label when the call that allocates them returns, as by
// `gpupool_label`; NULL or an empty one ends that. What is more than its budget goes elsewhere at once. `outer`, where it is not NULL, is
// given the label that was set until now, or an empty one: to put it back at the end of a scope, pass it as `label`.
//
// This may be called before CUDA is used. It costs no lock and reaches no driver. What a framework serves from a cache of its own is
// not allocated here. Returns 0, `GPUPOOL_INVALID_ARGUMENT`, or `GPUPOOL_NOT_ACTIVE` where everything goes to the driver; `outer` is empty
// then. A label that is refused changes nothing, and `outer` is the one that stays.
//
// # Safety
// `label` ends with NUL, or is NULL; `outer` has room for 64 bytes, or is NULL. They may be the same.
int gpupool_label_scope(const char *label,
                        char *outer);

// From now on, blocks of the pool that the calling thread allocates are placed elsewhere than on the GPU whose context is current (`far`
// other than 0), or as always (0): on the other GPUs, the fastest link first, and then on the host. They stay there, whatever
// `GPUPOOL_MOVE` says, as after `gpupool_prefetch`, and `GPUPOOL_FAR_LIMIT` refuses none of them. Where there is no room elsewhere, a block lies where it would have without this call.
//
// Requests under `GPUPOOL_MIN_SIZE`, the driver's own memory (`cudaMallocAsync`, managed memory) and what the program makes by
// `cuMemCreate` are placed as always. Returns what was set until now, 0 or 1, or `GPUPOOL_NOT_ACTIVE` where everything goes to the driver.
int gpupool_far_scope(int far);

// Writes up to `capacity` labels to `labels`, in the order in which they were first used, and returns how many there are.
//
// # Safety
// `labels` has room for `capacity` elements, or `capacity` is 0.
size_t gpupool_labels(gpupool_label_usage *labels,
                      size_t capacity);

// Names `bytes` of the pool's memory from `pointer` on, which lie in one block; 0 are all that is left of the block from there. An image of the program's memory
// (`gpupool checkpoint`) has the name, and a program that is started with that image (`gpupool run --restore`) gets the bytes back in this
// call: the first time that it names memory so, of the same size, they are there, compared with their hashes, when this returns. All work of
// the block's context is waited for.
//
// A name means one range at a time, and ends with the block. NULL takes back the names of what begins at `pointer`, if it has any.
// Returns 0, `GPUPOOL_NOT_POOLED`, a `CUresult`, or `GPUPOOL_NOT_RESTORED` where there is an image to restore from and these bytes did not come back:
// the memory has its name then, and the log says why. A name has 1 to 255 bytes of UTF-8.
//
// # Safety
// `name` ends with NUL, or is NULL. Nothing else uses the memory during this call.
int gpupool_name(const void *pointer,
                 size_t bytes,
                 const char *name);

// Says that the program has built what it is about to load: under `gpupool run --restore DIR --restore-by-order` all blocks of the newest image in DIR are in the
// program's memory when this returns, in the order in which they were allocated, and `*bytes` says how much that was; else 0. Nothing is written where the blocks
// differ from those of the image in number, size, order, GPU or place of the call; the log says at which block. All contexts are waited for.
//
// Returns 0, a `CUresult`, or `GPUPOOL_NOT_RESTORED`. Memory that the driver or `cuMemCreate` gave is not part of it. `bytes` may be NULL.
//
// # Safety
// `bytes` is NULL or may be written. Nothing else uses or frees the program's memory during this call.
int gpupool_restore(size_t *bytes);

// See `gpupool_state`.
gpupool_state gpupool_get_state(void);

// How allocations are served now: a value of `GPUPOOL_MODE`, which differs from the setting where this machine cannot do
// that one, and is `off` where every allocation goes to the driver. A string that is never freed.
const char *gpupool_mode(void);

// Why allocations go to the driver, a sentence; empty where they do not. A string that is never freed.
const char *gpupool_why(void);

// The file that this process writes its log to (`GPUPOOL_LOG_FILE`); empty before CUDA was used and where there is none. Every line
// is in the file when the call that it tells of returns. A string that is never freed.
const char *gpupool_log_file(void);

// Fills `statistics`, of which the caller has set `size`: with zeros while there is no pool, also where the answer is that
// gpupool takes no part (`GPUPOOL_NOT_ACTIVE`). Returns 0 or a `gpupool_error`.
//
// # Safety
// `statistics` points to `statistics->size` bytes, or is NULL.
int gpupool_get_statistics(gpupool_statistics *statistics);

// Writes up to `capacity` places to `places` and returns how many the pool has (0 while it is not open). A disk that memory of a suspended
// program is on is none of them.
//
// # Safety
// `places` has room for `capacity` elements, or `capacity` is 0.
size_t gpupool_places(gpupool_place *places,
                      size_t capacity);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GPUPOOL_H */
