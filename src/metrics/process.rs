//! Which process a page is of, and whether that one still runs. A number of a process alone may be another's by now.

use serde::Serialize;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// What no two processes have in common, nor two programs that one process was, one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Identity {
    /// Which boot of the machine; zeros where the system does not tell.
    #[serde(skip)]
    pub boot: [u8; 16],
    /// When the process started, in clock ticks since the boot.
    pub started: u64,
    /// The PID namespace in which `pid` is its number; 0 where the system does not tell.
    pub namespace: u64,
    /// Where the stack of its program begins, which is another after each `exec`; 0 where the system does not tell.
    #[serde(skip)]
    pub image: u64,
    /// Its number.
    pub pid: u32,
}

/// Whether the process of a page still runs the program of that page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Life {
    /// It does.
    Running,
    /// It does, and is stopped (SIGSTOP, a debugger).
    Stopped,
    /// It does, and its control group is frozen (a container that is paused).
    Frozen,
    /// The process is gone, and its number may be another's.
    Gone,
    /// The process runs another program now (`exec`).
    Replaced,
    /// It is in another PID namespace (a container), where nobody here can look.
    Elsewhere,
    /// The system does not tell.
    Unknown,
}

impl Life {
    /// Whether the page is of no use to anybody.
    pub fn is_over(self) -> bool {
        matches!(self, Life::Gone | Life::Replaced)
    }

    /// Whether it answers nobody before somebody lets it go on.
    pub fn is_halted(self) -> bool {
        matches!(self, Life::Stopped | Life::Frozen)
    }

    /// For people.
    pub fn word(self) -> &'static str {
        match self {
            Life::Running => "running",
            Life::Stopped => "stopped",
            Life::Frozen => "frozen",
            Life::Gone => "gone",
            Life::Replaced => "replaced",
            Life::Elsewhere => "elsewhere",
            Life::Unknown => "unknown",
        }
    }
}

/// What `/proc/PID/stat` says of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// `R`, `S`, `T`, `Z`, …
    pub state: u8,
    /// When it started, in clock ticks since the boot.
    pub started: u64,
    /// Where its program's stack begins; 0 where we may not know.
    pub stack: u64,
}

/// See [`Stat`]. `None`: it cannot be seen.
pub fn stat(pid: u32) -> Option<Stat> {
    look(&format!("/proc/{pid}/stat")).ok().flatten()
}

/// Where a process stands among others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lineage {
    /// Who started it or, once that one has ended, whom it was left to.
    pub parent: u32,
    /// Its process group: what a shell takes for one job, and what a script and all that it starts are.
    pub group: u32,
    /// The session that it is in.
    pub session: u32,
}

/// See [`Lineage`]. `None`: it cannot be seen.
pub fn lineage(pid: u32) -> Option<Lineage> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text.rsplit(')').next()?.split_whitespace().skip(1);
    let mut next = || fields.next()?.parse().ok();
    Some(Lineage { parent: next()?, group: next()?, session: next()? })
}

/// How a process was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// By whom, past shells that stand between; 1 where that one has ended.
    pub by: u32,
    /// In which process group.
    group: u32,
    /// In which session.
    session: u32,
    /// How many shells those are.
    shells: u32,
}

impl Started {
    /// Whether both were started alike but for their process groups: some launchers give each rank one of its own.
    pub fn is_like(&self, other: &Self) -> bool {
        Self { group: other.group, ..*self } == *other
    }
}

