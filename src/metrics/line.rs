//! Who asks a process next: whoever came first. Those who want to ask it stand in line at its page, each by a lock on one byte far behind its end, at the
//! time when it came; whoever finds nobody before it has its turn. A lock ends with the process that has it, so nobody is waited for who is gone; and who is
//! stopped (SIGSTOP) is passed by.
//!
//! The line gives the order alone. Who goes on after a stop, or comes late to its place, may find that somebody else has begun: so whoever listens for the
//! process looks whether the file by which it does so is its own still, and waits for its turn once more where it is not.

use crate::process::stat;
use rustix::io::Errno;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Bits of a place that tell whose it is; those above them are a time in milliseconds.
const WHOSE: u32 = 22;
/// When that time began, in seconds since the epoch, so that it fits for 69 years.
const BEGIN: Duration = Duration::from_secs(1_577_836_800);
/// Where the line begins: no page is as long.
const HEAD: i64 = 1 << 40;

/// Where one stands, which is kept as long as its descriptor of the page is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Standing(i64);

impl Standing {
    /// Goes to the end of the line at this page, which is open for writing. A process has one place in a millisecond.
    ///
    /// # Errors
    /// The system's (`fcntl` with `F_OFD_SETLK`): the file system knows no such locks.
    pub fn at_end(page: BorrowedFd<'_>) -> Result<Self, Errno> {
        let place = (milliseconds() << WHOSE | i64::from(std::process::id()) & ((1 << WHOSE) - 1)).max(HEAD);
        lock(page, libc::F_OFD_SETLK, libc::F_WRLCK, place, 1)?;
        Ok(Self(place))
    }

    /// Where somebody stands who came earlier and is not stopped; `None`: nobody does.
    ///
    /// # Errors
    /// The system's (`fcntl` with `F_OFD_GETLK`).
    pub fn before(self, page: BorrowedFd<'_>) -> Result<Option<Self>, Errno> {
        one_of(page, HEAD..self.0)
    }

    /// Leaves the line; a child of this process may have the descriptor open as well.
    pub fn leave(self, page: BorrowedFd<'_>) {
        let _ = lock(page, libc::F_OFD_SETLK, libc::F_UNLCK, self.0, 1);
    }

    /// Its process, as that is called in its own PID namespace.
    fn pid(self) -> u32 {
        (self.0 & ((1 << WHOSE) - 1)) as u32
    }
}

/// The places before the line, one for each thing that a process may be asked: whoever has its ear holds one, so that others know what it is at.
const SERVED: i64 = HEAD - 256;

/// What a process is at for a command.
pub struct Serving;

impl Serving {
    /// Says that the process of this page, which is open for writing, does this from now on, as long as the descriptor is open.
    pub fn begin(page: BorrowedFd<'_>, what: usize) {
        // Where the system knows no such locks nobody is told.
        let _ = lock(page, libc::F_OFD_SETLK, libc::F_WRLCK, SERVED + what as i64, 1);
    }

    /// What it does for somebody else, if anything.
    pub fn look(page: BorrowedFd<'_>) -> Option<usize> {
        let found = lock(page, libc::F_OFD_GETLK, libc::F_WRLCK, SERVED, HEAD - SERVED).ok()?;
        let at = usize::try_from(found.l_start - SERVED).ok()?;
        (i32::from(found.l_type) != libc::F_UNLCK).then_some(at)
    }
}

/// One of those who stand there and are not stopped.
fn one_of(page: BorrowedFd<'_>, places: Range<i64>) -> Result<Option<Standing>, Errno> {
    if places.is_empty() {
        return Ok(None);
    }
    let found = lock(page, libc::F_OFD_GETLK, libc::F_WRLCK, places.start, places.end - places.start)?;
    if i32::from(found.l_type) == libc::F_UNLCK {
        return Ok(None);
    }
    let found = Standing(found.l_start);
    if !places.contains(&found.0) || !stat(found.pid()).is_some_and(|stat| matches!(stat.state, b'T' | b't')) {
        return Ok(Some(found));
    }
    let earlier = one_of(page, places.start..found.0)?;
    if earlier.is_some() { Ok(earlier) } else { one_of(page, found.0 + 1..places.end) }
}

fn milliseconds() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(BEGIN);
    i64::try_from(since.as_millis()).unwrap_or(0) & (i64::MAX >> WHOSE)
}

fn lock(page: BorrowedFd<'_>, call: i32, kind: i32, start: i64, bytes: i64) -> Result<libc::flock, Errno> {
    // SAFETY: all-zero is a valid value of this C struct; the number of a process has to be zero for these locks.
    let mut asked: libc::flock = unsafe { std::mem::zeroed() };
    (asked.l_type, asked.l_whence) = (kind as libc::c_short, libc::SEEK_SET as libc::c_short);
    (asked.l_start, asked.l_len) = (start, bytes);
    // SAFETY: the descriptor is open, and the struct is a local that the call reads and writes.
    let answer = unsafe { libc::fcntl(page.as_raw_fd(), call, &raw mut asked) };
    if answer < 0 {
        Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL))
    } else {
        Ok(asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has neither /proc nor locks of open files")]
    fn what_a_process_is_at_is_known_until_whoever_asked_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page");
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        let (winner, loser) = (open(), open());
        assert_eq!(Serving::look(loser.as_fd()), None);
        Serving::begin(winner.as_fd(), 3);
        let standing = Standing::at_end(loser.as_fd()).unwrap();
        assert_eq!((Serving::look(loser.as_fd()), standing.before(loser.as_fd()).unwrap()), (Some(3), None));
        drop(winner);
        assert_eq!(Serving::look(loser.as_fd()), None);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has neither /proc nor locks of open files")]
    fn who_came_first_is_first_and_who_is_gone_is_waited_for_by_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page");
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        let files = [open(), open(), open()];
        let stand = |file: &File| {
            // A process has one place in a millisecond.
            let places = std::iter::repeat_with(|| Standing::at_end(file.as_fd()));
            places.inspect(|_| std::thread::sleep(Duration::from_millis(1))).find_map(Result::ok).unwrap()
        };
        let all = files.each_ref().map(stand);
        assert!(all.is_sorted() && all[0].pid() == std::process::id(), "{all:?}");
        let before = |at: usize| all[at].before(files[at].as_fd()).unwrap();
        assert_eq!((before(0), before(1)), (None, Some(all[0])));
        assert!(before(2).is_some());
        let copy = files[0].try_clone().unwrap();
        all[0].leave(files[0].as_fd());
        assert_eq!((before(1), before(2)), (None, Some(all[1])), "although a copy is open");
        drop(copy);
        let [_first, second, third] = files;
        drop(second);
        assert_eq!(all[2].before(third.as_fd()), Ok(None));
    }
}
