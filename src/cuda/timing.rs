//! How long work on a stream takes, told by two events around it.

use crate::{CuResult, Driver, Event, Stream};

/// An event that the driver notes the time of (`CU_EVENT_DEFAULT`).
const TIMED: u32 = 0;
/// One of which it does not (`CU_EVENT_DISABLE_TIMING`).
const UNTIMED: u32 = 2;

/// Two events of one context, to be recorded around work on a stream of it. They end with the context.
#[derive(Clone, Copy, Debug)]
pub struct Timer {
    begin: Event,
    end: Event,
}

impl Driver {
    /// Two events of the current context (`cuEventCreate`).
    pub fn timer(&self) -> Result<Timer, CuResult> {
        let begin = self.event(TIMED)?;
        match self.event(TIMED) {
            Ok(end) => Ok(Timer { begin, end }),
            Err(error) => {
                // SAFETY: made above, and nobody else knows it.
                let _: CuResult = unsafe { (self.cuEventDestroy_v2)(begin) };
                Err(error)
            }
        }
    }

    fn event(&self, flags: u32) -> Result<Event, CuResult> {
        let mut event = None;
        // SAFETY: the output is a local.
        unsafe { (self.cuEventCreate)(&raw mut event, flags) }.ok()?;
        event.ok_or(CuResult::INVALID_VALUE)
    }
}

/// An event that is put among work to be seen to pass. It ends with its context.
#[derive(Clone, Copy, Debug)]
pub struct Milestone(Event);

impl Driver {
    /// An event of the current context (`cuEventCreate`), of which no time is kept.
    pub fn milestone(&self) -> Result<Milestone, CuResult> {
        self.event(UNTIMED).map(Milestone)
    }
}

impl Milestone {
    /// Behind all work of this stream so far (`cuEventRecord`).
    ///
    /// # Safety
    /// The event's context lives, and the stream is one of it and lives.
    pub unsafe fn put(&self, driver: &Driver, stream: Stream) -> CuResult {
        // SAFETY: the caller vouches for both; the event lives as long as its context.
        unsafe { (driver.cuEventRecord)(self.0, stream) }
    }

    /// Whether that work is over, as it was put last (`cuEventQuery`). NOT_READY while it is not.
    ///
    /// # Safety
    /// The event's context lives.
    pub unsafe fn ask(&self, driver: &Driver) -> CuResult {
        // SAFETY: the event lives as long as its context.
        unsafe { (driver.cuEventQuery)(self.0) }
    }
}

impl Timer {
    /// Before the work (`cuEventRecord`).
    ///
    /// # Safety
    /// The events' context lives, and the stream is one of it and lives.
    pub unsafe fn begin(&self, driver: &Driver, stream: Stream) -> CuResult {
        // SAFETY: the caller vouches for both; the event lives as long as its context.
        unsafe { (driver.cuEventRecord)(self.begin, stream) }
    }

    /// Behind the work (`cuEventRecord`).
    ///
    /// # Safety
    /// As for [`begin`](Self::begin).
    pub unsafe fn end(&self, driver: &Driver, stream: Stream) -> CuResult {
        // SAFETY: the caller vouches for both; the event lives as long as its context.
        unsafe { (driver.cuEventRecord)(self.end, stream) }
    }

    /// Nanoseconds between the two (`cuEventElapsedTime`, which counts in half microseconds); NOT_READY while the work goes on.
    ///
    /// # Safety
    /// The events' context lives, and both were recorded.
    pub unsafe fn nanoseconds(&self, driver: &Driver) -> Result<f64, CuResult> {
        let mut milliseconds = 0.0;
        // SAFETY: the output is a local, and the caller vouches for the events.
        unsafe { (driver.cuEventElapsedTime)(&raw mut milliseconds, self.begin, self.end) }.ok()?;
        Ok(f64::from(milliseconds) * 1e6)
    }
}
