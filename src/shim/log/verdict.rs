//! What this process finds, for `gpupool run --fail-on`: past every filter, and past the log.
//!
//! The process has a file of its own in the folder that `GPUPOOL_VERDICTS` names; [`gpupool_events::Verdict`] is its format.
//! The file is opened for each line and no descriptor is held, since a program may close it or have none to spare. A line that
//! could not be written, as by a process that is another user's by now, goes to the spare file, which is mapped
//! ([`gpupool_events::Spare`]). Where that has no room it waits for the next one. While one is missing the file lacks its last
//! line, and whoever reads it knows that not everything is known.
//!
//! What is said where a process leaves by `_exit` is said by a handler of a signal, too, or by the child of a `vfork`: there,
//! and for the file `processes`, nothing is allocated, no lock is taken, and nothing of this library is changed.

use std::ffi::{CStr, CString, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr::{null_mut, slice_from_raw_parts_mut};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use gpupool_config::VERDICTS;
use gpupool_events::{Attendance, Began, FindingMade, Present, RankOnGpu, Spare, Verdict, VerdictLine};
use once_cell::race::OnceBox;
use parking_lot::Mutex;

use super::{output, stderr};
use crate::clock;
use crate::own_memory::{self, Text};
use gpupool_interpose::cancel;

/// The file of one process. It is made once and never freed; a child of a fork makes its own.
struct Own {
    pid: u32,
    path: PathBuf,
    /// `path` as a C string, for code that must not allocate.
    c_path: CString,
    /// Findings made, written or not.
    made: AtomicU64,
    /// Lines that could not be written yet.
    waiting: Mutex<Waiting>,
    /// How many lines are not in the file: those, and what is just being written.
    behind: AtomicU64,
}

/// Whole lines, and how many.
#[derive(Default)]
struct Waiting {
    text: Vec<u8>,
    lines: u64,
}

static OWN: AtomicPtr<Own> = AtomicPtr::new(std::ptr::null_mut());

/// The file of this process, if one was asked for and made.
fn own() -> Option<&'static Own> {
    // SAFETY: null, or a value that was leaked.
    let own = unsafe { OWN.load(Ordering::Acquire).as_ref() };
    own.filter(|own| own.pid == std::process::id())
}

/// What was named when the library was loaded: the folder, and the file in it that tells who is there.
struct Told {
    folder: OsString,
    attendance: CString,
    /// `GPUPOOL_VERDICTS` as an environment has it.
    variable: CString,
}

static TOLD: OnceBox<Told> = OnceBox::new();
/// The process that the library was loaded into, if a folder was named. A child of its own by `fork` has not been loaded into.
static LOADED: AtomicU32 = AtomicU32::new(0);
/// The process that last said it becomes another program; of a child of `vfork` its parent knows.
static BECOMES: AtomicU32 = AtomicU32::new(0);

/// Before `main`: a program may clear or change its environment before it first calls the driver.
pub fn remember_folder() {
    let Some(folder) = std::env::var_os(VERDICTS).filter(|folder| !folder.is_empty()) else { return };
    // The environment has no NUL in it.
    let Ok(attendance) = CString::new(Path::new(&folder).join(Attendance::FILE).as_os_str().as_bytes()) else { return };
    let Ok(variable) = CString::new([VERDICTS.as_bytes(), b"=", folder.as_bytes()].concat()) else { return };
    map_spare(&folder);
    let _ = TOLD.set(Box::new(Told { folder, attendance, variable }));
    LOADED.store(std::process::id(), Ordering::Relaxed);
    present(Present::Loaded);
}

/// The spare file, mapped for good; null where there is none.
static SPARE: AtomicPtr<AtomicU32> = AtomicPtr::new(null_mut());

