/* A library with a thread of its own, as data loaders have: the thread makes a context, and Python knows nothing of it. */
#include "diagnosed.h"

NAMED void *decode_images(void *unused);
NAMED void *decode_images(void *unused)
{
    CHECK(cuCtxSetCurrent(retain(0)));
    return unused;
}

NAMED void start_and_join(void);
NAMED void start_and_join(void)
{
    in_thread(decode_images, NULL);
}
