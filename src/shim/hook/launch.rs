//! Bodies: what is looked at before a kernel is launched, where anybody reads its arguments ([`crate::watch::arguments`]); after the
//! launch it is counted like everything in [`super::submit`]. The context is looked up once for both: to ask the driver which one is current takes as long as
//! much of the rest.

use crate::serve::managed;
use crate::tiers::far;
use crate::tiers::launch::{self, About};
use crate::tiers::timing::Running;
use crate::watch::arguments::{self, Arguments, Reader};
use crate::watch::context::Context;
use cudarc::driver::sys::{CUfunction, CUgraphExec, CUlaunchConfig, CUstream};
use gpupool_cuda::{Function, GraphExec, Stream};
use gpupool_interpose::Api;
use std::ffi::c_void;

pub use crate::tiers::launch::after;

/// # Safety
/// The arguments are the program's of that call.
#[allow(clippy::too_many_arguments, reason = "the table's rows pass on what the program passes, each by itself")]
#[inline(always)]
pub unsafe fn kernel(
    api: Api,
    context: Option<Context>,
    function: CUfunction,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    stream: CUstream,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Option<Running> {
    let about = about(function, [grid_x, grid_y, grid_z], stream);
    // SAFETY: as for this function.
    unsafe { any(api, context, &about, Arguments { parameters, extra }) }
}

/// # Safety
/// The arguments are the program's of that call.
#[inline(always)]
pub unsafe fn configured(
    api: Api,
    context: Option<Context>,
    config: *const c_void,
    function: CUfunction,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Option<Running> {
    // SAFETY: NULL, or what the driver reads too.
    let config = unsafe { config.cast::<CUlaunchConfig>().as_ref() }?;
    // SAFETY: what the driver reads, too.
    let is_plain = unsafe { is_plain(config) };
    let about = about(function, [config.gridDimX, config.gridDimY, config.gridDimZ], config.hStream);
    // SAFETY: as for this function.
    unsafe { any(api, context, &About { is_plain, ..about }, Arguments { parameters, extra }) }
}

/// Whether nobody notices events around such a launch. Clusters, priorities and the like are of the launch alone, and one that may begin
/// before the last one ends (programmatic stream serialization) begins behind an event as behind any other work. Where the program
/// has the launch record events itself, ours stay away.
///
/// # Safety
/// As the driver reads it.
unsafe fn is_plain(config: &CUlaunchConfig) -> bool {
    use cudarc::driver::sys::CUlaunchAttributeID as Attribute;
    if config.attrs.is_null() {
        return true;
    }
    let recording = [
        Attribute::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT as u32,
        Attribute::CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT as u32,
    ];
    (0..config.numAttrs as usize).all(|at| {
        // A number that this list does not have is none of the enum's values, so it is read as a number.
        // SAFETY: there are so many, and each begins with its number.
        let id = unsafe { (&raw const (*config.attrs.add(at)).id).cast::<u32>().read() };
        !recording.contains(&id)
    })
}

/// # Safety
/// The arguments are the program's of that call.
#[allow(clippy::too_many_arguments, reason = "the table's rows pass on what the program passes, each by itself")]
#[inline(always)]
pub unsafe fn cooperative(
    api: Api,
    context: Option<Context>,
    function: CUfunction,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    stream: CUstream,
    parameters: *mut *mut c_void,
) -> Option<Running> {
    let about = about(function, [grid_x, grid_y, grid_z], stream);
    // SAFETY: as for this function.
    unsafe { any(api, context, &about, Arguments { parameters, extra: std::ptr::null_mut() }) }
}

#[inline(always)]
fn about(function: CUfunction, grid: [u32; 3], stream: CUstream) -> About {
    About { function: Function::from_raw(function), stream: Stream::from_raw(stream), is_plain: true, grid }
}

/// # Safety
/// The arguments are the program's of that call.
pub unsafe fn graph(api: Api, context: Option<Context>, exec: CUgraphExec, stream: CUstream) -> Option<Running> {
    let exec = GraphExec::from_raw(exec).filter(|_| arguments::are_read_by(Reader::Tiers))?;
    launch::before_graph(api, context?, exec, Stream::from_raw(stream))
}

/// Always inlined, so that a row asks the loader only once where this thread's variables lie. What a launch is goes on by reference: it was just written in parts, and
/// a copy reads it in larger ones, for which the processor waits until those are written.
///
/// # Safety
/// The arguments are the program's of that call.
#[inline(always)]
unsafe fn any(api: Api, context: Option<Context>, about: &About, arguments: Arguments) -> Option<Running> {
    if arguments::are_read_by(Reader::Managed) {
        // SAFETY: as for this function.
        unsafe { prefetch(api, about, arguments) };
    }
    let context = context?;
    let mut running = None;
    if arguments::are_read_by(Reader::Tiers) {
        // SAFETY: as for this function.
        running = unsafe { launch::before(api, context, about, arguments) };
    }
    if arguments::are_read_by(Reader::Far) && far::is_due() {
        // SAFETY: as for this function.
        running = unsafe { watch(api, context, about, arguments, running) };
    }
    running
}

/// By itself, as what follows, so that a launch for which it is not done saves no register and makes no room for it.
///
/// # Safety
/// As for [`any`].
#[cold]
unsafe fn prefetch(api: Api, about: &About, arguments: Arguments) {
    // SAFETY: as for this function.
    unsafe { managed::launch::before(api, about.function, about.stream, arguments) };
}

/// # Safety
/// As for [`any`].
#[cold]
unsafe fn watch(
    api: Api,
    context: Context,
    about: &About,
    arguments: Arguments,
    running: Option<Running>,
) -> Option<Running> {
    // One pair of events around a launch is enough.
    let about = About { is_plain: about.is_plain && running.is_none(), ..*about };
    // SAFETY: as for this function.
    let watched = unsafe { far::before(api, context, about, arguments) };
    running.or(watched)
}
