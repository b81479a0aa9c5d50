//! Every export, once. A row gives the symbol, the CUDA version that introduced it under its base name, its per-thread
//! twin if it has one, its parameters as C sees them, and the function that answers or (`->`) the refusal.
//!
//! From a row come the `extern "C"` function, its twin, and the entry of `cuGetProcAddress`; there is no second list to
//! forget. Enumerations are `c_int` and handles are integers: a caller may pass any value, which a Rust enum may not hold.

use crate::boundary::{DefaultStream, Needs, enter};
use crate::error::Code;
use crate::ffi::{AccessDesc, AllocationProp, Copy2d, Copy3d, Handle, In, Location, Out, PoolProps};
use crate::registry::ApiRow;
use crate::*;
use std::ffi::{c_char, c_int, c_uint, c_void};

macro_rules! export {
    ($needs:ident, $default:ident, $export:ident, ($($arg:ident: $ty:ty),* $(,)?), $body:path) => {
        /// # Safety
        /// As the CUDA driver API documents for this function: pointers are null or valid for what it reads and writes.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $export($($arg: $ty),*) -> c_int {
            enter(stringify!($export), Needs::$needs, DefaultStream::$default, || $body($($arg),*))
        }
    };
    ($needs:ident, $default:ident, $export:ident, ($($arg:ident: $ty:ty),* $(,)?), -> $code:ident) => {
        /// Refused: this machine does not have what it is for. Nothing that its arguments point to is looked at.
        #[unsafe(no_mangle)]
        pub extern "C" fn $export($(_: $ty),*) -> c_int {
            enter(stringify!($export), Needs::$needs, DefaultStream::$default, || Err(Code::$code))
        }
    };
}

macro_rules! driver_api {
    ($($needs:ident {
        $($since:literal $export:ident $args:tt $(+ $twin:ident)? $(also $other:literal $from:literal)?
            $(-> $code:ident)? $(=> $body:path)?;)*
    })*) => {
        $($(
            export!($needs, Legacy, $export, $args, $($body)? $(-> $code)?);
            driver_api!(@twin $needs, $args, $($twin)?, $($body)? $(-> $code)?);
        )*)*

        /// The rows, for `cuGetProcAddress`.
        pub static API: &[ApiRow] = &[$($(
            ApiRow {
                export: stringify!($export),
                address: $export as *const c_void,
                since: $since,
                twin: driver_api!(@option $((stringify!($twin), $twin as *const c_void))?),
                also: driver_api!(@option $(($other, $from))?),
            },
        )*)*];
    };
    (@twin $needs:ident, $args:tt, , $($answer:tt)*) => {};
    (@twin $needs:ident, $args:tt, $twin:ident, $($answer:tt)*) => {
        export!($needs, PerThread, $twin, $args, $($answer)*);
    };
    (@option) => { None };
    (@option $value:expr) => { Some($value) };
}

