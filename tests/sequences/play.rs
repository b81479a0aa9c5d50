//! One process plays one case: rounds in which its threads act together, alone, or with the other process.

use crate::driver::{Access, Driver, Location};
use crate::intended::{Service, Side};
use crate::kernels::Kernels;
use crate::peer::{Channel, Peer};
use crate::world::{Object, Random, World};
use std::fmt::Write as _;
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};

/// Bytes that one thread holds at most. Four of them in each of two processes fit into the smallest machine of
/// `compare.rs`.
const ROOM: usize = 40 << 20;
/// Calls of one thread in one round.
const CALLS: usize = 6;

/// What is played. The same seed with fewer rounds plays the beginning of the same sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub seed: u64,
    pub rounds: u64,
    pub threads: usize,
    pub processes: u64,
    pub service: Service,
}

impl Case {
    /// As `main` reads it.
    pub fn arguments(&self) -> String {
        let Case { seed, rounds, threads, processes, service } = self;
        let service = service.name();
        format!("--seed={seed} --rounds={rounds} --threads={threads} --processes={processes} --service={service}")
    }
}

/// What happens in a round. Drawn from seed and number, so both processes draw the same.
#[derive(Clone, Copy, Debug)]
enum Round {
    Together,
    Alone(usize),
    /// Every thread hands its memory to the next.
    HandOver,
    /// The processes meet; this one exports if the flag is set.
    Meet(bool),
}

impl Round {
    fn draw(case: &Case, round: u64, process: u64) -> Self {
        let mut random = Random::new(&[case.seed, round]);
        match random.below(20) {
            0..=2 => Round::Alone(random.below(case.threads)),
            3 => Round::HandOver,
            4..=6 if case.processes == 2 => Round::Meet((random.below(2) as u64) == process),
            _ => Round::Together,
        }
    }
}

/// What the threads share.
struct Stage<'a> {
    case: Case,
    process: u64,
    driver: &'a Driver,
    contexts: Vec<usize>,
    barrier: Barrier,
    handed: Vec<Mutex<Vec<Object>>>,
    told: Vec<Mutex<String>>,
    channel: Mutex<Option<Channel>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A thread that panics ends the process.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stage<'_> {
    fn thread(&self, number: usize, print: &(dyn Fn(&str) + Sync)) {
        let device = number % self.contexts.len();
        let driver = self.driver;
        assert_eq!(driver.cuCtxSetCurrent(self.contexts[device]), 0, "cuCtxSetCurrent");
        let kernels = Kernels::load(driver);
        let mut world =
            World::new(driver, &kernels, number, self.contexts[device], device as i32, ROOM, self.case.service);
        for round in 0..=self.case.rounds {
            world.random = Random::new(&[self.case.seed, round, self.process, number as u64]);
            let kind = Round::draw(&self.case, round, self.process);
            self.barrier.wait();
            match kind {
                _ if round == self.case.rounds => world.finish(),
                Round::Together => (0..CALLS).for_each(|_| world.play_together()),
                Round::Alone(who) if who == number => world.play_alone(),
                Round::HandOver => self.hand_over(&mut world),
                Round::Meet(exports) if number == 0 => self.meet(&mut world, exports, round),
                _ => {}
            }
            *lock(&self.told[number]) = world.take_transcript();
            self.barrier.wait();
            if number == 0 {
                let told: String = self.told.iter().map(|told| std::mem::take(&mut *lock(told))).collect();
                print(&format!("round {round} {kind:?}\n{told}"));
            }
        }
    }

    fn hand_over(&self, world: &mut World<'_>) {
        (0..world.objects.len()).for_each(|index| world.settle(index));
        world.room += world.objects.iter().map(Object::bytes).sum::<usize>();
        *lock(&self.handed[world.number]) = std::mem::take(&mut world.objects);
        self.barrier.wait();
        world.objects = std::mem::take(&mut *lock(&self.handed[(world.number + 1) % self.handed.len()]));
        world.room -= world.objects.iter().map(Object::bytes).sum::<usize>().min(world.room);
    }

    fn meet(&self, world: &mut World<'_>, exports: bool, round: u64) {
        if let Some(channel) = &mut *lock(&self.channel) {
            let drawn = Random::new(&[self.case.seed, round, 99]);
            if exports { world.export(channel, drawn) } else { world.import(channel, drawn) }
        }
    }
}

