/*
 * What reaches physical memory without a call of the driver, and is there on this machine: network adapters (ibv_reg_mr), gdrcopy,
 * GPUDirect Storage. Whether they take mapped memory, and what they then read after a remap, needs such an adapter.
 */
#include "probe.h"

enum { RDMA_SUPPORTED = 116, RDMA_WITH_VMM = 110, CHUNK = 2 * MIB };

CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr pointer, size_t bytes, int type, unsigned long long flags);

static int loads(const char *name)
{
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    printf("%s: %s\n", name, library ? "there" : "not there");
    return library != NULL;
}

static int opens(const char *path)
{
    int there = access(path, F_OK) == 0;
    printf("%s: %s\n", path, there ? "there" : "not there");
    return there;
}

int main(void)
{
    int supported = 0, with_vmm = 0, adapters = 0, file = -1;
    begin_probe(30);
    CHECK(cuDeviceGetAttribute(&supported, RDMA_SUPPORTED, 0));
    CHECK(cuDeviceGetAttribute(&with_vmm, RDMA_WITH_VMM, 0));
    printf("GPUDirect RDMA: %d, with mapped memory: %d\n", supported, with_vmm);
    if (loads("libibverbs.so.1")) {
        void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
        void **(*list)(int *);
        *(void ***)&list = dlsym(library, "ibv_get_device_list");
        if (list)
            list(&adapters);
        printf("adapters of libibverbs: %d\n", adapters);
    }
    opens("/dev/infiniband/uverbs0");
    opens("/sys/module/nvidia_peermem");
    int gdrcopy = loads("libgdrapi.so.2") && opens("/dev/gdrdrv");
    loads("libcufile.so.0");
    opens("/dev/nvidia-fs0");
    /* What an adapter would be given for memory of the pool. */
    CUdeviceptr at = reserve(CHUNK);
    uint64_t first = physical(0, CHUNK), second = physical(0, CHUNK);
    map_here(at, first, CHUNK, 1);
    CUresult result = cuMemGetHandleForAddressRange(&file, at, CHUNK, 1, 0);
    printf("a DMA buffer of mapped memory: %d\n", result);
    if (result == CUDA_SUCCESS) {
        CUmemAccessDesc access_by_gpu = {{ON_DEVICE, 0}, READ_WRITE};
        CUresult unmapped = cuMemUnmap(at, CHUNK), mapped = cuMemMap(at, CHUNK, 0, second, 0);
        CUresult granted = cuMemSetAccess(at, CHUNK, &access_by_gpu, 1);
        printf("unmapped, mapped and granted while the buffer is open: %d %d %d\n", unmapped, mapped, granted);
        close(file);
    }
    if (!adapters)
        not_asked("ibv_reg_mr of mapped memory, and over a remap", "there is no adapter");
    if (!gdrcopy)
        not_asked("a mapping of gdrcopy over a remap", "there is no gdrcopy");
    return end_probe();
}
