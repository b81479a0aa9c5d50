//! Asking: by the thread whose allocation lacks memory, as a command asks (`src/cli/control.rs`). It listens beside the page of each process that
//! may give way, rings, and hears what each has freed.

use super::neighbours::{self, Neighbour};
use crate::backing::open;
use crate::serve::ipc::Own;
use crate::serve::memory;
use crate::{bell, live, log, process};
use gpupool_config::{Mode, format_size};
use gpupool_events::RecallAsk;
use gpupool_interpose::cancel;
use gpupool_lending::{self as lending, Round};
use gpupool_machine::Uuid;
use gpupool_metrics::folder::Folder;
use gpupool_metrics::{ring, stat};
use gpupool_wire::control::{GUARANTEED, ROOM, Reply, Request};
use gpupool_wire::socket::wait;
use gpupool_wire::{Keep, Socket};
use parking_lot::Mutex;
use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// How often who has not connected yet is rung for, and who is being asked by others is tried again.
const RING: Duration = Duration::from_millis(10);
/// How long who did not answer in time is left alone.
const LEFT_ALONE: Duration = Duration::from_secs(10);
/// And who had nothing, of whom the page says so.
const AGAIN: Duration = Duration::from_millis(500);
/// How long those have to say that they have some of whom nothing is known to be there.
const SHORT: Duration = Duration::from_millis(150);
/// How many times as long who is heard to go on is waited for. 100 GiB take the host three seconds.
const LONGER: u32 = 3;
/// What is left of the time for who answers at the last moment.
const MARGIN: Duration = Duration::from_millis(100);

/// One thread asks at a time: who is asked by two threads of one process would be asked for the same memory twice.
static ASKING: Mutex<()> = Mutex::new(());
/// Who is not asked until when, by number and start.
static SPARED: Mutex<Vec<(u32, u64, Instant)>> = Mutex::new(Vec::new());

/// Allocations ask from here on.
pub fn prepare() {
    let settings = process::settings();
    if settings.recall_wait.is_some() && matches!(settings.mode, Mode::Pool | Mode::Spill) {
        memory::ask_by(ask);
    }
}

/// Asks others for so much of this GPU; the bytes that they say they have freed.
fn ask(home: u32, bytes: u64) -> u64 {
    let _sheltered = cancel::shelter();
    // Others are found beside the page, which a process has from its first allocation on.
    bell::allocated();
    try_to_ask(home, bytes).unwrap_or(0)
}

fn try_to_ask(home: u32, bytes: u64) -> Option<u64> {
    let begun = Instant::now();
    let wait = process::settings().recall_wait?;
    let (until, latest) = (begun + wait, begun + LONGER * wait);
    let folder = Folder::around(super::page()?).ok()?;
    // What the program makes itself is asked for before there is a pool.
    let driver = process::driver()?;
    let plan = open::plan(driver)?;
    let gpu = plan.topology.gpus.get(home as usize)?.uuid;
    // What becomes free is the reserve's first.
    let bytes = bytes.saturating_add(plan.lacks_at(driver, home));
    let _one = ASKING.try_lock_until(until)?;
    let taken = super::give::on_gpu(home);
    let is_guaranteed = lending::is_guaranteed(taken, bytes, live::guarantee_of(home));
    let priority = if is_guaranteed { GUARANTEED } else { live::priority() };
    let others = neighbours::on(&folder, &gpu).into_iter().filter(|other| !is_spared(other));
    let mut others = lending::in_order(others.map(|other| (other.stake, other)), priority);
    let (mut freed, mut asked, mut silent) = (0, 0, 0);
    while freed < bytes && !others.is_empty() && Instant::now() + MARGIN < until {
        let Round { asked: now, knows } = lending::next_round(&mut others, bytes - freed);
        let until = if knows { until } else { until.min(Instant::now() + SHORT) };
        let asks = Asks { folder: &folder, gpu, priority, until, wait, latest };
        for ((other, share), answer) in now.iter().zip(asks.all(&now)) {
            asked += 1;
            match answer {
                Some(bytes) if bytes > 0 => {
                    freed += bytes;
                    if bytes >= *share {
                        others.push((other.clone(), 0));
                    }
                }
                None if knows => {
                    silent += 1;
                    spare(other, LEFT_ALONE);
                }
                _ => spare(other, AGAIN),
            }
        }
    }
    if asked > 0 {
        log::emit(|| {
            let microseconds = begun.elapsed().as_micros() as u64;
            let (size, got) = (format_size(bytes), format_size(freed));
            let text = format!(
                "{asked} other processes were asked for {size} of GPU {home}, and freed {got}; {silent} did not answer"
            );
            (RecallAsk { device: home, bytes, freed, asked, silent, microseconds }, text)
        });
    }
    Some(freed)
}

