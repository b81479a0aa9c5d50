//! Writing where somebody else is at home: no signal of ours reaches the program.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

/// What a write may raise: its reader went away, or the file would grow beyond RLIMIT_FSIZE. Both end a program that did
/// not expect them, and it would not have written here by itself.
const RAISED: [(libc::c_int, libc::c_int); 2] = [(libc::SIGPIPE, libc::EPIPE), (libc::SIGXFSZ, libc::EFBIG)];

/// One `write(2)` of everything, repeated only where a signal came before the first byte. An error comes with the bytes
/// that were written; a short write is the error that a full disk gives.
pub(super) fn write_all(descriptor: libc::c_int, bytes: &[u8]) -> Result<(), (usize, io::Error)> {
    let written = quietly(|| {
        // SAFETY: `bytes` is readable for its length.
        unsafe { libc::write(descriptor, bytes.as_ptr().cast(), bytes.len()) }
    });
    match written.map(usize::try_from) {
        Ok(Ok(count)) if count == bytes.len() => Ok(()),
        Ok(count) => Err((count.unwrap_or(0), io::Error::from_raw_os_error(libc::ENOSPC))),
        Err(error) => Err((0, error)),
    }
}

/// What a pipe takes at once or not at all, and has room for when it is ready.
const PIECE: usize = libc::PIPE_BUF;

/// Writes to a descriptor that is somebody else's without waiting for a reader: what does not go now is not written. The flags of
/// the descriptor stay as they are, because whoever has it sees them, too. An error comes with the bytes that were written.
pub(super) fn write_ready(descriptor: libc::c_int, bytes: &[u8]) -> Result<(), (usize, io::Error)> {
    let kind = status(descriptor).map_err(|error| (0, error))?.st_mode & libc::S_IFMT;
    if kind == libc::S_IFREG {
        return write_all(descriptor, bytes);
    }
    let mut written = 0;
    // Between a question and a write somebody else may fill a pipe, so it is asked in the write itself where the kernel can do so.
    let mut asks = kind != libc::S_IFIFO && kind != libc::S_IFSOCK;
    while written < bytes.len() {
        if asks && !is_ready(descriptor) {
            return Err((written, io::ErrorKind::WouldBlock.into()));
        }
        let rest = &bytes[written..];
        let piece = if asks { &rest[..rest.len().min(PIECE)] } else { rest };
        let vector = libc::iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() };
        let result = quietly(|| match kind {
            // SAFETY: `piece` is readable for its length.
            libc::S_IFSOCK => unsafe {
                libc::send(descriptor, piece.as_ptr().cast(), piece.len(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
            },
            // SAFETY: the one vector names `piece`, which is only read.
            libc::S_IFIFO if !asks => unsafe { libc::pwritev2(descriptor, &raw const vector, 1, -1, libc::RWF_NOWAIT) },
            // SAFETY: `piece` is readable for its length.
            _ => unsafe { libc::write(descriptor, piece.as_ptr().cast(), piece.len()) },
        });
        match result {
            // Kernels before 6.5 know this flag of no pipe.
            Err(error)
                if !asks && matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL)) =>
            {
                asks = true;
            }
            Ok(count @ 1..) => written += count.unsigned_abs(),
            Ok(_) => return Err((written, io::ErrorKind::WriteZero.into())),
            Err(error) => return Err((written, error)),
        }
    }
    Ok(())
}

/// Whether a write of [`PIECE`] bytes would not wait.
fn is_ready(descriptor: libc::c_int) -> bool {
    let mut asked = libc::pollfd { fd: descriptor, events: libc::POLLOUT, revents: 0 };
    // SAFETY: `asked` is one entry, which poll may write to.
    let found = unsafe { libc::poll(&raw mut asked, 1, 0) };
    found == 1 && asked.revents & libc::POLLOUT != 0
}

