//! Streams: work in order on a worker thread of its own, started by the first work that can not be done at once.

use crate::boundary::{DefaultStream, default_stream};
use crate::capture::{self, Capture};
use crate::context::{Context, current};
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{Handle, Out};
use crate::graph::Node;
use parking_lot::{Condvar, Mutex};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

const LEGACY: Handle = 1;
const PER_THREAD: Handle = 2;
const NON_BLOCKING: c_uint = 1;

/// What a piece of work does. `Fn`, because a graph runs it many times; an error kills the context.
pub type Action = Arc<dyn Fn(&Context) -> Outcome + Send + Sync>;

/// A piece of work and the device addresses it uses, which must stay mapped until it is done.
#[derive(Clone)]
pub struct Work {
    pub action: Action,
    pub touches: Vec<(u64, u64)>,
    /// What it becomes in a graph, if it is captured.
    pub node: Node,
}

pub struct Stream {
    context: Weak<Context>,
    pub flags: c_uint,
    pub priority: c_int,
    id: u64,
    queue: Mutex<Queue>,
    changed: Condvar,
    done: AtomicU64,
    pub capture: Mutex<Option<Arc<Capture>>>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Job>,
    /// Ranges of the job that runs now.
    running: Vec<(u64, u64)>,
    submitted: u64,
    worker: bool,
    closing: bool,
}

struct Job {
    work: Work,
    after: Vec<Ticket>,
}

/// A point in a stream: everything up to the `number`-th piece of work.
#[derive(Clone)]
pub struct Ticket {
    stream: Arc<Stream>,
    number: u64,
}

impl Ticket {
    pub fn is_done(&self) -> bool {
        self.stream.done.load(Ordering::Acquire) >= self.number
    }

    pub fn wait(&self) {
        if self.is_done() {
            return;
        }
        let mut queue = self.stream.queue.lock();
        while !self.is_done() {
            self.stream.changed.wait(&mut queue);
        }
    }
}

impl Stream {
    pub fn new(context: Weak<Context>, flags: c_uint, priority: c_int) -> Self {
        Self {
            context,
            flags,
            priority,
            id: crate::space::next_id(),
            queue: Mutex::default(),
            changed: Condvar::new(),
            done: AtomicU64::new(0),
            capture: Mutex::new(None),
        }
    }

    /// One that no handle names and that waits for nothing.
    pub fn aside(context: &Arc<Context>) -> Self {
        Self::new(Arc::downgrade(context), NON_BLOCKING, 0)
    }

    /// `cuStreamGetId`.
    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn context(&self) -> Outcome<Arc<Context>> {
        self.context.upgrade().ok_or(Code::CONTEXT_IS_DESTROYED)
    }

    pub fn context_id(&self) -> Option<u64> {
        self.context.upgrade().map(|context| context.id)
    }

    /// Whether it waits for, and holds up, the legacy stream.
    fn blocks(&self) -> bool {
        self.flags & NON_BLOCKING == 0
    }

    /// The point after everything submitted so far.
    pub fn last(self: &Arc<Self>) -> Ticket {
        Ticket { stream: self.clone(), number: self.queue.lock().submitted }
    }

    pub fn is_idle(&self) -> bool {
        self.done.load(Ordering::Acquire) == self.queue.lock().submitted
    }

    /// What new work must wait for besides its own stream: the legacy stream and the blocking streams wait for each other.
    fn others(self: &Arc<Self>, context: &Context) -> Vec<Ticket> {
        let mut after = if Arc::ptr_eq(self, &context.legacy) {
            context.streams.lock().iter().filter(|stream| stream.blocks()).map(Stream::last).collect()
        } else if self.blocks() {
            vec![context.legacy.last()]
        } else {
            Vec::new()
        };
        after.extend(context.gates());
        after.retain(|ticket: &Ticket| !ticket.is_done());
        after
    }

    /// Waits until everything that a synchronous call on this stream has to follow is done.
    pub fn settle(self: &Arc<Self>, context: &Context) {
        for ticket in self.others(context) {
            ticket.wait();
        }
        self.last().wait();
    }

