//! Pooled memory that the program places itself.

use super::block_at;
use crate::backing::{level, open};
use crate::watch::capture;
use crate::{bell, log};
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
    /// The driver's answer, or one that says the same.
    Refused(CuResult),
}

/// Moves a range of a live block to a place, once all work that may use it is over. `stream` is one of the program's: not while it
/// is being captured.
pub fn place(driver: &Driver, address: u64, bytes: u64, place: Place, stream: Stream) -> Result<(), Unplaced> {
    let opened = open::opened().filter(|opened| opened.contains(address)).ok_or(Unplaced::NotOurs)?;
    let block = block_at(address).ok_or(Unplaced::NotOurs)?;
    let _captured = capture::look(driver, stream);
    // The wait could be made without breaking a capture, but what was captured knows copies by where their operands lie.
    if capture::under_way() {
        return Err(Unplaced::Refused(CuResult::STREAM_CAPTURE_UNSUPPORTED));
    }
    let Moved { moved, there, anchored, shared } = opened.pool.move_to(address, bytes, place).map_err(|error| {
        level::report();
        match error {
            MoveError::NotABlock => Unplaced::NotOurs,
            MoveError::NoPlace => Unplaced::NoPlace,
            MoveError::OutOfReach => Unplaced::OutOfReach,
            MoveError::Full { .. } => Unplaced::Refused(CuResult::OUT_OF_MEMORY),
            MoveError::NotNow => Unplaced::Refused(CuResult::NOT_READY),
            MoveError::Backend(result) => Unplaced::Refused(result),
        }
    })?;
    let stayed = anchored + shared;
    if moved > 0 {
        level::report();
        bell::changed();
    }
    log::emit(|| {
        let size = format_size(moved);
        let but = if stayed > 0 { format!("; {} stayed", format_size(stayed)) } else { String::new() };
        let event = BlockMove { address, bytes: moved, home: block.home, place: place.to_string(), stayed };
        (event, format!("moved {size} at {address:#x} to {place}{but}"))
    });
    if stayed > 0 || moved + there == 0 { Err(Unplaced::Stayed) } else { Ok(()) }
}
