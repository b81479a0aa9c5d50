//! Why the driver answers a call, and not gpupool.
//!
//! A function that declines a call returns the reason as a [`Bypass`], which costs nothing: no text is made. The body that then
//! leaves the call to the driver passes it to [`Bypass::note`], which does nothing unless the log is at level trace.

use crate::process;
use gpupool_config::{Mode, format_size};
use gpupool_cuda::{CuResult, Device};
use gpupool_interpose::Api;
use std::fmt;
use tracing::Level;

/// What gpupool answers, or why the driver does.
pub type Answer<T> = Result<T, Bypass>;

/// The reason why the driver answers a call. Its `Display` is the text for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bypass {
    /// An argument that the driver refuses, in its own way: no output, no bytes, an unknown flag.
    Malformed,
    /// `GPUPOOL_MODE=trace`.
    Tracing,
    /// No pool is possible here, the driver has not said yet what there is, or a panic closed the pool.
    NoPool,
    /// The driver cannot be loaded for calls of gpupool's own.
    NoDriver,
    /// Under `GPUPOOL_MIN_SIZE`, and the driver had the memory.
    Small,
    /// In mode spill the driver is asked first, and it had the memory.
    HadRoom,
    /// No context is current, or none that gpupool knows the end of.
    NoContext,
    /// The current context, or the driver, is gone or broken, or was before the answer.
    ContextGone,
    /// The GPU is no place of the pool.
    LeftOut(Device),
    /// A stream is being captured.
    Capturing,
    /// No place has room.
    Full,
    /// The pool of pinned memory would hold more than its limit.
    OverLimit,
    /// `GPUPOOL_PINNED=off`, or a limit of 0.
    PinnedOff,
    /// Memory for a purpose, which only the driver can make.
    OtherKind,
    /// The pool's addresses have no gap of that size.
    NoAddresses,
    /// The driver's answer to a call that gpupool made for this one.
    Declined(CuResult),
    /// The address, or the handle, was given out by somebody else.
    NotOurs,
    /// What is asked about a block is the same of any memory.
    NothingToHide,
    /// `GPUPOOL_MEMINFO=device`.
    InfoOfDevice,
}

impl Bypass {
    /// Says it at level trace, with the call's name.
    #[inline]
    pub fn note(self, api: Api) {
        if tracing::enabled!(target: "gpupool::call", Level::TRACE) {
            self.say(api);
        }
    }

    #[cold]
    fn say(self, api: Api) {
        tracing::trace!(target: "gpupool::call", about = "bypass", "{} is answered by the driver: {self}", api.name());
    }
}

impl fmt::Display for Bypass {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed => out.write_str("an argument is one that it refuses"),
            Self::Tracing => out.write_str("GPUPOOL_MODE=trace"),
            Self::NoPool => match process::why().to_string_lossy() {
                why if why.is_empty() => out.write_str("there is no pool yet"),
                why => write!(out, "there is no pool: {why}"),
            },
            Self::NoDriver => out.write_str("gpupool cannot make calls of its own to this driver"),
            Self::Small => {
                write!(out, "less than GPUPOOL_MIN_SIZE={} was asked for", format_size(process::settings().min_size))
            }
            Self::HadRoom => out.write_str("in mode spill it is asked first, and it had room"),
            Self::NoContext => out.write_str("no context is current that gpupool serves"),
            Self::ContextGone => out.write_str("no call can succeed in the current context any more"),
            Self::LeftOut(gpu) => {
                write!(out, "GPU {gpu} is not in the pool (GPUPOOL_DEVICES, or no virtual memory management)")
            }
            Self::Capturing => out.write_str("a stream is being captured"),
            Self::Full => out.write_str("no place of the pool has room"),
            Self::OverLimit => {
                out.write_str("the pool would hold more pinned memory than its limit (GPUPOOL_PINNED_LIMIT)")
            }
            Self::PinnedOff => out.write_str("pinned memory is not pooled (GPUPOOL_PINNED, GPUPOOL_PINNED_LIMIT)"),
            Self::OtherKind => out.write_str("only the driver makes memory of this kind"),
            Self::NoAddresses => out.write_str("the pool has no range of addresses of that size left"),
            Self::Declined(result) => write!(out, "it answered {result} to what gpupool asked for this"),
            Self::NotOurs => out.write_str("gpupool did not give this memory out"),
            Self::NothingToHide => out.write_str("it says the same of gpupool's memory as of its own"),
            Self::InfoOfDevice => out.write_str("GPUPOOL_MEMINFO=device"),
        }
    }
}

// With the driver's answer beside it, it is given back in one register.
const _: () = assert!(size_of::<Answer<CuResult>>() == 8);

/// Whether gpupool makes memory in this process at all.
#[inline]
pub fn makes_memory() -> Answer<()> {
    match process::settings().mode {
        Mode::Trace => Err(Bypass::Tracing),
        _ if !process::is_open() => Err(Bypass::NoPool),
        _ => Ok(()),
    }
}

/// gpupool's answer, or else what `driver` does, and why.
#[inline]
pub fn or_driver<T>(answer: Answer<T>, api: Api, driver: impl FnOnce() -> T) -> T {
    answer.unwrap_or_else(|why| {
        why.note(api);
        driver()
    })
}
