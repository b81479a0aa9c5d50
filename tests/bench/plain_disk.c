/*
 * plain_disk FOLDER MIB: how fast a disk takes and gives bytes where nothing else is done with them: direct I/O of a MiB at a time, several threads with a file
 * of their own each, and a queue of 32 of each thread's; and the same by 32 threads that write and read one MiB at a time, as a container may forbid io_uring.
 * Files are made within the time and are on the disk at its end, as those of a suspension are. Prints GB/s; the files are removed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 1 << 20, QUEUE = 32, RINGS = 4, MOST = 32 };

static const char *folder;
static size_t bytes_each;
static int is_write;
static atomic_int failed;

/* Names the step that failed first; the others end by themselves. */
static void *fails(const char *what, int number)
{
    if (!atomic_exchange(&failed, number ? number : EIO))
        fprintf(stderr, "plain_disk: %s: %s\n", what, strerror(number));
    return NULL;
}

static void path_of(int number, char *path) { snprintf(path, 4096, "%s/plain-%d", folder, number); }

static int opened(int number)
{
    char path[4096];
    path_of(number, path);
    return open(path, is_write ? O_WRONLY | O_CREAT | O_TRUNC | O_DIRECT : O_RDONLY | O_DIRECT, 0600);
}

/* Blocks for all that are under way at once. */
static char *buffers;

/* Filled before the clock starts, with bytes that no disk makes less of. */
static int fill(void)
{
    size_t bytes = (size_t)RINGS * QUEUE * BLOCK;
    uint64_t state = 88172645463325252u;
    buffers = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffers == MAP_FAILED)
        return 0;
    for (size_t at = 0; at < bytes; at += 8) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        memcpy(buffers + at, &state, 8);
    }
    return 1;
}

typedef struct {
    int descriptor;
    unsigned *head, *tail, *mask, *array, *done_head, *done_tail, *done_mask;
    struct io_uring_sqe *entries;
    struct io_uring_cqe *done;
} Ring;

static int has_ring(Ring *ring)
{
    struct io_uring_params p = {0};
    ring->descriptor = (int)syscall(SYS_io_uring_setup, QUEUE, &p);
    if (ring->descriptor < 0)
        return 0;
    size_t submitted = p.sq_off.array + p.sq_entries * sizeof(unsigned);
    size_t completed = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    int shared = PROT_READ | PROT_WRITE;
    char *sq = mmap(NULL, submitted, shared, MAP_SHARED | MAP_POPULATE, ring->descriptor, IORING_OFF_SQ_RING);
    char *cq = mmap(NULL, completed, shared, MAP_SHARED | MAP_POPULATE, ring->descriptor, IORING_OFF_CQ_RING);
    ring->entries = mmap(NULL, p.sq_entries * sizeof *ring->entries, shared, MAP_SHARED | MAP_POPULATE, ring->descriptor, IORING_OFF_SQES);
    if (sq == MAP_FAILED || cq == MAP_FAILED || (void *)ring->entries == MAP_FAILED)
        return 0;
    ring->head = (unsigned *)(sq + p.sq_off.head), ring->tail = (unsigned *)(sq + p.sq_off.tail);
    ring->mask = (unsigned *)(sq + p.sq_off.ring_mask), ring->array = (unsigned *)(sq + p.sq_off.array);
    ring->done_head = (unsigned *)(cq + p.cq_off.head), ring->done_tail = (unsigned *)(cq + p.cq_off.tail);
    ring->done_mask = (unsigned *)(cq + p.cq_off.ring_mask), ring->done = (struct io_uring_cqe *)(cq + p.cq_off.cqes);
    return 1;
}

static void submit(Ring *ring, int file, char *buffer, size_t at, unsigned slot)
{
    unsigned tail = *ring->tail, index = tail & *ring->mask;
    ring->entries[index] = (struct io_uring_sqe){
        .opcode = is_write ? IORING_OP_WRITE : IORING_OP_READ,
        .fd = file,
        .addr = (uint64_t)(uintptr_t)(buffer + (size_t)slot * BLOCK),
        .len = BLOCK,
        .off = at,
        .user_data = slot,
    };
    ring->array[index] = index;
    __atomic_store_n(ring->tail, tail + 1, __ATOMIC_RELEASE);
}

