/*
 * asks_by_library LIBRARY: this library (asks.c) asks for two blocks, of which the second does not fit on its GPU, and for a handle that
 * does not fit there either.
 */
#include "program.h"

#include <dlfcn.h>

int main(int argc, char **argv)
{
    REQUIRE(argc == 2);
    start_on(0);
    void *library = dlopen(argv[1], RTLD_NOW);
    REQUIRE(library);
    CUresult (*block)(size_t), (*handle)(size_t);
    *(void **)&block = dlsym(library, "ask_for_block");
    *(void **)&handle = dlsym(library, "ask_for_handle");
    REQUIRE(block && handle);
    for (int i = 0; i < 2; i++)
        printf("block of 150 MiB: %d\n", block(150 * MIB));
    printf("handle of 150 MiB: %d\n", handle(150 * MIB));
    return 0;
}
