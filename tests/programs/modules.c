#define _GNU_SOURCE
/*
 * modules CASE: code loaded where it does not run, too much of it, and with a heap that is too small for it; beside another
 * process that takes memory of the GPU meanwhile.
 */
#include "diagnosed.h"
#include "simulator.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#define HEAD ".version 7.0\n.target sm_70\n.address_size 64\n"

static const char WITH_MALLOC[] = HEAD
    ".extern .func (.param .b64 func_retval0) malloc\n(\n\t.param .b64 malloc_param_0\n)\n;\n"
    ".visible .entry build_tree(.param .u64 build_tree_0)\n{\n\tret;\n}\n"
    ".visible .entry drop_tree(.param .u64 drop_tree_0)\n{\n\tret;\n}\n";
/* A name that contains the word is not the function. */
static const char WITHOUT_MALLOC[] = HEAD ".visible .entry my_malloc_test(.param .u64 my_malloc_test_0)\n{\n\tret;\n}\n";
static const char LARGE[] = HEAD ".global .align 4 .b8 table[50331648];\n.visible .entry look_up()\n{\n\tret;\n}\n";

NAMED CUmodule load_tree(const char *image);
NAMED CUmodule load_tree(const char *image)
{
    CUmodule module;
    CHECK(cuModuleLoadData(&module, image));
    return module;
}

NAMED void warm_up_on_first_gpu(void);
NAMED void warm_up_on_first_gpu(void)
{
    CHECK(cuCtxSetCurrent(retain(0)));
    load_code();
}

NAMED void ask_for_heap(size_t bytes);
NAMED void ask_for_heap(size_t bytes)
{
    SHOW(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, bytes));
}

static pid_t neighbour;
static int to_neighbour;

/* Another process, without the pool, takes memory of the GPU, and keeps it until this one is done. */
static void neighbour_comes(void)
{
    int done[2], ready[2];
    char byte;
    REQUIRE(pipe(done) == 0 && pipe(ready) == 0);
    neighbour = fork();
    REQUIRE(neighbour >= 0);
    if (neighbour == 0) {
        unsetenv("LD_PRELOAD");
        dup2(done[0], 0);
        dup2(ready[1], 1);
        close(done[1]);
        execl("/proc/self/exe", "modules", "neighbour", (char *)NULL);
        _exit(127);
    }
    close(done[0]);
    close(ready[1]);
    REQUIRE(read(ready[0], &byte, 1) == 1);
    close(ready[0]);
    to_neighbour = done[1];
}

static void be_a_neighbour(void)
{
    CUdeviceptr memory;
    char byte;
    CHECK(cuInit(0));
    CHECK(cuCtxSetCurrent(retain(0)));
    CHECK(cuMemAlloc_v2(&memory, 100 * MIB));
    REQUIRE(write(1, "r", 1) == 1 && read(0, &byte, 1) == 0);
    _exit(0);
}

extern int cuArrayCreate_v2(void **array, const void *descriptor);

static void *takes_memory(void *context)
{
    struct {
        size_t width, height;
        unsigned format, channels;
    } sheet = {4096, 4096, 0x20 /* CU_AD_FORMAT_FLOAT */, 1};
    void *array;
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuArrayCreate_v2(&array, &sheet));
    return NULL;
}

/* Another thread of this process takes 64 MiB of the GPU. */
static void thread_comes(void)
{
    pthread_t thread;
    CUcontext context;
    CHECK(cuCtxGetCurrent(&context));
    REQUIRE(pthread_create(&thread, NULL, takes_memory, context) == 0 && pthread_join(thread, NULL) == 0);
}

static void show_heap(void)
{
    size_t heap = 0;
    CHECK(cuCtxGetLimit(&heap, CU_LIMIT_MALLOC_HEAP_SIZE));
    printf("heap: %zu KiB\n", heap / KIB);
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "";
    if (strcmp(name, "neighbour") == 0)
        be_a_neighbour();
    CHECK(cuInit(0));
    if (strcmp(name, "elsewhere") == 0) {
        warm_up_on_first_gpu();
        compute_on(3);
        return 0;
    }
    if (strcmp(name, "there") == 0) {
        warm_up_on_first_gpu();
        compute_on(0);
        return 0;
    }
    if (strcmp(name, "library") == 0 || strcmp(name, "library_in_time") == 0) {
        /* As the runtime does: a library needs no context. */
        void *library;
        CHECK(cuLibraryLoadData(&library, WITH_MALLOC, NULL, NULL, 0, NULL, NULL, 0));
        ask_for_heap(64 * MIB);
        CHECK(cuCtxSetCurrent(retain(3)));
        if (strcmp(name, "library_in_time") == 0)
            ask_for_heap(64 * MIB);
        compute_on(3);
        CHECK(cuLibraryUnload(library));
        return 0;
    }
    start_on(0);
    if (strcmp(name, "malloc") == 0) {
        load_tree(WITH_MALLOC);
    } else if (strcmp(name, "no_malloc") == 0) {
        load_tree(WITHOUT_MALLOC);
    } else if (strcmp(name, "malloc_in_time") == 0) {
        ask_for_heap(64 * MIB);
        load_tree(WITH_MALLOC);
    } else if (strcmp(name, "malloc_default_chosen") == 0) {
        ask_for_heap(8 * MIB);
        load_tree(WITH_MALLOC);
    } else if (strcmp(name, "limit") == 0) {
        load_tree(WITHOUT_MALLOC);
        ask_for_heap(64 * MIB);
    } else if (strcmp(name, "limit_as_it_is") == 0) {
        load_tree(WITHOUT_MALLOC);
        ask_for_heap(8 * MIB);
    } else if (strcmp(name, "large") == 0) {
        CHECK(cuModuleUnload(load_tree(LARGE)));
    } else if (strcmp(name, "large_in_turn") == 0) {
        for (int i = 0; i < 3; i++)
            CHECK(cuModuleUnload(load_tree(LARGE)));
    } else if (strcmp(name, "beside_thread") == 0) {
        Simulator simulator = find_simulator();
        REQUIRE(simulator.after);
        simulator.after("cuModuleLoadData", thread_comes);
        load_tree(WITHOUT_MALLOC);
    } else if (strcmp(name, "beside") == 0) {
        Simulator simulator = find_simulator();
        int status;
        REQUIRE(simulator.after);
        simulator.after("cuModuleLoadData", neighbour_comes);
        load_tree(WITHOUT_MALLOC);
        REQUIRE(neighbour > 0 && close(to_neighbour) == 0 && waitpid(neighbour, &status, 0) == neighbour && status == 0);
    } else if (strcmp(name, "file") == 0) {
        CUmodule module;
        void *library;
        FILE *file = fopen("tree.ptx", "w");
        REQUIRE(file && fputs(WITH_MALLOC, file) >= 0 && fclose(file) == 0);
        CHECK(cuModuleLoad(&module, "tree.ptx"));
        REQUIRE(remove("tree.ptx") == 0);
        CHECK(cuModuleUnload(module));
        CHECK(cuLibraryLoadData(&library, WITHOUT_MALLOC, NULL, NULL, 0, NULL, NULL, 0));
        CHECK(cuLibraryUnload(library));
    } else {
        printf("modules: no case %s\n", name);
        return 2;
    }
    show_heap();
    return 0;
}
