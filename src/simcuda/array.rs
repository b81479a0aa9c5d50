//! Arrays: memory for textures. They are made, described, counted and destroyed; nothing can be copied to them or read.

use crate::capture;
use crate::context::current;
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{Handle, In, Out};
use crate::physical::{Store, Use};
use std::ffi::{c_int, c_uint};
use std::sync::Arc;

/// What an array takes is rounded up to this.
const PAGE: u64 = 64 << 10;

const LAYERED: c_uint = 1;
const CUBEMAP: c_uint = 4;
const KNOWN_FLAGS: c_uint = 0xff;
/// Sparse and deferred mapping.
const UNSUPPORTED_FLAGS: c_uint = 0x40 | 0x80;

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Plane {
    width: usize,
    height: usize,
    format: c_int,
    channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`. A side of 0 means that the array does not have it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Descriptor {
    width: usize,
    height: usize,
    depth: usize,
    format: c_int,
    channels: c_uint,
    flags: c_uint,
}

const _: () = {
    use cudarc::driver::sys;
    assert!(size_of::<Plane>() == size_of::<sys::CUDA_ARRAY_DESCRIPTOR>());
    assert!(size_of::<Descriptor>() == size_of::<sys::CUDA_ARRAY3D_DESCRIPTOR>());
};

pub struct Array {
    pub context: u64,
    store: &'static Store,
    bytes: u64,
    descriptor: Descriptor,
    mipmapped: bool,
}

impl Drop for Array {
    fn drop(&mut self) {
        self.store.refund(self.bytes, Use::Plain);
    }
}

impl Descriptor {
    /// Bytes of one element; INVALID_VALUE for what no array can be.
    fn element(&self) -> Outcome<u64> {
        let channel = match self.format {
            1 | 8 => 1,
            2 | 9 | 16 => 2,
            3 | 10 | 32 => 4,
            _ => return Err(Code::INVALID_VALUE),
        };
        let layered = self.flags & LAYERED != 0;
        let cube = self.flags & CUBEMAP != 0;
        let flat = self.height == 0 && self.depth > 0 && !layered;
        let no_cube = cube && (self.width != self.height || !self.depth.is_multiple_of(6) || self.depth == 0);
        let limit = if self.depth > 0 && !layered { 16_384 } else { 131_072 };
        let large = self.width > limit || self.height > limit.min(65_536) || self.depth > 16_384;
        if self.width == 0 || ![1, 2, 4].contains(&self.channels) || flat || no_cube || large {
            return Err(Code::INVALID_VALUE);
        }
        if self.flags & !KNOWN_FLAGS != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if self.flags & UNSUPPORTED_FLAGS != 0 {
            Err(Code::NOT_SUPPORTED)
        } else {
            Ok(channel * u64::from(self.channels))
        }
    }

    /// Bytes of a level, each side halved as often; layers stay.
    fn level(&self, level: u32) -> Outcome<u64> {
        let side = |length: usize| (length >> level).max(1) as u64;
        let depth = if self.flags & LAYERED != 0 { self.depth.max(1) as u64 } else { side(self.depth) };
        // The limits of the sides keep this far from overflow.
        Ok(self.element()? * side(self.width) * side(self.height) * depth)
    }
}

fn make(out: Out<Handle>, descriptor: Descriptor, levels: Option<u32>) -> Outcome {
    let context = current()?;
    let longest = descriptor.width.max(descriptor.height).max(descriptor.depth).max(1);
    // More levels than halvings are cut, as documented.
    let count = levels.unwrap_or(1).clamp(1, longest.ilog2() + 1);
    let mut bytes = 0;
    for level in 0..count {
        bytes += descriptor.level(level)?;
    }
    capture::forbid()?;
    let driver = driver();
    let (store, bytes) = (&driver.gpus[context.device].store, bytes.next_multiple_of(PAGE));
    store.charge(bytes, Use::Plain)?;
    let array = Array { context: context.owner(), store, bytes, descriptor, mipmapped: levels.is_some() };
    out.set(driver.arrays.insert(Arc::new(array)))
}

/// `cuArrayCreate`.
pub fn create(out: Out<Handle>, plane: In<Plane>) -> Outcome {
    out.required()?;
    let Plane { width, height, format, channels } = plane.get()?;
    make(out, Descriptor { width, height, depth: 0, format, channels, flags: 0 }, None)
}

/// `cuArray3DCreate`.
pub fn create_3d(out: Out<Handle>, descriptor: In<Descriptor>) -> Outcome {
    out.required()?;
    make(out, descriptor.get()?, None)
}

/// `cuMipmappedArrayCreate`.
pub fn create_mipmapped(out: Out<Handle>, descriptor: In<Descriptor>, levels: c_uint) -> Outcome {
    out.required()?;
    make(out, descriptor.get()?, Some(levels))
}

fn find(handle: Handle, mipmapped: bool) -> Outcome<Arc<Array>> {
    driver()
        .arrays
        .get(handle)
        .and_then(|array| if array.mipmapped == mipmapped { Ok(array) } else { Err(Code::INVALID_HANDLE) })
}

pub fn destroy(handle: Handle) -> Outcome {
    find(handle, false)?;
    driver().arrays.remove(handle).map(drop)
}

pub fn destroy_mipmapped(handle: Handle) -> Outcome {
    find(handle, true)?;
    driver().arrays.remove(handle).map(drop)
}

pub fn descriptor(out: Out<Plane>, handle: Handle) -> Outcome {
    out.required()?;
    let Descriptor { width, height, format, channels, .. } = find(handle, false)?.descriptor;
    out.set(Plane { width, height, format, channels })
}

pub fn descriptor_3d(out: Out<Descriptor>, handle: Handle) -> Outcome {
    out.required()?;
    out.set(find(handle, false)?.descriptor)
}
