//! What each mode does with a request for device memory: in mode pool the pool serves it; in mode spill the driver is asked first, and
//! the pool serves what the driver has no room for; in mode managed it becomes managed memory; in mode trace it is the driver's.

use super::memory::oom;
use super::{managed, memory, pinned};
use crate::backing::terms;
use crate::bypass::{Answer, Bypass};
use crate::gate;
use crate::process;
use crate::watch::context::Context;
use gpupool_config::{Mode, Small, Switch};
use gpupool_cuda::{CuResult, Device, Driver};

/// Who served an allocation.
pub enum Served {
    /// gpupool, with this address, or with an error for the program.
    Pool(Result<u64, CuResult>),
    /// The driver, which has written the outputs, and why it did.
    Driver(CuResult, Bypass),
}

/// Serves an allocation of `bytes` for the current context: from the pool, or by `driver_call`, in the order that the
/// mode says.
#[inline]
pub fn allocate(bytes: u64, mut driver_call: impl FnMut() -> CuResult) -> Served {
    // What a suspended program asks for would lie on the GPU that it has just left.
    gate::wait_while_held();
    // Frames of 2 MiB are too large for small requests. In mode pool they share some; else the driver gets them first.
    let is_small = bytes < process::settings().min_size;
    let mut first = None;
    if is_small {
        let why = match small(bytes) {
            Ok(address) => return Served::Pool(Ok(address)),
            Err(why) => why,
        };
        // What the driver makes lies at home, and may be small: a frame elsewhere is what a drained home costs.
        if !memory::is_home_drained() {
            let result = driver_call();
            if result != CuResult::OUT_OF_MEMORY {
                return Served::Driver(result, why);
            }
            first = Some(result);
        }
    }
    let answer = match memory::pool_for() {
        Ok((opened, context)) => {
            // The driver has no memory but at home.
            let asks_first = opened.plan.mode == Mode::Spill
                && !memory::scope::is_far()
                && !terms::is_drained(context.device.ordinal());
            first = first.or_else(|| asks_first.then(&mut driver_call));
            if let Some(result) = first.filter(|result| *result != CuResult::OUT_OF_MEMORY) {
                return Served::Driver(result, Bypass::HadRoom);
            }
            let soft = process::settings().soft_oom != Switch::Off;
            memory::from_pool(opened, &context, context.device, bytes, soft)
        }
        Err(why) => managed::allocate_managed(bytes, why),
    };
    match answer {
        Ok(answer) => Served::Pool(answer),
        Err(why) => {
            let result = first.unwrap_or_else(driver_call);
            if result == CuResult::OUT_OF_MEMORY {
                oom::refused_here(bytes, oom::Kind::Block, oom::Why::Left(why));
            }
            Served::Driver(result, why)
        }
    }
}

/// The address of a small block, which shares frames with others.
#[inline]
fn small(bytes: u64) -> Answer<u64> {
    let settings = process::settings();
    if settings.small == Small::Driver || settings.mode != Mode::Pool || !memory::is_small(bytes) {
        return Err(Bypass::Small);
    }
    let (opened, context) = memory::pool_for()?;
    if opened.plan.mode != Mode::Pool {
        return Err(Bypass::Small);
    }
    memory::small_from_pool(opened, &context, bytes)
}

/// A block's address for a stream-ordered request on `device` that the driver had no memory for, owned by `context`. Nobody is
/// told OUT_OF_MEMORY first: the driver has just given back what its own pools kept.
#[cold]
pub fn allocate_after_driver(driver: &'static Driver, context: &Context, device: Device, bytes: u64) -> Answer<u64> {
    let answer = match memory::opened_for(driver, device) {
        Ok(opened) => memory::from_pool(opened, context, device, bytes, false),
        Err(why) => managed::allocate_for(context, device, bytes, false, why),
    };
    match answer {
        Ok(answer) => answer.map_err(Bypass::Declined),
        Err(why) => {
            // The driver has said already that it has none.
            oom::refused(device, bytes, oom::Kind::Stream, oom::Why::Left(why));
            Err(why)
        }
    }
}

/// Frees memory that the pool made.
#[inline]
pub fn free(address: u64) -> Answer<CuResult> {
    let (answer, waited) = memory::free_block(address)?;
    pinned::return_idle(waited);
    Ok(answer)
}
