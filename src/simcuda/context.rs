//! Contexts of every kind: what they are, created ones, the stack of each thread, errors that stick, limits, peer access.

use crate::capture;
use crate::clock::{self, Time};
use crate::driver::{Driver, Handles, driver};
use crate::error::{Code, Outcome};
use crate::ffi::{Handle, In, Out};
use crate::graph::Node;
use crate::physical::Use;
use crate::primary;
use crate::report;
use crate::space::{Kind, next_id};
use crate::stream::{Stream, Ticket, Work};
use crate::strict::{self, Unfinished};
use parking_lot::{Mutex, MutexGuard};
use std::cell::RefCell;
use std::ffi::{c_int, c_uint};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

pub struct Context {
    pub handle: Handle,
    /// `cuCtxGetId`.
    pub id: u64,
    /// Ordinal of its GPU.
    pub device: usize,
    pub primary: bool,
    pub flags: AtomicU32,
    /// The error that every later call in this context returns; 0 while it is well.
    fault: AtomicI32,
    alive: AtomicBool,
    /// Work submitted to any of its streams and not finished.
    pub pending: AtomicUsize,
    pub legacy: Arc<Stream>,
    /// Every stream but the legacy one: created ones and those that stand for a thread's default.
    pub streams: Mutex<Vec<Arc<Stream>>>,
    /// Ordinals of the devices whose plain memory kernels here may touch.
    peers: Mutex<Vec<usize>>,
    limits: Mutex<[usize; LIMITS]>,
    cache_config: AtomicI32,
    /// Ends at 0: created once, and `cuCtxAttach`.
    attached: AtomicU32,
    /// The primary context that a green context is a part of, which owns all that is made in it but streams.
    parent: Option<Arc<Context>>,
    /// The green contexts that are parts of this one.
    parts: Mutex<Vec<Weak<Context>>>,
    /// What calls do themselves right now, with a number each.
    calls: Mutex<Vec<(u64, Unfinished)>>,
    /// What all later work here waits for (`cuCtxWaitEvent`).
    gates: Mutex<Vec<Ticket>>,
    /// Held by a copy to memory that is not pinned while it waits in its call.
    copying: Mutex<()>,
}

/// Handles of contexts that were destroyed, the latest last. The driver gives those of created ones out again.
static DESTROYED: Mutex<Vec<Handle>> = Mutex::new(Vec::new());
static DESTROYED_GREEN: Mutex<Vec<Handle>> = Mutex::new(Vec::new());

const LIMITS: usize = 11;
/// Stack, printf, heap, depth, launches, L2 fetch, persisting L2, shared memory, CIG, CIG fallback, per-block memory.
const DEFAULT_LIMITS: [usize; LIMITS] = [1024, 7 << 20, 8 << 20, 2, 2048, 64, 0, 0, 0, 0, 0];
const FLAG_MASK: c_uint = 0xff;