driver_api! {
Nothing {
    2000 cuInit(flags: c_uint) => driver::init;
    2020 cuDriverGetVersion(out: Out<c_int>) => driver::get_version;
    11030 cuGetProcAddress(name: In<c_char>, out: Out<*const c_void>, version: c_int, flags: u64) => registry::get_v1;
    12000 cuGetProcAddress_v2(name: In<c_char>, out: Out<*const c_void>, version: c_int, flags: u64, status: Out<c_int>) => registry::get_v2;

    // Processes that are stopped by others, which need no cuInit for it
    12080 cuCheckpointProcessGetRestoreThreadId(process: c_int, out: Out<c_int>) => checkpoint::thread;
    12080 cuCheckpointProcessGetState(process: c_int, out: Out<c_int>) => checkpoint::state;
    12080 cuCheckpointProcessLock(process: c_int, args: In<u8>) => checkpoint::lock;
    12080 cuCheckpointProcessCheckpoint(process: c_int, args: In<u8>) => checkpoint::checkpoint;
    12080 cuCheckpointProcessRestore(process: c_int, args: In<u8>) => checkpoint::restore;
    12080 cuCheckpointProcessUnlock(process: c_int, args: In<u8>) => checkpoint::unlock;
    6000 cuGetErrorName(code: c_int, out: Out<*const c_char>) => error::name;
    6000 cuGetErrorString(code: c_int, out: Out<*const c_char>) => error::string;
    3000 cuGetExportTable(out: Out<usize>, id: In<[u8; 16]>) => driver::export_table;
}
Init {
    // Devices
    2000 cuDeviceGet(out: Out<c_int>, ordinal: c_int) => device::get;
    2000 cuDeviceGetCount(out: Out<c_int>) => device::count;
    2000 cuDeviceGetName(out: Out<c_char>, capacity: c_int, device: c_int) => device::name;
    9020 cuDeviceGetUuid(out: Out<[u8; 16]>, device: c_int) => device::uuid;
    11040 cuDeviceGetUuid_v2(out: Out<[u8; 16]>, device: c_int) => device::uuid;
    10000 cuDeviceGetLuid(out: Out<c_char>, mask: Out<c_uint>, device: c_int) => device::luid;
    2000 cuDeviceTotalMem(out: Out<c_uint>, device: c_int) => memory::total_memory_32;
    3020 cuDeviceTotalMem_v2(out: Out<usize>, device: c_int) => device::total_memory;
    2000 cuDeviceGetAttribute(out: Out<c_int>, attribute: c_int, device: c_int) => device::attribute;
    4010 cuDeviceGetPCIBusId(out: Out<c_char>, capacity: c_int, device: c_int) => device::bus_id;
    4010 cuDeviceGetByPCIBusId(out: Out<c_int>, id: In<c_char>) => device::by_bus_id;
    4000 cuDeviceCanAccessPeer(out: Out<c_int>, device: c_int, peer: c_int) => device::can_access_peer;
    8000 cuDeviceGetP2PAttribute(out: Out<c_int>, attribute: c_int, device: c_int, peer: c_int) => device::peer_attribute;
    2000 cuDeviceComputeCapability(major: Out<c_int>, minor: Out<c_int>, device: c_int) => device::compute_capability;
    2000 cuDeviceGetProperties(out: Out<device::Properties>, device: c_int) => device::properties;
    11040 cuDeviceGetExecAffinitySupport(out: Out<c_int>, kind: c_int, device: c_int) => device::affinity_support;
    11020 cuDeviceGetDefaultMemPool(out: Out<Handle>, device: c_int) => mempool::get_default;
    11020 cuDeviceGetMemPool(out: Out<Handle>, device: c_int) => mempool::get;
    11020 cuDeviceSetMemPool(device: c_int, pool: Handle) => mempool::set;

    // Contexts
    7000 cuDevicePrimaryCtxRetain(out: Out<Handle>, device: c_int) => primary::retain;
    7000 cuDevicePrimaryCtxRelease(device: c_int) => primary::release;
    11000 cuDevicePrimaryCtxRelease_v2(device: c_int) => primary::release;
    7000 cuDevicePrimaryCtxReset(device: c_int) => primary::reset;
    11000 cuDevicePrimaryCtxReset_v2(device: c_int) => primary::reset;
    7000 cuDevicePrimaryCtxSetFlags(device: c_int, flags: c_uint) => primary::set_flags;
    11000 cuDevicePrimaryCtxSetFlags_v2(device: c_int, flags: c_uint) => primary::set_flags;
    7000 cuDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, active: Out<c_int>) => primary::state;
    2000 cuCtxCreate(out: Out<Handle>, flags: c_uint, device: c_int) => context::create;
    3020 cuCtxCreate_v2(out: Out<Handle>, flags: c_uint, device: c_int) => context::create;
    11040 cuCtxCreate_v3(out: Out<Handle>, affinity: In<u8>, count: c_int, flags: c_uint, device: c_int) => context::create_v3;
    12050 cuCtxCreate_v4(out: Out<Handle>, params: In<u8>, flags: c_uint, device: c_int) => context::create_v4;
    2000 cuCtxDestroy(context: Handle) => context::destroy;
    4000 cuCtxDestroy_v2(context: Handle) => context::destroy;
    2000 cuCtxPushCurrent(context: Handle) => context::push;
    4000 cuCtxPushCurrent_v2(context: Handle) => context::push;
    2000 cuCtxPopCurrent(out: Out<Handle>) => context::pop;
    4000 cuCtxPopCurrent_v2(out: Out<Handle>) => context::pop;
    4000 cuCtxSetCurrent(context: Handle) => context::set_current;
    4000 cuCtxGetCurrent(out: Out<Handle>) => context::get_current;
    2000 cuCtxGetDevice(out: Out<c_int>) => context::get_device;
    13000 cuCtxGetDevice_v2(out: Out<c_int>, context: Handle) => context::get_device_of;
    7000 cuCtxGetFlags(out: Out<c_uint>) => context::get_flags;
    12010 cuCtxSetFlags(flags: c_uint) => context::set_flags;
    12000 cuCtxGetId(context: Handle, out: Out<u64>) => context::get_id;
    2000 cuCtxSynchronize() => context::synchronize;
    13000 cuCtxSynchronize_v2(context: Handle) => context::synchronize_of;
    3010 cuCtxSetLimit(limit: c_int, value: usize) => context::set_limit;
    3010 cuCtxGetLimit(out: Out<usize>, limit: c_int) => context::get_limit;
    3020 cuCtxGetApiVersion(context: Handle, out: Out<c_uint>) => context::api_version;
    5050 cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) => context::priority_range;
    3020 cuCtxGetCacheConfig(out: Out<c_int>) => context::get_cache_config;
    3020 cuCtxSetCacheConfig(config: c_int) => context::set_cache_config;
    4020 cuCtxGetSharedMemConfig(out: Out<c_int>) => context::shared_memory_config;
    4020 cuCtxSetSharedMemConfig(config: c_int) => context::set_shared_memory_config;
    11000 cuCtxResetPersistingL2Cache() => context::reset_persisting_l2;
    4000 cuCtxEnablePeerAccess(peer: Handle, flags: c_uint) => context::enable_peer;
    4000 cuCtxDisablePeerAccess(peer: Handle) => context::disable_peer;
    2000 cuCtxAttach(out: Out<Handle>, flags: c_uint) => context::attach;
    2000 cuCtxDetach(context: Handle) => context::detach;
    2000 cuGLCtxCreate(out: Out<Handle>, flags: c_uint, device: c_int) -> NOT_SUPPORTED;
    3020 cuGLCtxCreate_v2(out: Out<Handle>, flags: c_uint, device: c_int) -> NOT_SUPPORTED;
    3010 cuVDPAUCtxCreate(out: Out<Handle>, flags: c_uint, device: c_int, vdp: c_uint, resolve: usize) -> NOT_SUPPORTED;
    3020 cuVDPAUCtxCreate_v2(out: Out<Handle>, flags: c_uint, device: c_int, vdp: c_uint, resolve: usize) -> NOT_SUPPORTED;
    12050 cuCtxRecordEvent(context: Handle, event: Handle) => event::record_context;
    12050 cuCtxWaitEvent(context: Handle, event: Handle) => event::context_wait;

    // Green contexts
    12040 cuDeviceGetDevResource(device: c_int, out: Out<green::Resource>, kind: c_int) => green::of_device;
    12040 cuCtxGetDevResource(context: Handle, out: Out<green::Resource>, kind: c_int) => green::of_context;
    12040 cuGreenCtxGetDevResource(green: Handle, out: Out<green::Resource>, kind: c_int) => green::of_green;
    12040 cuDevSmResourceSplitByCount(groups: Out<green::Resource>, count: Out<c_uint>, input: In<green::Resource>, rest: Out<green::Resource>, flags: c_uint, least: c_uint) => green::split;
    12040 cuDevResourceGenerateDesc(out: Out<Handle>, list: In<green::Resource>, count: c_uint) => green::describe;
    12040 cuGreenCtxCreate(out: Out<Handle>, resources: Handle, device: c_int, flags: c_uint) => green::create;
    12040 cuGreenCtxDestroy(green: Handle) => green::destroy;
    12040 cuCtxFromGreenCtx(out: Out<Handle>, green: Handle) => green::context;
    12050 cuGreenCtxStreamCreate(out: Out<Handle>, green: Handle, flags: c_uint, priority: c_int) => green::stream;
    12040 cuGreenCtxRecordEvent(green: Handle, event: Handle) => green::record;
    12040 cuGreenCtxWaitEvent(green: Handle, event: Handle) => green::wait;
    12040 cuStreamGetGreenCtx(stream: Handle, out: Out<Handle>) => green::of_stream;
    13000 cuGreenCtxGetId(green: Handle, out: Out<u64>) => green::id;

    // Plain device memory
    2000 cuMemGetInfo(free: Out<c_uint>, total: Out<c_uint>) => memory::info_32;
    3020 cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) => memory::info;
    2000 cuMemAlloc(out: Out<c_uint>, bytes: c_uint) => memory::alloc_32;
    3020 cuMemAlloc_v2(out: Out<u64>, bytes: usize) => memory::alloc;
    2000 cuMemAllocPitch(out: Out<c_uint>, pitch: Out<c_uint>, width: c_uint, height: c_uint, element: c_uint) => memory::alloc_pitch_32;
    3020 cuMemAllocPitch_v2(out: Out<u64>, pitch: Out<usize>, width: usize, height: usize, element: c_uint) => memory::alloc_pitch;
    2000 cuMemFree(address: c_uint) => memory::free_32;
    3020 cuMemFree_v2(address: u64) => memory::free_linear;
    2000 cuMemGetAddressRange(base: Out<c_uint>, bytes: Out<c_uint>, address: c_uint) => memory::address_range_32;
    3020 cuMemGetAddressRange_v2(base: Out<u64>, bytes: Out<usize>, address: u64) => memory::address_range;

    // Arrays
    3020 cuArrayCreate_v2(out: Out<Handle>, plane: In<array::Plane>) => array::create;
    3020 cuArray3DCreate_v2(out: Out<Handle>, descriptor: In<array::Descriptor>) => array::create_3d;
    3020 cuArrayGetDescriptor_v2(out: Out<array::Plane>, array: Handle) => array::descriptor;
    3020 cuArray3DGetDescriptor_v2(out: Out<array::Descriptor>, array: Handle) => array::descriptor_3d;
    2000 cuArrayDestroy(array: Handle) => array::destroy;
    5000 cuMipmappedArrayCreate(out: Out<Handle>, descriptor: In<array::Descriptor>, levels: c_uint) => array::create_mipmapped;
    5000 cuMipmappedArrayDestroy(array: Handle) => array::destroy_mipmapped;

    // Host and managed memory
    2020 cuMemHostAlloc(out: Out<u64>, bytes: usize, flags: c_uint) => pinned::alloc;
    2000 cuMemAllocHost(out: Out<u64>, bytes: usize) => pinned::alloc_host;
    3020 cuMemAllocHost_v2(out: Out<u64>, bytes: usize) => pinned::alloc_host;
    2000 cuMemFreeHost(address: u64) => pinned::free_host;
    4000 cuMemHostRegister(address: u64, bytes: usize, flags: c_uint) => pinned::register;
    6050 cuMemHostRegister_v2(address: u64, bytes: usize, flags: c_uint) => pinned::register;
    4000 cuMemHostUnregister(address: u64) => pinned::unregister;
    2020 cuMemHostGetDevicePointer(out: Out<u64>, address: u64, flags: c_uint) => pinned::device_pointer;
    3020 cuMemHostGetDevicePointer_v2(out: Out<u64>, address: u64, flags: c_uint) => pinned::device_pointer;
    2030 cuMemHostGetFlags(out: Out<c_uint>, address: u64) => pinned::flags;
    6000 cuMemAllocManaged(out: Out<u64>, bytes: usize, flags: c_uint) => managed::alloc;
    8000 cuMemAdvise(address: u64, bytes: usize, advice: c_int, device: c_int) => managed::advise;
    12020 cuMemAdvise_v2(address: u64, bytes: usize, advice: c_int, location: Location) => managed::advise_v2;
    8000 cuMemPrefetchAsync(address: u64, bytes: usize, device: c_int, stream: Handle) + cuMemPrefetchAsync_ptsz => managed::prefetch;
    12020 cuMemPrefetchAsync_v2(address: u64, bytes: usize, location: Location, flags: c_uint, stream: Handle) + cuMemPrefetchAsync_v2_ptsz => managed::prefetch_v2;
    13000 cuMemPrefetchBatchAsync(addresses: In<u64>, sizes: In<usize>, count: usize, locations: In<Location>, first: In<usize>, location_count: usize, flags: u64, stream: Handle) + cuMemPrefetchBatchAsync_ptsz => managed::prefetch_batch;
    13000 cuMemDiscardBatchAsync(addresses: In<u64>, sizes: In<usize>, count: usize, flags: u64, stream: Handle) + cuMemDiscardBatchAsync_ptsz => managed::discard_batch;
    13000 cuMemDiscardAndPrefetchBatchAsync(addresses: In<u64>, sizes: In<usize>, count: usize, locations: In<Location>, first: In<usize>, location_count: usize, flags: u64, stream: Handle) + cuMemDiscardAndPrefetchBatchAsync_ptsz => managed::prefetch_batch;
    8000 cuMemRangeGetAttribute(data: Out<c_void>, size: usize, attribute: c_int, address: u64, bytes: usize) => managed::range_attribute;
    8000 cuMemRangeGetAttributes(data: In<Out<c_void>>, sizes: In<usize>, attributes: In<c_int>, count: usize, address: u64, bytes: usize) => managed::range_attributes;

    // Virtual memory management
    10020 cuMemAddressReserve(out: Out<u64>, bytes: usize, align: usize, hint: u64, flags: u64) => vmm::reserve;
    10020 cuMemAddressFree(address: u64, bytes: usize) => vmm::unreserve;
    10020 cuMemCreate(out: Out<u64>, bytes: usize, prop: In<AllocationProp>, flags: u64) => vmm::create;
    10020 cuMemRelease(handle: u64) => vmm::release;
    10020 cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) => vmm::map;
    10020 cuMemUnmap(address: u64, bytes: usize) => vmm::unmap;
    10020 cuMemSetAccess(address: u64, bytes: usize, list: In<AccessDesc>, count: usize) => vmm::set_access;
    10020 cuMemGetAccess(out: Out<u64>, location: In<Location>, address: u64) => vmm::get_access;
    10020 cuMemGetAllocationGranularity(out: Out<usize>, prop: In<AllocationProp>, option: c_int) => vmm::granularity;
    10020 cuMemGetAllocationPropertiesFromHandle(out: Out<AllocationProp>, handle: u64) => vmm::properties;
    11000 cuMemRetainAllocationHandle(out: Out<u64>, address: u64) => vmm::retain;
    10020 cuMemExportToShareableHandle(out: Out<c_int>, handle: u64, kind: c_int, flags: u64) => vmm::export;
    10020 cuMemImportFromShareableHandle(out: Out<u64>, shared: u64, kind: c_int) => vmm::import;
    11010 cuMemMapArrayAsync(list: In<u8>, count: c_uint, stream: Handle) + cuMemMapArrayAsync_ptsz -> NOT_SUPPORTED;
    12010 cuMulticastCreate(out: Out<u64>, prop: In<u8>) -> NOT_SUPPORTED;
    12010 cuMulticastAddDevice(handle: u64, device: c_int) -> INVALID_VALUE;
    12010 cuMulticastBindMem(handle: u64, offset: usize, memory: u64, from: usize, bytes: usize, flags: u64) => vmm::bind_multicast;
    13010 cuMulticastBindMem_v2(handle: u64, device: c_int, offset: usize, memory: u64, from: usize, bytes: usize, flags: u64) => vmm::bind_multicast_v2;
    12010 cuMulticastBindAddr(handle: u64, offset: usize, address: u64, bytes: usize, flags: u64) -> INVALID_VALUE;
    13010 cuMulticastBindAddr_v2(handle: u64, device: c_int, offset: usize, address: u64, bytes: usize, flags: u64) -> INVALID_VALUE;
    12010 cuMulticastUnbind(handle: u64, device: c_int, offset: usize, bytes: usize) -> INVALID_VALUE;
    13030 cuLogicalEndpointBindMem(endpoint: c_uint, device: c_int, offset: u64, memory: u64, from: u64, bytes: u64, flags: u64) => vmm::bind_endpoint;

    // Memory of other interfaces
    10000 cuImportExternalMemory(out: Out<Handle>, desc: In<u8>) -> NOT_SUPPORTED;
    10000 cuExternalMemoryGetMappedBuffer(out: Out<u64>, memory: Handle, desc: In<u8>) -> INVALID_HANDLE;
    10000 cuDestroyExternalMemory(memory: Handle) -> INVALID_HANDLE;
    3020 cuGraphicsResourceGetMappedPointer_v2(out: Out<u64>, bytes: Out<usize>, resource: Handle) -> INVALID_HANDLE;

    // Stream-ordered allocation
    11020 cuMemAllocAsync(out: Out<u64>, bytes: usize, stream: Handle) + cuMemAllocAsync_ptsz => stream_ordered::alloc;
    11020 cuMemAllocFromPoolAsync(out: Out<u64>, bytes: usize, pool: Handle, stream: Handle) + cuMemAllocFromPoolAsync_ptsz => stream_ordered::alloc_from;
    11020 cuMemFreeAsync(address: u64, stream: Handle) + cuMemFreeAsync_ptsz => stream_ordered::free_async;
    11020 cuMemPoolCreate(out: Out<Handle>, props: In<PoolProps>) => mempool::create;
    11020 cuMemPoolDestroy(pool: Handle) => mempool::destroy;
    11020 cuMemPoolTrimTo(pool: Handle, keep: usize) => mempool::trim;
    11020 cuMemPoolGetAttribute(pool: Handle, attribute: c_int, out: Out<c_void>) => mempool::get_attribute;
    11020 cuMemPoolSetAttribute(pool: Handle, attribute: c_int, value: In<c_void>) => mempool::set_attribute;
    11020 cuMemPoolSetAccess(pool: Handle, list: In<AccessDesc>, count: usize) => mempool::set_access;
    11020 cuMemPoolGetAccess(out: Out<c_int>, pool: Handle, location: In<Location>) => mempool::get_access;
    11020 cuMemPoolExportToShareableHandle(out: Out<c_int>, pool: Handle, kind: c_int, flags: u64) => mempool::export;
    11020 cuMemPoolImportFromShareableHandle(out: Out<Handle>, shared: u64, kind: c_int, flags: u64) => mempool::import;
    11020 cuMemPoolExportPointer(out: Out<mempool::Shared>, address: u64) => mempool::export_pointer;
    11020 cuMemPoolImportPointer(out: Out<u64>, pool: Handle, data: In<mempool::Shared>) => mempool::import_pointer;
    13000 cuMemGetDefaultMemPool(out: Out<Handle>, location: In<Location>, kind: c_int) => mempool::get_default_at;
    13000 cuMemGetMemPool(out: Out<Handle>, location: In<Location>, kind: c_int) => mempool::get_at;
    13000 cuMemSetMemPool(location: In<Location>, kind: c_int, pool: Handle) => mempool::set_at;

    // Pointers and IPC
    11070 cuMemGetHandleForAddressRange(out: Out<c_int>, address: u64, bytes: usize, kind: c_int, flags: u64) => vmm::range_handle;
    4000 cuPointerGetAttribute(out: Out<c_void>, attribute: c_int, address: u64) => pointer::attribute;
    7000 cuPointerGetAttributes(count: c_uint, list: In<c_int>, out: In<Out<c_void>>, address: u64) => pointer::attributes;
    6000 cuPointerSetAttribute(value: In<c_uint>, attribute: c_int, address: u64) => pointer::set_attribute;
    4010 cuIpcGetMemHandle(out: Out<ipc::MemHandle>, address: u64) => ipc::get;
    4010 cuIpcOpenMemHandle(out: Out<u64>, handle: ipc::MemHandle, flags: c_uint) => ipc::open;
    11000 cuIpcOpenMemHandle_v2(out: Out<u64>, handle: ipc::MemHandle, flags: c_uint) => ipc::open;
    4010 cuIpcCloseMemHandle(address: u64) => ipc::close;
    4010 cuIpcGetEventHandle(out: Out<ipc::MemHandle>, event: Handle) => ipc::get_event;
    4010 cuIpcOpenEventHandle(out: Out<Handle>, handle: ipc::MemHandle) => ipc::open_event;

    // Copies
    4000 cuMemcpy(dst: u64, src: u64, bytes: usize) + cuMemcpy_ptds => copy::any;
    4000 cuMemcpyAsync(dst: u64, src: u64, bytes: usize, stream: Handle) + cuMemcpyAsync_ptsz => copy::any_async;
    4000 cuMemcpyPeer(dst: u64, to: Handle, src: u64, from: Handle, bytes: usize) + cuMemcpyPeer_ptds => copy::peer;
    4000 cuMemcpyPeerAsync(dst: u64, to: Handle, src: u64, from: Handle, bytes: usize, stream: Handle) + cuMemcpyPeerAsync_ptsz => copy::peer_async;
    3020 cuMemcpyHtoD_v2(dst: u64, src: u64, bytes: usize) + cuMemcpyHtoD_v2_ptds => copy::to_device;
    3020 cuMemcpyHtoDAsync_v2(dst: u64, src: u64, bytes: usize, stream: Handle) + cuMemcpyHtoDAsync_v2_ptsz => copy::to_device_async;
    3020 cuMemcpyDtoH_v2(dst: u64, src: u64, bytes: usize) + cuMemcpyDtoH_v2_ptds => copy::to_host;
    3020 cuMemcpyDtoHAsync_v2(dst: u64, src: u64, bytes: usize, stream: Handle) + cuMemcpyDtoHAsync_v2_ptsz => copy::to_host_async;
    2000 cuMemcpyDtoD(dst: c_uint, src: c_uint, bytes: c_uint) => copy::on_device_32;
    3020 cuMemcpyDtoD_v2(dst: u64, src: u64, bytes: usize) + cuMemcpyDtoD_v2_ptds => copy::on_device;
    3020 cuMemcpyDtoDAsync_v2(dst: u64, src: u64, bytes: usize, stream: Handle) + cuMemcpyDtoDAsync_v2_ptsz => copy::on_device_async;
    3020 cuMemcpy2D_v2(copy: In<Copy2d>) + cuMemcpy2D_v2_ptds => copy::rectangle_sync;
    3020 cuMemcpy2DUnaligned_v2(copy: In<Copy2d>) + cuMemcpy2DUnaligned_v2_ptds => copy::rectangle_sync;
    3020 cuMemcpy2DAsync_v2(copy: In<Copy2d>, stream: Handle) + cuMemcpy2DAsync_v2_ptsz => copy::rectangle_async;
    3020 cuMemcpy3D_v2(copy: In<Copy3d>) + cuMemcpy3D_v2_ptds => copy::volume_sync;
    3020 cuMemcpy3DAsync_v2(copy: In<Copy3d>, stream: Handle) + cuMemcpy3DAsync_v2_ptsz => copy::volume_async;
    4000 cuMemcpy3DPeer(copy: In<Copy3d>) + cuMemcpy3DPeer_ptds => copy::volume_peer;
    4000 cuMemcpy3DPeerAsync(copy: In<Copy3d>, stream: Handle) + cuMemcpy3DPeerAsync_ptsz => copy::volume_peer_async;
    12080 cuMemcpyBatchAsync(targets: In<u64>, sources: In<u64>, sizes: In<usize>, count: usize, attributes: In<u8>, first: In<usize>, attribute_count: usize, failed: Out<usize>, stream: Handle) + cuMemcpyBatchAsync_ptsz => copy::batch_v1;
    13000 cuMemcpyBatchAsync_v2(targets: In<u64>, sources: In<u64>, sizes: In<usize>, count: usize, attributes: In<u8>, first: In<usize>, attribute_count: usize, stream: Handle) + cuMemcpyBatchAsync_v2_ptsz => copy::batch;
    12080 cuMemcpy3DBatchAsync(count: usize, list: In<u8>, failed: Out<usize>, flags: u64, stream: Handle) + cuMemcpy3DBatchAsync_ptsz -> NOT_SUPPORTED;
    13000 cuMemcpy3DBatchAsync_v2(count: usize, list: In<u8>, flags: u64, stream: Handle) + cuMemcpy3DBatchAsync_v2_ptsz -> NOT_SUPPORTED;
    13020 cuMemcpyWithAttributesAsync(target: u64, source: u64, bytes: usize, attributes: In<u8>, stream: Handle) + cuMemcpyWithAttributesAsync_ptsz => copy::with_attributes;
    13020 cuMemcpy3DWithAttributesAsync(copy: In<u8>, flags: u64, stream: Handle) + cuMemcpy3DWithAttributesAsync_ptsz -> NOT_SUPPORTED;

    // Fills
    3020 cuMemsetD8_v2(address: u64, value: u8, count: usize) + cuMemsetD8_v2_ptds => fill::d8;
    3020 cuMemsetD8Async(address: u64, value: u8, count: usize, stream: Handle) + cuMemsetD8Async_ptsz => fill::d8_async;
    3020 cuMemsetD16_v2(address: u64, value: u16, count: usize) + cuMemsetD16_v2_ptds => fill::d16;
    3020 cuMemsetD16Async(address: u64, value: u16, count: usize, stream: Handle) + cuMemsetD16Async_ptsz => fill::d16_async;
    3020 cuMemsetD32_v2(address: u64, value: u32, count: usize) + cuMemsetD32_v2_ptds => fill::d32;
    3020 cuMemsetD32Async(address: u64, value: u32, count: usize, stream: Handle) + cuMemsetD32Async_ptsz => fill::d32_async;
    3020 cuMemsetD2D8_v2(address: u64, pitch: usize, value: u8, width: usize, height: usize) + cuMemsetD2D8_v2_ptds => fill::d2d8;
    3020 cuMemsetD2D8Async(address: u64, pitch: usize, value: u8, width: usize, height: usize, stream: Handle) + cuMemsetD2D8Async_ptsz => fill::d2d8_async;
    3020 cuMemsetD2D16_v2(address: u64, pitch: usize, value: u16, width: usize, height: usize) + cuMemsetD2D16_v2_ptds => fill::d2d16;
    3020 cuMemsetD2D16Async(address: u64, pitch: usize, value: u16, width: usize, height: usize, stream: Handle) + cuMemsetD2D16Async_ptsz => fill::d2d16_async;
    3020 cuMemsetD2D32_v2(address: u64, pitch: usize, value: u32, width: usize, height: usize) + cuMemsetD2D32_v2_ptds => fill::d2d32;
    3020 cuMemsetD2D32Async(address: u64, pitch: usize, value: u32, width: usize, height: usize, stream: Handle) + cuMemsetD2D32Async_ptsz => fill::d2d32_async;

    // Streams
    2000 cuStreamCreate(out: Out<Handle>, flags: c_uint) => stream::create;
    5050 cuStreamCreateWithPriority(out: Out<Handle>, flags: c_uint, priority: c_int) => stream::create_with_priority;
    2000 cuStreamDestroy(stream: Handle) => stream::destroy;
    4000 cuStreamDestroy_v2(stream: Handle) => stream::destroy;
    2000 cuStreamSynchronize(stream: Handle) + cuStreamSynchronize_ptsz => stream::synchronize;
    2000 cuStreamQuery(stream: Handle) + cuStreamQuery_ptsz => stream::query;
    3020 cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) + cuStreamWaitEvent_ptsz => event::stream_wait;
    9020 cuStreamGetCtx(stream: Handle, out: Out<Handle>) + cuStreamGetCtx_ptsz => stream::get_context;
    12050 cuStreamGetCtx_v2(stream: Handle, out: Out<Handle>, green: Out<Handle>) + cuStreamGetCtx_v2_ptsz => stream::get_contexts;
    5050 cuStreamGetFlags(stream: Handle, out: Out<c_uint>) + cuStreamGetFlags_ptsz => stream::get_flags;
    5050 cuStreamGetPriority(stream: Handle, out: Out<c_int>) + cuStreamGetPriority_ptsz => stream::get_priority;
    12000 cuStreamGetId(stream: Handle, out: Out<u64>) + cuStreamGetId_ptsz => stream::get_id;
    12080 cuStreamGetDevice(stream: Handle, out: Out<c_int>) + cuStreamGetDevice_ptsz => stream::get_device;
    5000 cuStreamAddCallback(stream: Handle, callback: Option<stream::Callback>, argument: Handle, flags: c_uint) + cuStreamAddCallback_ptsz => stream::add_callback;
    6000 cuStreamAttachMemAsync(stream: Handle, address: u64, bytes: usize, flags: c_uint) + cuStreamAttachMemAsync_ptsz => stream::attach;
    10000 cuLaunchHostFunc(stream: Handle, function: Option<stream::HostFn>, argument: Handle) + cuLaunchHostFunc_ptsz => stream::launch_host;
    13020 cuLaunchHostFunc_v2(stream: Handle, function: Option<stream::HostFn>, argument: Handle, sync: c_uint) + cuLaunchHostFunc_v2_ptsz => stream::launch_host_v2;

    // Capture
    10000 cuStreamBeginCapture(stream: Handle) + cuStreamBeginCapture_ptsz => capture::begin_v1;
    10010 cuStreamBeginCapture_v2(stream: Handle, mode: c_int) + cuStreamBeginCapture_v2_ptsz => capture::begin;
    12030 cuStreamBeginCaptureToGraph(stream: Handle, graph: Handle, dependencies: In<Handle>, edges: In<u8>, count: usize, mode: c_int) + cuStreamBeginCaptureToGraph_ptsz => capture::begin_to_graph;
    10000 cuStreamEndCapture(stream: Handle, out: Out<Handle>) + cuStreamEndCapture_ptsz => capture::end;
    10000 cuStreamIsCapturing(stream: Handle, out: Out<c_int>) + cuStreamIsCapturing_ptsz => capture::is_capturing;
    10010 cuStreamGetCaptureInfo(stream: Handle, out: Out<c_int>, id: Out<u64>) + cuStreamGetCaptureInfo_ptsz => capture::info_v1;
    11030 cuStreamGetCaptureInfo_v2(stream: Handle, out: Out<c_int>, id: Out<u64>, graph: Out<Handle>, nodes: Out<usize>, count: Out<usize>) + cuStreamGetCaptureInfo_v2_ptsz => capture::info_v2;
    12030 cuStreamGetCaptureInfo_v3(stream: Handle, out: Out<c_int>, id: Out<u64>, graph: Out<Handle>, nodes: Out<usize>, edges: Out<usize>, count: Out<usize>) + cuStreamGetCaptureInfo_v3_ptsz => capture::info_v3;
    10010 cuThreadExchangeStreamCaptureMode(mode: Out<c_int>) => capture::exchange_mode;

    // Events
    2000 cuEventCreate(out: Out<Handle>, flags: c_uint) => event::create;
    2000 cuEventRecord(event: Handle, stream: Handle) + cuEventRecord_ptsz => event::record;
    11010 cuEventRecordWithFlags(event: Handle, stream: Handle, flags: c_uint) + cuEventRecordWithFlags_ptsz => event::record_with_flags;
    2000 cuEventQuery(event: Handle) => event::query;
    2000 cuEventSynchronize(event: Handle) => event::synchronize;
    2000 cuEventDestroy(event: Handle) => event::destroy;
    4000 cuEventDestroy_v2(event: Handle) => event::destroy;
    2000 cuEventElapsedTime(out: Out<f32>, start: Handle, end: Handle) => event::elapsed;
    12080 cuEventElapsedTime_v2(out: Out<f32>, start: Handle, end: Handle) => event::elapsed;

    // Modules, libraries, functions
    2000 cuModuleLoad(out: Out<Handle>, path: In<c_char>) => module::load_file;
    2000 cuModuleLoadData(out: Out<Handle>, image: In<c_void>) => module::load_data;
    2010 cuModuleLoadDataEx(out: Out<Handle>, image: In<c_void>, count: c_uint, options: In<c_int>, values: In<usize>) => module::load_data_ex;
    2000 cuModuleLoadFatBinary(out: Out<Handle>, image: In<c_void>) => module::load_data;
    2000 cuModuleUnload(module: Handle) => module::unload;
    2000 cuModuleGetFunction(out: Out<Handle>, module: Handle, name: In<c_char>) => module::get_function;
    12040 cuModuleGetFunctionCount(out: Out<c_uint>, module: Handle) => module::function_count;
    3020 cuModuleGetGlobal_v2(address: Out<u64>, bytes: Out<usize>, module: Handle, name: In<c_char>) => module::get_global;
    11070 cuModuleGetLoadingMode(out: Out<c_int>) => module::loading_mode;
    12000 cuLibraryLoadData(out: Out<Handle>, image: In<c_void>, options: In<c_int>, values: In<usize>, count: c_uint, library_options: In<c_int>, library_values: In<usize>, library_count: c_uint) => module::library_load_data;
    12000 cuLibraryLoadFromFile(out: Out<Handle>, path: In<c_char>, options: In<c_int>, values: In<usize>, count: c_uint, library_options: In<c_int>, library_values: In<usize>, library_count: c_uint) => module::library_load_file;
    12000 cuLibraryUnload(library: Handle) => module::unload_library;
    12000 cuLibraryGetKernel(out: Out<Handle>, library: Handle, name: In<c_char>) => module::library_kernel;
    12000 cuLibraryGetModule(out: Out<Handle>, library: Handle) => module::library_module;
    12000 cuLibraryGetGlobal(address: Out<u64>, bytes: Out<usize>, library: Handle, name: In<c_char>) => module::library_global;
    12000 cuLibraryGetManaged(address: Out<u64>, bytes: Out<usize>, library: Handle, name: In<c_char>) => module::library_managed;
    12040 cuLibraryGetKernelCount(out: Out<c_uint>, library: Handle) => module::function_count;
    12000 cuKernelGetFunction(out: Out<Handle>, kernel: Handle) => module::kernel_function;
    12000 cuKernelGetAttribute(out: Out<c_int>, attribute: c_int, kernel: Handle, device: c_int) => module::kernel_attribute;
    12000 cuKernelSetAttribute(attribute: c_int, value: c_int, kernel: Handle, device: c_int) => module::set_kernel_attribute;
    12030 cuKernelGetName(out: Out<*const c_char>, kernel: Handle) => module::kernel_name;
    12040 cuKernelGetParamInfo(kernel: Handle, index: usize, offset: Out<usize>, bytes: Out<usize>) => module::kernel_param;
    2020 cuFuncGetAttribute(out: Out<c_int>, attribute: c_int, function: Handle) => module::function_attribute;
    9000 cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int) => module::set_function_attribute;
    3000 cuFuncSetCacheConfig(function: Handle, config: c_int) => module::set_cache_config;
    4020 cuFuncSetSharedMemConfig(function: Handle, config: c_int) => module::set_cache_config;
    11000 cuFuncGetModule(out: Out<Handle>, function: Handle) => module::function_module;
    12030 cuFuncGetName(out: Out<*const c_char>, function: Handle) => module::function_name;
    12040 cuFuncGetParamInfo(function: Handle, index: usize, offset: Out<usize>, bytes: Out<usize>) => module::function_param;
    12040 cuFuncIsLoaded(out: Out<c_int>, function: Handle) => module::is_loaded;
    12040 cuFuncLoad(function: Handle) => module::load_function;
    6050 cuOccupancyMaxActiveBlocksPerMultiprocessor(out: Out<c_int>, function: Handle, block: c_int, shared: usize) => module::occupancy;
    7000 cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out: Out<c_int>, function: Handle, block: c_int, shared: usize, flags: c_uint) => module::occupancy_with_flags;
    6050 cuOccupancyMaxPotentialBlockSize(grid: Out<c_int>, block: Out<c_int>, function: Handle, shared_of: usize, shared: usize, limit: c_int) => module::potential_block_size;
    5050 cuLinkCreate(count: c_uint, options: In<c_int>, values: In<usize>, out: Out<Handle>) => module::link_create;
    6050 cuLinkCreate_v2(count: c_uint, options: In<c_int>, values: In<usize>, out: Out<Handle>) => module::link_create;
    5050 cuLinkAddData(link: Handle, kind: c_int, data: In<u8>, bytes: usize, name: In<c_char>, count: c_uint, options: In<c_int>, values: In<usize>) => module::link_add_data;
    6050 cuLinkAddData_v2(link: Handle, kind: c_int, data: In<u8>, bytes: usize, name: In<c_char>, count: c_uint, options: In<c_int>, values: In<usize>) => module::link_add_data;
    5050 cuLinkAddFile(link: Handle, kind: c_int, path: In<c_char>, count: c_uint, options: In<c_int>, values: In<usize>) => module::link_add_file;
    6050 cuLinkAddFile_v2(link: Handle, kind: c_int, path: In<c_char>, count: c_uint, options: In<c_int>, values: In<usize>) => module::link_add_file;
    5050 cuLinkComplete(link: Handle, out: Out<usize>, bytes: Out<usize>) => module::link_complete;
    5050 cuLinkDestroy(link: Handle) => module::link_destroy;

    // Launches
    4000 cuLaunchKernel(function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared: c_uint, stream: Handle, params: In<usize>, extra: In<usize>) + cuLaunchKernel_ptsz => launch::kernel;
    11060 cuLaunchKernelEx(config: In<launch::Config>, function: Handle, params: In<usize>, extra: In<usize>) + cuLaunchKernelEx_ptsz => launch::kernel_ex;
    9000 cuLaunchCooperativeKernel(function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared: c_uint, stream: Handle, params: In<usize>) + cuLaunchCooperativeKernel_ptsz => launch::cooperative;
    9000 cuLaunchCooperativeKernelMultiDevice(list: In<u8>, count: c_uint, flags: c_uint) -> NOT_SUPPORTED;
    2000 cuLaunch(function: Handle) -> NOT_SUPPORTED;
    2000 cuLaunchGrid(function: Handle, width: c_int, height: c_int) -> NOT_SUPPORTED;
    2000 cuLaunchGridAsync(function: Handle, width: c_int, height: c_int, stream: Handle) -> NOT_SUPPORTED;

    // Graphs
    10000 cuGraphCreate(out: Out<Handle>, flags: c_uint) => graph::create;
    10000 cuGraphDestroy(graph: Handle) => graph::destroy;
    10000 cuGraphClone(out: Out<Handle>, graph: Handle) => graph::clone;
    10000 cuGraphAddKernelNode(out: Out<Handle>, graph: Handle, dependencies: In<Handle>, count: usize, node: In<graph::KernelNode>) => graph::add_kernel;
    12000 cuGraphAddKernelNode_v2(out: Out<Handle>, graph: Handle, dependencies: In<Handle>, count: usize, node: In<graph::KernelNode>) => graph::add_kernel;
    10000 cuGraphAddMemcpyNode(out: Out<Handle>, graph: Handle, dependencies: In<Handle>, count: usize, node: In<Copy3d>, context: Handle) => graph::add_memcpy;
    10000 cuGraphAddMemsetNode(out: Out<Handle>, graph: Handle, dependencies: In<Handle>, count: usize, node: In<graph::MemsetNode>, context: Handle) => graph::add_memset;
    10000 cuGraphAddHostNode(out: Out<Handle>, graph: Handle, dependencies: In<Handle>, count: usize, node: In<graph::HostNode>) => graph::add_host;
    10000 cuGraphAddEmptyNode(out: Out<Handle>, graph: Handle, dependencies: In<Handle>, count: usize) => graph::add_empty;
    12020 cuGraphAddNode(out: Out<Handle>, graph: Handle, dependencies: In<Handle>, count: usize, node: Out<graph::AnyNode>) => graph::add_any;
    12030 cuGraphAddNode_v2(out: Out<Handle>, graph: Handle, dependencies: In<Handle>, edges: In<u8>, count: usize, node: Out<graph::AnyNode>) => graph::add_any_v2;
    10000 cuGraphGetNodes(graph: Handle, list: Out<Handle>, count: Out<usize>) => graph::nodes;
    11040 cuGraphAddMemAllocNode(out: Out<Handle>, graph: Handle, dependencies: In<Handle>, count: usize, params: Out<graph_memory::AllocNode>) => graph::add_alloc;
    11040 cuGraphMemAllocNodeGetParams(node: Handle, out: Out<graph_memory::AllocNode>) => graph::alloc_params;
    11040 cuGraphAddMemFreeNode(out: Out<Handle>, graph: Handle, dependencies: In<Handle>, count: usize, address: u64) => graph::add_free;
    11040 cuGraphMemFreeNodeGetParams(node: Handle, out: Out<u64>) => graph::free_params;
    11040 cuDeviceGraphMemTrim(device: c_int) => graph_memory::trim;
    11040 cuDeviceGetGraphMemAttribute(device: c_int, attribute: c_int, out: Out<c_void>) => graph_memory::attribute;
    11040 cuDeviceSetGraphMemAttribute(device: c_int, attribute: c_int, value: In<c_void>) => graph_memory::set_attribute;
    10000 cuGraphKernelNodeGetParams(node: Handle, out: Out<graph::KernelNode>) => graph::kernel_params;
    12000 cuGraphKernelNodeGetParams_v2(node: Handle, out: Out<graph::KernelNode>) => graph::kernel_params;
    10000 cuGraphMemcpyNodeGetParams(node: Handle, out: Out<Copy3d>) => graph::memcpy_params;
    10000 cuGraphMemsetNodeGetParams(node: Handle, out: Out<graph::MemsetNode>) => graph::memset_params;
    10000 cuGraphNodeGetType(node: Handle, out: Out<c_int>) => graph::node_type;
    10000 cuGraphInstantiate(out: Out<Handle>, graph: Handle, node: Out<Handle>, log: Out<u8>, bytes: usize) => graph::instantiate_v1;
    11000 cuGraphInstantiate_v2(out: Out<Handle>, graph: Handle, node: Out<Handle>, log: Out<u8>, bytes: usize) => graph::instantiate_v1;
    11040 cuGraphInstantiateWithFlags(out: Out<Handle>, graph: Handle, flags: u64) also "cuGraphInstantiate" 12000 => graph::instantiate;
    12000 cuGraphInstantiateWithParams(out: Out<Handle>, graph: Handle, params: Out<graph::InstantiateParams>) + cuGraphInstantiateWithParams_ptsz => graph::instantiate_with_params;
    12000 cuGraphExecUpdate_v2(executable: Handle, graph: Handle, result: Out<graph::UpdateResult>) => graph::update;
    11000 cuGraphExecKernelNodeSetParams(executable: Handle, node: Handle, params: In<graph::KernelNode>) => graph::set_kernel;
    12000 cuGraphExecKernelNodeSetParams_v2(executable: Handle, node: Handle, params: In<graph::KernelNode>) => graph::set_kernel;
    11000 cuGraphExecMemcpyNodeSetParams(executable: Handle, node: Handle, params: In<Copy3d>, context: Handle) => graph::set_memcpy;
    11000 cuGraphExecMemsetNodeSetParams(executable: Handle, node: Handle, params: In<graph::MemsetNode>, context: Handle) => graph::set_memset;
    10000 cuGraphLaunch(executable: Handle, stream: Handle) + cuGraphLaunch_ptsz => graph::launch_graph;
    11010 cuGraphUpload(executable: Handle, stream: Handle) + cuGraphUpload_ptsz => graph::upload;
    10000 cuGraphExecDestroy(executable: Handle) => graph::destroy_executable;

    // Profiling tools start and stop here
    4000 cuProfilerStart() => driver::profiler;
    4000 cuProfilerStop() => driver::profiler;
}
}
