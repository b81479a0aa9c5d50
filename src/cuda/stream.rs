//! Streams: whose they are, and whether they are being captured.

use crate::{Context, CuResult, Driver, GreenContext, Stream};
use gpupool_interpose::cancel;
use std::ffi::c_int;

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_int = 2;

/// `CUstreamCaptureStatus`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capturing {
    Not,
    Valid,
    /// A call broke the capture, and its end was not asked for yet.
    Invalidated,
}

/// Held while this thread is relaxed: its calls break no capture but those that they are about.
pub struct Relaxed<'a> {
    driver: &'a Driver,
    /// The program's own mode; `None` if the driver refused.
    before: Option<c_int>,
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            self.driver.exchange_capture_mode(before);
        }
    }
}

impl Driver {
    /// A stream of the current context that does not wait for the default one (`cuStreamCreate`).
    pub fn create_stream(&self) -> Result<Stream, CuResult> {
        let mut stream = Stream::DEFAULT;
        // SAFETY: the output is a local.
        unsafe { (self.cuStreamCreate)(&raw mut stream, NON_BLOCKING) }.ok()?;
        Ok(stream)
    }

    /// Ends a stream (`cuStreamDestroy`).
    ///
    /// # Safety
    /// The stream lives, and nobody uses it again.
    pub unsafe fn destroy_stream(&self, stream: Stream) -> CuResult {
        // SAFETY: the caller vouches for the stream.
        unsafe { (self.cuStreamDestroy_v2)(stream) }
    }

    /// Waits for the default stream of the current context, or of the calling thread in it (`cuStreamSynchronize`).
    pub fn synchronize_default_stream(&self, per_thread: bool) -> CuResult {
        let _sheltered = cancel::shelter();
        let stream = if per_thread { Stream::PER_THREAD } else { Stream::LEGACY };
        // SAFETY: both are streams of every context.
        unsafe { (self.cuStreamSynchronize)(stream) }
    }

    /// Waits for a stream (`cuStreamSynchronize`).
    ///
    /// # Safety
    /// The stream lives.
    pub unsafe fn synchronize_stream(&self, stream: Stream) -> CuResult {
        let _sheltered = cancel::shelter();
        // SAFETY: the caller vouches for the stream.
        unsafe { (self.cuStreamSynchronize)(stream) }
    }

    /// The context of a stream (`cuStreamGetCtx`).
    ///
    /// # Safety
    /// The stream lives, or is one of the default ones.
    pub unsafe fn stream_context(&self, stream: Stream) -> Result<Context, CuResult> {
        let mut context = None;
        // SAFETY: the output is a local, and the caller vouches for the stream.
        unsafe { (self.cuStreamGetCtx)(stream, &raw mut context) }.ok()?;
        context.ok_or(CuResult::INVALID_CONTEXT)
    }

    /// The green context that a stream is of (`cuStreamGetGreenCtx`); `None` for one of none, and with drivers before CUDA 12.4.
    ///
    /// # Safety
    /// The stream lives, or is one of the default ones.
    pub unsafe fn stream_green(&self, stream: Stream) -> Option<GreenContext> {
        let ask = self.cuStreamGetGreenCtx?;
        let mut green = None;
        // SAFETY: the output is a local, and the caller vouches for the stream.
        unsafe { ask(stream, &raw mut green) }.ok().ok()?;
        green
    }

    /// Whether a stream is being captured, valid or not (`cuStreamIsCapturing`); the driver's error for a stream that may not
    /// be used meanwhile.
    ///
    /// # Safety
    /// The stream lives, or is one of the default ones.
    pub unsafe fn is_capturing(&self, stream: Stream) -> Result<bool, CuResult> {
        // SAFETY: the caller vouches for the stream.
        Ok(unsafe { self.capture_of(stream) }? != Capturing::Not)
    }

    /// Whether work on this stream becomes part of a graph (`cuStreamIsCapturing`), and whether that capture is broken.
    ///
    /// # Safety
    /// The stream lives, or is one of the default ones.
    pub unsafe fn capture_of(&self, stream: Stream) -> Result<Capturing, CuResult> {
        let mut status = 0;
        // SAFETY: the output is a local, and the caller vouches for the stream.
        unsafe { (self.cuStreamIsCapturing)(stream, &raw mut status) }.ok()?;
        Ok(match status {
            0 => Capturing::Not,
            1 => Capturing::Valid,
            _ => Capturing::Invalidated,
        })
    }

    /// Makes the calling thread relaxed until that is dropped (`cuThreadExchangeStreamCaptureMode`).
    pub fn relax(&self) -> Relaxed<'_> {
        Relaxed { driver: self, before: self.exchange_capture_mode(RELAXED) }
    }

    /// The calling thread's mode so far; `None` if the driver refused.
    fn exchange_capture_mode(&self, mut mode: c_int) -> Option<c_int> {
        // SAFETY: the value is a local, which the driver reads and writes.
        let result = unsafe { (self.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
        result.is_ok().then_some(mode)
    }
}