thread_local! {
    /// Never dropped: exit handlers and destructors of other libraries call the driver after this thread's own
    /// destructors, and have to find the context that was current. A thread that ends leaves a few words behind.
    static STACK: RefCell<ManuallyDrop<Vec<Arc<Context>>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

impl Context {
    pub fn create(device: usize, flags: u32, primary: Option<Handle>) -> Outcome<Arc<Self>> {
        let driver = driver();
        driver.gpus[device].store.charge(driver.settings.context_bytes, Use::Context)?;
        let handle = primary.or_else(|| DESTROYED.lock().pop()).unwrap_or_else(Handles::<Context>::reserve);
        Ok(Self::enter(handle, device, flags, primary.is_some(), None))
    }

    /// A part of a primary context, with streams and a handle of its own. What it takes from its GPU was not measured;
    /// here it is nothing.
    pub fn green(parent: Arc<Context>) -> Arc<Self> {
        let flags = parent.flags.load(Ordering::Relaxed);
        // As its primary context it is nobody's to destroy, attach or detach.
        let part = Self::enter(Handles::<Context>::reserve(), parent.device, flags, true, Some(parent.clone()));
        parent.parts.lock().push(Arc::downgrade(&part));
        part
    }

    fn enter(handle: Handle, device: usize, flags: u32, primary: bool, parent: Option<Arc<Context>>) -> Arc<Self> {
        let context = Arc::new_cyclic(|me| Self {
            handle,
            id: next_id(),
            device,
            primary,
            flags: AtomicU32::new(flags),
            fault: AtomicI32::new(0),
            alive: AtomicBool::new(true),
            pending: AtomicUsize::new(0),
            legacy: Arc::new(Stream::new(me.clone(), 0, 0)),
            streams: Mutex::default(),
            peers: Mutex::default(),
            limits: Mutex::new(DEFAULT_LIMITS),
            cache_config: AtomicI32::new(0),
            attached: AtomicU32::new(1),
            parent,
            parts: Mutex::default(),
            calls: Mutex::default(),
            gates: Mutex::default(),
            copying: Mutex::default(),
        });
        driver().contexts.insert_as(handle, context.clone());
        context
    }

    /// The context that owns what is made here: the primary one of a green context, or else this one.
    pub fn root(&self) -> &Context {
        self.parent.as_deref().unwrap_or(self)
    }

    /// By its identity, whose memory, modules and arrays those are that are made here.
    pub fn owner(&self) -> u64 {
        self.root().id
    }

    /// For the length of a copy to memory that is not pinned, which waits in its call for the work before it: new streams and events of this
    /// context wait for that in theirs (measured, in one context; launches, recording and asking events, mapping and making memory do not).
    pub fn hold_while_copying(&self) -> MutexGuard<'_, ()> {
        self.root().copying.lock()
    }

    /// Returns once no such copy waits.
    pub fn wait_for_copies(&self) {
        drop(self.hold_while_copying());
    }

    pub fn parts(&self) -> Vec<Arc<Context>> {
        let mut parts = self.parts.lock();
        parts.retain(|part| part.upgrade().is_some_and(|part| part.is_alive()));
        parts.iter().filter_map(Weak::upgrade).collect()
    }

    /// Waits for its work and ends its captures and workers; whether it was not over yet. What is left of a green context
    /// then are the handles of its streams, which answer CONTEXT_IS_DESTROYED.
    pub fn end(&self) -> bool {
        if !self.alive.swap(false, Ordering::AcqRel) {
            return false;
        }
        for part in self.parts() {
            part.end();
        }
        // Before the wait: nothing comes behind what that finds.
        self.all_streams().iter().for_each(|stream| stream.close());
        self.wait();
        capture::abandon(self);
        self.streams.lock().clear();
        // A re-created primary context has the same handle; only this one may be taken out.
        driver().contexts.retain(|context| context.id != self.id);
        if self.parent.is_some() {
            DESTROYED_GREEN.lock().push(self.handle);
        } else if !self.primary {
            DESTROYED.lock().push(self.handle);
        }
        true
    }

    /// Ends it and gives back its memory and everything made in it.
    pub fn destroy(&self) {
        if !self.end() {
            return;
        }
        let driver = driver();
        for region in driver.space.regions() {
            match region.kind {
                Kind::Plain { context, .. } if context == self.id => drop(driver.space.free(region.start)),
                Kind::Host { context, registered, .. } if context == self.id => {
                    crate::pinned::drop_region(&region, registered)
                }
                Kind::Managed { context, .. } if context == self.id => crate::pinned::drop_region(&region, false),
                _ => {}
            }
        }
        driver.streams.retain(|stream| stream.context_id() != Some(self.id));
        driver.modules.retain(|module| module.context != Some(self.id));
        driver.arrays.retain(|array| array.context != self.id);
        driver.gpus[self.device].store.refund(driver.settings.context_bytes, Use::Context);
    }

    /// Makes `code` the answer to every later call in this context, and in the primary one of a green context and all of
    /// its parts. The first error stays.
    pub fn kill(&self, code: Code) {
        let _ = self.root().fault.compare_exchange(0, code.0, Ordering::AcqRel, Ordering::Acquire);
    }

    pub fn check(&self) -> Outcome {
        if !self.alive.load(Ordering::Acquire) {
            return Err(Code::CONTEXT_IS_DESTROYED);
        }
        self.check_fault()
    }

    /// The error that sticks, if there is one. Work already queued goes on in a context that is being destroyed.
    pub fn check_fault(&self) -> Outcome {
        match self.root().fault.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(Code(code)),
        }
    }

    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// Waits until everything submitted so far is done, in green contexts that are parts of this one too.
    pub fn wait(&self) {
        for ticket in self.unfinished() {
            ticket.wait();
            clock::host_saw(ticket.end());
        }
    }

    /// Runs what a call does itself, known to [`Context::unfinished_work`] meanwhile.
    pub fn during<T>(&self, work: &Work, body: impl FnOnce() -> T) -> T {
        if !strict::is_on() || work.touches.is_empty() {
            return body();
        }
        let token = next_id();
        self.calls.lock().push((token, Unfinished::new(work, None, Some(strict::tick()))));
        let result = body();
        self.calls.lock().retain(|(other, _)| *other != token);
        result
    }

    /// What was submitted here and has not finished, for strict mode.
    pub fn unfinished_work(&self) -> Vec<Unfinished> {
        let mut work: Vec<_> = self.calls.lock().iter().map(|(_, work)| work.clone()).collect();
        if self.pending.load(Ordering::Acquire) > 0 {
            work.extend(self.all_streams().iter().flat_map(|stream| stream.unfinished_work()));
        }
        work
    }

    /// The last points of the streams with work, of parts too.
    pub fn unfinished(&self) -> Vec<Ticket> {
        let mut tickets = Vec::new();
        for context in self.parts().iter().map(Arc::as_ref).chain([self]) {
            if context.pending.load(Ordering::Acquire) > 0 {
                tickets.extend(context.all_streams().iter().map(Stream::last));
            }
        }
        tickets.retain(|ticket| !ticket.is_done());
        tickets
    }

    /// When all that has run here and in its parts ended.
    pub fn time(&self) -> Time {
        let own = self.all_streams().iter().map(|stream| stream.time()).max().unwrap_or(0);
        self.parts().iter().map(|part| part.time()).fold(own, Time::max)
    }

    fn all_streams(&self) -> Vec<Arc<Stream>> {
        self.streams.lock().iter().cloned().chain([self.legacy.clone()]).collect()
    }

    /// Runs something in no stream of the program's, and says when it is over.
    pub fn aside(self: &Arc<Self>, body: impl Fn() + Send + Sync + 'static) -> Outcome<Ticket> {
        let stream = Arc::new(Stream::aside(self));
        self.add(stream.clone());
        let action = move |_: &Context| {
            body();
            Ok(())
        };
        stream.submit(Work { action: Arc::new(action), touches: Vec::new(), node: Node::Empty })?;
        let ticket = stream.last();
        stream.close();
        Ok(ticket)
    }

    /// Makes all later work here and in its parts wait.
    pub fn close_gate(&self, tickets: &[Ticket]) {
        for context in self.parts().iter().map(Arc::as_ref).chain([self]) {
            context.gates.lock().extend_from_slice(tickets);
        }
    }

    /// What work submitted now has to wait for because of [`Context::close_gate`].
    pub fn gates(&self) -> Vec<Ticket> {
        let mut gates = self.gates.lock();
        gates.retain(|ticket| !ticket.is_done());
        gates.clone()
    }

    /// Whether `other` is this context or a green context that is part of it.
    pub fn covers(&self, other: &Context) -> bool {
        self.id == other.id || other.parent.as_ref().is_some_and(|parent| parent.id == self.id)
    }

    /// Takes a stream in, and lets go of those that were destroyed or whose thread ended and that have no work left.
    pub fn add(&self, stream: Arc<Stream>) {
        let mut streams = self.streams.lock();
        streams.retain(|stream| !stream.is_over());
        // Looked at under the lock, under which the end finds all streams that are there.
        if !self.is_alive() {
            stream.close();
        }
        streams.push(stream);
    }

    /// Whether kernels of this context may touch plain memory of `device`.
    pub fn reaches(&self, device: usize) -> bool {
        device == self.device || self.root().peers.lock().contains(&device)
    }
}

