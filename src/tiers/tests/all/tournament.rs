//! A tournament of simple rules by set dueling, as in caches (Qureshi et al., "Adaptive Insertion Policies for High Performance Caching", ISCA 2007):
//! a few samples of memory each keep to one rule, whatever it costs, and all else follows the rule whose sample lately lost least.
//!
//! A sample is a frame of each stripe of addresses, so that every tensor is in each of them, and has its part of near memory to itself. What it loses is known here
//! exactly (the passes over what is far, and its copies), which is more than any driver tells; a real tournament does no better.

use crate::machine::{Machine, Step};
use crate::policies::Policy;
use gpupool_tiers::{FRAME, Range, Swap, Where, Whereabouts};
use std::collections::BTreeMap;
use std::ops::Range as Span;

/// Frames of addresses after which samples come again.
const STRIPE: u64 = 64;
/// How much of what a rule lost is remembered from one wait of the program to the next.
const REMEMBERED: f64 = 0.8;
/// By how many passes something has to be read more often than what leaves for it: a swap costs as much as two.
const MORE_OFTEN: f64 = 2.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// All stays where it was first put.
    Stay,
    /// What is used comes, for what was used least recently.
    Recent,
    /// What is read more often lately comes, for what is read least.
    Often,
}

const RULES: [Rule; 3] = [Rule::Stay, Rule::Recent, Rule::Often];

#[derive(Clone, Copy)]
struct Used {
    end: u64,
    /// When last, and the program's waits by then.
    last: u64,
    waits: u32,
    /// Passes over it, of which each wait forgets a part.
    passes: f64,
}

impl Used {
    fn passes_by(&self, waits: u32) -> f64 {
        self.passes * REMEMBERED.powi((waits - self.waits) as i32)
    }
}

/// Some frames of each stripe.
struct Team {
    frames: Span<u64>,
    /// What it keeps to; none where it follows the best.
    leads: Option<Rule>,
    /// Its parts of living blocks by their starts, none of which overlap.
    used: BTreeMap<u64, Used>,
    /// What it lost lately, nanoseconds.
    lost: f64,
}

impl Team {
    /// Its parts of a range.
    fn parts(&self, range: Range) -> Vec<Range> {
        let bytes = STRIPE * FRAME;
        let of = |stripe: u64| {
            let part = Range {
                start: stripe * bytes + self.frames.start * FRAME,
                end: stripe * bytes + self.frames.end * FRAME,
            };
            part.meet(&range)
        };
        (range.start / bytes..=range.end / bytes).map(of).filter(|part| part.bytes() > 0).collect()
    }

    fn cut(&mut self, at: u64) {
        if let Some((_, used)) = self.used.range_mut(..at).next_back()
            && at < used.end
        {
            let rest = *used;
            used.end = at;
            self.used.insert(at, rest);
        }
    }

    fn uses(&mut self, part: Range, reuse: f64, clock: u64, waits: u32) {
        self.cut(part.start);
        self.cut(part.end);
        for (_, used) in self.used.range_mut(part.start..part.end) {
            *used = Used { passes: used.passes_by(waits) + reuse, last: clock, waits, ..*used };
        }
    }

    /// Which of its parts should leave first.
    fn victims(&self, rule: Rule, waits: u32) -> Vec<(f64, Range)> {
        let key = |used: &Used| if rule == Rule::Often { used.passes_by(waits) } else { used.last as f64 };
        let mut all: Vec<(f64, Range)> =
            self.used.iter().map(|(start, used)| (key(used), Range { start: *start, end: used.end })).collect();
        all.sort_by(|one, other| one.0.total_cmp(&other.0));
        all
    }

    /// What should move before a launch that reads these parts, each so often; `room` is free for it.
    fn moves(&self, rule: Rule, machine: &Machine, parts: &[(Range, f64)], mut room: u64, waits: u32) -> Swap {
        let mut swap = Swap::default();
        if rule == Rule::Stay {
            return swap;
        }
        let mut far: Vec<Range> = Vec::new();
        for (part, _) in parts {
            machine.pieces(*part, &mut |piece, place| {
                if place != Where::Near && far.iter().all(|other| other.meet(&piece).bytes() == 0) {
                    far.push(piece);
                }
            });
        }
        if far.is_empty() {
            return swap;
        }
        // What could leave, the best last.
        let mut near: Vec<(f64, Range)> = Vec::new();
        for (key, range) in self.victims(rule, waits).into_iter().rev() {
            machine.pieces(range, &mut |piece, place| {
                if place == Where::Near && parts.iter().all(|(part, _)| part.meet(&piece).bytes() == 0) {
                    near.push((key, piece));
                }
            });
        }
        for comes in far {
            let wanted = self.used.range(..=comes.start).next_back().map_or(0.0, |(_, used)| used.passes_by(waits));
            let mut lacks = comes.bytes().saturating_sub(room);
            let goes_on = |key: f64| rule == Rule::Recent || wanted >= key + MORE_OFTEN;
            let available: u64 = near.iter().filter(|(key, _)| goes_on(*key)).map(|(_, range)| range.bytes()).sum();
            if available < lacks {
                continue;
            }
            room -= comes.bytes().min(room);
            swap.near.push(comes);
            while lacks > 0
                && let Some((_, last)) = near.last_mut()
            {
                let bytes = last.bytes().min(lacks);
                swap.far.push((Range { start: last.end - bytes, end: last.end }, 0));
                last.end -= bytes;
                lacks -= bytes;
                if last.bytes() == 0 {
                    near.pop();
                }
            }
        }
        swap
    }
}

