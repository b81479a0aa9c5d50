//! A `libcuda.so.1` without a GPU.
//!
//! It answers the documented driver interface for GPUs that the environment describes (`SIMCUDA_GPUS` and so on, see
//! README.md), with real memory behind the addresses, so that programs run unmodified and data can be checked. The yes
//! and no answers are those measured on real GPUs, and so is the speed that events are timed by.
//!
//! `table` lists every export; `boundary` is the way in; `physical` and `space` are the memory; `stream`, `capture` and
//! `graph` order the work; the rest answers calls, one file a subject.

mod array;
mod attributes;
mod boundary;
mod capture;
mod checkpoint;
mod clock;
mod coherence;
mod context;
mod copy;
mod device;
mod driver;
mod error;
mod event;
mod extents;
mod fault;
mod ffi;
mod fill;
mod graph;
mod graph_memory;
mod green;
mod ipc;
mod kernels;
mod launch;
mod managed;
mod memory;
mod mempool;
mod module;
mod physical;
mod pinned;
mod pointer;
mod primary;
mod probe;
mod ptx;
mod registry;
mod report;
mod reserve;
mod residence;
mod shared_event;
mod space;
mod stream;
mod stream_ordered;
mod strict;
mod table;
mod vmm;

use simmachine::settings;
