//! The C structs of virtual memory management, with numbers for enums: the program may write any value into them, and a
//! Rust enum that holds an unknown one is undefined behaviour.

use cudarc::driver::sys::{CUmemAccessDesc, CUmemAllocationProp, CUmemLocation};
use gpupool_pool::Place;
use std::ffi::{c_int, c_void};

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    pub kind: c_int,
    pub id: c_int,
}

impl Location {
    pub const DEVICE: c_int = 1;
    pub const HOST_NUMA: c_int = 3;

    /// Where memory of this place is.
    pub fn of(place: Place) -> Self {
        match place {
            Place::Gpu(ordinal) => Self { kind: Self::DEVICE, id: ordinal as c_int },
            Place::Host(node) => Self { kind: Self::HOST_NUMA, id: node as c_int },
        }
    }

    /// The place; `None` for locations that name none, such as "the host".
    pub fn place(self) -> Option<Place> {
        let id = u32::try_from(self.id).ok()?;
        match self.kind {
            Self::DEVICE => Some(Place::Gpu(id)),
            Self::HOST_NUMA => Some(Place::Host(id)),
            _ => None,
        }
    }

    /// The GPU, if it is one.
    pub fn device(self) -> Option<u32> {
        u32::try_from(self.id).ok().filter(|_| self.kind == Self::DEVICE)
    }
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    pub location: Location,
    /// 0 none, 1 read, 3 read and write.
    pub flags: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Properties {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: Location,
    pub win32: *mut c_void,
    pub compression: u8,
    pub rdma: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

impl Properties {
    /// The GPU that plain memory is asked for on. `None` for what only that GPU, or only the host, can give: memory shared
    /// over a fabric, compressed, for sparse textures or for hardware decompression.
    pub fn plain_device(&self) -> Option<u32> {
        const PINNED: c_int = 1;
        const POSIX_FD: c_int = 1;
        let plain = self.kind == PINNED
            && self.handle_types & !POSIX_FD == 0
            && self.compression == 0
            && self.usage == 0
            && self.reserved == [0; 4];
        self.location.device().filter(|_| plain)
    }

    /// The same memory at another place. The host has no use for the flag that lets network adapters reach a GPU's.
    pub fn at(self, place: Place) -> Self {
        let rdma = if place.is_host() { 0 } else { self.rdma };
        Self { location: Location::of(place), rdma, ..self }
    }
}

const _: () = assert!(size_of::<Location>() == size_of::<CUmemLocation>());
const _: () = assert!(size_of::<Access>() == size_of::<CUmemAccessDesc>());
const _: () = assert!(size_of::<Properties>() == size_of::<CUmemAllocationProp>());
