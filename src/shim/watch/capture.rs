//! Which streams are being captured into graphs.
//!
//! `cuCtxSynchronize` in a context that captures fails and invalidates the capture, in every mode, so what waits does so in
//! another way while one is under way: see [`crate::fence`].
//!
//! **A capture that begins while such a call of ours is about to be made** would be broken by it as well. So the calls are
//! made inside a gate, and what begins a capture lets those through that are in it ([`unless_under_way`]). Nobody may be in the gate
//! for longer than a call takes that waits for nothing: what waits for a kernel may wait for the thread that is about to capture.
//! A wait with `cuCtxSynchronize` is therefore made only while the process has never captured ([`unless_ever`]); after that, waits
//! are made in ways that the gate is not needed for, or only for a part that returns at once. The first capture of a process may find
//! such waits under way. Those that the driver has begun break no capture that begins later (measured, in every mode); so the first
//! capture waits until the others are that far, for which [`PATIENCE`] is enough, or until all are over. (The driver's own
//! `cuMemFree` that waits for a kernel holds up what begins a capture until it is over, measured, too. That is not imitated.)
//! A lock for both instead of a gate was rejected: it would be held while the driver runs.
//!
//! Where the library is preloaded, captures are seen to begin and end. One ends with `cuStreamEndCapture`, with its stream,
//! with its context, green or not, and on a thread's own default stream with the thread. A thread has one such stream in each context. Where a program has only opened the library, it
//! looks at what it can: see [`look`].

use crate::process;
use crate::watch::context::{self, Observer};
use gpupool_cuda::{self as cuda, CuResult, Driver, GreenContext, Stream};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::time::{Duration, Instant};

/// A stream; the thread is 0 for those of their own handle, and the context none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    stream: Stream,
    thread: u64,
    context: Option<cuda::Context>,
}

/// A stream that is captured, or for which a call is under way that begins a capture.
#[derive(Debug)]
struct Capture {
    key: Key,
    /// The id of the context that it ends with, where that is known.
    context: Option<u64>,
    /// The green context that its stream is of. What is made in one is the primary one's, but not its streams.
    green: Option<GreenContext>,
    /// Calls under way that begin one. The driver lets one of them succeed.
    attempts: u32,
    /// Which capture of the process this is; 0 while none has begun.
    number: u64,
}

#[derive(Debug)]
struct Captures {
    list: Vec<Capture>,
    last: u64,
}

static CAPTURES: Mutex<Captures> = Mutex::new(Captures { list: Vec::new(), last: 0 });
/// How many there are, readable without the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// How many calls under way found a capture by [`look`] or [`suppose`] one.
static LOOKED: AtomicUsize = AtomicUsize::new(0);

/// Whether any was ever begun, or was to be, as far as that is seen.
static EVER: AtomicBool = AtomicBool::new(false);
/// How many threads are in the gate with a call that waits for nothing, and with one that waits for work.
static IN_GATE: AtomicUsize = AtomicUsize::new(0);
static WAITING: AtomicUsize = AtomicUsize::new(0);
/// How long the first capture waits for threads between their look at the captures and the driver's, which is a few
/// instructions.
const PATIENCE: Duration = Duration::from_millis(20);
/// Whether those of before the first capture were waited for.
static IS_PATIENT: AtomicBool = AtomicBool::new(true);

/// Whether any stream of the process is being captured.
#[inline]
pub fn under_way() -> bool {
    COUNT.load(Ordering::Acquire) + LOOKED.load(Ordering::Acquire) != 0
}

