//! Names that the program gives to blocks of the pool, and how much of a name may lie on the GPU that asked for it.
//!
//! A budget is enforced at the two moments at which the program says where memory is to lie: when it names a block, and when it moves
//! one home. What is over it goes to the next place, or stays and is told; nothing moves at any other time.

use super::by_hand::{self, Unplaced};
use super::{block_at, pieces, scope};
use crate::backing::open;
use crate::{log, process};
use gpupool_config::format_size;
use gpupool_cuda::{CuResult, Driver, Stream};
use gpupool_events::{BlockLabel, LabelLevel};
use gpupool_pool::{Block, Place};
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Label {
    name: String,
    /// Bytes of its blocks that may lie on their home GPUs.
    budget: Option<u64>,
}

/// A block that has a name.
#[derive(Clone, Copy)]
struct Named {
    block: Block,
    /// Index of its label.
    label: usize,
}

struct Labels {
    /// Never shorter than before.
    all: Vec<Label>,
    /// By the address that the block starts at.
    blocks: BTreeMap<u64, Named>,
}

static LABELS: Mutex<Labels> = Mutex::new(Labels { all: Vec::new(), blocks: BTreeMap::new() });
/// How many blocks have a name, readable without the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

impl Labels {
    fn index(&mut self, name: &str) -> usize {
        self.all.iter().position(|label| label.name == name).unwrap_or_else(|| {
            self.all.push(Label { name: name.to_owned(), budget: None });
            self.all.len() - 1
        })
    }

    fn of(&self, label: usize) -> impl Iterator<Item = Block> + '_ {
        self.blocks.values().filter(move |named| named.label == label).map(|named| named.block)
    }

    fn count(&self) {
        COUNT.store(self.blocks.len(), Ordering::Release);
    }

    /// What there is of a label, for the log.
    fn level(&self, label: usize) -> LabelLevel {
        let Label { name, budget } = &self.all[label];
        let (blocks, bytes) = self.of(label).fold((0, 0), |(blocks, bytes), block| (blocks + 1, bytes + block.bytes));
        LabelLevel { label: name.clone(), blocks, bytes, budget: *budget }
    }
}

/// What has a name, and where it lies, in bytes that were asked for.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    pub name: String,
    pub blocks: u64,
    pub bytes: u64,
    /// On the GPU that was current when each was allocated.
    pub at_home: u64,
    pub on_peers: u64,
    pub on_host: u64,
    pub budget: Option<u64>,
}

/// Why a block did not get a name, or is over the budget of the one it has now.
pub enum Unlabelled {
    /// No live block of this process's pool.
    NotOurs,
    /// The label has it, and it does not lie where its budget wants it.
    OverBudget,
    /// The driver's answer where it should have gone elsewhere.
    Refused(CuResult),
}

/// Names the block that an address lies in, or takes its name back.
pub fn set(driver: &Driver, address: u64, name: Option<&str>) -> Result<(), Unlabelled> {
    let block = open::opened().and_then(|opened| opened.pool.block_at(address)).ok_or(Unlabelled::NotOurs)?;
    let levels = {
        let mut labels = LABELS.lock();
        let before = labels.blocks.remove(&block.address).filter(|named| named.block.id == block.id);
        let label = name.map(|name| labels.index(name));
        if let Some(label) = label {
            labels.blocks.insert(block.address, Named { block, label });
        }
        labels.count();
        let changed = before.map(|named| named.label).into_iter().chain(label);
        changed.map(|label| labels.level(label)).collect::<Vec<_>>()
    };
    if block_at(block.address).is_none_or(|now| now.id != block.id) {
        // Another thread freed it meanwhile, and may not have found it here.
        ended(&block);
        return Err(Unlabelled::NotOurs);
    }
    log::emit(|| {
        let Block { address, bytes, home, .. } = block;
        let text = match name {
            Some(name) => format!("{} at {address:#x} is {name}", format_size(bytes)),
            None => format!("{} at {address:#x} has no name any more", format_size(bytes)),
        };
        (BlockLabel { address, bytes, home, label: name.map(str::to_owned) }, text)
    });
    levels.into_iter().for_each(report);
    match name {
        Some(name) => keep_within(driver, &block, name),
        None => Ok(()),
    }
}

fn report(level: LabelLevel) {
    log::emit(move || {
        let text = format!("{} in {} blocks are {}", format_size(level.bytes), level.blocks, level.label);
        (level, text)
    });
}

/// Names a block that this thread has just made, if it is in such a scope. What is over the name's budget and cannot go elsewhere stays:
/// a block that is there is more to the program than where it is.
#[inline]
pub fn name_in_scope(block: &Block) {
    if let (Some(name), Some(driver)) = (scope::name(), process::driver()) {
        let _ = set(driver, block.address, Some(scope::text(&name)));
    }
}

/// Whether a block of so many bytes that this thread asks for is to be elsewhere than at home: the program says so, or it would be more
/// than its name may have there.
#[inline]
pub fn wants_away(bytes: u64) -> bool {
    scope::is_far() || scope::name().is_some_and(|name| is_over_budget(scope::text(&name), bytes))
}

/// Whether so many bytes more at home are more than a name may have there.
fn is_over_budget(name: &str, more: u64) -> bool {
    // Most names have none, and then nobody asks where their blocks lie.
    let has_one = LABELS.lock().all.iter().any(|label| label.name == name && label.budget.is_some());
    let usage = if has_one { usage_of(name) } else { None };
    usage.is_some_and(|usage| usage.budget.is_some_and(|budget| usage.at_home + more > budget))
}