    /// Puts work at the end of the stream, or into the graph that it captures.
    pub fn submit(self: &Arc<Self>, work: Work) -> Outcome {
        if let Some(capture) = self.capturing()? {
            capture.record(work);
            return Ok(());
        }
        let context = self.context()?;
        let after = self.others(&context);
        self.enqueue(&context, work, after);
        Ok(())
    }

    /// Makes later work here wait for points of other streams.
    pub fn wait_for(self: &Arc<Self>, mut tickets: Vec<Ticket>) -> Outcome {
        tickets.retain(|ticket| !ticket.is_done());
        if tickets.is_empty() {
            return Ok(());
        }
        let context = self.context()?;
        let mut after = self.others(&context);
        after.append(&mut tickets);
        self.enqueue(&context, Work { action: Arc::new(|_| Ok(())), touches: Vec::new(), node: Node::Empty }, after);
        Ok(())
    }

    fn enqueue(self: &Arc<Self>, context: &Arc<Context>, work: Work, after: Vec<Ticket>) {
        context.pending.fetch_add(1, Ordering::AcqRel);
        let mut queue = self.queue.lock();
        queue.submitted += 1;
        queue.waiting.push_back(Job { work, after });
        let start = !std::mem::replace(&mut queue.worker, true);
        drop(queue);
        self.changed.notify_all();
        if start {
            let stream = self.clone();
            let context = context.clone();
            let spawned =
                std::thread::Builder::new().name("simcuda-stream".into()).spawn(move || stream.work(&context));
            if let Err(error) = spawned {
                // Nothing sensible can follow: the work would never run and every wait would hang.
                eprintln!("simcuda: a stream's worker thread could not start: {error}");
                std::process::abort();
            }
        }
    }

    /// Runs the work of a stream that is idle on the calling thread if nothing precedes it, or else submits it. For calls
    /// whose real counterpart returns before the work is done, but where a thread would be waste.
    pub fn run_or_submit(self: &Arc<Self>, work: Work) -> Outcome {
        let context = self.context()?;
        if self.capturing()?.is_none() && self.is_idle() && self.others(&context).is_empty() {
            return (work.action)(&context).inspect_err(|code| context.kill(*code));
        }
        self.submit(work)
    }

    fn work(self: Arc<Self>, context: &Arc<Context>) {
        loop {
            let mut queue = self.queue.lock();
            let job = loop {
                if let Some(job) = queue.waiting.pop_front() {
                    break job;
                }
                if queue.closing {
                    return;
                }
                self.changed.wait(&mut queue);
            };
            queue.running.clone_from(&job.work.touches);
            drop(queue);
            for ticket in &job.after {
                ticket.wait();
            }
            if context.check_fault().is_ok()
                && let Err(code) = (job.work.action)(context)
            {
                context.kill(code);
            }
            drop(job);
            let mut queue = self.queue.lock();
            queue.running.clear();
            self.done.fetch_add(1, Ordering::AcqRel);
            context.pending.fetch_sub(1, Ordering::AcqRel);
            drop(queue);
            self.changed.notify_all();
        }
    }

    /// Lets the worker end once the queue is empty (`cuStreamDestroy` does not wait).
    pub fn close(&self) {
        self.queue.lock().closing = true;
        self.changed.notify_all();
    }

    /// Closed and done: nobody waits for it any more. Until then the context keeps it, to wait for its work.
    pub fn is_over(&self) -> bool {
        let queue = self.queue.lock();
        queue.closing && queue.submitted == self.done.load(Ordering::Acquire)
    }

    /// Whether work here, queued or running, uses part of `start..end`.
    fn touches(&self, start: u64, end: u64) -> bool {
        if self.is_idle() {
            return false;
        }
        let queue = self.queue.lock();
        let meets = |range: &(u64, u64)| range.0 < end && start < range.1;
        queue.running.iter().any(meets) || queue.waiting.iter().flat_map(|job| &job.work.touches).any(meets)
    }

