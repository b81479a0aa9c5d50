//! Makes a range of memory with the backend (create, map, grant) and takes one down again (unmap, release). The pool's lock is
//! not held during these calls; what fails half way is undone.

use crate::account::Accounts;
use crate::chunks::{AnchorCounts, Chunk};
use crate::next_step::Growth;
use crate::place::PlaceId;
use crate::state::{Leaving, Zombie, bytes_of};
use crate::{Backend, Claim, FRAME, Fault};

/// How often a call that may succeed later is made again. There is no pause in between: a backend that wants one waits
/// itself, since only it knows for what.
const REPEATS: u32 = 5;

/// What became of chunks that were to go back to the driver.
#[derive(Debug)]
pub(crate) struct Retired<H> {
    /// The chunks that went back.
    pub gone: Vec<Chunk<H>>,
    /// The chunks that the driver did not take back.
    pub zombies: Vec<Zombie<H>>,
    /// Whether their addresses carry nothing any more.
    pub unmapped: bool,
}

impl<H> Retired<H> {
    /// Adds what became of other chunks.
    fn add(&mut self, other: Retired<H>) {
        self.gone.extend(other.gone);
        self.zombies.extend(other.zombies);
    }
}

/// Why a range was not created.
#[derive(Debug)]
pub(crate) enum Cause<E> {
    /// The place ran out.
    OutOfMemory(E),
    /// The place cannot give memory.
    Unavailable(E),
    /// Memory that had to go first did not, and the limit leaves no room for both; or somebody else has taken the room.
    Overdrawn,
    /// Anything else.
    Failed(E),
}

/// A growth that failed half way, rolled back as far as the backend allowed.
#[derive(Debug)]
pub(crate) struct Broken<H, E> {
    pub cause: Cause<E>,
    /// The place where the growth failed.
    pub place: PlaceId,
    /// Bytes that had been created there before the failure.
    pub created: u64,
    pub retired: Retired<H>,
}

type Built<H, E> = Result<Vec<Chunk<H>>, Broken<H, E>>;

/// Creates, maps and grants everything in `growth`, in chunks of this many bytes at most. On failure nothing of it is left but
/// what the report names.
pub(crate) fn build<B: Backend>(
    backend: &B,
    base: u64,
    largest: u64,
    growth: &Growth<B::Handle>,
    accounts: &Accounts,
) -> Built<B::Handle, B::Error> {
    let mut chunks: Vec<Chunk<B::Handle>> = Vec::new();
    let mut frame = growth.start;
    for &(id, bytes) in &growth.pieces {
        let place = accounts.place(id);
        let first = frame;
        let mut loose = None;
        let mut lay = |chunks: &mut Vec<Chunk<B::Handle>>| -> Result<(), Cause<B::Error>> {
            let mut left = bytes;
            while left > 0 {
                let size = left.min(largest);
                if !accounts.charge(Claim::Pool, place, size) {
                    return Err(Cause::Overdrawn);
                }
                let created = retry_while_not_ready(|| backend.create(place, size));
                let handle = created.map_err(|fault| {
                    accounts.credit(Claim::Pool, place, size);
                    cause_of_create(fault)
                })?;
                let chunk = Chunk {
                    start: frame,
                    frames: (size / FRAME) as u32,
                    place: id,
                    handle,
                    anchors: AnchorCounts::default(),
                    alias: None,
                    moving: false,
                };
                let address = base + bytes_of(frame);
                if let Err(fault) = retry_while_not_ready(|| backend.map(address, size, handle)) {
                    loose = Some(chunk);
                    return Err(Cause::Failed(error_of(fault)));
                }
                chunks.push(chunk);
                frame += chunk.frames;
                left -= size;
            }
            // Once for the whole piece: the cost is mostly per call.
            let address = base + bytes_of(first);
            retry_while_not_ready(|| backend.grant(address, bytes, place))
                .map_err(|fault| Cause::Failed(error_of(fault)))
        };
        if let Err(cause) = lay(&mut chunks) {
            let created = chunks.iter().chain(&loose).filter(|chunk| chunk.place == id);
            let created = created.map(|chunk| bytes_of(chunk.frames)).sum();
            let leaving = Leaving { start: growth.start, frames: frame - growth.start, chunks };
            let mut retired = dismantle(backend, base, leaving, accounts);
            if let Some(chunk) = loose {
                // Created and not mapped; its frames never carried anything.
                retired.add(release(backend, vec![chunk], accounts));
            }
            return Err(Broken { cause, place: id, created, retired });
        }
    }
    Ok(chunks)
}

