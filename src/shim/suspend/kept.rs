//! Memory of a suspended program in plain memory of this process (`gpupool suspend --to host`).
//!
//! Plain memory of large pages is made ten times as fast as the driver makes host memory (`image/crew.rs`), and it can be swapped out. What
//! lies there is reached by no GPU, so it comes back before the program goes on, as from a disk. **All of it is copied before any of it leaves**:
//! what fails meanwhile leaves everything where it was. Rejected: to keep the memory from one suspension to the next, which would make the
//! second one a fifth faster (45 GB/s and not 38), and would take as much of the host for as long as the program runs.

use super::stored::{Range, Unread};
use crate::backing::mover::{self, Load};
use crate::image::Failed;
use crate::image::crew::{self, Crew, Part, Way};
use crate::image::plain::Plain;
use gpupool_config::format_size;
use gpupool_cuda::{CuResult, Driver};
use gpupool_pool::{FRAME, Transfer, Wish};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Memory that is kept.
pub struct Kept {
    plain: Vec<Arc<Plain>>,
    /// By address, the bytes and where they are.
    ranges: Arc<BTreeMap<u64, (u64, usize)>>,
}

impl Kept {
    /// Copies all of these. Nobody writes to them before they are back: the program is held. `heard` is told how many bytes are copied, and says
    /// whether to go on.
    ///
    /// # Errors
    /// Why not, in words; nothing is left of it then.
    pub fn copy(driver: &'static Driver, ranges: &[Range], heard: &mut dyn FnMut(u64) -> bool) -> Result<Self, String> {
        let bytes = ranges.iter().map(|range| range.bytes).sum();
        let plain = Plain::new(bytes)
            .map_err(|error| format!("the system has no memory of {} for it: {error}", format_size(bytes)))?;
        let mut at = plain.start();
        let mut places = BTreeMap::new();
        let mut of: BTreeMap<(u64, u32), Vec<Part>> = BTreeMap::new();
        for &Range { block, address, bytes } in ranges {
            places.insert(address, (bytes, at));
            of.entry((block.owner, block.home)).or_default().push(Part { address, host: at, bytes });
            at += bytes as usize;
        }
        let crews: Result<Vec<(Crew, Vec<Part>)>, Failed> = of
            .iter()
            .map(|(&(owner, gpu), parts)| {
                let bytes = parts.iter().map(|part| part.bytes).sum();
                Ok((Crew::new(driver, owner, gpu, Way::Out, bytes, of.len())?, parts.clone()))
            })
            .collect();
        let crews = crews.map_err(|failed| failed.to_string())?;
        let work: Vec<(&Crew, Vec<Part>)> = crews.iter().map(|(crew, parts)| (crew, parts.clone())).collect();
        let mut done = 0;
        let mut hears = |bytes| {
            done += bytes;
            heard(done)
        };
        // SAFETY: the memory was made above, as much as all ranges together, each of which has a part of its own; it is zero. The program is held.
        let carried = unsafe { crew::carry(&work, &mut hears) };
        carried.map_err(|failed| {
            failed.map_or_else(|| "whoever asked for it has gone".to_owned(), |failed| failed.to_string())
        })?;
        Ok(Self { plain: vec![Arc::new(plain)], ranges: Arc::new(places) })
    }

    /// Whether what lies at this address is kept.
    pub fn has(&self, address: u64) -> bool {
        let before = self.ranges.range(..=address).next_back();
        before.is_some_and(|(start, (bytes, _))| address - start < *bytes)
    }

    /// Has this one keep what another does, too. What both have at an address is the other's, which came there later.
    pub fn join(&mut self, other: Self) {
        self.plain.extend(other.plain);
        let mut ranges = (*self.ranges).clone();
        for (&start, &(bytes, at)) in &*other.ranges {
            let end = start + bytes;
            let reaches_in = |(from, (bytes, _)): (&u64, &(u64, usize))| (from + bytes > start).then_some(*from);
            while let Some(from) = ranges.range(..end).next_back().and_then(reaches_in) {
                let Some((bytes, at)) = ranges.remove(&from) else { break };
                if from < start {
                    ranges.insert(from, (start - from, at));
                }
                if from + bytes > end {
                    ranges.insert(end, (from + bytes - end, at + (end - from) as usize));
                }
            }
            ranges.insert(start, (bytes, at));
        }
        self.ranges = Arc::new(ranges);
    }

