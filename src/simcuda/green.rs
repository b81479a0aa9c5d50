//! Green contexts: parts of a GPU's multiprocessors with streams of their own, within the primary context.
//!
//! Which multiprocessors run a kernel makes no difference here. What is played are the handles and what lives how long:
//! a green context retains the primary one, owns its streams and nothing else, and memory made in it outlives it.

use crate::attributes;
use crate::context::{self, Context, by_handle};
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::event;
use crate::ffi::{Handle, In, Out};
use crate::primary;
use crate::stream::{self, resolve};
use std::ffi::{c_int, c_uint};
use std::sync::Arc;

const SM: c_int = 1;
/// The one flag there is; it has to be given.
const DEFAULT_STREAM: c_uint = 1;
const SPLIT_FLAGS: c_uint = 3;
const NON_BLOCKING: c_uint = 1;
/// Documented for compute capability 9.0: the least a part has, and what it is a multiple of.
const PART: c_uint = 8;
const MAGIC: u32 = 0x6772_6e63;

/// `CUdevResource`. Programs copy it and look at the counts; the hidden words tell a later call where it is from.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Resource {
    kind: c_int,
    /// Magic, device and the split it came from; the rest is unused.
    hidden: [u32; 23],
    count: c_uint,
    least: c_uint,
    alignment: c_uint,
    unused: [u32; 9],
}

const _: () = {
    use cudarc::driver::sys;
    assert!(size_of::<Resource>() == size_of::<sys::CUdevResource>());
    assert!(std::mem::offset_of!(Resource, count) == std::mem::offset_of!(sys::CUdevResource, __bindgen_anon_1));
};

impl Resource {
    fn new(device: usize, split: u32, count: c_uint) -> Self {
        let mut hidden = [0; 23];
        hidden[..3].copy_from_slice(&[MAGIC, device as u32, split]);
        // What is left over by a split may be nothing.
        let kind = if count > 0 { SM } else { 0 };
        Self { kind, hidden, count, least: PART, alignment: PART, unused: [0; 9] }
    }

    fn device(&self) -> usize {
        self.hidden[1] as usize
    }

    fn check(&self) -> Outcome {
        if self.kind != SM || self.hidden[0] != MAGIC { Err(Code::INVALID_RESOURCE_TYPE) } else { Ok(()) }
    }
}

/// What a descriptor stands for.
pub struct Resources {
    device: usize,
    count: c_uint,
}

/// A `CUgreenCtx`.
pub struct Green {
    context: Arc<Context>,
    count: c_uint,
}

fn whole(device: usize) -> Resource {
    const MULTIPROCESSORS: c_int = 16;
    let driver = driver();
    let count = attributes::value(&driver.settings, driver.gpus[device].index, MULTIPROCESSORS);
    Resource::new(device, 0, count.unwrap_or(0) as c_uint)
}

fn tell(out: Out<Resource>, kind: c_int, resource: Resource) -> Outcome {
    if kind == SM { out.set(resource) } else { Err(Code::INVALID_RESOURCE_TYPE) }
}

fn green(handle: Handle) -> Outcome<Arc<Green>> {
    driver().greens.get(handle).map_err(|_| Code::INVALID_CONTEXT)
}

/// The handle of the green context that a context is the `CUcontext` of, or 0.
pub fn handle_of(context: &Context) -> Handle {
    driver().greens.find(|green| green.context.id == context.id).unwrap_or(0)
}

pub fn of_device(device: c_int, out: Out<Resource>, kind: c_int) -> Outcome {
    out.required()?;
    driver().gpu(device)?;
    tell(out, kind, whole(device as usize))
}

pub fn of_context(context: Handle, out: Out<Resource>, kind: c_int) -> Outcome {
    out.required()?;
    let context = by_handle(context)?;
    match handle_of(&context) {
        0 => tell(out, kind, whole(context.device)),
        handle => of_green(handle, out, kind),
    }
}

pub fn of_green(handle: Handle, out: Out<Resource>, kind: c_int) -> Outcome {
    out.required()?;
    let green = green(handle)?;
    tell(out, kind, Resource::new(green.context.device, 0, green.count))
}