/// The calling thread's current context, well and alive.
pub fn current() -> Outcome<Arc<Context>> {
    let context = top().ok_or(Code::INVALID_CONTEXT)?;
    context.check()?;
    Ok(context)
}

/// Where a primary context was made anew, a thread that had the last one current has this one.
fn top() -> Option<Arc<Context>> {
    let top = with_stack(|stack| stack.last().cloned())?;
    if top.is_alive() || !top.primary || top.parent.is_some() {
        return Some(top);
    }
    Some(primary::life(top.device).unwrap_or(top))
}

/// The context that a handle stands for; the handle of a primary context stands for its last life after that has ended.
fn known(handle: Handle) -> Outcome<Arc<Context>> {
    driver().contexts.get(handle).or_else(|_| primary::last_life(handle).ok_or(Code::INVALID_CONTEXT))
}

fn with_stack<T>(body: impl FnOnce(&mut Vec<Arc<Context>>) -> T) -> T {
    STACK.with_borrow_mut(|stack| body(stack))
}

/// The refusal of calls that need no context where the current one is gone.
pub fn refuse_if_gone() -> Outcome {
    top().map_or(Ok(()), |context| context.check())
}

/// Waits for all work of the context with this identity and of its green ones, as frees of what was made in it do. For
/// nobody else: neither another context of its GPU nor the one that is current.
pub fn wait_for_owner(id: u64) {
    let owner = driver().contexts.all().into_iter().find(|context| context.id == id);
    if let Some(context) = owner {
        context.wait();
    }
}

