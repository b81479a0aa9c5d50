//! The real driver: the functions behind the hooks ([`real`]) and the ones the shim calls for itself.

pub mod real;
mod result;

pub use result::CuResult;

use crate::hook::cancel;
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUkernel, CUmemAccessDesc, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemoryPool, CUstream, CUuuid,
};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use once_cell::race::OnceBox;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

macro_rules! functions {
    (
        every driver { $($name:ident($($t:ty),*);)* }
        newer drivers { $($newer:ident($($u:ty),*);)* }
    ) => {
        /// Functions of the driver interface that the shim calls for itself, by their exported names. None of these
        /// calls passes through a hook: the pointers come from the driver's own symbol table.
        #[allow(non_snake_case, reason = "the names are the driver's")]
        pub struct Driver {
            $(pub $name: unsafe extern "C" fn($($t),*) -> CuResult,)*
            $(pub $newer: Option<unsafe extern "C" fn($($u),*) -> CuResult>,)*
        }

        impl Driver {
            /// Resolves every function; the error names the first without which the shim can do nothing.
            fn load() -> Result<Self, String> {
                // SAFETY: loading libcuda runs its constructors, which the program's own use of CUDA does as well.
                let library = unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) }
                    .map_err(|error| format!("libcuda.so.1 can not be loaded: {error}"))?;
                let driver = Self {
                    $($name: {
                        // SAFETY: the type is the C signature of this exported name.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($t),*) -> CuResult>(concat!(stringify!($name), "\0").as_bytes()) };
                        *symbol.map_err(|_| concat!("this driver has no ", stringify!($name)).to_owned())?
                    },)*
                    $($newer: {
                        // SAFETY: as above.
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
        cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, u64);
        cuMemRelease(CUmemGenericAllocationHandle);
        cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, u64);
        cuMemUnmap(CUdeviceptr, usize);
        cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
        cuMemRetainAllocationHandle(*mut CUmemGenericAllocationHandle, *mut c_void);
        cuMemGetAllocationPropertiesFromHandle(*mut CUmemAllocationProp, CUmemGenericAllocationHandle);
        cuMemFree_v2(CUdeviceptr);
        cuMemExportToShareableHandle(*mut c_void, CUmemGenericAllocationHandle, c_int, u64);
        cuMemImportFromShareableHandle(*mut CUmemGenericAllocationHandle, *mut c_void, c_int);
        cuMemAllocManaged(*mut CUdeviceptr, usize, c_uint);
        cuMemAdvise(CUdeviceptr, usize, c_int, CUdevice);
        cuMemPrefetchAsync(CUdeviceptr, usize, CUdevice, CUstream);
    }
    newer drivers {
        cuCtxGetId(CUcontext, *mut u64);
        cuCtxRecordEvent(CUcontext, CUevent);
        cuMemAdvise_v2(CUdeviceptr, usize, c_int, CUmemLocation);
        cuFuncGetParamInfo(CUfunction, usize, *mut usize, *mut usize);
        cuKernelGetParamInfo(CUkernel, usize, *mut usize, *mut usize);
        cuMemPrefetchAsync_v2(CUdeviceptr, usize, CUmemLocation, c_uint, CUstream);
        cuDeviceGetDefaultMemPool(*mut CUmemoryPool, CUdevice);
        cuDeviceGetMemPool(*mut CUmemoryPool, CUdevice);
    }
}

/// The driver, or why it can not be used. `race`: two threads may both load it, which only costs time; waiting for one
/// another while the loader's lock is held could deadlock.
pub fn get() -> Result<&'static Driver, &'static str> {
    let load = || {
        let _sheltered = cancel::shelter();
        Box::new(Driver::load())
    };
    DRIVER.get_or_init(load).as_ref().map_err(String::as_str)
}

/// The driver, if it was loaded before.
#[inline]
pub fn at_hand() -> Option<&'static Driver> {
    DRIVER.get()?.as_ref().ok()
}

static DRIVER: OnceBox<Result<Driver, String>> = OnceBox::new();

