//! Where a block lies, and which of it must stay there.

use crate::chunks::Chunk;
use crate::pool::Pool;
use crate::registry::Record;
use crate::slab::Ground;
use crate::state::{State, bytes_of};
use crate::sync::yield_now;
use crate::{Anchor, Anchors, Backend, Block, FRAME, Mapped, Piece};

/// A range inside one live block, in frames.
struct Within {
    start: u32,
    end: u32,
    /// First frame and number of the block.
    block: (u32, u64),
    /// It is the slab of the small block that is meant.
    ground: Option<Ground>,
}

impl<B: Backend> Pool<B> {
    /// Where each part of a range lies, chunk by chunk in address order: of `bytes` from `address` on, as far as the live
    /// block that `address` lies in goes, its last frame included unless the block is a small one. Empty if there is no such block.
    pub fn pieces(&self, address: u64, bytes: u64) -> Vec<Piece<B::Handle>> {
        let mut state = self.lock();
        let (start, block_end) = if let Some((ground, block)) = self.ground_at(address) {
            (ground.start, block.address + block.bytes)
        } else if let Some((start, record)) = self.around(&state, address).filter(|(_, record)| !record.slab) {
            (start, self.address(start + record.frames))
        } else {
            return Vec::new();
        };
        self.pieces_up_to(&mut state, start, (address, address.saturating_add(bytes).min(block_end)))
    }

    /// The same of the stretch around `address` ([`Pool::stretches`]): of a slab all of it counts, and not only the small block that `address` lies in, or nothing where that has ended.
    pub fn pieces_of_stretch(&self, address: u64, bytes: u64) -> Vec<Piece<B::Handle>> {
        let mut state = self.lock();
        let Some((start, record)) = self.around(&state, address) else { return Vec::new() };
        let end = address.saturating_add(bytes).min(self.address(start + record.frames));
        self.pieces_up_to(&mut state, start, (address, end))
    }

