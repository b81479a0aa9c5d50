//! Unix sockets that carry whole messages and file descriptors. The standard library has neither.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, IoSlice, IoSliceMut, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recvmsg, sendmsg, shutdown, socket_with, socketpair,
};
use std::fmt::{Display, Formatter};
use std::io::{Error, ErrorKind, Result};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// The most descriptors that the kernel passes with one message (`SCM_MAX_FD`).
pub const MOST_DESCRIPTORS: usize = 253;

/// Room for the control data of that many.
const CONTROL: usize = rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS));

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 64;

/// Whoever owns the descriptor of a socket. A library in somebody else's program needs more than [`OwnedFd`], which takes for
/// granted that nobody else closes it.
pub trait Keep: AsFd + Sized {
    /// Takes a new descriptor over.
    ///
    /// # Errors
    /// The system's, and the descriptor is closed.
    fn keep(new: OwnedFd) -> Result<Self>;

    /// Whether the descriptor still leads to what it led to at first.
    fn is_there(&self) -> bool;
}

impl Keep for OwnedFd {
    fn keep(new: OwnedFd) -> Result<Self> {
        Ok(new)
    }

    fn is_there(&self) -> bool {
        true
    }
}

/// A sequenced-packet socket: messages arrive whole and in order, and an end is seen.
#[derive(Debug)]
pub struct Socket<D = OwnedFd>(D);

/// What one message brought.
#[derive(Debug)]
pub struct Received {
    /// Its length, or that of the buffer if it is longer; 0 at the end of the connection.
    pub bytes: usize,
    /// Each is closed when this process starts another program.
    pub descriptors: Vec<OwnedFd>,
}

/// Why no message was received.
#[derive(Debug)]
pub enum Failure {
    /// None came before the deadline.
    TimedOut,
    /// Descriptors that came with it were lost, because this process may open no more. Those that arrived are closed, and
    /// the message is gone.
    DescriptorsLost,
    /// The call failed; `WouldBlock` if there is no message.
    System(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::System(error)
    }
}

impl Display for Failure {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TimedOut => out.write_str("no message in time"),
            Self::DescriptorsLost => out.write_str("this process has no file descriptor left (ulimit -n)"),
            Self::System(error) => error.fmt(out),
        }
    }
}

/// The process at the other end, as the kernel knows it: as it was when it connected or began to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Its number in this process's namespace; 0 where it has none there.
    pub pid: u32,
    /// Its effective user, by the numbers of this process's user namespace.
    pub uid: u32,
}

/// Linux's default for `/proc/sys/kernel/overflowuid`.
const OVERFLOW_UID: u32 = 65534;

impl Credentials {
    /// What others know of this process.
    pub fn own() -> Self {
        Self { pid: std::process::id(), uid: rustix::process::geteuid().as_raw() }
    }

    /// Whether it is certainly of this process's own user.
    ///
    /// # Errors
    /// It is not, or may not be; the reason.
    pub fn is_same_user(&self) -> std::result::Result<(), String> {
        let (uid, own) = (self.uid, rustix::process::geteuid().as_raw());
        if uid != own {
            return Err(format!("it is of user {uid}, this one of user {own}"));
        }
        // All users that a user namespace has no number for look like this one.
        let nobody =
            std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok().and_then(|text| text.trim().parse().ok());
        if uid == nobody.unwrap_or(OVERFLOW_UID) {
            return Err(format!("user {uid} stands for every user that this user namespace does not know"));
        }
        Ok(())
    }
}

/// The address of a file in a folder that is open. By the folder's descriptor, since an address has room for 108 bytes and
/// a path may be longer.
fn address_in(folder: BorrowedFd<'_>, name: &str) -> Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new(format!("/proc/self/fd/{}/{name}", folder.as_raw_fd()))?)
}

/// An abstract address: no file to leave behind, gone with its socket.
fn address(name: &str) -> Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
}

impl<D: Keep> Socket<D> {
    fn new(flags: SocketFlags) -> Result<Self> {
        let flags = flags | SocketFlags::CLOEXEC;
        Ok(Self(D::keep(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)?))
    }

    /// A socket that others connect to by this name. Its calls never block.
    ///
    /// # Errors
    /// The system's: the name is too long or taken, or there is no descriptor left.
    pub fn listen(name: &str) -> Result<Self> {
        let socket = Self::new(SocketFlags::NONBLOCK)?;
        bind(&socket, &address(name)?)?;
        listen(&socket, BACKLOG)?;
        Ok(socket)
    }

    /// A socket that others connect to by a file of this name in `folder`, which must not be there yet and stays until somebody
    /// removes it. Its calls never block.
    ///
    /// # Errors
    /// The system's: the file is there, or there is no descriptor left.
    pub fn listen_in(folder: BorrowedFd<'_>, name: &str) -> Result<Self> {
        let socket = Self::new(SocketFlags::NONBLOCK)?;
        bind(&socket, &address_in(folder, name)?)?;
        listen(&socket, BACKLOG)?;
        Ok(socket)
    }

    /// Connects to whoever listens by the file of this name in `folder`; never blocks.
    ///
    /// # Errors
    /// The system's: `NotFound` or `ConnectionRefused` where nobody listens, `WouldBlock` where too many wait already.
    pub fn connect_in(folder: BorrowedFd<'_>, name: &str) -> Result<Self> {
        let socket = Self::new(SocketFlags::NONBLOCK)?;
        retry_on_intr(|| connect(&socket, &address_in(folder, name).map_err(|_| Errno::NAMETOOLONG)?))?;
        Ok(socket)
    }

