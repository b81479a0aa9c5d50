//! Where a block lies, and which of it must stay there.

use crate::pool::Pool;
use crate::registry::Record;
use crate::state::{State, bytes_of};
use crate::{Backend, Block, FRAME, FreeError, Piece, Pin, Pins};

/// A range inside one live block, in frames.
struct Within {
    start: u32,
    end: u32,
    /// First frame and number of the block.
    block: (u32, u64),
}

impl<B: Backend> Pool<B> {
    /// Where each part of a range lies, chunk by chunk in address order: of `bytes` from `address` on, as far as the live
    /// block that `address` lies in goes, its last frame included. Empty if there is no such block.
    pub fn pieces(&self, address: u64, bytes: u64) -> Vec<Piece<B::Handle>> {
        let mut state = self.lock();
        let Some((start, record)) = self.around(&state, address) else { return Vec::new() };
        let block_end = self.address(start + record.frames);
        let end = address.saturating_add(bytes).min(block_end);
        let Some(last) = self.frame_at(end - 1).filter(|_| end > address) else { return Vec::new() };
        let first = self.frame_at(address).unwrap_or(start);
        let chunks: Vec<_> = state.chunks.touched(first, last + 1).copied().collect();
        let mut pieces = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let (chunk_address, chunk_bytes) = (self.address(chunk.start), bytes_of(chunk.frames));
            let from = address.max(chunk_address);
            let asked = state.asked.touches(chunk.start, chunk.start + chunk.frames, &self.registry);
            pieces.push(Piece {
                address: from,
                bytes: end.min(chunk_address + chunk_bytes) - from,
                place: state.place(chunk.place),
                chunk_address,
                chunk_bytes,
                handle: chunk.handle,
                pins: chunk.pins | if asked { Pin::Asked.into() } else { Pins::NONE },
            });
        }
        pieces
    }

    /// Marks what is below a range of a live block as memory that must stay on its physical pages, and returns the bytes
    /// of the chunks it touches: marks are by the chunk, so neighbours in the same one stay, too. [`Pin::Asked`] holds
    /// until [`Pool::unpin`] or the end of the block, any other reason until the chunk goes back to the driver.
    ///
    /// `None`, and no mark, unless the whole range lies in one live block.
    pub fn pin(&self, address: u64, bytes: u64, why: Pin) -> Option<u64> {
        let mut state = self.lock();
        let Within { start, end, block } = self.within(&state, address, bytes)?;
        if why == Pin::Asked {
            state.asked.add((address, bytes), (start, end), block);
        } else {
            for chunk in state.chunks.mark(start, end, why.into()) {
                state.account(chunk.place).pin(bytes_of(chunk.frames));
            }
        }
        Some(state.chunks.touched(start, end).map(|chunk| bytes_of(chunk.frames)).sum())
    }

    /// Takes one [`Pin::Asked`] mark off that was put on exactly this range; `false` if there is none, or its block ended.
    pub fn unpin(&self, address: u64, bytes: u64) -> bool {
        self.lock().asked.remove(address, bytes, &self.registry)
    }

    /// As [`Pool::free`], and the chunks that no other block stands on go back to the driver at once: for a block that others
    /// have mapped, so that what they still read is not overwritten by the next block. It waits for the home GPU in any case;
    /// inside a stream capture, where nobody can wait, it is a lazy free.
    ///
    /// # Errors
    /// See [`FreeError`].
    pub fn free_and_return(&self, address: u64) -> Result<Block, FreeError<B::Error>> {
        let start = self.start_at(address).ok_or(FreeError::NotABlock)?;
        let (record, quiet) = self.wait_and_end(start, |record| self.quiesce(self.front.own(), &[record.gpu]))?;
        if quiet {
            let leaving = {
                let mut state = self.lock();
                state.retire_block(start, &record, None);
                state.evict_range(start, start + record.frames)
            };
            self.send_back(leaving, &mut []);
        } else {
            self.retire(start, &record, Some(record.gpu));
        }
        Ok(record.block(address))
    }

    /// The live block around an address, with its first frame.
    pub(crate) fn around(&self, state: &State<B::Handle>, address: u64) -> Option<(u32, Record)> {
        let frame = self.frame_at(address)?;
        self.registry.around(frame, state.runs.around(frame)?.start)
    }

    fn within(&self, state: &State<B::Handle>, address: u64, bytes: u64) -> Option<Within> {
        let (first, record) = self.around(state, address)?;
        let end = address.checked_add(bytes).filter(|_| bytes > 0)?;
        if end > self.address(first + record.frames) {
            return None;
        }
        let start = self.frame_at(address)?;
        let frames = (end - self.address(start)).div_ceil(FRAME) as u32;
        Some(Within { start, end: start + frames, block: (first, record.id) })
    }
}
