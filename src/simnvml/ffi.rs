//! Pointers of callers, and answers as NVML writes them.

use nvml_wrapper_sys::bindings::*;
use std::ffi::{CStr, c_char, c_uint};

/// What a call did, or NVML's code for why not.
pub type Answer<T = ()> = Result<T, nvmlReturn_t>;

pub fn answer(body: impl FnOnce() -> Answer) -> nvmlReturn_t {
    match body() {
        Ok(()) => nvmlReturn_enum_NVML_SUCCESS,
        Err(code) => code,
    }
}

/// Where a caller wants something written.
#[repr(transparent)]
pub struct Out<T>(*mut T);

/// What a caller lets us read.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T> Out<T> {
    pub fn required(&self) -> Answer {
        if self.0.is_null() { Err(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT) } else { Ok(()) }
    }

    pub fn set(&self, value: T) -> Answer {
        self.set_at(0, value)
    }

    /// Writes the element with this index of a list, which the caller said is long enough.
    pub fn set_at(&self, index: usize, value: T) -> Answer {
        self.required()?;
        // SAFETY: not null, so by the interface's contract it points to room for this.
        unsafe { self.0.add(index).write(value) };
        Ok(())
    }

    pub fn get(&self) -> Answer<T>
    where
        T: Copy,
    {
        self.required()?;
        // SAFETY: not null, so by the interface's contract it points to a value that the caller filled in.
        Ok(unsafe { self.0.read() })
    }
}

impl Out<c_char> {
    /// A text with the zero behind it.
    pub fn set_text(&self, text: &str, capacity: c_uint) -> Answer {
        self.required()?;
        if text.len() >= capacity as usize {
            return Err(nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
        }
        for (index, byte) in text.bytes().chain([0]).enumerate() {
            self.set_at(index, byte.cast_signed())?;
        }
        Ok(())
    }
}

impl In<c_char> {
    pub fn text(&self) -> Answer<String> {
        if self.0.is_null() {
            return Err(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
        }
        // SAFETY: not null, so by the interface's contract a string with a zero at its end.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

pub fn error_text(code: nvmlReturn_t) -> &'static CStr {
    match code {
        nvmlReturn_enum_NVML_SUCCESS => c"Success",
        nvmlReturn_enum_NVML_ERROR_UNINITIALIZED => c"Uninitialized",
        nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT => c"Invalid Argument",
        nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED => c"Not Supported",
        nvmlReturn_enum_NVML_ERROR_NOT_FOUND => c"Not Found",
        nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE => c"Insufficient Size",
        nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED => c"Driver Not Loaded",
        nvmlReturn_enum_NVML_ERROR_TIMEOUT => c"Timeout",
        nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH => c"Argument version mismatch",
        _ => c"Unknown Error",
    }
}