/// Plays it and prints the transcript, on stdout or, in the second process, on stderr.
pub fn play(case: Case, process: u64) {
    let print = move |text: &str| if process == 0 { print!("{text}") } else { eprint!("{text}") };
    // A thread that panics would leave the others at the barrier.
    std::panic::set_hook(Box::new(move |info| {
        print(&format!("panic: {info}\n"));
        std::process::exit(101);
    }));
    let (peer, channel) = match (case.processes, process) {
        (2, 0) => {
            let (peer, channel) = Peer::start(&case);
            (Some(peer), Some(channel))
        }
        (2, _) => (None, Some(Channel::to_parent())),
        _ => (None, None),
    };
    let driver = Driver::load();
    let mut count = 0;
    assert_eq!(driver.cuInit(0), 0, "cuInit");
    assert_eq!(driver.cuDeviceGetCount(&mut count), 0, "cuDeviceGetCount");
    let contexts: Vec<usize> = (0..count)
        .map(|device| {
            let mut context = 0;
            assert_eq!(driver.cuDevicePrimaryCtxRetain(&mut context, device), 0, "cuDevicePrimaryCtxRetain");
            context
        })
        .collect();
    // Threads hand memory to each other, and a kernel may be on the other GPU then.
    for pool in (0..count).map(|device| default_pool(&driver, device)) {
        let all: Vec<Access> = (0..count).map(|id| Access { location: Location { kind: 1, id }, flags: 3 }).collect();
        assert_eq!(driver.cuMemPoolSetAccess(pool, all.as_ptr(), all.len()), 0, "cuMemPoolSetAccess");
    }
    for (from, to) in contexts.iter().flat_map(|from| contexts.iter().map(move |to| (from, to))) {
        if from != to {
            assert_eq!(driver.cuCtxSetCurrent(*from), 0, "cuCtxSetCurrent");
            assert_eq!(driver.cuCtxEnablePeerAccess(*to, 0), 0, "cuCtxEnablePeerAccess");
        }
    }
    let stage = Stage {
        case,
        process,
        driver: &driver,
        contexts,
        barrier: Barrier::new(case.threads),
        handed: (0..case.threads).map(|_| Mutex::default()).collect(),
        told: (0..case.threads).map(|_| Mutex::default()).collect(),
        channel: Mutex::new(channel),
    };
    std::thread::scope(|scope| {
        for number in 0..case.threads {
            let stage = &stage;
            scope.spawn(move || stage.thread(number, &print));
        }
    });
    let contexts = stage.contexts;
    print(&remains(&driver, &contexts, count));
    if let Some(peer) = peer {
        print(&peer.end());
    }
}

fn default_pool(driver: &Driver, device: i32) -> usize {
    let mut pool = 0;
    assert_eq!(driver.cuDeviceGetDefaultMemPool(&mut pool, device), 0, "cuDeviceGetDefaultMemPool");
    pool
}

/// What is left of the machine when everything was freed and the pool gave back what it kept: it waits for nobody but who
/// trims, so that is done in every context.
fn remains(driver: &Driver, contexts: &[usize], count: i32) -> String {
    for context in contexts {
        assert_eq!(driver.cuCtxSetCurrent(*context), 0, "cuCtxSetCurrent");
        driver.ask(c"gpupool_trim");
    }
    let mut text = "left:".to_owned();
    for device in 0..count {
        driver.cuMemPoolTrimTo(default_pool(driver, device), 0);
        if let Some(used) = driver.used(device) {
            // Writing into a String cannot fail.
            let _ = write!(text, " GPU {device} {used}");
        }
    }
    for (what, name) in [
        ("host", c"simcuda_host_used"),
        ("handles", c"simcuda_handles"),
        ("mapped", c"simcuda_mapped"),
        ("violations", c"simcuda_violations"),
    ] {
        let Some(told) = driver.ask(name) else { continue };
        let _ = write!(
            text,
            ", {what} {}",
            if what == "host" { Side::here().without_its_own(told, count as u64) } else { told }
        );
    }
    text + "\n"
}