/// See [`Started`]. `None`: it cannot be seen.
///
/// A shell is looked through that runs nothing else like it (`sh -c 'python x.py'`, a script around one program, also with a pipe behind it), and not the
/// one that its session begins with: what somebody types into a terminal, or a scheduler's script starts, is started by that shell. Programs of which one stands behind
/// a shell and another one does not were started in different ways.
pub fn started(pid: u32) -> Option<Started> {
    let Lineage { parent, group, session } = lineage(pid)?;
    let is_of_session = |pid: u32| lineage(pid).is_some_and(|other| other.session == session);
    // Who is left alone is given to the first process of the machine, or to one of another session (systemd's of this user) that takes such processes.
    if parent <= 1 || (pid != session && !is_of_session(parent)) {
        return Some(Started { by: 1, group, session, shells: 0 });
    }
    let (mut by, mut child, mut shells) = (parent, pid, 0);
    while by > 1 && by != session && is_shell_around(by, child) {
        match lineage(by) {
            Some(above) if above.parent > 1 && above.session == session => (child, by) = (by, above.parent),
            _ => break,
        }
        shells += 1;
    }
    Some(Started { by, group, session, shells })
}

/// Whether this process is a shell that has started that one and no other of the same program.
fn is_shell_around(shell: u32, child: u32) -> bool {
    const SHELLS: [&str; 8] = ["sh", "bash", "dash", "ash", "zsh", "ksh", "mksh", "busybox"];
    let program = |pid: u32| fs::read_link(format!("/proc/{pid}/exe")).ok();
    let is_shell = |path: &PathBuf| path.file_name().is_some_and(|name| SHELLS.iter().any(|shell| name == *shell));
    if !program(shell).as_ref().is_some_and(is_shell) {
        return false;
    }
    let (Some(own), Ok(children)) =
        (program(child), fs::read_to_string(format!("/proc/{shell}/task/{shell}/children")))
    else {
        return false;
    };
    let mut others = children.split_whitespace().filter_map(|pid| pid.parse().ok()).filter(|pid| *pid != child);
    // One of which that is not told may be the same.
    others.all(|other| program(other).is_some_and(|other| other != own))
}

/// Whether a process may be this user's: one of its user numbers (real, effective, saved, of files) is, or they cannot be seen.
pub fn may_be_of(pid: u32, owner: u32) -> bool {
    let Ok(text) = fs::read_to_string(format!("/proc/{pid}/status")) else { return true };
    let users = text.lines().find_map(|line| line.strip_prefix("Uid:"));
    users.is_none_or(|users| users.split_whitespace().any(|user| user.parse() == Ok(owner)))
}

fn look(path: &str) -> std::io::Result<Option<Stat>> {
    let stat = parse(&String::from_utf8_lossy(&fs::read(path)?));
    Ok(stat.map(|stat| Stat { started: stat.started.saturating_add_signed(-shift()), ..stat }))
}

/// Clock ticks by which this process is told that others started later than they did, and it itself: it is in a time namespace, as a process is that was stored
/// and brought back (CRIU), so that its clocks go on from where they were. Others are told the plain time.
fn shift() -> i64 {
    let Ok(text) = fs::read_to_string("/proc/self/timens_offsets") else { return 0 };
    shift_of(&text, i64::try_from(rustix::param::clock_ticks_per_second()).unwrap_or(100))
}

/// Of the file's text, with so many ticks a second.
fn shift_of(text: &str, ticks: i64) -> i64 {
    let offset = text.lines().find_map(|line| line.trim_start().strip_prefix("boottime"));
    let mut numbers = offset.unwrap_or_default().split_whitespace().map(str::parse::<i64>);
    let (Some(Ok(seconds)), Some(Ok(nanoseconds))) = (numbers.next(), numbers.next()) else { return 0 };
    seconds.saturating_mul(ticks).saturating_add(nanoseconds.saturating_mul(ticks) / 1_000_000_000)
}

/// The name of the process, in parentheses, may hold anything; behind it are numbers.
fn parse(text: &str) -> Option<Stat> {
    /// The first field behind the name.
    const FIRST: usize = 3;
    let fields: Vec<&str> = text.rsplit(')').next()?.split_whitespace().collect();
    let field = |number: usize| fields.get(number - FIRST);
    Some(Stat {
        state: *field(FIRST)?.as_bytes().first()?,
        started: field(22)?.parse().ok()?,
        stack: field(28).and_then(|stack| stack.parse().ok()).unwrap_or(0),
    })
}

