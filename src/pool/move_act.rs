//! The program is stopped, as shortly as can be: contents are copied and addresses are mapped anew, and nothing is allocated, made,
//! locked or written down.

use crate::chunks::Chunk;
use crate::drive;
use crate::moving::{Laid, MoveError, Plan, Rearranged, Step, Stopped, Wanted, Wave};
use crate::pool::Pool;
use crate::state::bytes_of;
use crate::{Mover, Transfer};

/// How often the new memory and then the old one are tried at addresses that carry nothing.
const ROUNDS: u32 = 64;

impl<B: Mover> Pool<B> {
    /// Stops the program, moves, and lets it go on.
    pub(crate) fn act<S: Stopped>(
        &self,
        mut plan: Plan<B::Handle>,
        wanted: &[Wanted],
        waits: bool,
        stop: impl FnOnce() -> Option<S>,
    ) -> Result<Rearranged<B::Error>, MoveError<B::Error>> {
        let readers = self.backend.readers();
        let all = |wave: &Wave| wave.steps.iter().map(|step| step.old.len() + step.new.len()).sum();
        let mut mapped = Vec::with_capacity(plan.waves.iter().map(all).max().unwrap_or(0));
        let cut_short = if plan.waves.is_empty() {
            Ok(())
        } else {
            match stop() {
                // From here on until it is dropped no lock, no allocation, and no call that is not named in `rearrange`.
                Some(mut stopped) => {
                    let answer = self.move_contents(&mut plan, &mut mapped, waits, &mut stopped);
                    drop(stopped);
                    answer
                }
                None => Err(MoveError::NotNow),
            }
        };
        let cut_short = match cut_short {
            Err(error) if plan.steps().all(|step| !step.is_done) => {
                self.finish(plan, wanted, false);
                return Err(error);
            }
            answer => answer.err(),
        };
        let as_it_came = plan.as_it_came();
        let (wishes, made) = self.finish(plan, wanted, false);
        // Somebody was added meanwhile, who granted the rest; see `Pool::grow`.
        if self.backend.readers() != readers {
            self.grant_rows(&made).map_err(MoveError::Backend)?;
        }
        Ok(Rearranged { wishes, cut_short, as_it_came })
    }

    /// The program is stopped.
    fn move_contents(
        &self,
        plan: &mut Plan<B::Handle>,
        mapped: &mut Vec<(u32, u32)>,
        waits: bool,
        stopped: &mut impl Stopped,
    ) -> Result<(), MoveError<B::Error>> {
        let before = (!waits).then(|| self.freed_until_now());
        for wave in &mut plan.waves {
            let copy = |owner: u64, gpu: u32, transfers: &[Transfer]| {
                self.backend.copy(owner, gpu, transfers).map_err(|fault| MoveError::Backend(drive::error_of(fault)))
            };
            for again in &mut wave.again {
                self.backend.digest(again.owner, again.gpu, &mut again.near);
                again.sort_out();
                if !again.needed.is_empty() {
                    copy(again.owner, again.gpu, &again.needed)?;
                }
            }
            for &(owner, gpu, ref transfers) in &wave.copies {
                copy(owner, gpu, transfers)?;
            }
            for came in wave.came.iter_mut().filter(|_| stopped.is_for_a_while()) {
                self.backend.digest(came.owner, came.gpu, &mut came.near);
            }
            // What comes next cannot be taken back; all before was to memory that nobody knows.
            if !stopped.still_quiet() {
                return Err(MoveError::NotQuiet);
            }
            before.into_iter().for_each(|before| self.covered(before));
            // Those that stand one behind the other at once: the cost is mostly per call.
            for steps in wave.steps.chunk_by_mut(|one, next| one.is_before(next)) {
                self.remap(steps, &plan.memory, mapped).map_err(MoveError::Backend)?;
                steps.iter_mut().for_each(|step| step.is_done = true);
            }
        }
        Ok(())
    }

    /// Maps the new chunks of these steps in place of the old ones. On failure the old ones are mapped again, unless the backend refuses
    /// that for ever.
    fn remap(&self, steps: &[Step], memory: &[Chunk<B::Handle>], mapped: &mut Vec<(u32, u32)>) -> Result<(), B::Error> {
        let (old, new) = (|| steps.iter().flat_map(|step| &step.old), || steps.iter().flat_map(|step| &step.new));
        mapped.clear();
        mapped.extend(old().filter(|old| !old.is_stored).map(|old| (old.start, old.end)));
        // Where they are not taken down, nothing has happened.
        let Err(error) = self.take_down(mapped).and_then(|()| self.put_up(new(), memory, mapped)) else {
            return Ok(());
        };
        for _ in 0..ROUNDS {
            if self.take_down(mapped).is_ok() && self.put_up(old(), memory, mapped).is_ok() {
                return Err(error);
            }
            if self.take_down(mapped).is_ok() && self.put_up(new(), memory, mapped).is_ok() {
                return Ok(());
            }
        }
        Err(error)
    }

    /// Unmaps these chunks, neighbours at once; what is left in the list is mapped still.
    fn take_down(&self, mapped: &mut Vec<(u32, u32)>) -> Result<(), B::Error> {
        while let Some(&(start, end)) = mapped.last() {
            let (mut first, mut left) = (start, mapped.len() - 1);
            while left > 0 && mapped[left - 1].1 == first {
                left -= 1;
                first = mapped[left].0;
            }
            let unmap = || self.backend.unmap(self.address(first), bytes_of(end - first));
            drive::retry_whatever_failed(unmap).map_err(drive::error_of)?;
            mapped.truncate(left);
        }
        Ok(())
    }

    /// Maps these chunks, with all grants; which of them are mapped is added to the list.
    fn put_up<'a>(
        &self,
        chunks: impl Iterator<Item = &'a Laid> + Clone,
        memory: &[Chunk<B::Handle>],
        mapped: &mut Vec<(u32, u32)>,
    ) -> Result<(), B::Error> {
        let chunks = chunks.filter(|chunk| !chunk.is_stored);
        for chunk in chunks.clone() {
            let handle = memory[chunk.memory].handle;
            let map = || self.backend.map(self.address(chunk.start), bytes_of(chunk.end - chunk.start), handle);
            drive::retry_while_not_ready(map).map_err(drive::error_of)?;
            mapped.push((chunk.start, chunk.end));
        }
        // Once for neighbours at one place.
        let mut chunks = chunks.peekable();
        while let Some(first) = chunks.next() {
            let mut end = first.end;
            while let Some(next) = chunks.next_if(|next| next.place == first.place && next.start == end) {
                end = next.end;
            }
            let (address, bytes) = (self.address(first.start), bytes_of(end - first.start));
            let place = self.accounts.place(first.place);
            drive::retry_while_not_ready(|| self.backend.grant(address, bytes, place)).map_err(drive::error_of)?;
        }
        Ok(())
    }
}
