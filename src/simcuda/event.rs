//! Events: points in streams, with a time.

use crate::capture::{self, Capture};
use crate::clock::{self, Time};
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

const DISABLE_TIMING: c_uint = 2;
const INTERPROCESS: c_uint = 4;
const FLAG_MASK: c_uint = 7;

pub struct Event {
    flags: c_uint,
    /// The number of the context that owns the event; it is recorded only there.
    owner: u64,
    last: Mutex<Record>,
    /// What other processes see of it, if it is for them too.
    shared: Option<Arc<SharedEvent>>,
}

/// What the event stands for since it was last recorded.
#[derive(Default)]
struct Record {
    point: Option<Point>,
    /// When the stream got there; shared with the work that will know.
    time: Arc<Mutex<Option<Time>>>,
    capture: Option<Arc<Capture>>,
}

/// A recording that can be waited for.
#[derive(Clone)]
enum Point {
    Stream(Ticket),
    /// All streams of a context: those with work, and when the work of the others had ended.
    Context(Vec<Ticket>, Time),
    /// Of any process, by number.
    Shared(Arc<SharedEvent>, u32),
}

impl Point {
    fn is_done(&self) -> bool {
        match self {
            Point::Stream(ticket) => ticket.is_done(),
            Point::Context(tickets, _) => tickets.iter().all(Ticket::is_done),
            Point::Shared(event, number) => event.is_done(*number),
        }
    }

    /// When it was reached, once it is done. Other processes' clocks are their own.
    fn end(&self) -> Time {
        match self {
            Point::Stream(ticket) => ticket.end(),
            Point::Context(tickets, ended) => tickets.iter().map(Ticket::end).fold(*ended, Time::max),
            Point::Shared(..) => 0,
        }
    }

    fn wait(&self) {
        match self {
            Point::Stream(ticket) => ticket.wait(),
            Point::Context(tickets, _) => tickets.iter().for_each(Ticket::wait),
            Point::Shared(event, number) => event.wait(*number),
        }
    }
}

impl Event {
    /// The latest recording; CAPTURED_EVENT for one in a capture.
    fn point(&self) -> Outcome<Option<Point>> {
        let last = self.last.lock();
        if last.capture.is_some() {
            return Err(Code::CAPTURED_EVENT);
        }
        Ok(match &self.shared {
            Some(shared) => Some(Point::Shared(shared.clone(), shared.recorded())),
            None => last.point.clone(),
        })
    }
}

pub fn create(out: Out<Handle>, flags: c_uint) -> Outcome {
    out.required()?;
    let context = current()?;
    context.wait_for_copies();
    let owner = context.owner();
    if flags & !FLAG_MASK != 0 || flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let shared = if flags & INTERPROCESS != 0 { Some(Arc::new(SharedEvent::new()?)) } else { None };
    out.set(driver().events.insert(Arc::new(Event { flags, owner, last: Mutex::default(), shared })))
}

/// An event of another process, opened in the current context.
pub fn import(shared: SharedEvent) -> Outcome<Handle> {
    let (owner, shared) = (current()?.owner(), Some(Arc::new(shared)));
    let flags = INTERPROCESS | DISABLE_TIMING;
    Ok(driver().events.insert(Arc::new(Event { flags, owner, last: Mutex::default(), shared })))
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
    if stream.context()?.owner() != event.owner {
        return Err(Code::INVALID_HANDLE);
    }
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
            *mark.lock() = Some(clock::now());
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

/// `cuCtxRecordEvent`: all that was submitted to the context so far, and to its green contexts.
pub fn record_context(context: Handle, handle: Handle) -> Outcome {
    record_all(&driver().contexts.get(context).map_err(|_| Code::INVALID_CONTEXT)?, handle)
}

pub fn record_all(context: &Arc<Context>, handle: Handle) -> Outcome {
    let event = driver().events.get(handle)?;
    if context.owner() != event.owner {
        return Err(Code::INVALID_HANDLE);
    }
    context.check()?;
    capture::forbid_in(context)?;
    let tickets = context.unfinished();
    if let Some(shared) = event.shared.clone() {
        let number = shared.begin();
        let waiting = tickets.clone();
        // No stream of the program may be held up, so the end is awaited beside them.
        context.aside(move || {
            waiting.iter().for_each(Ticket::wait);
            shared.finish(number);
        })?;
    }
    *event.last.lock() = Record { point: Some(Point::Context(tickets, context.time())), ..Record::default() };
    Ok(())
}

/// `cuCtxWaitEvent`: all that is submitted to the context from here on, and to its green contexts.
pub fn context_wait(context: Handle, handle: Handle) -> Outcome {
    wait_all(&driver().contexts.get(context).map_err(|_| Code::INVALID_CONTEXT)?, handle)
}

pub fn wait_all(context: &Arc<Context>, handle: Handle) -> Outcome {
    let event = driver().events.get(handle)?;
    context.check()?;
    let captured = event.last.lock().capture.clone();
    if let Some(capture) = captured {
        capture.invalidate();
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    capture::forbid_in(context)?;
    match event.point()? {
        None => {}
        Some(Point::Stream(ticket)) => context.close_gate(&[ticket]),
        Some(Point::Context(tickets, _)) => context.close_gate(&tickets),
        Some(Point::Shared(event, number)) => {
            let ticket = context.aside(move || event.wait(number))?;
            context.close_gate(&[ticket]);
        }
    }
    Ok(())
}

/// `cuEventQuery`. It breaks the captures that forbid unsafe calls, although it waits for nothing.
pub fn query(handle: Handle) -> Outcome {
    capture::forbid()?;
    match driver().events.get(handle)?.point()? {
        Some(point) if !point.is_done() => Err(Code::NOT_READY),
        point => {
            clock::host_saw(point.map_or(0, |point| point.end()));
            Ok(())
        }
    }
}

pub fn synchronize(handle: Handle) -> Outcome {
    if let Some(point) = driver().events.get(handle)?.point()? {
        point.wait();
        clock::host_saw(point.end());
    }
    crate::mempool::synchronized();
    current().map(drop)
}

/// `cuEventElapsedTime`, in milliseconds of the simulated GPUs.
pub fn elapsed(out: Out<f32>, start: Handle, end: Handle) -> Outcome {
    out.required()?;
    let time = |handle| {
        let event = driver().events.get(handle)?;
        let last = event.last.lock();
        if event.flags & DISABLE_TIMING != 0 || last.point.is_none() {
            return Err(Code::INVALID_HANDLE);
        }
        match &last.point {
            Some(point @ Point::Context(..)) if point.is_done() => Ok(point.end()),
            _ => last.time.lock().ok_or(Code::NOT_READY),
        }
    };
    let (start, end) = (time(start)?, time(end)?);
    const MILLISECOND: f64 = 1e9;
    out.set(((end as f64 - start as f64) / MILLISECOND) as f32)
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
    let Some(point) = event.point()? else { return Ok(()) };
    if let Some(own) = own {
        // What is done already is nothing to wait for.
        if point.is_done() {
            return Ok(());
        }
        own.invalidate();
        return Err(Code::STREAM_CAPTURE_ISOLATION);
    }
    match point {
        Point::Stream(ticket) => stream.wait_for(vec![ticket]),
        Point::Context(tickets, _) => stream.wait_for(tickets),
        Point::Shared(event, number) if event.is_done(number) => Ok(()),
        Point::Shared(event, number) => {
            let action = move |_: &Context| {
                event.wait(number);
                Ok(())
            };
            stream.submit(Work { action: Arc::new(action), touches: Vec::new(), node: Node::Empty })
        }
    }
}