impl Identity {
    /// Of this process. `None` where the system does not tell when it started, and nobody could tell it from a later one.
    pub fn own() -> Option<Self> {
        // Not through its number: `/proc` may be another namespace's.
        let Stat { started, stack, .. } = look("/proc/self/stat").ok()??;
        Some(Self { boot: boot(), started, namespace: namespace(), image: stack, pid: std::process::id() })
    }

    /// Whether the process still runs this program.
    pub fn life(&self) -> Life {
        let unknown = [0; 16];
        let boot = boot();
        if self.boot != unknown && boot != unknown && self.boot != boot {
            return Life::Gone;
        }
        match (self.namespace, namespace()) {
            (0, _) | (_, 0) => return Life::Unknown,
            (theirs, ours) if theirs != ours => return Life::Elsewhere,
            _ => {}
        }
        match look(&format!("/proc/{}/stat", self.pid)) {
            Ok(Some(stat)) if stat.state == b'Z' && has_living_thread(self.pid) => {
                self.judge(Stat { state: b'S', ..stat })
            }
            Ok(Some(stat)) => match self.judge(stat) {
                Life::Running if is_frozen(self.pid) => Life::Frozen,
                life => life,
            },
            Ok(None) => Life::Unknown,
            // The latter: it ended between the opening and the reading.
            Err(error) if error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(NO_SUCH_PROCESS) => {
                Life::Gone
            }
            Err(_) => Life::Unknown,
        }
    }

    /// Whether it was in a PID namespace in which nobody is left: a container that has ended. Known to whoever sees the processes of all of these; nobody else is told so.
    /// Asks about each process of the machine.
    pub fn is_deserted(&self) -> bool {
        let user = rustix::process::geteuid();
        let may_be_ours = |pid| user.is_root() || may_be_of(pid, user.as_raw());
        // The first process of all is in the first namespace, and may not be looked at.
        let is_there = |pid| match fs::metadata(format!("/proc/{pid}/ns/pid")) {
            Ok(other) => other.ino() == self.namespace,
            // Of one that has ended nothing is told, nor to anybody else of another user's.
            Err(_) => {
                let is_over = |stat: Stat| matches!(stat.state, b'Z' | b'X') && !has_living_thread(pid);
                pid != 1 && !stat(pid).is_none_or(is_over) && may_be_ours(pid)
            }
        };
        let own = namespace();
        if own != INITIAL || self.namespace == 0 || self.namespace == own {
            return false;
        }
        let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
        let mut numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()).peekable();
        numbers.peek().is_some() && !numbers.any(is_there)
    }

    fn judge(&self, stat: Stat) -> Life {
        let Stat { state, started, stack } = stat;
        // In a time namespace what a process is told of its own start is off by a part of a tick.
        if started.abs_diff(self.started) > 1 || matches!(state, b'Z' | b'X') {
            Life::Gone
        } else if stack != 0 && self.image != 0 && stack != self.image {
            Life::Replaced
        } else if matches!(state, b'T' | b't') {
            Life::Stopped
        } else {
            Life::Running
        }
    }
}

/// Whether a thread of a process lives whose main thread has left (`pthread_exit`): the system tells of the process what it tells of that one, which is over.
pub fn has_living_thread(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let state = |thread: fs::DirEntry| look(&thread.path().join("stat").to_string_lossy()).ok().flatten();
    threads.filter_map(state).any(|stat| !matches!(stat.state, b'Z' | b'X'))
}

/// Whether no thread of a process will do anything any more: each has ended, or has begun to. A process that is killed may take seconds to be gone, in which its memory is taken down.
pub fn is_all_ending(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let read = |thread: fs::DirEntry| fs::read(thread.path().join("stat")).ok();
    threads.filter_map(read).all(|text| is_ending(&String::from_utf8_lossy(&text)))
}

