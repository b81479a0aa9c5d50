//! What the driver says of an address, and of a kernel's parameters.

use crate::{CuResult, Driver, Function};
use cudarc::driver::sys::CUdeviceptr;
use std::ffi::{CStr, c_int, c_uint, c_void};

/// `CU_POINTER_ATTRIBUTE_IS_MANAGED`.
const IS_MANAGED: c_int = 8;
/// `CU_POINTER_ATTRIBUTE_RANGE_SIZE`.
const RANGE_SIZE: c_int = 12;
/// `CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES`.
const ALLOWED_HANDLE_TYPES: c_int = 14;

impl Driver {
    /// Bytes of the allocation that an address lies in (`cuPointerGetAttribute`).
    pub fn range_size(&self, address: u64) -> Result<u64, CuResult> {
        let mut bytes = 0_usize;
        // SAFETY: the output is a local of the attribute's type.
        unsafe { (self.cuPointerGetAttribute)((&raw mut bytes).cast(), RANGE_SIZE, address) }.ok()?;
        Ok(bytes as u64)
    }

    /// Whether an address lies in managed memory (`cuPointerGetAttribute`); an error where it lies in nothing that CUDA gave or was told of.
    pub fn is_managed(&self, address: u64) -> Result<bool, CuResult> {
        // The header calls it a boolean, and there is room for a wider one.
        let mut managed: u64 = 0;
        // SAFETY: the output is a local of at least the attribute's size.
        unsafe { (self.cuPointerGetAttribute)((&raw mut managed).cast(), IS_MANAGED, address) }.ok()?;
        Ok(managed != 0)
    }

    /// The ways in which the memory at an address can be shared (`cuPointerGetAttribute`), bits of `CUmemAllocationHandleType`.
    pub fn allowed_handle_types(&self, address: u64) -> Result<c_int, CuResult> {
        // The header calls it a bitmask, and the driver writes eight bytes (measured).
        let mut types: u64 = 0;
        // SAFETY: the output is a local of the size that the driver writes.
        unsafe { (self.cuPointerGetAttribute)((&raw mut types).cast(), ALLOWED_HANDLE_TYPES, address) }.ok()?;
        Ok(types as c_int)
    }

    /// Several attributes of an address at once (`cuPointerGetAttributes`).
    ///
    /// # Safety
    /// `attributes` has `count` numbers, and `data` as many pointers, each NULL or with room for its attribute.
    pub unsafe fn attributes(
        &self,
        count: c_uint,
        attributes: *mut c_int,
        data: *mut *mut c_void,
        address: CUdeviceptr,
    ) -> CuResult {
        // SAFETY: the caller vouches for the lists.
        unsafe { (self.cuPointerGetAttributes)(count, attributes, data, address) }
    }

    /// Offset and bytes of a kernel's parameter in its parameter buffer (`cuFuncGetParamInfo`, or `cuKernelGetParamInfo`,
    /// since a launch takes either handle). `None` behind the last one, and before CUDA 12.4.
    ///
    /// # Safety
    /// The handle is of a function or a kernel that lives.
    pub unsafe fn parameter(&self, function: Function, index: usize) -> Option<(usize, usize)> {
        let (mut offset, mut bytes) = (0, 0);
        let mut result = match self.cuFuncGetParamInfo {
            // SAFETY: the outputs are locals; the driver tells handles of functions from others.
            Some(call) => unsafe { call(function, index, &raw mut offset, &raw mut bytes) },
            None => CuResult::INVALID_HANDLE,
        };
        if result == CuResult::INVALID_HANDLE
            && let Some(call) = self.cuKernelGetParamInfo
        {
            // SAFETY: the outputs are locals; the driver tells handles of kernels from others.
            result = unsafe { call(function, index, &raw mut offset, &raw mut bytes) };
        }
        result.is_ok().then_some((offset, bytes))
    }

    /// The name of a kernel, as its module has it (`cuFuncGetName`, or `cuKernelGetName`, since a launch takes either handle).
    /// `None` before CUDA 12.3.
    ///
    /// # Safety
    /// The handle is of a function or a kernel that lives.
    pub unsafe fn name_of(&self, function: Function) -> Option<String> {
        let mut name = std::ptr::null();
        let mut result = match self.cuFuncGetName {
            // SAFETY: the output is a local; the driver tells handles of functions from others.
            Some(call) => unsafe { call(&raw mut name, function) },
            None => CuResult::INVALID_HANDLE,
        };
        if result == CuResult::INVALID_HANDLE
            && let Some(call) = self.cuKernelGetName
        {
            // SAFETY: the output is a local; the driver tells handles of kernels from others.
            result = unsafe { call(&raw mut name, function) };
        }
        if !result.is_ok() || name.is_null() {
            return None;
        }
        // SAFETY: the driver's string ends with NUL and lives as long as its module, which the caller vouches for.
        Some(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
    }

    /// Whether [`parameter`](Self::parameter) can answer with this driver.
    pub fn knows_parameters(&self) -> bool {
        self.cuFuncGetParamInfo.is_some()
    }
}
