/*
 * own_placing WHAT: memory that the program makes by cuMemCreate, placed by hand with gpupool_prefetch (simulated driver only).
 *
 *   round    to another GPU, the host and back: contents, who may use which mapping, what the driver says of it
 *   stays    what does not move, and when
 *   kind     what only the driver can place: compressed, alone and beside a handle that moves
 *   faults   every driver call of a move fails once, of a handle that the program still has and of one that mappings alone keep
 */
#include "control.h"
#include "simulator.h"
#include "vmm.h"

#include <unistd.h>

enum { BYTES = 8 * MIB, WORDS = BYTES / 4 };

static Control control;
static Simulator simulator;
static CUdeviceptr window, second;
static uint64_t handle;
static uint32_t words[WORDS];

static void grant(CUdeviceptr address, int flags)
{
    CUmemAccessDesc access = {{ON_DEVICE, 0}, flags};
    CHECK(cuMemSetAccess(address, BYTES, &access, 1));
}

/* One handle, mapped for writing at `window` and for reading at `second`. */
static void make(void)
{
    CUmemAllocationProp properties = on_device(0);
    properties.rdma = 1;
    CHECK(cuMemCreate(&handle, BYTES, &properties, 0));
    CHECK(cuMemMap(window, BYTES, 0, handle, 0));
    CHECK(cuMemMap(second, BYTES, 0, handle, 0));
    grant(window, READ_WRITE);
    grant(second, 1);
    for (uint32_t i = 0; i < WORDS; i++)
        words[i] = 1000 + i;
    CHECK(cuMemcpyHtoD_v2(window, words, BYTES));
}

static void unmap(void)
{
    CHECK(cuMemUnmap(window, BYTES));
    CHECK(cuMemUnmap(second, BYTES));
}

static int prefetch(CUdeviceptr address, size_t bytes, int place)
{
    return control.prefetch(as_pointer(address), bytes, place, NULL);
}

static int access_of(CUdeviceptr address, int device)
{
    uint64_t flags = 77;
    CUmemLocation location = {ON_DEVICE, device};
    CHECK(cuMemGetAccess(&flags, &location, address));
    return (int)flags;
}

static void tell(const char *when, int answer)
{
    CUmemAllocationProp properties = {0};
    uint64_t again;
    CHECK(cuMemGetAllocationPropertiesFromHandle(&properties, handle));
    CHECK(cuMemRetainAllocationHandle(&again, as_pointer(second + BYTES - 1)));
    CHECK(cuMemRelease(again));
    printf("%s: %d; wrong words %d, %d; access %d %d, %d %d; at %d %d, the same number %s; ", when, answer,
           (int)wrong_on_host(window, BYTES, words[0]), (int)wrong_on_host(second, BYTES, words[0]), access_of(window, 0),
           access_of(window, 1), access_of(second, 0), access_of(second, 1), properties.location.kind, properties.location.id,
           again == handle ? "yes" : "no");
    print_used(&simulator, 2, 1);
}

static void round_trip(void)
{
    make();
    tell("made", 0);
    tell("to GPU 1", prefetch(window, BYTES, 1));
    tell("to the host", prefetch(second, BYTES, -1));
    for (uint32_t i = 0; i < WORDS; i++)
        words[i] += 7;
    CHECK(cuMemcpyHtoD_v2(window, words, BYTES));
    tell("written there, to GPU 0", prefetch(window, BYTES, 0));
    int adapters = 9;
    CHECK(cuPointerGetAttribute(&adapters, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, window));
    printf("network adapters may reach it: %d\n", adapters);
    tell("where it is", prefetch(window, BYTES, 0));
    tell("advised to GPU 1", control.advise(as_pointer(window), BYTES, 3, 1));
    /* A number that was released: its mappings alone keep the memory. */
    CHECK(cuMemRelease(handle));
    int answers[2] = {prefetch(window, 2 * BYTES, 0), prefetch(window, BYTES, 1)};
    printf("released: %d, %d; wrong words %d, %d; ", answers[0], answers[1], (int)wrong_on_host(window, BYTES, words[0]),
           (int)wrong_on_host(second, BYTES, words[0]));
    print_used(&simulator, 2, 1);
    unmap();
    printf("unmapped: %d, ", prefetch(window, BYTES, 0) != 0);
    print_used(&simulator, 2, 1);
}

