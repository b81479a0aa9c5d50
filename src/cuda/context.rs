//! Contexts: which is current, what it is, and waiting for its work.

use crate::{Context, CuResult, Device, Driver, Event, GreenContext};
use std::ffi::c_int;

/// `CU_EVENT_DISABLE_TIMING`.
const UNTIMED: u32 = 2;

/// An event of ours, to be put behind all work of the context that it was made in.
pub struct Marker<'a> {
    driver: &'a Driver,
    event: Event,
    record: unsafe extern "C" fn(Context, Event) -> CuResult,
}

impl Marker<'_> {
    /// Puts it behind all work of the context, of streams of every kind (`cuCtxRecordEvent`). Breaks a capture of that context.
    ///
    /// # Safety
    /// The marker was made in this context, which lives.
    pub unsafe fn put(&self, context: Context) -> CuResult {
        // SAFETY: the event was made by `Driver::marker` and is destroyed when this is dropped; the caller vouches for the context.
        unsafe { (self.record)(context, self.event) }
    }

    /// Whether all work in front of it is over (`cuEventQuery`): NOT_READY where it is not, or the error of the context.
    pub fn ask(&self) -> CuResult {
        // SAFETY: the event was made by `Driver::marker` and is destroyed when this is dropped.
        unsafe { (self.driver.cuEventQuery)(self.event) }
    }
}

impl Drop for Marker<'_> {
    fn drop(&mut self) {
        // SAFETY: the event was made by `Driver::marker` and is not used again; the driver keeps one that is pending until
        // it has passed.
        let _: CuResult = unsafe { (self.driver.cuEventDestroy_v2)(self.event) };
    }
}

/// A [`Marker`] behind all work of a context.
pub struct Behind<'a>(Marker<'a>);

impl Behind<'_> {
    /// Whether all that work is over, without waiting.
    pub fn has_passed(&self) -> bool {
        self.0.ask().is_ok()
    }

    /// Waits until all that work is over (`cuEventSynchronize`). Breaks no capture where the thread is relaxed, nor is it broken
    /// by one that begins meanwhile. The driver may wait in a call at which threads are cancelled.
    pub fn wait(&self) -> CuResult {
        // SAFETY: the event was made by `Driver::marker` and is destroyed when this is dropped.
        unsafe { (self.0.driver.cuEventSynchronize)(self.0.event) }
    }
}

impl Driver {
    /// The context that is current on this thread (`cuCtxGetCurrent`), or `None` where there is none.
    #[inline]
    pub fn current_context(&self) -> Option<Context> {
        self.ask_current_context().ok().flatten()
    }

    /// The context that is current on this thread (`cuCtxGetCurrent`), or the error of a driver that is gone because the process
    /// exits.
    #[inline]
    pub fn ask_current_context(&self) -> Result<Option<Context>, CuResult> {
        let mut context = None;
        // SAFETY: the output is a local of the right type.
        unsafe { (self.cuCtxGetCurrent)(&raw mut context) }.ok()?;
        Ok(context)
    }

    /// The driver's number of the current context (`cuCtxGetId`), which no other one ever gets, or the answer of calls in a
    /// context that is gone or broken. `None` inside where the driver does not number contexts (before CUDA 12.0).
    pub fn current_life(&self) -> Result<Option<u64>, CuResult> {
        if self.cuCtxGetId.is_some() {
            // SAFETY: `None` stands for the current context.
            return unsafe { self.ask_life(None) };
        }
        // Any question to the context does.
        self.limit(0).map(|_| None)
    }

    /// The driver's number of this context (`cuCtxGetId`), which no other one ever gets, or the answer of calls in a context that
    /// is gone or broken. `None` inside where the driver does not number contexts (before CUDA 12.0).
    ///
    /// # Safety
    /// The driver has just given this context to the calling thread, or it is a primary one, whose handle stays good.
    pub unsafe fn life(&self, context: Context) -> Result<Option<u64>, CuResult> {
        // SAFETY: the caller vouches for the handle.
        unsafe { self.ask_life(Some(context)) }
    }

    /// # Safety
    /// `None` for the current context, or one that [`life`](Self::life) may be asked about.
    unsafe fn ask_life(&self, context: Option<Context>) -> Result<Option<u64>, CuResult> {
        let Some(get_id) = self.cuCtxGetId else { return Ok(None) };
        let mut id = 0;
        // SAFETY: the output is a local, and the caller vouches for the handle.
        unsafe { get_id(context, &raw mut id) }.ok()?;
        Ok(Some(id))
    }

    /// The device of the current context (`cuCtxGetDevice`).
    #[inline]
    pub fn current_device(&self) -> Result<Device, CuResult> {
        let mut device = Device::of(0);
        // SAFETY: the output is a local of the right type.
        unsafe { (self.cuCtxGetDevice)(&raw mut device) }.ok()?;
        Ok(device)
    }

    /// Makes a context current on this thread (`cuCtxPushCurrent`).
    ///
    /// # Safety
    /// The context lives until [`pop_context`](Self::pop_context): the driver accepts the handle of a dead one and aborts later.
    pub unsafe fn push_context(&self, context: Context) -> Result<(), CuResult> {
        // SAFETY: the caller vouches for the context.
        unsafe { (self.cuCtxPushCurrent_v2)(context) }.ok()
    }

