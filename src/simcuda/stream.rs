//! Streams: work in order on a worker thread of its own, started by the first work that cannot be done at once.

use crate::boundary::{DefaultStream, default_stream};
use crate::capture::{self, Capture};
use crate::clock::{self, Time};
use crate::coherence;
use crate::context::{Context, current};
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{Handle, Out};
use crate::graph::Node;
use crate::strict::{self, Unfinished};
use parking_lot::{Condvar, Mutex};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

const LEGACY: Handle = 1;
const PER_THREAD: Handle = 2;
const NON_BLOCKING: c_uint = 1;
/// Pieces of work that wait in a stream before the call that submits the next one blocks.
const QUEUE: usize = 1024;

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
    /// When the work that has run so far ended.
    time: AtomicU64,
    pub capture: Mutex<Option<Arc<Capture>>>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Arc<Job>>,
    running: Option<Arc<Job>>,
    submitted: u64,
    /// When the last of it ends.
    end: Arc<AtomicU64>,
    worker: bool,
    closing: bool,
}

struct Job {
    work: Work,
    after: After,
    end: Arc<AtomicU64>,
    /// When it began, as `strict` counts; 0 if something precedes it. What nothing precedes may have begun at once.
    began: AtomicU64,
}

/// What a piece of work has to follow besides its own stream.
struct After {
    /// Earlier work that is not done.
    tickets: Vec<Ticket>,
    /// The latest end of earlier work that is done, and of what the submitting thread knows of.
    earliest: Time,
}

impl After {
    fn new(mut tickets: Vec<Ticket>) -> Self {
        let mut earliest = clock::host();
        tickets.retain(|ticket| {
            let done = ticket.is_done();
            if done {
                earliest = earliest.max(ticket.end());
            }
            !done
        });
        Self { tickets, earliest }
    }

    /// Waits for all of them; when the work can begin.
    fn wait(&self) -> Time {
        self.tickets.iter().fold(self.earliest, |earliest, ticket| {
            ticket.wait();
            earliest.max(ticket.end())
        })
    }
}

/// A point in a stream: everything up to the `number`-th piece of work.
#[derive(Clone)]
pub struct Ticket {
    stream: Arc<Stream>,
    number: u64,
    end: Arc<AtomicU64>,
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

