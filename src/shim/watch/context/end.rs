//! How contexts end: what is noted before the driver is asked, and what goes with a context that ended.

use super::{By, CHANGED, EPOCH, LAST, Last, REGISTRY, observers, report_use};
use crate::{bell, log};
use gpupool_cuda::{self as cuda, CuResult, Device, Driver, GreenContext};
use gpupool_events::ContextDestroy;

use super::Context;
use super::registry::{Ended, Name};

/// Makes a call that gives up the primary context of a device, and ends its record if it ended.
///
/// The record stays: the call may be one of many releases. Until it is over nobody remembers the context, and whoever
/// looks it up asks the driver which life it is, so what is made in the next one is not taken for this one's.
pub fn of_primary(driver: &Driver, device: Device, by: By, call: &str, act: impl FnOnce() -> CuResult) -> CuResult {
    let lives = {
        let mut registry = REGISTRY.lock();
        let lives = registry.begin_primary(device, by);
        EPOCH.pass();
        while registry.is_leased(lives.named.iter().map(|(id, _)| *id)) {
            CHANGED.wait(&mut registry);
        }
        lives
    };
    let result = act();
    let mut over = lives.named.clone();
    over.retain(|(_, name)| result.is_ok() && is_over(driver, device, *name, by));
    let ended = {
        let mut registry = REGISTRY.lock();
        let ended = registry.end_primary(device, by, result.is_ok(), &lives, &over);
        EPOCH.pass();
        ended
    };
    is_known(ended, call);
    result
}

/// After a call that may have ended these: whoever waited for it goes on, and what follows from an end is done.
fn is_known(ended: Vec<Ended>, call: &str) {
    CHANGED.notify_all();
    let gone = !ended.is_empty();
    tell(ended, call);
    if gone {
        observers::all().for_each(|observer| observer.settled());
    }
}

/// Whether this life of the primary context is over. Another may have begun meanwhile, with the same handle.
fn is_over(driver: &Driver, device: Device, name: Name, by: By) -> bool {
    if !driver.primary_is_active(device) {
        return true;
    }
    match name.handle.filter(|_| name.life.is_some()) {
        // SAFETY: the handle of a primary context stays good.
        Some(handle) => (unsafe { driver.life(handle) }) != Ok(name.life),
        // Drivers before 12.0 do not number contexts.
        None => by == By::Reset,
    }
}

/// Makes a call that ends the context of this handle, or may do so: then `is_over` says after a success whether it did.
pub fn of_handle(
    context: cuda::Context,
    call: &str,
    act: impl FnOnce() -> CuResult,
    is_over: impl FnOnce() -> bool,
) -> CuResult {
    let ids = {
        let mut registry = REGISTRY.lock();
        let ids = registry.begin_handle(context);
        EPOCH.pass();
        while registry.is_leased(ids.iter().copied()) {
            CHANGED.wait(&mut registry);
        }
        ids
    };
    let result = act();
    let over = result.is_ok() && is_over();
    let ended = {
        let mut registry = REGISTRY.lock();
        let ended = registry.end_handle(&ids, over);
        EPOCH.pass();
        ended
    };
    is_known(ended, call);
    result
}

/// Makes the call that destroys a green context. It gives back the reference to the primary one that made it possible, and
/// may so end that; memory that was made in it lives in the primary one and stays.
pub fn of_green(driver: &Driver, green: GreenContext, call: &str, act: impl FnOnce() -> CuResult) -> CuResult {
    let Some((device, handles)) = REGISTRY.lock().green_ends(green) else { return act() };
    let result = of_primary(driver, device, By::Release, call, act);
    if !result.is_ok() {
        let mut registry = REGISTRY.lock();
        registry.green_began(green, device);
        handles.iter().for_each(|handle| registry.green_is(green, *handle));
    }
    result
}

/// A context ended without anybody seeing it.
pub fn unseen(context: Context, call: &str) {
    let ended = {
        let mut registry = REGISTRY.lock();
        let ids = [context.id];
        registry.end_handle(&ids, true)
    };
    EPOCH.pass();
    tell(ended, call);
}

/// Some context may be in error from now on, which one is not known: the call may have been about another context's stream.
/// Whoever uses one looks it up again, and so asks the driver whether it is in error; one that is, nobody remembers.
pub fn doubt_all() {
    EPOCH.pass();
}

/// This thread looks its context up again at the next question.
pub fn forget_current() {
    LAST.with(Last::forget);
}

/// Has what goes with contexts that ended dropped.
fn tell(ended: Vec<Ended>, call: &str) {
    for Ended { context, unkept } in ended {
        let blocks = disown(&context);
        bell::changed();
        let Context { device, id, kind, .. } = context;
        log::emit(|| {
            let kind = kind.word();
            let text = format!("{kind} context on GPU {device} is gone ({call}), and {blocks} pooled blocks with it");
            (ContextDestroy { id, device: device.ordinal(), kind: kind.to_owned(), call: call.to_owned() }, text)
        });
        if let Some(record) = unkept {
            report_use(&record);
        }
    }
}

/// Drops all that belongs to a context that is gone; how many blocks that were. Called again by who made something for it
/// while it ended.
pub fn disown(context: &Context) -> usize {
    observers::all().map(|observer| observer.ended(context.id)).sum()
}
