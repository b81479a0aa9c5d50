/*
 * A call of the simulated driver that stands at its end until it is let go, by orders: hold CALL (the next one of this name), stands
 * (whether one does) and let.
 */
#ifndef STANDING_H
#define STANDING_H

#include "simulator.h"

#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

static atomic_int stands, goes_on;
static char held_call[64];

static void stand(void)
{
    atomic_store(&stands, 1);
    while (!atomic_load(&goes_on))
        usleep(1000);
    atomic_store(&stands, 0);
}

/* Whether the line is one of these orders, which is answered then. */
static int orders_a_call(const char *line)
{
    if (sscanf(line, "hold %63s", held_call) == 1) {
        atomic_store(&goes_on, 0);
        find_simulator().after(held_call, stand);
        puts("it will");
    } else if (strcmp(line, "stands") == 0) {
        puts(atomic_load(&stands) ? "yes" : "no");
    } else if (strcmp(line, "let") == 0) {
        atomic_store(&goes_on, 1);
        puts("it does");
    } else {
        return 0;
    }
    return 1;
}

#endif
