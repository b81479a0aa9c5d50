/*
 * nvml_machine ACTION...: what NVML tells of the machine.
 *   gpus       every GPU: name, UUID, PCI address, links to the others
 *   idle       clock and power of GPU 0 before and after a context is made on it, and after it ended
 *   handles    a GPU by UUID and by PCI address is the GPU by index; strangers are refused
 *   begins     alone: memory in use and processes of both GPUs before cuInit, behind it, and with a context on GPU 1
 *   events     waits for what this program writes into the file of SIMCUDA_EVENTS
 *   ended      last: what NVML answers after the end, if nobody else in the process uses it
 */
#define _GNU_SOURCE
#include "program.h"

#include "nvml.h"

#include <unistd.h>

static unsigned count(void)
{
    unsigned gpus = 0;
    REQUIRE(NVML("nvmlDeviceGetCount_v2", unsigned *)(&gpus) == 0);
    return gpus;
}

static void gpus(void)
{
    for (unsigned i = 0; i < count(); i++) {
        char name[64], uuid[80];
        NvmlPci pci;
        NvmlDevice gpu = nvml_device(i);
        REQUIRE(NVML("nvmlDeviceGetName", NvmlDevice, char *, unsigned)(gpu, name, sizeof name) == 0);
        REQUIRE(NVML("nvmlDeviceGetUUID", NvmlDevice, char *, unsigned)(gpu, uuid, sizeof uuid) == 0);
        REQUIRE(NVML("nvmlDeviceGetPciInfo_v3", NvmlDevice, NvmlPci *)(gpu, &pci) == 0);
        printf("GPU %u: %s, %s, %s, %s\n", i, name, uuid, pci.legacy, pci.id);
        printf("  ");
        for (unsigned j = 0; j < count(); j++) {
            unsigned level = 99, read = 99, nvlink = 99;
            NVML("nvmlDeviceGetTopologyCommonAncestor", NvmlDevice, NvmlDevice, unsigned *)(gpu, nvml_device(j), &level);
            NVML("nvmlDeviceGetP2PStatus", NvmlDevice, NvmlDevice, unsigned, unsigned *)(gpu, nvml_device(j), 0, &read);
            NVML("nvmlDeviceGetP2PStatus", NvmlDevice, NvmlDevice, unsigned, unsigned *)(gpu, nvml_device(j), 2, &nvlink);
            printf(" %u/%u/%u", level, read, nvlink);
        }
        int direct = 0, other = 0, refused = 0;
        for (unsigned link = 0; link < 18; link++) {
            unsigned active = 0, type = 99;
            int result = NVML("nvmlDeviceGetNvLinkState", NvmlDevice, unsigned, unsigned *)(gpu, link, &active);
            refused += result != 0;
            if (result || !active)
                continue;
            REQUIRE(NVML("nvmlDeviceGetNvLinkRemoteDeviceType", NvmlDevice, unsigned, unsigned *)(gpu, link, &type) == 0);
            direct += type == 0;
            other += type != 0;
        }
        printf("; NVLinks %d to GPUs, %d to a switch, %d refused\n", direct, other, refused);
    }
}

static void idle(void)
{
    CUcontext context;
    CUdevice device;
    unsigned power[3];
    CHECK(cuDeviceGet(&device, 0));
    for (int i = 0; i < 3; i++) {
        if (i == 1)
            CHECK(cuDevicePrimaryCtxRetain(&context, device));
        if (i == 2)
            CHECK(cuDevicePrimaryCtxRelease_v2(device));
        REQUIRE(NVML("nvmlDeviceGetPowerUsage", NvmlDevice, unsigned *)(nvml_device(0), &power[i]) == 0);
        uint64_t mine;
        int processes = nvml_processes(0, getpid(), &mine);
        printf("%d: %u MHz, %d processes, mine %llu MiB, used %llu MiB\n", i, nvml_sm_clock(0), processes,
               (unsigned long long)(mine / MIB), nvml_memory(0).used / MIB);
    }
    printf("%d W more with a context, %d W afterwards\n", (int)(power[1] - power[0]) / 1000, (int)(power[2] - power[0]) / 1000);
    NvmlMemory2 memory = {sizeof memory | 2u << 24, 0, 0, 0, 0}, stranger = {7, 0, 0, 0, 0};
    int known = NVML("nvmlDeviceGetMemoryInfo_v2", NvmlDevice, NvmlMemory2 *)(nvml_device(0), &memory);
    int refused = NVML("nvmlDeviceGetMemoryInfo_v2", NvmlDevice, NvmlMemory2 *)(nvml_device(0), &stranger);
    printf("version 2: %d, adds up: %d, another version: %d\n", known,
           memory.total == memory.free + memory.used + memory.reserved, refused);
}

static void handles(void)
{
    for (unsigned i = 0; i < count(); i++) {
        char uuid[80];
        NvmlPci pci;
        NvmlDevice by_uuid = NULL, by_pci = NULL, by_short = NULL, gpu = nvml_device(i);
        REQUIRE(NVML("nvmlDeviceGetUUID", NvmlDevice, char *, unsigned)(gpu, uuid, sizeof uuid) == 0);
        REQUIRE(NVML("nvmlDeviceGetPciInfo_v3", NvmlDevice, NvmlPci *)(gpu, &pci) == 0);
        NVML("nvmlDeviceGetHandleByUUID", const char *, NvmlDevice *)(uuid, &by_uuid);
        NVML("nvmlDeviceGetHandleByPciBusId_v2", const char *, NvmlDevice *)(pci.id, &by_pci);
        NVML("nvmlDeviceGetHandleByPciBusId_v2", const char *, NvmlDevice *)(pci.legacy, &by_short);
        printf("GPU %u: %d %d %d\n", i, by_uuid == gpu, by_pci == gpu, by_short == gpu);
    }
    NvmlDevice device = NULL;
    unsigned index;
    printf("strangers: %d %d %d %d\n", NVML("nvmlDeviceGetHandleByIndex_v2", unsigned, NvmlDevice *)(99, &device),
           NVML("nvmlDeviceGetHandleByUUID", const char *, NvmlDevice *)("GPU-none", &device),
           NVML("nvmlDeviceGetIndex", NvmlDevice, unsigned *)((NvmlDevice)&index, &index),
           NVML("nvmlDeviceGetHandleByIndex_v2", unsigned, NvmlDevice *)(0, NULL));
}

