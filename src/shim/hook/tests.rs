//! Hooks with the whole library around them: each test is a process of its own, whose calls go through the trampolines to the
//! simulated driver.

use super::trampoline as hooked;
use crate::gate::tests::{ends_in, memory, ok, start};
use crate::guard;
use crate::serve::handles::by_hand;
use crate::serve::memory::pieces;
use crate::tiers::launch::plant;
use crate::watch::module;
use cudarc::driver::sys::CUfunction;
use gpupool_cuda::{CuResult, Properties};
use gpupool_pool::Place;
use parking_lot::Mutex;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use tracing::subscriber::with_default;
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

const PTX: &CStr = c".version 7.0
.target sm_70
.address_size 64
.extern .func (.param .b64 r) malloc (.param .b64 n);
.visible .entry fill_u32(.param .u64 p, .param .u64 n, .param .u32 v) { ret; }
";
const BYTES: usize = 4096;

fn alone(name: &str, body: impl FnOnce()) {
    alone_with(&[], name, body);
}

fn alone_with(settings: &[(&str, &str)], name: &str, body: impl FnOnce()) {
    ends_in("hook::tests", name, settings, 0, body);
}

/// A log that does this with every line, whatever its level.
struct Writes<F>(F);

impl<S: Subscriber, F: Fn(&str) + 'static> Layer<S> for Writes<F> {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        (self.0)(event.metadata().target());
    }
}

fn logging_by<T>(write: impl Fn(&str) + Send + Sync + 'static, body: impl FnOnce() -> T) -> T {
    with_default(tracing_subscriber::registry().with(Writes(write)), body)
}

/// Has every line of this target panic while `body` runs, which gets what says whether any has since it asked last.
fn panicking_in<T>(target: &'static str, body: impl FnOnce(&dyn Fn() -> bool) -> T) -> T {
    let planted = Arc::new(AtomicU32::new(0));
    let plant = planted.clone();
    let write = move |of: &str| {
        if of == target {
            plant.fetch_add(1, Ordering::Relaxed);
            panic!("planted in the log of {of}");
        }
    };
    logging_by(write, || body(&|| planted.swap(0, Ordering::Relaxed) > 0))
}

fn function() -> CUfunction {
    let (mut module, mut function) = (null_mut(), null_mut());
    ok!(cuModuleLoadData(&raw mut module, PTX.as_ptr().cast()));
    ok!(cuModuleGetFunction(&raw mut function, module, c"fill_u32".as_ptr()));
    function
}

/// Fills memory by a kernel, and does not wait for it.
fn fill(function: CUfunction, mut address: u64, mut value: u32) {
    let mut count = (BYTES / 4) as u64;
    let mut arguments = [(&raw mut address).cast(), (&raw mut count).cast(), (&raw mut value).cast()];
    ok!(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, null_mut(), arguments.as_mut_ptr(), null_mut()));
}

fn read(address: u64) -> u32 {
    let mut word = 0u32;
    ok!(cuMemcpyDtoH_v2((&raw mut word).cast(), address, size_of::<u32>()));
    word
}

#[test]
fn a_panic_beside_a_launch_reaches_neither_the_program_nor_the_launch() {
    alone("a_panic_beside_a_launch_reaches_neither_the_program_nor_the_launch", || {
        start();
        // Made unseen, so that the first launch in the context notes it, which is what panics in front of the driver's call.
        let (mut context, mut address) = (null_mut(), 0);
        let inside = guard::enter();
        ok!(cuCtxCreate_v2(&raw mut context, 0, 0));
        let function = function();
        ok!(cuMemAlloc_v2(&raw mut address, BYTES));
        drop(inside);
        let planted = Arc::new(Mutex::new(Vec::new()));
        let plant = planted.clone();
        let write = move |target: &str| {
            plant.lock().push(target.to_owned());
            panic!("planted in the log of {target}");
        };
        logging_by(write, || {
            fill(function, address, 7);
            assert!(guard::is_outside());
        });
        assert_eq!(read(address), 7, "the kernel ran");
        let planted = planted.lock();
        let at = |target: &str| planted.iter().position(|other| other == target);
        assert!(at("gpupool::context") < at("gpupool::call") && at("gpupool::context").is_some(), "{planted:?}");
    });
}