pub struct Tournament {
    teams: Vec<Team>,
    follows: Rule,
    clock: u64,
    waits: u32,
}

impl Tournament {
    pub fn new() -> Self {
        let team = |frames: Span<u64>, leads| Team { frames, leads, used: BTreeMap::new(), lost: 0.0 };
        let mut teams: Vec<Team> =
            RULES.into_iter().zip(0..).map(|(rule, frame)| team(frame..frame + 1, Some(rule))).collect();
        teams.push(team(RULES.len() as u64..STRIPE, None));
        Self { teams, follows: Rule::Stay, clock: 0, waits: 0 }
    }
}

/// Puts neighbours together, which are mapped at once.
fn join(swap: &mut Swap) {
    swap.near.sort_unstable();
    swap.near.dedup_by(|next, last| {
        let joined = last.end == next.start;
        last.end = if joined { next.end } else { last.end };
        joined
    });
    swap.far.sort_unstable();
    swap.far.dedup_by(|next, last| {
        let joined = last.0.end == next.0.start;
        last.0.end = if joined { next.0.end } else { last.0.end };
        joined
    });
}

impl Policy for Tournament {
    fn began(&mut self, _machine: &mut Machine, block: Range) {
        for team in &mut self.teams {
            for part in team.parts(block) {
                team.used.insert(part.start, Used { end: part.end, last: 0, waits: self.waits, passes: 0.0 });
            }
        }
    }

    fn ended(&mut self, _machine: &mut Machine, block: Range) {
        for team in &mut self.teams {
            team.used.retain(|start, _| !(block.start..block.end).contains(start));
        }
    }

    fn launch(&mut self, machine: &mut Machine, step: &Step) -> f64 {
        self.clock += 1;
        let mut swap = Swap::default();
        let link = machine.links.link(0);
        let of = |team: &Team| -> Vec<(Range, f64)> {
            let reuse = |index: usize| step.reuses.get(index).copied().unwrap_or(step.reuse);
            let ranges = step.ranges.iter().enumerate();
            ranges
                .flat_map(|(index, range)| team.parts(*range).into_iter().map(move |part| (part, reuse(index))))
                .collect()
        };
        for team in &mut self.teams {
            let parts = of(team);
            parts.iter().for_each(|(part, reuse)| team.uses(*part, *reuse, self.clock, self.waits));
            let room = machine.near_room() * (team.frames.end - team.frames.start) / STRIPE;
            let mut moves = team.moves(team.leads.unwrap_or(self.follows), machine, &parts, room, self.waits);
            team.lost += machine.links.copy_ns(0, moves.bytes_in(), moves.bytes_out());
            swap.near.append(&mut moves.near);
            swap.far.append(&mut moves.far);
        }
        if !swap.near.is_empty() {
            join(&mut swap);
            machine.swap(&swap);
        }
        for team in self.teams.iter_mut().filter(|team| team.leads.is_some()) {
            let far = of(team).into_iter().map(|(part, reuse)| machine.far_bytes(part) as f64 * reuse / link.kernel);
            team.lost += far.sum::<f64>();
        }
        let took = machine.time_of(step);
        machine.now += took;
        took
    }

    fn idle(&mut self, _machine: &mut Machine) {
        self.waits += 1;
        let best = self.teams.iter().filter(|team| team.leads.is_some()).min_by(|a, b| a.lost.total_cmp(&b.lost));
        self.follows = best.and_then(|team| team.leads).unwrap_or(Rule::Stay);
        self.teams.iter_mut().for_each(|team| team.lost *= REMEMBERED);
    }

    fn told(&mut self, _machine: &Machine) -> String {
        format!("{:?}: {:?}", self.follows, self.teams.iter().map(|team| team.lost / 1e6).collect::<Vec<_>>())
    }
}
