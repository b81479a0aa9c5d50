//! What the library does in this process: the [`Phase`] (Idle → Starting → Active → Closed, Passing or Forked) and the settings.
//!
//! This is what everything else stands on: it is asked from everywhere and asks nobody. Who moves it on is in `run`.

use crate::{guard, log};
use gpupool_config::{Problem, Rank, Settings};
use gpupool_cuda as cuda;
use gpupool_events::Panic;
use gpupool_interpose::errno::Errno;
use gpupool_interpose::{Api, dlsym};
use once_cell::race::OnceBox;
use std::ffi::{CStr, CString};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU8, Ordering};

/// How far a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// No driver function was called yet. A process that stays here never notices the library.
    Idle,
    /// One thread reads the settings; calls of others pass through until it is done, rather than wait for it.
    Starting,
    /// Hooks do their work.
    Active,
    /// Something inside failed: live blocks keep working, no new ones are made.
    Closed,
    /// Everything passes through: switched off, or a bad setting.
    Passing,
    /// In the child of a fork: everything passes through, and its first use of the driver is reported as a finding.
    Forked,
}

/// What moves a process on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A function of the driver is called.
    Called,
    /// The start is over, and hooks do their work from now on.
    Started,
    /// The start found that everything has to pass: it is switched off, a setting is wrong, or it failed.
    Declined,
    /// Something inside failed.
    Broke,
    /// This is the child of a fork.
    Forked,
    /// The child of a fork uses the driver, and that is told about.
    Used,
}

impl Phase {
    /// In the order of their numbers.
    const ALL: [Self; 6] = [Self::Idle, Self::Starting, Self::Active, Self::Closed, Self::Passing, Self::Forked];

    /// Where an event leads; `None` where it changes nothing.
    fn after(self, event: Event) -> Option<Self> {
        match (self, event) {
            (Self::Idle, Event::Called) => Some(Self::Starting),
            (Self::Starting, Event::Started) => Some(Self::Active),
            // The thread that was starting is not in the child, so nobody would end the start there.
            (Self::Starting, Event::Declined | Event::Forked) => Some(Self::Passing),
            (Self::Active, Event::Broke) => Some(Self::Closed),
            (Self::Active | Self::Closed, Event::Forked) => Some(Self::Forked),
            (Self::Forked, Event::Used) => Some(Self::Passing),
            _ => None,
        }
    }
}

/// The phase that a process is in, which all its threads read. Nothing but atomics, since it is also moved on in the child of a
/// fork, where another thread's lock would stay locked.
struct PhaseCell(AtomicU8);

impl PhaseCell {
    const fn new() -> Self {
        Self(AtomicU8::new(Phase::Idle as u8))
    }

    #[inline]
    fn phase(&self) -> Phase {
        Phase::ALL[usize::from(self.0.load(Ordering::Acquire) % Phase::ALL.len() as u8)]
    }

    /// Whether this event, here and now, moved the process on. Of several threads to which the same happens, one is told so.
    fn happened(&self, event: Event) -> bool {
        let mut phase = self.phase();
        while let Some(next) = phase.after(event) {
            if self.0.compare_exchange(phase as u8, next as u8, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return true;
            }
            phase = self.phase();
        }
        false
    }

    #[inline]
    fn is_open(&self) -> bool {
        self.0.load(Ordering::Acquire) == Phase::Active as u8
    }

    #[inline]
    fn is_active(&self) -> bool {
        let phase = self.0.load(Ordering::Acquire);
        phase == Phase::Active as u8 || phase == Phase::Closed as u8
    }
}

static PHASE: PhaseCell = PhaseCell::new();
static SETTINGS: OnceBox<Settings> = OnceBox::new();
static RANK: OnceBox<Option<Rank>> = OnceBox::new();
/// Why allocations go to the driver, once they do.
static WHY: OnceBox<CString> = OnceBox::new();

/// How far this process is.
#[inline]
pub fn phase() -> Phase {
    PHASE.phase()
}

/// Something happened to this process; whether that moved it on. `false` where another thread was first, or where the process is
/// in a phase in which this changes nothing.
pub fn happened(event: Event) -> bool {
    PHASE.happened(event)
}

