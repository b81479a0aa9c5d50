/*
 * ipc STEP...: processes that share memory, played step by step. A step is PROCESS:ACTION:…, where PROCESS is a capital
 * letter; each letter is a process of its own, started when it first has something to do. Slots are numbers; a slot's
 * handle is known to all processes. A variable X_NAME sets NAME for process X alone, to be unset if it is empty.
 *   alloc:SLOT:KIB       allocate              free:SLOT       cuMemFree of it, or of what was opened
 *   fill:SLOT:START      words START, START+1… by a kernel
 *   check:SLOT:START     the same words, by a kernel and by a copy of the ends
 *   get:SLOT:OFFSET      a handle, of the byte at OFFSET
 *   open:SLOT            open the handle       close:SLOT      close it
 *   unbound:SLOT         close it while no context is current
 *   event:SLOT           an event for other processes, recorded; its handle is the slot's
 *   await:SLOT           open such a handle and wait for the event
 *   damaged:SLOT         open the handle with one byte changed
 *   again:SLOT           open it once more and say whether the address is the same
 *   race:SLOT            eight threads open and close it again and again, and read it meanwhile
 *   range:SLOT           address range and attributes of a byte in the middle
 *   capable:SLOT         whether the driver says that a handle can be had of it
 *   threads              threads of this process
 *   fork:SLOT            a child of this process tries to share, too
 *   files:N              N more file descriptors can be had, and no more
 *   user:ID              become another user
 *   reset[:GPU]          reset the primary context of the first GPU, or of this one
 *   on:GPU               work in this GPU's primary context from here on
 *   daemonise            close every socket that the program did not open (not the driver's files, without which it cannot go on)
 *   reuse                put a file of the program's own under the number of every socket, fork, and look at them in the child
 *   kept                 whether they are still the program's own
 *   asleep               wait until the thread that serves others waits, too
 *   deaf                 standard error is a full pipe from here on
 *   forge:SLOT           ask for the block with all that is public: the socket's name, the block's number and its address
 *   say:SLOT:VERSION     ask slot 0's exporter for the block by a message of that version, and by garbage
 *   imitate:SLOT:VERSION the slot's handle leads to this process, which answers whoever asks that it speaks that version
 *   stamp:SLOT:VERSION   the slot's handle says that it is of that version
 *   knock:N              connect N times to the socket of slot 0's exporter, and wait each time until that ends
 *   crowd:N              connect N times, say nothing and stay
 *   running:SLOT         close it while a kernel runs, and begin a capture while the close waits for that
 *   trim                 return freed memory to the driver (under the shim)
 *   captured:SLOT        close it while a stream is being captured
 *   overtaken:SLOT       close it, and a capture begins while that waits (simulated driver)
 *   taken:SLOT           open it in a context of its own, and destroy that while a kernel is held in this one
 *   outlives:SLOT:reset, outlives:SLOT:destroy
 *                        open it in a context that ends so, and again in the next one of the same handle, before the call that
 *                        ends the first is back (simulated driver); work in the next one from here on
 *   freed:SLOT           cuMemFree of it while a stream is being captured
 *   anew                 begin to work in the primary context again, after reset
 *   context              work in a context of its own from here on
 *   destroy              destroy that context and work in the primary one again
 *   hold                 do nothing more, but stay there until killed (SIGSTOP)
 *   sweep:get:SLOT, sweep:open:SLOT
 *                        the same with a fault at every driver call in turn (simulated driver): nothing may be left
 *   fault:SPECIFICATION  faults of the simulated driver
 *   info                 free memory as the process is told
 *   nvml                 used memory and processes on GPU 0 by NVML, of the whole machine
 *   left                 handles, mapped and used memory (simulated driver), without what is kept for the next blocks
 *   exit                 end in order          kill            end at once
 */
#include "simulator.h"

#include "held.h"
#include "streams.h"
#include "nvml.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define SLOTS 8
#define WORD 512
#define DESCRIPTORS 2048

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

