//! The driver as a program finds it: `dlopen("libcuda.so.1")` and `dlsym`, which is where the shim stands.

use std::ffi::{CStr, c_char, c_int, c_void};

/// A `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Location {
    pub kind: c_int,
    pub id: c_int,
}

/// A `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Properties {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: Location,
    pub windows: usize,
    pub flags: [u8; 8],
}

/// A `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Access {
    pub location: Location,
    pub flags: c_int,
}

/// A `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Copy2d {
    pub from_x: usize,
    pub from_y: usize,
    pub from_kind: c_int,
    pub from_host: usize,
    pub from_device: u64,
    pub from_array: usize,
    pub from_pitch: usize,
    pub to_x: usize,
    pub to_y: usize,
    pub to_kind: c_int,
    pub to_host: usize,
    pub to_device: u64,
    pub to_array: usize,
    pub to_pitch: usize,
    pub width: usize,
    pub height: usize,
}

/// A `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IpcHandle(pub [u8; 64]);

macro_rules! functions {
    ($($name:ident($($p:ident: $t:ty),*);)*) => {
        /// Functions by their exported names; each answers with its `CUresult`.
        #[allow(non_snake_case, reason = "the names are the driver's")]
        pub struct Driver {
            library: *mut c_void,
            $($name: unsafe extern "C" fn($($t),*) -> c_int,)*
        }

        #[allow(non_snake_case, reason = "the names are the driver's")]
        impl Driver {
            /// Loads the driver; the program ends where it lacks a function.
            pub fn load() -> Self {
                // SAFETY: the name is NUL-terminated.
                let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
                assert!(!library.is_null(), "libcuda.so.1 cannot be loaded");
                Self {
                    library,
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: the name is NUL-terminated, and the handle is that of the library.
                        let found = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
                        assert!(!found.is_null(), "no {name} in libcuda.so.1");
                        // SAFETY: the export of this name has this C signature.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($t),*) -> c_int>(found) }
                    },)*
                }
            }

            $(
                #[allow(clippy::too_many_arguments, reason = "as many as the driver's function has")]
                pub fn $name(&self, $($p: $t),*) -> c_int {
                    // SAFETY: references are valid for what the function reads and writes, and every address and handle
                    // may be any value: that the driver refuses wrong ones is part of what is compared.
                    unsafe { (self.$name)($($p),*) }
                }
            )*
        }
    };
}