/// Whether new blocks may be made.
#[inline]
pub fn is_open() -> bool {
    PHASE.is_open()
}

/// Whether the library stands where hooks take effect: before the C library in the search order, by a preload or because
/// the program was linked with it. Where a program has only opened it, contexts, captures and launches go unseen, and no
/// more is known of them than the driver can be asked at the moment.
pub fn is_preloaded() -> bool {
    static KNOWN: OnceBox<bool> = OnceBox::new();
    *KNOWN.get_or_init(|| Box::new(dlsym::is_interposed()))
}

/// Whether the process has rights that who started it does not have: a set-user-ID or set-group-ID file gave it these, or one with
/// capabilities. Its environment is somebody else's then, and names nothing that may be opened with its rights.
pub fn has_rights_of_its_file() -> bool {
    // SAFETY: the call takes a number and reads what the kernel gave the process.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// The part that the shim plays now, as numbers of the C interface see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Idle,
    Active,
    Closed,
    Passing,
}

impl From<Phase> for Part {
    fn from(phase: Phase) -> Self {
        match phase {
            Phase::Idle | Phase::Starting => Part::Idle,
            Phase::Active => Part::Active,
            Phase::Closed => Part::Closed,
            Phase::Passing | Phase::Forked => Part::Passing,
        }
    }
}

/// See [`Part`]. Starts nothing.
pub fn part() -> Part {
    phase().into()
}

/// Notes why allocations go to the driver; the first reason stays.
pub fn explain(why: impl Into<Vec<u8>>) {
    let _ = WHY.set(Box::new(CString::new(why).unwrap_or_default()));
}

/// Why allocations go to the driver, empty where they do not.
pub fn why() -> &'static CStr {
    match part() {
        Part::Idle => c"no function of the CUDA driver was called yet",
        Part::Closed => c"an internal error closed the pool; the log says where",
        _ if phase() == Phase::Forked => AFTER_FORK,
        Part::Active | Part::Passing => WHY.get().map_or(c"", CString::as_c_str),
    }
}

/// Why nothing is done in the child of a fork.
pub const AFTER_FORK: &CStr = c"this process was forked from one that used CUDA, which does not survive a fork";

/// Whether hooks do their work, at least for what was handed out.
#[inline]
pub fn is_active() -> bool {
    PHASE.is_active()
}

/// The settings that the process started with. Hooks run only after the start has stored them; the fallback is for paths that
/// have none (the exit handler of a process that never became active).
pub fn settings() -> &'static Settings {
    SETTINGS.get_or_init(|| Box::new(Settings::default()))
}

/// What the process was told as it started: the program may change its environment later.
pub fn remember(settings: Settings, rank: Option<Rank>) {
    let _ = SETTINGS.set(Box::new(settings));
    let _ = RANK.set(Box::new(rank));
}

/// Which rank of a job this process is, if a launcher gave it a number.
pub fn rank() -> Option<&'static Rank> {
    RANK.get().and_then(Option::as_ref)
}

static VISIBLE_DEVICES: OnceBox<Option<String>> = OnceBox::new();

/// CUDA has read this as `CUDA_VISIBLE_DEVICES`.
pub fn cuda_read(visible_devices: Option<String>) {
    let _ = VISIBLE_DEVICES.set(Box::new(visible_devices));
}

/// `CUDA_VISIBLE_DEVICES` as CUDA read it.
pub fn visible_devices() -> Option<String> {
    VISIBLE_DEVICES.get().cloned().flatten()
}

/// Says what is wrong with the settings and lets everything pass: a limit that was misspelt must not be half obeyed.
pub fn refuse(problems: &[Problem]) {
    let mut text = String::new();
    for problem in problems {
        text.push_str(&format!("gpupool: error: {problem}\n"));
    }
    text.push_str("gpupool: this program runs without gpupool until that is corrected\n");
    log::write_stderr(&text);
    let why = problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    log::verdict::apart(&why);
    explain(why);
    happened(Event::Declined);
}