/// Waits for all work on `device`, of whichever context.
pub fn wait_for_device(device: usize) {
    for context in driver().contexts.all() {
        if device == context.device {
            context.wait();
        }
    }
}

/// A context by handle, alive; the current one for 0.
pub fn by_handle(handle: Handle) -> Outcome<Arc<Context>> {
    if handle == 0 {
        return current();
    }
    if was_destroyed(handle) {
        return Err(Code::CONTEXT_IS_DESTROYED);
    }
    let context = known(handle)?;
    if context.is_alive() { Ok(context) } else { Err(Code::CONTEXT_IS_DESTROYED) }
}

/// Whether it was the handle of a created or a green context, and is nobody's since.
fn was_destroyed(handle: Handle) -> bool {
    DESTROYED.lock().contains(&handle) || DESTROYED_GREEN.lock().contains(&handle)
}

pub fn ordinal(driver: &Driver, device: c_int) -> Outcome<usize> {
    driver.gpu(device)?;
    usize::try_from(device).map_err(|_| Code::INVALID_DEVICE)
}

pub fn check_flags(flags: c_uint) -> Outcome {
    if flags & !FLAG_MASK != 0 || (flags & 7).count_ones() > 1 { Err(Code::INVALID_VALUE) } else { Ok(()) }
}

// Created contexts and the thread's stack

pub fn create(out: Out<Handle>, flags: c_uint, device: c_int) -> Outcome {
    out.required()?;
    check_flags(flags)?;
    let context = Context::create(ordinal(driver(), device)?, flags, None)?;
    with_stack(|stack| stack.push(context.clone()));
    out.set(context.handle)
}

pub fn create_v3(out: Out<Handle>, _affinity: In<u8>, count: c_int, flags: c_uint, device: c_int) -> Outcome {
    if count != 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    create(out, flags, device)
}

pub fn create_v4(out: Out<Handle>, parameters: In<u8>, flags: c_uint, device: c_int) -> Outcome {
    if !parameters.is_null() {
        return Err(Code::NOT_SUPPORTED);
    }
    create(out, flags, device)
}

pub fn destroy(handle: Handle) -> Outcome {
    let context = driver().contexts.get(handle).map_err(|_| Code::INVALID_CONTEXT)?;
    if context.primary {
        return Err(Code::INVALID_CONTEXT);
    }
    with_stack(|stack| {
        if stack.last().is_some_and(|top| top.id == context.id) {
            stack.pop();
        }
    });
    context.destroy();
    Ok(())
}

/// `cuCtxAttach`: the current context, counted once more.
pub fn attach(out: Out<Handle>, flags: c_uint) -> Outcome {
    out.required()?;
    let context = current()?;
    if flags != 0 || context.primary {
        return Err(Code::INVALID_VALUE);
    }
    context.attached.fetch_add(1, Ordering::AcqRel);
    out.set(context.handle)
}

/// `cuCtxDetach`, of the current context; the last one destroys it.
pub fn detach(handle: Handle) -> Outcome {
    let context = current()?;
    if context.handle != handle || context.primary {
        return Err(Code::INVALID_CONTEXT);
    }
    if context.attached.fetch_sub(1, Ordering::AcqRel) == 1 { destroy(handle) } else { Ok(()) }
}

pub fn push(handle: Handle) -> Outcome {
    if was_destroyed(handle) {
        // A real driver answers success and then 709 to every call, and ends the process when the context is popped. Here
        // it ends at the call that was wrong.
        report::violation(format!("cuCtxPushCurrent of {handle:#x}, a context that was destroyed"));
        std::process::abort();
    }
    let context = known(handle)?;
    with_stack(|stack| stack.push(context));
    Ok(())
}

pub fn pop(out: Out<Handle>) -> Outcome {
    let context = with_stack(|stack| stack.pop()).ok_or(Code::INVALID_CONTEXT)?;
    out.set_if_wanted(context.handle);
    Ok(())
}

/// `cuCtxSetCurrent`: replaces the top of the stack; 0 pops it.
pub fn set_current(handle: Handle) -> Outcome {
    let context = match handle {
        0 => None,
        _ => Some(known(handle)?),
    };
    with_stack(|stack| {
        stack.pop();
        stack.extend(context);
    });
    Ok(())
}