/// As `/proc/PID/task/TID/stat` tells of a thread.
fn is_ending(text: &str) -> bool {
    /// The kernel's `PF_EXITING` among its flags.
    const EXITING: u64 = 4;
    let mut fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    let state = fields.next();
    let flags = fields.nth(5).and_then(|flags| flags.parse::<u64>().ok());
    matches!(state, Some("Z" | "X")) || flags.is_some_and(|flags| flags & EXITING != 0)
}

/// Whether its control group is frozen, or one around that: the system tells of its threads that they sleep. Looked for where groups are by convention.
fn is_frozen(pid: u32) -> bool {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    is_any_frozen(&groups, |file| fs::read_to_string(file).ok())
}

/// `groups`: as in `/proc/PID/cgroup`.
fn is_any_frozen(groups: &str, read: impl Fn(&str) -> Option<String>) -> bool {
    groups.lines().any(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { return false };
        let path = path.trim_end_matches('/');
        let says = |file: String, word: &str| read(&file).is_some_and(|text| text.lines().any(|line| line == word));
        let mut second = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].into_iter();
        match controllers {
            "" => second.any(|mount| says(format!("{mount}{path}/cgroup.events"), "frozen 1")),
            _ => {
                controllers.split(',').any(|controller| controller == "freezer")
                    && says(format!("/sys/fs/cgroup/freezer{path}/freezer.state"), "FROZEN")
            }
        }
    })
}

const NO_SUCH_PROCESS: i32 = 3;

/// Which boot of the machine this is; zeros where the system does not tell.
fn boot() -> [u8; 16] {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let mut boot = [0; 16];
    for (byte, pair) in boot.iter_mut().zip(digits.chunks(2)) {
        *byte = std::str::from_utf8(pair).ok().and_then(|pair| u8::from_str_radix(pair, 16).ok()).unwrap_or(0);
    }
    boot
}

/// The PID namespace that the machine starts with, from which all others are seen (`PROC_PID_INIT_INO` of the kernel).
const INITIAL: u64 = 0xEFFF_FFFC;

