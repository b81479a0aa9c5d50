/*
 * Memory of a GPU that one process shares with another (cudaIpc…).
 *
 *   ipc importer-first | exporter-first   both processes, and which of them ends first
 *   ipc export                            prints a handle and waits for the end of its input
 *   ipc import HANDLE                     says whether it can be opened, and what is in it
 *
 * Each process runs in an image of its own: CUDA does not survive a fork.
 */
#include <cstring>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.cuh"

static const size_t SIZES[] = {(size_t)1 << 20, (size_t)37 << 20}; /* words */
enum { BLOCKS = 2, FROM = 50, TO = 51 };

struct Offer {
    cudaIpcMemHandle_t blocks[BLOCKS];
    cudaIpcEventHandle_t filled;
};

static void require(bool condition, const char *what)
{
    if (!condition) {
        printf("failed: %s\n", what);
        exit(1);
    }
}

static void wait_for_end_of_the_other()
{
    char nothing;
    require(read(FROM, &nothing, 1) == 0, "the other process ends without another word");
}

static void exporter(bool ends_first)
{
    uint32_t *blocks[BLOCKS];
    Offer offer;
    cudaIpcMemHandle_t inner;
    cudaEvent_t filled;
    char done;
    CHECK(cudaSetDevice(0));
    CHECK(cudaEventCreateWithFlags(&filled, cudaEventInterprocess | cudaEventDisableTiming));
    for (int i = 0; i < BLOCKS; i++) {
        CHECK(cudaMalloc((void **)&blocks[i], 4 * SIZES[i]));
        ramp<<<256, 256>>>(blocks[i], SIZES[i], 1000 * (i + 1));
        CHECK(cudaIpcGetMemHandle(&offer.blocks[i], blocks[i]));
        CHECK(cudaIpcGetMemHandle(&inner, blocks[i] + SIZES[i] / 2));
        printf("exporter: block %d, handle of its middle is %s\n", i,
               memcmp(&inner, &offer.blocks[i], sizeof inner) ? "another" : "the same");
    }
    CHECK(cudaEventRecord(filled));
    CHECK(cudaIpcGetEventHandle(&offer.filled, filled));
    fflush(stdout);
    require(write(TO, &offer, sizeof offer) == sizeof offer, "the offer is sent");
    require(read(FROM, &done, 1) == 1, "the importer is done");
    if (!ends_first)
        wait_for_end_of_the_other();
    for (int i = 0; i < BLOCKS; i++)
        printf("exporter: block %d, %llu wrong words\n", i, wrong_words(blocks[i], SIZES[i], 1000 * (i + 1) + 7));
    fflush(stdout);
    /* It takes the memory with it. To free it and go on, while the other has it open, is undefined. */
    if (ends_first)
        return;
    for (int i = 0; i < BLOCKS; i++)
        CHECK(cudaFree(blocks[i]));
    CHECK(cudaMalloc((void **)&blocks[0], 4 * SIZES[1]));
    ramp<<<256, 256>>>(blocks[0], SIZES[1], 5);
    printf("exporter: new block, %llu wrong words\n", wrong_words(blocks[0], SIZES[1], 5));
    CHECK(cudaFree(blocks[0]));
    fflush(stdout);
}

