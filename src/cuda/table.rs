//! The functions of the driver that the library calls for itself, as the driver exports them.

use crate::{Access, CuResult, Location, Properties};
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUkernel, CUmemGenericAllocationHandle, CUmemoryPool,
    CUstream, CUuuid,
};
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
        cuDeviceGetCount(*mut c_int);
        cuDeviceGetAttribute(*mut c_int, c_int, CUdevice);
        cuDeviceGetName(*mut c_char, c_int, CUdevice);
        cuDeviceGetUuid(*mut CUuuid, CUdevice);
        cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice);
        cuDeviceTotalMem_v2(*mut usize, CUdevice);
        cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
        cuDeviceGetP2PAttribute(*mut c_int, c_int, CUdevice, CUdevice);
        cuDevicePrimaryCtxGetState(CUdevice, *mut c_uint, *mut c_int);
        cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        cuDevicePrimaryCtxRelease_v2(CUdevice);
        cuCtxGetCurrent(*mut CUcontext);
        cuCtxGetDevice(*mut CUdevice);
        cuCtxPushCurrent_v2(CUcontext);
        cuCtxPopCurrent_v2(*mut CUcontext);
        cuCtxSynchronize();
        cuCtxGetLimit(*mut usize, c_int);
        cuCtxSetLimit(c_int, usize);
        cuStreamCreate(*mut CUstream, c_uint);
        cuStreamDestroy_v2(CUstream);
        cuStreamGetCtx(CUstream, *mut CUcontext);
        cuStreamIsCapturing(CUstream, *mut c_int);
        cuStreamSynchronize(CUstream);
        cuThreadExchangeStreamCaptureMode(*mut c_int);
        cuEventCreate(*mut CUevent, c_uint);
        cuEventQuery(CUevent);
        cuEventDestroy_v2(CUevent);
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost(*mut c_void);
        cuPointerGetAttribute(*mut c_void, c_int, CUdeviceptr);
        cuPointerGetAttributes(c_uint, *mut c_int, *mut *mut c_void, CUdeviceptr);
        cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, u64);
        cuMemAddressFree(CUdeviceptr, usize);
        cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const Properties, u64);
        cuMemRelease(CUmemGenericAllocationHandle);
        cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, u64);
        cuMemUnmap(CUdeviceptr, usize);
        cuMemSetAccess(CUdeviceptr, usize, *const Access, usize);
        cuMemRetainAllocationHandle(*mut CUmemGenericAllocationHandle, *mut c_void);
        cuMemGetAllocationPropertiesFromHandle(*mut Properties, CUmemGenericAllocationHandle);
        cuMemFree_v2(CUdeviceptr);
        cuMemExportToShareableHandle(*mut c_void, CUmemGenericAllocationHandle, c_int, u64);
        cuMemImportFromShareableHandle(*mut CUmemGenericAllocationHandle, *mut c_void, c_int);
        cuMemAllocManaged(*mut CUdeviceptr, usize, c_uint);
        cuMemAdvise(CUdeviceptr, usize, c_int, CUdevice);
        cuMemPrefetchAsync(CUdeviceptr, usize, CUdevice, CUstream);
    }
    newer drivers {
        cuModuleGetLoadingMode(*mut c_int);
        cuCtxGetId(CUcontext, *mut u64);
        cuCtxRecordEvent(CUcontext, CUevent);
        cuMemAdvise_v2(CUdeviceptr, usize, c_int, Location);
        cuFuncGetParamInfo(CUfunction, usize, *mut usize, *mut usize);
        cuKernelGetParamInfo(CUkernel, usize, *mut usize, *mut usize);
        cuMemPrefetchAsync_v2(CUdeviceptr, usize, Location, c_uint, CUstream);
        cuDeviceGetDefaultMemPool(*mut CUmemoryPool, CUdevice);
        cuDeviceGetMemPool(*mut CUmemoryPool, CUdevice);
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
