//! Memory of live blocks that goes to other places, at the same addresses, while the program runs.
//!
//! A move has three phases. It is *prepared* beside the running program: the blocks are held ([`Pool::hold`]), so that the frames of
//! one that ends meanwhile serve nobody before the move is over; the chunks are marked ([`crate::chunks::Chunk::moving`]); what is free on them is
//! out; and all memory that is needed is found or made and mapped a second time. Whatever fails until here is taken back.
//! Then the program is *stopped* by the caller, as shortly as can be: nothing is allocated, made or written down, contents are
//! copied through the second mappings, and addresses are mapped anew. The rest, books and memory that goes home, is *finished*
//! while the program runs again.
//!
//! [`crate::moving`] has the words; `move_plan.rs` prepares, `move_act.rs` is the time in between, `move_books.rs` finishes.
//!
//! Steps come in waves (`schedule.rs`). The contents of a step are at both places until all of its addresses are mapped again, so
//! whatever fails in between, either the old memory or the new one is mapped there, and nothing of either is given up before.
//! Between two steps everything is in its place, and a move may end there.
//!
//! Architecture Invariant: a chunk changes its place under the pool's lock and those of all shards of the front.

use crate::moving::{MoveError, Moved, Rearranged, Stopped, Wanted, Wish};
use crate::place::PlaceId;
use crate::pool::Pool;
use crate::registry::Record;
use crate::state::State;
use crate::{FRAME, Mover, Place};

/// What is already the case when nobody uses the memory by promise of the caller.
struct Promised;

impl Stopped for Promised {
    fn still_quiet(&mut self) -> bool {
        true
    }
}

/// How a move is carried out.
#[derive(Clone, Copy, Debug, Default)]
struct Way {
    /// The program is not stopped later; instead all work is waited for now.
    waits: bool,
    /// Chunks that others stand on, too, are divided.
    divides: bool,
}

impl<B: Mover> Pool<B> {
    /// Moves what of a range of a live block is whole frames to `place`; the block's last frame counts as whole if the range has the
    /// block's last byte. A chunk that the range covers in part is divided, and the rest of the block on it stays at its place, on
    /// other physical memory. A chunk that must stay where it is stays, and so does one that others stand on, too.
    ///
    /// Waits for all work on every device that may reach the pool's memory. From the call to its return nobody uses the chunks
    /// that the range touches; all other memory may be in use.
    ///
    /// # Errors
    /// See [`MoveError`].
    pub fn move_to(&self, address: u64, bytes: u64, place: Place) -> Result<Moved, MoveError<B::Error>> {
        let waits = Way { waits: true, ..Way::default() };
        let done = self.carry_out(&[Wish { address, bytes, to: place }], waits, &|_, _| true, || Some(Promised))?;
        match done.cut_short {
            Some(error) => Err(error),
            None => Ok(done.wishes.into_iter().sum()),
        }
    }

    /// Moves several ranges of live blocks at once, each as [`Pool::move_to`] does, but beside the running program: it is stopped by
    /// `stop` once everything is prepared, and goes on as soon as what that returned is dropped. Where `stop` returns `None`,
    /// nothing has changed. What goes out of a full place makes room for what comes in, chunk for chunk of the same size.
    ///
    /// What goes to [`Place::Disk`] or [`Place::Pageable`] is stored there already, by its addresses, and nobody may use it before it is back: its memory goes, and
    /// nothing is mapped in its place. What comes from there is read by [`Mover::copy`].
    ///
    /// While the program is stopped the pool allocates nothing and takes no lock, and calls nothing of the backend but
    /// [`Mover::copy`], [`Mover::digest`], [`crate::Backend::map`], [`crate::Backend::unmap`] and [`crate::Backend::grant`].
    ///
    /// # Errors
    /// See [`MoveError`]; nothing has changed then. What fails later is in [`Rearranged::cut_short`].
    pub fn rearrange<S: Stopped>(
        &self,
        wishes: &[Wish],
        stop: impl FnOnce() -> Option<S>,
    ) -> Result<Rearranged<B::Error>, MoveError<B::Error>> {
        self.carry_out(wishes, Way::default(), &|_, _| true, stop)
    }

    /// The same, but nothing moves ([`MoveError::NotNow`]) where `makes` does not want so many bytes made at a place, which the move needs beside what there
    /// is. Whoever has a thread to spare makes them by [`Pool::rearrange`] with a `stop` that answers `None`: what that has made serves the next move.
    ///
    /// # Errors
    /// As of [`Pool::rearrange`].
    pub fn rearrange_if<S: Stopped>(
        &self,
        wishes: &[Wish],
        makes: impl Fn(Place, u64) -> bool,
        stop: impl FnOnce() -> Option<S>,
    ) -> Result<Rearranged<B::Error>, MoveError<B::Error>> {
        self.carry_out(wishes, Way::default(), &makes, stop)
    }