static void happen(const char *line)
{
    FILE *file = fopen(getenv("SIMCUDA_EVENTS"), "a");
    REQUIRE(file && fputs(line, file) >= 0 && fclose(file) == 0);
}

static void await(void *set)
{
    NvmlEvent event = {NULL, 0, 0, 0, 0};
    int result = NVML("nvmlEventSetWait_v2", void *, NvmlEvent *, unsigned)(set, &event, 0);
    int gpu = event.device == nvml_device(0) ? 0 : event.device == nvml_device(1) ? 1 : -1;
    printf("wait: %d, GPU %d, type %#llx, data %llu\n", result, gpu, event.type, event.data);
}

static void events(void)
{
    void *set = NULL;
    happen("0 xid 13\n");
    REQUIRE(NVML("nvmlEventSetCreate", void **)(&set) == 0);
    printf("register: %d, of a type that there is not: %d\n",
           NVML("nvmlDeviceRegisterEvents", NvmlDevice, unsigned long long, void *)(nvml_device(0), 0x8 | 0x400 | 0x800, set),
           NVML("nvmlDeviceRegisterEvents", NvmlDevice, unsigned long long, void *)(nvml_device(1), 0x4, set));
    await(set);
    happen("1 xid 48\n0 xid 79\n0 remap uncorrected pending\n0 ecc uncorrected 2\n0 remap corrected failed\n0 xid 3");
    await(set);
    await(set);
    await(set);
    await(set);
    happen("1\n");
    await(set);
    unsigned corrected, uncorrected, pending, failed;
    unsigned long long errors;
    REQUIRE(NVML("nvmlDeviceGetRemappedRows", NvmlDevice, unsigned *, unsigned *, unsigned *, unsigned *)(
                nvml_device(0), &corrected, &uncorrected, &pending, &failed) == 0);
    REQUIRE(NVML("nvmlDeviceGetTotalEccErrors", NvmlDevice, unsigned, unsigned, unsigned long long *)(nvml_device(0), 1, 0,
                                                                                                     &errors) == 0);
    printf("rows: %u corrected, %u uncorrected, pending %u, failed %u; %llu errors\n", corrected, uncorrected, pending, failed,
           errors);
    printf("free: %d\n", NVML("nvmlEventSetFree", void *)(set));
    printf("once more: %d\n", NVML("nvmlEventSetFree", void *)(set));
}

/* How many lines the map of this process has. */
static int mappings(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    int lines = 0;
    REQUIRE(maps);
    for (int c; (c = getc(maps)) != EOF;)
        lines += c == '\n';
    fclose(maps);
    return lines;
}

/* What is asked is forgotten. */
static void again(void)
{
    NvmlMemory memory;
    for (int i = 0; i < 8; i++)
        REQUIRE(NVML("nvmlDeviceGetMemoryInfo", NvmlDevice, NvmlMemory *)(nvml_device(0), &memory) == 0);
    int before = mappings();
    for (int i = 0; i < 100; i++)
        REQUIRE(NVML("nvmlDeviceGetMemoryInfo", NvmlDevice, NvmlMemory *)(nvml_device(0), &memory) == 0);
    printf("mapped by 100 questions: %s\n", mappings() - before < 20 ? "nothing" : "something");
}

static void tell_in_use(const char *when)
{
    printf("%s:", when);
    for (unsigned i = 0; i < count(); i++) {
        uint64_t mine;
        int processes = nvml_processes(i, getpid(), &mine);
        printf(" %llu MiB, %d processes%s", nvml_memory(i).used / MIB, processes, i + 1 < count() ? ";" : "\n");
    }
}

static void begins(void)
{
    CUcontext context;
    CUdevice device;
    tell_in_use("before");
    CHECK(cuInit(0));
    tell_in_use("begun");
    CHECK(cuDeviceGet(&device, 1));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    tell_in_use("there");
    CHECK(cuDevicePrimaryCtxRelease_v2(device));
    tell_in_use("left");
}

int main(int argc, char **argv)
{
    unsigned none;
    printf("before init: %d\n", NVML("nvmlDeviceGetCount_v2", unsigned *)(&none));
    REQUIRE(NVML("nvmlInitWithFlags", unsigned)(0) == 0);
    if (argc > 1 && !strcmp(argv[1], "begins"))
        begins();
    CHECK(cuInit(0));
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "gpus"))
            gpus();
        else if (!strcmp(argv[i], "idle"))
            idle();
        else if (!strcmp(argv[i], "handles"))
            handles();
        else if (!strcmp(argv[i], "again"))
            again();
        else if (!strcmp(argv[i], "events"))
            events();
    }
    REQUIRE(NVML("nvmlShutdown", void)() == 0);
    if (!strcmp(argv[argc - 1], "ended"))
        printf("after shutdown: %d\n", NVML("nvmlDeviceGetCount_v2", unsigned *)(&none));
    return 0;
}
