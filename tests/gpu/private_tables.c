// To be preloaded: which functions of the driver's private tables (cuGetExportTable) does a program call, and when?
//
// The library turns some of its shortcuts off once such a table was taken, since work may be submitted through it. Which functions a
// math library then calls decides whether that is needed. Every table that begins with its own size is copied; the entries of the
// copy count and go on to the driver's. private_tables_mark(NAME) prints what was called since the last mark, one line a function.
//
//   cc -shared -fPIC -O2 -o private_tables.so private_tables.c -ldl; LD_PRELOAD=$PWD/private_tables.so python3 ...
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifndef __x86_64__
#error "the entries of the copies are written for x86-64"
#endif

enum { TABLES = 32, SLOTS = 256, MAPPED = 4096 };
#define WORD(text) #text
#define NUMBER(text) WORD(text)

struct table {
    unsigned char id[16];
    const void *real;
    // Who took it first.
    const char *taker;
    uint64_t copy[SLOTS];
    uint64_t function[SLOTS];
    atomic_ulong calls[SLOTS];
    unsigned long told[SLOTS];
    int slots;
};
static struct table tables[TABLES];
static atomic_int taken;
static atomic_int busy;

// Every entry pushes its own number and goes to the common part, which keeps all registers that arguments are passed in.
__asm__(".text\n.p2align 4\n.globl private_table_entries\n.hidden private_table_entries\nprivate_table_entries:\n"
        ".set number, 0\n.rept 8192\n.p2align 4\npushq $number\n.set number, number + 1\njmp private_table_entry\n.endr\n"
        "private_table_entry:\n"
        "pushq %rax\npushq %rdi\npushq %rsi\npushq %rdx\npushq %rcx\npushq %r8\npushq %r9\npushq %r10\n"
        "subq $128, %rsp\n"
        "movups %xmm0, (%rsp)\nmovups %xmm1, 16(%rsp)\nmovups %xmm2, 32(%rsp)\nmovups %xmm3, 48(%rsp)\n"
        "movups %xmm4, 64(%rsp)\nmovups %xmm5, 80(%rsp)\nmovups %xmm6, 96(%rsp)\nmovups %xmm7, 112(%rsp)\n"
        "movq 192(%rsp), %rdi\ncall private_table_called\nmovq %rax, 192(%rsp)\n"
        "movups (%rsp), %xmm0\nmovups 16(%rsp), %xmm1\nmovups 32(%rsp), %xmm2\nmovups 48(%rsp), %xmm3\n"
        "movups 64(%rsp), %xmm4\nmovups 80(%rsp), %xmm5\nmovups 96(%rsp), %xmm6\nmovups 112(%rsp), %xmm7\n"
        "addq $128, %rsp\n"
        "popq %r10\npopq %r9\npopq %r8\npopq %rcx\npopq %rdx\npopq %rsi\npopq %rdi\npopq %rax\n"
        "ret\n");
extern const char private_table_entries[];

__attribute__((visibility("hidden"), used)) uint64_t private_table_called(uint64_t number) {
    struct table *table = &tables[number / SLOTS];
    atomic_fetch_add(&table->calls[number % SLOTS], 1);
    return table->function[number % SLOTS];
}

// Whether this may be called: it lies in a loaded file, as a function of the driver does.
static int is_code(uint64_t word) {
    Dl_info info;
    return word > MAPPED && dladdr((void *)word, &info) && info.dli_fname && strstr(info.dli_fname, "libcuda");
}

// The tables of which nobody knows what the math libraries call in them, by the first four bytes of their names.
static int is_counted(const unsigned char *id) {
    static const unsigned char counted[][4] = {{0x21, 0x31, 0x8c, 0x60}, {0x6e, 0x16, 0x3f, 0xbe}, {0x17, 0x34, 0xdc, 0x26}};
    for (unsigned at = 0; at < sizeof counted / sizeof *counted; ++at)
        if (!memcmp(counted[at], id, 4)) return 1;
    return 0;
}

static int (*real_export_table)(const void **, const unsigned char *);

