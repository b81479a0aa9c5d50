//! Devices: how many, what each is, and how they reach each other.

use crate::{CuResult, Device, Driver, MemoryPool};
use cudarc::driver::sys::CUuuid;
use std::ffi::{CStr, c_char, c_int};

use gpupool_machine::Uuid;
pub use gpupool_machine::dashed;

impl Driver {
    /// Initialises CUDA in this process (`cuInit`), for a process of our own: the library leaves that to the program.
    pub fn initialise(&self) -> CuResult {
        // SAFETY: the call takes a number only, and may be made at any time on any thread.
        unsafe { (self.cuInit)(0) }
    }

    /// How many GPUs the process sees (`cuDeviceGetCount`).
    pub fn ask_device_count(&self) -> Result<c_int, CuResult> {
        let mut count = 0;
        // SAFETY: the output is a local of the right type.
        unsafe { (self.cuDeviceGetCount)(&raw mut count) }.ok()?;
        Ok(count)
    }

    /// How many GPUs the process sees; 0 where the driver does not answer.
    pub fn device_count(&self) -> c_int {
        self.ask_device_count().unwrap_or(0)
    }

    /// The GPUs that the process sees; none where the driver does not answer.
    pub fn devices(&self) -> impl DoubleEndedIterator<Item = Device> + use<> {
        (0..self.device_count()).map(Device::from_raw)
    }

    /// One attribute of a device (`cuDeviceGetAttribute`), a number of `CUdevice_attribute`.
    pub fn device_attribute(&self, attribute: c_int, device: Device) -> Result<i32, CuResult> {
        let mut value = 0;
        // SAFETY: the output is a local of the right type.
        unsafe { (self.cuDeviceGetAttribute)(&raw mut value, attribute, device) }.ok()?;
        Ok(value)
    }

    /// Whether other processes share the contexts of this one on a device (`CU_DEVICE_ATTRIBUTE_MPS_ENABLED`); `false` with drivers
    /// before CUDA 12.2, which do not say.
    pub fn is_shared_by_mps(&self, device: Device) -> bool {
        const MPS_ENABLED: c_int = 133;
        self.device_attribute(MPS_ENABLED, device).is_ok_and(|value| value != 0)
    }

    /// Bytes of memory on a device (`cuDeviceTotalMem`).
    pub fn total_memory(&self, device: Device) -> Result<u64, CuResult> {
        let mut bytes = 0;
        // SAFETY: the output is a local of the right type.
        unsafe { (self.cuDeviceTotalMem_v2)(&raw mut bytes, device) }.ok()?;
        Ok(bytes as u64)
    }

