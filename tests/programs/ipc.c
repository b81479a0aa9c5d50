/*
 * ipc STEP...: processes that share memory, played step by step. A step is PROCESS:ACTION:…, where PROCESS is a capital
 * letter; each letter is a process of its own, started when it first has something to do. Slots are numbers; a slot's
 * handle is known to all processes. A variable X_NAME sets NAME for process X alone, to be unset if it is empty.
 *   alloc:SLOT:KIB       allocate              free:SLOT       cuMemFree of it, or of what was opened
 *   fill:SLOT:START      words START, START+1… by a kernel
 *   check:SLOT:START     the same words, by a kernel and by a copy of the ends
 *   get:SLOT:OFFSET      a handle, of the byte at OFFSET
 *   open:SLOT            open the handle       close:SLOT      close it
 *   event:SLOT           an event for other processes, recorded; its handle is the slot's
 *   await:SLOT           open such a handle and wait for the event
 *   damaged:SLOT         open the handle with one byte changed
 *   again:SLOT           open it once more and say whether the address is the same
 *   race:SLOT            eight threads open and close it again and again, and read it meanwhile
 *   range:SLOT           address range and attributes of a byte in the middle
 *   threads              threads of this process
 *   fork:SLOT            a child of this process tries to share, too
 *   files:N              at most N more file descriptors
 *   user:ID              become another user
 *   reset                reset the primary context
 *   trim                 return freed memory to the driver (under the shim)
 *   captured:SLOT        close it while a stream is being captured
 *   hold                 do nothing more, but stay there until killed (SIGSTOP)
 *   sweep:get:SLOT, sweep:open:SLOT
 *                        the same with a fault at every driver call in turn (simulated driver): nothing may be left
 *   fault:SPECIFICATION  faults of the simulated driver
 *   info                 free memory as the process is told
 *   nvml                 used memory and processes on GPU 0 by NVML, of the whole machine
 *   left                 handles, mapped and used memory (simulated driver)
 *   exit                 end in order          kill            end at once
 */
#include "simulator.h"

#include "kernels.h"
#include "nvml.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define SLOTS 8
#define WORD 512

extern char **environ;

typedef struct {
    CUdeviceptr address;
    size_t bytes;
    CUipcMemHandle handle;
} Slot;

static Slot slots[SLOTS];

static int entries(const char *path)
{
    int count = 0;
    DIR *directory = opendir(path);
    while (directory && readdir(directory))
        count++;
    if (directory)
        closedir(directory);
    /* "." and "..". */
    return count - 2;
}

/* All but the one that counts. */
static int open_files(void) { return entries("/proc/self/fd") - 1; }

static int threads(void) { return entries("/proc/self/task"); }

static uint32_t word_at(CUdeviceptr address)
{
    uint32_t word;
    CHECK(cuMemcpyDtoH_v2(&word, address, sizeof word));
    return word;
}

static void check(const Kernels *kernels, const char *name, const Slot *slot, uint32_t start)
{
    uint64_t words = slot->bytes / 4, wrong = count_wrong(kernels, slot->address, words, start);
    int ends = word_at(slot->address) == start && word_at(slot->address + (words - 1) * 4) == start + words - 1;
    printf("%s: %llu wrong, ends %s\n", name, (unsigned long long)wrong, ends ? "right" : "wrong");
}

static void range(const char *name, const Slot *slot)
{
    CUdeviceptr base = 0, start = 0, middle = slot->address + slot->bytes / 2;
    size_t bytes = 0, range_bytes = 0;
    int type = 0, ordinal = -1, managed = -1;
    CUcontext context = NULL, current;
    CUresult result = cuMemGetAddressRange_v2(&base, &bytes, middle);
    printf("%s: %d, %zu bytes, base %s\n", name, result, bytes, base == slot->address ? "right" : "wrong");
    CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, middle));
    CHECK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, middle));
    CHECK(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, middle));
    CHECK(cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, middle));
    CHECK(cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, middle));
    CHECK(cuPointerGetAttribute(&range_bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, middle));
    CHECK(cuCtxGetCurrent(&current));
    printf("%s: type %d, device %d, managed %d, context %s, %zu bytes from %s\n", name, type, ordinal, managed,
           context == current ? "mine" : "another", range_bytes, start == slot->address ? "there" : "elsewhere");
}