/// `cuDevSmResourceSplitByCount`: groups of `least` multiprocessors, rounded up; how many there can be if `groups` is null.
pub fn split(
    groups: Out<Resource>,
    count: Out<c_uint>,
    input: In<Resource>,
    rest: Out<Resource>,
    flags: c_uint,
    least: c_uint,
) -> Outcome {
    let wanted = count.take()?;
    let input = input.get()?;
    input.check()?;
    if flags & !SPLIT_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let size = least.max(PART).checked_next_multiple_of(PART).ok_or(Code::INVALID_VALUE)?;
    let possible = input.count / size;
    if groups.is_null() {
        return count.set(possible);
    }
    let made = possible.min(wanted);
    if made == 0 {
        return Err(Code::INVALID_RESOURCE_CONFIGURATION);
    }
    let split = crate::space::next_id() as u32;
    for index in 0..made {
        groups.set_at(index as usize, Resource::new(input.device(), split, size));
    }
    rest.set_if_wanted(Resource::new(input.device(), split, input.count - made * size));
    count.set(made)
}

/// `cuDevResourceGenerateDesc`: several resources have to come from one split.
pub fn describe(out: Out<Handle>, list: In<Resource>, count: c_uint) -> Outcome {
    out.required()?;
    let list = list.list(count as usize)?;
    let first = list.first().ok_or(Code::INVALID_VALUE)?;
    list.iter().try_for_each(Resource::check)?;
    let one_split = list.len() == 1 || first.hidden[2] != 0 && list.iter().all(|other| other.hidden == first.hidden);
    if !one_split {
        return Err(Code::INVALID_RESOURCE_CONFIGURATION);
    }
    let total = list.iter().map(|resource| resource.count).sum();
    out.set(driver().resources.insert(Arc::new(Resources { device: first.device(), count: total })))
}

/// `cuGreenCtxCreate`: retains the primary context until the green one is destroyed.
pub fn create(out: Out<Handle>, resources: Handle, device: c_int, flags: c_uint) -> Outcome {
    out.required()?;
    let driver = driver();
    driver.gpu(device)?;
    let resources = driver.resources.get(resources).map_err(|_| Code::INVALID_VALUE)?;
    if flags != DEFAULT_STREAM || resources.device != device as usize {
        return Err(Code::INVALID_VALUE);
    }
    let context = Context::green(primary::hold(device)?);
    out.set(driver.greens.insert(Arc::new(Green { context, count: resources.count })))
}

/// `cuGreenCtxDestroy`. Its streams keep their handles, and every call with one of them answers CONTEXT_IS_DESTROYED.
pub fn destroy(handle: Handle) -> Outcome {
    let green = driver().greens.remove(handle).map_err(|_| Code::INVALID_CONTEXT)?;
    let ended = green.context.end();
    // A reset of the primary context ended it already, and nothing is retained any more.
    if ended { primary::release(green.context.device as c_int) } else { Ok(()) }
}

/// `cuCtxFromGreenCtx`: a handle that differs from the primary context's, the same each time.
pub fn context(out: Out<Handle>, handle: Handle) -> Outcome {
    out.required()?;
    out.set(green(handle)?.context.handle)
}

/// `cuGreenCtxStreamCreate`, whichever context is current.
pub fn stream(out: Out<Handle>, handle: Handle, flags: c_uint, priority: c_int) -> Outcome {
    out.required()?;
    let green = green(handle)?;
    green.context.check()?;
    if flags != NON_BLOCKING {
        return Err(Code::INVALID_VALUE);
    }
    stream::create_in(&green.context, out, flags, priority)
}

pub fn record(handle: Handle, event: Handle) -> Outcome {
    event::record_all(&green(handle)?.context, event)
}

pub fn wait(handle: Handle, event: Handle) -> Outcome {
    event::wait_all(&green(handle)?.context, event)
}

/// `cuStreamGetGreenCtx`: 0 for a stream of no green context.
pub fn of_stream(stream: Handle, out: Out<Handle>) -> Outcome {
    out.required()?;
    let context = resolve(stream)?.context()?;
    out.set(handle_of(&context))
}

/// `cuGreenCtxGetId`, with 0 for the current context, which has to be a green one then.
pub fn id(handle: Handle, out: Out<u64>) -> Outcome {
    out.required()?;
    let handle = if handle == 0 { handle_of(&*context::current()?) } else { handle };
    out.set(green(handle)?.context.id)
}
