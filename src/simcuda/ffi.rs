//! Pointers that cross the C boundary, and the structures whose fields callers may fill with anything.
//!
//! [`Out`] and [`In`] have the layout of plain pointers, so an export can take them directly. They exist because nearly
//! every driver call reads or writes through a caller's pointer: with them the null check and the one `unsafe` line live
//! here, and the bodies of the calls are safe functions.

use crate::error::{Code, Outcome};
use std::ffi::{CStr, c_char, c_int, c_void};

/// An opaque handle (`CUcontext`, `CUstream` and so on): an id that is looked up, never a pointer that is followed.
pub type Handle = usize;

/// A caller's output pointer; null, or valid for one write of `T` (of an array, for as many as the call's count says).
#[repr(transparent)]
#[derive(Debug)]
pub struct Out<T>(*mut T);

/// A caller's input pointer; null, or valid for reads as [`Out`] is for writes.
#[repr(transparent)]
#[derive(Debug)]
pub struct In<T>(*const T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Out<T> {}
impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for In<T> {}

impl<T> Out<T> {
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// INVALID_VALUE for a null pointer; for calls that must refuse before they change anything.
    pub fn required(self) -> Outcome<Self> {
        if self.is_null() { Err(Code::INVALID_VALUE) } else { Ok(self) }
    }

    /// Writes, or answers INVALID_VALUE for a null pointer.
    pub fn set(self, value: T) -> Outcome {
        self.required()?.set_at(0, value);
        Ok(())
    }

    /// Writes where the interface lets the caller pass null for "not interested".
    pub fn set_if_wanted(self, value: T) {
        if !self.is_null() {
            self.set_at(0, value);
        }
    }

    /// Writes element `index` of an array; the pointer must not be null.
    pub fn set_at(self, index: usize, value: T) {
        // SAFETY: the caller of the export vouches for the array behind a pointer that is not null. Unaligned, because
        // attribute outputs arrive as `void *`.
        unsafe { self.0.add(index).write_unaligned(value) }
    }

    pub fn null() -> Self {
        Out(std::ptr::null_mut())
    }

    pub fn from_address(address: usize) -> Self {
        Out(address as *mut T)
    }

    pub fn address(self) -> usize {
        self.0 as usize
    }

    pub fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// Reads what the caller left there (`cuThreadExchangeStreamCaptureMode` swaps through one pointer).
    pub fn take(self) -> Outcome<T>
    where
        T: Copy,
    {
        In(self.0).get()
    }
}

impl Out<c_void> {
    /// Writes a `value` through an untyped output, as `cuPointerGetAttribute` does.
    pub fn put<T>(self, value: T) -> Outcome {
        self.cast::<T>().set(value)
    }
}

impl Out<c_char> {
    /// Writes `text` with its terminating zero, cut to `capacity` bytes.
    pub fn set_text(self, text: &str, capacity: c_int) -> Outcome {
        let capacity = usize::try_from(capacity).map_err(|_| Code::INVALID_VALUE)?;
        if self.is_null() || capacity == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let kept = &text.as_bytes()[..text.len().min(capacity - 1)];
        for (index, byte) in kept.iter().chain(std::iter::once(&0)).enumerate() {
            self.set_at(index, *byte as c_char);
        }
        Ok(())
    }
}

impl<T: Copy> In<T> {
    /// Reads, or answers INVALID_VALUE for a null pointer.
    pub fn get(self) -> Outcome<T> {
        if self.0.is_null() { Err(Code::INVALID_VALUE) } else { Ok(self.at(0)) }
    }

    /// Reads element `index` of an array; the pointer must not be null.
    pub fn at(self, index: usize) -> T {
        // SAFETY: the caller of the export vouches for the array behind a pointer that is not null.
        unsafe { self.0.add(index).read_unaligned() }
    }

    /// Reads an array of `count`; INVALID_VALUE where it is null and should not be.
    pub fn list(self, count: usize) -> Outcome<Vec<T>> {
        if count > 0 && self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        Ok((0..count).map(|index| self.at(index)).collect())
    }
}

impl<T> In<T> {
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    pub fn from_address(address: usize) -> Self {
        In(address as *const T)
    }

    pub fn cast<U>(self) -> In<U> {
        In(self.0.cast())
    }
}

impl In<c_char> {
    /// The caller's zero-terminated string; INVALID_VALUE for null or for text that is not UTF-8.
    pub fn text<'a>(self) -> Outcome<&'a str> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the interface asks for a zero-terminated string that lives as long as the call, and nothing keeps it longer.
        unsafe { CStr::from_ptr(self.0) }.to_str().map_err(|_| Code::INVALID_VALUE)
    }
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    pub kind: c_int,
    pub id: c_int,
}

/// `CUmemLocationType`.
impl Location {
    pub const DEVICE: c_int = 1;
    pub const HOST: c_int = 2;
    pub const HOST_NUMA: c_int = 3;
    pub const HOST_NUMA_CURRENT: c_int = 4;
}

/// `CUmemAllocationProp`, its enums as integers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllocationProp {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: Location,
    pub win32: usize,
    pub flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AccessDesc {
    pub location: Location,
    pub flags: c_int,
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolProps {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: Location,
    pub win32: usize,
    pub max_size: usize,
    pub reserved: [u8; 56],
}

/// One side of `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Side2d {
    pub x: usize,
    pub y: usize,
    pub kind: c_int,
    pub host: usize,
    pub device: u64,
    pub array: usize,
    pub pitch: usize,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Copy2d {
    pub src: Side2d,
    pub dst: Side2d,
    pub width: usize,
    pub height: usize,
}

/// One side of `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Side3d {
    pub x: usize,
    pub y: usize,
    pub z: usize,
    pub lod: usize,
    pub kind: c_int,
    pub host: usize,
    pub device: u64,
    pub array: usize,
    pub reserved: usize,
    pub pitch: usize,
    pub height: usize,
}

/// `CUDA_MEMCPY3D`, and `CUDA_MEMCPY3D_PEER` with the contexts in `reserved`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Copy3d {
    pub src: Side3d,
    pub dst: Side3d,
    pub width: usize,
    pub height: usize,
    pub depth: usize,
}

/// A caller who was built against NVIDIA's headers and these structures must agree on every byte.
const _: () = {
    use cudarc::driver::sys;
    assert!(size_of::<Location>() == size_of::<sys::CUmemLocation>());
    assert!(size_of::<AllocationProp>() == size_of::<sys::CUmemAllocationProp>());
    assert!(size_of::<AccessDesc>() == size_of::<sys::CUmemAccessDesc>());
    assert!(size_of::<PoolProps>() == size_of::<sys::CUmemPoolProps>());
    assert!(size_of::<Copy2d>() == size_of::<sys::CUDA_MEMCPY2D>());
    assert!(size_of::<Copy3d>() == size_of::<sys::CUDA_MEMCPY3D>());
    assert!(size_of::<Copy3d>() == size_of::<sys::CUDA_MEMCPY3D_PEER>());
};