static int export_table(const void **out, const unsigned char *id) {
    int answer = real_export_table(out, id);
    if (answer || !out || !*out || !id) return answer;
    const uint64_t *real = *out;
    uint64_t bytes = real[0];
    while (atomic_exchange(&busy, 1)) {
    }
    int count = taken, known = 0;
    while (known < count && memcmp(tables[known].id, id, 16)) ++known;
    // A table without its size in front is handed on as it is; so are the runtime's own, which it checks by what is in them.
    int is_sized = bytes >= 16 && bytes <= SLOTS * 8 && bytes % 8 == 0 && is_counted(id);
    if (known == count && count < TABLES) {
        struct table *table = &tables[count];
        memcpy(table->id, id, 16);
        table->real = real;
        Dl_info info;
        table->taker = dladdr(__builtin_return_address(0), &info) && info.dli_fname ? info.dli_fname : "unknown";
        table->slots = is_sized ? (int)(bytes / 8) : 0;
        for (int slot = 0; slot < table->slots; ++slot) {
            table->function[slot] = real[slot];
            int is_function = slot > 0 && is_code(real[slot]);
            table->copy[slot] =
                is_function ? (uint64_t)private_table_entries + 16ul * (count * SLOTS + slot) : real[slot];
        }
        taken = count + 1;
    }
    if (known < taken && tables[known].slots) *out = tables[known].copy;
    atomic_store(&busy, 0);
    return answer;
}

static int (*real_proc_address)(const char *, void **, int, uint64_t, void *);
static int (*real_proc_address_v1)(const char *, void **, int, uint64_t);
static int proc_address(const char *, void **, int, uint64_t, void *);
static int proc_address_v1(const char *, void **, int, uint64_t);

// The counting function in place of one of the driver's.
static void *in_place_of(const char *name, void *found) {
    if (!found || !name) return found;
    if (!strcmp(name, "cuGetExportTable")) return real_export_table = (__typeof__(real_export_table))found, (void *)export_table;
    if (!strcmp(name, "cuGetProcAddress_v2")) return real_proc_address = (__typeof__(real_proc_address))found, (void *)proc_address;
    if (!strcmp(name, "cuGetProcAddress")) return real_proc_address_v1 = (__typeof__(real_proc_address_v1))found, (void *)proc_address_v1;
    return found;
}

static int proc_address(const char *name, void **out, int version, uint64_t flags, void *status) {
    int answer = real_proc_address(name, out, version, flags, status);
    if (!answer && out && name) {
        // By this name the newest form is had.
        if (!strcmp(name, "cuGetProcAddress") && version >= 12000) name = "cuGetProcAddress_v2";
        *out = in_place_of(name, *out);
    }
    return answer;
}

static int proc_address_v1(const char *name, void **out, int version, uint64_t flags) {
    int answer = real_proc_address_v1(name, out, version, flags);
    if (!answer && out && name && strcmp(name, "cuGetProcAddress")) *out = in_place_of(name, *out);
    return answer;
}

void *dlsym(void *handle, const char *name) {
    static void *(*real)(void *, const char *);
    if (!real) real = (__typeof__(real))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (!real) real = (__typeof__(real))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    return in_place_of(name, real(handle, name));
}

void private_tables_mark(const char *name) {
    for (int at = 0; at < taken; ++at) {
        struct table *table = &tables[at];
        const unsigned char *id = table->id;
        char printed[40];
        snprintf(printed, sizeof printed, "%02X%02X%02X%02X-%02X%02X-%02X%02X-%02X%02X-%02X%02X%02X%02X%02X%02X", id[3], id[2], id[1],
                 id[0], id[5], id[4], id[7], id[6], id[8], id[9], id[10], id[11], id[12], id[13], id[14], id[15]);
        Dl_info info;
        uint64_t base = dladdr((void *)table->real, &info) ? (uint64_t)info.dli_fbase : 0;
        printf("%s: table %s, %d words, taken by %s\n", name, printed, table->slots, table->taker);
        for (int slot = 1; slot < table->slots; ++slot) {
            unsigned long calls = table->calls[slot];
            if (calls > table->told[slot])
                printf("%s: table %s word %d (driver +0x%lx): %lu calls\n", name, printed, slot, table->function[slot] - base,
                       calls - table->told[slot]);
            table->told[slot] = calls;
        }
    }
    fflush(stdout);
}
