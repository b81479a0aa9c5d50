/*
 * What cuMemCreate, cuMemMap and cuMemSetAccess cost, by the size of the chunks, by where the memory lies and by who gets
 * access, beside cuMemAlloc. No shim. The first round finds the memory as the machine left it, the later ones as this program did.
 *
 *   mapping MIB CHUNK_MIB [GPU [both|late]]   a chunk of 0 is cuMemAlloc; "both": access for GPU 0 and 1 in one call, "late":
 *                                             for GPU 1 by a second call
 */
#include "paired.h"

#include <string.h>

typedef struct {
    int kind, id, flags;
} Access;
typedef struct {
    int kind, handles, location, device;
    void *win32;
    unsigned char more[8];
} Properties;

enum { ROUNDS = 5, DEVICE = 1, READ_WRITE = 3 };

#define CALL(name, ...) require(((int (*)())bare(#name))(__VA_ARGS__), #name)

int main(int argc, char **argv) {
    size_t bytes = (size_t)(argc > 1 ? atoll(argv[1]) : 512) << 20, chunk = (size_t)(argc > 2 ? atoll(argv[2]) : 512) << 20;
    int gpu = argc > 3 ? atoi(argv[3]) : 0;
    const char *who = argc > 4 ? argv[4] : "one";
    Properties properties = {.kind = 1, .location = DEVICE, .device = gpu};
    Access access[2] = {{DEVICE, 0, READ_WRITE}, {DEVICE, 1, READ_WRITE}};
    unsigned long long base = 0, *handles = calloc(chunk ? bytes / chunk + 1 : 1, sizeof *handles);
    void *context;
    open_driver();
    CALL(cuInit, 0);
    CALL(cuDevicePrimaryCtxRetain, &context, 0);
    CALL(cuCtxSetCurrent, context);
    if (chunk) CALL(cuMemAddressReserve, &base, bytes, (size_t)0, 0ull, 0ull);
    printf("%6zu MiB in chunks of %4zu on GPU %d for %s, ms up/down:", bytes >> 20, chunk >> 20, gpu, who);
    for (int round = 0; round < ROUNDS; round++) {
        double start = seconds(), late = 0;
        size_t count = 0;
        if (!chunk) CALL(cuMemAlloc_v2, &base, bytes);
        for (size_t at = 0; chunk && at < bytes; at += chunk, count++) {
            size_t size = bytes - at < chunk ? bytes - at : chunk;
            CALL(cuMemCreate, &handles[count], size, &properties, 0ull);
            CALL(cuMemMap, base + at, size, (size_t)0, handles[count], 0ull);
        }
        if (chunk) CALL(cuMemSetAccess, base, bytes, access, strcmp(who, "both") == 0 ? (size_t)2 : (size_t)1);
        double up = seconds();
        if (chunk && strcmp(who, "late") == 0) {
            CALL(cuMemSetAccess, base, bytes, access + 1, (size_t)1);
            late = seconds() - up;
        }
        double down = seconds();
        if (!chunk) CALL(cuMemFree_v2, base);
        if (chunk) CALL(cuMemUnmap, base, bytes);
        for (size_t i = 0; i < count; i++) CALL(cuMemRelease, handles[i]);
        printf("  %.3f/%.3f", (up - start) * 1e3, (seconds() - down) * 1e3);
        if (late > 0) printf(" (late grant %.3f)", late * 1e3);
    }
    printf("\n");
    return 0;
}
