//! Asking in turns, and waiting: listens beside the page of each process that is asked, once its turn in the line of those who ask it has come, rings, and hears what it has freed. Whom,
//! and for what, is [`super::ask`]'s.

use super::neighbours::Neighbour;
use crate::serve::ipc::Own;
use gpupool_lending::Answer;
use gpupool_machine::Uuid;
use gpupool_metrics::folder::Folder;
use gpupool_metrics::{Door, Standing, has_living_thread, is_all_ending, ring, stat};
use gpupool_wire::control::{ROOM, Reply, Request};
use gpupool_wire::socket::wait;
use gpupool_wire::{Keep, Socket};
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// How often who has not connected yet is rung for, and it is looked whether the turn has come to ask who is being asked by others.
pub(super) const RING: Duration = Duration::from_millis(10);
/// How long those have to say that they have some of whom nothing is known to be there.
pub(super) const SHORT: Duration = Duration::from_millis(150);
/// How many times as long who is heard to go on is waited for. 100 GiB take the host three seconds.
pub(super) const LONGER: u32 = 3;
/// What is left of the time for who answers at the last moment, at most.
pub(super) const MARGIN: Duration = Duration::from_millis(100);

/// What is asked of whom it concerns.
pub(super) struct Asks<'a> {
    pub folder: &'a Folder,
    pub gpu: Uuid,
    pub priority: u32,
    /// Only for what they have there for other GPUs.
    pub loans: bool,
    /// Nobody is waited for longer who says nothing, by this time or for so long after it last said something; and nobody at all by the last.
    pub first: Instant,
    /// By this time, whose memory moves meanwhile: it answers between two steps of that or behind it, and what has come or gone then no page tells yet.
    pub end: Instant,
    /// By this time, who has said that it has some.
    pub until: Instant,
    pub wait: Duration,
    /// For so long, who has begun to give and says nothing more: less than that where others have some as well.
    pub patience: Duration,
    pub latest: Instant,
}

/// The page of who is asked, and our place in the line of those who ask it, commands and other processes.
struct Turn {
    page: Own,
    /// `None`: the file system knows no such lines, and whoever comes last is next.
    standing: Option<Standing>,
    /// Who stood before us when that was looked at last.
    before: Option<Standing>,
}

impl Turn {
    fn wait_for(page: OwnedFd) -> Option<Self> {
        let page = Own::keep(page).ok()?;
        let standing = Standing::at_end(page.as_fd()).ok();
        Some(Self { page, standing, before: None })
    }

    /// Whether it has come. `None`: the program has closed the descriptor.
    fn has_come(&mut self) -> Option<bool> {
        if !self.page.is_there() {
            return None;
        }
        self.before = self.standing.and_then(|standing| standing.before(self.page.as_fd()).ok().flatten());
        Some(self.before.is_none())
    }

    fn ring(&self) -> bool {
        self.page.is_there() && ring(self.page.as_fd()).is_ok()
    }
}

impl Drop for Turn {
    /// The child of a fork may have the descriptor as well, and would keep the place.
    fn drop(&mut self) {
        if let Some(standing) = self.standing.filter(|_| self.page.is_there()) {
            standing.leave(self.page.as_fd());
        }
    }
}

/// How far one is.
enum Asked<'a> {
    /// Nothing has been done yet.
    New,
    /// Others came earlier, and ask it at this moment.
    Waits(Turn),
    /// It was rung for. The door is gone before the turn is: the next one has a door of the same name.
    Called { listener: Socket<Own>, door: Door<'a>, turn: Turn },
    /// It has heard what is wanted. `has_some`: it has said so.
    Heard { socket: Socket<Own>, has_some: bool },
    /// It ends, and the driver takes back what it had once its last thread is gone.
    Ends,
    /// It has answered, or will not.
    Over(Answer),
}