/// Takes room on the disk for the bytes from `start` to `end` without making the file longer.
pub(super) fn reserve(descriptor: libc::c_int, start: u64, end: u64) -> io::Result<()> {
    let bytes = end.saturating_sub(start);
    let range = (libc::off64_t::try_from(start), libc::off64_t::try_from(bytes));
    let (Ok(start), Ok(bytes)) = range else { return Err(io::Error::from_raw_os_error(libc::EFBIG)) };
    quietly(|| {
        // SAFETY: plain integers; a descriptor that is none is answered with EBADF.
        unsafe { libc::fallocate64(descriptor, libc::FALLOC_FL_KEEP_SIZE, start, bytes) as isize }
    })
    .map(drop)
}

/// `file` under a number that is none of the standard streams', where a program would write to it without knowing.
pub(super) fn above_standard(file: File) -> io::Result<OwnedFd> {
    if file.as_raw_fd() > libc::STDERR_FILENO { Ok(file.into()) } else { duplicate(&file, libc::STDERR_FILENO + 1) }
}

/// `file` once more, under the first free number from `floor` on.
pub(super) fn duplicate(file: &File, floor: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: `file` owns an open descriptor; F_DUPFD_CLOEXEC takes an integer and touches no memory.
    let number = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, floor) };
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: fcntl succeeded, so `number` is a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// The size that this process's files may have.
pub(super) fn file_size_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the output is a local of the right type.
    if unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0 { limit.rlim_cur } else { u64::MAX }
}

/// `fstat(2)`.
pub(super) fn status(descriptor: libc::c_int) -> io::Result<libc::stat> {
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `status` is writable and of the size that fstat fills; a closed descriptor is answered with EBADF.
    if unsafe { libc::fstat(descriptor, status.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: fstat returned 0, so it has filled `status`.
    Ok(unsafe { status.assume_init() })
}

/// When a file was made, in seconds and nanoseconds; `None` where the file system or the kernel does not tell.
pub(super) fn birth(descriptor: libc::c_int) -> Option<(i64, u32)> {
    let mut status = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path is an empty C string, which with this flag means the descriptor, and the output is a local.
    let result =
        unsafe { libc::statx(descriptor, c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_BTIME, status.as_mut_ptr()) };
    // SAFETY: all-zero is a valid statx, and statx fills it.
    let status = unsafe { status.assume_init() };
    let known = result == 0 && status.stx_mask & libc::STATX_BTIME != 0;
    known.then_some((status.stx_btime.tv_sec, status.stx_btime.tv_nsec))
}

/// Makes a system call, again while signals interrupt it, and keeps the program from the signals that it raises: they are
/// held back in this thread meanwhile, and taken off the queue if the call raised them. One that was waiting already is the
/// program's, and stays.
fn quietly(mut call: impl FnMut() -> isize) -> io::Result<isize> {
    let mut held = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    let mut waiting = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset fills both sets before another call reads them, and they live until the end of this function.
    let blocked = unsafe {
        libc::sigemptyset(held.as_mut_ptr());
        for (signal, _) in RAISED {
            libc::sigaddset(held.as_mut_ptr(), signal);
        }
        libc::sigemptyset(waiting.as_mut_ptr());
        libc::sigpending(waiting.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, held.as_ptr(), before.as_mut_ptr()) == 0
    };
    let result = loop {
        let value = call();
        if value >= 0 {
            break Ok(value);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            break Err(error);
        }
    };
    if blocked {
        let code = result.as_ref().err().and_then(io::Error::raw_os_error);
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        for (signal, _) in RAISED.into_iter().filter(|(_, error)| code == Some(*error)) {
            // SAFETY: the sets were filled above, `now` is a local, and pthread_sigmask filled `before`.
            unsafe {
                if libc::sigismember(waiting.as_ptr(), signal) != 1 {
                    libc::sigemptyset(held.as_mut_ptr());
                    libc::sigaddset(held.as_mut_ptr(), signal);
                    libc::sigtimedwait(held.as_ptr(), ptr::null_mut(), &raw const now);
                }
            }
        }
        // SAFETY: pthread_sigmask filled `before`.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    }
    result
}