/// Sends a block to the next place that has room, if its label has more at home than it may.
fn keep_within(driver: &Driver, block: &Block, name: &str) -> Result<(), Unlabelled> {
    let is_over = || is_over_budget(name, 0);
    if !is_over() {
        return Ok(());
    }
    let places = open::opened().map_or_else(Vec::new, |opened| opened.plan.order(block.home));
    for place in places.into_iter().filter(|place| *place != Place::Gpu(block.home)) {
        match by_hand::place(driver, block.address, block.bytes, place, Stream::DEFAULT) {
            Ok(()) => return Ok(()),
            Err(
                Unplaced::NoRoom
                | Unplaced::Refused(CuResult::OUT_OF_MEMORY)
                | Unplaced::OutOfReach
                | Unplaced::NoPlace,
            ) => {}
            Err(Unplaced::Refused(result)) => return Err(Unlabelled::Refused(result)),
            Err(Unplaced::NotOurs) => return Err(Unlabelled::NotOurs),
            // The next place could take no more of it.
            Err(Unplaced::Stayed | Unplaced::OverBudget) => break,
        }
    }
    if is_over() { Err(Unlabelled::OverBudget) } else { Ok(()) }
}

/// Sets how much of a label may lie at home, or takes that back. What lies there already stays.
pub fn set_budget(name: &str, budget: Option<u64>) {
    let level = {
        let mut labels = LABELS.lock();
        let label = labels.index(name);
        labels.all[label].budget = budget;
        labels.level(label)
    };
    report(level);
}

/// What a block is called.
pub fn of(block: &Block) -> Option<String> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    let labels = LABELS.lock();
    let named = labels.blocks.get(&block.address).filter(|named| named.block.id == block.id)?;
    Some(labels.all[named.label].name.clone())
}

/// Whether so many bytes more of a block at home are more than its label may have there.
pub fn is_beyond_budget(block: &Block, more: u64) -> bool {
    of(block).filter(|_| more > 0).is_some_and(|name| is_over_budget(&name, more))
}

/// Forgets a block that ended.
#[inline]
pub fn ended(block: &Block) {
    if COUNT.load(Ordering::Acquire) != 0 {
        forget(block);
    }
}

#[cold]
fn forget(block: &Block) {
    let level = {
        let mut labels = LABELS.lock();
        let is_it = labels.blocks.get(&block.address).is_some_and(|named| named.block.id == block.id);
        let named = if is_it { labels.blocks.remove(&block.address) } else { None };
        labels.count();
        named.map(|named| labels.level(named.label))
    };
    level.into_iter().for_each(report);
}

/// Every label, in the order in which they were first used.
pub fn usage() -> Vec<Usage> {
    let names: Vec<String> = LABELS.lock().all.iter().map(|label| label.name.clone()).collect();
    names.iter().filter_map(|name| usage_of(name)).collect()
}

/// The labels that hold most, `most` of them at most, and how many others hold anything. One look at every block that has a name, and
/// one at where the blocks of those labels lie.
pub fn largest(most: usize) -> (Vec<Usage>, u32) {
    if COUNT.load(Ordering::Acquire) == 0 {
        return (Vec::new(), 0);
    }
    let (found, more) = {
        let labels = LABELS.lock();
        let mut found: Vec<(Usage, Vec<Block>)> = labels
            .all
            .iter()
            .map(|Label { name, budget }| {
                (Usage { name: name.clone(), budget: *budget, ..Usage::default() }, Vec::new())
            })
            .collect();
        for named in labels.blocks.values() {
            let (usage, blocks) = &mut found[named.label];
            usage.bytes += named.block.bytes;
            blocks.push(named.block);
        }
        found.retain(|(_, blocks)| !blocks.is_empty());
        found.sort_by_key(|(usage, _)| Reverse(usage.bytes));
        let more = found.len().saturating_sub(most);
        found.truncate(most);
        (found, more as u32)
    };
    (found.into_iter().map(|(usage, blocks)| located(Usage { bytes: 0, ..usage }, blocks)).collect(), more)
}

fn usage_of(name: &str) -> Option<Usage> {
    let (blocks, budget): (Vec<Block>, _) = {
        let labels = LABELS.lock();
        let label = labels.all.iter().position(|label| label.name == name)?;
        (labels.of(label).collect(), labels.all[label].budget)
    };
    Some(located(Usage { name: name.to_owned(), budget, ..Usage::default() }, blocks))
}

/// With what there is of these blocks, and where they lie. One that has ended since counts for nothing, so that the parts add up.
fn located(mut usage: Usage, blocks: Vec<Block>) -> Usage {
    for block in blocks {
        let pieces = pieces(block.address, block.bytes);
        usage.blocks += u64::from(!pieces.is_empty());
        for piece in pieces {
            usage.bytes += piece.bytes;
            match piece.place {
                Place::Gpu(gpu) if gpu == block.home => usage.at_home += piece.bytes,
                Place::Gpu(_) => usage.on_peers += piece.bytes,
                Place::Host(_) | Place::Pageable => usage.on_host += piece.bytes,
                Place::Disk => {}
            }
        }
    }
    usage
}
