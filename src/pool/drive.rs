//! Makes a range of memory with the backend (create, map, grant) and takes one down again (unmap, release). The pool's lock is
//! not held during these calls; what fails half way is undone.

use crate::account::Accounts;
use crate::chunks::{AnchorCounts, Chunk};
use crate::next_step::Growth;
use crate::place::PlaceId;
use crate::schedule::size_on_host;
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
    /// How many of the rows that were gathered are not where they were any more.
    pub taken_down: usize,
    /// What was created, and what was taken down.
    pub retired: Retired<H>,
}

type Built<H, E> = Result<Vec<Chunk<H>>, Broken<H, E>>;

/// Creates, maps and grants everything in `growth`, in chunks of this many bytes at most, behind what was gathered for it. On failure
/// nothing of it is left but what the report names.
///
/// What is to be created is created first: where there is no memory, what was gathered stays where it is.
pub(crate) fn build<B: Backend>(
    backend: &B,
    base: u64,
    largest: u64,
    growth: &Growth<B::Handle>,
    accounts: &Accounts,
) -> Built<B::Handle, B::Error> {
    let rows = &growth.gathered.rows;
    let mut created: Vec<Chunk<B::Handle>> = Vec::new();
    let mut frame = growth.start + rows.iter().map(|row| row.frames).sum::<u32>();
    for &(place, bytes) in &growth.pieces {
        let mut left = bytes;
        let on_host = accounts.place(place).is_host();
        while left > 0 {
            let most = left.min(largest);
            let size = if on_host { bytes_of(size_on_host((most / FRAME) as u32)) } else { most };
            let handle = match create(backend, place, size, accounts) {
                Ok(handle) => handle,
                Err(cause) => {
                    let here = created.iter().filter(|chunk| chunk.place == place);
                    let sum = here.map(|chunk| bytes_of(chunk.frames)).sum();
                    let retired = release(backend, created, accounts);
                    return Err(Broken { cause, place, created: sum, taken_down: 0, retired });
                }
            };
            let frames = (size / FRAME) as u32;
            let anchors = AnchorCounts::default();
            created.push(Chunk { start: frame, frames, place, handle, anchors, alias: None, moving: false });
            frame += frames;
            left -= size;
        }
    }
    let mut chunks: Vec<Chunk<B::Handle>> = Vec::new();
    let broken = |cause, taken_down, retired| {
        let place = growth.pieces.first().map_or(PlaceId::from_number(0), |piece| piece.0);
        Err(Broken { cause, place, created: 0, taken_down, retired })
    };
    frame = growth.start;
    for (index, row) in rows.iter().enumerate() {
        let (address, bytes) = (base + bytes_of(row.start), bytes_of(row.frames));
        if retry_whatever_failed(|| backend.unmap(address, bytes)).is_err() {
            chunks.append(&mut created);
            let mut retired = release(backend, chunks, accounts);
            retired.zombies.push(Zombie { mapped: true, chunks: row.chunks.clone() });
            return broken(Cause::Overdrawn, index + 1, retired);
        }
        for chunk in &row.chunks {
            chunks.push(Chunk { start: frame, ..*chunk });
            frame += chunk.frames;
        }
    }
    chunks.append(&mut created);
    let mut mapped = 0;
    let mut lay = || -> Result<(), Fault<B::Error>> {
        for &Chunk { start, frames, handle, .. } in &chunks {
            retry_while_not_ready(|| backend.map(base + bytes_of(start), bytes_of(frames), handle))?;
            mapped += 1;
        }
        // Once for all that lies at one place: the cost is mostly per call.
        for row in chunks.chunk_by(|left, right| left.place == right.place) {
            let (Some(first), Some(last)) = (row.first(), row.last()) else { continue };
            let (address, bytes) = (base + bytes_of(first.start), bytes_of(last.end() - first.start));
            retry_while_not_ready(|| backend.grant(address, bytes, accounts.place(first.place)))?;
        }
        Ok(())
    };
    let Err(fault) = lay() else { return Ok(chunks) };
    let loose = chunks.split_off(mapped);
    let frames = chunks.iter().map(|chunk| chunk.frames).sum();
    let mut retired = dismantle(backend, base, Leaving { start: growth.start, frames, chunks }, accounts);
    // Mapped nowhere; their frames never carried anything.
    retired.add(release(backend, loose, accounts));
    broken(Cause::Failed(error_of(fault)), rows.len(), retired)
}

/// Creates one chunk, charged to the place.
fn create<B: Backend>(
    backend: &B,
    place: PlaceId,
    bytes: u64,
    accounts: &Accounts,
) -> Result<B::Handle, Cause<B::Error>> {
    let place = accounts.place(place);
    if !accounts.charge(Claim::Pool, place, bytes) {
        return Err(Cause::Overdrawn);
    }
    retry_while_not_ready(|| backend.create(place, bytes)).map_err(|fault| {
        accounts.credit(Claim::Pool, place, bytes);
        cause_of_create(fault)
    })
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
    // A row lies at one place.
    let is_stored = chunks.first().is_some_and(|chunk| accounts.place(chunk.place).is_stored());
    let unmapped = frames == 0
        || is_stored
        || retry_whatever_failed(|| backend.unmap(base + bytes_of(start), bytes_of(frames))).is_ok();
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