impl Driver {
    /// The current context, or `None` where there is none.
    #[inline]
    pub fn current_context(&self) -> Option<CUcontext> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the output is a local of the right type.
        let result = unsafe { (self.cuCtxGetCurrent)(&raw mut context) };
        (result.is_ok() && !context.is_null()).then_some(context)
    }

    /// The driver's number of the current context, which no other one ever gets, or the answer of calls in a context that is
    /// gone or broken. `None` inside where the driver does not number contexts (before 12.0).
    pub fn current_life(&self) -> Result<Option<u64>, CuResult> {
        let mut bytes = 0;
        match self.cuCtxGetId {
            Some(_) => self.life(std::ptr::null_mut()),
            // SAFETY: the output is a local. Any question to the context does.
            None => unsafe { (self.cuCtxGetLimit)(&raw mut bytes, 0) }.ok().map(|()| None),
        }
    }

    /// The same of a context that the driver has just given to this thread, or of a primary one, whose handle is good for
    /// ever: null is the current one.
    pub fn life(&self, context: CUcontext) -> Result<Option<u64>, CuResult> {
        let Some(get_id) = self.cuCtxGetId else { return Ok(None) };
        let mut id = 0;
        // SAFETY: the output is a local, and the handle is one that the driver knows.
        unsafe { get_id(context, &raw mut id) }.ok()?;
        Ok(Some(id))
    }

    /// The device of the current context.
    #[inline]
    pub fn current_device(&self) -> Result<CUdevice, CuResult> {
        let mut device = 0;
        // SAFETY: the output is a local of the right type.
        unsafe { (self.cuCtxGetDevice)(&raw mut device) }.ok()?;
        Ok(device)
    }

    /// One attribute of a device (`CUdevice_attribute` as a number).
    pub fn device_attribute(&self, attribute: c_int, device: CUdevice) -> Result<i32, CuResult> {
        let mut value = 0;
        // SAFETY: the output is a local of the right type.
        unsafe { (self.cuDeviceGetAttribute)(&raw mut value, attribute, device) }.ok()?;
        Ok(value)
    }

    /// Whether the primary context of a device exists.
    pub fn primary_is_active(&self, device: CUdevice) -> bool {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the outputs are locals of the right types.
        let result = unsafe { (self.cuDevicePrimaryCtxGetState)(device, &raw mut flags, &raw mut active) };
        result.is_ok() && active != 0
    }

    /// How many GPUs the process sees; 0 where the driver does not answer.
    pub fn device_count(&self) -> CUdevice {
        let mut count = 0;
        // SAFETY: the output is a local of the right type.
        let result = unsafe { (self.cuDeviceGetCount)(&raw mut count) };
        if result.is_ok() { count } else { 0 }
    }

    /// `0000:07:00.0`; empty where the driver does not say.
    pub fn pci_address(&self, device: CUdevice) -> String {
        let mut text = [0 as c_char; 32];
        // SAFETY: the length is the buffer's.
        let result = unsafe { (self.cuDeviceGetPCIBusId)(text.as_mut_ptr(), text.len() as c_int, device) };
        // SAFETY: after a success the buffer holds a NUL-terminated string; before, it is all NUL.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        if result.is_ok() { text.to_string_lossy().into_owned() } else { String::new() }
    }

    /// `NVIDIA H200`; empty where the driver does not say.
    pub fn name(&self, device: CUdevice) -> String {
        let mut text = [0 as c_char; 128];
        // SAFETY: the length is one less than the buffer's, so the last byte stays NUL.
        let result = unsafe { (self.cuDeviceGetName)(text.as_mut_ptr(), text.len() as c_int - 1, device) };
        // SAFETY: the buffer ends with a NUL that the driver was not given.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        if result.is_ok() { text.to_string_lossy().into_owned() } else { String::new() }
    }

    /// The bytes of a device's UUID; zeros where the driver does not say.
    pub fn uuid_bytes(&self, device: CUdevice) -> [u8; 16] {
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: the output is a local of the right type.
        let known = unsafe { (self.cuDeviceGetUuid)(&raw mut uuid, device) }.is_ok();
        if known { uuid.bytes.map(|byte| byte as u8) } else { [0; 16] }
    }

    /// `GPU-…`, as nvidia-smi writes it.
    pub fn uuid(&self, device: CUdevice) -> String {
        format!("GPU-{}", crate::backend::nvml::dashed(&self.uuid_bytes(device)))
    }

    /// Free and total bytes of the device of the current context.
    pub fn memory(&self) -> Result<(u64, u64), CuResult> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the outputs are locals of the right types.
        unsafe { (self.cuMemGetInfo_v2)(&raw mut free, &raw mut total) }.ok()?;
        Ok((free as u64, total as u64))
    }

    /// Free bytes on the device of the current context.
    pub fn free_memory(&self) -> Result<u64, CuResult> {
        self.memory().map(|(free, _)| free)
    }
}