    /// The capture this stream is part of; STREAM_CAPTURE_INVALIDATED if it broke, STREAM_CAPTURE_IMPLICIT if this is the
    /// legacy stream and a blocking stream captures.
    pub fn capturing(self: &Arc<Self>) -> Outcome<Option<Arc<Capture>>> {
        if !capture::any() {
            return Ok(None);
        }
        let own = self.capture.lock().clone();
        if let Some(capture) = own {
            return if capture.is_valid() { Ok(Some(capture)) } else { Err(Code::STREAM_CAPTURE_INVALIDATED) };
        }
        match self.implied()? {
            Some(capture) => {
                capture.invalidate();
                Err(Code::STREAM_CAPTURE_IMPLICIT)
            }
            None => Ok(None),
        }
    }

    /// Where this is the legacy stream: the capture of a blocking stream, which the legacy stream would have to wait for.
    pub fn implied(self: &Arc<Self>) -> Outcome<Option<Arc<Capture>>> {
        let context = self.context()?;
        if !Arc::ptr_eq(self, &context.legacy) {
            return Ok(None);
        }
        let streams = context.streams.lock().clone();
        Ok(streams.iter().filter(|stream| stream.blocks()).find_map(|stream| stream.capture.lock().clone()))
    }
}

/// Whether any unfinished work of any context uses part of `start..end`.
pub fn in_use(start: u64, end: u64) -> bool {
    driver().contexts.all().iter().filter(|context| context.pending.load(Ordering::Acquire) > 0).any(|context| {
        let streams = context.streams.lock().clone();
        streams.iter().chain([&context.legacy]).any(|stream| stream.touches(start, end))
    })
}

thread_local! {
    /// The calling thread's default stream in each context it has used.
    static OWN: RefCell<Own> = const { RefCell::new(Own(Vec::new())) };
}

struct Own(Vec<(u64, Arc<Stream>)>);

impl Drop for Own {
    /// The streams of a thread that ends finish their work and go.
    fn drop(&mut self) {
        for (_, stream) in &self.0 {
            stream.close();
        }
    }
}

/// The stream a handle means here: null depends on the export that was called.
pub fn resolve(handle: Handle) -> Outcome<Arc<Stream>> {
    let handle = match (handle, default_stream()) {
        (0, DefaultStream::Legacy) => LEGACY,
        (0, DefaultStream::PerThread) => PER_THREAD,
        _ => handle,
    };
    match handle {
        LEGACY => Ok(current()?.legacy.clone()),
        PER_THREAD => own(&current()?),
        _ => {
            let stream = driver().streams.get(handle)?;
            stream.context()?.check()?;
            Ok(stream)
        }
    }
}

fn own(context: &Arc<Context>) -> Outcome<Arc<Stream>> {
    let found = OWN.try_with(|own| {
        let list = &mut own.borrow_mut().0;
        if let Some((_, stream)) = list.iter().find(|(id, _)| *id == context.id) {
            return stream.clone();
        }
        list.retain(|(_, stream)| stream.context().is_ok_and(|context| context.is_alive()));
        let stream = Arc::new(Stream::new(Arc::downgrade(context), 0, 0));
        context.add(stream.clone());
        list.push((context.id, stream.clone()));
        stream
    });
    // A thread whose own stream is gone already is about to end; the legacy stream is the stricter order.
    Ok(found.unwrap_or_else(|_| context.legacy.clone()))
}

pub fn create(out: Out<Handle>, flags: c_uint) -> Outcome {
    create_with_priority(out, flags, 0)
}

pub fn create_with_priority(out: Out<Handle>, flags: c_uint, priority: c_int) -> Outcome {
    out.required()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    create_in(&current()?, out, flags, priority)
}

/// A stream of this context, whichever is current.
pub fn create_in(context: &Arc<Context>, out: Out<Handle>, flags: c_uint, priority: c_int) -> Outcome {
    let stream = Arc::new(Stream::new(Arc::downgrade(context), flags, priority.clamp(-5, 0)));
    context.add(stream.clone());
    out.set(driver().streams.insert(stream))
}

pub fn destroy(handle: Handle) -> Outcome {
    let driver = driver();
    // Those of a green context outlive it, and not even this is answered then.
    let is_dead = |context: Arc<Context>| !context.is_alive();
    if driver.streams.get(handle)?.context().map_or(true, is_dead) {
        return Err(Code::CONTEXT_IS_DESTROYED);
    }
    let stream = driver.streams.remove(handle)?;
    capture::abandon_of(&stream);
    stream.close();
    Ok(())
}