fn is_spared(other: &Neighbour) -> bool {
    let now = Instant::now();
    let mut spared = SPARED.lock();
    spared.retain(|(_, _, until)| *until > now);
    spared.iter().any(|(pid, started, _)| (*pid, *started) == (other.pid, other.started))
}

fn spare(other: &Neighbour, time: Duration) {
    SPARED.lock().push((other.pid, other.started, Instant::now() + time));
}

/// What is asked of whom it concerns.
struct Asks<'a> {
    folder: &'a Folder,
    gpu: Uuid,
    priority: u32,
    /// Nobody is waited for longer who says nothing, by this time or for so long after it last said something; and nobody at all by the other.
    until: Instant,
    wait: Duration,
    latest: Instant,
}

/// The page of who is asked, locked: whoever has the lock has the turn, a command or another process.
struct Turn(Own);

impl Turn {
    /// `None`: somebody else has it.
    fn take(page: OwnedFd) -> Option<Self> {
        let page = Own::keep(page).ok()?;
        // SAFETY: the descriptor is open.
        let is_taken = unsafe { libc::flock(page.as_fd().as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0;
        is_taken.then_some(Self(page))
    }

    fn ring(&self) -> bool {
        self.0.is_there() && ring(self.0.as_fd()).is_ok()
    }
}

impl Drop for Turn {
    /// The child of a fork may have the descriptor as well, and would keep the lock.
    fn drop(&mut self) {
        if self.0.is_there() {
            // SAFETY: the descriptor is open, and still the one of the page.
            unsafe { libc::flock(self.0.as_fd().as_raw_fd(), libc::LOCK_UN) };
        }
    }
}

/// How far one is.
enum Asked<'a> {
    /// Somebody else asks it at this moment.
    Taken,
    /// It was rung for.
    Called { listener: Socket<Own>, turn: Turn, _door: Door<'a> },
    /// It has heard what is wanted; and said that so many bytes have left, if it said that it has some.
    Heard(Socket<Own>, Option<u64>),
    /// It has answered; `None`: it will not.
    Over(Option<u64>),
}

/// The file that is listened by, removed when that is over.
struct Door<'a> {
    folder: &'a Folder,
    name: CString,
}

impl Drop for Door<'_> {
    fn drop(&mut self) {
        // SAFETY: the folder is open, and the name ends with a zero.
        unsafe { libc::unlinkat(self.folder.fd().as_raw_fd(), self.name.as_ptr(), 0) };
    }
}

