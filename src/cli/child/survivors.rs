//! Processes that outlive the program which started them: they may do anything yet.

use std::mem::MaybeUninit;
use std::ptr;
use std::time::{Duration, Instant};

/// How long they are waited for. Helpers that end when the program has, as Python's resource tracker does, take less.
const PATIENCE: Duration = Duration::from_secs(3);

/// A process that outlived the program and is still there.
pub struct Survivor {
    /// Its number.
    pub pid: u32,
    /// What it is called, as `ps` says it.
    pub name: String,
}

/// Lets every process below this one be left to it when its parent ends. Where the kernel does not, none is seen.
pub fn adopt() {
    // SAFETY: takes a number and touches no memory.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1 as libc::c_ulong, 0, 0, 0) };
}

/// Waits until no child is left, for [`PATIENCE`], or until a signal comes for us: whoever sent it waits for our end. `signals`
/// are blocked.
pub fn wait(signals: &libc::sigset_t) -> Vec<Survivor> {
    let until = Instant::now() + PATIENCE;
    while reap() && !list().is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || !is_of_a_child(signals, left) {
            return list();
        }
    }
    Vec::new()
}

/// Takes the children that have ended; whether others are left.
fn reap() -> bool {
    loop {
        // SAFETY: no status is wanted, and NULL says so.
        match unsafe { libc::waitpid(-1, ptr::null_mut(), libc::WNOHANG) } {
            0 => return true,
            -1 => return false,
            _ => {}
        }
    }
}

/// Whether the next of `signals` within this time is that a child ended.
fn is_of_a_child(signals: &libc::sigset_t, within: Duration) -> bool {
    let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
    let within = libc::timespec {
        tv_sec: libc::time_t::try_from(within.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: within.subsec_nanos().into(),
    };
    // SAFETY: `signals` is an initialised set, `info` is writable and `within` outlives the call.
    unsafe { libc::sigtimedwait(signals, info.as_mut_ptr(), &raw const within) == libc::SIGCHLD }
}

/// Whether this is the helper of `GPUPOOL_LENDERS=awake`, which uses no program's memory and may have others to serve.
fn is_lenders_helper(pid: u32) -> bool {
    let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    command.starts_with(b"gpupool\0lenders\0")
}

/// The children that there are and that count.
fn list() -> Vec<Survivor> {
    let own = std::process::id();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let survivor = |pid: u32| {
        let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
        let stat = String::from_utf8_lossy(&stat);
        // The name is in parentheses and may have some itself.
        let (before, behind) = stat.rsplit_once(')')?;
        let parent: u32 = behind.split_whitespace().nth(1)?.parse().ok()?;
        let (_, name) = before.split_once('(')?;
        (parent == own && !is_lenders_helper(pid)).then(|| Survivor { pid, name: name.to_owned() })
    };
    let mut survivors: Vec<Survivor> = pids.filter_map(survivor).collect();
    survivors.sort_by_key(|survivor| survivor.pid);
    survivors
}
