//! A program that has used no GPU for long is suspended by itself (`GPUPOOL_IDLE_SUSPEND`), and resumed by the first call that has to wait
//! for that.
//!
//! What counts is what the library counts in any case: launches, copies, other submitted work, allocations. A program that is about to
//! work again loses the time that its memory takes to leave and to come back, once in that time at most.

use crate::checkpoint;
use crate::log;
use crate::process;
use crate::recall::siblings;
use crate::suspend::{self, Target};
use crate::watch::context;
use gpupool_config::Mode;
use std::path::Path;
use std::time::{Duration, Instant};

/// Looks in the time after which a program is suspended: it is so by a part of that late, at most.
const LOOKS: u32 = 4;
/// How long the work of a program that submits nothing may still take.
const PATIENCE: Duration = Duration::from_millis(200);

/// Whether programs are suspended by themselves.
pub fn is_wanted() -> bool {
    let settings = process::settings();
    settings.idle_suspend.is_some() && matches!(settings.mode, Mode::Pool | Mode::Spill)
}

pub struct Dormant {
    after: Duration,
    /// What was counted, and since when it has been that.
    counted: (u64, Instant),
    looked: Option<Instant>,
    /// How many suspensions were over then.
    over: u64,
}

impl Dormant {
    /// `None` where nobody is suspended.
    pub fn new() -> Option<Self> {
        let after = process::settings().idle_suspend.filter(|_| is_wanted())?;
        Some(Self { after, counted: (0, Instant::now()), looked: None, over: 0 })
    }

    /// Looks, if it is time to; how long nothing need be done.
    pub fn look(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let step = self.after / LOOKS;
        let left = self.looked.map_or(Duration::ZERO, |looked| step.saturating_sub(now - looked));
        if !left.is_zero() {
            return Some(left);
        }
        self.looked = Some(now);
        // Its own calls wake it, and others may resume it.
        if suspend::since() != 0 {
            self.counted.1 = now;
            return Some(self.after);
        }
        let (counted, over) = (used(), suspend::over());
        // The call that had it come back has not been made yet, and would wait again and again where that takes longer than a program may rest.
        if counted != self.counted.0 || over != std::mem::replace(&mut self.over, over) {
            self.counted = (counted, now);
        } else if now - self.counted.1 >= self.after && !checkpoint::is_under_way() && !is_rank() {
            // What keeps it from that may be over by then.
            self.counted.1 = now;
            let folder = process::settings().idle_suspend_to.clone();
            let target = folder.map_or(Target::Anywhere, Target::Folder);
            match suspend::suspend_by_itself(&target, now + PATIENCE) {
                Ok(_) => return Some(self.after),
                // A folder that cannot be used is not used the next time either, and nobody looks for that.
                Err(why) if matches!(&target, Target::Folder(folder) if names(&why, folder)) => {
                    log::warn_once(
                        "suspend",
                        format_args!("GPUPOOL_IDLE_SUSPEND: the program is not suspended, because {why}"),
                    );
                }
                Err(why) => {
                    tracing::debug!(target: "gpupool::memory", about = "suspend", "GPUPOOL_IDLE_SUSPEND: not suspended: {why}");
                }
            }
        }
        Some(step)
    }
}

/// Whether what went wrong is told of this folder, as it was given or as it is from the root.
fn names(why: &str, folder: &Path) -> bool {
    let whole = std::path::absolute(folder).unwrap_or_default();
    [folder, &whole].into_iter().any(|path| !path.as_os_str().is_empty() && why.starts_with(&*path.to_string_lossy()))
}

/// Whether this is one of several ranks, which is suspended with all others alone: the next of them that meets it in a collective would wait until it is back, and NCCL's watchdog
/// may end it meanwhile.
fn is_rank() -> bool {
    let others = siblings::others();
    if others > 0 {
        log::warn_once(
            "suspend-rank",
            format_args!(
                "GPUPOOL_IDLE_SUSPEND: this process is not suspended by itself, because {} of its job {} on this host, which may wait for it in a collective: `gpupool suspend --job {}` \
                 suspends all of them together (said once)",
                if others == 1 { "another rank".to_owned() } else { format!("{others} other ranks") },
                if others == 1 { "is" } else { "are" },
                std::process::id()
            ),
        );
    }
    others > 0
}

/// All uses of GPUs so far.
fn used() -> u64 {
    context::all().iter().map(|context| context.usage().uses()).sum()
}
