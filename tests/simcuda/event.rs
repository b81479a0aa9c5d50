//! Events: points in streams, with a time.

use crate::capture::Capture;
use crate::context::current;
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{Handle, Out};
use crate::graph::Node;
use crate::stream::{Ticket, Work, resolve};
use parking_lot::Mutex;
use std::ffi::c_uint;
use std::sync::Arc;
use std::time::Instant;

const DISABLE_TIMING: c_uint = 2;
const INTERPROCESS: c_uint = 4;
const FLAG_MASK: c_uint = 7;

pub struct Event {
    flags: c_uint,
    last: Mutex<Record>,
}

/// What the event stands for since it was last recorded.
#[derive(Default)]
struct Record {
    ticket: Option<Ticket>,
    /// When the stream got there; shared with the work that will know.
    time: Arc<Mutex<Option<Instant>>>,
    capture: Option<Arc<Capture>>,
}

pub fn create(out: Out<Handle>, flags: c_uint) -> Outcome {
    out.required()?;
    current()?;
    if flags & !FLAG_MASK != 0 || flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0 {
        return Err(Code::INVALID_VALUE);
    }
    out.set(driver().events.insert(Arc::new(Event { flags, last: Mutex::default() })))
}

pub fn destroy(handle: Handle) -> Outcome {
    driver().events.remove(handle).map(drop)
}

pub fn record(handle: Handle, stream: Handle) -> Outcome {
    let event = driver().events.get(handle)?;
    let stream = resolve(stream)?;
    let mut last = event.last.lock();
    if let Some(capture) = stream.capturing()? {
        *last = Record { capture: Some(capture), ..Record::default() };
        return Ok(());
    }
    let time = Arc::new(Mutex::new(None));
    let mark = time.clone();
    stream.run_or_submit(Work {
        action: Arc::new(move |_| {
            *mark.lock() = Some(Instant::now());
            Ok(())
        }),
        touches: Vec::new(),
        node: Node::Empty,
    })?;
    *last = Record { ticket: Some(stream.last()), time, capture: None };
    Ok(())
}

pub fn record_with_flags(handle: Handle, stream: Handle, flags: c_uint) -> Outcome {
    if flags > 1 {
        return Err(Code::INVALID_VALUE);
    }
    record(handle, stream)
}

pub fn query(handle: Handle) -> Outcome {
    let event = driver().events.get(handle)?;
    let last = event.last.lock();
    if last.capture.is_some() {
        return Err(Code::CAPTURED_EVENT);
    }
    if last.ticket.as_ref().is_none_or(Ticket::is_done) { Ok(()) } else { Err(Code::NOT_READY) }
}

pub fn synchronize(handle: Handle) -> Outcome {
    let event = driver().events.get(handle)?;
    let ticket = {
        let last = event.last.lock();
        if last.capture.is_some() {
            return Err(Code::CAPTURED_EVENT);
        }
        last.ticket.clone()
    };
    if let Some(ticket) = ticket {
        ticket.wait();
    }
    crate::mempool::synchronized();
    current().map(drop)
}

/// `cuEventElapsedTime`, in milliseconds.
pub fn elapsed(out: Out<f32>, start: Handle, end: Handle) -> Outcome {
    out.required()?;
    let time = |handle| {
        let event = driver().events.get(handle)?;
        let last = event.last.lock();
        if event.flags & DISABLE_TIMING != 0 || last.ticket.is_none() {
            return Err(Code::INVALID_HANDLE);
        }
        let time = *last.time.lock();
        time.ok_or(Code::NOT_READY)
    };
    let (start, end) = (time(start)?, time(end)?);
    let signed = match end.checked_duration_since(start) {
        Some(after) => after.as_secs_f32(),
        None => -start.duration_since(end).as_secs_f32(),
    };
    out.set(signed * 1e3)
}

/// `cuStreamWaitEvent`. An event of a capture takes the stream into that capture.
pub fn stream_wait(stream: Handle, handle: Handle, flags: c_uint) -> Outcome {
    if flags > 1 {
        return Err(Code::INVALID_VALUE);
    }
    let stream = resolve(stream)?;
    let event = driver().events.get(handle)?;
    let (ticket, capture) = {
        let last = event.last.lock();
        (last.ticket.clone(), last.capture.clone())
    };
    if let Some(capture) = capture {
        return capture.join(&stream);
    }
    if let Some(own) = stream.capturing()? {
        if ticket.as_ref().is_none_or(Ticket::is_done) {
            return Ok(());
        }
        own.invalidate();
        return Err(Code::STREAM_CAPTURE_ISOLATION);
    }
    ticket.map_or(Ok(()), |ticket| stream.wait_for(ticket))
}