/// Held by a thread in the gate.
struct Inside(&'static AtomicUsize);

impl Inside {
    /// What is looked at behind this is not older than it: who begins a capture says so first and looks here behind that.
    fn enter(gate: &'static AtomicUsize) -> Self {
        gate.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Self(gate)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Makes a call of ours that would break a capture and that waits for nothing, unless one is under way; none begins until it is over.
pub fn unless_under_way<T>(act: impl FnOnce() -> T) -> Option<T> {
    let _inside = Inside::enter(&IN_GATE);
    (!under_way()).then(act)
}

/// Makes a call of ours that would break a capture and that may wait for work, unless this process captures or ever did.
pub fn unless_ever<T>(act: impl FnOnce() -> T) -> Option<T> {
    if EVER.load(Ordering::Relaxed) {
        return None;
    }
    let _inside = Inside::enter(&WAITING);
    (!EVER.load(Ordering::SeqCst) && !under_way()).then(act)
}

/// A capture is about to begin, which was noted: lets those through who may not have seen that.
fn let_through() {
    EVER.store(true, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    while IN_GATE.load(Ordering::SeqCst) > 0 {
        std::thread::yield_now();
    }
    if WAITING.load(Ordering::SeqCst) > 0 && IS_PATIENT.load(Ordering::Relaxed) {
        let since = Instant::now();
        while WAITING.load(Ordering::SeqCst) > 0 && since.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
        IS_PATIENT.store(false, Ordering::Relaxed);
    }
}

/// Held for a call of a program that has only opened this library: a capture was found, or may be there unseen.
pub struct Looked(());

impl Looked {
    fn new() -> Self {
        LOOKED.fetch_add(1, Ordering::AcqRel);
        Self(())
    }
}

impl Drop for Looked {
    fn drop(&mut self) {
        LOOKED.fetch_sub(1, Ordering::AcqRel);
    }
}

/// For a call that is told of no stream: where captures are not seen to begin, there may be one.
pub fn suppose() -> Option<Looked> {
    (!process::is_preloaded()).then(Looked::new)
}

/// Whether this stream is being captured, or any other that the legacy stream waits for, in a process where captures are
/// not seen to begin. (A capture on a non-blocking stream other than this one stays unseen; the driver has no question
/// that would find it.)
pub fn look(driver: &Driver, stream: Stream) -> Option<Looked> {
    if process::is_preloaded() {
        return None;
    }
    let captured = |stream| {
        // SAFETY: the stream is the program's, or the legacy one.
        let answer = unsafe { driver.is_capturing(stream) };
        matches!(answer, Ok(true) | Err(CuResult::STREAM_CAPTURE_IMPLICIT))
    };
    (captured(stream) || captured(Stream::DEFAULT)).then(Looked::new)
}

fn key(stream: Stream, per_thread_default: bool) -> Key {
    let stream = stream.meant_by(per_thread_default);
    if stream == Stream::PER_THREAD {
        return Key { stream, thread: this_thread(), context: context::driver().and_then(Driver::current_context) };
    }
    Key { stream, thread: 0, context: None }
}

fn this_thread() -> u64 {
    // SAFETY: pthread_self has no preconditions.
    unsafe { libc::pthread_self() }
}

/// Changes the list, drops what is no capture any more, and counts the rest.
fn with<T>(change: impl FnOnce(&mut Captures) -> T) -> T {
    let mut captures = CAPTURES.lock();
    let value = change(&mut captures);
    captures.list.retain(|capture| capture.attempts > 0 || capture.number > 0);
    COUNT.store(captures.list.len(), Ordering::Release);
    value
}

/// A call under way that begins a capture; unless it succeeds, nothing was begun by it.
pub struct Attempt(Key);

/// The driver is about to be asked to capture this stream: a free on another thread in between must already see that.
/// `per_thread_default`: the call is of the `_ptsz` kind.
pub fn begin(stream: Stream, per_thread_default: bool) -> Attempt {
    let key = key(stream, per_thread_default);
    if key.thread != 0 {
        // Where the thread is about to end, its stream ends before anything of ours could.
        let _ = ENDING.try_with(|_| ());
    }
    let known = with(|captures| match captures.list.iter_mut().find(|capture| capture.key == key) {
        Some(capture) => {
            capture.attempts += 1;
            true
        }
        None => {
            captures.list.push(Capture { key, context: None, green: None, attempts: 1, number: 0 });
            false
        }
    });
    let_through();
    // Whose stream it is, is not asked while it is captured.
    let (context, green) = if known { (None, None) } else { (context_of(stream), green_of(key.stream)) };
    if context.is_some() || green.is_some() {
        with(|captures| {
            if let Some(capture) = captures.list.iter_mut().find(|capture| capture.key == key) {
                (capture.context, capture.green) = (context, green);
            }
        });
    }
    Attempt(key)
}

fn green_of(stream: Stream) -> Option<GreenContext> {
    let driver = context::driver().filter(|_| context::is_any_green())?;
    // SAFETY: the stream is the program's argument to a call that uses it.
    unsafe { driver.stream_green(stream) }
}

fn context_of(stream: Stream) -> Option<u64> {
    let driver = context::driver()?;
    if stream.is_a_default() {
        return Some(context::current(driver)?.id);
    }
    // SAFETY: the stream is the program's argument to a call that uses it.
    let handle = unsafe { driver.stream_context(stream) }.ok()?;
    Some(context::by_handle(handle)?.id)
}

impl Attempt {
    /// The driver captures the stream.
    pub fn succeeded(self) {
        let key = self.0;
        with(|captures| {
            captures.last += 1;
            let last = captures.last;
            if let Some(capture) = captures.list.iter_mut().find(|capture| capture.key == key) {
                capture.number = last;
            }
        });
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        with(|captures| {
            if let Some(capture) = captures.list.iter_mut().find(|capture| capture.key == self.0) {
                capture.attempts -= 1;
            }
        });
    }
}

/// A capture that a call may end. Taken before the call: after it another thread may have begun the next one, on this
/// stream or on one that has its handle.
#[derive(Clone, Copy)]
pub struct Seen {
    key: Key,
    number: u64,
}

/// The capture of this stream; `None`: there is none.
pub fn seen(stream: Stream, per_thread_default: bool) -> Option<Seen> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    let key = key(stream, per_thread_default);
    let captures = CAPTURES.lock();
    let capture = captures.list.iter().find(|capture| capture.key == key && capture.number > 0)?;
    Some(Seen { key, number: capture.number })
}

/// The captures that end with this green context. Taken before the call that ends it, as for a stream.
pub fn seen_in(green: GreenContext) -> Vec<Seen> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return Vec::new();
    }
    let captures = CAPTURES.lock();
    let inside = captures.list.iter().filter(|capture| capture.green == Some(green) && capture.number > 0);
    inside.map(|capture| Seen { key: capture.key, number: capture.number }).collect()
}

impl Seen {
    /// Notes that this capture ended, successfully or not, or that its stream is gone.
    pub fn ended(self) {
        drop_where(|capture| capture.key == self.key && capture.number == self.number);
    }
}

/// The program has made a graph that can be launched and of which nobody knows what it uses. It stays so until the process ends.
static HAS_GRAPHS: AtomicBool = AtomicBool::new(false);

/// A graph can be launched of which nobody knows what it uses.
pub fn graph_made() {
    HAS_GRAPHS.store(true, Ordering::Relaxed);
}

/// Whether the program ever made such a graph. Its copies and fills are said to be bound to the GPU that their memory
/// was on, where such a graph is updated ("cannot change", cuda.h).
pub fn has_graphs() -> bool {
    HAS_GRAPHS.load(Ordering::Relaxed)
}

/// Ends the captures of contexts that are gone.
pub struct OfContexts;

impl Observer for OfContexts {
    fn ended(&self, id: u64) -> usize {
        context_gone(id);
        0
    }
}

/// The context with this id is gone, and with it the captures of its streams.
fn context_gone(id: u64) {
    drop_where(|capture| capture.context == Some(id));
}

fn drop_where(gone: impl Fn(&Capture) -> bool) {
    if COUNT.load(Ordering::Acquire) == 0 {
        return;
    }
    with(|captures| captures.list.iter_mut().filter(|capture| gone(capture)).for_each(|capture| capture.number = 0));
}

/// The end of a thread, and of its own default stream.
struct ThreadEnd;

impl Drop for ThreadEnd {
    fn drop(&mut self) {
        let thread = this_thread();
        drop_where(|capture| capture.key.thread == thread);
    }
}

thread_local! {
    /// Made where a thread captures its own default stream, and nowhere else.
    static ENDING: ThreadEnd = const { ThreadEnd };
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Stream = Stream::from_raw(std::ptr::without_provenance_mut(0x1000));

    fn began(stream: Stream, per_thread_default: bool) {
        begin(stream, per_thread_default).succeeded();
    }

    fn ended(stream: Stream, per_thread_default: bool) {
        if let Some(seen) = seen(stream, per_thread_default) {
            seen.ended();
        }
    }

    /// One test, because the captures are the process's.
    #[test]
    fn knows_which_streams_are_captured() {
        a_stream_is_captured_once();
        a_refused_attempt_leaves_the_first_capture();
        what_ended_before_does_not_end_the_next();
        threads_have_default_streams_of_their_own();
        a_thread_takes_its_capture_along();
        what_a_capture_would_break_is_over_when_it_begins();
    }

    fn a_stream_is_captured_once() {
        began(OWN, false);
        assert!(under_way());
        ended(OWN, false);
        assert!(!under_way());
        ended(OWN, false);
    }

    fn a_refused_attempt_leaves_the_first_capture() {
        began(OWN, false);
        drop(begin(OWN, false));
        assert!(under_way(), "the driver refused the second and goes on with the first");
        ended(OWN, false);
        assert!(!under_way());
        let attempt = begin(OWN, false);
        assert!(under_way(), "a free meanwhile must see it");
        drop(attempt);
        assert!(!under_way());
    }

    fn what_ended_before_does_not_end_the_next() {
        began(OWN, false);
        let first = seen(OWN, false).unwrap();
        began(OWN, false);
        first.ended();
        assert!(under_way(), "the next capture on a stream of that handle began before this was told");
        ended(OWN, false);
        assert!(!under_way());
    }

    fn threads_have_default_streams_of_their_own() {
        began(Stream::DEFAULT, true);
        std::thread::spawn(|| ended(Stream::DEFAULT, true)).join().unwrap();
        assert!(under_way(), "another thread's default stream is another stream");
        ended(Stream::PER_THREAD, false);
        assert!(!under_way(), "the handle 2 is the per-thread default stream, whatever the call's name");
    }

    fn a_thread_takes_its_capture_along() {
        std::thread::spawn(|| began(Stream::DEFAULT, true)).join().unwrap();
        assert!(!under_way());
    }

    fn what_a_capture_would_break_is_over_when_it_begins() {
        let over = AtomicBool::new(false);
        let (enters, entered) = std::sync::mpsc::channel();
        let (lets_go, let_go) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let over = &over;
            scope.spawn(move || {
                unless_under_way(|| {
                    enters.send(()).unwrap();
                    let_go.recv().unwrap();
                    over.store(true, Ordering::SeqCst);
                })
            });
            entered.recv().unwrap();
            let capture = scope.spawn(move || {
                began(OWN, false);
                assert!(over.load(Ordering::SeqCst), "a capture has begun beside a call that breaks it");
            });
            lets_go.send(()).unwrap();
            capture.join().unwrap();
        });
        assert_eq!((unless_under_way(|| ()), unless_ever(|| ())), (None, None));
        ended(OWN, false);
        assert_eq!((unless_under_way(|| ()), unless_ever(|| ())), (Some(()), None), "it has captured once");
    }
}