/// For what calls without a boundary do now and then, beside the driver's own call: what may lock, allocate, log and ask the driver.
/// Inside a hook, without being cancelled, `errno` is kept, and no panic passes; `None` after one.
#[cold]
pub fn contained<T>(api: Api, act: impl FnOnce() -> T) -> Option<T> {
    let (_errno, _inside) = (Errno::keep(), guard::enter_sheltered());
    // AssertUnwindSafe: after a panic the pool is closed for allocations, which is what may be half changed.
    catch_unwind(AssertUnwindSafe(act)).inspect_err(|_| broken(api)).ok()
}

/// A body panicked: no new blocks from now on, what was handed out stays valid. The panic hook has said where.
#[cold]
pub fn broken(api: Api) {
    happened(Event::Broke);
    // It may be the log that failed, and nobody behind this catches its second panic.
    let _ = std::panic::catch_unwind(|| {
        log::emit(|| {
            let name = api.name();
            let text = format!(
                "internal error in {name}: the pool makes no new blocks, memory handed out stays valid; please report it"
            );
            (Panic { place: None, api: Some(name.to_owned()) }, text)
        });
    });
}

/// The driver, or one line in the log about why there is none.
pub fn driver() -> Option<&'static cuda::Driver> {
    cuda::get().inspect_err(|reason| log::warn_once("driver", reason)).ok()
}

#[cfg(test)]
mod tests {
    use super::Phase::{Active, Closed, Forked, Idle, Passing, Starting};
    use super::*;
    use std::sync::Barrier;

    const EVENTS: [Event; 6] =
        [Event::Called, Event::Started, Event::Declined, Event::Broke, Event::Forked, Event::Used];

    /// A process to which these things happened, one after the other.
    fn process(events: &[Event]) -> PhaseCell {
        let process = PhaseCell::new();
        for event in events {
            process.happened(*event);
        }
        process
    }

    /// A process in this phase.
    fn process_in(phase: Phase) -> PhaseCell {
        let process = PhaseCell(AtomicU8::new(phase as u8));
        assert_eq!(process.phase(), phase);
        process
    }

    /// Where one event leads from each phase, in the order of [`Phase::ALL`], and whether that is told.
    fn led_by(event: Event) -> [(Phase, bool); 6] {
        Phase::ALL.map(|phase| {
            let process = process_in(phase);
            let moved = process.happened(event);
            (process.phase(), moved)
        })
    }

    /// Lets this happen to one process on several threads at once; how many of them were told that they moved it on.
    fn at_once(process: &PhaseCell, events: &[Event]) -> usize {
        let together = Barrier::new(events.len());
        std::thread::scope(|scope| {
            let thread = |event: &Event| {
                let (event, together) = (*event, &together);
                scope.spawn(move || {
                    together.wait();
                    process.happened(event)
                })
            };
            let threads: Vec<_> = events.iter().map(thread).collect();
            threads.into_iter().map(|thread| usize::from(thread.join().unwrap())).sum()
        })
    }

    #[test]
    fn what_rows_without_a_boundary_do_is_inside_a_hook_and_keeps_its_panics() {
        let answer = contained(Api("cuLaunchKernel"), || {
            assert!(!guard::is_outside());
            panic!("planted");
        });
        assert_eq!(answer, None::<()>);
        assert!(guard::is_outside());
    }

    #[test]
    fn a_process_starts_at_its_first_call_only() {
        let process = PhaseCell::new();
        assert_eq!(process.phase(), Idle);
        assert!(process.happened(Event::Called));
        assert!(!process.happened(Event::Called), "the second one finds it starting");
        assert_eq!(process.phase(), Starting);
        assert!(process.happened(Event::Started));
        assert!(!process.happened(Event::Called));
        assert_eq!(process.phase(), Active);
    }

    #[test]
    fn of_threads_that_start_at_once_one_does() {
        for _ in 0..100 {
            let process = PhaseCell::new();
            assert_eq!(at_once(&process, &[Event::Called; 4]), 1);
            assert_eq!(process.phase(), Starting);
        }
    }

