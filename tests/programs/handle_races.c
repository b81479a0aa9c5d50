/*
 * handle_races THREADS ROUNDS MIB: one piece of memory that stays mapped at one address, while threads take references on it by that
 * address, map it elsewhere, read it there and let go again, all at once. The first reference goes before they begin, so that at
 * times nobody holds one. Ends with what is left of it.
 */
#include "simulator.h"

#include "vmm.h"

#include <pthread.h>

enum { MOST = 16, VALUE = 0x5eed };

static CUdeviceptr shared;
static size_t bytes;
static int rounds;
static CUcontext context;
static unsigned long long wrong, references;

static void *take(void *unused)
{
    CUmemAccessDesc access = {{ON_DEVICE, 0}, 1};
    CUdeviceptr window;
    (void)unused;
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuMemAddressReserve(&window, bytes, 0, 0, 0));
    for (int i = 0; i < rounds; i++) {
        uint64_t handle, again;
        CUmemAllocationProp properties;
        unsigned first = 0, last = 0;
        CHECK(cuMemRetainAllocationHandle(&handle, (void *)(shared + bytes / 2)));
        CHECK(cuMemMap(window, bytes, 0, handle, 0));
        CHECK(cuMemRetainAllocationHandle(&again, (void *)(window + bytes - 1)));
        CHECK(cuMemGetAllocationPropertiesFromHandle(&properties, again));
        CHECK(cuMemRelease(handle));
        CHECK(cuMemSetAccess(window, bytes, &access, 1));
        CHECK(cuMemcpyDtoH_v2(&first, window, 4));
        CHECK(cuMemcpyDtoH_v2(&last, window + bytes - 4, 4));
        CHECK(i % 2 ? cuMemRelease(again) : cuMemUnmap(window, bytes));
        CHECK(i % 2 ? cuMemUnmap(window, bytes) : cuMemRelease(again));
        __atomic_fetch_add(&references, 1, __ATOMIC_RELAXED);
        __atomic_fetch_add(&wrong, first != VALUE || last != VALUE || handle != again || properties.location.id, __ATOMIC_RELAXED);
    }
    CHECK(cuMemAddressFree(window, bytes));
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t running[MOST];
    uint64_t handle;
    REQUIRE(argc == 4);
    int count = atoi(argv[1]);
    rounds = atoi(argv[2]);
    bytes = (size_t)atoi(argv[3]) * MIB;
    REQUIRE(count > 0 && count <= MOST);
    context = start_on(0);
    CUmemAllocationProp properties = on_device(0);
    CHECK(cuMemCreate(&handle, bytes, &properties, 0));
    shared = map_for(0, handle, bytes);
    CHECK(cuMemsetD32_v2(shared, VALUE, bytes / 4));
    CHECK(cuMemRelease(handle));
    for (int i = 0; i < count; i++)
        REQUIRE(pthread_create(&running[i], NULL, take, NULL) == 0);
    for (int i = 0; i < count; i++)
        REQUIRE(pthread_join(running[i], NULL) == 0);
    printf("%llu times, %llu wrong, one release more: %d\n", references, wrong, cuMemRelease(handle));
    CHECK(cuMemUnmap(shared, bytes));
    CHECK(cuMemAddressFree(shared, bytes));
    Simulator simulator = find_simulator();
    if (simulator.handles)
        printf("left: %d handles, %d bytes mapped, %d MiB\n", (int)simulator.handles(), (int)simulator.mapped(),
               (int)(simulator.used(1) / MIB));
    return 0;
}