static void *by_ring(void *argument)
{
    int file = opened((int)(intptr_t)argument), waiting = 0;
    size_t next = 0;
    unsigned unsent = 0;
    Ring ring;
    char *buffer = buffers + (size_t)(intptr_t)argument * QUEUE * BLOCK;
    if (file < 0)
        return fails("a file", errno);
    if (!has_ring(&ring))
        return fails("io_uring", errno);
    for (unsigned slot = 0; slot < QUEUE && next < bytes_each; slot++, next += BLOCK, waiting++, unsent++)
        submit(&ring, file, buffer, next, slot);
    while (waiting && !atomic_load(&failed)) {
        long sent = syscall(SYS_io_uring_enter, ring.descriptor, unsent, 1, IORING_ENTER_GETEVENTS, NULL, 0);
        if (sent < 0 && errno != EINTR)
            return fails("io_uring_enter", errno);
        unsent -= sent > 0 ? (unsigned)sent : 0;
        unsigned head = *ring.done_head, tail = __atomic_load_n(ring.done_tail, __ATOMIC_ACQUIRE);
        for (; head != tail; head++) {
            struct io_uring_cqe *one = &ring.done[head & *ring.done_mask];
            waiting--;
            if (one->res != BLOCK)
                return fails(is_write ? "a write" : "a read", one->res < 0 ? -one->res : EIO);
            if (next < bytes_each) {
                submit(&ring, file, buffer, next, (unsigned)one->user_data);
                next += BLOCK, waiting++, unsent++;
            }
        }
        __atomic_store_n(ring.done_head, head, __ATOMIC_RELEASE);
    }
    if (is_write && fdatasync(file))
        return fails("fdatasync", errno);
    close(ring.descriptor);
    close(file);
    return NULL;
}

static void *by_hand(void *argument)
{
    int file = opened((int)(intptr_t)argument);
    char *buffer = buffers + (size_t)(intptr_t)argument * BLOCK;
    if (file < 0)
        return fails("a file", errno);
    for (size_t at = 0; at < bytes_each && !atomic_load(&failed); at += BLOCK) {
        ssize_t done = is_write ? pwrite(file, buffer, BLOCK, (off_t)at) : pread(file, buffer, BLOCK, (off_t)at);
        if (done != BLOCK)
            return fails(is_write ? "a write" : "a read", done < 0 ? errno : EIO);
    }
    if (is_write && fdatasync(file))
        return fails("fdatasync", errno);
    close(file);
    return NULL;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* GB/s of all of them together; 0 where one could not. */
static double rate(int write, void *(*work)(void *), int count, size_t bytes)
{
    pthread_t all[MOST];
    is_write = write, bytes_each = bytes / (size_t)count / BLOCK * BLOCK;
    atomic_store(&failed, 0);
    double since = now();
    for (int i = 0; i < count; i++)
        if (pthread_create(&all[i], NULL, work, (void *)(intptr_t)i))
            exit(2);
    for (int i = 0; i < count; i++)
        pthread_join(all[i], NULL);
    return atomic_load(&failed) ? 0 : (double)bytes_each * count / (now() - since) / 1e9;
}

static void remove_all(void)
{
    char path[4096];
    for (int i = 0; i < MOST; i++) {
        path_of(i, path);
        unlink(path);
    }
}

int main(int count, char **arguments)
{
    double rings[2] = {0}, hands[2];
    if (count != 3 || atoi(arguments[2]) < MOST) {
        fprintf(stderr, "plain_disk FOLDER MIB, %d at least\n", MOST);
        return 2;
    }
    folder = arguments[1];
    size_t bytes = (size_t)atoi(arguments[2]) << 20;
    if (!fill()) {
        fprintf(stderr, "plain_disk: no memory for %d blocks\n", RINGS * QUEUE);
        return 1;
    }
    rings[0] = rate(1, by_ring, RINGS, bytes);
    if (rings[0] > 0)
        rings[1] = rate(0, by_ring, RINGS, bytes);
    remove_all();
    hands[0] = rate(1, by_hand, MOST, bytes);
    hands[1] = hands[0] > 0 ? rate(0, by_hand, MOST, bytes) : 0;
    remove_all();
    printf("measured: {\"rings\": {\"write\": %.3f, \"read\": %.3f}, \"threads\": {\"write\": %.3f, \"read\": %.3f}}\n", rings[0], rings[1], hands[0],
           hands[1]);
    return !(hands[0] > 0 || rings[0] > 0);
}