/// Maps the spare file, as long as this process has a way to it. Without it what cannot be written stays unknown.
fn map_spare(folder: &OsString) {
    let open = |path| OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path);
    let Ok(file) = open(Path::new(folder).join(Spare::FILE)) else { return };
    // A shorter one has addresses behind its end, at which the program would be ended.
    if file.metadata().is_ok_and(|file| file.len() >= Spare::BYTES as u64) {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping of an open file, at an address of the kernel's choice.
        let address = unsafe { libc::mmap(null_mut(), Spare::BYTES, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if address != libc::MAP_FAILED {
            SPARE.store(address.cast(), Ordering::Release);
        }
    }
}

/// Puts whole lines for the file called `name` into the spare file; whether they are there. Makes no system call and allocates
/// nothing.
fn spare(name: &[u8], lines: &[u8]) -> bool {
    let words = slice_from_raw_parts_mut(SPARE.load(Ordering::Acquire), Spare::BYTES / size_of::<AtomicU32>());
    // SAFETY: null, or the mapping of that size, which is never removed, aligned to pages, and written to by atomics alone.
    unsafe { words.as_ref() }.is_some_and(|words| Spare::new(words).add(name, lines))
}

/// Whether anybody wants to know what is found.
pub fn is_asked() -> bool {
    TOLD.get().is_some()
}

/// Says to the file `processes` how it stands with this process. What can be written neither there nor to the spare file is missing,
/// and then it is not known how this process ended.
fn present(how: Present) {
    present_as(how, std::process::id(), std::iter::empty());
}

/// Tells the wrapper that the process `pid` is there, and which program it runs; see [`present`].
fn present_as(how: Present, pid: u32, program: impl Iterator<Item = u8>) {
    let Some(told) = TOLD.get() else { return };
    let mut program = program.peekable();
    // On the stack, of which the handler of a signal may have little.
    let mut line = [0; 512];
    let mut rest = &mut line[..];
    let _ = write!(rest, "{} {pid}", how.word());
    if program.peek().is_some() {
        // What there is no room for is cut off, and a line feed in it is not the line's. The longest word and number have room.
        let _ = rest.write_all(b" ");
        for byte in program.take(rest.len() - 1) {
            let _ = rest.write_all(&[if byte == b'\n' { b'?' } else { byte }]);
        }
    }
    let _ = rest.write_all(b"\n");
    let length = 512 - rest.len();
    let line = &line[..length];
    if !append_plainly(&told.attendance, line) {
        let mut words = [0; 512];
        let mut rest = &mut words[..];
        let behind = line.get(how.word().len()..).unwrap_or_default();
        let _ = rest.write_all(how.unheard().word().as_bytes());
        let _ = rest.write_all(&behind[..behind.len().min(rest.len())]);
        let length = 512 - rest.len();
        let _ = spare(Attendance::FILE.as_bytes(), &words[..length]);
    }
}

/// This process, or a child of `vfork`, becomes the program at this path if nothing goes wrong.
/// `is_given`: with an environment that names the library and the folder.
pub fn becomes(program: impl Iterator<Item = u8>, is_given: bool) {
    let _sheltered = cancel::shelter();
    let pid = std::process::id();
    BECOMES.store(pid, Ordering::Relaxed);
    present_as(if is_given { Present::BecomesGiven } else { Present::Becomes }, pid, program);
}

/// The process `pid`, 0 where nobody tells, was started as the program at this path.
pub fn started_beside(pid: libc::pid_t, program: impl Iterator<Item = u8>, is_given: bool) {
    let _sheltered = cancel::shelter();
    present_as(if is_given { Present::StartedGiven } else { Present::Started }, pid.cast_unsigned(), program);
}

/// Whether a program with the environment at this address has the library loaded into it, if it has no rights of its own, and
/// tells the same folder. A library that is named by its path must be there, as it is not in another root folder. Whoever
/// starts a program with what cannot be read is told so by the kernel, and not by a signal of ours.
pub fn is_given(environment: usize) -> bool {
    let Some(told) = TOLD.get() else { return false };
    let (mut has_folder, mut has_library) = (false, false);
    for variable in own_memory::list(environment) {
        let mut text = Text::at(variable);
        let is = |name: u8| text.clone().next() == Some(name);
        if is(b'G') {
            has_folder |= text.eq(told.variable.to_bytes().iter().copied());
        } else if is(b'L') && b"LD_PRELOAD=".iter().all(|byte| text.next() == Some(*byte)) {
            has_library |= names_this_library(text);
        }
    }
    has_folder && has_library
}

/// Whether an element of `LD_PRELOAD` names this library, by the name that it is installed under.
fn names_this_library(text: impl Iterator<Item = u8>) -> bool {
    let mut element = Element::default();
    let mut is_named = false;
    for byte in text {
        if matches!(byte, b':' | b' ') {
            is_named |= std::mem::take(&mut element).is_this_library();
        } else {
            element.push(byte);
        }
    }
    is_named || element.is_this_library()
}

/// One element of `LD_PRELOAD`.
struct Element {
    /// As a C string, as far as there is room.
    path: [u8; 1024],
    length: usize,
    /// How many bytes of [`LIBRARY`] stand behind the last slash, and whether nothing else does.
    name: Option<usize>,
    is_path: bool,
}

/// What this library is called where it is installed.
const LIBRARY: &[u8] = b"libgpupool.so";

impl Default for Element {
    fn default() -> Self {
        Self { path: [0; 1024], length: 0, name: Some(0), is_path: false }
    }
}

impl Element {
    fn push(&mut self, byte: u8) {
        if let Some(room) = self.path.get_mut(self.length) {
            *room = byte;
        }
        self.length += 1;
        self.is_path |= byte == b'/';
        self.name = match self.name {
            _ if byte == b'/' => Some(0),
            Some(known) if LIBRARY.get(known) == Some(&byte) => Some(known + 1),
            _ => None,
        };
    }

    fn is_this_library(&self) -> bool {
        let is_called_so = self.name == Some(LIBRARY.len());
        if !is_called_so || !self.is_path || self.length >= self.path.len() {
            return is_called_so;
        }
        // SAFETY: the path has its NUL, as it is shorter than its room; access makes a system call and nothing else.
        unsafe { libc::access(self.path.as_ptr().cast(), libc::F_OK) == 0 }
    }
}

/// The process leaves. If it said that it becomes another program, it has not.
pub fn did_not_become() {
    if BECOMES.load(Ordering::Relaxed) == std::process::id() {
        let _sheltered = cancel::shelter();
        present(Present::Left);
    }
}

/// Appends to a file that is there; whether all of it is. Makes system calls and nothing else.
fn append_plainly(path: &CStr, text: &[u8]) -> bool {
    let flags = libc::O_WRONLY | libc::O_APPEND | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: the path is a C string.
    let descriptor = unsafe { libc::open(path.as_ptr(), flags) };
    if descriptor < 0 {
        return false;
    }
    // SAFETY: open succeeded, so this is a new descriptor that nobody else owns.
    let file = unsafe { File::from_raw_fd(descriptor) };
    output::above_standard(file).is_ok_and(|file| output::write_all(file.as_raw_fd(), text).is_ok())
}

/// Makes the file, empty: from now on this process is known to have something to say.
pub fn prepare() {
    let Some(told) = TOLD.get() else { return };
    let _sheltered = cancel::shelter();
    let pid = std::process::id();
    let folder = Path::new(&told.folder);
    let made = Verdict::create(folder, pid).map(|(_, path)| path);
    let has_spare = !SPARE.load(Ordering::Acquire).is_null();
    // A name that no file has: what is appended there goes to the spare file.
    match made.or_else(|error| if has_spare { Ok(folder.join(format!("{pid}-0"))) } else { Err(error) }) {
        Ok(path) => {
            let c_path = CString::new(path.as_os_str().as_bytes()).unwrap_or_default();
            let (made, behind) = (AtomicU64::new(0), AtomicU64::new(0));
            let own = Own { pid, path, c_path, made, waiting: Mutex::new(Waiting::default()), behind };
            OWN.store(Box::into_raw(Box::new(own)), Ordering::Release);
        }
        Err(error) => stderr::warn_now(&format!(
            "{VERDICTS}={}: cannot make a file there: {error}; what is found in this process does not reach --fail-on",
            folder.display()
        )),
    }
    present(Present::Used);
}

/// Says who this is, once the log is there.
pub fn began() {
    let Some(own) = own() else { return };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let exe = std::env::current_exe().unwrap_or_default().display().to_string();
    own.write(&VerdictLine::Began(Began::new(own.pid, clock::started_at().unwrap_or(0), now, exe)));
}

/// This process is a rank of a job and made a context on a GPU.
pub fn on_gpu(rank: RankOnGpu) {
    if let Some(own) = own() {
        own.write(&VerdictLine::Gpu(rank));
    }
}

/// The process leaves and has not called the driver. For the process itself: a child of a `fork` or `vfork` says nothing.
pub fn left() {
    if LOADED.load(Ordering::Relaxed) == std::process::id() && OWN.load(Ordering::Acquire).is_null() {
        for_good();
        present(Present::Left);
    }
}

/// This thread, with which the process ends, is not cancelled any more: nothing may unwind through what follows.
fn for_good() {
    std::mem::forget(cancel::shelter());
}

/// Writes the last line of the file in a process that leaves at once, without an allocation. Not where lines are still waiting
/// to be written. See [`ended`].
pub fn ended_at_once() {
    let Some(own) = own().filter(|own| own.behind.load(Ordering::Acquire) == 0) else { return };
    for_good();
    let mut line = [0; 64];
    let length = ended_line(own.made.load(Ordering::Relaxed), &mut line);
    if !append_plainly(&own.c_path, &line[..length]) {
        let _ = spare(own.name(), &line[..length]);
    }
}

/// [`VerdictLine::Ended`] with its line feed, without an allocation; its length.
fn ended_line(findings: u64, line: &mut [u8; 64]) -> usize {
    let mut rest = &mut line[..];
    // A number of twenty digits has room.
    let _ = writeln!(rest, "{{\"verdict\":\"ended\",\"findings\":{findings}}}");
    64 - rest.len()
}

/// Something was found.
pub fn found(finding: FindingMade) {
    if own().is_none() && !OWN.load(Ordering::Acquire).is_null() {
        // The child of a fork: it has said nothing yet, and what its parent says is the parent's.
        prepare();
        began();
    }
    let Some(own) = own() else { return };
    own.made.fetch_add(1, Ordering::Relaxed);
    own.write(&VerdictLine::Finding(finding));
}

/// Nothing is looked at in this process, because of what `why` names.
pub fn apart(why: &str) {
    if let Some(own) = own() {
        own.write(&VerdictLine::Apart { why: why.to_owned() });
    }
}

/// Everything was judged.
pub fn ended() {
    let Some(own) = own() else { return };
    own.write(&VerdictLine::Ended { findings: own.made.load(Ordering::Relaxed) });
}

impl Own {
    /// Appends a line, behind those that wait. No lock is held while it is written.
    fn write(&self, line: &VerdictLine) {
        let Ok(line) = line.to_json() else { return };
        self.behind.fetch_add(1, Ordering::AcqRel);
        let Waiting { mut text, mut lines } = std::mem::take(&mut *self.waiting.lock());
        text.extend_from_slice(line.as_bytes());
        lines += 1;
        let written = match self.append(&text) {
            Err((written, _)) if !spare(self.name(), &text) => written,
            _ => {
                self.behind.fetch_sub(lines, Ordering::AcqRel);
                return;
            }
        };
        // What was written of it is told from what is written again by the line's end in between; the reader sees from it
        // that the file is damaged, and from the last line what it holds.
        let mut waiting = self.waiting.lock();
        if written > 0 {
            text.insert(0, b'\n');
        }
        text.extend_from_slice(&waiting.text);
        *waiting = Waiting { text, lines: lines + waiting.lines };
    }

    /// The name of the file.
    fn name(&self) -> &[u8] {
        let path = self.c_path.to_bytes();
        path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
    }

    fn append(&self, text: &[u8]) -> Result<(), (usize, io::Error)> {
        let _sheltered = cancel::shelter();
        let file = OpenOptions::new().append(true).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC).open(&self.path);
        let file = file.and_then(output::above_standard).map_err(|error| (0, error))?;
        output::write_all(file.as_raw_fd(), text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_known_by_its_name_and_by_a_path_that_is_there() {
        let is_named = |text: &str| names_this_library(text.bytes());
        for text in ["libgpupool.so", "other.so:libgpupool.so", "libgpupool.so other.so", "a/b.so libgpupool.so:c.so"] {
            assert!(is_named(text), "{text}");
        }
        let long = format!("/{}/libgpupool.so", "x".repeat(2000));
        assert!(is_named(&long), "too long to be looked for");
        for text in
            ["", ":", "libgpupool", "libgpupool.so.1", "xlibgpupool.so", "libgpupool.so/", "/no/such/libgpupool.so"]
        {
            assert!(!is_named(text), "{text}");
        }
        let folder = std::env::temp_dir().join(format!("gpupool-named-{}", std::process::id()));
        let path = folder.join("libgpupool.so");
        assert!(!is_named(&path.display().to_string()));
        std::fs::create_dir(&folder).and_then(|()| std::fs::write(&path, "")).unwrap();
        let found = is_named(&format!("other.so {}", path.display()));
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(found);
    }

    #[test]
    fn the_line_that_is_written_by_hand_is_the_one_that_is_read() {
        for findings in [0, 7, u64::MAX] {
            let mut line = [0; 64];
            let length = ended_line(findings, &mut line);
            assert_eq!(line[..length], *VerdictLine::Ended { findings }.to_json().unwrap().as_bytes());
        }
    }
}
