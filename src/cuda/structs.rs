//! The C structs of memory, with numbers for enums: the program may write any value into them, and a Rust enum that holds an
//! unknown one is undefined behaviour.

use cudarc::driver::sys::{CUarrayMapInfo, CUmemAccessDesc, CUmemAllocationProp, CUmemLocation, CUmemPoolProps};
use gpupool_pool::Place;
use std::ffi::{c_int, c_uint, c_void};
use std::mem::offset_of;

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

    /// Where memory of this place is. What is stored has no location of the driver's, which refuses this one.
    pub fn of(place: Place) -> Self {
        match place {
            Place::Gpu(ordinal) => Self { kind: Self::DEVICE, id: ordinal as c_int },
            Place::Host(node) => Self { kind: Self::HOST_NUMA, id: node as c_int },
            Place::Disk | Place::Pageable => Self { kind: 0, id: 0 },
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

impl Access {
    const READ_WRITE: c_int = 3;

    /// Reading and writing by a GPU.
    pub fn read_write(ordinal: u32) -> Self {
        Self { location: Location::of(Place::Gpu(ordinal)), flags: Self::READ_WRITE }
    }
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
    /// `CU_MEM_ALLOCATION_TYPE_PINNED`, the only kind there is for applications.
    const PINNED: c_int = 1;
    /// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
    pub const POSIX_FD: c_int = 1;

    /// Memory of a place that cannot be shared.
    pub fn of(place: Place) -> Self {
        Self {
            kind: Self::PINNED,
            handle_types: 0,
            location: Location::of(place),
            win32: std::ptr::null_mut(),
            compression: 0,
            rdma: 0,
            usage: 0,
            reserved: [0; 4],
        }
    }

    /// The GPU that plain memory is asked for on. `None` for what only that GPU, or only the host, can give: memory shared
    /// over a fabric, compressed, for sparse textures or for hardware decompression.
    pub fn plain_device(&self) -> Option<u32> {
        let plain = self.kind == Self::PINNED
            && self.handle_types & !Self::POSIX_FD == 0
            && self.compression == 0
            && self.usage == 0
            && self.reserved == [0; 4];
        self.location.device().filter(|_| plain)
    }

    /// Copies the properties for memory at another place. The host has no use for the flag that lets network adapters reach a
    /// GPU's.
    pub fn at(self, place: Place) -> Self {
        let rdma = if place.is_host() { 0 } else { self.rdma };
        Self { location: Location::of(place), rdma, ..self }
    }
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolProperties {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: Location,
    pub win32: *mut c_void,
    pub max_size: usize,
    pub usage: u16,
    pub reserved: [u8; 54],
}

impl PoolProperties {
    /// The GPU that the pool hands plain memory of out. `None` where it has a largest size, can be shared, or is of the host.
    pub fn plain_device(&self) -> Option<u32> {
        let plain = self.kind == Properties::PINNED && self.handle_types == 0 && self.max_size == 0 && self.usage == 0;
        self.location.device().filter(|_| plain)
    }
}

/// `CUarrayMapInfo`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ArrayMapping {
    pub resource_kind: c_int,
    pub resource: *mut c_void,
    pub subresource_kind: c_int,
    pub subresource: [u64; 4],
    pub operation: c_int,
    pub handle_kind: c_int,
    pub handle: u64,
    pub offset: u64,
    pub devices: c_uint,
    pub flags: c_uint,
    pub reserved: [c_uint; 2],
}

impl ArrayMapping {
    /// `CU_MEM_OPERATION_TYPE_MAP`.
    const MAP: c_int = 1;
    /// `CU_MEM_HANDLE_TYPE_GENERIC`.
    const GENERIC: c_int = 0;

    /// Whether it maps what its handle names.
    pub fn maps_a_handle(&self) -> bool {
        self.operation == Self::MAP && self.handle_kind == Self::GENERIC
    }
}

const _: () = assert!(size_of::<ArrayMapping>() == size_of::<CUarrayMapInfo>());
const _: () = assert!(offset_of!(ArrayMapping, operation) == offset_of!(CUarrayMapInfo, memOperationType));
const _: () = assert!(offset_of!(ArrayMapping, handle_kind) == offset_of!(CUarrayMapInfo, memHandleType));
const _: () = assert!(offset_of!(ArrayMapping, handle) == offset_of!(CUarrayMapInfo, memHandle));
const _: () = assert!(size_of::<PoolProperties>() == size_of::<CUmemPoolProps>());
const _: () = assert!(size_of::<Location>() == size_of::<CUmemLocation>());
const _: () = assert!(size_of::<Access>() == size_of::<CUmemAccessDesc>());
const _: () = assert!(size_of::<Properties>() == size_of::<CUmemAllocationProp>());
