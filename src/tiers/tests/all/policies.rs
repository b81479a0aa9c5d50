//! Who decides what moves.

use crate::machine::{Machine, Op, Step, Trace};
use gpupool_tiers::{Range, Settings, Swap, Tiers, Where, Whereabouts};
use std::collections::{BTreeMap, HashMap, VecDeque};

pub trait Policy {
    fn began(&mut self, _machine: &mut Machine, _block: Range) {}
    fn ended(&mut self, _machine: &mut Machine, _block: Range) {}
    /// A launch; moves what it likes before, runs it, and answers what the launch itself took.
    fn launch(&mut self, machine: &mut Machine, step: &Step) -> f64 {
        let took = machine.time_of(step);
        machine.now += took;
        took
    }
    fn copied(&mut self, _machine: &mut Machine, _range: Range) {}
    fn idle(&mut self, _machine: &mut Machine) {}
    /// What it knows, for people.
    fn told(&mut self, _machine: &Machine) -> String {
        String::new()
    }
}

/// What a policy cost on a trace.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    pub total: f64,
    /// From the settled op on.
    pub settled: f64,
    /// Bytes moved in, in all and once settled.
    pub moved: u64,
    pub moved_settled: u64,
}

pub fn run(trace: &Trace, policy: &mut dyn Policy) -> Cost {
    run_on(Machine::new(trace.near, trace.links.clone()), trace, policy)
}

pub fn run_on(mut machine: Machine, trace: &Trace, policy: &mut dyn Policy) -> Cost {
    let mut at_settled = (0.0, 0);
    for (number, op) in trace.ops.iter().enumerate() {
        if number == trace.settled {
            at_settled = (machine.now, machine.moved_in);
        }
        apply(&mut machine, policy, op);
        if *op == Op::Idle && std::env::var("TOLD").is_ok_and(|name| name == trace.name) {
            println!("  {:.1} ms, {} MiB came; {}", machine.now / 1e6, machine.moved_in >> 20, policy.told(&machine));
        }
    }
    Cost {
        total: machine.now,
        settled: machine.now - at_settled.0,
        moved: machine.moved_in,
        moved_settled: machine.moved_in - at_settled.1,
    }
}

pub fn apply(machine: &mut Machine, policy: &mut dyn Policy, op: &Op) {
    match op {
        Op::Begin(block) => {
            machine.begin(*block);
            policy.began(machine, *block);
        }
        Op::End(block) => {
            policy.ended(machine, *block);
            machine.end(*block);
        }
        Op::Launch(step) => {
            policy.launch(machine, step);
        }
        Op::Copy(range) => policy.copied(machine, *range),
        Op::Idle => policy.idle(machine),
    }
}

/// Everything stays where it was first put.
pub struct Never;

impl Policy for Never {}

/// The densest bytes, known before: what a choice made once can do at best. Placing them costs nothing.
pub struct BestStatic {
    /// What of each block, by the how manyth it is, is near.
    near: HashMap<usize, Vec<Range>>,
    blocks: usize,
}

impl BestStatic {
    pub fn of(trace: &Trace) -> Self {
        let pieces = crate::bound::pieces(trace, 0);
        let mut order: Vec<usize> = (0..pieces.len()).collect();
        let density = |piece: &crate::bound::Piece| {
            piece.uses.iter().map(|(_, reuse)| reuse / trace.links.link(0).kernel - 1.0 / trace.links.near).sum::<f64>()
        };
        order.sort_by(|a, b| density(&pieces[*b]).total_cmp(&density(&pieces[*a])));
        let mut used: BTreeMap<usize, u64> = BTreeMap::new();
        let mut near: HashMap<usize, Vec<Range>> = HashMap::new();
        for index in order {
            let piece = &pieces[index];
            // Only begins of blocks can make it full, so those are where it is looked.
            let starts = std::iter::once(piece.life.start)
                .chain(used.range(piece.life.start..piece.life.end).map(|(at, _)| *at));
            let level =
                |used: &BTreeMap<usize, u64>, at: usize| used.range(..=at).next_back().map_or(0, |(_, level)| *level);
            let most = starts.map(|at| level(&used, at)).max().unwrap_or(0);
            let bytes = piece.range.bytes().min(trace.near - most.min(trace.near));
            if bytes == 0 {
                continue;
            }
            for border in [piece.life.start, piece.life.end] {
                let before = level(&used, border);
                used.entry(border).or_insert(before);
            }
            for (_, level) in used.range_mut(piece.life.start..piece.life.end) {
                *level += bytes;
            }
            near.entry(piece.block).or_default().push(Range::of(piece.range.start, bytes));
        }
        Self { near, blocks: 0 }
    }
}