#[test]
fn a_panic_as_a_context_is_switched_to_leaves_it_current_and_what_was_handed_out_usable() {
    alone("a_panic_as_a_context_is_switched_to_leaves_it_current_and_what_was_handed_out_usable", || {
        let (driver, first) = start();
        let before = memory();
        fill(function(), before, 3);
        // Made unseen, so that whoever switches to it notes it.
        let mut second = null_mut();
        let inside = guard::enter();
        ok!(cuCtxCreate_v2(&raw mut second, 0, 0));
        ok!(cuCtxSetCurrent(first));
        drop(inside);
        panicking_in("gpupool::context", |has_panicked| {
            ok!(cuCtxSetCurrent(second));
            assert!(has_panicked() && guard::is_outside());
            assert_eq!(driver.current_context(), gpupool_cuda::Context::from_raw(second));
        });
        ok!(cuCtxSetCurrent(first));
        assert_eq!(read(before), 3);
        ok!(cuMemFree_v2(before));
    });
}

#[test]
fn a_panic_in_an_allocation_makes_it_the_drivers_and_those_before_stay_usable() {
    alone("a_panic_in_an_allocation_makes_it_the_drivers_and_those_before_stay_usable", || {
        start();
        let (function, before) = (function(), memory());
        fill(function, before, 3);
        let pooled = |address| crate::backing::open::opened().is_some_and(|opened| opened.contains(address));
        let during = panicking_in("gpupool::memory", |has_panicked| {
            let during = memory();
            assert!(has_panicked() && guard::is_outside());
            during
        });
        // Whoever allocates behind it is served by the driver.
        let after = memory();
        assert!(pooled(before) && !pooled(after));
        for address in [during, after] {
            fill(function, address, 5);
            assert_eq!(read(address), 5);
        }
        assert_eq!(read(before), 3);
        [before, during, after].into_iter().for_each(|address| ok!(cuMemFree_v2(address)));
    });
}

#[test]
fn a_panic_beside_what_moves_memory_reaches_no_launch_no_wait_and_no_copy() {
    let name = "a_panic_beside_what_moves_memory_reaches_no_launch_no_wait_and_no_copy";
    // Every launch is looked at for what to move, and the end of every loop of the program's.
    alone_with(&[("GPUPOOL_MOVE", "stress")], name, || {
        start();
        let (function, mut blocks) = (function(), [0; 3]);
        for block in &mut blocks {
            ok!(cuMemAlloc_v2(block, 2 << 20));
        }
        let (mut launches, mut waits, mut copies) = (0, 0, 0);
        panicking_in("gpupool::memory", |has_panicked| {
            for round in 0..64 {
                for block in blocks {
                    fill(function, block, round);
                    launches += u32::from(has_panicked());
                    assert!(guard::is_outside());
                }
                ok!(cuMemcpyDtoDAsync_v2(blocks[0], blocks[1], 1 << 20, null_mut()));
                copies += u32::from(has_panicked());
                ok!(cuCtxSynchronize());
                waits += u32::from(has_panicked());
                assert!(guard::is_outside());
            }
            // A loop of copies has an end, too.
            for _ in 0..64 {
                for (from, to) in [(0, 1), (1, 2), (2, 0)] {
                    ok!(cuMemcpyDtoDAsync_v2(blocks[to], blocks[from], 1 << 20, null_mut()));
                    copies += u32::from(has_panicked());
                    assert!(guard::is_outside());
                }
            }
        });
        assert!(launches > 0 && waits > 0 && copies > 0, "{launches} launches, {waits} waits, {copies} copies");
        blocks.into_iter().for_each(|block| assert_eq!(read(block), 63));
    });
}

/// The first launch or copy that `planted` makes panics where it is told of, with two blocks of the pool and what was `prepared` before.
fn moves_end_and_nothing_else<T>(
    name: &str,
    prepared: impl Fn(CUfunction, [u64; 2]) -> T,
    planted: impl Fn(CUfunction, [u64; 2], T),
) {
    // As if memory of the pool lay elsewhere from the beginning.
    alone_with(&[("GPUPOOL_MOVE", "stress")], name, || {
        let said = Arc::new(AtomicU32::new(0));
        let count = said.clone();
        let write = move |target: &str| {
            count.fetch_add(u32::from(target == "gpupool::once"), Ordering::Relaxed);
        };
        logging_by(write, || {
            start();
            let (function, mut blocks) = (function(), [0; 2]);
            blocks.iter_mut().for_each(|block| ok!(cuMemAlloc_v2(block, 2 << 20)));
            let [from, to] = blocks;
            let round = |value| {
                fill(function, from, value);
                ok!(cuMemcpyDtoDAsync_v2(to, from, 1 << 20, null_mut()));
                assert!(guard::is_outside());
                assert_eq!(read(to), value);
            };
            (0..8).for_each(round);
            let prepared = prepared(function, blocks);
            let (told, said_before) = (plant::TOLD.load(Ordering::Relaxed), said.load(Ordering::Relaxed));
            assert!(told >= 16, "{told} launches and copies were told of");
            plant::IS_ON.store(true, Ordering::Relaxed);
            planted(function, blocks, prepared);
            (8..40).for_each(round);
            assert_eq!(plant::TOLD.load(Ordering::Relaxed), told + 1, "nobody is told any more");
            assert_eq!(said.load(Ordering::Relaxed), said_before + 1, "it is said once");
            let after = memory();
            assert!(crate::backing::open::opened().is_some_and(|opened| opened.contains(after)), "the pool goes on");
            [from, to, after].into_iter().for_each(|block| ok!(cuMemFree_v2(block)));
        });
    });
}