/// What one has said since it was heard last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Says {
    Nothing,
    /// It has some of what is wanted, and may have to wait until that can leave.
    HasSome,
    /// It is at work for who asks.
    GoesOn,
    /// It has answered somebody who came earlier.
    Answers,
}

impl Says {
    fn after(answers: bool) -> Self {
        if answers { Self::Answers } else { Self::Nothing }
    }
}

impl Asked<'_> {
    /// What is known of it when it is waited for no longer.
    fn so_far(&self) -> Answer {
        match self {
            Asked::Over(answer) => answer.clone(),
            // Who came earlier is not at fault, nor is who answers them.
            Asked::Waits(turn) if turn.before.is_some() => Answer::Busy,
            _ => Answer::None,
        }
    }
}

impl Asks<'_> {
    /// What each of these has freed of what it is asked for, all asked at once, and when any of them was heard last to be at work. Nobody is waited for because another one goes on.
    pub fn all(&self, others: &[(&Neighbour, u64)]) -> (Vec<Answer>, Option<Instant>) {
        let mut all: Vec<(Asked<'_>, Instant)> = others.iter().map(|_| (Asked::New, self.first)).collect();
        let (mut rung, mut heard) = (None, None);
        loop {
            let rings = rung.is_none_or(|rung: Instant| rung.elapsed() >= RING);
            if rings {
                rung = Some(Instant::now());
            }
            for ((other, bytes), (asked, until)) in others.iter().zip(&mut all) {
                let says = self.go_on(other, *bytes, asked, rings);
                let now = Instant::now();
                match says {
                    Says::Nothing => {}
                    Says::HasSome => *until = (*until).max(self.until),
                    Says::GoesOn => *until = (*until).max(now + self.patience).min(self.latest),
                    Says::Answers => *until = (*until).max(now + self.wait).min(self.latest),
                }
                if matches!(says, Says::GoesOn | Says::Answers) {
                    heard = Some(now);
                }
                if now >= *until && *until < self.end && other.moves(self.folder) {
                    // By then its page is written, or it has answered.
                    *until = (now + SHORT).min(self.end);
                } else if now >= *until {
                    // Its turn is the next one's from here on.
                    let was_waited_for = *until >= self.until;
                    let so_far = asked.so_far();
                    *asked =
                        Asked::Over(if was_waited_for && so_far == Answer::None { Answer::Silent } else { so_far });
                }
            }
            let under_way = all.iter().filter(|(asked, _)| !matches!(asked, Asked::Over(_)));
            let Some(until) = under_way.map(|(_, until)| *until).max() else { break };
            let sockets = all.iter().filter_map(|(asked, _)| match asked {
                Asked::Called { listener, .. } => Some(listener),
                Asked::Heard { socket, .. } => Some(socket),
                Asked::New | Asked::Waits(_) | Asked::Ends | Asked::Over(_) => None,
            });
            let sockets: Vec<&Socket<Own>> = sockets.filter(|socket| socket.is_there()).collect();
            let left = until.saturating_duration_since(Instant::now()).min(RING);
            if sockets.is_empty() {
                std::thread::sleep(left);
            } else if wait(sockets, Some(left)).is_err() {
                break;
            }
        }
        (all.iter().map(|(asked, _)| asked.so_far()).collect(), heard)
    }

    /// What it says now.
    fn go_on<'a>(&'a self, other: &Neighbour, bytes: u64, asked: &mut Asked<'a>, rings: bool) -> Says {
        if rings && !matches!(asked, Asked::Over(_)) {
            match fate(other) {
                Fate::Runs => {}
                Fate::Halted => *asked = Asked::Over(Answer::Halted),
                Fate::Ends => *asked = Asked::Ends,
                Fate::Over => *asked = Asked::Over(Answer::Ended),
            }
        }
        let mut says = Says::Nothing;
        match asked {
            Asked::Over(_) | Asked::Ends => {}
            Asked::New => *asked = self.begin(other),
            Asked::Waits(turn) if rings => {
                let before = turn.before;
                match turn.has_come() {
                    Some(true) => {
                        let Asked::Waits(turn) = std::mem::replace(asked, Asked::Over(Answer::None)) else {
                            return Says::Nothing;
                        };
                        *asked = self.call(other, turn);
                        says = Says::after(before.is_some());
                    }
                    Some(false) => says = Says::after(before.is_some() && turn.before != before),
                    None => *asked = Asked::Over(Answer::None),
                }
            }
            Asked::Waits(_) => {}
            Asked::Called { door, .. } if rings && !door.is_there() => {
                let over = std::mem::replace(asked, Asked::Over(Answer::None));
                *asked = if let Asked::Called { turn, .. } = over { Asked::Waits(turn) } else { over };
            }
            Asked::Called { listener, turn, .. } => {
                if !listener.is_there() || rings && !turn.ring() {
                    *asked = Asked::Over(Answer::None);
                } else if let Ok(socket) = listener.accept() {
                    // Another one that looks whether somebody listens, or somebody who is not meant, is let go.
                    let is_meant = socket.peer().is_ok_and(|peer| peer.pid == other.pid && peer.is_same_user().is_ok());
                    let left = self.latest.saturating_duration_since(Instant::now()).saturating_sub(MARGIN / 2);
                    let patience = u64::try_from(left.as_millis()).unwrap_or(0);
                    let request =
                        Request::GiveWay { gpu: self.gpu, bytes, priority: self.priority, loans: self.loans, patience };
                    let none: [OwnedFd; 0] = [];
                    if is_meant {
                        let said = socket.send(&request.encode(), &none).is_ok();
                        *asked = if said { Asked::Heard { socket, has_some: false } } else { unheard(other) };
                    }
                }
            }
            Asked::Heard { socket, has_some } => {
                let mut buffer = [0; ROOM];
                if !socket.is_there() {
                    *asked = Asked::Over(Answer::None);
                } else {
                    match socket.receive(&mut buffer) {
                        Ok(received) => match Reply::decode(&buffer[..received.bytes]) {
                            Ok(Reply::Done { moved, stayed, .. }) => {
                                *asked = Asked::Over(Answer::Freed { bytes: moved, loans: stayed });
                                says = if moved > 0 { Says::GoesOn } else { Says::Nothing };
                            }
                            // First it says that it has some. After that it says so only while it is at work: it has come to rest, begins with what is
                            // next, or more has left. While it waits for a kernel it says nothing.
                            Ok(Reply::Progress { .. }) => {
                                says = if std::mem::replace(has_some, true) { Says::GoesOn } else { Says::HasSome };
                            }
                            Ok(Reply::Refused { why }) => *asked = Asked::Over(Answer::Refused(why)),
                            Ok(_) => *asked = Asked::Over(Answer::None),
                            Err(_) => *asked = unheard(other),
                        },
                        Err(gpupool_wire::socket::Failure::System(error)) if error.kind() == ErrorKind::WouldBlock => {}
                        Err(_) => *asked = unheard(other),
                    }
                }
            }
        }
        says
    }

    /// Goes to the end of the line of those who ask one, and begins if nobody else is there.
    fn begin(&self, other: &Neighbour) -> Asked<'_> {
        let page = self.folder.page_to_ring(OsStr::new(&other.page)).ok();
        let Some(mut turn) = page.and_then(Turn::wait_for) else { return Asked::Over(Answer::None) };
        match turn.has_come() {
            Some(true) => self.call(other, turn),
            Some(false) => Asked::Waits(turn),
            None => Asked::Over(Answer::None),
        }
    }

    /// Listens beside the page of one, and rings.
    fn call(&self, other: &Neighbour, mut turn: Turn) -> Asked<'_> {
        let Some(name) = other.page.strip_suffix(".page").map(|stem| format!("{stem}.call")) else {
            return Asked::Over(Answer::None);
        };
        let listen = || Socket::<Own>::listen_in(self.folder.fd(), &name);
        match Door::listen(self.folder, &name, || turn.has_come() == Some(true), listen) {
            Ok(Some(listener)) if turn.ring() => Asked::Called { listener, door: Door::at(self.folder, &name), turn },
            Ok(Some(_)) => {
                drop(Door::at(self.folder, &name));
                Asked::Over(Answer::None)
            }
            Ok(None) if turn.page.is_there() => Asked::Waits(turn),
            Ok(None) | Err(_) => Asked::Over(Answer::None),
        }
    }
}

