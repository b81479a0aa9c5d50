//! The functions of the driver that the library calls for itself, as the driver exports them.

use crate::{
    Access, Context, CuResult, Device, Event, Function, Graph, GreenContext, LinkState, Location, MemoryPool, Module,
    Node, Physical, Properties, Stream,
};
use cudarc::driver::sys::{CUDA_KERNEL_NODE_PARAMS_v2, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUdeviceptr, CUuuid};
use gpupool_interpose::cancel;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use once_cell::race::OnceBox;
use std::ffi::{OsStr, c_char, c_int, c_uint, c_void};

macro_rules! functions {
    (
        every driver { $($name:ident($($t:ty),*);)* }
        newer drivers { $($newer:ident($($u:ty),*);)* }
    ) => {
        /// Functions of the driver interface that the library calls for itself, by their exported names. None of these
        /// calls passes through a hook: the pointers come from the driver's own symbol table.
        #[allow(non_snake_case, reason = "the names are the driver's")]
        pub struct Driver {
            $(pub(crate) $name: unsafe extern "C" fn($($t),*) -> CuResult,)*
            $(pub(crate) $newer: Option<unsafe extern "C" fn($($u),*) -> CuResult>,)*
        }

        impl Driver {
            /// Loads this library and resolves every function. The error names the library, or the first function without
            /// which nothing can be done.
            pub fn load(library: impl AsRef<OsStr>) -> Result<Self, String> {
                let name = library.as_ref();
                // SAFETY: loading libcuda runs its constructors, which the program's own use of CUDA does as well.
                let library = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }
                    .map_err(|error| format!("{} cannot be loaded: {error}", name.display()))?;
                let driver = Self {
                    $($name: {
                        // SAFETY: the type is the C signature of this exported name.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($t),*) -> CuResult>(concat!(stringify!($name), "\0").as_bytes()) };
                        *symbol.map_err(|_| concat!("this driver has no ", stringify!($name)).to_owned())?
                    },)*
                    $($newer: {
                        // SAFETY: the type is the C signature of this exported name.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($u),*) -> CuResult>(concat!(stringify!($newer), "\0").as_bytes()) };
                        symbol.ok().map(|symbol| *symbol)
                    },)*
                };
                // The pointers are used until the process ends.
                std::mem::forget(library);
                Ok(driver)
            }
        }
    };
}

