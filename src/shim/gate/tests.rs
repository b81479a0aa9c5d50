//! The gate with the whole library around it: each test is a process of its own, whose calls go through the trampolines to the
//! simulated driver.

use super::*;
use crate::hook::trampoline as hooked;
use cudarc::driver::sys::{CUcontext, CUfunction, CUstream};
use std::ffi::CStr;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::{Arc, mpsc};
use std::thread;

const PTX: &CStr = c".version 7.0
.target sm_70
.address_size 64
.visible .entry fill_u32(.param .u64 p, .param .u64 n, .param .u32 v) { ret; }
.visible .entry wait_flag(.param .u64 flag) { ret; }
";

macro_rules! ok {
    ($name:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: outputs point to live variables of the types that the driver's header asks for; all else are numbers and handles
        // that the driver gave.
        assert_eq!(unsafe { hooked::$name($($argument),*) }, CuResult::SUCCESS, stringify!($name))
    };
}

pub(crate) use ok;

/// Runs `body` in a process of its own, which ends so (an exit status, or 128 and a signal) and in half a minute at most.
fn ends(name: &str, status: i32, body: impl FnOnce()) {
    ends_in("gate::tests", name, &[], status, body);
}

/// The same for a test of another module, by the path of that, and with these settings.
pub(crate) fn ends_in(module: &str, name: &str, settings: &[(&str, &str)], status: i32, body: impl FnOnce()) {
    if std::env::var("GATE_TEST").as_deref() == Ok(name) {
        // SAFETY: the call takes a number.
        unsafe { libc::alarm(30) };
        return body();
    }
    let me = std::env::current_exe().unwrap();
    let built = me.parent().unwrap().parent().unwrap().join("libsimcuda.so");
    assert!(built.exists(), "{}: cargo build --release --workspace makes it", built.display());
    let folder = std::env::temp_dir().join(format!("gpupool-gate-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::os::unix::fs::symlink(&built, folder.join("libcuda.so.1")).unwrap();
    let output = Command::new(me)
        .args([&format!("{module}::{name}"), "--exact", "--nocapture", "--test-threads=1"])
        .env("GATE_TEST", name)
        .env("LD_LIBRARY_PATH", &folder)
        .env("GPUPOOL_METRICS", "off")
        .env("SIMCUDA_STRICT", "on")
        .env("SIMCUDA_GPUS", "2x4GiB")
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let code = output.status.code().unwrap_or_else(|| 128 + output.status.signal().unwrap_or(0));
    assert_eq!(code, status, "{name}:\n{said}");
    assert!(status != 0 || said.contains("1 passed"), "{name} did not run:\n{said}");
}

fn alone(name: &str, body: impl FnOnce()) {
    ends(name, 0, body);
}

/// GPU 0's primary context, current on this thread.
pub(crate) fn start() -> (&'static Driver, CUcontext) {
    ok!(cuInit(0));
    let mut context = null_mut();
    ok!(cuDevicePrimaryCtxRetain(&raw mut context, 0));
    ok!(cuCtxSetCurrent(context));
    (context::driver().unwrap(), context)
}

fn function(name: &CStr) -> CUfunction {
    let (mut module, mut function) = (null_mut(), null_mut());
    ok!(cuModuleLoadData(&raw mut module, PTX.as_ptr().cast()));
    ok!(cuModuleGetFunction(&raw mut function, module, name.as_ptr()));
    function
}

fn launch(function: CUfunction, stream: CUstream, mut argument: u64) {
    let mut arguments = [(&raw mut argument).cast()];
    ok!(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments.as_mut_ptr(), null_mut()));
}

/// A word that kernels wait for.
#[derive(Clone, Copy)]
struct Flag(usize);

impl Flag {
    fn new() -> Self {
        let mut flag = null_mut();
        ok!(cuMemHostAlloc(&raw mut flag, 4096, 0));
        Self(flag as usize)
    }

    fn raise(self) {
        // SAFETY: a live pinned word, which the kernel reads atomically, too.
        unsafe { AtomicU32::from_ptr(self.0 as *mut u32) }.store(1, Ordering::Release);
    }
}

fn new_stream(driver: &'static Driver) -> CUstream {
    let stream = driver.create_stream().unwrap();
    // SAFETY: the type is the driver's handle and nothing else, laid out alike.
    unsafe { std::mem::transmute::<gpupool_cuda::Stream, CUstream>(stream) }
}

pub(crate) fn memory() -> u64 {
    let mut address = 0;
    ok!(cuMemAlloc_v2(&raw mut address, 4096));
    address
}

fn fill(address: u64) {
    ok!(cuMemsetD8Async(address, 1, 4096, null_mut()));
}

/// Limits under which nobody gives up early, on however slow a machine.
pub(crate) const PATIENT: Limits =
    Limits { wait: Duration::from_secs(9), quiet: Duration::from_secs(9), hold: Duration::from_secs(9) };
/// Limits for what cannot be had.
const SHORT: Limits =
    Limits { wait: Duration::from_millis(5), quiet: Duration::from_millis(5), hold: Duration::from_millis(5) };

/// In these processes hooks are called by name and not by a preload.
pub(crate) fn try_close(driver: &'static Driver, limits: &Limits) -> Result<Closed<'static>, Disturbed> {
    close_unless(driver, limits, |reason| *reason != Reason::NotPreloaded)
}

fn refused(driver: &'static Driver, limits: &Limits) -> Disturbed {
    try_close(driver, limits).err().unwrap()
}

/// Waits until the thread of this number, which it tells as it goes on, is held at the gate.
fn until_held(number: &AtomicU32) {
    while !is_asleep(number.load(Ordering::Acquire)) {
        thread::yield_now();
    }
}

fn is_asleep(thread: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/self/task/{thread}/syscall")) else {
        // Systems without that file tell at least that it does not run.
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap_or_default();
        return stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'));
    };
    stat.starts_with(&format!("{} ", libc::SYS_futex))
}

/// A thread that fills memory once; its number, and whether it has.
fn filler(context: CUcontext, address: u64) -> (thread::JoinHandle<()>, Arc<AtomicU32>, Arc<AtomicBool>) {
    let (number, is_done) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let (told, done, context) = (number.clone(), is_done.clone(), context as usize);
    let thread = thread::spawn(move || {
        ok!(cuCtxSetCurrent(context as CUcontext));
        told.store(threads::id(), Ordering::Release);
        fill(address);
        done.store(true, Ordering::SeqCst);
    });
    (thread, number, is_done)
}

#[test]
fn it_closes_where_all_is_quiet_and_holds_calls_until_it_is_open() {
    alone("it_closes_where_all_is_quiet_and_holds_calls_until_it_is_open", || {
        let (driver, context) = start();
        let address = memory();
        fill(address);
        let closed = try_close(driver, &PATIENT).unwrap();
        let (thread, number, is_done) = filler(context, address);
        until_held(&number);
        assert!(!is_done.load(Ordering::SeqCst), "it was let through");
        assert_eq!(closed.still_quiet(), Ok(()));
        assert_eq!(refused(driver, &PATIENT), Disturbed::Closed);
        drop(closed);
        thread.join().unwrap();
        assert!(is_done.load(Ordering::SeqCst));
        drop(try_close(driver, &PATIENT).unwrap());
    });
}

/// The GPU that an address is said to lie on, by each call that a program can ask with.
fn asked_about(address: u64) -> [i32; 2] {
    const ORDINAL: c_int = 9;
    let (mut one, mut several, mut attribute) = (-1, -1, ORDINAL);
    ok!(cuPointerGetAttribute((&raw mut one).cast(), ORDINAL, address));
    let mut outputs = [(&raw mut several).cast()];
    ok!(cuPointerGetAttributes(1, &raw mut attribute, outputs.as_mut_ptr(), address));
    let (mut start, mut bytes) = (0, 0);
    ok!(cuMemGetAddressRange_v2(&raw mut start, &raw mut bytes, address));
    assert!(start <= address && address - start < bytes as u64);
    [one, several]
}

/// Asks from another thread while the gate is closed, which has to let those questions pass, or to hold them until it is open.
fn asked_while_closed(driver: &'static Driver, context: CUcontext, address: u64, is_held: bool) {
    let closed = try_close(driver, &PATIENT).unwrap();
    let (number, context) = (Arc::new(AtomicU32::new(0)), context as usize);
    let told = number.clone();
    let asker = thread::spawn(move || {
        ok!(cuCtxSetCurrent(context as CUcontext));
        told.store(threads::id(), Ordering::Release);
        asked_about(address)
    });
    let asker = if is_held {
        until_held(&number);
        assert!(!asker.is_finished());
        drop(closed);
        asker.join()
    } else {
        let answer = asker.join();
        assert_eq!(closed.still_quiet(), Ok(()));
        answer
    };
    assert_eq!(asker.unwrap(), [0, 0]);
}

/// Memory of the program's own on GPU 0, mapped and usable.
fn mapped_by_the_program() -> u64 {
    const BYTES: usize = 2 << 20;
    let (mut address, mut handle) = (0, 0);
    let properties = gpupool_cuda::Properties::of(gpupool_pool::Place::Gpu(0));
    ok!(cuMemCreate(&raw mut handle, BYTES, &raw const properties, 0));
    ok!(cuMemAddressReserve(&raw mut address, BYTES, 0, 0, 0));
    ok!(cuMemMap(address, BYTES, 0, handle, 0));
    let access = gpupool_cuda::Access { location: properties.location, flags: 3 };
    ok!(cuMemSetAccess(address, BYTES, &raw const access, 1));
    ok!(cuMemRelease(handle));
    address
}

#[test]
fn questions_about_what_nobody_moves_pass_and_others_wait_until_it_is_open() {
    alone("questions_about_what_nobody_moves_pass_and_others_wait_until_it_is_open", || {
        let (driver, context) = start();
        // Asked for as the library itself would, so the driver's.
        let inside = crate::guard::enter();
        let foreign = memory();
        drop(inside);
        let pooled = memory();
        asked_while_closed(driver, context, foreign, false);
        // What the pool knows does not change by a move.
        asked_while_closed(driver, context, pooled, false);
        // From here on there is memory that may move at addresses which the program has chosen.
        let own = mapped_by_the_program();
        asked_while_closed(driver, context, own, true);
        ok!(cuMemUnmap(own, 2 << 20));
        asked_while_closed(driver, context, foreign, false);
    });
}

#[test]
fn work_in_any_context_keeps_it_open_and_is_named() {
    alone("work_in_any_context_keeps_it_open_and_is_named", || {
        let (driver, first) = start();
        let mut second = null_mut();
        ok!(cuCtxCreate_v2(&raw mut second, 0, 1));
        let (flag, wait) = (Flag::new(), function(c"wait_flag"));
        launch(wait, null_mut(), flag.0 as u64);
        ok!(cuCtxSetCurrent(first));
        assert!(matches!(refused(driver, &SHORT), Disturbed::Working { gpu: 1, .. }));
        assert!(!wait_until_quiet(driver, Duration::from_millis(5), Duration::from_secs(9), || 0));
        fill(memory());
        flag.raise();
        drop(try_close(driver, &PATIENT).unwrap());
    });
}

#[test]
fn with_the_gate_open_work_is_waited_for_while_it_makes_progress() {
    alone("with_the_gate_open_work_is_waited_for_while_it_makes_progress", || {
        let (driver, _) = start();
        let (flag, wait) = (Flag::new(), function(c"wait_flag"));
        launch(wait, null_mut(), flag.0 as u64);
        let still = Duration::from_millis(3);
        assert!(!wait_until_quiet(driver, Duration::from_secs(9), still, || 0), "nothing goes on");
        let mut steps = 0;
        let over = wait_until_quiet(driver, Duration::from_secs(9), Duration::from_secs(9), || {
            steps += 1;
            if steps == 20 {
                flag.raise();
            }
            steps
        });
        assert!(over && steps >= 20);
    });
}

/// A planted fault: whoever waits for work or closes the gate leaves its own capture mode as it is.
pub(crate) static IS_STRICT: AtomicBool = AtomicBool::new(false);

/// What a capture of another thread's ends with that begins while this one waits for work with the gate open.
fn ends_beside_a_wait(driver: &'static Driver, context: CUcontext) -> i32 {
    let (flag, wait) = (Flag::new(), function(c"wait_flag"));
    launch(wait, null_mut(), flag.0 as u64);
    let (begin, begins) = mpsc::channel();
    let (tell, told) = mpsc::channel();
    let (end, ends) = mpsc::channel();
    let context = context as usize;
    let capturer = thread::spawn(move || {
        ok!(cuCtxSetCurrent(context as CUcontext));
        let stream = new_stream(driver);
        begins.recv().unwrap();
        ok!(cuStreamBeginCapture_v2(stream, 0));
        tell.send(()).unwrap();
        ends.recv().unwrap();
        let mut graph = null_mut();
        // SAFETY: the output is a local, and the stream the driver's.
        unsafe { hooked::cuStreamEndCapture(stream, &raw mut graph) }.0
    });
    let mut steps = 0;
    let over = wait_until_quiet(driver, Duration::from_secs(9), Duration::from_secs(9), || {
        steps += 1;
        match steps {
            2 => {
                begin.send(()).unwrap();
                told.recv().unwrap();
            }
            5 => flag.raise(),
            _ => {}
        }
        steps
    });
    end.send(()).unwrap();
    let answer = capturer.join().unwrap();
    assert!(steps >= 5 || (!over && answer != 0), "{steps} looks");
    flag.raise();
    answer
}

#[test]
fn who_waits_for_work_breaks_no_capture_and_would_if_it_were_not_relaxed() {
    alone("who_waits_for_work_breaks_no_capture_and_would_if_it_were_not_relaxed", || {
        let (driver, context) = start();
        assert_eq!(ends_beside_a_wait(driver, context), 0);
        IS_STRICT.store(true, Ordering::Relaxed);
        const INVALIDATED: i32 = 901;
        assert_eq!(ends_beside_a_wait(driver, context), INVALIDATED);
    });
}

#[test]
fn two_captures_keep_it_open_and_are_not_broken_and_none_begins_while_it_is_closed() {
    alone("two_captures_keep_it_open_and_are_not_broken_and_none_begins_while_it_is_closed", || {
        let (driver, context) = start();
        let (mut streams, address) = ([null_mut(); 2], memory());
        for (stream, mode) in streams.iter_mut().zip([0, 2]) {
            *stream = new_stream(driver);
            ok!(cuStreamBeginCapture_v2(*stream, mode));
        }
        for stream in streams {
            assert_eq!(refused(driver, &SHORT), Disturbed::Capture);
            ok!(cuMemsetD8Async(address, 1, 64, stream));
            let mut graph = null_mut();
            ok!(cuStreamEndCapture(stream, &raw mut graph));
        }
        let closed = try_close(driver, &PATIENT).unwrap();
        let (number, began) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let (told, begins, context, stream) = (number.clone(), began.clone(), context as usize, streams[0] as usize);
        let capturer = thread::spawn(move || {
            ok!(cuCtxSetCurrent(context as CUcontext));
            told.store(threads::id(), Ordering::Release);
            ok!(cuStreamBeginCapture_v2(stream as CUstream, 0));
            begins.store(true, Ordering::SeqCst);
        });
        until_held(&number);
        assert!(!began.load(Ordering::SeqCst));
        assert_eq!(closed.still_quiet(), Ok(()));
        drop(closed);
        capturer.join().unwrap();
        assert_eq!(refused(driver, &SHORT), Disturbed::Capture);
    });
}

#[test]
fn a_launch_that_blocks_inside_keeps_it_open_and_is_named() {
    alone("a_launch_that_blocks_inside_keeps_it_open_and_is_named", || {
        let (driver, context) = start();
        let (flag, wait) = (Flag::new(), function(c"wait_flag"));
        let stream = new_stream(driver) as usize;
        launch(wait, stream as CUstream, flag.0 as u64);
        let (count, function, context) = (Arc::new(AtomicU32::new(0)), wait as usize, context as usize);
        let launched = count.clone();
        let launcher = thread::spawn(move || {
            ok!(cuCtxSetCurrent(context as CUcontext));
            for _ in 0..1100 {
                launch(function as CUfunction, stream as CUstream, flag.0 as u64);
                launched.fetch_add(1, Ordering::SeqCst);
            }
        });
        let inside = loop {
            match refused(driver, &SHORT) {
                Disturbed::Working { .. } => thread::yield_now(),
                other => break other,
            }
        };
        assert!(matches!(inside, Disturbed::Inside { api: Some("cuLaunchKernel"), .. }), "{inside:?}");
        assert!(count.load(Ordering::SeqCst) < 1100, "the queue has no end");
        flag.raise();
        launcher.join().unwrap();
        assert_eq!(driver.synchronize(), CuResult::SUCCESS);
        drop(try_close(driver, &PATIENT).unwrap());
    });
}

#[test]
fn a_host_function_that_calls_the_driver_is_not_waited_for_blindly() {
    alone("a_host_function_that_calls_the_driver_is_not_waited_for_blindly", || {
        static ADDRESS: AtomicU32 = AtomicU32::new(0);
        static CALLS: AtomicU32 = AtomicU32::new(0);
        extern "C" fn called(_: *mut c_void) {
            ADDRESS.store(threads::id(), Ordering::SeqCst);
            while CALLS.load(Ordering::SeqCst) == 0 {
                thread::yield_now();
            }
            // Whatever the driver answers in such a function, the gate is passed.
            // SAFETY: the address is nobody's, which the driver checks.
            let _ = unsafe { hooked::cuMemsetD8_v2(0x10, 0, 1) };
            CALLS.store(2, Ordering::SeqCst);
        }
        let (driver, _) = start();
        let stream = new_stream(driver);
        ok!(cuLaunchHostFunc(stream, called as *mut c_void, null_mut()));
        while ADDRESS.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        // The function calls while the gate drains because of it.
        CALLS.store(1, Ordering::SeqCst);
        while CALLS.load(Ordering::SeqCst) != 2 {
            let _ = try_close(driver, &SHORT);
        }
        drop(try_close(driver, &PATIENT).unwrap());
    });
}

#[test]
fn a_kernel_that_waits_for_a_thread_which_is_held_gets_it() {
    alone("a_kernel_that_waits_for_a_thread_which_is_held_gets_it", || {
        let (driver, context) = start();
        let (flag, wait, address) = (Flag::new(), function(c"wait_flag"), memory());
        let stream = new_stream(driver);
        launch(wait, stream, flag.0 as u64);
        let (stop, context) = (Arc::new(AtomicBool::new(false)), context as usize);
        let stops = stop.clone();
        let closer = thread::spawn(move || {
            ok!(cuCtxSetCurrent(context as CUcontext));
            while !stops.load(Ordering::SeqCst) {
                let answer = try_close(driver, &SHORT).map(drop);
                assert!(answer.is_ok() || !matches!(answer, Err(Disturbed::NotHere(_))), "{answer:?}");
            }
        });
        let other = new_stream(driver);
        for _ in 0..20 {
            ok!(cuMemsetD8Async(address, 1, 64, other));
        }
        flag.raise();
        assert_eq!(driver.synchronize(), CuResult::SUCCESS);
        stop.store(true, Ordering::SeqCst);
        closer.join().unwrap();
    });
}

#[test]
fn a_thread_that_is_held_opens_a_gate_whose_closer_went_to_sleep() {
    alone("a_thread_that_is_held_opens_a_gate_whose_closer_went_to_sleep", || {
        let (_, context) = start();
        let address = memory();
        assert!(kernel::prepare());
        threads::PATIENCE.store(2_000_000, Ordering::Relaxed);
        let draining = GATE.drain(threads::slots(), kernel::after(Duration::from_secs(9))).unwrap();
        let (thread, number, is_done) = filler(context, address);
        // The closer does nothing at all until then.
        thread.join().unwrap();
        assert!(is_done.load(Ordering::SeqCst) && !GATE.is_draining(&draining));
        let by = GATE.begin_to_move(draining).unwrap_err();
        assert_eq!(by, Kept::Opened { by: number.load(Ordering::Relaxed) });
    });
}

#[test]
fn a_thread_that_ends_inside_a_call_does_not_keep_it_open() {
    alone("a_thread_that_ends_inside_a_call_does_not_keep_it_open", || {
        let (driver, _) = start();
        let inside = thread::spawn(|| drop(enter(gpupool_pool::Mark::new(3), |_| "cuThree")));
        inside.join().unwrap();
        drop(try_close(driver, &PATIENT).unwrap());
        let passed = enter(gpupool_pool::Mark::new(3), |_| "cuThree");
        assert_eq!(refused(driver, &SHORT), Disturbed::OwnCall);
        passed.leave(gpupool_pool::Mark::new(3));
        drop(try_close(driver, &PATIENT).unwrap());
    });
}

#[test]
fn a_thread_that_stays_inside_is_named() {
    alone("a_thread_that_stays_inside_is_named", || {
        let (driver, _) = start();
        let (tell, told) = mpsc::channel();
        let (let_go, goes) = mpsc::channel::<()>();
        let inside = thread::spawn(move || {
            let passed = enter(gpupool_pool::Mark::new(3), |_| "cuThree");
            tell.send(threads::id()).unwrap();
            let _ = goes.recv();
            passed.leave(gpupool_pool::Mark::new(3));
        });
        let thread = told.recv().unwrap();
        // The names are those of the table, which the first call of this process gave.
        let Disturbed::Inside { thread: named, .. } = refused(driver, &SHORT) else { panic!("it is inside") };
        assert_eq!(named, thread);
        drop(let_go);
        inside.join().unwrap();
    });
}

/// The address that the handler of a signal fills.
static FILLED: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
static HANDLER: AtomicU32 = AtomicU32::new(0);

extern "C" fn fills(_: c_int) {
    HANDLER.store(1, Ordering::SeqCst);
    fill(FILLED.load(Ordering::SeqCst));
    HANDLER.store(2, Ordering::SeqCst);
}

#[test]
fn a_signal_on_a_held_thread_runs_its_handler_whose_calls_wait_as_well() {
    alone("a_signal_on_a_held_thread_runs_its_handler_whose_calls_wait_as_well", || {
        let (driver, context) = start();
        let address = memory();
        FILLED.store(address, Ordering::SeqCst);
        // SAFETY: the handler has the type of one that is told the signal's number.
        unsafe { libc::signal(libc::SIGUSR1, fills as *const () as libc::sighandler_t) };
        // Elsewhere: a thread that is made by the one which has closed the gate has all signals blocked, too.
        let (tell, told) = mpsc::channel();
        let (open, opens) = mpsc::channel::<()>();
        let handle = context as usize;
        let closer = thread::spawn(move || {
            ok!(cuCtxSetCurrent(handle as CUcontext));
            let closed = try_close(driver, &PATIENT).unwrap();
            tell.send(()).unwrap();
            let _ = opens.recv();
            drop(closed);
        });
        told.recv().unwrap();
        let (thread, number, is_done) = filler(context, address);
        until_held(&number);
        // SAFETY: the thread is alive, since it is held.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), number.load(Ordering::SeqCst), libc::SIGUSR1) };
        while HANDLER.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        until_held(&number);
        assert_eq!(HANDLER.load(Ordering::SeqCst), 1, "the handler's call was let through");
        assert!(!is_done.load(Ordering::SeqCst), "the outer call was let through");
        drop(open);
        closer.join().unwrap();
        thread.join().unwrap();
        assert_eq!(HANDLER.load(Ordering::SeqCst), 2);
    });
}

#[test]
fn the_child_of_a_fork_is_not_held() {
    alone("the_child_of_a_fork_is_not_held", || {
        let (driver, context) = start();
        crate::run::register();
        let address = memory();
        let closed = try_close(driver, &PATIENT).unwrap();
        let (thread, number, is_done) = filler(context, address);
        until_held(&number);
        // SAFETY: the child makes one call, which is the driver's to refuse, and leaves.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: a number that the driver checks, and a status.
            unsafe { libc::_exit(i32::from(hooked::cuMemsetD8Async(address, 1, 64, null_mut()).is_ok())) };
        }
        let mut status = -1;
        // SAFETY: the output is a local.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "it was not refused, or did not end by itself");
        assert!(!is_done.load(Ordering::SeqCst));
        assert_eq!(closed.still_quiet(), Ok(()));
        drop(closed);
        thread.join().unwrap();
    });
}

