//! The time that events tell: what the work between them would take a real GPU, from its bytes and where they lie.
//!
//! It is not the time of this machine's processors, which says nothing about GPUs and differs from run to run. Time
//! passes only where work runs: a stream goes on from its own last work, from the work of others that it waits for, or
//! from what the submitting thread had waited for, whichever is latest. Two streams that use one link at once are not
//! slowed down, and a launch by itself takes no time.

use crate::device;
use crate::driver::driver;
use crate::physical::Place;
use crate::residence;
use crate::space::{Kind, Span};
use std::cell::Cell;

/// A point in time or a stretch of it, in picoseconds.
pub type Time = u64;

/// Bytes a second, in units of 10^9, from the GPU that does the access.
struct Speeds {
    local: u64,
    peer: u64,
    host: u64,
}

/// Measured on H200, peers over NVLink.
const READ: Speeds = Speeds { local: 4480, peer: 374, host: 51 };
const WRITE: Speeds = Speeds { local: 4310, peer: 371, host: 53 };
const COPY: Speeds = Speeds { local: 2140, peer: 397, host: 55 };

thread_local! {
    /// The time of the work that this thread runs.
    static NOW: Cell<Time> = const { Cell::new(0) };
    /// What this thread has waited for as a caller of the driver.
    static HOST: Cell<Time> = const { Cell::new(0) };
}

/// Runs a piece of work that begins at `start`; its end.
pub fn run<T>(start: Time, body: impl FnOnce() -> T) -> (T, Time) {
    let outer = NOW.replace(start);
    let result = body();
    (result, NOW.replace(outer))
}

/// How far the work that runs is.
pub fn now() -> Time {
    NOW.get()
}

/// Time that work took by itself, such as waiting for the host.
pub fn spend(time: std::time::Duration) {
    pass(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).saturating_mul(1000));
}

/// The calling thread knows of something that ended then.
pub fn host_saw(time: Time) {
    HOST.set(HOST.get().max(time));
}

/// The earliest time at which what the calling thread submits now can begin.
pub fn host() -> Time {
    HOST.get()
}

/// A kernel reads or writes each byte of some memory once.
pub fn kernel(device: usize, spans: &[Span], write: bool) {
    pass(duration(device, spans, if write { &WRITE } else { &READ }));
}

/// A copy engine moves bytes: as fast as the slower side.
pub fn copy(device: usize, to: &[Span], from: &[Span]) {
    pass(duration(device, to, &COPY).max(duration(device, from, &COPY)));
}

fn pass(time: Time) {
    NOW.set(NOW.get().saturating_add(time));
}

fn duration(device: usize, spans: &[Span], speeds: &Speeds) -> Time {
    spans.iter().map(|span| of_span(device, span, speeds)).sum()
}

fn of_span(device: usize, span: &Span, speeds: &Speeds) -> Time {
    let at = |place, bytes: u64| bytes * 1000 / speed(device, place, speeds);
    match span.region.as_ref().map(|region| &region.kind) {
        Some(Kind::Plain { physical, .. } | Kind::Vmm { physical, .. }) => at(physical.place(), span.bytes as u64),
        Some(Kind::Managed { .. }) => {
            let (start, bytes) = (span.alias as u64, span.bytes as u64);
            let on = |gpu| residence::bytes_at(start, bytes, |place| place == Some(Place::Gpu(gpu)));
            let gpus: Vec<u64> = (0..driver().gpus.len()).map(on).collect();
            let host = bytes.saturating_sub(gpus.iter().sum());
            let far: Time = gpus.iter().enumerate().map(|(gpu, bytes)| at(Place::Gpu(gpu), *bytes)).sum();
            far + at(Place::Host(0), host)
        }
        Some(Kind::Host { .. }) | None => at(Place::Host(0), span.bytes as u64),
    }
}

fn speed(device: usize, place: Place, speeds: &Speeds) -> u64 {
    match place {
        Place::Gpu(owner) if owner == device => speeds.local,
        // Over PCIe a peer is as far as the host, which is behind the same bus; that was not measured.
        Place::Gpu(owner) if device::link(device, owner).is_nvlink() => speeds.peer,
        Place::Gpu(_) | Place::Host(_) => speeds.host,
    }
}
