//! Events: points in streams, with a time.

use crate::capture::Capture;
use crate::context::{Context, current};
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{Handle, Out};
use crate::graph::Node;
use crate::shared_event::SharedEvent;
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
    /// What other processes see of it, if it is for them too.
    shared: Option<Arc<SharedEvent>>,
}

/// What the event stands for since it was last recorded.
#[derive(Default)]
struct Record {
    point: Option<Point>,
    /// When the stream got there; shared with the work that will know.
    time: Arc<Mutex<Option<Instant>>>,
    capture: Option<Arc<Capture>>,
}

/// A recording that can be waited for.
#[derive(Clone)]
enum Point {
    Stream(Ticket),
    /// Of any process, by number.
    Shared(Arc<SharedEvent>, u32),
}

impl Point {
    fn is_done(&self) -> bool {
        match self {
            Point::Stream(ticket) => ticket.is_done(),
            Point::Shared(event, number) => event.is_done(*number),
        }
    }

    fn wait(&self) {
        match self {
            Point::Stream(ticket) => ticket.wait(),
            Point::Shared(event, number) => event.wait(*number),
        }
    }
}

impl Event {
    /// The latest recording, if it is not finished; CAPTURED_EVENT for one in a capture.
    fn unfinished(&self) -> Outcome<Option<Point>> {
        let last = self.last.lock();
        if last.capture.is_some() {
            return Err(Code::CAPTURED_EVENT);
        }
        let point = match &self.shared {
            Some(shared) => Some(Point::Shared(shared.clone(), shared.recorded())),
            None => last.point.clone(),
        };
        Ok(point.filter(|point| !point.is_done()))
    }
}

pub fn create(out: Out<Handle>, flags: c_uint) -> Outcome {
    out.required()?;
    current()?;
    if flags & !FLAG_MASK != 0 || flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let shared = if flags & INTERPROCESS != 0 { Some(Arc::new(SharedEvent::new()?)) } else { None };
    out.set(driver().events.insert(Arc::new(Event { flags, last: Mutex::default(), shared })))
}

/// An event of another process.
pub fn import(shared: SharedEvent) -> Handle {
    let shared = Some(Arc::new(shared));
    driver().events.insert(Arc::new(Event { flags: INTERPROCESS | DISABLE_TIMING, last: Mutex::default(), shared }))
}

/// What other processes see of an event; INVALID_HANDLE if it was not made for them.
pub fn shared(handle: Handle) -> Outcome<Arc<SharedEvent>> {
    driver().events.get(handle)?.shared.clone().ok_or(Code::INVALID_HANDLE)
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
    let shared = event.shared.clone().map(|shared| (shared.begin(), shared));
    stream.run_or_submit(Work {
        action: Arc::new(move |_| {
            *mark.lock() = Some(Instant::now());
            if let Some((number, shared)) = &shared {
                shared.finish(*number);
            }
            Ok(())
        }),
        touches: Vec::new(),
        node: Node::Empty,
    })?;
    *last = Record { point: Some(Point::Stream(stream.last())), time, capture: None };
    Ok(())
}

pub fn record_with_flags(handle: Handle, stream: Handle, flags: c_uint) -> Outcome {
    if flags > 1 {
        return Err(Code::INVALID_VALUE);
    }
    record(handle, stream)
}

pub fn query(handle: Handle) -> Outcome {
    match driver().events.get(handle)?.unfinished()? {
        None => Ok(()),
        Some(_) => Err(Code::NOT_READY),
    }
}

pub fn synchronize(handle: Handle) -> Outcome {
    if let Some(point) = driver().events.get(handle)?.unfinished()? {
        point.wait();
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
        if event.flags & DISABLE_TIMING != 0 || last.point.is_none() {
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
    let capture = event.last.lock().capture.clone();
    if let Some(capture) = capture {
        return capture.join(&stream);
    }
    let own = stream.capturing()?;
    let Some(point) = event.unfinished()? else { return Ok(()) };
    if let Some(own) = own {
        own.invalidate();
        return Err(Code::STREAM_CAPTURE_ISOLATION);
    }
    match point {
        Point::Stream(ticket) => stream.wait_for(ticket),
        Point::Shared(event, number) => {
            let action = move |_: &Context| {
                event.wait(number);
                Ok(())
            };
            stream.submit(Work { action: Arc::new(action), touches: Vec::new(), node: Node::Empty })
        }
    }
}