    /// Free and total bytes of the device of the current context (`cuMemGetInfo`).
    pub fn memory(&self) -> Result<(u64, u64), CuResult> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the outputs are locals of the right types.
        unsafe { (self.cuMemGetInfo_v2)(&raw mut free, &raw mut total) }.ok()?;
        Ok((free as u64, total as u64))
    }

    /// Free bytes on the device of the current context (`cuMemGetInfo`).
    pub fn free_memory(&self) -> Result<u64, CuResult> {
        self.memory().map(|(free, _)| free)
    }

    /// Whether peer access from one device to another is possible (`cuDeviceCanAccessPeer`).
    pub fn can_access_peer(&self, from: Device, to: Device) -> Result<bool, CuResult> {
        let mut can = 0;
        // SAFETY: the output is a local of the right type.
        unsafe { (self.cuDeviceCanAccessPeer)(&raw mut can, from, to) }.ok()?;
        Ok(can != 0)
    }

    /// One attribute of the link between two devices (`cuDeviceGetP2PAttribute`), a number of `CUdevice_P2PAttribute`.
    pub fn peer_attribute(&self, attribute: c_int, from: Device, to: Device) -> Result<i32, CuResult> {
        let mut value = 0;
        // SAFETY: the output is a local of the right type.
        unsafe { (self.cuDeviceGetP2PAttribute)(&raw mut value, attribute, from, to) }.ok()?;
        Ok(value)
    }

    /// `0000:07:00.0` (`cuDeviceGetPCIBusId`); empty where the driver does not say.
    pub fn pci_address(&self, device: Device) -> String {
        let mut text = [0 as c_char; 32];
        // SAFETY: the length is the buffer's.
        let result = unsafe { (self.cuDeviceGetPCIBusId)(text.as_mut_ptr(), text.len() as c_int, device) };
        // SAFETY: after a success the buffer holds a NUL-terminated string; before, it is all NUL.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        if result.is_ok() { text.to_string_lossy().into_owned() } else { String::new() }
    }

    /// `NVIDIA H200` (`cuDeviceGetName`); empty where the driver does not say.
    pub fn name(&self, device: Device) -> String {
        let mut text = [0 as c_char; 128];
        // SAFETY: the length is one less than the buffer's, so the last byte stays NUL.
        let result = unsafe { (self.cuDeviceGetName)(text.as_mut_ptr(), text.len() as c_int - 1, device) };
        // SAFETY: the buffer ends with a NUL that the driver was not given.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        if result.is_ok() { text.to_string_lossy().into_owned() } else { String::new() }
    }

    /// The bytes of a device's UUID (`cuDeviceGetUuid`); zeros where the driver does not say.
    pub fn uuid_bytes(&self, device: Device) -> Uuid {
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: the output is a local of the right type.
        let known = unsafe { (self.cuDeviceGetUuid)(&raw mut uuid, device) }.is_ok();
        if known { uuid.bytes.map(|byte| byte as u8) } else { [0; 16] }
    }

    /// `GPU-…`, as `nvidia-smi` writes it.
    pub fn uuid(&self, device: Device) -> String {
        format!("GPU-{}", dashed(&self.uuid_bytes(device)))
    }

    /// The pool that `cuMemAllocAsync` takes from on a device now (`cuDeviceGetMemPool`). `None` before CUDA 11.2.
    pub fn current_mempool(&self, device: Device) -> Option<MemoryPool> {
        let mut pool = None;
        // SAFETY: the output is a local of the right type.
        unsafe { self.cuDeviceGetMemPool?(&raw mut pool, device) }.ok().ok()?;
        pool
    }

    /// The pool that a device starts with (`cuDeviceGetDefaultMemPool`). `None` before CUDA 11.2.
    pub fn default_mempool(&self, device: Device) -> Option<MemoryPool> {
        let mut pool = None;
        // SAFETY: the output is a local of the right type.
        unsafe { self.cuDeviceGetDefaultMemPool?(&raw mut pool, device) }.ok().ok()?;
        pool
    }

    /// Has a stream-ordered pool keep nothing that nobody uses (`cuMemPoolTrimTo`); bytes that it holds then. `None` where the driver refuses.
    pub fn trim_mempool(&self, pool: MemoryPool) -> Option<u64> {
        /// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
        const HELD: c_int = 5;
        let mut held = 0_u64;
        // SAFETY: the caller's pool, whose handle the driver checks, and a number.
        unsafe { self.cuMemPoolTrimTo?(pool, 0) }.ok().ok()?;
        // SAFETY: as above, and the output is a local of the type that this attribute has.
        unsafe { self.cuMemPoolGetAttribute?(pool, HELD, (&raw mut held).cast()) }.ok().ok()?;
        Some(held)
    }

    /// Whether kernels are loaded when they are first used (`cuModuleGetLoadingMode`). Drivers before CUDA 11.7 load them with
    /// their module.
    pub fn loads_lazily(&self) -> bool {
        /// `CU_MODULE_LAZY_LOADING`.
        const LAZY: c_int = 2;
        let Some(ask) = self.cuModuleGetLoadingMode else { return false };
        let mut mode = 0;
        // SAFETY: the output is a local of the right type.
        unsafe { ask(&raw mut mode) }.is_ok() && mode == LAZY
    }
}