/*
 * From now on `count` more descriptors can be had. The gaps below the highest one are filled first: how many there are differs
 * from run to run, and each would be one more.
 */
static void leave_files(int count)
{
    struct rlimit most = {4096, 4096};
    REQUIRE(setrlimit(RLIMIT_NOFILE, &most) == 0);
    int taken[4096], filled = 0, highest = 0;
    for (int file = 0; file < 4096; file++)
        if (fcntl(file, F_GETFD) != -1)
            highest = file;
    struct rlimit limit = {highest + 1 + count, 4096};
    REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    while ((taken[filled] = dup(0)) != -1)
        filled++;
    REQUIRE(filled >= count);
    for (int i = 0; i < count; i++)
        close(taken[filled - 1 - i]);
}

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

/* Closing while nobody may synchronise the context. */
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

static CUstream late;

static void *begin_late(void *context)
{
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamBeginCapture_v2(late, CAPTURE_RELAXED));
    return context;
}

static void capture_late(void)
{
    CUcontext context;
    pthread_t thread;
    CHECK(cuCtxGetCurrent(&context));
    REQUIRE(pthread_create(&thread, NULL, begin_late, context) == 0);
    REQUIRE(pthread_join(thread, NULL) == 0);
}

/* The close waits for two contexts: that of the opening, and then the current one, in which the capture has begun. */
static void overtaken(const char *name, const Simulator *simulator, const Slot *slot)
{
    CUcontext second;
    CUgraph graph = NULL;
    CHECK(cuCtxCreate_v2(&second, 0, 0));
    CHECK(cuStreamCreate(&late, CU_STREAM_NON_BLOCKING));
    simulator->after("cuCtxSynchronize", capture_late);
    CUresult closed = cuIpcCloseMemHandle(slot->address);
    printf("%s: close %d, end of the capture %d\n", name, closed, cuStreamEndCapture(late, &graph));
    CHECK(cuStreamDestroy_v2(late));
    CHECK(cuCtxDestroy_v2(second));
}

