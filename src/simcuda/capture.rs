//! Stream capture: work recorded into a graph, and the calls that are not allowed meanwhile.

use crate::context::Context;
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{Handle, In, Out};
use crate::graph::Graph;
use crate::space::next_id;
use crate::stream::{Stream, Work, resolve};
use parking_lot::Mutex;
use std::cell::Cell;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::ThreadId;

const GLOBAL: c_int = 0;
const THREAD_LOCAL: c_int = 1;
const RELAXED: c_int = 2;

/// One capture, from begin to end, over all streams that joined it.
pub struct Capture {
    id: u64,
    mode: c_int,
    thread: ThreadId,
    valid: AtomicBool,
    /// In the order of recording. That order respects every dependency, so replaying it in sequence is right, and the
    /// simulation gains nothing from keeping the edges.
    work: Mutex<Vec<Work>>,
    streams: Mutex<Vec<Arc<Stream>>>,
    /// The graph that gets the work; a new one if there is none.
    target: Option<Handle>,
}

static CAPTURES: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static MODE: Cell<c_int> = const { Cell::new(GLOBAL) };
}

impl Capture {
    pub fn is_valid(&self) -> bool {
        self.valid.load(Ordering::Acquire)
    }

    pub fn invalidate(&self) {
        self.valid.store(false, Ordering::Release);
    }

    pub fn record(&self, work: Work) {
        self.work.lock().push(work);
    }

    /// Takes another stream in: it waited for an event of this capture.
    pub fn join(self: &Arc<Self>, stream: &Arc<Stream>) -> Outcome {
        let mut slot = stream.capture.lock();
        match slot.as_ref() {
            Some(capture) if Arc::ptr_eq(capture, self) => Ok(()),
            Some(capture) => {
                capture.invalidate();
                self.invalidate();
                Err(Code::STREAM_CAPTURE_MERGE)
            }
            None => {
                *slot = Some(self.clone());
                self.streams.lock().push(stream.clone());
                Ok(())
            }
        }
    }
}

/// Whether any capture is under way; what keeps the check out of every other call.
pub fn any() -> bool {
    COUNT.load(Ordering::Acquire) > 0
}

