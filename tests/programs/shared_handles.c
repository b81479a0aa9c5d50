/*
 * shared_handles: a process fills GPU 0 with memory of its own, and gives the last piece, by its descriptor, to another
 * process, which maps it for GPU 0 alone, as it was asked for, checks it, and copies it to GPU 1's context.
 */
#define _GNU_SOURCE
#include "kernels.h"
#include "vmm.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES (30 * MIB)
#define START 4242u

static void send_descriptor(int socket, int descriptor)
{
    char control[CMSG_SPACE(sizeof descriptor)] = {0}, byte = 0;
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof descriptor);
    memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    REQUIRE(sendmsg(socket, &message, 0) == 1);
}

static int receive_descriptor(int socket)
{
    int descriptor;
    char control[CMSG_SPACE(sizeof descriptor)], byte;
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    REQUIRE(recvmsg(socket, &message, 0) == 1);
    memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
    return descriptor;
}

static int import(int socket)
{
    uint64_t handle, flags[2];
    CUdeviceptr block;
    int descriptor = receive_descriptor(socket);
    CUcontext home = start_on(0);
    CHECK(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)descriptor, POSIX_FD));
    close(descriptor);
    CUdeviceptr address = map_for(0, handle, BYTES);
    CHECK(cuMemRelease(handle));
    printf("imported: %llu wrong\n", (unsigned long long)wrong_on_host(address, BYTES, START));
    for (int d = 0; d < 2; d++)
        CHECK(cuMemGetAccess(&flags[d], &(CUmemLocation){ON_DEVICE, d}, address));
    printf("access: %llu %llu\n", (unsigned long long)flags[0], (unsigned long long)flags[1]);
    CUcontext other = start_on(1);
    CHECK(cuMemAlloc_v2(&block, BYTES));
    CHECK(cuMemcpyPeer(block, other, address, home, BYTES));
    printf("in GPU 1's context: %llu wrong\n", (unsigned long long)wrong_on_host(block, BYTES, START));
    CHECK(cuMemUnmap(address, BYTES));
    CHECK(cuMemAddressFree(address, BYTES));
    return 0;
}

int main(void)
{
    int sockets[2], descriptor, status = -1;
    uint64_t handles[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    pid_t child = fork();
    if (child == 0)
        return import(sockets[1]);
    start_on(0);
    Kernels kernels = load_kernels();
    CUmemAllocationProp properties = on_device(0);
    SHOW(cuMemCreate(&handles[0], BYTES, &properties, 0));
    SHOW(cuMemCreate(&handles[1], BYTES, &properties, 0));
    CUdeviceptr address = map_for(0, handles[1], BYTES);
    iota(&kernels, NULL, address, BYTES / 4, START);
    CHECK(cuCtxSynchronize());
    CHECK(cuMemExportToShareableHandle(&descriptor, handles[1], POSIX_FD, 0));
    fflush(stdout);
    send_descriptor(sockets[0], descriptor);
    REQUIRE(waitpid(child, &status, 0) == child);
    printf("importer: %d\n", status);
    return 0;
}