static void taken_along(const char *name, const Slot *slot)
{
    Gpu gpu;
    CUcontext second;
    CUdeviceptr opened;
    open_gpu(&gpu, 0);
    CHECK(cuCtxCreate_v2(&second, 0, 0));
    CHECK(cuIpcOpenMemHandle_v2(&opened, slot->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    hold(&gpu);
    pthread_t guard = watch("the end of another context, in which memory is open");
    CHECK(cuCtxDestroy_v2(second));
    watch_ends(guard);
    let_go(&gpu);
    printf("%s: close %d\n", name, cuIpcCloseMemHandle(opened));
}

/* A context in which a handle is open ends, and the next one, of the same handle, opens it before that call is back. */
static struct {
    CUipcMemHandle handle;
    CUcontext context;
    CUdeviceptr opened;
    CUresult result;
    int is_created, is_same;
} next_life;

static void *open_in_the_next_life(void *unused)
{
    CUcontext before = next_life.context;
    if (next_life.is_created) {
        CHECK(cuCtxCreate_v2(&next_life.context, 0, 0));
    } else {
        CHECK(cuDevicePrimaryCtxRetain(&next_life.context, 0));
        CHECK(cuCtxSetCurrent(next_life.context));
    }
    next_life.is_same = next_life.context == before;
    next_life.result = cuIpcOpenMemHandle_v2(&next_life.opened, next_life.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    return unused;
}

static void begin_the_next_life(void)
{
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, open_in_the_next_life, NULL) == 0);
    REQUIRE(pthread_join(thread, NULL) == 0);
}

static void open_again_as_it_ends(const char *name, const Simulator *simulator, Slot *slot, int is_created)
{
    CUdeviceptr first;
    next_life.is_created = is_created;
    next_life.handle = slot->handle;
    if (is_created)
        CHECK(cuCtxCreate_v2(&next_life.context, 0, 0));
    else
        CHECK(cuCtxGetCurrent(&next_life.context));
    CHECK(cuIpcOpenMemHandle_v2(&first, slot->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    if (is_created) {
        simulator->after("cuCtxDestroy_v2", begin_the_next_life);
        CHECK(cuCtxDestroy_v2(next_life.context));
    } else {
        simulator->after("cuDevicePrimaryCtxReset_v2", begin_the_next_life);
        CHECK(cuDevicePrimaryCtxReset_v2(0));
    }
    CHECK(cuCtxSetCurrent(next_life.context));
    printf("%s: open %d, in a context of the same handle: %d\n", name, next_life.result, next_life.is_same);
    slot->address = next_life.opened;
}

/* Bare, a free breaks the capture; what it does under the shim is none of the comparison's business. */
static void freed(const char *name, const Slot *slot)
{
    CUstream stream;
    CUgraph graph = NULL;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamBeginCapture_v2(stream, 0));
    CUresult result = cuMemFree_v2(slot->address);
    printf("%s: free %d, end of the capture %d\n", name, result, cuStreamEndCapture(stream, &graph));
    CHECK(cuStreamDestroy_v2(stream));
}

/* The program's own file under numbers that were sockets. */
static int reused[DESCRIPTORS], reused_count, own_file = -1;

static int still_own(void)
{
    struct stat own, found;
    int count = 0;
    REQUIRE(fstat(own_file, &own) == 0);
    for (int i = 0; i < reused_count; i++)
        count += fstat(reused[i], &found) == 0 && found.st_ino == own.st_ino && found.st_dev == own.st_dev;
    return count;
}

static int is_socket(int fd)
{
    struct stat found;
    return fstat(fd, &found) == 0 && S_ISSOCK(found.st_mode);
}

static void close_sockets(void)
{
    for (int fd = 5; fd < DESCRIPTORS; fd++)
        if (is_socket(fd))
            close(fd);
}

static void reuse(const char *name)
{
    own_file = memfd_create("own", 0);
    REQUIRE(own_file >= 0);
    for (int fd = 5; fd < DESCRIPTORS; fd++) {
        if (!is_socket(fd))
            continue;
        REQUIRE(dup2(own_file, fd) == fd);
        reused[reused_count++] = fd;
    }
    fflush(stdout);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (!child) {
        printf("%s: all there in the child: %s\n", name, reused_count && still_own() == reused_count ? "yes" : "no");
        fflush(stdout);
        _exit(0);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status));
}

/* Whether the thread of that name is waiting, as the system sees it. */
static int is_asleep(void)
{
    DIR *tasks = opendir("/proc/self/task");
    int asleep = 0;
    for (struct dirent *task; (task = readdir(tasks));) {
        char path[WORD], text[WORD] = {0};
        snprintf(path, sizeof path, "/proc/self/task/%s/stat", task->d_name);
        int fd = open(path, O_RDONLY);
        if (fd < 0)
            continue;
        asleep |= read(fd, text, sizeof text - 1) > 0 && strstr(text, "(gpupool) S");
        close(fd);
    }
    closedir(tasks);
    return asleep;
}

static void say_asleep(const char *name)
{
    int asleep = 0;
    /* One that goes round and round is never seen asleep. */
    for (int i = 0; i < 5000 && !asleep; i++) {
        sched_yield();
        asleep = is_asleep();
    }
    printf("%s: %s\n", name, asleep ? "yes" : "no");
}

static void become_deaf(void)
{
    int ends[2];
    char text[4096] = {0};
    REQUIRE(pipe(ends) == 0 && fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0);
    while (write(ends[1], text, sizeof text) > 0)
        ;
    while (write(ends[1], text, 1) > 0)
        ;
    REQUIRE(fcntl(ends[1], F_SETFL, 0) == 0 && dup2(ends[1], 2) == 2);
    close(ends[1]);
}

/* A connection to the nth socket whose public name is of slot 0's exporter; -1 if there are not so many. Those of other
 * programs on this machine are left alone: tests run side by side. */
static int knock(int nth)
{
    char line[WORD], ours[WORD];
    uint32_t exporter;
    memcpy(&exporter, slots[0].handle.reserved + 12, sizeof exporter);
    snprintf(ours, sizeof ours, "@gpupool-ipc-%u-", exporter);
    FILE *list = fopen("/proc/net/unix", "r");
    int found = -1;
    REQUIRE(list);
    while (found < 0 && fgets(line, sizeof line, list)) {
        char *name = strstr(line, ours);
        /* 00010000: listening. */
        if (!name || !strstr(line, " 00010000 ") || nth-- > 0)
            continue;
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        size_t length = strcspn(name + 1, "\n");
        memcpy(address.sun_path + 1, name + 1, length);
        found = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        REQUIRE(found >= 0);
        REQUIRE(connect(found, (struct sockaddr *)&address, sizeof address.sun_family + 1 + length) == 0);
    }
    fclose(list);
    return found;
}

/* Sends a request and waits for the answer: its kind, 0 where the connection ends instead, and how many descriptors came with it. */
static unsigned answer_to(int connection, const void *request, size_t bytes, int *descriptors)
{
    char answer[8192];
    _Alignas(8) char control[2048];
    struct iovec part = {answer, sizeof answer};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    unsigned kind;
    if (send(connection, request, bytes, MSG_NOSIGNAL) < 0 || recvmsg(connection, &message, 0) <= 0)
        return 0;
    for (struct cmsghdr *header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header))
        *descriptors += (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    memcpy(&kind, answer + 12, sizeof kind);
    return kind;
}

/* What every message begins with. */
typedef struct __attribute__((packed)) {
    char magic[8];
    uint32_t version, kind, length;
} Head;

enum { SPEAKS = 0, HOLD = 0x100, CHUNKS = 0x101, HELD = 0x180 };

static Head head_of(uint32_t version, uint32_t kind, size_t length)
{
    Head head = {.version = version, .kind = kind, .length = (uint32_t)length};
    memcpy(head.magic, "gpupool\x1d", sizeof head.magic);
    return head;
}

/* A request for chunks; one to hold a block ends before `first`. */
typedef struct __attribute__((packed)) {
    Head head;
    uint64_t block;
    char secret[16];
    uint32_t first, most;
} Request;

static Request request_for(const Slot *slot, uint32_t kind)
{
    /* Of the library's own version, or whoever is asked would look no further. */
    uint32_t version;
    Request request = {.most = 1};
    memcpy(&version, slot->handle.reserved + 8, sizeof version);
    memcpy(&request.block, slot->handle.reserved + 24, sizeof request.block + sizeof request.secret);
    request.head = head_of(version, kind, kind == HOLD ? offsetof(Request, first) : sizeof request);
    return request;
}

/* Whether a message on a new connection is answered, or else the right one behind it: a guess ends the connection, so that
 * guesses are not cheap. */
static int is_answered(int nth, const Slot *slot, const Request *forged, int *descriptors)
{
    Request right = request_for(slot, HOLD);
    int connection = knock(nth);
    REQUIRE(connection >= 0 && send(connection, forged, forged->head.length, MSG_NOSIGNAL) == (ssize_t)forged->head.length);
    int answered = answer_to(connection, &right, right.head.length, descriptors) != 0;
    close(connection);
    return answered;
}

/* All that anybody can know: names of sockets, and numbers of blocks, which are few enough to be tried. Then the same with the secret,
 * which shows that the messages are such as are obeyed. */
static void forge(const char *name, const Slot *slot)
{
    Request hold = request_for(slot, HOLD), chunks = request_for(slot, CHUNKS), other;
    int asked = 0, answered = 0, had = 0, connection;
    for (int nth = 0; (connection = knock(nth)) >= 0; nth++) {
        close(connection);
        /* No secret at all, and such as differ by a bit at either end. */
        for (int wrong = 0; wrong < 3; wrong++, asked += 2) {
            char secret[16] = {0};
            if (wrong > 0) {
                memcpy(secret, hold.secret, sizeof secret);
                secret[wrong == 1 ? 0 : 15] ^= 1;
            }
            other = hold;
            memcpy(other.secret, secret, sizeof secret);
            answered += is_answered(nth, slot, &other, &had);
            other = chunks;
            memcpy(other.secret, secret, sizeof secret);
            answered += is_answered(nth, slot, &other, &had);
        }
        /* Whoever knows the secret says first that it wants the block. */
        answered += is_answered(nth, slot, &chunks, &had);
    }
    printf("%s: %d answered, %d descriptors, asked %s\n", name, answered, had, asked ? "yes" : "no");
    connection = knock(0);
    had = 0;
    int held = answer_to(connection, &hold, hold.head.length, &had) == HELD;
    answer_to(connection, &chunks, chunks.head.length, &had);
    close(connection);
    printf("%s: with the secret %d held, %d descriptors\n", name, held, had);
}

/* What comes back for some bytes, and whether the connection ends then. */
static void say_bytes(const char *name, const char *what, const void *bytes, size_t length)
{
    Head answer = {0};
    int connection = knock(0);
    REQUIRE(connection >= 0 && send(connection, bytes, length, MSG_NOSIGNAL) == (ssize_t)length);
    ssize_t received = read(connection, &answer, sizeof answer);
    if (received == sizeof answer && !memcmp(answer.magic, "gpupool\x1d", 8) && answer.length == sizeof answer)
        printf("%s: %s: kind %u of version %u, ", name, what, answer.kind, answer.version);
    else
        printf("%s: %s: %zd bytes, ", name, what, received);
    printf("then %s\n", received <= 0 || read(connection, &answer, sizeof answer) == 0 ? "the end" : "more");
    close(connection);
}

static void say(const char *name, const Slot *slot, uint32_t version)
{
    Request hold = {.head = head_of(version, HOLD, offsetof(Request, first))};
    memcpy(&hold.block, slot->handle.reserved + 24, 24);
    say_bytes(name, "a hold", &hold, offsetof(Request, first));
    /* Whatever else such a version says. */
    char longer[4096] = {0};
    Head unknown = head_of(version, 77, sizeof longer);
    memcpy(longer, &unknown, sizeof unknown);
    say_bytes(name, "something else", longer, sizeof longer);
    memset(longer, 0x5a, sizeof longer);
    say_bytes(name, "garbage", longer, sizeof longer);
}

/* A handle that was changed is whole again. */
static void seal(CUipcMemHandle *handle)
{
    uint64_t hash = 0xcbf29ce484222325;
    for (int i = 0; i < 56; i++)
        hash = (hash ^ (unsigned char)handle->reserved[i]) * 0x100000001b3;
    memcpy(handle->reserved + 56, &hash, 8);
}

static void stamp(const char *name, Slot *slot, uint32_t version)
{
    memcpy(slot->handle.reserved + 8, &version, 4);
    seal(&slot->handle);
    printf("%s: done\n", name);
}

typedef struct {
    int listener;
    uint32_t version;
} Imitation;

static void *answer_as_another_version(void *argument)
{
    Imitation imitation = *(Imitation *)argument;
    free(argument);
    for (int connection; (connection = accept(imitation.listener, NULL, NULL)) >= 0; close(connection)) {
        char request[256];
        Head answer = head_of(imitation.version, SPEAKS, sizeof answer);
        if (read(connection, request, sizeof request) > 0)
            REQUIRE(send(connection, &answer, sizeof answer, MSG_NOSIGNAL) == sizeof answer);
    }
    return NULL;
}

static void imitate(const char *name, Slot *slot, uint32_t version)
{
    uint32_t pid = (uint32_t)getpid();
    uint64_t process = 0x1234;
    memcpy(slot->handle.reserved + 12, &pid, 4);
    memcpy(slot->handle.reserved + 16, &process, 8);
    seal(&slot->handle);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int length = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "gpupool-ipc-%u-%016llx", pid,
                          (unsigned long long)process);
    Imitation *imitation = malloc(sizeof *imitation);
    REQUIRE(imitation);
    *imitation = (Imitation){socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), version};
    socklen_t bytes = (socklen_t)(sizeof address.sun_family + 1 + (size_t)length);
    REQUIRE(bind(imitation->listener, (struct sockaddr *)&address, bytes) == 0 && listen(imitation->listener, 8) == 0);
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, answer_as_another_version, imitation) == 0);
    printf("%s: done\n", name);
}