static HAS_MOVED: AtomicBool = AtomicBool::new(false);

extern "C" fn looks_at_the_end() {
    // SAFETY: ends the process at once.
    unsafe { libc::_exit(if HAS_MOVED.load(Ordering::SeqCst) { 7 } else { 8 }) };
}

#[test]
fn the_end_of_the_process_waits_for_what_moves() {
    ends("the_end_of_the_process_waits_for_what_moves", 7, || {
        let (driver, context) = start();
        // Registered before the gate's own, and so run behind it.
        // SAFETY: a function without arguments.
        unsafe { libc::atexit(looks_at_the_end) };
        let (tell, told) = mpsc::channel();
        let context = context as usize;
        thread::spawn(move || {
            ok!(cuCtxSetCurrent(context as CUcontext));
            let closed = try_close(driver, &PATIENT).unwrap();
            tell.send(()).unwrap();
            while !is_ending() {
                thread::yield_now();
            }
            HAS_MOVED.store(true, Ordering::SeqCst);
            drop(closed);
        });
        told.recv().unwrap();
        // SAFETY: ends the process in order.
        unsafe { libc::exit(0) };
    });
}

#[test]
fn a_context_that_ends_waits_for_the_gate_and_can_be_worked_in_until_then() {
    alone("a_context_that_ends_waits_for_the_gate_and_can_be_worked_in_until_then", || {
        let (driver, first) = start();
        let mut second = null_mut();
        ok!(cuCtxCreate_v2(&raw mut second, 0, 0));
        ok!(cuCtxSetCurrent(first));
        let closed = try_close(driver, &PATIENT).unwrap();
        let (number, is_gone) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let (told, gone, handle) = (number.clone(), is_gone.clone(), second as usize);
        let ender = thread::spawn(move || {
            told.store(threads::id(), Ordering::Release);
            ok!(cuCtxDestroy_v2(handle as CUcontext));
            gone.store(true, Ordering::SeqCst);
        });
        until_held(&number);
        let worked = context::within(driver, Context::from_raw(second).unwrap(), || driver.current_device());
        assert_eq!(worked.map(|device| device.is_ok()), Some(true));
        assert!(!is_gone.load(Ordering::SeqCst));
        drop(closed);
        ender.join().unwrap();
    });
}

#[test]
fn a_context_in_error_keeps_it_open_for_good() {
    alone("a_context_in_error_keeps_it_open_for_good", || {
        let (driver, _) = start();
        let wait = function(c"wait_flag");
        // No memory lies there, and the kernel faults.
        launch(wait, null_mut(), 0x7000_0000_0000);
        assert!(!driver.synchronize().is_ok());
        for _ in 0..2 {
            assert!(matches!(refused(driver, &SHORT), Disturbed::NotHere(Reason::Broken { gpu: 0, .. })));
        }
    });
}

#[test]
fn what_a_process_does_without_a_preload_is_not_moved_behind_its_back() {
    alone("what_a_process_does_without_a_preload_is_not_moved_behind_its_back", || {
        let (driver, _) = start();
        assert_eq!(why_not(driver), Some(Reason::NotPreloaded));
        assert_eq!(close(driver, &PATIENT).err(), Some(Disturbed::NotHere(Reason::NotPreloaded)));
    });
}