impl Policy for BestStatic {
    fn began(&mut self, machine: &mut Machine, block: Range) {
        machine.put(block, Where::Far(0));
        for range in self.near.get(&self.blocks).into_iter().flatten() {
            machine.put(*range, Where::Near);
        }
        self.blocks += 1;
    }
}

/// Brings what a launch names, for what was used least recently.
#[derive(Default)]
pub struct Lru {
    /// When each range was last used.
    used: BTreeMap<u64, (Range, u64)>,
    clock: u64,
}

impl Policy for Lru {
    fn ended(&mut self, _machine: &mut Machine, block: Range) {
        let gone: Vec<u64> = self.used.range(block.start..block.end).map(|(start, _)| *start).collect();
        for start in gone {
            self.used.remove(&start);
        }
    }

    fn began(&mut self, _machine: &mut Machine, block: Range) {
        self.used.insert(block.start, (block, 0));
    }

    fn launch(&mut self, machine: &mut Machine, step: &Step) -> f64 {
        for range in &step.ranges {
            self.clock += 1;
            self.used.insert(range.start, (*range, self.clock));
        }
        let mut swap = Swap::default();
        for range in &step.ranges {
            machine.pieces(*range, &mut |piece, place| {
                if place != Where::Near && !swap.near.iter().any(|other| other.meet(&piece).bytes() > 0) {
                    swap.near.push(piece);
                }
            });
        }
        let mut lacks = swap.bytes_in().saturating_sub(machine.near_room());
        let mut order: Vec<(u64, Range)> = self.used.values().map(|(range, at)| (*at, *range)).collect();
        order.sort_by_key(|(at, _)| *at);
        for (_, range) in order {
            if lacks == 0 {
                break;
            }
            machine.pieces(range, &mut |piece, place| {
                let is_used = step.ranges.iter().any(|other| other.meet(&piece).bytes() > 0);
                let is_taken = swap.far.iter().any(|(other, _)| other.meet(&piece).bytes() > 0);
                if place == Where::Near && !is_used && !is_taken && lacks > 0 {
                    let bytes = piece.bytes().min(lacks);
                    swap.far.push((Range { start: piece.end - bytes, end: piece.end }, 0));
                    lacks -= bytes;
                }
            });
        }
        if lacks == 0 && !swap.near.is_empty() {
            machine.swap(&swap);
        }
        let took = machine.time_of(step);
        machine.now += took;
        took
    }
}

/// Ours.
pub struct Ours {
    pub tiers: Tiers,
    spent_idle: f64,
    /// Every so manyth measurement is off by this factor, if any.
    pub noise: Option<(u64, f64)>,
    measured: u64,
    /// The program runs ahead of the device, if it does: its own clock, and the times that are known to the device alone yet.
    pub ahead: Option<Ahead>,
    /// Memory that moves need far away is made beside the program, and they wait for it.
    pub makes_beside: bool,
    /// The device never comes to rest before a launch, as where work on it waits for another rank.
    pub rests_at_idle_points_alone: bool,
}

/// What is made at once in any case, bytes.
const LITTLE: u64 = 8 << 20;

/// A program that does not wait for the device: launches take it some microseconds, and what they took the device it hears later.
#[derive(Default)]
pub struct Ahead {
    host: f64,
    /// When the device has done a launch, its number, and what it took.
    unknown: VecDeque<(f64, u64, u64)>,
}

/// What a launch takes the program, nanoseconds.
const ENQUEUE: f64 = 6_000.0;

impl Ours {
    pub fn new(trace: &Trace) -> Self {
        let tiers = Tiers::new(Settings::new(trace.links.clone()));
        Self {
            tiers,
            spent_idle: 0.0,
            noise: None,
            measured: 0,
            ahead: None,
            makes_beside: false,
            rests_at_idle_points_alone: false,
        }
    }

    /// The clock that the tiers are told.
    fn clock(&self, machine: &Machine) -> u64 {
        self.ahead.as_ref().map_or(machine.now, |ahead| ahead.host) as u64
    }

    /// The program waits for the device.
    fn waits(&mut self, machine: &mut Machine) {
        if let Some(ahead) = &mut self.ahead {
            ahead.host = ahead.host.max(machine.now);
            machine.now = ahead.host;
        }
    }

    /// The tiers hear of the launches that the device has done by now.
    fn gather(&mut self) {
        let Some(ahead) = &mut self.ahead else { return };
        while let Some((_, launch, took)) = ahead.unknown.pop_front_if(|(done, ..)| *done <= ahead.host) {
            self.tiers.timed(launch, took);
        }
    }