static void knock_often(const char *name, int times)
{
    int ended = 0, connection;
    for (int i = 0; i < times && (connection = knock(0)) >= 0; i++) {
        char answer[64];
        while (read(connection, answer, sizeof answer) > 0)
            ;
        close(connection);
        ended++;
    }
    printf("%s: %d ended\n", name, ended);
}

typedef struct {
    CUcontext context;
    CUdeviceptr address;
    CUresult result;
    atomic_int calling, done;
} Closing;

static void *close_it(void *argument)
{
    Closing *closing = argument;
    CHECK(cuCtxSetCurrent(closing->context));
    atomic_store(&closing->calling, 1);
    closing->result = cuIpcCloseMemHandle(closing->address);
    atomic_store(&closing->done, 1);
    return NULL;
}

/* A close waits for a kernel of the first context, and meanwhile a capture begins in the second. */
static void close_while_running(const char *name, const Kernels *kernels, const Slot *slot)
{
    Closing closing = {.address = slot->address};
    CUcontext second;
    CUstream held, captured;
    CUgraph graph = NULL;
    CUdevice device;
    pthread_t thread;
    void *flag;
    CHECK(cuCtxGetCurrent(&closing.context));
    CHECK(cuStreamCreate(&held, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemHostAlloc(&flag, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    *(volatile uint32_t *)flag = 0;
    CUdeviceptr flag_on_device = (CUdeviceptr)(uintptr_t)flag;
    CHECK(cuLaunchKernel(kernels->wait_flag, 1, 1, 1, 1, 1, 1, 0, held, (void *[]){&flag_on_device}, NULL));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuCtxCreate_v2(&second, 0, device));
    CHECK(cuStreamCreate(&captured, CU_STREAM_NON_BLOCKING));
    REQUIRE(pthread_create(&thread, NULL, close_it, &closing) == 0);
    while (!atomic_load(&closing.calling))
        sched_yield();
    /* It gets the time to wait for the kernel; one that does not is answered all the same. */
    for (int i = 0; i < 2000 && !atomic_load(&closing.done); i++)
        sched_yield();
    CHECK(cuStreamBeginCapture_v2(captured, 2));
    *(volatile uint32_t *)flag = 1;
    REQUIRE(pthread_join(thread, NULL) == 0);
    CUresult ended = cuStreamEndCapture(captured, &graph);
    printf("%s: close %d, end of the capture %d\n", name, closing.result, ended);
    CHECK(cuStreamDestroy_v2(captured));
    CHECK(cuCtxDestroy_v2(second));
    CHECK(cuCtxSetCurrent(closing.context));
    CHECK(cuStreamSynchronize(held));
    CHECK(cuStreamDestroy_v2(held));
    CHECK(cuMemFreeHost(flag));
}

static CUcontext own_context(const char *name)
{
    CUcontext context;
    CUdevice device;
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuCtxCreate_v2(&context, 0, device));
    printf("%s: done\n", name);
    return context;
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
static void act(Kernels *kernels, char *order)
{
    static CUcontext own;
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
    } else if (!strcmp(action, "unbound")) {
        CUcontext context;
        CHECK(cuCtxGetCurrent(&context));
        CHECK(cuCtxSetCurrent(NULL));
        CUresult result = cuIpcCloseMemHandle(slot->address);
        CHECK(cuCtxSetCurrent(context));
        printf("%s: %d\n", name, result);
    } else if (!strcmp(action, "race")) {
        race(name, slot);
    } else if (!strcmp(action, "range")) {
        range(name, slot);
    } else if (!strcmp(action, "capable")) {
        int capable = -1;
        int attribute = CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
        printf("%s: %d", name, cuPointerGetAttribute(&capable, attribute, slot->address + 4096));
        printf(" %d", capable & 255);
        void *together[] = {&capable};
        CHECK(cuPointerGetAttributes(1, &attribute, together, slot->address));
        printf(", together %d\n", capable & 255);
    } else if (!strcmp(action, "threads")) {
        printf("%s: %d\n", name, threads());
    } else if (!strcmp(action, "fork")) {
        in_a_child(name, slot);
    } else if (!strcmp(action, "files")) {
        leave_files(atoi(first));
    } else if (!strcmp(action, "user")) {
        printf("%s: %s\n", name, seteuid(atoi(first)) ? "not allowed" : "done");
    } else if (!strcmp(action, "reset")) {
        printf("%s: %d\n", name, cuDevicePrimaryCtxReset_v2(first ? atoi(first) : 0));
    } else if (!strcmp(action, "on")) {
        start_on(atoi(first));
        *kernels = load_kernels();
    } else if (!strcmp(action, "trim")) {
        printf("%s: %llu MiB\n", name, simulator.trim ? (unsigned long long)(simulator.trim() / MIB) : 0);
    } else if (!strcmp(action, "captured")) {
        captured(name, slot);
    } else if (!strcmp(action, "overtaken")) {
        overtaken(name, &simulator, slot);
    } else if (!strcmp(action, "taken")) {
        taken_along(name, slot);
    } else if (!strcmp(action, "outlives")) {
        open_again_as_it_ends(name, &simulator, slot, !strcmp(second, "destroy"));
        *kernels = load_kernels();
    } else if (!strcmp(action, "daemonise")) {
        close_sockets();
    } else if (!strcmp(action, "reuse")) {
        reuse(name);
    } else if (!strcmp(action, "kept")) {
        printf("%s: %s\n", name, still_own() == reused_count ? "all" : "not all");
    } else if (!strcmp(action, "asleep")) {
        say_asleep(name);
    } else if (!strcmp(action, "deaf")) {
        become_deaf();
    } else if (!strcmp(action, "forge")) {
        forge(name, slot);
    } else if (!strcmp(action, "say")) {
        say(name, slot, (uint32_t)value);
    } else if (!strcmp(action, "imitate")) {
        imitate(name, slot, (uint32_t)value);
    } else if (!strcmp(action, "stamp")) {
        stamp(name, slot, (uint32_t)value);
    } else if (!strcmp(action, "knock")) {
        knock_often(name, atoi(first));
    } else if (!strcmp(action, "crowd")) {
        for (int i = 0; i < atoi(first); i++)
            REQUIRE(knock(0) >= 0);
    } else if (!strcmp(action, "running")) {
        close_while_running(name, kernels, slot);
    } else if (!strcmp(action, "freed")) {
        freed(name, slot);
    } else if (!strcmp(action, "anew")) {
        start_on(0);
        *kernels = load_kernels();
    } else if (!strcmp(action, "context")) {
        own = own_context(name);
        *kernels = load_kernels();
    } else if (!strcmp(action, "destroy")) {
        printf("%s: %d\n", name, cuCtxDestroy_v2(own));
        start_on(0);
        *kernels = load_kernels();
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
        if (simulator.trim)
            simulator.trim();
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
            int status = 0;
            kill(player->pid, SIGSTOP);
            /* All its threads stand once this is back: the one that serves others may go on for a while after kill. */
            REQUIRE(waitpid(player->pid, &status, WUNTRACED) == player->pid && WIFSTOPPED(status));
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
