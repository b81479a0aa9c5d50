/*
 * The C control interface of libgpupool.so. Generated from src/shim/control.rs; do not edit.
 *
 * Programs need not link the library: look a function up with dlsym(RTLD_DEFAULT, "gpupool_trim") and call it when it
 * is there. Any thread may call any function at any time.
 */

#ifndef GPUPOOL_H
#define GPUPOOL_H

#include <stddef.h>
#include <stdint.h>

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

// Returns all freed memory that the pool keeps to the driver, and says how many bytes that was. Does nothing while a
// stream is being captured.
uint64_t gpupool_trim(void);

// Writes up to `capacity` places to `places` and returns how many the pool has (0 while it is not open).
//
// # Safety
// `places` has room for `capacity` elements, or `capacity` is 0.
size_t gpupool_places(gpupool_place *places,
                      size_t capacity);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GPUPOOL_H */