impl Asks<'_> {
    /// What each of these has freed of what it is asked for, all asked at once. `None`: it did not answer in time.
    fn all(&self, others: &[(Neighbour, u64)]) -> Vec<Option<u64>> {
        let mut all: Vec<Asked<'_>> = others.iter().map(|_| Asked::Taken).collect();
        let mut rung = None;
        let mut until = self.until;
        while Instant::now() < until && all.iter().any(|asked| !matches!(asked, Asked::Over(_))) {
            let rings = rung.is_none_or(|rung: Instant| rung.elapsed() >= RING);
            if rings {
                rung = Some(Instant::now());
            }
            for ((other, bytes), asked) in others.iter().zip(&mut all) {
                if self.go_on(other, *bytes, asked, rings) {
                    until = until.max(Instant::now() + self.wait).min(self.latest);
                }
            }
            let sockets = all.iter().filter_map(|asked| match asked {
                Asked::Called { listener, .. } => Some(listener),
                Asked::Heard(socket, _) => Some(socket),
                Asked::Taken | Asked::Over(_) => None,
            });
            let sockets: Vec<&Socket<Own>> = sockets.filter(|socket| socket.is_there()).collect();
            let left = until.saturating_duration_since(Instant::now()).min(RING);
            if sockets.is_empty() {
                if all.iter().any(|asked| !matches!(asked, Asked::Over(_))) {
                    std::thread::sleep(left);
                }
            } else if wait(sockets, Some(left)).is_err() {
                break;
            }
        }
        all.into_iter().map(|asked| if let Asked::Over(answer) = asked { answer } else { None }).collect()
    }

    /// Whether it says that it has some, or that more has left than it said before.
    fn go_on<'a>(&'a self, other: &Neighbour, bytes: u64, asked: &mut Asked<'a>, rings: bool) -> bool {
        let mut goes_on = false;
        match asked {
            Asked::Over(_) => {}
            Asked::Taken if rings => *asked = self.call(other),
            Asked::Taken => {}
            Asked::Called { listener, turn, .. } => {
                if !listener.is_there() || rings && (!turn.ring() || is_out_of_reach(other)) {
                    *asked = Asked::Over(None);
                } else if let Ok(socket) = listener.accept() {
                    // Another one that looks whether somebody listens, or somebody who is not meant, is let go.
                    let is_meant = socket.peer().is_ok_and(|peer| peer.pid == other.pid && peer.is_same_user().is_ok());
                    let left = self.latest.saturating_duration_since(Instant::now()).saturating_sub(MARGIN / 2);
                    let patience = u64::try_from(left.as_millis()).unwrap_or(0);
                    let request = Request::GiveWay { gpu: self.gpu, bytes, priority: self.priority, patience };
                    let none: [OwnedFd; 0] = [];
                    if is_meant {
                        let said = socket.send(&request.encode(), &none).is_ok();
                        *asked = if said { Asked::Heard(socket, None) } else { Asked::Over(None) };
                    }
                }
            }
            Asked::Heard(socket, left) => {
                let mut buffer = [0; ROOM];
                if !socket.is_there() {
                    *asked = Asked::Over(None);
                } else if let Some(over) = match socket.receive(&mut buffer) {
                    Ok(received) => match Reply::decode(&buffer[..received.bytes]) {
                        Ok(Reply::Done { moved, .. }) => Some(Some(moved)),
                        Ok(Reply::Progress { done, .. }) => {
                            goes_on = left.is_none_or(|left| done > left);
                            *left = Some(done).max(*left);
                            None
                        }
                        Ok(Reply::Refused { .. }) => Some(Some(0)),
                        Ok(_) | Err(_) => Some(None),
                    },
                    Err(gpupool_wire::socket::Failure::System(error))
                        if error.kind() == std::io::ErrorKind::WouldBlock =>
                    {
                        (rings && is_out_of_reach(other)).then_some(None)
                    }
                    Err(_) => Some(None),
                } {
                    *asked = Asked::Over(over);
                }
            }
        }
        goes_on
    }

    /// Listens beside the page of one, and rings.
    fn call(&self, other: &Neighbour) -> Asked<'_> {
        if is_out_of_reach(other) {
            return Asked::Over(None);
        }
        let Ok(page) = self.folder.page_to_ring(OsStr::new(&other.page)) else { return Asked::Over(None) };
        let Some(turn) = Turn::take(page) else { return Asked::Taken };
        let Some(name) = other.page.strip_suffix(".page").map(|stem| format!("{stem}.call")) else {
            return Asked::Over(None);
        };
        let Ok(file) = CString::new(name.as_bytes()) else { return Asked::Over(None) };
        let door = Door { folder: self.folder, name: file };
        let listen = || Socket::<Own>::listen_in(self.folder.fd(), &name);
        let listener = match listen() {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
                // Of one that was killed.
                drop(Door { folder: self.folder, name: door.name.clone() });
                listen()
            }
            answer => answer,
        };
        match listener {
            Ok(listener) if turn.ring() => Asked::Called { listener, turn, _door: door },
            _ => Asked::Over(None),
        }
    }
}

/// Whether it has ended, or is stopped and answers nobody.
fn is_out_of_reach(other: &Neighbour) -> bool {
    stat(other.pid).is_none_or(|stat| stat.started != other.started || matches!(stat.state, b'T' | b't' | b'Z' | b'X'))
}