functions! {
    cuInit(flags: u32);
    cuDeviceGetCount(count: &mut c_int);
    cuDeviceTotalMem_v2(bytes: &mut usize, device: c_int);
    cuDeviceGetDefaultMemPool(pool: &mut usize, device: c_int);
    cuDevicePrimaryCtxRetain(context: &mut usize, device: c_int);
    cuCtxCreate_v2(context: &mut usize, flags: u32, device: c_int);
    cuCtxDestroy_v2(context: usize);
    cuCtxSetCurrent(context: usize);
    cuCtxEnablePeerAccess(peer: usize, flags: u32);
    cuMemGetInfo_v2(free: &mut usize, total: &mut usize);
    cuMemAlloc_v2(address: &mut u64, bytes: usize);
    cuMemAllocPitch_v2(address: &mut u64, pitch: &mut usize, width: usize, height: usize, element: u32);
    cuMemFree_v2(address: u64);
    cuMemGetAddressRange_v2(base: &mut u64, bytes: &mut usize, address: u64);
    cuPointerGetAttribute(data: &mut [u64; 2], attribute: c_int, address: u64);
    cuPointerGetAttributes(count: u32, attributes: &c_int, data: &*mut u64, address: u64);

    cuMemHostAlloc(pointer: &mut u64, bytes: usize, flags: u32);
    cuMemAllocHost_v2(pointer: &mut u64, bytes: usize);
    cuMemFreeHost(pointer: u64);
    cuMemHostRegister_v2(pointer: u64, bytes: usize, flags: u32);
    cuMemHostUnregister(pointer: u64);
    cuMemHostGetDevicePointer_v2(address: &mut u64, pointer: u64, flags: u32);
    cuMemHostGetFlags(flags: &mut u32, pointer: u64);

    cuMemAllocManaged(address: &mut u64, bytes: usize, flags: u32);
    cuMemAdvise_v2(address: u64, bytes: usize, advice: c_int, location: Location);
    cuMemPrefetchAsync_v2(address: u64, bytes: usize, location: Location, flags: u32, stream: usize);

    cuMemAllocAsync(address: &mut u64, bytes: usize, stream: usize);
    cuMemAllocFromPoolAsync(address: &mut u64, bytes: usize, pool: usize, stream: usize);
    cuMemFreeAsync(address: u64, stream: usize);
    cuMemPoolSetAccess(pool: usize, list: *const Access, count: usize);
    cuMemPoolTrimTo(pool: usize, keep: usize);
    cuMemPoolGetAttribute(pool: usize, attribute: c_int, value: &mut u64);

    cuMemAddressReserve(address: &mut u64, bytes: usize, alignment: usize, hint: u64, flags: u64);
    cuMemAddressFree(address: u64, bytes: usize);
    cuMemCreate(handle: &mut u64, bytes: usize, properties: &Properties, flags: u64);
    cuMemRelease(handle: u64);
    cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    cuMemUnmap(address: u64, bytes: usize);
    cuMemSetAccess(address: u64, bytes: usize, list: *const Access, count: usize);
    cuMemGetAccess(flags: &mut u64, location: &Location, address: u64);
    cuMemGetAllocationPropertiesFromHandle(properties: &mut Properties, handle: u64);
    cuMemRetainAllocationHandle(handle: &mut u64, address: u64);
    cuMemExportToShareableHandle(descriptor: &mut c_int, handle: u64, kind: c_int, flags: u64);
    cuMemImportFromShareableHandle(handle: &mut u64, descriptor: usize, kind: c_int);

    cuIpcGetMemHandle(handle: &mut IpcHandle, address: u64);
    cuIpcOpenMemHandle_v2(address: &mut u64, handle: IpcHandle, flags: u32);
    cuIpcCloseMemHandle(address: u64);

    cuMemcpy(to: u64, from: u64, bytes: usize);
    cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: usize);
    cuMemcpyHtoD_v2(to: u64, from: *const u8, bytes: usize);
    cuMemcpyDtoH_v2(to: *mut u8, from: u64, bytes: usize);
    cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize);
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize);
    cuMemcpy2D_v2(copy: &Copy2d);
    cuMemsetD8_v2(address: u64, value: u8, count: usize);
    cuMemsetD8Async(address: u64, value: u8, count: usize, stream: usize);
    cuMemsetD32Async(address: u64, value: u32, count: usize, stream: usize);

    cuStreamCreate(stream: &mut usize, flags: u32);
    cuStreamDestroy_v2(stream: usize);
    cuStreamSynchronize(stream: usize);
    cuStreamBeginCapture_v2(stream: usize, mode: c_int);
    cuStreamEndCapture(stream: usize, graph: &mut usize);
    cuStreamIsCapturing(stream: usize, status: &mut c_int);
    cuGraphInstantiateWithFlags(exec: &mut usize, graph: usize, flags: u64);
    cuGraphLaunch(exec: usize, stream: usize);
    cuGraphExecDestroy(exec: usize);
    cuGraphDestroy(graph: usize);

    cuModuleLoadData(module: &mut usize, image: *const c_char);
    cuModuleGetFunction(function: &mut usize, module: usize, name: *const c_char);
    cuLaunchKernel(function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: usize, parameters: *const *const c_void, extra: *const *const c_void);
}

impl Driver {
    /// A function of the simulated driver's own, or of the shim's where `name` says so: no argument, one number back.
    pub fn ask(&self, name: &CStr) -> Option<u64> {
        let handle = if name.to_bytes().starts_with(b"simcuda_") { self.library } else { libc::RTLD_DEFAULT };
        // SAFETY: the name is NUL-terminated.
        let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
        // SAFETY: the functions asked for take nothing and return this.
        (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> u64>(found)() })
    }

    /// Bytes in use on a GPU, as the simulated driver counts them; nothing of a real one, where others use memory, too.
    pub fn used(&self, device: c_int) -> Option<u64> {
        // SAFETY: the name is NUL-terminated.
        let found = unsafe { libc::dlsym(self.library, c"simcuda_used".as_ptr()) };
        // SAFETY: the function has this signature.
        (!found.is_null())
            .then(|| unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(c_int) -> u64>(found)(device) })
    }
}

// SAFETY: the fields are addresses of a library that stays loaded.
unsafe impl Sync for Driver {}