pub fn synchronize(handle: Handle) -> Outcome {
    let stream = resolve(handle)?;
    refuse_if_capturing(&stream)?;
    let context = stream.context()?;
    stream.settle(&context);
    crate::mempool::synchronized();
    context.check()
}

pub fn query(handle: Handle) -> Outcome {
    let stream = resolve(handle)?;
    refuse_if_capturing(&stream)?;
    if !stream.is_idle() {
        return Err(Code::NOT_READY);
    }
    stream.context()?.check()
}

/// A wait on a capturing stream can not be captured: it breaks the capture.
fn refuse_if_capturing(stream: &Arc<Stream>) -> Outcome {
    match stream.capturing()? {
        None => Ok(()),
        Some(capture) => {
            capture.invalidate();
            Err(Code::STREAM_CAPTURE_UNSUPPORTED)
        }
    }
}

pub fn get_context(handle: Handle, out: Out<Handle>) -> Outcome {
    out.set(resolve(handle)?.context()?.handle)
}

/// `cuStreamGetCtx_v2`: of a stream of a green context, its primary context and the green one.
pub fn get_contexts(handle: Handle, out: Out<Handle>, green: Out<Handle>) -> Outcome {
    out.required()?;
    green.required()?;
    let context = resolve(handle)?.context()?;
    out.set(context.root().handle)?;
    green.set(crate::green::handle_of(&context))
}

pub fn get_flags(handle: Handle, out: Out<c_uint>) -> Outcome {
    out.set(resolve(handle)?.flags)
}

pub fn get_priority(handle: Handle, out: Out<c_int>) -> Outcome {
    out.set(resolve(handle)?.priority)
}

pub fn get_id(handle: Handle, out: Out<u64>) -> Outcome {
    out.set(resolve(handle)?.id)
}

pub fn get_device(handle: Handle, out: Out<c_int>) -> Outcome {
    out.set(resolve(handle)?.context()?.device as c_int)
}

/// A C function of the program, with its argument.
pub type HostFn = unsafe extern "C" fn(*mut c_void);
pub type Callback = unsafe extern "C" fn(Handle, c_int, *mut c_void);

/// `cuLaunchHostFunc`.
pub fn launch_host(handle: Handle, function: Option<HostFn>, argument: Handle) -> Outcome {
    resolve(handle)?.submit(host_work(function, argument)?)
}

/// `cuLaunchHostFunc_v2`: how to wait for it is a hint.
pub fn launch_host_v2(handle: Handle, function: Option<HostFn>, argument: Handle, sync: c_uint) -> Outcome {
    if sync > 1 { Err(Code::INVALID_VALUE) } else { launch_host(handle, function, argument) }
}

/// The work of a host function, also for graph nodes.
pub fn host_work(function: Option<HostFn>, argument: Handle) -> Outcome<Work> {
    let function = function.ok_or(Code::INVALID_VALUE)?;
    let action: Action = Arc::new(move |_| {
        // SAFETY: the program gave function and argument for exactly this call.
        unsafe { function(argument as *mut c_void) };
        Ok(())
    });
    Ok(Work { action, touches: Vec::new(), node: Node::Host })
}

/// `cuStreamAddCallback`. Not legal in a capture.
pub fn add_callback(handle: Handle, callback: Option<Callback>, argument: Handle, flags: c_uint) -> Outcome {
    let callback = callback.ok_or(Code::INVALID_VALUE)?;
    if flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let stream = resolve(handle)?;
    refuse_if_capturing(&stream)?;
    let action: Action = Arc::new(move |_| {
        // SAFETY: the program gave callback and argument for exactly this call.
        unsafe { callback(handle, 0, argument as *mut c_void) };
        Ok(())
    });
    stream.submit(Work { action, touches: Vec::new(), node: Node::Host })
}

/// `cuStreamAttachMemAsync`: managed memory is visible everywhere here.
pub fn attach(handle: Handle, _address: u64, _bytes: usize, _flags: c_uint) -> Outcome {
    resolve(handle).map(drop)
}