/// For calls that may not happen while somebody captures (allocation, free, waits): STREAM_CAPTURE_UNSUPPORTED, and the
/// captures it offends are broken.
pub fn forbid() -> Outcome {
    if !any() {
        return Ok(());
    }
    let mode = MODE.get();
    let me = std::thread::current().id();
    let mut offended = false;
    for capture in CAPTURES.lock().iter() {
        let own = capture.thread == me && capture.mode != RELAXED;
        if own && mode != RELAXED || capture.mode == GLOBAL && mode == GLOBAL {
            capture.invalidate();
            offended = true;
        }
    }
    if offended { Err(Code::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// For calls that wait for or stand for all work of a context: a capture in that context is broken whatever its mode and
/// thread, and one in another context goes on.
pub fn forbid_in(context: &Context) -> Outcome {
    if !any() {
        return Ok(());
    }
    let mut offended = false;
    for capture in CAPTURES.lock().iter() {
        let streams = capture.streams.lock();
        if streams.iter().any(|stream| stream.context().is_ok_and(|own| context.covers(&own))) {
            capture.invalidate();
            offended = true;
        }
    }
    if offended { Err(Code::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// Ends the captures that have a stream of a context that is no more: nobody could end them.
pub fn abandon(context: &Context) {
    drop_where(|stream| stream.context_id() == Some(context.id));
}

/// Ends the capture of a stream that is no more: nobody could end it.
pub fn abandon_of(stream: &Stream) {
    drop_where(|other| std::ptr::eq(other, stream));
}

/// Ends the captures whose first stream is among the `ended` ones, and breaks those that another of their streams left.
fn drop_where(ended: impl Fn(&Stream) -> bool) {
    if !any() {
        return;
    }
    let mut dropped = Vec::new();
    CAPTURES.lock().retain(|capture| {
        let streams = capture.streams.lock();
        if streams.iter().any(|stream| ended(stream)) {
            capture.invalidate();
        }
        let over = streams.first().is_some_and(|origin| ended(origin));
        if over {
            dropped.push(capture.clone());
        }
        !over
    });
    for capture in dropped {
        let streams = std::mem::take(&mut *capture.streams.lock());
        for stream in streams {
            *stream.capture.lock() = None;
        }
        COUNT.fetch_sub(1, Ordering::AcqRel);
    }
}

pub fn begin(handle: Handle, mode: c_int) -> Outcome {
    start(handle, mode, None)
}

/// `cuStreamBeginCapture` of 10.0, which has one mode.
pub fn begin_v1(handle: Handle) -> Outcome {
    begin(handle, GLOBAL)
}

/// `cuStreamBeginCaptureToGraph`. Everything in the graph precedes what is captured, whatever the dependencies.
pub fn begin_to_graph(
    handle: Handle,
    graph: Handle,
    _dependencies: In<Handle>,
    _edges: In<u8>,
    _count: usize,
    mode: c_int,
) -> Outcome {
    driver().graphs.get(graph).map_err(|_| Code::INVALID_VALUE)?;
    start(handle, mode, Some(graph))
}

fn start(handle: Handle, mode: c_int, target: Option<Handle>) -> Outcome {
    if !(GLOBAL..=RELAXED).contains(&mode) {
        return Err(Code::INVALID_VALUE);
    }
    let stream = resolve(handle)?;
    if Arc::ptr_eq(&stream, &stream.context()?.legacy) {
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    let mut slot = stream.capture.lock();
    if slot.is_some() {
        return Err(Code::ILLEGAL_STATE);
    }
    let capture = Arc::new(Capture {
        id: next_id(),
        mode,
        thread: std::thread::current().id(),
        valid: AtomicBool::new(true),
        work: Mutex::default(),
        streams: Mutex::new(vec![stream.clone()]),
        target,
    });
    *slot = Some(capture.clone());
    CAPTURES.lock().push(capture);
    COUNT.fetch_add(1, Ordering::AcqRel);
    Ok(())
}

pub fn end(handle: Handle, out: Out<Handle>) -> Outcome {
    out.required()?;
    let stream = resolve(handle)?;
    let capture = stream.capture.lock().clone().ok_or(Code::ILLEGAL_STATE)?;
    let streams = capture.streams.lock().clone();
    if !streams.first().is_some_and(|origin| Arc::ptr_eq(origin, &stream)) {
        return Err(Code::STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
        return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
    }
    for stream in streams {
        *stream.capture.lock() = None;
    }
    CAPTURES.lock().retain(|other| !Arc::ptr_eq(other, &capture));
    COUNT.fetch_sub(1, Ordering::AcqRel);
    if !capture.is_valid() {
        out.set(0)?;
        return Err(Code::STREAM_CAPTURE_INVALIDATED);
    }
    let work = std::mem::take(&mut *capture.work.lock());
    match capture.target {
        None => out.set(Graph::enter(work)),
        Some(graph) => {
            driver().graphs.get(graph).map_err(|_| Code::INVALID_VALUE)?.extend(graph, work);
            out.set(graph)
        }
    }
}

/// `CUstreamCaptureStatus`: none, active, invalidated; and the capture's id. Asked of the legacy stream while a blocking
/// stream captures: STREAM_CAPTURE_IMPLICIT, which does no harm.
fn status(handle: Handle) -> Outcome<(c_int, u64)> {
    let stream = resolve(handle)?;
    if stream.implied()?.is_some() {
        return Err(Code::STREAM_CAPTURE_IMPLICIT);
    }
    let capture = stream.capture.lock().clone();
    Ok(capture.map_or((0, 0), |capture| (if capture.is_valid() { 1 } else { 2 }, capture.id)))
}

pub fn is_capturing(handle: Handle, out: Out<c_int>) -> Outcome {
    out.required()?;
    out.set(status(handle)?.0)
}

/// `cuStreamGetCaptureInfo` of 10.1.
pub fn info_v1(handle: Handle, out: Out<c_int>, id: Out<u64>) -> Outcome {
    info_v3(handle, out, id, Out::null(), Out::null(), Out::null(), Out::null())
}

pub fn info_v2(
    handle: Handle,
    out: Out<c_int>,
    id: Out<u64>,
    graph: Out<Handle>,
    nodes: Out<usize>,
    count: Out<usize>,
) -> Outcome {
    info_v3(handle, out, id, graph, nodes, Out::null(), count)
}

/// The graph under construction and its nodes are not shown: both read as none.
pub fn info_v3(
    handle: Handle,
    out: Out<c_int>,
    id: Out<u64>,
    graph: Out<Handle>,
    nodes: Out<usize>,
    edges: Out<usize>,
    count: Out<usize>,
) -> Outcome {
    out.required()?;
    let (state, number) = status(handle)?;
    out.set(state)?;
    if state == 1 {
        id.set_if_wanted(number);
        graph.set_if_wanted(0);
        nodes.set_if_wanted(0);
        edges.set_if_wanted(0);
        count.set_if_wanted(0);
    }
    Ok(())
}

/// `cuThreadExchangeStreamCaptureMode`.
pub fn exchange_mode(mode: Out<c_int>) -> Outcome {
    let wanted = mode.take()?;
    if ![GLOBAL, THREAD_LOCAL, RELAXED].contains(&wanted) {
        return Err(Code::INVALID_VALUE);
    }
    mode.set(MODE.replace(wanted))
}