pub fn get_current(out: Out<Handle>) -> Outcome {
    out.set(with_stack(|stack| stack.last().map_or(0, |context| context.handle)))
}

pub fn get_device(out: Out<c_int>) -> Outcome {
    get_device_of(out, 0)
}

/// `cuCtxGetDevice_v2`, with 0 for the current context.
pub fn get_device_of(out: Out<c_int>, handle: Handle) -> Outcome {
    let device = match handle {
        0 => with_stack(|stack| stack.last().map(|context| context.device)).ok_or(Code::INVALID_CONTEXT)?,
        _ => by_handle(handle)?.device,
    };
    out.set(device as c_int)
}

pub fn synchronize() -> Outcome {
    let context = current()?;
    synchronize_one(&context)
}

/// `cuCtxSynchronize_v2`, with 0 for the current context.
pub fn synchronize_of(handle: Handle) -> Outcome {
    let context = by_handle(handle)?;
    synchronize_one(&context)
}

fn synchronize_one(context: &Context) -> Outcome {
    context.check()?;
    capture::forbid_in(context)?;
    context.wait();
    crate::mempool::synchronized();
    context.check()
}

pub fn get_flags(out: Out<c_uint>) -> Outcome {
    out.set(current()?.flags.load(Ordering::Relaxed))
}

pub fn set_flags(flags: c_uint) -> Outcome {
    check_flags(flags)?;
    current()?.flags.store(flags, Ordering::Relaxed);
    Ok(())
}

pub fn get_id(handle: Handle, out: Out<u64>) -> Outcome {
    out.set(by_handle(handle)?.id)
}

pub fn api_version(handle: Handle, out: Out<c_uint>) -> Outcome {
    by_handle(handle)?;
    out.set(3020)
}

pub fn get_limit(out: Out<usize>, limit: c_int) -> Outcome {
    let context = current()?;
    out.set(*context.root().limits.lock().get(limit_index(limit)?).ok_or(Code::INVALID_VALUE)?)
}

pub fn set_limit(limit: c_int, value: usize) -> Outcome {
    let context = current()?;
    context.root().limits.lock()[limit_index(limit)?] = value;
    Ok(())
}

fn limit_index(limit: c_int) -> Outcome<usize> {
    usize::try_from(limit).ok().filter(|&limit| limit < LIMITS).ok_or(Code::INVALID_VALUE)
}

pub fn priority_range(least: Out<c_int>, greatest: Out<c_int>) -> Outcome {
    current()?;
    least.set_if_wanted(0);
    greatest.set_if_wanted(-5);
    Ok(())
}

pub fn get_cache_config(out: Out<c_int>) -> Outcome {
    out.set(current()?.cache_config.load(Ordering::Relaxed))
}

pub fn set_cache_config(config: c_int) -> Outcome {
    if !(0..=3).contains(&config) {
        return Err(Code::INVALID_VALUE);
    }
    current()?.cache_config.store(config, Ordering::Relaxed);
    Ok(())
}

/// `cuCtxGetSharedMemConfig`: banks of 32 bits, as on every GPU since Maxwell.
pub fn shared_memory_config(out: Out<c_int>) -> Outcome {
    current()?;
    out.set(1)
}

pub fn set_shared_memory_config(_config: c_int) -> Outcome {
    current().map(drop)
}

pub fn reset_persisting_l2() -> Outcome {
    current().map(drop)
}

pub fn enable_peer(handle: Handle, flags: c_uint) -> Outcome {
    let context = current()?;
    let peer = driver().contexts.get(handle).map_err(|_| Code::INVALID_CONTEXT)?;
    if flags != 0 || peer.device == context.device {
        return Err(if flags != 0 { Code::INVALID_VALUE } else { Code::INVALID_DEVICE });
    }
    if !crate::device::linked(context.device, peer.device) {
        return Err(Code::PEER_ACCESS_UNSUPPORTED);
    }
    let mut peers = context.root().peers.lock();
    if peers.contains(&peer.device) {
        return Err(Code::PEER_ACCESS_ALREADY_ENABLED);
    }
    peers.push(peer.device);
    Ok(())
}

pub fn disable_peer(handle: Handle) -> Outcome {
    let context = current()?;
    let peer = driver().contexts.get(handle).map_err(|_| Code::INVALID_CONTEXT)?;
    let mut peers = context.root().peers.lock();
    let at = peers.iter().position(|&device| device == peer.device).ok_or(Code::PEER_ACCESS_NOT_ENABLED)?;
    peers.swap_remove(at);
    Ok(())
}