/// Unmaps and releases a range. What the backend will not take back is reported, never an error: there is nothing the
/// caller could do about it now.
pub(crate) fn dismantle<B: Backend>(
    backend: &B,
    base: u64,
    leaving: Leaving<B::Handle>,
    accounts: &Accounts,
) -> Retired<B::Handle> {
    let Leaving { start, frames, chunks } = leaving;
    let unmapped =
        frames == 0 || retry_whatever_failed(|| backend.unmap(base + bytes_of(start), bytes_of(frames))).is_ok();
    if unmapped {
        release(backend, chunks, accounts)
    } else {
        Retired { gone: Vec::new(), zombies: vec![Zombie { mapped: true, chunks }], unmapped }
    }
}

/// Tries once more to get rid of chunks that the driver did not take back.
pub(crate) fn retire_again<B: Backend>(
    backend: &B,
    base: u64,
    zombie: Zombie<B::Handle>,
    accounts: &Accounts,
) -> Retired<B::Handle> {
    let (Some(first), Some(last)) = (zombie.chunks.first(), zombie.chunks.last()) else {
        return Retired { gone: Vec::new(), zombies: Vec::new(), unmapped: true };
    };
    if zombie.mapped {
        let frames = last.start + last.frames - first.start;
        dismantle(backend, base, Leaving { start: first.start, frames, chunks: zombie.chunks }, accounts)
    } else {
        release(backend, zombie.chunks, accounts)
    }
}

/// Releases chunks that are mapped nowhere any more but at their aliases.
pub(crate) fn release<B: Backend>(
    backend: &B,
    chunks: Vec<Chunk<B::Handle>>,
    accounts: &Accounts,
) -> Retired<B::Handle> {
    let mut retired = Retired { gone: Vec::with_capacity(chunks.len()), zombies: Vec::new(), unmapped: true };
    for mut chunk in chunks {
        let (place, bytes) = (accounts.place(chunk.place), bytes_of(chunk.frames));
        // A mapping that is left would keep the memory from going home.
        if let Some(alias) = chunk.alias
            && retry_whatever_failed(|| backend.drop_alias(alias.address, bytes)).is_ok()
        {
            chunk.alias = None;
        }
        let released = if chunk.alias.is_none() {
            retry_whatever_failed(|| backend.release(chunk.handle, place, bytes)).is_ok()
        } else {
            false
        };
        match released {
            true => {
                accounts.credit(Claim::Pool, place, bytes);
                retired.gone.push(chunk);
            }
            false => retired.zombies.push(Zombie { mapped: false, chunks: vec![chunk] }),
        }
    }
    retired
}

/// Makes the call again while the answer is [`Fault::NotReady`].
pub(crate) fn retry_while_not_ready<T, E>(mut call: impl FnMut() -> Result<T, Fault<E>>) -> Result<T, Fault<E>> {
    for _ in 0..REPEATS {
        match call() {
            Err(Fault::NotReady(_)) => {}
            answer => return answer,
        }
    }
    call()
}

/// Makes the call again after any failure: it undoes something, and there is no second way to do that.
pub(crate) fn retry_whatever_failed<T, E>(mut call: impl FnMut() -> Result<T, Fault<E>>) -> Result<T, Fault<E>> {
    for _ in 0..REPEATS {
        if let Ok(answer) = call() {
            return Ok(answer);
        }
    }
    call()
}

pub(crate) fn cause_of_create<E>(fault: Fault<E>) -> Cause<E> {
    match fault {
        Fault::OutOfMemory(error) => Cause::OutOfMemory(error),
        Fault::Unavailable(error) => Cause::Unavailable(error),
        Fault::NotReady(error) | Fault::Failed(error) => Cause::Failed(error),
    }
}

pub(crate) fn error_of<E>(fault: Fault<E>) -> E {
    match fault {
        Fault::OutOfMemory(error) | Fault::Unavailable(error) | Fault::NotReady(error) | Fault::Failed(error) => error,
    }
}
