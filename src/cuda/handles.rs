//! By what the driver knows its things: one type for each kind of handle, so that none can be taken for another.
//!
//! A handle is a name here. The library compares and keeps handles, hands them back to the driver and to the program, and never
//! follows one. Each type is laid out as the driver's own, and so is an `Option` of those that are never NULL, with NULL for
//! `None`: the driver's functions are declared with these types ([`crate::Driver`]). The inner value is for the edge alone,
//! where a program's argument comes in ([`Context::from_raw`]) or an answer goes out to it ([`Context::raw`]).

use cudarc::driver::sys::{
    CUcontext, CUctx_st, CUdevice, CUevent_st, CUfunc_st, CUgraph_st, CUgraphExec_st, CUgraphNode_st,
    CUmemGenericAllocationHandle, CUmemPoolHandle_st, CUstream,
};
use gpupool_pool::Place;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Handles that are pointers for the driver and names for the library, and never NULL.
macro_rules! names {
    ($($(#[$about:meta])* $handle:ident($behind:ty);)*) => {$(
        $(#[$about])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        pub struct $handle(NonNull<$behind>);

        // SAFETY: the pointer is a name to this library, which never follows it, and the driver takes a handle from any thread.
        unsafe impl Send for $handle {}
        // SAFETY: through a shared reference the pointer can be copied and nothing else.
        unsafe impl Sync for $handle {}

        impl $handle {
            /// What the driver or a program calls it by; `None` for NULL.
            #[inline]
            pub const fn from_raw(handle: *mut $behind) -> Option<Self> {
                match NonNull::new(handle) {
                    Some(handle) => Some(Self(handle)),
                    None => None,
                }
            }

            /// The driver's pointer.
            #[inline]
            pub const fn raw(self) -> *mut $behind {
                self.0.as_ptr()
            }
        }
    )*};
}

names! {
    /// A context (`CUcontext`), which may be gone by now. Where there may be none, it is an `Option`.
    Context(CUctx_st);
    /// A green context (`CUgreenCtx`): a part of a GPU's primary context. As a context it has another handle.
    GreenContext(c_void);
    /// An event (`CUevent`).
    Event(CUevent_st);
    /// A graph.
    Graph(CUgraph_st);
    /// A node of one.
    Node(CUgraphNode_st);
    /// A graph that can be launched.
    GraphExec(CUgraphExec_st);
    /// What code was loaded as: a module (`CUmodule`) or a library (`CUlibrary`).
    Module(c_void);
    /// What a launch takes: a function (`CUfunction`), or a kernel (`CUkernel`) in its place.
    Function(CUfunc_st);
    /// Code that is being put together (`CUlinkState`).
    LinkState(c_void);
    /// A pool of stream-ordered memory (`CUmemoryPool`).
    MemoryPool(CUmemPoolHandle_st);
}

/// A context, or none, that one thread may replace while others look.
#[derive(Debug, Default)]
pub struct AtomicContext(AtomicPtr<CUctx_st>);

impl AtomicContext {
    #[inline]
    pub fn load(&self, order: Ordering) -> Option<Context> {
        Context::from_raw(self.0.load(order))
    }

    #[inline]
    pub fn store(&self, context: Option<Context>, order: Ordering) {
        self.0.store(context.map_or(std::ptr::null_mut(), Context::raw), order);
    }
}

/// A stream (`CUstream`). Three values are no stream's own handle but name the default ones.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Stream(CUstream);

// SAFETY: the pointer is a name to this library, which never follows it, and the driver takes a stream from any thread.
unsafe impl Send for Stream {}
// SAFETY: through a shared reference the pointer can be copied and nothing else.
unsafe impl Sync for Stream {}

impl Stream {
    /// NULL: the legacy default stream, but in calls whose names end in `_ptsz` the thread's own.
    pub const DEFAULT: Self = Self(std::ptr::null_mut());
    /// `CU_STREAM_LEGACY`.
    pub const LEGACY: Self = Self(std::ptr::without_provenance_mut(1));
    /// `CU_STREAM_PER_THREAD`: one handle for the default streams of all threads.
    pub const PER_THREAD: Self = Self(std::ptr::without_provenance_mut(2));

    /// The stream that a program means by this pointer.
    #[inline]
    pub const fn from_raw(stream: CUstream) -> Self {
        Self(stream)
    }

    /// Whether this names one of the default streams.
    #[inline]
    pub fn is_a_default(self) -> bool {
        [Self::DEFAULT, Self::LEGACY, Self::PER_THREAD].contains(&self)
    }

    /// The stream that a call means which may be of the `_ptsz` kind, as calls of ours name it, which are not.
    #[inline]
    pub fn meant_by(self, per_thread_default: bool) -> Self {
        if self == Self::DEFAULT && per_thread_default { Self::PER_THREAD } else { self }
    }
}

/// A GPU, by the ordinal that the program knows it by (`CUdevice`). What a program made up may be negative.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Device(CUdevice);

impl Device {
    /// The host, in the calls on managed memory that know no NUMA nodes (`CU_DEVICE_CPU`).
    pub(crate) const CPU: Self = Self(-1);

    /// The GPU that a program means by this number.
    #[inline]
    pub const fn from_raw(device: CUdevice) -> Self {
        Self(device)
    }

    /// The GPU that the pool knows by this ordinal.
    #[inline]
    pub const fn of(ordinal: u32) -> Self {
        Self(ordinal as CUdevice)
    }

    /// The driver's number.
    #[inline]
    pub const fn raw(self) -> CUdevice {
        self.0
    }

    /// The ordinal by which the pool knows this GPU. A negative number becomes one that no GPU has.
    #[inline]
    pub const fn ordinal(self) -> u32 {
        self.0 as u32
    }

    /// This GPU's memory.
    #[inline]
    pub const fn place(self) -> Place {
        Place::Gpu(self.ordinal())
    }
}

impl fmt::Display for Device {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(out)
    }
}

/// A piece of physical memory (`CUmemGenericAllocationHandle`). The driver keeps the number as long as the memory is referenced or
/// mapped.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Physical(CUmemGenericAllocationHandle);

impl Physical {
    /// The memory that a program means by this number.
    #[inline]
    pub const fn from_raw(handle: CUmemGenericAllocationHandle) -> Self {
        Self(handle)
    }

    /// The driver's number.
    #[inline]
    pub const fn raw(self) -> CUmemGenericAllocationHandle {
        self.0
    }
}

const _: () = assert!(size_of::<Option<Context>>() == size_of::<CUcontext>());