functions! {
    every driver {
        cuInit(c_uint);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGetAttribute(*mut c_int, c_int, Device);
        cuDeviceGetName(*mut c_char, c_int, Device);
        cuDeviceGetUuid(*mut CUuuid, Device);
        cuDeviceGetPCIBusId(*mut c_char, c_int, Device);
        cuDeviceTotalMem_v2(*mut usize, Device);
        cuDeviceCanAccessPeer(*mut c_int, Device, Device);
        cuDeviceGetP2PAttribute(*mut c_int, c_int, Device, Device);
        cuDevicePrimaryCtxGetState(Device, *mut c_uint, *mut c_int);
        cuDevicePrimaryCtxRetain(*mut Option<Context>, Device);
        cuDevicePrimaryCtxRelease_v2(Device);
        cuCtxDestroy_v2(Context);
        cuCtxGetCurrent(*mut Option<Context>);
        cuCtxGetDevice(*mut Device);
        cuCtxPushCurrent_v2(Context);
        cuCtxPopCurrent_v2(*mut Option<Context>);
        cuCtxSynchronize();
        cuCtxGetLimit(*mut usize, c_int);
        cuCtxSetLimit(c_int, usize);
        cuStreamCreate(*mut Stream, c_uint);
        cuStreamDestroy_v2(Stream);
        cuStreamGetCtx(Stream, *mut Option<Context>);
        cuStreamIsCapturing(Stream, *mut c_int);
        cuStreamSynchronize(Stream);
        cuThreadExchangeStreamCaptureMode(*mut c_int);
        cuEventCreate(*mut Option<Event>, c_uint);
        cuEventQuery(Event);
        cuEventRecord(Event, Stream);
        cuEventElapsedTime(*mut f32, Event, Event);
        cuEventSynchronize(Event);
        cuEventDestroy_v2(Event);
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        cuMemHostUnregister(*mut c_void);
        cuMemFreeHost(*mut c_void);
        cuPointerGetAttribute(*mut c_void, c_int, CUdeviceptr);
        cuPointerGetAttributes(c_uint, *mut c_int, *mut *mut c_void, CUdeviceptr);
        cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, u64);
        cuMemAddressFree(CUdeviceptr, usize);
        cuMemCreate(*mut Physical, usize, *const Properties, u64);
        cuMemRelease(Physical);
        cuMemMap(CUdeviceptr, usize, usize, Physical, u64);
        cuMemUnmap(CUdeviceptr, usize);
        cuMemSetAccess(CUdeviceptr, usize, *const Access, usize);
        cuMemRetainAllocationHandle(*mut Physical, *mut c_void);
        cuMemGetAllocationPropertiesFromHandle(*mut Properties, Physical);
        cuMemFree_v2(CUdeviceptr);
        cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, Stream);
        cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, Stream);
        cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, Stream);
        cuMemExportToShareableHandle(*mut c_void, Physical, c_int, u64);
        cuMemImportFromShareableHandle(*mut Physical, *mut c_void, c_int);
        cuMemAllocManaged(*mut CUdeviceptr, usize, c_uint);
        cuMemAdvise(CUdeviceptr, usize, c_int, Device);
        cuMemPrefetchAsync(CUdeviceptr, usize, Device, Stream);
    }
    newer drivers {
        cuModuleGetLoadingMode(*mut c_int);
        cuCtxGetId(Option<Context>, *mut u64);
        cuGreenCtxDestroy(GreenContext);
        cuStreamGetGreenCtx(Stream, *mut Option<GreenContext>);
        cuCtxRecordEvent(Context, Event);
        cuMemAdvise_v2(CUdeviceptr, usize, c_int, Location);
        cuFuncGetName(*mut *const c_char, Function);
        cuKernelGetName(*mut *const c_char, Function);
        cuFuncGetParamInfo(Function, usize, *mut usize, *mut usize);
        cuKernelGetParamInfo(Function, usize, *mut usize, *mut usize);
        cuMemPrefetchAsync_v2(CUdeviceptr, usize, Location, c_uint, Stream);
        cuDeviceGetDefaultMemPool(*mut Option<MemoryPool>, Device);
        cuDeviceGetMemPool(*mut Option<MemoryPool>, Device);
        cuMemPoolTrimTo(MemoryPool, usize);
        cuMemPoolGetAttribute(MemoryPool, c_int, *mut c_void);
        cuGraphGetNodes(Graph, *mut Option<Node>, *mut usize);
        cuGraphNodeGetType(Node, *mut c_int);
        cuGraphKernelNodeGetParams_v2(Node, *mut CUDA_KERNEL_NODE_PARAMS_v2);
        cuGraphMemcpyNodeGetParams(Node, *mut CUDA_MEMCPY3D);
        cuGraphMemsetNodeGetParams(Node, *mut CUDA_MEMSET_NODE_PARAMS);
        cuGraphChildGraphNodeGetGraph(Node, *mut Option<Graph>);
        cuLinkCreate_v2(c_uint, *mut c_int, *mut *mut c_void, *mut Option<LinkState>);
        cuLinkAddData_v2(LinkState, c_int, *mut c_void, usize, *const c_char, c_uint, *mut c_int, *mut *mut c_void);
        cuLinkComplete(LinkState, *mut *mut c_void, *mut usize);
        cuLinkDestroy(LinkState);
        cuModuleLoadData(*mut Option<Module>, *const c_void);
        cuModuleGetFunction(*mut Option<Function>, Option<Module>, *const c_char);
        cuLaunchKernel(Function, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Stream, *mut *mut c_void, *mut *mut c_void);
    }
}

/// The driver, or why it cannot be used. `race`: two threads may both load it, which only costs time; waiting for one
/// another while the loader's lock is held could deadlock.
#[inline]
pub fn get() -> Result<&'static Driver, &'static str> {
    let load = || {
        let _sheltered = cancel::shelter();
        Box::new(Driver::load("libcuda.so.1"))
    };
    DRIVER.get_or_init(load).as_ref().map_err(String::as_str)
}

/// The driver, if it was loaded before.
#[inline]
pub fn at_hand() -> Option<&'static Driver> {
    DRIVER.get()?.as_ref().ok()
}

static DRIVER: OnceBox<Result<Driver, String>> = OnceBox::new();