    /// Gives the plain memory of these back to the system, but for what `is_left`: by address and bytes, in whole frames.
    pub fn release(&self, wishes: &[Wish], is_left: impl Fn(u64, u64) -> bool) {
        for wish in wishes {
            let start = wish.address / FRAME * FRAME;
            let bytes = (wish.address + wish.bytes).next_multiple_of(FRAME) - start;
            if is_left(start, bytes) {
                continue;
            }
            let all = Transfer { from: start, to: start, bytes, inward: false, stored: true };
            for Part { host, bytes, .. } in parts_of(&self.ranges, &all).into_iter().flatten() {
                // SAFETY: memory of `plain`, of whole frames, which nobody reads any more.
                unsafe { Plain::empty(host, bytes as usize) };
            }
        }
    }

    /// Has what is kept brought back for the length of `act`, as the pool asks for it; `act` is given what tells why that failed, if it did.
    pub fn reading<T>(&self, driver: &'static Driver, act: impl FnOnce(&Unread) -> T) -> T {
        let unread = Unread::default();
        let load = loader(driver, self.plain.clone(), Arc::clone(&self.ranges), unread.clone());
        mover::loading(load, || act(&unread))
    }
}

/// Brings ranges of the pool's addresses to where they are wanted.
fn loader(
    driver: &'static Driver,
    plain: Vec<Arc<Plain>>,
    ranges: Arc<BTreeMap<u64, (u64, usize)>>,
    unread: Unread,
) -> Load {
    let mut crew: Option<(Crew, (u64, u32))> = None;
    Box::new(move |owner, gpu, transfers| {
        let mut load = || -> Result<(), String> {
            let parts: Option<Vec<Part>> = transfers.iter().flat_map(|transfer| parts_of(&ranges, transfer)).collect();
            let parts = parts.ok_or("some of it was not kept; this is a mistake of gpupool")?;
            if crew.as_ref().is_none_or(|(_, known)| *known != (owner, gpu)) {
                crew = None;
                let bytes = ranges.values().map(|(bytes, _)| bytes).sum();
                let made = Crew::new(driver, owner, gpu, Way::Back, bytes, 1).map_err(|failed| failed.to_string())?;
                crew = Some((made, (owner, gpu)));
            }
            let Some((crew, _)) = &crew else { return Ok(()) };
            // SAFETY: `plain` has all of the ranges, and lives as long as this. The program is held, and the GPU's memory is new.
            let carried = unsafe { crew::carry(&[(crew, parts)], &mut |_| true) };
            carried.map_err(|failed| failed.map_or_else(String::new, |failed| failed.to_string()))
        };
        let _lives = &plain;
        load().map_err(|why| {
            unread.note(why);
            CuResult::INVALID_VALUE
        })
    })
}

/// Where the bytes of a transfer are; `None` for what is not kept.
fn parts_of(ranges: &BTreeMap<u64, (u64, usize)>, transfer: &Transfer) -> Vec<Option<Part>> {
    let &Transfer { from, to, bytes, .. } = transfer;
    let mut parts = Vec::new();
    let mut at = 0;
    while at < bytes {
        let found = ranges.range(..=from + at).next_back();
        let found = found.filter(|(address, (length, _))| from + at < **address + length);
        let Some((address, (length, host))) = found else {
            parts.push(None);
            break;
        };
        let offset = from + at - address;
        let length = (length - offset).min(bytes - at);
        parts.push(Some(Part { address: to + at, host: host + offset as usize, bytes: length }));
        at += length;
    }
    parts
}