/* At the end of what can be moved lies what cannot. */
static void of_kind(void)
{
    CUmemAllocationProp properties = on_device(0);
    uint64_t compressed;
    CUdeviceptr behind = window + BYTES;
    CHECK(cuMemCreate(&handle, BYTES, &properties, 0));
    CHECK(cuMemMap(window, BYTES, 0, handle, 0));
    grant(window, READ_WRITE);
    properties.compression = 1;
    CHECK(cuMemCreate(&compressed, BYTES, &properties, 0));
    CHECK(cuMemMap(behind, BYTES, 0, compressed, 0));
    grant(behind, READ_WRITE);
    printf("to GPU 1: %d, to the host: %d, where it is: %d; no such place: %d\n", prefetch(behind, BYTES, 1),
           prefetch(behind, BYTES, -1), prefetch(behind, BYTES, 0), prefetch(behind, BYTES, 9));
    printf("advised to GPU 1: %d, to GPU 0: %d, anywhere: %d\n", control.advise(as_pointer(behind), BYTES, 3, 1),
           control.advise(as_pointer(behind), BYTES, 3, 0), control.advise(as_pointer(behind), BYTES, 4, 0));
    printf("both to GPU 1: %d; ", prefetch(window, 2 * BYTES, 1));
    print_used(&simulator, 2, 1);
    printf("both to GPU 0: %d; ", prefetch(window, 2 * BYTES, 0));
    print_used(&simulator, 2, 1);
    CHECK(cuMemUnmap(behind, BYTES));
    printf("unmapped: %d\n", prefetch(behind, BYTES, 1) == GPUPOOL_STAYED);
}

static void what_stays(void)
{
    CUstream stream;
    CUgraph graph;
    make();
    printf("half of it: %d, where it is: %d; nothing: %d; no such place: %d, %d\n", prefetch(window, BYTES / 2, 1),
           prefetch(window + MIB, MIB, 0), prefetch(window, 0, 1),
           prefetch(window, BYTES, 9), prefetch(window, BYTES, -9));
    CHECK(cuStreamCreate(&stream, 1));
    CHECK(cuStreamBeginCapture_v2(stream, 2));
    printf("while a stream is captured: %d\n", prefetch(window, BYTES, 1));
    CHECK(cuStreamEndCapture(stream, &graph));
    int descriptor;
    CHECK(cuMemExportToShareableHandle(&descriptor, handle, POSIX_FD, 0));
    printf("exported: %d\n", prefetch(window, BYTES, 1));
    tell("it stayed", 0);
    close(descriptor);
    unmap();
    CHECK(cuMemRelease(handle));
    /* Larger than what the other GPU has. */
    CUmemAllocationProp properties = on_device(1);
    uint64_t large;
    CHECK(cuMemCreate(&large, 124 * MIB, &properties, 0));
    make();
    tell("no room", prefetch(window, BYTES, 1));
    CHECK(cuMemRelease(large));
    tell("room", prefetch(window, BYTES, 1));
}

static void faults(int kept)
{
    uint64_t swept = 0, refused = 0, calls = 1;
    for (uint64_t call = 0; call <= calls; call++) {
        char fault[64] = "";
        make();
        if (!kept)
            CHECK(cuMemRelease(handle));
        uint64_t start = simulator.calls();
        if (call)
            snprintf(fault, sizeof fault, "*:%llu=999", (unsigned long long)call);
        REQUIRE(simulator.arm(fault) == 0);
        int answer = prefetch(window, BYTES, 1);
        REQUIRE(simulator.arm("") == 0);
        if (!call)
            calls = simulator.calls() - start;
        int place = simulator.used(1) >= BYTES;
        int wrong = (int)wrong_on_host(window, BYTES, words[0]) + (int)wrong_on_host(second, BYTES, words[0]);
        if (wrong || (answer != 0 && answer != 999) || (answer == 0 && !place) || access_of(window, 0) != READ_WRITE ||
            access_of(second, 0) != 1 || access_of(window, 1) != 0)
            printf("the %lluth call: %d, %d wrong, at %d\n", (unsigned long long)call, answer, wrong, place);
        unmap();
        if (kept)
            CHECK(cuMemRelease(handle));
        if (simulator.handles() || simulator.mapped() || simulator.used(1))
            printf("the %lluth call: %d handles, %d bytes mapped, %d used are left\n", (unsigned long long)call,
                   (int)simulator.handles(), (int)simulator.mapped(), (int)simulator.used(1));
        refused += answer != 0;
        swept++;
    }
    printf("swept %s: %s, refused %s\n", kept ? "kept" : "released", swept > 12 ? "many" : "few", refused > 8 ? "many" : "few");
}

int main(int count, char **arguments)
{
    REQUIRE(count == 2);
    control = find_control(RTLD_DEFAULT);
    simulator = find_simulator();
    start_on(0);
    CHECK(cuMemAddressReserve(&window, 2 * BYTES, 0, 0, 0));
    second = window + BYTES;
    if (!strcmp(arguments[1], "round"))
        round_trip();
    else if (!strcmp(arguments[1], "stays"))
        what_stays();
    else if (!strcmp(arguments[1], "kind"))
        of_kind();
    else
        faults(1), faults(0);
    return 0;
}