#[test]
fn a_panic_where_a_launch_is_told_of_ends_all_moves_and_nothing_else() {
    let name = "a_panic_where_a_launch_is_told_of_ends_all_moves_and_nothing_else";
    let launch = |function, [block, _]: [u64; 2], ()| {
        fill(function, block, 8);
        assert!(guard::is_outside());
        assert_eq!(read(block), 8, "the kernel ran");
    };
    moves_end_and_nothing_else(name, |_, _| (), launch);
}

#[test]
fn a_panic_where_a_graph_s_launch_is_told_of_ends_all_moves_and_nothing_else() {
    let name = "a_panic_where_a_graph_s_launch_is_told_of_ends_all_moves_and_nothing_else";
    let captured = |function, [mut block, _]: [u64; 2]| {
        let (mut stream, mut graph, mut exec) = (null_mut(), null_mut(), null_mut());
        ok!(cuStreamCreate(&raw mut stream, 1));
        ok!(cuStreamBeginCapture_v2(stream, 2));
        let (mut count, mut value) = ((BYTES / 4) as u64, 8u32);
        let mut arguments = [(&raw mut block).cast(), (&raw mut count).cast(), (&raw mut value).cast()];
        ok!(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments.as_mut_ptr(), null_mut()));
        ok!(cuStreamEndCapture(stream, &raw mut graph));
        ok!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
        exec
    };
    moves_end_and_nothing_else(name, captured, |_, [block, _], exec| {
        ok!(cuGraphLaunch(exec, null_mut()));
        assert!(guard::is_outside());
        assert_eq!(read(block), 8, "the graph ran");
    });
}

#[test]
fn a_panic_where_a_copy_is_told_of_ends_all_moves_and_nothing_else() {
    let name = "a_panic_where_a_copy_is_told_of_ends_all_moves_and_nothing_else";
    let copy = |_, [from, to]: [u64; 2], ()| {
        ok!(cuMemcpyDtoDAsync_v2(to, from, 1 << 20, null_mut()));
        assert!(guard::is_outside());
        assert_eq!(read(to), 7, "the copy was made");
    };
    moves_end_and_nothing_else(name, |_, _| (), copy);
}

#[test]
fn whoever_writes_the_log_of_a_module_may_ask_what_is_loaded() {
    alone("whoever_writes_the_log_of_a_module_may_ask_what_is_loaded", || {
        start();
        let refused = Arc::new(Mutex::new(Vec::new()));
        let (written, asked_in_vain) = (Arc::new(AtomicU32::new(0)), refused.clone());
        let lines = written.clone();
        let write = move |target: &str| {
            lines.fetch_add(u32::from(matches!(target, "gpupool::module" | "gpupool::finding")), Ordering::Relaxed);
            if !module::can_be_asked() {
                asked_in_vain.lock().push(target.to_owned());
            }
        };
        logging_by(write, || {
            let mut loaded = null_mut();
            ok!(cuModuleLoadData(&raw mut loaded, PTX.as_ptr().cast()));
            module::judge();
            ok!(cuModuleUnload(loaded));
        });
        assert_eq!(written.load(Ordering::Relaxed), 3, "a load, a finding about the heap, an unload");
        assert_eq!(*refused.lock(), Vec::<String>::new());
    });
}

/// The memory that is being given away, a block's or the program's own, and how many of its pieces may not move or serve again.
static GIVEN: AtomicU64 = AtomicU64::new(0);
static ANCHORED: AtomicU32 = AtomicU32::new(0);

/// In a thread of its own, as whoever would free or move the block meanwhile.
extern "C" fn look_meanwhile() {
    let look = || {
        let given = GIVEN.load(Ordering::Acquire);
        let own = by_hand::pieces(given, 1).iter().filter(|piece| piece.stays).count();
        own + pieces(given, 1).iter().filter(|piece| !piece.anchors.is_empty()).count()
    };
    let anchored = thread::spawn(look).join().unwrap_or(0);
    ANCHORED.store(anchored as u32, Ordering::Release);
}