static void *open_and_close(void *argument)
{
    Slot *slot = argument;
    CUcontext context;
    CUdevice device;
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    uintptr_t wrong = 0;
    uint32_t start = 0;
    for (int i = 0; i < 40; i++) {
        CUdeviceptr opened;
        CHECK(cuIpcOpenMemHandle_v2(&opened, slot->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        start = i == 0 ? word_at(opened) : start;
        wrong += word_at(opened) != start || word_at(opened + slot->bytes - 4) != start + slot->bytes / 4 - 1;
        CHECK(cuIpcCloseMemHandle(opened));
    }
    CHECK(cuDevicePrimaryCtxRelease_v2(device));
    return (void *)wrong;
}

static void race(const char *name, Slot *slot)
{
    pthread_t threads[8];
    uintptr_t wrong = 0;
    for (int i = 0; i < 8; i++)
        REQUIRE(pthread_create(&threads[i], NULL, open_and_close, slot) == 0);
    for (int i = 0; i < 8; i++) {
        void *of_thread;
        REQUIRE(pthread_join(threads[i], &of_thread) == 0);
        wrong += (uintptr_t)of_thread;
    }
    printf("%s: %zu wrong\n", name, (size_t)wrong);
}

static void in_a_child(const char *name, const Slot *slot)
{
    fflush(stdout);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (!child) {
        CUipcMemHandle handle;
        CUdeviceptr opened = 0;
        printf("%s: in a child get %d, open %d, close %d, threads %d\n", name, cuIpcGetMemHandle(&handle, slot->address),
               cuIpcOpenMemHandle_v2(&opened, slot->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
               cuIpcCloseMemHandle(slot->address), threads());
        fflush(stdout);
        _exit(0);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status));
}

/* Closing while nobody may wait for the device. */
static void captured(const char *name, const Slot *slot)
{
    CUstream stream;
    CUgraph graph = NULL;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamBeginCapture_v2(stream, 0));
    CUresult closed = cuIpcCloseMemHandle(slot->address);
    printf("%s: close %d, end of the capture %d\n", name, closed, cuStreamEndCapture(stream, &graph));
    CHECK(cuStreamDestroy_v2(stream));
}

/* Fails every driver call of an export or import in turn, once, until the call has no more of them. */
static void sweep(const char *name, const Simulator *simulator, int opens, Slot *slot)
{
    uint64_t handles = simulator->handles(), mapped = simulator->mapped(), used = physical_use(simulator, 2);
    int files = open_files(), failed = 0, fault = 0;
    for (;;) {
        char specification[32];
        snprintf(specification, sizeof specification, "*:%d=999", ++fault);
        REQUIRE(simulator->arm(specification) == 0);
        uint64_t before = simulator->calls();
        CUdeviceptr opened = 0;
        CUresult result = opens ? cuIpcOpenMemHandle_v2(&opened, slot->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
                                : cuIpcGetMemHandle(&slot->handle, slot->address);
        uint64_t calls = simulator->calls() - before;
        failed += result != CUDA_SUCCESS;
        REQUIRE(simulator->arm("") == 0);
        if (opens && result == CUDA_SUCCESS)
            CHECK(cuIpcCloseMemHandle(opened));
        REQUIRE(simulator->handles() == handles && simulator->mapped() == mapped);
        /* The first export opens its socket. */
        REQUIRE(physical_use(simulator, 2) == used && (!opens || open_files() == files));
        if (calls < (uint64_t)fault)
            break;
    }
    printf("%s: %s, some refused: %d\n", name, fault > (opens ? 10 : 1) ? "every call failed once" : "no calls", failed > 0);
}

/* What a process of the given letter does; the handle of the slot comes with the order and goes back with the answer. */
static void act(const Kernels *kernels, char *order)
{
    char name[WORD], *rest;
    snprintf(name, sizeof name, "%s", order);
    const char *action = strtok_r(order + 2, ":", &rest), *first = strtok_r(NULL, ":", &rest);
    const char *second = strtok_r(NULL, "", &rest);
    Slot *slot = &slots[first && strlen(first) == 1 ? atoi(first) % SLOTS : 0];
    uint64_t value = second ? strtoull(second, NULL, 0) : 0;
    Simulator simulator = find_simulator();
    if (!strcmp(action, "alloc")) {
        slot->bytes = value * KIB;
        printf("%s: %d\n", name, cuMemAlloc_v2(&slot->address, slot->bytes));
    } else if (!strcmp(action, "free")) {
        printf("%s: %d\n", name, cuMemFree_v2(slot->address));
    } else if (!strcmp(action, "fill")) {
        iota(kernels, NULL, slot->address, slot->bytes / 4, value);
        CHECK(cuCtxSynchronize());
    } else if (!strcmp(action, "check")) {
        check(kernels, name, slot, value);
    } else if (!strcmp(action, "get")) {
        printf("%s: %d\n", name, cuIpcGetMemHandle(&slot->handle, slot->address + value));
    } else if (!strcmp(action, "open")) {
        CUdeviceptr opened = 0;
        CUresult result = cuIpcOpenMemHandle_v2(&opened, slot->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        printf("%s: %d\n", name, result);
        slot->address = opened ? opened : slot->address;
    } else if (!strcmp(action, "event")) {
        CUevent event;
        CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS));
        CHECK(cuEventRecord(event, NULL));
        printf("%s: %d\n", name, cuIpcGetEventHandle(&slot->handle, event));
    } else if (!strcmp(action, "await")) {
        CUevent event = NULL;
        CUresult opened = cuIpcOpenEventHandle(&event, slot->handle);
        printf("%s: open %d, wait %d\n", name, opened, cuEventSynchronize(event));
    } else if (!strcmp(action, "again")) {
        CUdeviceptr opened = 0;
        CUresult result = cuIpcOpenMemHandle_v2(&opened, slot->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        printf("%s: %d %s\n", name, result, opened == slot->address ? "at the same address" : "elsewhere");
    } else if (!strcmp(action, "damaged")) {
        CUdeviceptr opened = 0;
        CUipcMemHandle handle = slot->handle;
        handle.reserved[0] ^= 0x55;
        CUresult damaged = cuIpcOpenMemHandle_v2(&opened, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        CUresult flags = cuIpcOpenMemHandle_v2(&opened, slot->handle, 0);
        CUresult nowhere = cuIpcOpenMemHandle_v2(NULL, slot->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        printf("%s: %d, without flags %d, to nowhere %d, written %d\n", name, damaged, flags, nowhere, opened != 0);
    } else if (!strcmp(action, "close")) {
        printf("%s: inner %d, whole %d\n", name, cuIpcCloseMemHandle(slot->address + 512),
               cuIpcCloseMemHandle(slot->address));
    } else if (!strcmp(action, "race")) {
        race(name, slot);
    } else if (!strcmp(action, "range")) {
        range(name, slot);
    } else if (!strcmp(action, "threads")) {
        printf("%s: %d\n", name, threads());
    } else if (!strcmp(action, "fork")) {
        in_a_child(name, slot);
    } else if (!strcmp(action, "files")) {
        struct rlimit limit = {open_files() + atoi(first), 4096};
        REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    } else if (!strcmp(action, "user")) {
        printf("%s: %s\n", name, seteuid(atoi(first)) ? "not allowed" : "done");
    } else if (!strcmp(action, "reset")) {
        printf("%s: %d\n", name, cuDevicePrimaryCtxReset_v2(0));
    } else if (!strcmp(action, "trim")) {
        printf("%s: %llu MiB\n", name, simulator.trim ? (unsigned long long)(simulator.trim() / MIB) : 0);
    } else if (!strcmp(action, "captured")) {
        captured(name, slot);
    } else if (!strcmp(action, "sweep")) {
        sweep(name, &simulator, strcmp(first, "open") == 0, &slots[value % SLOTS]);
    } else if (!strcmp(action, "fault")) {
        char specification[WORD];
        snprintf(specification, sizeof specification, "%s:%s", first, second);
        REQUIRE(simulator.arm && simulator.arm(specification) == 0);
    } else if (!strcmp(action, "info")) {
        size_t free_bytes, total;
        CHECK(cuMemGetInfo_v2(&free_bytes, &total));
        printf("%s: %zu of %zu MiB\n", name, free_bytes / MIB, total / MIB);
    } else if (!strcmp(action, "nvml")) {
        uint64_t mine;
        REQUIRE(NVML("nvmlInit_v2", void)() == 0);
        int processes = nvml_processes(0, getpid(), &mine);
        printf("%s: %llu MiB, %llu of it mine, %d processes, %u MHz\n", name, nvml_memory(0).used / MIB,
               (unsigned long long)mine / MIB, processes, nvml_sm_clock(0));
    } else if (!strcmp(action, "left")) {
        printf("%s: %llu handles, %llu MiB mapped, %llu MiB used\n", name, (unsigned long long)simulator.handles(),
               (unsigned long long)(simulator.mapped() / MIB), (unsigned long long)(physical_use(&simulator, 2) / MIB));
    } else {
        printf("no such action: %s\n", name);
        exit(1);
    }
    fflush(stdout);
}

/* A process of one letter: reads orders from descriptor 3 and answers each on 4 with the slots' handles. */
static int player(const char *letter)
{
    char order[WORD];
    (void)letter;
    start_on(0);
    Kernels kernels = load_kernels();
    CUipcMemHandle handles[SLOTS];
    while (read(3, order, sizeof order) == sizeof order) {
        REQUIRE(read(3, handles, sizeof handles) == sizeof handles);
        for (int i = 0; i < SLOTS; i++)
            slots[i].handle = handles[i];
        size_t sizes[SLOTS];
        REQUIRE(read(3, sizes, sizeof sizes) == sizeof sizes);
        for (int i = 0; i < SLOTS; i++)
            slots[i].bytes = sizes[i];
        if (strstr(order, ":exit"))
            return 0;
        if (strstr(order, ":kill"))
            raise(SIGKILL);
        act(&kernels, order);
        for (int i = 0; i < SLOTS; i++) {
            handles[i] = slots[i].handle;
            sizes[i] = slots[i].bytes;
        }
        REQUIRE(write(4, handles, sizeof handles) == sizeof handles);
        REQUIRE(write(4, sizes, sizeof sizes) == sizeof sizes);
    }
    return 0;
}

typedef struct {
    pid_t pid;
    int orders, answers;
} Player;

/* Applies X_NAME=value for the process X. */
static void own_variables(char letter)
{
    for (char **variable = environ; *variable; variable++) {
        if ((*variable)[0] != letter || (*variable)[1] != '_')
            continue;
        char *name = strdup(*variable + 2), *value = strchr(name, '=');
        *value++ = 0;
        if (*value)
            setenv(name, value, 1);
        else
            unsetenv(name);
        variable = environ;
        /* The list has moved; this one is done. */
        char own[WORD];
        snprintf(own, sizeof own, "%c_%s", letter, name);
        unsetenv(own);
        variable = environ - 1;
    }
}

static Player start(const char *program, char letter)
{
    int orders[2], answers[2];
    REQUIRE(pipe(orders) == 0 && pipe(answers) == 0);
    fflush(stdout);
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (!pid) {
        char name[] = {letter, 0};
        own_variables(letter);
        int input = dup2(orders[0], 103), output = dup2(answers[1], 104);
        for (int fd = 3; fd < 103; fd++)
            close(fd);
        REQUIRE(dup2(input, 3) == 3 && dup2(output, 4) == 4);
        close(input);
        close(output);
        execl(program, program, "player", name, (char *)NULL);
        _exit(127);
    }
    close(orders[0]);
    close(answers[1]);
    return (Player){pid, orders[1], answers[0]};
}

static int wait_for(Player *player)
{
    int status = 0;
    close(player->orders);
    REQUIRE(waitpid(player->pid, &status, 0) == player->pid);
    close(player->answers);
    player->pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "player"))
        return player(argv[2]);
    static Player players[26];
    static CUipcMemHandle handles[SLOTS];
    static size_t sizes[SLOTS];
    int failed = 0;
    for (int i = 1; i < argc; i++) {
        char order[WORD] = {0};
        REQUIRE(argv[i][0] >= 'A' && argv[i][0] <= 'Z' && strlen(argv[i]) < WORD);
        strcpy(order, argv[i]);
        Player *player = &players[order[0] - 'A'];
        if (!player->pid)
            *player = start("/proc/self/exe", order[0]);
        if (strstr(order, ":hold")) {
            kill(player->pid, SIGSTOP);
            continue;
        }
        REQUIRE(write(player->orders, order, sizeof order) == sizeof order);
        REQUIRE(write(player->orders, handles, sizeof handles) == sizeof handles);
        REQUIRE(write(player->orders, sizes, sizeof sizes) == sizeof sizes);
        if (strstr(order, ":exit") || strstr(order, ":kill")) {
            printf("%s: %d\n", order, wait_for(player));
            continue;
        }
        if (read(player->answers, handles, sizeof handles) != sizeof handles) {
            printf("%s: ended with %d\n", order, wait_for(player));
            failed = 1;
            break;
        }
        REQUIRE(read(player->answers, sizes, sizeof sizes) == sizeof sizes);
    }
    for (int i = 0; i < 26; i++) {
        if (players[i].pid) {
            kill(players[i].pid, SIGCONT);
            failed |= wait_for(&players[i]) != 0;
        }
    }
    return failed;
}
