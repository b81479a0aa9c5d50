//! THE table: every driver function that the shim takes part in, once.
//!
//! One row is `name(parameters) => subject::body(parameters it needs);` with the exact exported name and the C types of
//! `cuda.h`. From it come the exported trampoline, the slot of the real function, the routing of `dlsym` and
//! `cuGetProcAddress`, and the list that `gpupool_hook_names` gives. A row without a body does not compile.
//!
//! Every body also gets [`Real`](super::Real), the real call with the program's own arguments, before the parameters.
//! Enum parameters are `c_int`: a newer program may pass a value that an older header does not know, and a Rust enum
//! holding such a value would be undefined behaviour.
//!
//! The 32-bit functions that came before the `_v2` ones (`cuMemAlloc`, `cuMemFree`, …) have no row, so they reach the
//! driver untouched, on every route.

/// Calls the given macro with all rows.
macro_rules! for_each_hook {
    ($with:ident) => {
        $with! {
            // Resolvers.
            cuGetProcAddress(symbol: *const c_char, pfn: *mut *mut c_void, version: c_int, flags: u64)
                => resolve::proc_address(pfn);
            cuGetProcAddress_v2(symbol: *const c_char, pfn: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int)
                => resolve::proc_address(pfn);

            // Device memory that the pool may answer.
            cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytes: usize) => memory::allocate(dptr, bytes);
            cuMemAllocPitch_v2(dptr: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize, element: c_uint)
                => memory::allocate_pitch(dptr, pitch, width, height, element);
            cuMemFree_v2(dptr: CUdeviceptr) => memory::free(dptr);

            // Questions about device memory.
            cuMemGetInfo_v2(free: *mut usize, total: *mut usize) => query::memory_info(free, total);
            cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) => query::total_memory(bytes, device);
            cuPointerGetAttribute(data: *mut c_void, attribute: c_int, ptr: CUdeviceptr)
                => query::pointer_attribute(data, attribute, ptr);
            cuPointerGetAttributes(count: c_uint, attributes: *mut c_int, data: *mut *mut c_void, ptr: CUdeviceptr)
                => query::pointer_attributes(count, attributes, data, ptr);
            cuMemGetAddressRange_v2(base: *mut CUdeviceptr, size: *mut usize, dptr: CUdeviceptr)
                => query::address_range(base, size, dptr);

            // Sharing with other processes.
            cuIpcGetMemHandle(handle: *mut CUipcMemHandle, dptr: CUdeviceptr) => ipc::export(dptr);

            // Contexts: who exists, so that a free knows whom to wait for and a destroyed context gives its blocks back.
            cuInit(flags: c_uint) => context::init();
            cuDevicePrimaryCtxRetain(ctx: *mut CUcontext, device: CUdevice) => context::retain(ctx, device);
            cuDevicePrimaryCtxRelease(device: CUdevice) => context::release(device);
            cuDevicePrimaryCtxRelease_v2(device: CUdevice) => context::release(device);
            cuDevicePrimaryCtxReset(device: CUdevice) => context::reset(device);
            cuDevicePrimaryCtxReset_v2(device: CUdevice) => context::reset(device);
            cuCtxCreate(ctx: *mut CUcontext, flags: c_uint, device: CUdevice) => context::create(ctx, device);
            cuCtxCreate_v2(ctx: *mut CUcontext, flags: c_uint, device: CUdevice) => context::create(ctx, device);
            cuCtxCreate_v3(ctx: *mut CUcontext, affinity: *mut c_void, count: c_int, flags: c_uint, device: CUdevice)
                => context::create(ctx, device);
            cuCtxCreate_v4(ctx: *mut CUcontext, params: *mut c_void, flags: c_uint, device: CUdevice)
                => context::create(ctx, device);
            cuCtxDestroy(ctx: CUcontext) => context::destroy(ctx);
            cuCtxDestroy_v2(ctx: CUcontext) => context::destroy(ctx);
            cuCtxSetCurrent(ctx: CUcontext) => context::switched();
            cuCtxPushCurrent(ctx: CUcontext) => context::switched();
            cuCtxPushCurrent_v2(ctx: CUcontext) => context::switched();
            cuCtxPopCurrent(ctx: *mut CUcontext) => context::switched();
            cuCtxPopCurrent_v2(ctx: *mut CUcontext) => context::switched();

            // Stream capture: while one is under way nothing of ours may synchronise.
            cuStreamBeginCapture(stream: CUstream) => stream::begin(stream);
            cuStreamBeginCapture_ptsz(stream: CUstream) => stream::begin(stream);
            cuStreamBeginCapture_v2(stream: CUstream, mode: c_int) => stream::begin(stream);
            cuStreamBeginCapture_v2_ptsz(stream: CUstream, mode: c_int) => stream::begin(stream);
            cuStreamBeginCaptureToGraph(stream: CUstream, graph: CUgraph, dependencies: *const c_void, data: *const c_void,
                count: usize, mode: c_int) => stream::begin(stream);
            cuStreamBeginCaptureToGraph_ptsz(stream: CUstream, graph: CUgraph, dependencies: *const c_void,
                data: *const c_void, count: usize, mode: c_int) => stream::begin(stream);
            cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) => stream::end(stream);
            cuStreamEndCapture_ptsz(stream: CUstream, graph: *mut CUgraph) => stream::end(stream);
            cuStreamDestroy(stream: CUstream) => stream::destroy(stream);
            cuStreamDestroy_v2(stream: CUstream) => stream::destroy(stream);

            // Calls that take device memory of their own: when the driver has none left because freed runs of the pool
            // hold it, the pool gives them back and the call is made again.
            cuMemAllocManaged(dptr: *mut CUdeviceptr, bytes: usize, flags: c_uint) => retry::after_trim();
            cuMemCreate(handle: *mut u64, size: usize, prop: *const c_void, flags: u64) => retry::after_trim();
            cuMemAllocAsync(dptr: *mut CUdeviceptr, bytes: usize, stream: CUstream) => retry::after_trim();
            cuMemAllocAsync_ptsz(dptr: *mut CUdeviceptr, bytes: usize, stream: CUstream) => retry::after_trim();
            cuMemAllocFromPoolAsync(dptr: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream)
                => retry::after_trim();
            cuMemAllocFromPoolAsync_ptsz(dptr: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream)
                => retry::after_trim();
            cuArrayCreate_v2(array: *mut CUarray, descriptor: *const c_void) => retry::after_trim();
            cuArray3DCreate_v2(array: *mut CUarray, descriptor: *const c_void) => retry::after_trim();
            cuMipmappedArrayCreate(array: *mut CUmipmappedArray, descriptor: *const c_void, levels: c_uint)
                => retry::after_trim();
            cuModuleLoad(module: *mut CUmodule, path: *const c_char) => retry::after_trim();
            cuModuleLoadData(module: *mut CUmodule, image: *const c_void) => retry::after_trim();
            cuModuleLoadDataEx(module: *mut CUmodule, image: *const c_void, count: c_uint, options: *mut c_int,
                values: *mut *mut c_void) => retry::after_trim();
            cuModuleLoadFatBinary(module: *mut CUmodule, image: *const c_void) => retry::after_trim();
            cuLibraryLoadData(library: *mut CUlibrary, code: *const c_void, jit: *mut c_int, jit_values: *mut *mut c_void,
                jit_count: c_uint, options: *mut c_int, values: *mut *mut c_void, count: c_uint) => retry::after_trim();
            cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: u64) => retry::after_trim();
            cuGraphInstantiateWithParams(exec: *mut CUgraphExec, graph: CUgraph, params: *mut c_void)
                => retry::after_trim();
            cuCtxSetLimit(limit: c_int, value: usize) => retry::after_trim();
        }
    };
}
pub(crate) use for_each_hook;