    #[test]
    fn a_start_that_is_declined_passes_for_good() {
        let process = process(&[Event::Called, Event::Declined]);
        assert_eq!(process.phase(), Passing);
        for event in EVENTS {
            assert!(!process.happened(event), "{event:?}");
        }
        let declined = led_by(Event::Declined).map(|(_, moved)| moved);
        assert_eq!(declined, [false, true, false, false, false, false], "once it has started it is not switched off");
    }

    #[test]
    fn what_breaks_closes_what_is_active_and_nothing_else() {
        let expected =
            [(Idle, false), (Starting, false), (Closed, true), (Closed, false), (Passing, false), (Forked, false)];
        assert_eq!(led_by(Event::Broke), expected);
    }

    #[test]
    fn a_child_of_a_fork_passes_unless_the_driver_was_never_called() {
        let expected =
            [(Idle, false), (Passing, true), (Forked, true), (Forked, true), (Passing, false), (Forked, false)];
        assert_eq!(led_by(Event::Forked), expected);
    }

    #[test]
    fn a_child_of_a_fork_is_told_of_its_use_once() {
        let process = process(&[Event::Called, Event::Started, Event::Forked]);
        assert_eq!(at_once(&process, &[Event::Used; 4]), 1);
        assert_eq!(process.phase(), Passing);
        let used = led_by(Event::Used).map(|(_, moved)| moved);
        assert_eq!(used, [false, false, false, false, false, true], "only the child of a fork");
    }

    #[test]
    fn threads_that_break_at_once_close_once_and_a_fork_counts_in_any_order() {
        for _ in 0..100 {
            let process = process_in(Active);
            assert_eq!(at_once(&process, &[Event::Broke; 4]), 1);
            assert_eq!(process.phase(), Closed);
            let process = process_in(Active);
            at_once(&process, &[Event::Broke, Event::Forked]);
            assert_eq!(process.phase(), Forked);
        }
    }

    #[test]
    fn what_hooks_do_in_each_phase() {
        let hooks = |phase| (process_in(phase).is_active(), process_in(phase).is_open(), Part::from(phase));
        let expected = [
            (false, false, Part::Idle),
            (false, false, Part::Idle),
            (true, true, Part::Active),
            (true, false, Part::Closed),
            (false, false, Part::Passing),
            (false, false, Part::Passing),
        ];
        assert_eq!(Phase::ALL.map(hooks), expected);
    }

    /// The phase that a story leads to, told by what has happened up to then and not by steps.
    fn told(story: &[Event]) -> Phase {
        let first = |event, from: usize| story[from..].iter().position(|other| *other == event).map(|at| from + at + 1);
        let Some(called) = first(Event::Called, 0) else { return Idle };
        let given_up =
            |until: usize| story[called..until].iter().any(|event| matches!(event, Event::Declined | Event::Forked));
        let Some(started) = first(Event::Started, called) else {
            return if given_up(story.len()) { Passing } else { Starting };
        };
        if given_up(started) {
            return Passing;
        }
        match first(Event::Forked, started) {
            Some(forked) if first(Event::Used, forked).is_some() => Passing,
            Some(_) => Forked,
            None if first(Event::Broke, started).is_some() => Closed,
            None => Active,
        }
    }

    #[test]
    fn no_story_leads_back() {
        // How far each phase is from the beginning, in the order of `Phase::ALL`: a child that was told of its use passes.
        let far = |phase| [0, 1, 2, 3, 5, 4][phase as usize];
        const LENGTH: u32 = 6;
        for number in 0..EVENTS.len().pow(LENGTH) {
            let story: Vec<Event> =
                (0..LENGTH).map(|at| EVENTS[number / EVENTS.len().pow(at) % EVENTS.len()]).collect();
            let process = PhaseCell::new();
            for (at, event) in story.iter().enumerate() {
                let before = process.phase();
                let moved = process.happened(*event);
                let phase = process.phase();
                assert_eq!(phase, told(&story[..=at]), "{story:?} up to {at}");
                assert!(if moved { far(before) < far(phase) } else { before == phase }, "{story:?} at {at}");
            }
        }
    }
}
