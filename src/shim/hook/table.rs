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
                => resolve::proc_address(symbol, pfn);
            cuGetProcAddress_v2(symbol: *const c_char, pfn: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int)
                => resolve::proc_address(symbol, pfn);
            cuGetExportTable(table: *mut *const c_void, id: *const [u8; 16]) => resolve::export_table(id);

            // Device memory that the pool may answer.
            cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytes: usize) => memory::allocate(dptr, bytes);
            cuMemAllocPitch_v2(dptr: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize, element: c_uint)
                => memory::allocate_pitch(dptr, pitch, width, height, element);
            cuMemFree_v2(dptr: CUdeviceptr) => memory::free(dptr);

            // Stream-ordered memory: the driver's, and the pool's where the driver has none.
            cuMemAllocAsync(dptr: *mut CUdeviceptr, bytes: usize, stream: CUstream)
                => stream_ordered::allocate(dptr, bytes, stream);
            cuMemAllocAsync_ptsz(dptr: *mut CUdeviceptr, bytes: usize, stream: CUstream)
                => stream_ordered::allocate(dptr, bytes, stream);
            cuMemAllocFromPoolAsync(dptr: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream)
                => stream_ordered::allocate_from(dptr, bytes, pool, stream);
            cuMemAllocFromPoolAsync_ptsz(dptr: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream)
                => stream_ordered::allocate_from(dptr, bytes, pool, stream);
            cuMemFreeAsync(dptr: CUdeviceptr, stream: CUstream) => stream_ordered::free(dptr, stream);
            cuMemFreeAsync_ptsz(dptr: CUdeviceptr, stream: CUstream) => stream_ordered::free(dptr, stream);
            cuMemPoolCreate(pool: *mut CUmemoryPool, properties: *const PoolProperties)
                => stream_ordered::pool_created(pool, properties);
            cuMemPoolDestroy(pool: CUmemoryPool) => stream_ordered::pool_destroyed(pool);

            // The program's own virtual memory management: what its GPU has no room for is placed elsewhere.
            cuMemAddressReserve(dptr: *mut CUdeviceptr, bytes: usize, alignment: usize, address: CUdeviceptr, flags: u64)
                => pass::through();
            cuMemAddressFree(dptr: CUdeviceptr, bytes: usize) => mapping::unmap(dptr, bytes);
            cuMemCreate(handle: *mut u64, bytes: usize, properties: *const Properties, flags: u64)
                => mapping::create(handle, bytes, properties, flags);
            cuMemRelease(handle: u64) => handle::release(handle);
            cuMemMap(dptr: CUdeviceptr, bytes: usize, offset: usize, handle: u64, flags: u64)
                => handle::map(handle, dptr, bytes, offset, flags);
            cuMemUnmap(dptr: CUdeviceptr, bytes: usize) => mapping::unmap(dptr, bytes);
            cuMemSetAccess(dptr: CUdeviceptr, bytes: usize, list: *const Access, count: usize)
                => mapping::set_access(dptr, bytes, list, count);
            cuMemGetAccess(flags: *mut u64, location: *const Location, dptr: CUdeviceptr)
                => mapping::get_access(flags, location, dptr);
            cuMemGetAllocationPropertiesFromHandle(properties: *mut Properties, handle: u64)
                => handle::properties(handle, properties);
            cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void) => mapping::retain(handle, address);
            cuMemImportFromShareableHandle(handle: *mut u64, shared: *mut c_void, kind: c_int) => mapping::import(handle);
            cuMemExportToShareableHandle(shared: *mut c_void, handle: u64, kind: c_int, flags: u64)
                => handle::export(handle, shared, kind, flags);

            // Questions about device memory.
            cuMemGetInfo_v2(free: *mut usize, total: *mut usize) => query::memory_info(free, total);
            cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) => query::total_memory(bytes, device);
            cuPointerGetAttribute(data: *mut c_void, attribute: c_int, ptr: CUdeviceptr)
                => query::pointer_attribute(data, attribute, ptr);
            cuPointerGetAttributes(count: c_uint, attributes: *mut c_int, data: *mut *mut c_void, ptr: CUdeviceptr)
                => query::pointer_attributes(count, attributes, data, ptr);
            cuPointerSetAttribute(value: *const c_void, attribute: c_int, ptr: CUdeviceptr)
                => query::set_pointer_attribute(value, attribute, ptr);
            cuMemGetAddressRange_v2(base: *mut CUdeviceptr, size: *mut usize, dptr: CUdeviceptr)
                => query::address_range(base, size, dptr);

            // Pinned host memory that the pool may answer, and questions about it.
            cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: c_uint) => host::allocate(pointer, bytes, flags);
            cuMemAllocHost_v2(pointer: *mut *mut c_void, bytes: usize) => host::allocate_plain(pointer, bytes);
            cuMemFreeHost(pointer: *mut c_void) => host::free(pointer);
            cuMemHostRegister_v2(pointer: *mut c_void, bytes: usize, flags: c_uint) => host::register(pointer, bytes, flags);
            cuMemHostUnregister(pointer: *mut c_void) => host::unregister(pointer);
            cuMemHostGetDevicePointer_v2(device: *mut CUdeviceptr, pointer: *mut c_void, flags: c_uint)
                => host::device_pointer(device, pointer);
            cuMemHostGetFlags(flags: *mut c_uint, pointer: *mut c_void) => host::flags(pointer);

            // Sharing with other processes.
            cuIpcGetMemHandle(handle: *mut CUipcMemHandle, dptr: CUdeviceptr) => ipc::export(handle, dptr);
            cuIpcOpenMemHandle(dptr: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint) => ipc::open(dptr, handle, flags);
            cuIpcOpenMemHandle_v2(dptr: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint) => ipc::open(dptr, handle, flags);
            cuIpcCloseMemHandle(dptr: CUdeviceptr) => ipc::close(dptr);
            cuMemGetHandleForAddressRange(handle: *mut c_void, dptr: CUdeviceptr, bytes: usize, kind: c_int, flags: u64)
                => ipc::descriptor(dptr, bytes);

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
            cuGLCtxCreate(ctx: *mut CUcontext, flags: c_uint, device: CUdevice) => context::create(ctx, device);
            cuGLCtxCreate_v2(ctx: *mut CUcontext, flags: c_uint, device: CUdevice) => context::create(ctx, device);
            cuVDPAUCtxCreate(ctx: *mut CUcontext, flags: c_uint, device: CUdevice, vdp: c_uint, resolver: *mut c_void)
                => context::create(ctx, device);
            cuVDPAUCtxCreate_v2(ctx: *mut CUcontext, flags: c_uint, device: CUdevice, vdp: c_uint, resolver: *mut c_void)
                => context::create(ctx, device);
            cuCtxDestroy(ctx: CUcontext) => context::destroy(ctx);
            cuCtxDestroy_v2(ctx: CUcontext) => context::destroy(ctx);
            cuCtxDetach(ctx: CUcontext) => context::detach(ctx);
            cuGreenCtxCreate(green: *mut *mut c_void, resources: *mut c_void, device: CUdevice, flags: c_uint)
                => context::green_create(green, device);
            cuGreenCtxDestroy(green: *mut c_void) => context::green_destroy(green);
            cuCtxFromGreenCtx(ctx: *mut CUcontext, green: *mut c_void) => context::from_green(ctx, green);
            cuCtxSetCurrent(ctx: CUcontext) => current::switched_to(ctx);
            cuCtxPushCurrent(ctx: CUcontext) => current::switched_to(ctx);
            cuCtxPushCurrent_v2(ctx: CUcontext) => current::switched_to(ctx);
            cuCtxPopCurrent(ctx: *mut CUcontext) => current::switched();
            cuCtxPopCurrent_v2(ctx: *mut CUcontext) => current::switched();

            // Streams: whoever makes one uses the context that is current then. Capture: while one is under way nothing of ours may synchronise.
            cuStreamBeginCapture(stream: CUstream) => stream::begin(stream);
            cuStreamBeginCapture_ptsz(stream: CUstream) => stream::begin(stream);
            cuStreamBeginCapture_v2(stream: CUstream, mode: c_int) => stream::begin(stream);
            cuStreamBeginCapture_v2_ptsz(stream: CUstream, mode: c_int) => stream::begin(stream);
            cuStreamBeginCaptureToGraph(stream: CUstream, graph: CUgraph, dependencies: *const c_void, data: *const c_void,
                count: usize, mode: c_int) => stream::begin(stream);
            cuStreamBeginCaptureToGraph_ptsz(stream: CUstream, graph: CUgraph, dependencies: *const c_void,
                data: *const c_void, count: usize, mode: c_int) => stream::begin(stream);
            cuStreamBeginRecaptureToGraph(stream: CUstream, mode: c_int, graph: CUgraph, callback: *mut c_void,
                data: *mut c_void) => stream::begin(stream);
            cuStreamBeginRecaptureToGraph_ptsz(stream: CUstream, mode: c_int, graph: CUgraph, callback: *mut c_void,
                data: *mut c_void) => stream::begin(stream);
            cuStreamBeginCaptureToCig(stream: CUstream, params: *mut c_void) => stream::begin(stream);
            cuStreamBeginCaptureToCig_ptsz(stream: CUstream, params: *mut c_void) => stream::begin(stream);
            cuStreamEndCaptureToCig(stream: CUstream) => stream::end(stream);
            cuStreamEndCaptureToCig_ptsz(stream: CUstream) => stream::end(stream);
            cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) => stream::end(stream);
            cuStreamEndCapture_ptsz(stream: CUstream, graph: *mut CUgraph) => stream::end(stream);
            cuStreamCreate(stream: *mut CUstream, flags: c_uint) => stream::created();
            cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int) => stream::created();
            cuStreamDestroy(stream: CUstream) => stream::destroy(stream);
            cuStreamDestroy_v2(stream: CUstream) => stream::destroy(stream);

            // Calls that take device memory of their own: when the driver has none left because freed runs of the pool
            // hold it, the pool gives them back and the call is made again.
            cuMemAllocManaged(dptr: *mut CUdeviceptr, bytes: usize, flags: c_uint)
                => memory::allocate_managed(dptr, bytes, flags);
            cuArrayCreate_v2(array: *mut CUarray, descriptor: *const c_void) => retry::after_trim();
            cuArray3DCreate_v2(array: *mut CUarray, descriptor: *const c_void) => retry::after_trim();
            cuMipmappedArrayCreate(array: *mut CUmipmappedArray, descriptor: *const c_void, levels: c_uint)
                => retry::after_trim();
            cuGraphInstantiate(exec: *mut CUgraphExec, graph: CUgraph, error_node: *mut c_void, log: *mut c_char, bytes: usize)
                => retry::instantiated(exec, graph);
            cuGraphInstantiate_v2(exec: *mut CUgraphExec, graph: CUgraph, error_node: *mut c_void, log: *mut c_char,
                bytes: usize) => retry::instantiated(exec, graph);
            cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: u64) => retry::instantiated(exec, graph);
            cuGraphInstantiateWithParams(exec: *mut CUgraphExec, graph: CUgraph, params: *mut c_void)
                => retry::instantiated(exec, graph);
            cuGraphInstantiateWithParams_ptsz(exec: *mut CUgraphExec, graph: CUgraph, params: *mut c_void)
                => retry::instantiated(exec, graph);
            cuGraphUpload(exec: CUgraphExec, stream: CUstream) => retry::after_trim();
            cuGraphUpload_ptsz(exec: CUgraphExec, stream: CUstream) => retry::after_trim();

            // Modules: what is loaded where, by whom, and what it costs.
            cuModuleLoad(module: *mut CUmodule, path: *const c_char) => module::load_file(module, path);
            cuModuleLoadData(module: *mut CUmodule, image: *const c_void) => module::load_data(module, image);
            cuModuleLoadDataEx(module: *mut CUmodule, image: *const c_void, count: c_uint, options: *mut c_int,
                values: *mut *mut c_void) => module::load_data(module, image);
            cuModuleLoadFatBinary(module: *mut CUmodule, image: *const c_void) => module::load_data(module, image);
            cuModuleUnload(module: CUmodule) => module::unload(module);
            cuLibraryLoadData(library: *mut CUlibrary, code: *const c_void, jit: *mut c_int, jit_values: *mut *mut c_void,
                jit_count: c_uint, options: *mut c_int, values: *mut *mut c_void, count: c_uint) => module::load_data(library, code);
            cuLibraryLoadFromFile(library: *mut CUlibrary, path: *const c_char, jit: *mut c_int,
                jit_values: *mut *mut c_void, jit_count: c_uint, options: *mut c_int, values: *mut *mut c_void,
                count: c_uint) => module::load_file(library, path);
            cuLibraryUnload(library: CUlibrary) => module::unload(library);
            cuLinkComplete(state: *mut c_void, cubin: *mut *mut c_void, size: *mut usize) => module::link_complete(size);
            cuCtxSetLimit(limit: c_int, value: usize) => module::set_limit(limit, value);
            cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint) => context::peer_enabled(peer);

            // Use: whether a context was needed shows only here.
            cuLaunchKernel(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
                block_y: c_uint, block_z: c_uint, shared: c_uint, stream: CUstream, parameters: *mut *mut c_void,
                extra: *mut *mut c_void) => launch::kernel(function, grid_x, grid_y, grid_z, stream, parameters, extra);
            cuLaunchKernel_ptsz(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
                block_y: c_uint, block_z: c_uint, shared: c_uint, stream: CUstream, parameters: *mut *mut c_void,
                extra: *mut *mut c_void) => launch::kernel(function, grid_x, grid_y, grid_z, stream, parameters, extra);
            cuLaunchKernelEx(config: *const c_void, function: CUfunction, parameters: *mut *mut c_void, extra: *mut *mut c_void)
                => launch::configured(config, function, parameters, extra);
            cuLaunchKernelEx_ptsz(config: *const c_void, function: CUfunction, parameters: *mut *mut c_void, extra: *mut *mut c_void)
                => launch::configured(config, function, parameters, extra);
            cuLaunchCooperativeKernel(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
                block_y: c_uint, block_z: c_uint, shared: c_uint, stream: CUstream, parameters: *mut *mut c_void)
                => launch::cooperative(function, grid_x, grid_y, grid_z, stream, parameters);
            cuLaunchCooperativeKernel_ptsz(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
                block_y: c_uint, block_z: c_uint, shared: c_uint, stream: CUstream, parameters: *mut *mut c_void)
                => launch::cooperative(function, grid_x, grid_y, grid_z, stream, parameters);
            cuLaunchCooperativeKernelMultiDevice(list: *mut c_void, devices: c_uint, flags: c_uint) => submit::launched();
            cuLaunch(function: CUfunction) => submit::launched();
            cuLaunchGrid(function: CUfunction, width: c_int, height: c_int) => submit::launched();
            cuLaunchGridAsync(function: CUfunction, width: c_int, height: c_int, stream: CUstream) => submit::launched();
            cuGraphLaunch(exec: CUgraphExec, stream: CUstream) => launch::graph(exec, stream);
            cuGraphLaunch_ptsz(exec: CUgraphExec, stream: CUstream) => launch::graph(exec, stream);
            cuMemcpy(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize) => submit::moved_at_once(dst, src, bytes);
            cuMemcpy_ptds(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize) => submit::moved_at_once(dst, src, bytes);
            cuMemcpyAsync(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream) => submit::moved(dst, src, bytes);
            cuMemcpyAsync_ptsz(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream) => submit::moved(dst, src, bytes);
            cuMemcpyHtoD_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize) => submit::moved_at_once(dst, src, bytes);
            cuMemcpyHtoD_v2_ptds(dst: CUdeviceptr, src: *const c_void, bytes: usize) => submit::moved_at_once(dst, src, bytes);
            cuMemcpyHtoDAsync_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize, stream: CUstream) => submit::moved(dst, src, bytes);
            cuMemcpyHtoDAsync_v2_ptsz(dst: CUdeviceptr, src: *const c_void, bytes: usize, stream: CUstream) => submit::moved(dst, src, bytes);
            cuMemcpyDtoH_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize) => submit::read_back(dst, src, bytes);
            cuMemcpyDtoH_v2_ptds(dst: *mut c_void, src: CUdeviceptr, bytes: usize) => submit::read_back(dst, src, bytes);
            cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize, stream: CUstream) => submit::moved(dst, src, bytes);
            cuMemcpyDtoHAsync_v2_ptsz(dst: *mut c_void, src: CUdeviceptr, bytes: usize, stream: CUstream) => submit::moved(dst, src, bytes);
            cuMemcpyDtoD_v2(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize) => submit::moved_at_once(dst, src, bytes);
            cuMemcpyDtoD_v2_ptds(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize) => submit::moved_at_once(dst, src, bytes);
            cuMemcpyDtoDAsync_v2(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream) => submit::moved(dst, src, bytes);
            cuMemcpyDtoDAsync_v2_ptsz(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream) => submit::moved(dst, src, bytes);
            cuMemcpyPeer(dst: CUdeviceptr, to: CUcontext, src: CUdeviceptr, from: CUcontext, bytes: usize) => context::copied_between_blocks(dst, src, bytes);
            cuMemcpyPeer_ptds(dst: CUdeviceptr, to: CUcontext, src: CUdeviceptr, from: CUcontext, bytes: usize) => context::copied_between_blocks(dst, src, bytes);
            cuMemcpyPeerAsync(dst: CUdeviceptr, to: CUcontext, src: CUdeviceptr, from: CUcontext, bytes: usize, stream: CUstream) => context::copied_between_later(dst, src, bytes);
            cuMemcpyPeerAsync_ptsz(dst: CUdeviceptr, to: CUcontext, src: CUdeviceptr, from: CUcontext, bytes: usize, stream: CUstream) => context::copied_between_later(dst, src, bytes);
            cuMemcpy2D_v2(copy: *const c_void) => submit::rows_at_once(copy);
            cuMemcpy2D_v2_ptds(copy: *const c_void) => submit::rows_at_once(copy);
            cuMemcpy2DUnaligned_v2(copy: *const c_void) => submit::rows_at_once(copy);
            cuMemcpy2DUnaligned_v2_ptds(copy: *const c_void) => submit::rows_at_once(copy);
            cuMemcpy3D_v2(copy: *const c_void) => submit::boxes_at_once(copy);
            cuMemcpy3D_v2_ptds(copy: *const c_void) => submit::boxes_at_once(copy);
            cuMemcpy3DPeer(copy: *const c_void) => context::copied_between();
            cuMemcpy3DPeer_ptds(copy: *const c_void) => context::copied_between();
            cuMemcpy2DAsync_v2(copy: *const c_void, stream: CUstream) => submit::moved_rows(copy);
            cuMemcpy2DAsync_v2_ptsz(copy: *const c_void, stream: CUstream) => submit::moved_rows(copy);
            cuMemcpy3DAsync_v2(copy: *const c_void, stream: CUstream) => submit::moved_boxes(copy);
            cuMemcpy3DAsync_v2_ptsz(copy: *const c_void, stream: CUstream) => submit::moved_boxes(copy);
            cuMemcpy3DPeerAsync(copy: *const c_void, stream: CUstream) => context::copied_between();
            cuMemcpy3DPeerAsync_ptsz(copy: *const c_void, stream: CUstream) => context::copied_between();
            cuMemcpyBatchAsync(dst: *mut CUdeviceptr, src: *mut CUdeviceptr, sizes: *mut usize, count: usize,
                attributes: *mut c_void, indices: *mut usize, attribute_count: usize, failed: *mut usize, stream: CUstream)
                => submit::moved_batch(dst, src, sizes, count);
            cuMemcpyBatchAsync_ptsz(dst: *mut CUdeviceptr, src: *mut CUdeviceptr, sizes: *mut usize, count: usize,
                attributes: *mut c_void, indices: *mut usize, attribute_count: usize, failed: *mut usize, stream: CUstream)
                => submit::moved_batch(dst, src, sizes, count);
            cuMemcpyBatchAsync_v2(dst: *mut CUdeviceptr, src: *mut CUdeviceptr, sizes: *mut usize, count: usize,
                attributes: *mut c_void, indices: *mut usize, attribute_count: usize, stream: CUstream)
                => submit::moved_batch(dst, src, sizes, count);
            cuMemcpyBatchAsync_v2_ptsz(dst: *mut CUdeviceptr, src: *mut CUdeviceptr, sizes: *mut usize, count: usize,
                attributes: *mut c_void, indices: *mut usize, attribute_count: usize, stream: CUstream)
                => submit::moved_batch(dst, src, sizes, count);
            cuMemcpy3DBatchAsync(count: usize, list: *mut c_void, failed: *mut usize, flags: u64, stream: CUstream)
                => submit::copied();
            cuMemcpy3DBatchAsync_ptsz(count: usize, list: *mut c_void, failed: *mut usize, flags: u64, stream: CUstream)
                => submit::copied();
            cuMemcpy3DBatchAsync_v2(count: usize, list: *mut c_void, flags: u64, stream: CUstream)
                => submit::copied();
            cuMemcpy3DBatchAsync_v2_ptsz(count: usize, list: *mut c_void, flags: u64, stream: CUstream)
                => submit::copied();
            cuMemcpyWithAttributesAsync(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, attributes: *mut c_void,
                stream: CUstream) => submit::moved(dst, src, bytes);
            cuMemcpy3DWithAttributesAsync(copy: *mut c_void, flags: u64, stream: CUstream) => submit::copied();
            cuMemcpyWithAttributesAsync_ptsz(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, attributes: *mut c_void,
                stream: CUstream) => submit::moved(dst, src, bytes);
            cuMemcpy3DWithAttributesAsync_ptsz(copy: *mut c_void, flags: u64, stream: CUstream) => submit::copied();
            cuMemsetD8_v2(dst: CUdeviceptr, value: u8, count: usize) => submit::filled(dst, value, count);
            cuMemsetD8_v2_ptds(dst: CUdeviceptr, value: u8, count: usize) => submit::filled(dst, value, count);
            cuMemsetD8Async(dst: CUdeviceptr, value: u8, count: usize, stream: CUstream) => submit::filled_later(dst, value, count);
            cuMemsetD8Async_ptsz(dst: CUdeviceptr, value: u8, count: usize, stream: CUstream) => submit::filled_later(dst, value, count);
            cuMemsetD16_v2(dst: CUdeviceptr, value: u16, count: usize) => submit::filled(dst, value, count);
            cuMemsetD16_v2_ptds(dst: CUdeviceptr, value: u16, count: usize) => submit::filled(dst, value, count);
            cuMemsetD16Async(dst: CUdeviceptr, value: u16, count: usize, stream: CUstream) => submit::filled_later(dst, value, count);
            cuMemsetD16Async_ptsz(dst: CUdeviceptr, value: u16, count: usize, stream: CUstream) => submit::filled_later(dst, value, count);
            cuMemsetD32_v2(dst: CUdeviceptr, value: c_uint, count: usize) => submit::filled(dst, value, count);
            cuMemsetD32_v2_ptds(dst: CUdeviceptr, value: c_uint, count: usize) => submit::filled(dst, value, count);
            cuMemsetD32Async(dst: CUdeviceptr, value: c_uint, count: usize, stream: CUstream) => submit::filled_later(dst, value, count);
            cuMemsetD32Async_ptsz(dst: CUdeviceptr, value: c_uint, count: usize, stream: CUstream) => submit::filled_later(dst, value, count);
            cuMemsetD2D8_v2(dst: CUdeviceptr, pitch: usize, value: u8, width: usize, height: usize) => submit::filled_rows(dst, pitch, value, width, height);
            cuMemsetD2D8_v2_ptds(dst: CUdeviceptr, pitch: usize, value: u8, width: usize, height: usize) => submit::filled_rows(dst, pitch, value, width, height);
            cuMemsetD2D8Async(dst: CUdeviceptr, pitch: usize, value: u8, width: usize, height: usize, stream: CUstream)
                => submit::filled_rows_later(dst, pitch, value, width, height);
            cuMemsetD2D8Async_ptsz(dst: CUdeviceptr, pitch: usize, value: u8, width: usize, height: usize, stream: CUstream)
                => submit::filled_rows_later(dst, pitch, value, width, height);
            cuMemsetD2D16_v2(dst: CUdeviceptr, pitch: usize, value: u16, width: usize, height: usize) => submit::filled_rows(dst, pitch, value, width, height);
            cuMemsetD2D16_v2_ptds(dst: CUdeviceptr, pitch: usize, value: u16, width: usize, height: usize) => submit::filled_rows(dst, pitch, value, width, height);
            cuMemsetD2D16Async(dst: CUdeviceptr, pitch: usize, value: u16, width: usize, height: usize, stream: CUstream)
                => submit::filled_rows_later(dst, pitch, value, width, height);
            cuMemsetD2D16Async_ptsz(dst: CUdeviceptr, pitch: usize, value: u16, width: usize, height: usize, stream: CUstream)
                => submit::filled_rows_later(dst, pitch, value, width, height);
            cuMemsetD2D32_v2(dst: CUdeviceptr, pitch: usize, value: c_uint, width: usize, height: usize) => submit::filled_rows(dst, pitch, value, width, height);
            cuMemsetD2D32_v2_ptds(dst: CUdeviceptr, pitch: usize, value: c_uint, width: usize, height: usize) => submit::filled_rows(dst, pitch, value, width, height);
            cuMemsetD2D32Async(dst: CUdeviceptr, pitch: usize, value: c_uint, width: usize, height: usize, stream: CUstream)
                => submit::filled_rows_later(dst, pitch, value, width, height);
            cuMemsetD2D32Async_ptsz(dst: CUdeviceptr, pitch: usize, value: c_uint, width: usize, height: usize, stream: CUstream)
                => submit::filled_rows_later(dst, pitch, value, width, height);
            cuMemcpyAtoA_v2(dst: CUarray, dst_offset: usize, src: CUarray, src_offset: usize, bytes: usize) => submit::copied();
            cuMemcpyAtoA_v2_ptds(dst: CUarray, dst_offset: usize, src: CUarray, src_offset: usize, bytes: usize) => submit::copied();
            cuMemcpyAtoD_v2(dst: CUdeviceptr, src: CUarray, src_offset: usize, bytes: usize) => submit::copied_array(dst, bytes);
            cuMemcpyAtoD_v2_ptds(dst: CUdeviceptr, src: CUarray, src_offset: usize, bytes: usize) => submit::copied_array(dst, bytes);
            cuMemcpyAtoH_v2(dst: *mut c_void, src: CUarray, src_offset: usize, bytes: usize) => submit::copied();
            cuMemcpyAtoH_v2_ptds(dst: *mut c_void, src: CUarray, src_offset: usize, bytes: usize) => submit::copied();
            cuMemcpyDtoA_v2(dst: CUarray, dst_offset: usize, src: CUdeviceptr, bytes: usize) => submit::copied_array(src, bytes);
            cuMemcpyDtoA_v2_ptds(dst: CUarray, dst_offset: usize, src: CUdeviceptr, bytes: usize) => submit::copied_array(src, bytes);
            cuMemcpyHtoA_v2(dst: CUarray, dst_offset: usize, src: *const c_void, bytes: usize) => submit::copied();
            cuMemcpyHtoA_v2_ptds(dst: CUarray, dst_offset: usize, src: *const c_void, bytes: usize) => submit::copied();
            cuMemcpyAtoHAsync_v2(dst: *mut c_void, src: CUarray, src_offset: usize, bytes: usize, stream: CUstream)
                => submit::copied();
            cuMemcpyAtoHAsync_v2_ptsz(dst: *mut c_void, src: CUarray, src_offset: usize, bytes: usize, stream: CUstream)
                => submit::copied();
            cuMemcpyHtoAAsync_v2(dst: CUarray, dst_offset: usize, src: *const c_void, bytes: usize, stream: CUstream)
                => submit::copied();
            cuMemcpyHtoAAsync_v2_ptsz(dst: CUarray, dst_offset: usize, src: *const c_void, bytes: usize, stream: CUstream)
                => submit::copied();
            cuMemBatchDecompressAsync(list: *mut c_void, count: usize, flags: c_uint, failed: *mut usize, stream: CUstream)
                => submit::copied();
            cuMemBatchDecompressAsync_ptsz(list: *mut c_void, count: usize, flags: c_uint, failed: *mut usize, stream: CUstream)
                => submit::copied();
            cuStreamWriteValue32(stream: CUstream, address: CUdeviceptr, value: c_uint, flags: c_uint) => submit::worked();
            cuStreamWriteValue32_ptsz(stream: CUstream, address: CUdeviceptr, value: c_uint, flags: c_uint) => submit::worked();
            cuStreamWriteValue32_v2(stream: CUstream, address: CUdeviceptr, value: c_uint, flags: c_uint) => submit::worked();
            cuStreamWriteValue32_v2_ptsz(stream: CUstream, address: CUdeviceptr, value: c_uint, flags: c_uint) => submit::worked();
            cuStreamWriteValue64(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) => submit::worked();
            cuStreamWriteValue64_ptsz(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) => submit::worked();
            cuStreamWriteValue64_v2(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) => submit::worked();
            cuStreamWriteValue64_v2_ptsz(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) => submit::worked();
            cuStreamWaitValue32(stream: CUstream, address: CUdeviceptr, value: c_uint, flags: c_uint) => submit::worked();
            cuStreamWaitValue32_ptsz(stream: CUstream, address: CUdeviceptr, value: c_uint, flags: c_uint) => submit::worked();
            cuStreamWaitValue32_v2(stream: CUstream, address: CUdeviceptr, value: c_uint, flags: c_uint) => submit::worked();
            cuStreamWaitValue32_v2_ptsz(stream: CUstream, address: CUdeviceptr, value: c_uint, flags: c_uint) => submit::worked();
            cuStreamWaitValue64(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) => submit::worked();
            cuStreamWaitValue64_ptsz(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) => submit::worked();
            cuStreamWaitValue64_v2(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) => submit::worked();
            cuStreamWaitValue64_v2_ptsz(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) => submit::worked();
            cuStreamBatchMemOp(stream: CUstream, count: c_uint, list: *mut c_void, flags: c_uint) => submit::worked();
            cuStreamBatchMemOp_ptsz(stream: CUstream, count: c_uint, list: *mut c_void, flags: c_uint) => submit::worked();
            cuStreamBatchMemOp_v2(stream: CUstream, count: c_uint, list: *mut c_void, flags: c_uint) => submit::worked();
            cuStreamBatchMemOp_v2_ptsz(stream: CUstream, count: c_uint, list: *mut c_void, flags: c_uint) => submit::worked();
            cuSignalExternalSemaphoresAsync(list: *const c_void, parameters: *const c_void, count: c_uint, stream: CUstream)
                => submit::worked();
            cuSignalExternalSemaphoresAsync_ptsz(list: *const c_void, parameters: *const c_void, count: c_uint, stream: CUstream)
                => submit::worked();
            cuWaitExternalSemaphoresAsync(list: *const c_void, parameters: *const c_void, count: c_uint, stream: CUstream)
                => submit::worked();
            cuWaitExternalSemaphoresAsync_ptsz(list: *const c_void, parameters: *const c_void, count: c_uint, stream: CUstream)
                => submit::worked();
            cuStreamAttachMemAsync(stream: CUstream, dptr: CUdeviceptr, bytes: usize, flags: c_uint) => submit::worked();
            cuStreamAttachMemAsync_ptsz(stream: CUstream, dptr: CUdeviceptr, bytes: usize, flags: c_uint) => submit::worked();
            cuGraphicsMapResources(count: c_uint, resources: *mut c_void, stream: CUstream) => submit::worked();
            cuGraphicsMapResources_ptsz(count: c_uint, resources: *mut c_void, stream: CUstream) => submit::worked();
            cuGraphicsUnmapResources(count: c_uint, resources: *mut c_void, stream: CUstream) => submit::worked();
            cuGraphicsUnmapResources_ptsz(count: c_uint, resources: *mut c_void, stream: CUstream) => submit::worked();
            // No work of its own, but what it waits for may be another context's, and a free waits for that through it.
            cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) => submit::worked();
            cuStreamWaitEvent_ptsz(stream: CUstream, event: CUevent, flags: c_uint) => submit::worked();
            cuCtxWaitEvent(context: CUcontext, event: CUevent) => submit::worked();
            cuGreenCtxWaitEvent(green: *mut c_void, event: CUevent) => submit::worked();
            cuEventRecord(event: CUevent, stream: CUstream) => submit::worked();
            cuEventRecord_ptsz(event: CUevent, stream: CUstream) => submit::worked();
            cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: c_uint) => submit::worked();
            cuEventRecordWithFlags_ptsz(event: CUevent, stream: CUstream, flags: c_uint) => submit::worked();
            cuStreamAddCallback(stream: CUstream, callback: *mut c_void, data: *mut c_void, flags: c_uint) => submit::worked();
            cuStreamAddCallback_ptsz(stream: CUstream, callback: *mut c_void, data: *mut c_void, flags: c_uint) => submit::worked();

            // Only traced, so that a log at level trace has every call that concerns memory, contexts and captures. First: arrays
            // and the pools of stream-ordered memory.
            cuArrayDestroy(array: CUarray) => pass::through();
            cuMipmappedArrayDestroy(array: CUmipmappedArray) => pass::through();
            cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize) => pass::through();
            cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: c_int, value: *mut c_void) => pass::through();
            cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: c_int, value: *mut c_void) => pass::through();
            cuMemPoolSetAccess(pool: CUmemoryPool, list: *const c_void, count: usize) => pass::through();
            cuMemPoolGetAccess(flags: *mut c_int, pool: CUmemoryPool, location: *mut c_void) => pass::through();
            cuMemPoolExportToShareableHandle(handle: *mut c_void, pool: CUmemoryPool, kind: c_int, flags: u64)
                => pass::through();
            cuMemPoolImportFromShareableHandle(pool: *mut CUmemoryPool, handle: *mut c_void, kind: c_int, flags: u64)
                => pass::through();
            cuMemPoolExportPointer(data: *mut c_void, dptr: CUdeviceptr) => pass::through();
            cuMemPoolImportPointer(dptr: *mut CUdeviceptr, pool: CUmemoryPool, data: *mut c_void) => pass::through();
            cuDeviceGetMemPool(pool: *mut CUmemoryPool, device: CUdevice) => pass::through();
            cuDeviceSetMemPool(device: CUdevice, pool: CUmemoryPool) => pass::through();
            cuDeviceGetDefaultMemPool(pool: *mut CUmemoryPool, device: CUdevice) => pass::through();
            cuMemGetDefaultMemPool(pool: *mut CUmemoryPool, location: *mut c_void, kind: c_int) => pass::through();
            cuMemGetMemPool(pool: *mut CUmemoryPool, location: *mut c_void, kind: c_int) => pass::through();
            cuMemSetMemPool(location: *mut c_void, kind: c_int, pool: CUmemoryPool) => pass::through();

            // Virtual memory management that makes no memory: sparse arrays, multicast objects, logical endpoints.
            cuMemGetAllocationGranularity(granularity: *mut usize, prop: *const c_void, option: c_int) => pass::through();
            cuMemMapArrayAsync(list: *mut c_void, count: c_uint, stream: CUstream) => handle::map_arrays(list, count);
            cuMemMapArrayAsync_ptsz(list: *mut c_void, count: c_uint, stream: CUstream) => handle::map_arrays(list, count);
            cuMulticastCreate(handle: *mut u64, prop: *const c_void) => pass::through();
            cuMulticastAddDevice(handle: u64, device: CUdevice) => pass::through();
            cuMulticastBindMem(multicast: u64, offset: usize, handle: u64, from: usize, bytes: usize, flags: u64)
                => handle::bind_multicast(handle);
            cuMulticastBindMem_v2(multicast: u64, device: CUdevice, offset: usize, handle: u64, from: usize, bytes: usize, flags: u64)
                => handle::bind_multicast(handle);
            cuMulticastBindAddr(multicast: u64, offset: usize, dptr: CUdeviceptr, bytes: usize, flags: u64)
                => mapping::bind_multicast(dptr, bytes);
            cuMulticastBindAddr_v2(multicast: u64, device: CUdevice, offset: usize, dptr: CUdeviceptr, bytes: usize, flags: u64)
                => mapping::bind_multicast(dptr, bytes);
            cuMulticastUnbind(multicast: u64, device: CUdevice, offset: usize, bytes: usize) => pass::through();
            cuLogicalEndpointBindMem(endpoint: c_uint, device: CUdevice, offset: u64, handle: u64, from: u64, bytes: u64, flags: u64)
                => handle::bind_endpoint(handle);
            cuLogicalEndpointBindAddr(endpoint: c_uint, device: CUdevice, offset: u64, address: *mut c_void, bytes: u64, flags: u64)
                => mapping::bind_endpoint(address, bytes);

            // Calls during which the driver looks at what is mapped at an address: parts of graphs that copy and fill, which note the
            // device of their operands (kernels' parameters are only bytes), and textures of memory in a row.
            cuGraphAddMemcpyNode(node: *mut *mut c_void, graph: CUgraph, dependencies: *const c_void, count: usize,
                params: *const c_void, ctx: CUcontext) => pass::looking();
            cuGraphAddMemsetNode(node: *mut *mut c_void, graph: CUgraph, dependencies: *const c_void, count: usize,
                params: *const c_void, ctx: CUcontext) => pass::looking();
            cuGraphAddBatchMemOpNode(node: *mut *mut c_void, graph: CUgraph, dependencies: *const c_void, count: usize,
                params: *const c_void) => pass::looking();
            cuGraphAddChildGraphNode(node: *mut *mut c_void, graph: CUgraph, dependencies: *const c_void, count: usize,
                child: CUgraph) => pass::looking();
            cuGraphClone(clone: *mut CUgraph, graph: CUgraph) => pass::looking();
            cuGraphNodeSetParams(node: *mut c_void, params: *mut c_void) => pass::looking();
            cuGraphMemcpyNodeSetParams(node: *mut c_void, params: *const c_void) => pass::looking();
            cuGraphMemsetNodeSetParams(node: *mut c_void, params: *const c_void) => pass::looking();
            cuGraphBatchMemOpNodeSetParams(node: *mut c_void, params: *const c_void) => pass::looking();
            cuGraphExecNodeSetParams(exec: CUgraphExec, node: *mut c_void, params: *mut c_void) => graph::node_set();
            cuGraphExecMemcpyNodeSetParams(exec: CUgraphExec, node: *mut c_void, params: *const c_void, ctx: CUcontext)
                => graph::node_set();
            cuGraphExecMemsetNodeSetParams(exec: CUgraphExec, node: *mut c_void, params: *const c_void, ctx: CUcontext)
                => graph::node_set();
            cuGraphExecBatchMemOpNodeSetParams(exec: CUgraphExec, node: *mut c_void, params: *const c_void) => graph::node_set();
            cuGraphExecChildGraphNodeSetParams(exec: CUgraphExec, node: *mut c_void, child: CUgraph) => graph::node_set();
            cuGraphExecUpdate(exec: CUgraphExec, graph: CUgraph, node: *mut *mut c_void, result: *mut c_int) => graph::update(exec, graph);
            cuGraphExecUpdate_v2(exec: CUgraphExec, graph: CUgraph, result: *mut c_void) => graph::update(exec, graph);
            cuTexObjectCreate(texture: *mut u64, resource: *const c_void, descriptor: *const c_void, view: *const c_void)
                => pass::looking();
            cuTexRefSetAddress_v2(offset: *mut usize, texture: *mut c_void, dptr: CUdeviceptr, bytes: usize) => pass::looking();
            cuTexRefSetAddress2D_v2(texture: *mut c_void, descriptor: *const c_void, dptr: CUdeviceptr, pitch: usize)
                => pass::looking();
            cuTexRefSetAddress2D_v3(texture: *mut c_void, descriptor: *const c_void, dptr: CUdeviceptr, pitch: usize)
                => pass::looking();

            // Memory that others made: never the pool's to free.
            cuImportExternalMemory(memory: *mut *mut c_void, descriptor: *const c_void) => pass::through();
            cuExternalMemoryGetMappedBuffer(dptr: *mut CUdeviceptr, memory: *mut c_void, descriptor: *const c_void)
                => pass::through();
            cuDestroyExternalMemory(memory: *mut c_void) => pass::through();
            cuGraphicsResourceGetMappedPointer_v2(dptr: *mut CUdeviceptr, bytes: *mut usize, resource: *mut c_void)
                => pass::through();

            // Advice about managed memory.
            cuMemAdvise(dptr: CUdeviceptr, bytes: usize, advice: c_int, device: CUdevice) => pass::through();
            cuMemAdvise_v2(dptr: CUdeviceptr, bytes: usize, advice: c_int, location: Location) => pass::through();
            cuMemPrefetchAsync(dptr: CUdeviceptr, bytes: usize, device: CUdevice, stream: CUstream) => submit::worked();
            cuMemPrefetchAsync_ptsz(dptr: CUdeviceptr, bytes: usize, device: CUdevice, stream: CUstream) => submit::worked();
            cuMemPrefetchAsync_v2(dptr: CUdeviceptr, bytes: usize, location: Location, flags: c_uint, stream: CUstream)
                => submit::worked();
            cuMemPrefetchAsync_v2_ptsz(dptr: CUdeviceptr, bytes: usize, location: Location, flags: c_uint, stream: CUstream)
                => submit::worked();
            cuMemPrefetchBatchAsync(list: *mut CUdeviceptr, sizes: *mut usize, count: usize, locations: *mut c_void,
                indices: *mut usize, location_count: usize, flags: u64, stream: CUstream)
                => submit::worked();
            cuMemPrefetchBatchAsync_ptsz(list: *mut CUdeviceptr, sizes: *mut usize, count: usize, locations: *mut c_void,
                indices: *mut usize, location_count: usize, flags: u64, stream: CUstream)
                => submit::worked();
            cuMemDiscardAndPrefetchBatchAsync(list: *mut CUdeviceptr, sizes: *mut usize, count: usize, locations: *mut c_void,
                indices: *mut usize, location_count: usize, flags: u64, stream: CUstream)
                => submit::worked();
            cuMemDiscardAndPrefetchBatchAsync_ptsz(list: *mut CUdeviceptr, sizes: *mut usize, count: usize, locations: *mut c_void,
                indices: *mut usize, location_count: usize, flags: u64, stream: CUstream)
                => submit::worked();
            cuMemDiscardBatchAsync(list: *mut CUdeviceptr, sizes: *mut usize, count: usize, flags: u64, stream: CUstream)
                => submit::worked();
            cuMemDiscardBatchAsync_ptsz(list: *mut CUdeviceptr, sizes: *mut usize, count: usize, flags: u64, stream: CUstream)
                => submit::worked();
            cuMemRangeGetAttribute(data: *mut c_void, size: usize, attribute: c_int, dptr: CUdeviceptr, bytes: usize)
                => pass::through();
            cuMemRangeGetAttributes(data: *mut *mut c_void, sizes: *mut usize, attributes: *mut c_int, count: usize,
                dptr: CUdeviceptr, bytes: usize)
                => pass::through();

            // Modules: addresses of globals, which are never the pool's, and functions.
            cuModuleGetGlobal_v2(dptr: *mut CUdeviceptr, bytes: *mut usize, module: CUmodule, name: *const c_char)
                => pass::through();
            cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) => pass::through();
            cuLibraryGetGlobal(dptr: *mut CUdeviceptr, bytes: *mut usize, library: CUlibrary, name: *const c_char)
                => pass::through();
            cuLibraryGetManaged(dptr: *mut CUdeviceptr, bytes: *mut usize, library: CUlibrary, name: *const c_char)
                => pass::through();
            cuLibraryGetModule(module: *mut CUmodule, library: CUlibrary) => pass::through();
            cuLinkCreate(count: c_uint, options: *mut c_int, values: *mut *mut c_void, state: *mut *mut c_void)
                => pass::through();
            cuLinkAddData(state: *mut c_void, kind: c_int, data: *mut c_void, bytes: usize, name: *const c_char, count: c_uint,
                options: *mut c_int, values: *mut *mut c_void) => pass::through();
            cuLinkAddFile(state: *mut c_void, kind: c_int, path: *const c_char, count: c_uint, options: *mut c_int,
                values: *mut *mut c_void) => pass::through();
            cuLinkCreate_v2(count: c_uint, options: *mut c_int, values: *mut *mut c_void, state: *mut *mut c_void)
                => pass::through();
            cuLinkAddData_v2(state: *mut c_void, kind: c_int, data: *mut c_void, bytes: usize, name: *const c_char, count: c_uint,
                options: *mut c_int, values: *mut *mut c_void) => pass::through();
            cuLinkAddFile_v2(state: *mut c_void, kind: c_int, path: *const c_char, count: c_uint, options: *mut c_int,
                values: *mut *mut c_void) => pass::through();

            // Contexts: what does not make or end one.
            cuDevicePrimaryCtxSetFlags(device: CUdevice, flags: c_uint) => pass::through();
            cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, flags: c_uint) => pass::through();
            cuDevicePrimaryCtxGetState(device: CUdevice, flags: *mut c_uint, active: *mut c_int) => pass::through();
            cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice) => pass::through();
            cuCtxDisablePeerAccess(peer: CUcontext) => pass::through();
            cuCtxAttach(ctx: *mut CUcontext, flags: c_uint) => pass::through();
            cuCtxGetDevice(device: *mut CUdevice) => pass::through();
            cuCtxGetDevice_v2(device: *mut CUdevice, ctx: CUcontext) => pass::through();
            cuCtxSynchronize() => context::synchronized();
            cuCtxSynchronize_v2(ctx: CUcontext) => context::synchronized_in(ctx);
            cuStreamSynchronize(stream: CUstream) => rest::waited();
            cuStreamSynchronize_ptsz(stream: CUstream) => rest::waited();
            cuEventSynchronize(event: CUevent) => rest::waited();
            cuCheckpointProcessLock(pid: c_int, arguments: *mut c_void) => pass::through();
            cuCheckpointProcessCheckpoint(pid: c_int, arguments: *mut c_void) => pass::through();
            cuCheckpointProcessRestore(pid: c_int, arguments: *mut c_void) => pass::through();
            cuCheckpointProcessUnlock(pid: c_int, arguments: *mut c_void) => pass::through();
            cuCheckpointProcessGetState(pid: c_int, state: *mut c_int) => pass::through();
            cuCheckpointProcessGetRestoreThreadId(pid: c_int, thread: *mut c_int) => pass::through();

            // Graphs and captures, and work that is no kernel.
            cuLaunchHostFunc(stream: CUstream, function: *mut c_void, data: *mut c_void) => submit::worked();
            cuLaunchHostFunc_ptsz(stream: CUstream, function: *mut c_void, data: *mut c_void) => submit::worked();
            cuLaunchHostFunc_v2(stream: CUstream, function: *mut c_void, data: *mut c_void, flags: c_uint) => submit::worked();
            cuLaunchHostFunc_v2_ptsz(stream: CUstream, function: *mut c_void, data: *mut c_void, flags: c_uint)
                => submit::worked();
            cuGraphAddMemAllocNode(node: *mut *mut c_void, graph: CUgraph, dependencies: *const c_void, count: usize,
                params: *mut c_void) => pass::through();
            cuGraphAddMemFreeNode(node: *mut *mut c_void, graph: CUgraph, dependencies: *const c_void, count: usize,
                dptr: CUdeviceptr) => pass::through();
            cuGraphAddNode(node: *mut *mut c_void, graph: CUgraph, dependencies: *const c_void, count: usize, params: *mut c_void)
                => pass::looking();
            cuGraphAddNode_v2(node: *mut *mut c_void, graph: CUgraph, dependencies: *const c_void, data: *const c_void, count: usize,
                params: *mut c_void) => pass::looking();
            cuGraphMemAllocNodeGetParams(node: *mut c_void, params: *mut c_void) => pass::through();
            cuGraphMemFreeNodeGetParams(node: *mut c_void, dptr: *mut CUdeviceptr) => pass::through();
            cuGraphExecDestroy(exec: CUgraphExec) => graph::destroy(exec);
            cuDeviceGraphMemTrim(device: CUdevice) => pass::through();
            cuDeviceGetGraphMemAttribute(device: CUdevice, attribute: c_int, value: *mut c_void) => pass::through();
            cuDeviceSetGraphMemAttribute(device: CUdevice, attribute: c_int, value: *mut c_void) => pass::through();
            cuStreamIsCapturing(stream: CUstream, status: *mut c_int) => pass::through();
            cuStreamIsCapturing_ptsz(stream: CUstream, status: *mut c_int) => pass::through();
            cuStreamGetCaptureInfo(stream: CUstream, status: *mut c_int, id: *mut u64) => pass::through();
            cuStreamGetCaptureInfo_ptsz(stream: CUstream, status: *mut c_int, id: *mut u64) => pass::through();
            cuStreamGetCaptureInfo_v2(stream: CUstream, status: *mut c_int, id: *mut u64, graph: *mut CUgraph,
                dependencies: *mut *const c_void, count: *mut usize) => pass::through();
            cuStreamGetCaptureInfo_v2_ptsz(stream: CUstream, status: *mut c_int, id: *mut u64, graph: *mut CUgraph,
                dependencies: *mut *const c_void, count: *mut usize) => pass::through();
            cuStreamGetCaptureInfo_v3(stream: CUstream, status: *mut c_int, id: *mut u64, graph: *mut CUgraph,
                dependencies: *mut *const c_void, edges: *mut *const c_void, count: *mut usize) => pass::through();
            cuStreamGetCaptureInfo_v3_ptsz(stream: CUstream, status: *mut c_int, id: *mut u64, graph: *mut CUgraph,
                dependencies: *mut *const c_void, edges: *mut *const c_void, count: *mut usize) => pass::through();
            cuThreadExchangeStreamCaptureMode(mode: *mut c_int) => pass::through();
        }
    };
}
pub(crate) use for_each_hook;
