//! `libgpupool.so`: preloaded into a CUDA program, it answers `cuMemAlloc` from a pool over all GPUs and the host.
//!
//! The way of one call: a program looks a driver function up ([`gpupool_interpose::dlsym`], [`hook::resolve`], or by linking)
//! and gets the trampoline of a row of [`hook::table`]; the trampoline asks [`run`] whether the shim takes part at all, runs
//! the row's body behind [`hook::boundary`], and the body either answers or makes the real call.
//!
//! `src/README.md` holds the code map and the invariants.

mod address;
mod agent;
mod backing;
mod bell;
mod bypass;
mod checkpoint;
mod clock;
mod control;
mod fence;
mod gate;
mod guard;
mod hook;
mod image;
mod latest;
mod live;
mod log;
mod nvml;
mod own_memory;
mod process;
mod recall;
mod restore;
mod run;
mod secret;
mod serve;
mod suspend;
mod taking;
mod tiers;
mod watch;

/// Registers what has to be registered before `main`, and does nothing else: the fork handler must be there before the
/// first fork, and the exit handler before any that the CUDA libraries register, so that it runs after them.
#[ctor::ctor(unsafe)]
fn register() {
    run::register();
}