static void importer(bool ends_first)
{
    uint32_t *blocks[BLOCKS], *again;
    Offer offer;
    cudaEvent_t filled;
    CHECK(cudaSetDevice(0));
    size_t got = 0;
    while (got < sizeof offer) {
        ssize_t part = read(FROM, (char *)&offer + got, sizeof offer - got);
        require(part > 0, "the offer arrives");
        got += part;
    }
    CHECK(cudaIpcOpenEventHandle(&filled, offer.filled));
    CHECK(cudaStreamWaitEvent(NULL, filled, 0));
    for (int i = 0; i < BLOCKS; i++) {
        CHECK(cudaIpcOpenMemHandle((void **)&blocks[i], offer.blocks[i], cudaIpcMemLazyEnablePeerAccess));
        printf("importer: block %d, %llu wrong words\n", i, wrong_words(blocks[i], SIZES[i], 1000 * (i + 1)));
    }
    CHECK(cudaIpcOpenMemHandle((void **)&again, offer.blocks[1], cudaIpcMemLazyEnablePeerAccess));
    printf("importer: opened again at %s address\n", again == blocks[1] ? "the same" : "another");
    CHECK(cudaIpcCloseMemHandle(again));
    for (int i = 0; i < BLOCKS; i++)
        ramp<<<256, 256>>>(blocks[i], SIZES[i], 1000 * (i + 1) + 7);
    cudaPointerAttributes of;
    CHECK(cudaPointerGetAttributes(&of, blocks[1] + 100));
    printf("importer: type %d, device %d\n", (int)of.type, of.device);
    printf("importer: free of imported memory: %s\n", cudaGetErrorName(cudaFree(blocks[0])));
    (void)cudaGetLastError();
    CHECK(cudaDeviceSynchronize());
    fflush(stdout);
    require(write(TO, "d", 1) == 1, "the exporter is told");
    if (!ends_first) {
        wait_for_end_of_the_other();
        for (int i = 0; i < BLOCKS; i++)
            printf("importer, alone: block %d, %llu wrong words\n", i, wrong_words(blocks[i], SIZES[i], 1000 * (i + 1) + 7));
    }
    for (int i = 0; i < BLOCKS; i++)
        CHECK(cudaIpcCloseMemHandle(blocks[i]));
    printf("importer: closed once more: %s\n", cudaGetErrorName(cudaIpcCloseMemHandle(blocks[1])));
    CHECK(cudaEventDestroy(filled));
    fflush(stdout);
}

static pid_t start(const char *role, const char *order, int from, int to)
{
    pid_t child = fork();
    if (child == 0) {
        if (dup2(from, FROM) == FROM && dup2(to, TO) == TO)
            execl("/proc/self/exe", "ipc", role, order, (char *)NULL);
        _exit(127);
    }
    return child;
}

static int both(const char *order)
{
    int there[2], back[2], failed = 0;
    require(!pipe2(there, O_CLOEXEC) && !pipe2(back, O_CLOEXEC), "pipe2");
    pid_t children[] = {start("exporter", order, back[0], there[1]), start("importer", order, there[0], back[1])};
    close(there[0]), close(there[1]), close(back[0]), close(back[1]);
    for (pid_t child : children) {
        int status;
        failed |= waitpid(child, &status, 0) != child || status != 0;
    }
    printf("%s\n", failed ? "a process failed" : "done");
    return failed;
}

static int export_one()
{
    uint32_t *block;
    cudaIpcMemHandle_t handle;
    CHECK(cudaSetDevice(0));
    CHECK(cudaMalloc((void **)&block, 4 * SIZES[1]));
    ramp<<<256, 256>>>(block, SIZES[1], 3);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaIpcGetMemHandle(&handle, block));
    printf("handle ");
    for (size_t i = 0; i < sizeof handle; i++)
        printf("%02x", ((unsigned char *)&handle)[i]);
    printf("\n");
    fflush(stdout);
    while (getchar() != EOF) {}
    CHECK(cudaFree(block));
    return 0;
}

static int import_one(const char *hex)
{
    uint32_t *block;
    cudaIpcMemHandle_t handle;
    for (size_t i = 0; i < sizeof handle; i++) {
        unsigned byte;
        require(sscanf(hex + 2 * i, "%2x", &byte) == 1, "a handle of 128 digits");
        ((unsigned char *)&handle)[i] = (unsigned char)byte;
    }
    CHECK(cudaSetDevice(0));
    cudaError_t opened = cudaIpcOpenMemHandle((void **)&block, handle, cudaIpcMemLazyEnablePeerAccess);
    printf("cudaIpcOpenMemHandle: %s\n", cudaGetErrorName(opened));
    if (opened == cudaSuccess) {
        printf("%llu wrong words\n", wrong_words(block, SIZES[1], 3));
        CHECK(cudaIpcCloseMemHandle(block));
    }
    return 0;
}

int main(int count, char **words)
{
    const char *what = count > 1 ? words[1] : "", *with = count > 2 ? words[2] : "";
    if (!strcmp(what, "exporter"))
        exporter(!strcmp(with, "exporter-first"));
    else if (!strcmp(what, "importer"))
        importer(!strcmp(with, "importer-first"));
    else if (!strcmp(what, "export"))
        return export_one();
    else if (!strcmp(what, "import") && strlen(with) == 2 * sizeof(cudaIpcMemHandle_t))
        return import_one(with);
    else
        return both(what);
    return 0;
}