/// What one is at.
enum Fate {
    Runs,
    /// It is stopped.
    Halted,
    /// It ends, and has its memory yet.
    Ends,
    /// It has ended: with its last thread the system has closed its files, and the driver has taken back what it had.
    Over,
}

fn fate(other: &Neighbour) -> Fate {
    let Some(stat) = stat(other.pid) else { return Fate::Over };
    if stat.started.abs_diff(other.started) > 1 {
        return Fate::Over;
    }
    match stat.state {
        b'T' | b't' => Fate::Halted,
        b'Z' | b'X' if !has_living_thread(other.pid) => Fate::Over,
        _ if is_all_ending(other.pid) => Fate::Ends,
        _ => Fate::Runs,
    }
}

/// Of one whose connection has broken: it ends, which begins with that, or it will not answer.
fn unheard<'a>(other: &Neighbour) -> Asked<'a> {
    match fate(other) {
        Fate::Over => Asked::Over(Answer::Ended),
        Fate::Ends => Asked::Ends,
        Fate::Halted | Fate::Runs => Asked::Over(Answer::None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_lending::Stake;
    use gpupool_metrics::{BYTES, Identity};

    /// This process, by the page of this name.
    fn neighbour(page: &str) -> Neighbour {
        let own = Identity::own().unwrap();
        let stake = Stake { priority: 1, ..Stake::default() };
        Neighbour { pid: own.pid, started: own.started, page: page.to_owned(), stake, moves: false, is_halted: false }
    }

    /// Nobody who says nothing is waited for longer than until then.
    fn asks(folder: &Folder, until: Instant, wait: Duration, latest: Instant) -> Asks<'_> {
        Asks {
            folder,
            gpu: [0; 16],
            priority: 1,
            loans: false,
            first: until,
            until,
            end: until,
            wait,
            patience: wait,
            latest,
        }
    }

    /// One long copy is seen from outside by no byte that has left.
    #[test]
    fn who_says_that_it_is_at_work_is_waited_for_though_no_more_has_left() {
        let around = tempfile::tempdir().unwrap();
        let folder = Folder::around(&around.path().join("page")).unwrap();
        std::fs::write(around.path().join("1-1.page"), vec![0; BYTES]).unwrap();
        let other = neighbour("1-1.page");
        // A third of it is what a busy machine may hold a thread up for.
        let (begun, wait) = (Instant::now(), Duration::from_secs(6));
        let asks = asks(&folder, begun + wait, wait, begun + LONGER * wait);
        let (answers, _) = std::thread::scope(|scope| {
            scope.spawn(|| {
                let socket = loop {
                    if let Ok(socket) = Socket::<OwnedFd>::connect_in(folder.fd(), "1-1.call") {
                        break socket;
                    }
                    std::thread::yield_now();
                };
                let mut buffer = [0; ROOM];
                assert!(socket.receive_by(&mut buffer, begun + LONGER * wait).is_ok());
                // It has some; it has come to rest and copies; it is done. Between two of these it would still be waited for, and not between the first and the last.
                let (at_work, none) = (Reply::Progress { done: 0, total: 7 }.encode(), [] as [OwnedFd; 0]);
                let done = Reply::Done { moved: 7, stayed: 0, to_disk: 0, stored: 0, microseconds: 0, waited: 0 };
                for (at, words) in [(0, &at_work), (2, &at_work), (4, &done.encode())] {
                    while Instant::now() < begun + at * wait / 3 {
                        std::thread::yield_now();
                    }
                    let _ = socket.send(words, &none);
                }
            });
            asks.all(&[(&other, 1)])
        });
        assert_eq!(answers, [Answer::Freed { bytes: 7, loans: 0 }]);
    }

    /// Both looked when nobody stood in the line yet, as of two that come in the same millisecond.
    #[test]
    fn who_finds_that_another_one_listens_who_came_earlier_waits_for_its_turn() {
        let around = tempfile::tempdir().unwrap();
        let folder = Folder::around(&around.path().join("page")).unwrap();
        let path = around.path().join("1-1.page");
        std::fs::write(&path, vec![0; BYTES]).unwrap();
        let other = neighbour("1-1.page");
        let (now, wait) = (Instant::now(), Duration::from_secs(60));
        let asks = asks(&folder, now + wait, wait, now + wait);
        let earlier = std::fs::File::options().write(true).open(&path).unwrap();
        let place = Standing::at_end(earlier.as_fd()).unwrap();
        let listener = Socket::<OwnedFd>::listen_in(folder.fd(), "1-1.call").unwrap();
        let door = Door::at(&folder, "1-1.call");
        // A process has one place in a millisecond.
        let turn = loop {
            let turn = Turn::wait_for(folder.page_to_ring(OsStr::new("1-1.page")).unwrap()).unwrap();
            if turn.standing.is_some() {
                break turn;
            }
        };
        let Asked::Waits(turn) = asks.call(&other, turn) else { panic!("it has taken the other one's place") };
        assert!(turn.before == Some(place) && door.is_there());
        drop((earlier, listener));
        assert!(matches!(asks.call(&other, turn), Asked::Called { .. }), "the other one is gone, its door is not");
    }

    #[test]
    fn nobody_is_waited_for_because_another_one_goes_on() {
        const LONG: Duration = Duration::from_secs(60);
        // Longer than a busy machine holds a thread up for.
        const SOON: Duration = Duration::from_secs(3);
        let around = tempfile::tempdir().unwrap();
        let folder = Folder::around(&around.path().join("page")).unwrap();
        let others = ["1-1.page", "2-1.page"].map(|page| {
            std::fs::write(around.path().join(page), vec![0; BYTES]).unwrap();
            (neighbour(page), 1)
        });
        let begun = Instant::now();
        // Of neither it is known what it has.
        let (until, latest) = (begun + SOON, begun + 3 * LONG);
        let asks = asks(&folder, until, LONG, latest);
        let (answers, _) = std::thread::scope(|scope| {
            scope.spawn(|| {
                let none: [OwnedFd; 0] = [];
                let door = around.path().join("2-1.call");
                while !door.exists() {
                    std::thread::yield_now();
                }
                let socket = loop {
                    if let Ok(socket) = Socket::<OwnedFd>::connect_in(folder.fd(), "2-1.call") {
                        break socket;
                    }
                };
                let mut buffer = [0; ROOM];
                assert!(socket.receive_by(&mut buffer, begun + LONG).is_ok());
                // It has some, and is at work.
                for _ in 0..2 {
                    socket.send(&Reply::Progress { done: 0, total: 7 }.encode(), &none).unwrap();
                }
                // Until it would have been given up, had it not said anything.
                while Instant::now() < begun + 2 * SOON {
                    std::thread::yield_now();
                }
                socket
                    .send(
                        &Reply::Done { moved: 7, stayed: 0, to_disk: 0, stored: 0, microseconds: 0, waited: 0 }
                            .encode(),
                        &none,
                    )
                    .unwrap();
            });
            asks.all(&others.each_ref().map(|(other, bytes)| (other, *bytes)))
        });
        assert_eq!(answers, [Answer::Silent, Answer::Freed { bytes: 7, loans: 0 }]);
        assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
    }
}
