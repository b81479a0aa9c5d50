/* modules CASE: code loaded where it does not run, too much of it, and with a heap that is too small for it. */
#include "diagnosed.h"

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

static void show_heap(void)
{
    size_t heap = 0;
    CHECK(cuCtxGetLimit(&heap, CU_LIMIT_MALLOC_HEAP_SIZE));
    printf("heap: %zu KiB\n", heap / KIB);
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "";
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
    } else if (strcmp(name, "limit") == 0) {
        load_tree(WITHOUT_MALLOC);
        ask_for_heap(64 * MIB);
    } else if (strcmp(name, "large") == 0) {
        CHECK(cuModuleUnload(load_tree(LARGE)));
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