    /// Takes back what [`push_context`](Self::push_context) did with this context (`cuCtxPopCurrent`).
    pub fn pop_context(&self, pushed: Context) {
        let pop = || {
            let mut popped = None;
            // SAFETY: the output is a local.
            unsafe { (self.cuCtxPopCurrent_v2)(&raw mut popped) }
        };
        // It would be current for what the program does next, which would go to another GPU.
        if !pop().is_ok() && self.current_context() == Some(pushed) {
            let _: CuResult = pop();
        }
    }

    /// Waits for all work of the current context and its green contexts (`cuCtxSynchronize`). Breaks a capture of that
    /// context. The driver may wait in a call at which threads are cancelled.
    pub fn synchronize(&self) -> CuResult {
        // SAFETY: the call has no preconditions.
        unsafe { (self.cuCtxSynchronize)() }
    }

    /// An event behind all work of a context, of streams of every kind. `None` with drivers before CUDA 12.5, which cannot
    /// record one, and where it cannot be made. To record it breaks a capture of that context, so `unless_captured` makes that
    /// call, or answers `None` and does not.
    ///
    /// # Safety
    /// The context is current.
    pub unsafe fn behind_all_work(
        &self,
        context: Context,
        unless_captured: impl FnOnce(&dyn Fn() -> CuResult) -> Option<CuResult>,
    ) -> Option<Behind<'_>> {
        let marker = self.marker().ok()?;
        // SAFETY: the event was made just now in this context, which is current and so alive.
        unless_captured(&|| unsafe { marker.put(context) })?.ok().ok()?;
        Some(Behind(marker))
    }

    /// A marker of the current context. NOT_SUPPORTED with drivers before CUDA 12.5, which cannot put one.
    pub fn marker(&self) -> Result<Marker<'_>, CuResult> {
        let record = self.cuCtxRecordEvent.ok_or(CuResult::NOT_SUPPORTED)?;
        let mut event = None;
        // SAFETY: the output is a local.
        unsafe { (self.cuEventCreate)(&raw mut event, UNTIMED) }.ok()?;
        let event = event.ok_or(CuResult::INVALID_CONTEXT)?;
        Ok(Marker { driver: self, event, record })
    }

    /// Whether [`behind_all_work`](Self::behind_all_work) can answer with this driver.
    pub fn records_contexts(&self) -> bool {
        self.cuCtxRecordEvent.is_some()
    }

    /// A limit of the current context (`cuCtxGetLimit`), a number of `CUlimit`; mostly bytes.
    pub fn limit(&self, limit: c_int) -> Result<u64, CuResult> {
        let mut value = 0;
        // SAFETY: the output is a local of the right type.
        unsafe { (self.cuCtxGetLimit)(&raw mut value, limit) }.ok()?;
        Ok(value as u64)
    }

    /// Sets a limit of the current context (`cuCtxSetLimit`).
    pub fn set_limit(&self, limit: c_int, value: u64) -> CuResult {
        // SAFETY: the call takes numbers only.
        unsafe { (self.cuCtxSetLimit)(limit, value as usize) }
    }

    /// Whether the primary context of a device exists (`cuDevicePrimaryCtxGetState`).
    pub fn primary_is_active(&self, device: Device) -> bool {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the outputs are locals of the right types.
        let result = unsafe { (self.cuDevicePrimaryCtxGetState)(device, &raw mut flags, &raw mut active) };
        result.is_ok() && active != 0
    }

    /// The primary context of a device, made where there is none (`cuDevicePrimaryCtxRetain`). It stays until
    /// [`release_primary`](Self::release_primary).
    pub fn retain_primary(&self, device: Device) -> Result<Context, CuResult> {
        let mut context = None;
        // SAFETY: the output is a local of the right type.
        unsafe { (self.cuDevicePrimaryCtxRetain)(&raw mut context, device) }.ok()?;
        context.ok_or(CuResult::INVALID_CONTEXT)
    }

    /// Gives back what [`retain_primary`](Self::retain_primary) took (`cuDevicePrimaryCtxRelease`).
    pub fn release_primary(&self, device: Device) -> CuResult {
        // SAFETY: the call takes a number only.
        unsafe { (self.cuDevicePrimaryCtxRelease_v2)(device) }
    }

    /// Ends a context (`cuCtxDestroy`). Where it was current on this thread, the one below it is.
    ///
    /// # Safety
    /// It is a live context that `cuCtxCreate` made, and nobody else uses it.
    pub unsafe fn destroy_context(&self, context: Context) -> CuResult {
        // SAFETY: the caller vouches for the context.
        unsafe { (self.cuCtxDestroy_v2)(context) }
    }

    /// Ends a green context (`cuGreenCtxDestroy`). NOT_SUPPORTED by drivers that have none.
    ///
    /// # Safety
    /// It is live, and nobody else uses it.
    pub unsafe fn destroy_green(&self, green: GreenContext) -> CuResult {
        // SAFETY: the caller vouches for the green context.
        self.cuGreenCtxDestroy.map_or(CuResult::NOT_SUPPORTED, |destroy| unsafe { destroy(green) })
    }
}