/// Looks at memory while the driver is in this call, which gives it away.
fn while_in(call: &CStr, block: u64, gives: impl FnOnce(u64)) -> u32 {
    // SAFETY: the process has loaded the simulated driver under this name, and the text is NUL-terminated.
    let after =
        unsafe { libc::dlsym(libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW), c"simcuda_after".as_ptr()) };
    assert!(!after.is_null());
    // SAFETY: the simulated driver gives this function that signature.
    let after: unsafe extern "C" fn(*const c_char, extern "C" fn()) = unsafe { std::mem::transmute(after) };
    GIVEN.store(block, Ordering::Release);
    ANCHORED.store(0, Ordering::Release);
    // SAFETY: the text is NUL-terminated, and the function lives as long as the process.
    unsafe { after(call.as_ptr(), look_meanwhile) };
    gives(block);
    ANCHORED.load(Ordering::Acquire)
}

#[test]
fn a_block_is_kept_in_its_place_before_anybody_has_a_handle_or_a_descriptor_of_it() {
    alone("a_block_is_kept_in_its_place_before_anybody_has_a_handle_or_a_descriptor_of_it", || {
        start();
        const WHOLE: usize = 32 << 20;
        let large = || {
            let mut address = 0;
            ok!(cuMemAlloc_v2(&raw mut address, WHOLE));
            address
        };
        let retained = while_in(c"cuMemRetainAllocationHandle", large(), |block| {
            let mut handle = 0;
            ok!(cuMemRetainAllocationHandle(&raw mut handle, block as *mut c_void));
        });
        let described = while_in(c"cuMemGetHandleForAddressRange", large(), |block| {
            let mut descriptor = -1;
            ok!(cuMemGetHandleForAddressRange((&raw mut descriptor).cast::<i32>().cast(), block, WHOLE, 1, 0));
        });
        let exported = while_in(c"cuMemExportToShareableHandle", memory(), |block| {
            let mut handle = cudarc::driver::sys::CUipcMemHandle { reserved: [0; 64] };
            ok!(cuIpcGetMemHandle(&raw mut handle, block));
        });
        assert_eq!((retained, described, exported), (1, 1, 1));
    });
}

/// Memory of the program's own, by its number and where it is mapped. It can be exported.
fn own_memory() -> (u64, u64) {
    let properties = Properties { handle_types: Properties::POSIX_FD, ..Properties::of(Place::Gpu(0)) };
    let (mut handle, mut address) = (0, 0);
    ok!(cuMemCreate(&raw mut handle, OWN, &raw const properties, 0));
    ok!(cuMemAddressReserve(&raw mut address, OWN, 0, 0, 0));
    ok!(cuMemMap(address, OWN, 0, handle, 0));
    (handle, address)
}

const OWN: usize = 2 << 20;

#[test]
fn memory_of_the_program_s_own_is_kept_in_its_place_before_anybody_else_has_it() {
    alone("memory_of_the_program_s_own_is_kept_in_its_place_before_anybody_else_has_it", || {
        start();
        let stays = |address| by_hand::pieces(address, 1)[0].stays;
        let (handle, address) = own_memory();
        assert!(!stays(address));
        // There is nothing to bind to, so the driver refuses, and the memory may go as before.
        let bound = [
            while_in(c"cuMulticastBindMem", address, |_| {
                // SAFETY: the call takes numbers.
                let result = unsafe { hooked::cuMulticastBindMem(1, 0, handle, 0, OWN, 0) };
                assert_eq!(result, CuResult::INVALID_VALUE);
            }),
            while_in(c"cuMulticastBindMem_v2", address, |_| {
                // SAFETY: the call takes numbers.
                let result = unsafe { hooked::cuMulticastBindMem_v2(1, 0, 0, handle, 0, OWN, 0) };
                assert_eq!(result, CuResult::INVALID_VALUE);
            }),
            while_in(c"cuLogicalEndpointBindMem", address, |_| {
                // SAFETY: the call takes numbers.
                let result = unsafe { hooked::cuLogicalEndpointBindMem(1, 0, 0, handle, 0, OWN as u64, 0) };
                assert_eq!(result, CuResult::INVALID_VALUE);
            }),
        ];
        assert_eq!((bound, stays(address)), ([1; 3], false));
        let exported = while_in(c"cuMemExportToShareableHandle", address, |_| {
            let mut descriptor = -1;
            ok!(cuMemExportToShareableHandle(
                (&raw mut descriptor).cast::<i32>().cast(),
                handle,
                Properties::POSIX_FD,
                0
            ));
        });
        assert_eq!((exported, stays(address)), (1, true));
    });
}
