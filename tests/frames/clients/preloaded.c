/* Asks for frames before main and at the very end, from within a Python that knows nothing of it. */
#include <stdio.h>
#include <sys/types.h>

ssize_t frames_count(void);

__attribute__((constructor)) static void before(void) { fprintf(stderr, "before: %zd\n", frames_count()); }

__attribute__((destructor)) static void after(void) { fprintf(stderr, "after: %zd\n", frames_count()); }