    /// Whether a swap has to wait for memory that is being made, or is made from now on.
    fn waits_for_memory(&self, machine: &mut Machine, swap: &Swap) -> bool {
        let now = self.clock(machine) as f64;
        let Some(making) = machine.making.as_mut().filter(|_| self.makes_beside && !swap.is_back) else { return false };
        let lacks = swap.bytes_out().saturating_sub(making.spare);
        if now >= making.until && lacks >= LITTLE {
            making.spare += lacks;
            making.until = now + lacks as f64 * making.ns;
        }
        now < making.until
    }

    fn carry_out(&mut self, machine: &mut Machine, swap: &Swap) -> f64 {
        if self.waits_for_memory(machine, swap) {
            self.tiers.not_begun(swap);
            return 0.0;
        }
        self.waits(machine);
        let all: Vec<Range> = swap.near.iter().copied().chain(swap.far.iter().map(|(range, _)| *range)).collect();
        for (index, range) in all.iter().enumerate() {
            assert!(all[..index].iter().all(|other| other.meet(range).bytes() == 0), "{swap:?} names something twice");
        }
        let swap = &machine.by_chunks(swap, |chunk| self.tiers.parts(chunk));
        let took = machine.swap(swap);
        for range in swap.near.iter().copied().chain(swap.far.iter().map(|(range, _)| *range)) {
            self.tiers.placed(range);
        }
        let made = machine.making.map_or(0.0, |making| making.took);
        self.tiers.moved(swap.bytes_in(), swap.bytes_out(), took as u64, made as u64);
        self.waits(machine);
        took
    }
}

impl Policy for Ours {
    fn began(&mut self, _machine: &mut Machine, block: Range) {
        self.tiers.block_began(block.start, block.bytes());
    }

    fn ended(&mut self, _machine: &mut Machine, block: Range) {
        self.tiers.block_ended(block.start);
    }

    fn launch(&mut self, machine: &mut Machine, step: &Step) -> f64 {
        let launch = self.tiers.launched(step.function, step.shape(), &step.words(), &*machine);
        if launch.ask || launch.time_it || launch.tell_time {
            self.gather();
        }
        if launch.tell_time {
            self.tiers.time_is(self.clock(machine), &*machine);
        }
        let mut time_it = launch.time_it;
        if launch.ask
            && let Some(swap) = self.tiers.before(launch.id, self.clock(machine), &*machine)
        {
            for (range, _) in swap.far.iter().filter(|_| machine.chunks.is_none()) {
                let is_used = step.ranges.iter().any(|used| range.start <= used.start && used.start < range.end);
                // What was near before anything moved comes back even in place of something else that the launch names.
                let is_back = || {
                    let mut pairs =
                        swap.near.iter().flat_map(|near| step.ranges.iter().map(move |used| near.meet(used)));
                    pairs.any(|both| both.bytes() > 0)
                };
                assert!(!is_used || is_back(), "{range:?} leaves before a launch that names it: {step:?}");
            }
            if self.rests_at_idle_points_alone {
                self.tiers.not_begun(&swap);
            } else {
                self.carry_out(machine, &swap);
                time_it |= swap.time_it;
            }
        }
        if time_it {
            self.tiers.timing(launch.id, &*machine);
        }
        let took = machine.time_of(step);
        if let Some(ahead) = &mut self.ahead {
            ahead.host += ENQUEUE;
            machine.now = machine.now.max(ahead.host);
        }
        machine.now += took;
        if time_it {
            self.measured += 1;
            let off =
                self.noise.filter(|(each, _)| self.measured.is_multiple_of(*each)).map_or(1.0, |(_, factor)| factor);
            let took = (took * off) as u64;
            match &mut self.ahead {
                Some(ahead) => ahead.unknown.push_back((machine.now, launch.id, took)),
                None => _ = self.tiers.timed(launch.id, took),
            }
            if launch.hear_it {
                self.waits(machine);
                self.gather();
            }
        }
        took
    }

    fn copied(&mut self, machine: &mut Machine, range: Range) {
        if self.tiers.copied(&[range], &*machine).tell_time {
            self.tiers.time_is(self.clock(machine), &*machine);
        }
    }

    fn told(&mut self, machine: &Machine) -> String {
        format!("{:?} {:?}", self.tiers.ledger(), self.tiers.told(4, machine).readers)
    }

    fn idle(&mut self, machine: &mut Machine) {
        self.waits(machine);
        self.gather();
        self.tiers.waited(self.clock(machine), &*machine);
        let budget = 0.05 * machine.now - self.spent_idle;
        if budget > 0.0 {
            for swap in self.tiers.when_idle(budget as u64, self.clock(machine), &*machine) {
                self.spent_idle += self.carry_out(machine, &swap);
            }
        }
    }
}