    fn pieces_up_to(
        &self,
        state: &mut State<B::Handle>,
        start: u32,
        (address, end): (u64, u64),
    ) -> Vec<Piece<B::Handle>> {
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
                anchors: chunk.anchors.reasons() | if asked { Anchor::Asked.into() } else { Anchors::NONE },
            });
        }
        pieces
    }

    /// Slabs that no block stands on are free memory from here on, and none of [`Pool::stretches`].
    pub fn free_empty_slabs(&self) {
        drop(self.lock_all());
    }

    /// Every live stretch of memory that can go elsewhere as one, whoever's home it is: blocks with frames of their own, and the slabs that small
    /// ones stand on. In order of address, each with where its parts lie, chunk by chunk.
    pub fn stretches(&self) -> Vec<(Block, Vec<Piece<B::Handle>>)> {
        let mut state = self.lock();
        let records = self.records_out(&state);
        let of = |(start, record): (u32, Record)| {
            let block = record.block(self.address(start));
            let end = block.address + block.bytes;
            let chunks: Vec<_> = state.chunks.touched(start, start + record.frames).copied().collect();
            let piece = |chunk: Chunk<B::Handle>| {
                let (chunk_address, chunk_bytes) = (self.address(chunk.start), bytes_of(chunk.frames));
                let address = block.address.max(chunk_address);
                let asked = state.asked.touches(chunk.start, chunk.end(), &self.registry);
                Piece {
                    address,
                    bytes: end.min(chunk_address + chunk_bytes) - address,
                    place: state.place(chunk.place),
                    chunk_address,
                    chunk_bytes,
                    handle: chunk.handle,
                    anchors: chunk.anchors.reasons() | if asked { Anchor::Asked.into() } else { Anchors::NONE },
                }
            };
            (block, chunks.into_iter().map(piece).collect())
        };
        records.into_iter().map(of).collect()
    }

    /// What is mapped at the pool's addresses, used or not, in address order: a row for each stretch that lies at one place.
    pub fn mapped(&self) -> Vec<Mapped> {
        let state = self.lock();
        let mut rows: Vec<Mapped> = Vec::new();
        for chunk in state.chunks.all() {
            let (address, bytes, place) = (self.address(chunk.start), bytes_of(chunk.frames), state.place(chunk.place));
            match rows.last_mut() {
                Some(row) if row.place == place && row.address + row.bytes == address => row.bytes += bytes,
                _ => rows.push(Mapped { address, bytes, place }),
            }
        }
        rows
    }

    /// Anchors what is below a range of a live block: it must stay on its physical pages. Returns the bytes of the chunks it
    /// touches: anchors are by the chunk, so neighbours in the same one stay, too. [`Anchor::Asked`] holds
    /// until [`Pool::release_anchor`] or the end of the block, any other reason until the chunk goes back to the driver.
    ///
    /// [`Anchor::Retained`] and [`Anchor::Descriptor`] are said *before* a handle or a descriptor is given away, and taken back
    /// with [`Pool::withdraw_anchor`] where none was. Nobody hears when the last of them is closed, so the frames of the block never
    /// serve another one: when it ends they wait until their chunk can go back to the driver, who does know.
    ///
    /// `None`, and no anchor, unless the whole range lies in one live block: its last frame included, but for [`Anchor::Asked`].
    pub fn anchor(&self, address: u64, bytes: u64, why: Anchor) -> Option<u64> {
        let (mut state, Within { start, end, block, ground }) = loop {
            let state = self.lock();
            let within = self.within(&state, address, bytes, why)?;
            if !state.chunks.is_moving(within.start, within.end) {
                break (state, within);
            }
            // It is over in a moment, and the memory is on other pages then.
            drop(state);
            yield_now();
        };
        if why == Anchor::Asked {
            state.asked.add((address, bytes), (start, end), block);
            ground.into_iter().for_each(|ground| self.note_asked(ground));
        } else {
            if matches!(why, Anchor::Retained | Anchor::Descriptor)
                && !self.registry.change(block.0, block.1, false, |record| record.given += 1)
            {
                return None;
            }
            state.gives_out = true;
            if why != Anchor::Shared {
                ground.into_iter().for_each(|ground| self.share_slab(ground, true));
            }
            for chunk in state.chunks.anchor(start, end, why) {
                state.budget(chunk.place).anchor(bytes_of(chunk.frames));
            }
        }
        Some(state.chunks.touched(start, end).map(|chunk| bytes_of(chunk.frames)).sum())
    }

    /// Takes one [`Anchor::Asked`] off that was put on exactly this range; `false` if there is none, or its block ended.
    pub fn release_anchor(&self, address: u64, bytes: u64) -> bool {
        self.lock().asked.remove(address, bytes, &self.registry)
    }

    /// Takes back one anchor that [`Pool::anchor`] put on this range for a call that then failed; `false` if its block ended
    /// meanwhile, and then the anchor stays as long as the chunk.
    pub fn withdraw_anchor(&self, address: u64, bytes: u64, why: Anchor) -> bool {
        let mut state = self.lock();
        let Some(Within { start, end, block, ground }) = self.within(&state, address, bytes, why) else { return false };
        if why == Anchor::Asked
            || !self.registry.change(block.0, block.1, true, |record| {
                if why != Anchor::Shared {
                    record.given = record.given.saturating_sub(1);
                }
            })
        {
            return false;
        }
        if why != Anchor::Shared {
            ground.into_iter().for_each(|ground| self.share_slab(ground, false));
        }
        for chunk in state.chunks.withdraw_anchor(start, end, why) {
            state.budget(chunk.place).release_anchor(bytes_of(chunk.frames));
        }
        true
    }

    /// Another process is about to get the block that starts at `address` and has this number: its frames serve nobody else
    /// from here on, whatever becomes of the block, until as many [`Pool::let_go`]. `None`, and no hold, where that block has
    /// ended or is ending.
    pub fn hold(&self, address: u64, id: u64) -> Option<Block> {
        let frame = self.frame_at(address)?;
        if self.slabs.has(frame) {
            return self.hold_small(frame, address, id);
        }
        let start = Some(frame).filter(|_| address.is_multiple_of(FRAME))?;
        let mut held = None;
        self.registry.change(start, id, false, |record| {
            record.holds += 1;
            held = Some(record.block(address));
        });
        held
    }

    /// That process has it no more. If the block has ended and nobody else has it, its frames can serve again.
    pub fn let_go(&self, address: u64, id: u64) {
        let Some(start) = self.frame_at(address) else { return };
        if self.slabs.is_any() && self.let_go_small(id) {
            return;
        }
        // Under the lock, so that a block which ends at this moment is found in one of the two places, or will be soon.
        let mut state = self.lock();
        if !self.registry.change(start, id, true, |record| record.holds = record.holds.saturating_sub(1)) {
            state.let_go(id);
        }
    }

    /// The live block around an address, with its first frame.
    pub(crate) fn around(&self, state: &State<B::Handle>, address: u64) -> Option<(u32, Record)> {
        let frame = self.frame_at(address)?;
        self.registry.around(frame, state.runs.around(frame)?.start)
    }

    fn within(&self, state: &State<B::Handle>, address: u64, bytes: u64, why: Anchor) -> Option<Within> {
        let end = address.checked_add(bytes).filter(|_| bytes > 0)?;
        let frame = self.frame_at(address)?;
        if let Some((ground, block)) = self.ground_at(address) {
            let slab_end = self.address(ground.start + ground.frames);
            let reach = if why == Anchor::Asked { block.address + block.bytes } else { slab_end };
            let frames = (end - self.address(frame)).div_ceil(FRAME) as u32;
            let block = (ground.start, ground.id);
            return (end <= reach).then_some(Within { start: frame, end: frame + frames, block, ground: Some(ground) });
        }
        let (first, record) = self.around(state, address).filter(|(_, record)| !record.slab)?;
        // Ranges for network adapters are rounded up to pages, of which the last one is the block's in any case. What a program asks
        // for by itself ends where the block does.
        let reach = if why == Anchor::Asked { record.bytes } else { u64::from(record.frames) * FRAME };
        if end - self.address(first) > reach {
            return None;
        }
        let frames = (end - self.address(frame)).div_ceil(FRAME) as u32;
        Some(Within { start: frame, end: frame + frames, block: (first, record.id), ground: None })
    }
}
