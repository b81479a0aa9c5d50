/*
 * One line of JSON with all that the C interface tells: statistics, places, labels, and how many bytes of these blocks lie at each place.
 */
#ifndef NUMBERS_H
#define NUMBERS_H

#include "control.h"

static inline void place_name(int place, char *out, size_t room)
{
    snprintf(out, room, place < 0 ? "host%d" : "gpu%d", place < 0 ? -1 - place : place);
}

static inline void print_numbers(const CUdeviceptr *blocks, int count)
{
    Control control = find_control(RTLD_DEFAULT);
    gpupool_statistics s = {.size = sizeof s};
    gpupool_place places[16];
    gpupool_label_usage labels[16];
    gpupool_piece pieces[64];
    unsigned long long by_place[16] = {0};
    char name[32];
    REQUIRE(control.statistics(&s) == 0);
    printf("{\"live_blocks\":%llu,\"live_bytes\":%llu,\"peak_live_bytes\":%llu,\"held_on_gpus\":%llu,\"held_on_host\":%llu,"
           "\"allocations\":%llu,\"reuses\":%llu,\"spilled_bytes\":%llu,\"trimmed_bytes\":%llu,\"places\":{",
           (unsigned long long)s.live_blocks, (unsigned long long)s.live_bytes, (unsigned long long)s.peak_live_bytes,
           (unsigned long long)s.held_on_gpus, (unsigned long long)s.held_on_host, (unsigned long long)s.allocations,
           (unsigned long long)s.reuses, (unsigned long long)s.spilled_bytes, (unsigned long long)s.trimmed_bytes);
    size_t known = control.places(places, 16);
    REQUIRE(known <= 16);
    for (int at = 0; at < count; at++) {
        size_t room = 64;
        REQUIRE(control.pieces((const void *)blocks[at], SIZE_MAX, pieces, &room) == 0 && room <= 64);
        for (size_t piece = 0; piece < room; piece++)
            for (size_t place = 0; place < known; place++)
                by_place[place] += places[place].place == pieces[piece].place ? pieces[piece].bytes : 0;
    }
    for (size_t at = 0; at < known; at++) {
        place_name(places[at].place, name, sizeof name);
        printf("%s\"%s\":{\"used\":%llu,\"held\":%llu,\"peak_used\":%llu,\"limit\":%llu,\"bytes\":%llu}", at ? "," : "", name,
               (unsigned long long)places[at].used, (unsigned long long)places[at].held,
               (unsigned long long)places[at].peak_used, (unsigned long long)places[at].limit, by_place[at]);
    }
    printf("},\"labels\":{");
    size_t named = control.labels(labels, 16);
    for (size_t at = 0; at < named && at < 16; at++)
        printf("%s\"%s\":{\"blocks\":%llu,\"bytes\":%llu,\"near\":%llu,\"on_peers\":%llu,\"on_host\":%llu}", at ? "," : "",
               labels[at].label, (unsigned long long)labels[at].blocks, (unsigned long long)labels[at].bytes,
               (unsigned long long)labels[at].at_home, (unsigned long long)labels[at].on_peers,
               (unsigned long long)labels[at].on_host);
    printf("}}\n");
}

#endif