/// The PID namespace that this process sees `/proc` from; 0 where the system does not tell.
fn namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "812 (a) b (c) S 1 812 812 0 -1 4194304 109 0 0 0 0 0 0 0 20 0 1 0 5571 2781184 397 \
                        18446744073709551615 94 95 140736 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0";

    #[test]
    fn a_name_may_look_like_fields() {
        assert_eq!(parse(LINE), Some(Stat { state: b'S', started: 5571, stack: 140_736 }));
        assert_eq!(parse("812 (a"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn a_time_namespace_shifts_what_is_told_of_a_start() {
        assert_eq!(shift_of("monotonic           0         0\nboottime            0         0\n", 100), 0);
        assert_eq!(shift_of("monotonic           9         0\nboottime           -1 440000000\n", 100), -56);
        assert_eq!(shift_of("monotonic           9         0\nboottime            2 990000000\n", 100), 299);
        assert_eq!([shift_of("", 100), shift_of("boottime x", 100)], [0, 0]);
        let identity = Identity { started: 5571, image: 140_736, ..Identity::default() };
        let life = |started| identity.judge(Stat { state: b'S', started, stack: 140_736 });
        assert_eq!(
            [life(5570), life(5572), life(5569), life(5573)],
            [Life::Running, Life::Running, Life::Gone, Life::Gone]
        );
    }

    #[test]
    fn a_thread_that_has_begun_to_end_does_nothing_any_more() {
        assert!(!is_ending(LINE));
        assert!(is_ending(&LINE.replace(") S ", ") Z ")));
        assert!(
            is_ending(&LINE.replace(" 4194304 ", " 4194308 ")) && !is_ending(&LINE.replace(" 4194304 ", " 4194312 "))
        );
        assert!(!is_ending("812 (a"));
    }

    /// How what a shell starts and tells first was started, and the shell's number.
    fn behind_a_shell(code: &str) -> (Option<Started>, u32) {
        use std::io::{BufRead, BufReader};
        use std::process::{Command, Stdio};
        let mut shell = Command::new("sh")
            .args(["-c", &format!("{code} & echo $!; read line; kill $(cat /proc/$$/task/$$/children) 2>/dev/null")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh starts");
        let mut said = String::new();
        BufReader::new(shell.stdout.take().expect("a pipe")).read_line(&mut said).expect("it says a number");
        let pid = said.trim().parse().expect("a number");
        // Each is a copy of the shell until it has begun its program.
        let by = shell.id();
        let program = |pid: &str| fs::read_link(format!("/proc/{pid}/exe")).ok();
        let children = || fs::read_to_string(format!("/proc/{by}/task/{by}/children")).expect("its children are told");
        while children().split_whitespace().any(|child| program(child) == program(&by.to_string())) {
            std::thread::yield_now();
        }
        let answer = started(pid);
        drop(shell.stdin.take());
        shell.wait().expect("it ends");
        (answer, by)
    }

    #[test]
    fn a_shell_around_one_program_is_looked_through_and_one_that_starts_several_is_not() {
        let (Some(Started { by, shells, .. }), _) = behind_a_shell("sleep 1000") else { panic!("nothing is told") };
        assert_eq!((by, shells), (std::process::id(), 1));
        let (Some(Started { by, shells, .. }), shell) = behind_a_shell("sleep 1000 & sleep 1000") else {
            panic!("nothing is told")
        };
        assert_eq!((by, shells), (shell, 0));
    }

    #[test]
    fn a_number_that_another_process_has_now_is_gone() {
        let page = Identity { started: 5571, image: 140_736, pid: 812, ..Identity::default() };
        let now = Stat { state: b'S', started: 5571, stack: 140_736 };
        assert_eq!(page.judge(now), Life::Running);
        assert_eq!(page.judge(Stat { state: b'T', ..now }), Life::Stopped);
        assert_eq!(page.judge(Stat { state: b'Z', ..now }), Life::Gone);
        assert_eq!(page.judge(Stat { started: 5573, ..now }), Life::Gone, "no number comes again within a tick");
        assert_eq!(page.judge(Stat { stack: 140_752, ..now }), Life::Replaced);
        assert_eq!(page.judge(Stat { stack: 0, ..now }), Life::Running, "not told to us, and so nothing is known");
    }

    #[test]
    fn a_group_of_either_version_may_be_frozen() {
        let of = |groups: &str, file: &str, text: &str| {
            is_any_frozen(groups, |asked| (asked == file).then(|| text.to_owned()))
        };
        let second = "1:name=systemd:/\n0::/system.slice/docker-1.scope\n";
        let events = "/sys/fs/cgroup/system.slice/docker-1.scope/cgroup.events";
        assert!(of(second, events, "populated 1\nfrozen 1\n") && !of(second, events, "populated 1\nfrozen 0\n"));
        let first = "7:freezer,cpu:/docker/1\n0::/\n";
        let state = "/sys/fs/cgroup/freezer/docker/1/freezer.state";
        assert!(of(first, state, "FROZEN\n") && !of(first, state, "THAWED\n"));
        assert!(!of("", state, "FROZEN\n") && !of("7:freezer", state, "FROZEN\n"));
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no /proc")]
    fn this_process_runs() {
        let own = Identity::own().unwrap();
        assert_eq!(own.life(), Life::Running);
        assert_eq!(Identity { started: own.started + 2, ..own }.life(), Life::Gone);
        assert_eq!(Identity { image: own.image + 16, ..own }.life(), Life::Replaced);
        assert_eq!(Identity { boot: [7; 16], ..own }.life(), Life::Gone, "another boot's");
        assert_eq!(Identity { namespace: own.namespace + 1, pid: u32::MAX >> 1, ..own }.life(), Life::Elsewhere);
    }
}