    /// As [`Pool::rearrange`], and a chunk that others stand on, too, is divided: what they have of it stays at its place, on other physical memory, so
    /// that place needs room for it meanwhile. Of what is stored it comes along, to where the range on its chunk goes. For moves that have to happen:
    /// memory that nobody wished for is copied, and its frames wait for the move when it is freed.
    ///
    /// # Errors
    /// As of [`Pool::rearrange`]. [`MoveError::Full`] also where only the memory of others lacks room.
    pub fn rearrange_dividing<S: Stopped>(
        &self,
        wishes: &[Wish],
        stop: impl FnOnce() -> Option<S>,
    ) -> Result<Rearranged<B::Error>, MoveError<B::Error>> {
        self.carry_out(wishes, Way { divides: true, ..Way::default() }, &|_, _| true, stop)
    }

    /// Bytes at a place that moves have left and that serve the next one: nothing has to be made for as much, as far as its chunks are of the same sizes.
    pub fn spare_for_moves(&self, place: Place) -> u64 {
        let state = self.lock();
        state.id_of(place).map_or(0, |id| state.stock.bytes(id))
    }

    fn carry_out<S: Stopped>(
        &self,
        wishes: &[Wish],
        Way { waits, divides }: Way,
        makes: &dyn Fn(Place, u64) -> bool,
        stop: impl FnOnce() -> Option<S>,
    ) -> Result<Rearranged<B::Error>, MoveError<B::Error>> {
        // Where all work is waited for, nobody may wait for the move before that is over: a kernel may wait for that very thread.
        let mut under_way = (!waits).then(|| self.begin_move());
        let mut wanted = Vec::with_capacity(wishes.len());
        let held = wishes.iter().try_for_each(|wish| {
            wanted.push(self.hold_for(wish)?);
            Ok(())
        });
        let mut beside = 0;
        if divides && held.is_ok() {
            // In front: what was wished for itself is decided by its own wish.
            let others = self.hold_beside(&wanted);
            beside = others.len();
            wanted.splice(0..0, others);
        }
        let answer = held.and_then(|()| {
            let plan = self.prepare(&wanted, waits, makes, &mut under_way)?;
            self.act(plan, &wanted, waits, stop)
        });
        for Wanted { block, record, .. } in &wanted {
            self.let_go(self.address(*block), record.id);
        }
        answer.map(|mut done| {
            done.wishes.drain(..beside);
            done
        })
    }

    /// What stands on the chunks of these besides them, each part held: it is to stay where it lies, or, if that is stored, to come along.
    fn hold_beside(&self, wanted: &[Wanted]) -> Vec<Wanted> {
        let mut found: Vec<Wanted> = Vec::new();
        let state = self.lock();
        for wish in wanted {
            for chunk in state.chunks.touched(wish.start, wish.end).filter(|chunk| chunk.place != wish.to) {
                let is_stored = self.accounts.place(chunk.place).is_stored();
                let to = if is_stored { wish.to } else { chunk.place };
                let mut frame = chunk.start;
                while frame < chunk.end() {
                    let Some((block, record)) = self.around(&state, self.address(frame)) else {
                        frame += 1;
                        continue;
                    };
                    let (start, end) = (frame, (block + record.frames).min(chunk.end()));
                    frame = end;
                    // The rest of a block that was wished for stays by itself.
                    let is_known = !is_stored && wanted.iter().any(|wish| wish.block == block);
                    // Stored elsewhere it is not.
                    let may = !is_stored || !self.accounts.place(to).is_stored() && self.may_go(&state, &record, to);
                    if !is_known
                        && may
                        && !found.iter().any(|other| other.start == start)
                        && self.registry.change(block, record.id, false, |record| record.holds += 1)
                    {
                        found.push(Wanted { block, record, start, end, to, anew: false });
                    }
                }
            }
        }
        found
    }

    /// Whether a block may lie at a place: in its reach, and open to it. What is stored is in no block's order, and has no terms.
    fn may_go(&self, state: &State<B::Handle>, record: &Record, to: PlaceId) -> bool {
        let is_stored = self.accounts.place(to).is_stored();
        let route = self.routes.iter().find(|route| route.home == record.gpu);
        route.is_some_and(|route| is_stored || route.order.contains(&to) && state.is_open_to(to, route))
    }

    /// What is asked for; the block is held.
    fn hold_for(&self, wish: &Wish) -> Result<Wanted, MoveError<B::Error>> {
        let Wish { address, bytes, to } = *wish;
        let state = self.lock();
        let to = state.id_of(to).ok_or(MoveError::NoPlace)?;
        let (block, record) = self.around(&state, address).ok_or(MoveError::NotABlock)?;
        let (first, last) = (self.address(block), self.address(block) + record.bytes);
        let end = address.checked_add(bytes).filter(|end| bytes > 0 && *end <= last).ok_or(MoveError::NotABlock)?;
        if !self.may_go(&state, &record, to) {
            return Err(MoveError::OutOfReach);
        }
        // What moves left there serves nobody either.
        if self.accounts.is_closed(wish.to) {
            return Err(MoveError::Full { place: wish.to, missing: bytes });
        }
        let start = block + (address - first).div_ceil(FRAME) as u32;
        let end = if end == last { block + record.frames } else { block + ((end - first) / FRAME) as u32 };
        if !self.registry.change(block, record.id, false, |record| record.holds += 1) {
            return Err(MoveError::NotABlock);
        }
        Ok(Wanted { block, record, start, end: end.max(start), to, anew: false })
    }
}
