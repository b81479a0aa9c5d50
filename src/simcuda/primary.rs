//! Primary contexts: one for each GPU, made by the first who retains it and ended by the last who releases it.

use crate::context::{Context, check_flags, ordinal};
use crate::driver::{Handles, driver};
use crate::error::{Code, Outcome};
use crate::ffi::{Handle, Out};
use std::ffi::{c_int, c_uint};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The primary context of a device.
#[derive(Default)]
pub struct Primary {
    context: Option<Arc<Context>>,
    retained: u64,
    flags: u32,
    /// Kept over a release, as the real driver does: the runtime compares contexts by it.
    handle: Handle,
    /// The life before, which the handle stands for until the next one.
    last: Option<Arc<Context>>,
}

/// The life that goes on now, of the primary context of a GPU with this ordinal.
pub fn life(device: usize) -> Option<Arc<Context>> {
    driver().gpus[device].primary.lock().context.clone()
}

/// The last life of the primary context with this handle.
pub fn last_life(handle: Handle) -> Option<Arc<Context>> {
    driver().gpus.iter().find_map(|gpu| {
        let primary = gpu.primary.lock();
        primary.last.clone().filter(|_| primary.handle == handle)
    })
}

pub fn retain(out: Out<Handle>, device: c_int) -> Outcome {
    out.required()?;
    out.set(hold(device)?.handle)
}

/// The primary context of a device, made if there is none and counted once more.
pub fn hold(device: c_int) -> Outcome<Arc<Context>> {
    let driver = driver();
    let device = ordinal(driver, device)?;
    let mut primary = driver.gpus[device].primary.lock();
    let context = match &primary.context {
        Some(context) => context.clone(),
        None => {
            if primary.handle == 0 {
                primary.handle = Handles::<Context>::reserve();
            }
            let context = Context::create(device, primary.flags, Some(primary.handle))?;
            primary.context = Some(context.clone());
            context
        }
    };
    primary.retained += 1;
    Ok(context)
}

pub fn release(device: c_int) -> Outcome {
    let driver = driver();
    let mut primary = driver.gpu(device)?.primary.lock();
    // One too many is answered as if it had ended something.
    if primary.retained == 0 {
        return Ok(());
    }
    primary.retained -= 1;
    let ended = if primary.retained == 0 { primary.context.take() } else { None };
    primary.last = ended.clone().or(primary.last.take());
    drop(primary);
    if let Some(context) = ended {
        context.destroy();
    }
    Ok(())
}

pub fn reset(device: c_int) -> Outcome {
    let mut primary = driver().gpu(device)?.primary.lock();
    if primary.context.as_ref().is_some_and(|context| !context.parts().is_empty()) {
        return Err(Code::NOT_PERMITTED);
    }
    primary.retained = 0;
    let ended = primary.context.take();
    primary.last = ended.clone().or(primary.last.take());
    drop(primary);
    if let Some(context) = ended {
        context.destroy();
    }
    Ok(())
}

pub fn set_flags(device: c_int, flags: c_uint) -> Outcome {
    check_flags(flags)?;
    let mut primary = driver().gpu(device)?.primary.lock();
    primary.flags = flags;
    if let Some(context) = &primary.context {
        context.flags.store(flags, Ordering::Relaxed);
    }
    Ok(())
}

pub fn state(device: c_int, flags: Out<c_uint>, active: Out<c_int>) -> Outcome {
    let primary = driver().gpu(device)?.primary.lock();
    flags.required()?;
    active.required()?;
    flags.set(primary.flags)?;
    active.set(c_int::from(primary.context.is_some()))
}

/// How often `device`'s primary context is retained, for the report.
pub fn count(device: usize) -> (bool, u64) {
    let primary = driver().gpus[device].primary.lock();
    (primary.context.is_some(), primary.retained)
}
