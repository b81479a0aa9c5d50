//! `cuCheckpointProcess*`: a process of the machine is stopped at its next call of the driver, its memory leaves the GPUs and comes back.
//!
//! What is answered was measured on two H200 (driver 580): of all memory managed memory alone is refused when it is to leave, and what cannot come back is told when it should, which
//! leaves the process as it is for good. That is memory of `cuMemCreate` that a GPU has access to on which it does not lie, and such memory of the host, mapped or not.
//! Access that was taken from a GPU before cannot be given to it again afterwards.

use crate::boundary;
use crate::driver::started;
use crate::error::{Code, Outcome};
use crate::ffi::{In, Out};
use crate::physical::Place;
use crate::settings::Settings;
use crate::space::Kind;
use simmachine::{Frozen, Visitor};
use std::ffi::c_int;
use std::time::Duration;

fn visitor() -> Outcome<Visitor> {
    let settings = Settings::read(|name| std::env::var(name).ok()).map_err(|_| Code::NOT_SUPPORTED)?;
    // A machine of one process has nobody who could ask.
    Visitor::of(&settings).ok_or(Code::NOT_SUPPORTED)?.map_err(|_| Code::OPERATING_SYSTEM)
}

fn state_of(process: c_int) -> Outcome<(Visitor, Frozen)> {
    let visitor = visitor()?;
    let state = u32::try_from(process).ok().and_then(|pid| visitor.frozen(pid)).ok_or(Code::INVALID_VALUE)?;
    Ok((visitor, state))
}

/// From one state to the next.
fn turn(process: c_int, from: &[Frozen], to: Frozen) -> Outcome {
    let (visitor, state) = state_of(process)?;
    if !from.contains(&state) {
        return Err(Code::ILLEGAL_STATE);
    }
    visitor.freeze(process.unsigned_abs(), to);
    Ok(())
}

pub fn thread(process: c_int, out: Out<c_int>) -> Outcome {
    state_of(process)?;
    out.set(process)
}

pub fn state(process: c_int, out: Out<c_int>) -> Outcome {
    out.set(state_of(process)?.1 as c_int)
}

pub fn lock(process: c_int, _: In<u8>) -> Outcome {
    turn(process, &[Frozen::Not], Frozen::Locked)
}

pub fn checkpoint(process: c_int, _: In<u8>) -> Outcome {
    let (visitor, state) = state_of(process)?;
    match visitor.unfit(process.unsigned_abs()) {
        [0, _] => turn(process, &[Frozen::Locked], Frozen::Gone),
        [code, _] if state == Frozen::Locked => Err(Code(code)),
        _ => Err(Code::ILLEGAL_STATE),
    }
}

pub fn restore(process: c_int, _: In<u8>) -> Outcome {
    let (visitor, state) = state_of(process)?;
    if state != Frozen::Gone {
        return Err(Code::ILLEGAL_STATE);
    }
    match visitor.unfit(process.unsigned_abs()) {
        [_, 0] => visitor.has_returned(process.unsigned_abs()),
        [_, code] => return Err(Code(code)),
    }
    visitor.freeze(process.unsigned_abs(), Frozen::Locked);
    Ok(())
}

pub fn unlock(process: c_int, _: In<u8>) -> Outcome {
    turn(process, &[Frozen::Locked], Frozen::Not)
}

/// Waits as long as this process is stopped.
pub fn pass() {
    if boundary::phase() != boundary::Phase::Ready {
        return;
    }
    let Some(driver) = started() else { return };
    while driver.machine.is_frozen() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Says what of this process would not leave, or come back.
pub fn tell() {
    let Some(driver) = started().filter(|driver| driver.settings.machine.is_some()) else { return };
    let (mut leaving, mut coming) = (0, 0);
    driver.space.each(|kind| match kind {
        Kind::Managed { .. } => leaving = Code::NOT_SUPPORTED.0,
        Kind::Vmm { physical, grants, .. } => match physical.place() {
            Place::Gpu(own) if grants.read & !(1 << own) != 0 => coming = Code::INVALID_VALUE.0,
            _ => {}
        },
        _ => {}
    });
    if crate::vmm::has_host_memory() {
        coming = Code::UNKNOWN.0;
    }
    driver.machine.set_unfit(leaving, coming);
}