    /// When it was reached, once it is done.
    pub fn end(&self) -> Time {
        self.end.load(Ordering::Acquire)
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
            time: AtomicU64::new(0),
            capture: Mutex::new(None),
        }
    }

    /// A stream that no handle names and that waits for nothing.
    pub fn aside(context: &Arc<Context>) -> Self {
        Self::new(Arc::downgrade(context), NON_BLOCKING, 0)
    }

    /// When the work that has run so far ended.
    pub fn time(&self) -> Time {
        self.time.load(Ordering::Acquire)
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
        let queue = self.queue.lock();
        Ticket { stream: self.clone(), number: queue.submitted, end: queue.end.clone() }
    }

    pub fn is_idle(&self) -> bool {
        self.done.load(Ordering::Acquire) == self.queue.lock().submitted
    }

    /// What new work must wait for besides its own stream: the legacy stream and the blocking streams wait for each other.
    fn others(self: &Arc<Self>, context: &Context) -> Vec<Ticket> {
        let mut others = if Arc::ptr_eq(self, &context.legacy) {
            context.streams.lock().iter().filter(|stream| stream.blocks()).map(Stream::last).collect()
        } else if self.blocks() {
            vec![context.legacy.last()]
        } else {
            Vec::new()
        };
        others.extend(context.gates());
        others
    }

    /// Waits until everything that a synchronous call on this stream has to follow is done; when that is.
    pub fn settle(self: &Arc<Self>, context: &Context) -> Time {
        let mut all = self.others(context);
        all.push(self.last());
        After::new(all).wait()
    }

    /// Puts work at the end of the stream, or into the graph that it captures.
    pub fn submit(self: &Arc<Self>, work: Work) -> Outcome {
        if let Some(capture) = self.capturing()? {
            capture.record(work);
            return Ok(());
        }
        let context = self.context()?;
        let after = After::new(self.others(&context));
        self.enqueue(&context, work, after)
    }

    /// Makes later work here wait for points of other streams.
    pub fn wait_for(self: &Arc<Self>, mut tickets: Vec<Ticket>) -> Outcome {
        let context = self.context()?;
        let mut all = self.others(&context);
        all.append(&mut tickets);
        let after = After::new(all);
        if after.tickets.is_empty() && self.is_idle() {
            self.time.fetch_max(after.earliest, Ordering::AcqRel);
            return Ok(());
        }
        self.enqueue(&context, Work { action: Arc::new(|_| Ok(())), touches: Vec::new(), node: Node::Empty }, after)
    }

    /// CONTEXT_IS_DESTROYED where the stream was closed after the caller had found it well: its worker may be gone, and
    /// whoever waited for this work would wait for ever.
    fn enqueue(self: &Arc<Self>, context: &Arc<Context>, work: Work, after: After) -> Outcome {
        let mut queue = self.queue.lock();
        while queue.waiting.len() >= QUEUE && !queue.closing {
            self.changed.wait(&mut queue);
        }
        if queue.closing {
            return Err(Code::CONTEXT_IS_DESTROYED);
        }
        context.pending.fetch_add(1, Ordering::AcqRel);
        let is_first = queue.submitted == self.done.load(Ordering::Acquire) && after.tickets.is_empty();
        let began = AtomicU64::new(if is_first { strict::tick() } else { 0 });
        queue.submitted += 1;
        queue.end = Arc::default();
        let end = queue.end.clone();
        queue.waiting.push_back(Arc::new(Job { work, after, end, began }));
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
                simmachine::say(&format!("simcuda: a stream's worker thread could not start: {error}"));
                std::process::abort();
            }
        }
        Ok(())
    }

    /// Runs the work of a stream that is idle on the calling thread if nothing precedes it, or else submits it. For calls
    /// whose real counterpart returns before the work is done, but where a thread would be waste.
    pub fn run_or_submit(self: &Arc<Self>, work: Work) -> Outcome {
        let context = self.context()?;
        if self.capturing()?.is_none() && self.is_idle() {
            let after = After::new(self.others(&context));
            if after.tickets.is_empty() {
                return self.run_here(&context, &work, after.earliest).inspect_err(|code| context.kill(*code));
            }
        }
        self.submit(work)
    }

    /// Runs work on the calling thread, as if the stream had.
    pub fn run_here(&self, context: &Context, work: &Work, earliest: Time) -> Outcome {
        let start = self.time.load(Ordering::Acquire).max(earliest);
        let (outcome, end) = context.during(work, || clock::run(start, || (work.action)(context)));
        self.time.fetch_max(end, Ordering::AcqRel);
        let mut queue = self.queue.lock();
        // Work that was submitted meanwhile has an end of its own.
        if queue.submitted == self.done.load(Ordering::Acquire) {
            queue.end = Arc::new(AtomicU64::new(end));
        }
        outcome
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
            queue.running = Some(job.clone());
            drop(queue);
            let mut end = self.time.load(Ordering::Acquire).max(job.after.wait());
            // Only this thread changes it.
            if job.began.load(Ordering::Relaxed) == 0 {
                job.began.store(strict::tick(), Ordering::Release);
            }
            if context.check_fault().is_ok() {
                let outcome;
                let began = job.began.load(Ordering::Relaxed);
                (outcome, end) = clock::run(end, || coherence::since(began, || (job.work.action)(context)));
                outcome.unwrap_or_else(|code| context.kill(code));
            }
            self.time.fetch_max(end, Ordering::AcqRel);
            job.end.store(end, Ordering::Release);
            let mut queue = self.queue.lock();
            queue.running = None;
            drop(job);
            self.done.fetch_add(1, Ordering::AcqRel);
            context.pending.fetch_sub(1, Ordering::AcqRel);
            drop(queue);
            self.changed.notify_all();
        }
    }

    /// Lets the worker end once the queue is empty (`cuStreamDestroy` does not wait), and takes no more work.
    pub fn close(&self) {
        self.queue.lock().closing = true;
        self.changed.notify_all();
    }

    /// Closed and done: nobody waits for it any more. Until then the context keeps it, to wait for its work.
    pub fn is_over(&self) -> bool {
        let queue = self.queue.lock();
        queue.closing && queue.submitted == self.done.load(Ordering::Acquire)
    }

    /// The work here that is queued or running.
    pub fn unfinished_work(&self) -> Vec<Unfinished> {
        if self.is_idle() {
            return Vec::new();
        }
        let queue = self.queue.lock();
        let jobs = queue.running.iter().chain(&queue.waiting);
        let unfinished = |job: &Arc<Job>| {
            let began = job.began.load(Ordering::Acquire);
            Unfinished::new(&job.work, Some(self.id), (began > 0).then_some(began))
        };
        jobs.map(unfinished).collect()
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

thread_local! {
    /// The calling thread's default stream in each context it has used.
    static OWN: RefCell<Own> = const { RefCell::new(Own(Vec::new())) };
}

struct Own(Vec<(u64, Arc<Stream>)>);

impl Drop for Own {
    /// The streams of a thread that ends finish their work and go, and their captures with them.
    fn drop(&mut self) {
        for (_, stream) in &self.0 {
            capture::abandon_of(stream);
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
    context.wait_for_copies();
    let stream = Arc::new(Stream::new(Arc::downgrade(context), flags, priority.clamp(-5, 0)));
    context.add(stream.clone());
    out.set(driver().streams.insert(stream))
}

pub fn destroy(handle: Handle) -> Outcome {
    let driver = driver();
    // A stream outlives its green context; destroying it is refused then, too.
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
    clock::host_saw(stream.settle(&context));
    crate::mempool::synchronized();
    context.check()
}

pub fn query(handle: Handle) -> Outcome {
    let stream = resolve(handle)?;
    refuse_if_capturing(&stream)?;
    if !stream.is_idle() {
        return Err(Code::NOT_READY);
    }
    clock::host_saw(stream.last().end());
    stream.context()?.check()
}

/// A wait on a capturing stream cannot be captured: it breaks the capture.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread may have its stream in hand when another one ends the context or the stream: what it submits then would be
    /// nobody's to run, and whoever waits for the context would wait for ever.
    #[test]
    fn a_stream_that_was_closed_takes_no_more_work() {
        crate::driver::init(0).unwrap();
        let context = crate::primary::hold(0).unwrap();
        let work = || Work { action: Arc::new(|_| Ok(())), touches: Vec::new(), node: Node::Empty };
        let created = Arc::new(Stream::new(Arc::downgrade(&context), NON_BLOCKING, 0));
        context.add(created.clone());
        for stream in [&context.legacy, &created] {
            stream.submit(work()).unwrap();
            stream.last().wait();
        }
        context.end();
        for stream in [&context.legacy, &created] {
            assert_eq!(stream.submit(work()), Err(Code::CONTEXT_IS_DESTROYED));
            assert!(stream.last().is_done());
        }
        assert!(context.unfinished().is_empty());
        // A stream that is made while the context ends takes no work.
        let late = Arc::new(Stream::new(Arc::downgrade(&context), NON_BLOCKING, 0));
        context.add(late.clone());
        assert_eq!(late.submit(work()), Err(Code::CONTEXT_IS_DESTROYED));
    }
}