    /// Two sockets that are connected to each other, the second one as a plain descriptor, for a process that is started with it.
    ///
    /// # Errors
    /// The system's.
    pub fn pair() -> Result<(Self, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (own, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Self(D::keep(own)?), other))
    }

    /// A socket of this kind that came from another process.
    ///
    /// # Errors
    /// The system's.
    pub fn adopt(descriptor: OwnedFd) -> Result<Self> {
        Ok(Self(D::keep(descriptor)?))
    }

    /// The next connection, whose calls never block either.
    ///
    /// # Errors
    /// The system's; `WouldBlock` if there is none.
    pub fn accept(&self) -> Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        Ok(Self(D::keep(retry_on_intr(|| accept_with(self, flags))?)?))
    }

    /// Connects to a listener of that name, which may be too busy to take it at once.
    ///
    /// # Errors
    /// The system's, or `TimedOut` at the deadline.
    pub fn connect(name: &str, deadline: Instant) -> Result<Self> {
        let socket = Self::new(SocketFlags::empty())?;
        let address = address(name)?;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            // For Unix sockets the limit on sending is the one on connecting.
            set_socket_timeout(&socket, Timeout::Send, Some(left))?;
            match connect(&socket, &address) {
                Ok(()) => return Ok(socket),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Whether the descriptor still is this socket ([`Keep::is_there`]).
    pub fn is_there(&self) -> bool {
        self.0.is_there()
    }
}

impl<D: AsFd> AsFd for Socket<D> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl<D: AsFd> Socket<D> {
    /// User and process at the other end.
    ///
    /// # Errors
    /// The system's.
    pub fn peer(&self) -> Result<Credentials> {
        // Not by rustix, whose process numbers are never 0: the kernel gives 0 for a process of another PID namespace.
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut length = size_of::<libc::ucred>() as libc::socklen_t;
        let (fd, output) = (self.as_fd().as_raw_fd(), (&raw mut peer).cast());
        // SAFETY: the output is a local of the option's type, and the length is that type's.
        let answer = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, output, &raw mut length) };
        if answer != 0 {
            return Err(Error::last_os_error());
        }
        Ok(Credentials { pid: u32::try_from(peer.pid).unwrap_or(0), uid: peer.uid })
    }

    /// Sends one message with these descriptors, or fails at once.
    ///
    /// # Errors
    /// The system's: `WouldBlock` where the other side has not read what was sent before, `BrokenPipe` where it is gone.
    pub fn send(&self, bytes: &[u8], descriptors: &[impl AsFd]) -> Result<()> {
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        let mut room = [MaybeUninit::uninit(); CONTROL];
        let mut control = SendAncillaryBuffer::new(&mut room);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(ErrorKind::InvalidInput.into());
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        retry_on_intr(|| sendmsg(self, &[IoSlice::new(bytes)], &mut control, flags))?;
        Ok(())
    }

    /// Sends nothing from here on, which the other side sees as the end; what it still says can be received.
    ///
    /// # Errors
    /// The system's.
    pub fn end_sending(&self) -> Result<()> {
        Ok(shutdown(self, Shutdown::Write)?)
    }

    /// Receives one message that is there already.
    ///
    /// # Errors
    /// There is none, or it lost descriptors on its way.
    pub fn receive(&self, buffer: &mut [u8]) -> std::result::Result<Received, Failure> {
        let mut room = [MaybeUninit::uninit(); CONTROL];
        let mut control = RecvAncillaryBuffer::new(&mut room);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let message = retry_on_intr(|| recvmsg(self, &mut [IoSliceMut::new(buffer)], &mut control, flags))
            .map_err(|error| Failure::System(error.into()))?;
        let mut descriptors = Vec::new();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = part {
                descriptors.extend(passed);
            }
        }
        if message.flags.contains(ReturnFlags::CTRUNC) {
            return Err(Failure::DescriptorsLost);
        }
        Ok(Received { bytes: message.bytes, descriptors })
    }

    /// The next message, until `deadline`.
    ///
    /// # Errors
    /// None came, or it lost descriptors on its way.
    pub fn receive_by(&self, buffer: &mut [u8], deadline: Instant) -> std::result::Result<Received, Failure> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::TimedOut);
            }
            wait([self], Some(left))?;
            match self.receive(buffer) {
                Err(Failure::System(error)) if error.kind() == ErrorKind::WouldBlock => {}
                answer => return answer,
            }
        }
    }
}

/// Waits until one of these has something to read or has ended, a signal comes, or the time is over; which of them have.
///
/// # Errors
/// The system's: these are more descriptors than the process may have by now, or there is no memory for the call.
pub fn wait<'a, D: AsFd + 'a>(list: impl IntoIterator<Item = &'a D>, limit: Option<Duration>) -> Result<Vec<bool>> {
    let mut list: Vec<_> = list.into_iter().map(|descriptor| PollFd::new(descriptor, PollFlags::IN)).collect();
    // A limit beyond what the system's clock can count is none.
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    match poll(&mut list, limit.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(list.iter().map(|entry| !entry.revents().is_empty()).collect()),
        Err(error) => Err(error.into()),
    }
}
