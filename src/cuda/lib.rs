//! Calls of the CUDA driver that the library makes for itself: typed, with errors as values, and none of them through a hook.
//!
//! [`Driver`] holds the driver's functions as the loader found them; its methods are by subject in [`context`], [`device`],
//! [`memory`], [`pointer`] and [`stream`]. It is a table of functions and not a trait: a test that wants to count or fail
//! calls gives it another library ([`Driver::load`]), as the simulated driver is one.
//!
//! Each kind of handle is a type of its own ([`Context`], [`Device`], [`Stream`], [`Physical`], …), and the functions of the
//! driver are declared with these types, so none can be given where another is meant.
//!
//! Methods that take numbers (a device, an address, a handle of physical memory) are safe: the driver checks numbers and
//! answers an error. Those that take a context, a stream or an event are `unsafe`: the driver follows such a handle as a
//! pointer, so it must be one that lives.

pub mod checkpoint;
pub mod context;
pub mod device;
mod graph;
mod handles;
pub mod kernel;
pub mod memory;
pub mod pointer;
mod result;
pub mod stream;
mod structs;
mod table;
mod timing;

pub use context::Marker;
pub use graph::Part;
pub use handles::{
    AtomicContext, Context, Device, Event, Function, Graph, GraphExec, GreenContext, LinkState, MemoryPool, Module,
    Node, Physical, Stream,
};
pub use result::CuResult;
pub use stream::{Capturing, Relaxed};
pub use structs::{Access, ArrayMapping, Location, PoolProperties, Properties};
pub use table::{Driver, at_hand, get};
pub use timing::{Milestone, Timer};
