//! Pooled memory that the program places itself.

use super::{Placing, block_at, labels, pieces, places, say};
use crate::backing::{level, open, residence};
use crate::watch::capture;
use crate::{bell, gate, log};
use gpupool_config::format_size;
use gpupool_cuda::{CuResult, Driver, Stream};
use gpupool_events::BlockMove;
use gpupool_pool::{MoveError, Moved, Place};

/// Why a range does not lie where it should.
pub enum Unplaced {
    /// It lies in no live block of this process's pool.
    NotOurs,
    /// There is no such place.
    NoPlace,
    /// The block's GPU cannot have memory there.
    OutOfReach,
    /// Some of it stayed, or none of it is whole frames.
    Stayed,
    /// The block's label has as much at home as it may.
    OverBudget,
    /// The place may hold no more, by its limit.
    NoRoom,
    /// The driver's answer, or one that says the same.
    Refused(CuResult),
}

impl Unplaced {
    /// For a sentence that names the memory.
    pub fn in_words(&self) -> String {
        match self {
            Self::NotOurs => "it was freed meanwhile, or is not the pool's".to_owned(),
            Self::NoPlace | Self::OutOfReach => "there is no other place that it may lie at".to_owned(),
            Self::Stayed => "others know it by its pages, a call uses it, or it is mapped in part".to_owned(),
            Self::OverBudget => "its label has as much there as it may".to_owned(),
            Self::NoRoom => "its place may hold no more".to_owned(),
            Self::Refused(result) => format!("the driver answered {result}"),
        }
    }
}

/// Moves a range of a live block to a place, once all work that may use it is over. `stream` is one of the program's: not while it
/// is being captured.
pub fn place(driver: &Driver, address: u64, bytes: u64, place: Place, stream: Stream) -> Result<(), Unplaced> {
    let opened = open::opened().filter(|opened| opened.contains(address)).ok_or(Unplaced::NotOurs)?;
    let block = block_at(address).ok_or(Unplaced::NotOurs)?;
    // Of a small block the pool would ask about the memory that it shares with others.
    if bytes > block.address + block.bytes - address {
        return Err(Unplaced::NotOurs);
    }
    let _captured = capture::look(driver, stream);
    // The wait could be made without breaking a capture, but what was captured knows copies by where their operands lie.
    if capture::under_way() {
        return Err(Unplaced::Refused(CuResult::STREAM_CAPTURE_UNSUPPORTED));
    }
    if place == Place::Gpu(block.home) {
        let away = pieces(address, bytes).into_iter().filter(|piece| piece.place != place);
        if labels::is_beyond_budget(&block, away.map(|piece| piece.bytes).sum()) {
            return Err(Unplaced::OverBudget);
        }
    }
    let by_hand = gate::enter_by_hand();
    let done = opened.pool.move_to(address, bytes, place);
    drop(by_hand);
    let Moved { moved, there, anchored, shared } = done.map_err(|error| {
        level::report();
        match error {
            MoveError::NotABlock => Unplaced::NotOurs,
            MoveError::NoPlace => Unplaced::NoPlace,
            MoveError::OutOfReach => Unplaced::OutOfReach,
            MoveError::Full { .. } => Unplaced::Refused(CuResult::OUT_OF_MEMORY),
            MoveError::NotNow | MoveError::NotQuiet => Unplaced::Refused(CuResult::NOT_READY),
            MoveError::Backend(result) => Unplaced::Refused(result),
        }
    })?;
    if moved + there > 0 {
        say(&block, address, bytes, Placing::Put);
    }
    let stayed = anchored + shared;
    if moved > 0 {
        residence::is_far();
        level::report();
        bell::changed();
    }
    log::emit(|| {
        let size = format_size(moved);
        let but = if stayed > 0 { format!("; {} stayed", format_size(stayed)) } else { String::new() };
        let (home, label) = (block.home, labels::of(&block));
        let event = BlockMove { address, bytes: moved, home, place: place.to_string(), stayed, label };
        (event, format!("moved {size} at {address:#x} to {place}{but}"))
    });
    if moved > 0 {
        places::tell_moved(address, bytes);
    }
    // A range without a whole page, a small block for one, cannot move, but it may be where it should be.
    let lies_there = || pieces(address, bytes).iter().all(|piece| piece.place == place);
    if stayed > 0 || moved + there == 0 && !lies_there() { Err(Unplaced::Stayed) } else { Ok(()) }
}

/// Whether a range lies in one live block of this process's pool.
pub fn is_in_one_block(address: u64, bytes: u64) -> bool {
    block_at(address).is_some_and(|block| bytes <= block.address + block.bytes - address)
}

/// A range of a live block may be anywhere again.
pub fn is_anywhere(address: u64, bytes: u64) -> Result<(), Unplaced> {
    let block = block_at(address).ok_or(Unplaced::NotOurs)?;
    say(&block, address, bytes, Placing::Anywhere);
    Ok(())
}

/// Whether a GPU has access to a range of a live block, or will have once it has a context; one that the program does not see is no place.
pub fn is_reached(address: u64, bytes: u64, gpu: u32) -> Result<bool, Unplaced> {
    let opened = open::opened().filter(|opened| opened.contains(address)).ok_or(Unplaced::NotOurs)?;
    let pieces = pieces(address, bytes);
    if pieces.is_empty() {
        return Err(Unplaced::NotOurs);
    }
    if opened.plan.topology.gpus.iter().all(|seen| seen.ordinal != gpu) {
        return Err(Unplaced::NoPlace);
    }
    Ok(pieces.iter().all(|piece| opened.plan.readers(piece.place).any(|reader| reader == gpu)))
}
