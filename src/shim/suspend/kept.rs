//! Memory of a suspended program in plain memory of this process (`gpupool suspend --to host`).
//!
//! Plain memory of large pages is made ten times as fast as the driver makes host memory (`image/crew.rs`), and it can be swapped out. What
//! lies there is reached by no GPU, so it comes back before the program goes on, as from a disk. **All of it is copied before any of it leaves**:
//! what fails meanwhile leaves everything where it was. **On the way back** what has arrived on a GPU leaves its plain memory behind for the next suspension (`spare.rs`). As soon as something
//! arrives on the host, as another program took its GPU, or the host is short of memory, everything that has arrived goes to the system, and so does the rest as it arrives
//! ([`Kept::look_what_arrived`]): it is there once and not twice.

use super::rearranging::BATCH;
use super::spare;
use super::stored::{Range, Unread};
use crate::backing::host;
use crate::backing::mover::{self, Load};
use crate::backing::open::Opened;
use crate::image::crew::{self, Crew, Crews, Part, Way};
use crate::image::plain::Plain;
use crate::serve::handles::by_hand;
use gpupool_cuda::{CuResult, Driver};
use gpupool_pool::Transfer;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Memory that is kept.
pub struct Kept {
    plain: Vec<Arc<Plain>>,
    ranges: Arc<Mutex<Ranges>>,
    behind: Mutex<Behind>,
}

/// What became of plain memory whose contents are elsewhere.
enum Behind {
    /// It is there still: these parts.
    Stays(Vec<(usize, u64)>),
    /// It goes as soon as it is free.
    Goes,
}

/// Plain memory for what is to be kept.
#[derive(Default)]
pub struct Made {
    plain: Vec<Plain>,
    /// How many of these something else lay in.
    used: usize,
}

/// Why no memory could be made.
#[derive(Debug)]
pub struct Refused {
    pub error: std::io::Error,
    /// A limit of the process's own is near.
    pub is_limited: bool,
    /// How much less could be had, perhaps.
    pub fits: u64,
}

/// Addresses that are left to a process whose number is limited: for what copies, for the second mappings of a step on the way back, without which it could not be resumed, and
/// for its own threads, which go on with everything on the processor.
const LEFT_FREE: u64 = 2 * BATCH;

/// Plain memory for so many bytes, what is there from an earlier time first. Most of it is not touched yet.
///
/// # Errors
/// There is none; what was there from an earlier time is given back.
pub fn make(bytes: u64) -> Result<Made, Refused> {
    let mut plain = spare::take(bytes);
    let used = plain.len();
    let missing = bytes.saturating_sub(plain.iter().map(Plain::bytes).sum());
    if missing == 0 {
        return Ok(Made { plain, used });
    }
    if let Some(left) = addresses_left()
        && left < missing
    {
        let fits = left + (bytes - missing);
        return Err(Refused { error: std::io::ErrorKind::OutOfMemory.into(), is_limited: true, fits });
    }
    plain.push(Plain::new(missing).map_err(|error| Refused { error, is_limited: false, fits: bytes / 2 })?);
    Ok(Made { plain, used })
}

/// Bytes of plain memory that the process may map; `None`: as many as there are.
pub fn addresses_left() -> Option<u64> {
    host::addresses_left().map(|left| left.saturating_sub(LEFT_FREE))
}

/// By address, the bytes and where they are.
#[derive(Default)]
struct Ranges(BTreeMap<u64, (u64, usize)>);

impl Kept {
    /// Has `crews` copy all of these to plain memory that was [made](make) for them. Nobody writes to them before they are back: the program is held. `heard` is
    /// told how many bytes are copied, and says whether to go on.
    ///
    /// # Errors
    /// Why not, in words; nothing is left of it then.
    pub fn copy(
        driver: &'static Driver,
        plain: Made,
        ranges: &[Range],
        crews: &mut Crews,
        heard: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Self, String> {
        let Made { plain, used } = plain;
        let areas = plain.iter().enumerate().map(|(at, plain)| (plain.start(), plain.bytes(), at < used));
        let mut places = Ranges::default();
        let mut of: BTreeMap<(u64, u32), Vec<Part>> = BTreeMap::new();
        for (owner, home, part) in laid_out(ranges, areas) {
            places.0.insert(part.address, (part.bytes, part.host));
            of.entry((owner, home)).or_default().push(part);
        }
        let work = crews.with(driver, of).map_err(|failed| failed.to_string())?;
        let mut done = 0;
        let mut hears = |bytes| {
            done += bytes;
            heard(done)
        };
        // SAFETY: the memory is as much as all ranges together, each of which has parts of its own; what was made above is zero. The program is held.
        let carried = unsafe { crew::carry(&work, &mut hears) };
        carried.map_err(|failed| {
            failed.map_or_else(|| "whoever asked for it has gone".to_owned(), |failed| failed.to_string())
        })?;
        let plain = plain.into_iter().map(Arc::new).collect();
        let behind = Mutex::new(Behind::Stays(Vec::new()));
        Ok(Self { plain, ranges: Arc::new(Mutex::new(places)), behind })
    }

    /// All of it is elsewhere. Its memory stays for a while, as far as it may.
    pub fn end(self) {
        if matches!(*self.behind.lock(), Behind::Stays(_)) {
            spare::keep(self.plain.into_iter().filter_map(Arc::into_inner).collect());
        }
    }

    /// Whether all that lies at these addresses is kept.
    pub fn has(&self, address: u64, bytes: u64) -> bool {
        self.ranges.lock().has(address, bytes)
    }

    /// What of it is where GPUs reach it again, by the pool's books and those of the program's own memory, is needed no more.
    pub fn look_what_arrived(&self, opened: &Opened) {
        let rows = opened.pool.mapped().into_iter().filter(|row| !row.place.is_stored());
        let rows = rows.map(|row| (row.address, row.address + row.bytes, row.place.is_host()));
        let own = by_hand::all().into_iter().filter(|own| !own.place.is_stored());
        let own = own.map(|own| (own.address, own.address + own.bytes, own.place.is_host()));
        self.arrived(rows.chain(own));
        let all = self.plain.iter().map(|plain| plain.bytes()).sum();
        if !spare::may_stay(all) {
            self.give_back(Vec::new());
        }
    }

    /// These ranges, of a first and a last address, are elsewhere, on the host or not: of what is kept of them, nothing is needed any more.
    fn arrived(&self, there: impl Iterator<Item = (u64, u64, bool)>) {
        let mut gone = Vec::new();
        let mut is_on_host = false;
        {
            let mut ranges = self.ranges.lock();
            for (start, end, on_host) in there {
                let before = gone.len();
                ranges.take(start, end, &mut gone);
                is_on_host |= on_host && gone.len() > before;
            }
        }
        match &mut *self.behind.lock() {
            Behind::Stays(parts) if !is_on_host => return parts.append(&mut gone),
            _ => {}
        }
        self.give_back(gone);
    }

    /// These parts go, and so does from now on whatever else nobody needs.
    fn give_back(&self, mut parts: Vec<(usize, u64)>) {
        if let Behind::Stays(before) = std::mem::replace(&mut *self.behind.lock(), Behind::Goes) {
            parts.extend(before);
        }
        for (host, bytes) in parts {
            // SAFETY: a part of `plain`, of whole frames, that was taken out of the list, by which alone it is found.
            unsafe { Plain::give_back(host, bytes) };
        }
    }

    /// Has this one keep what another does, too. What both have at an address is the other's, which came there later.
    pub fn join(&mut self, other: Self) {
        self.plain.extend(other.plain);
        let later = std::mem::take(&mut *other.ranges.lock());
        self.arrived(later.0.iter().map(|(start, (bytes, _))| (*start, start + bytes, false)));
        self.ranges.lock().0.extend(later.0);
    }

    /// Has what is kept brought back for the length of `act`, as the pool asks for it; `act` is given what tells why that failed, if it did.
    pub fn reading<T>(&self, driver: &'static Driver, act: impl FnOnce(&Unread) -> T) -> T {
        let unread = Unread::default();
        let load = loader(driver, self.plain.clone(), Arc::clone(&self.ranges), unread.clone());
        mover::loading(load, || act(&unread))
    }
}

/// Where in plain memory each of these goes, one after the other through all areas: of each the first byte, its bytes, and whether something may lie there.
fn laid_out(ranges: &[Range], areas: impl Iterator<Item = (usize, u64, bool)>) -> Vec<(u64, u32, Part)> {
    let mut areas = areas.peekable();
    let mut parts = Vec::with_capacity(ranges.len());
    for range in ranges {
        let (mut address, mut left) = (range.address, range.bytes);
        while left > 0
            && let Some((host, room, used)) = areas.peek_mut()
        {
            let bytes = left.min(*room);
            if bytes > 0 {
                parts.push((range.owner, range.home, Part { address, host: *host, bytes, used: *used }));
            }
            (address, left) = (address + bytes, left - bytes);
            (*host, *room) = (*host + bytes as usize, *room - bytes);
            if *room == 0 {
                areas.next();
            }
        }
    }
    parts
}

/// Brings ranges of the pool's addresses to where they are wanted.
fn loader(driver: &'static Driver, plain: Vec<Arc<Plain>>, ranges: Arc<Mutex<Ranges>>, unread: Unread) -> Load {
    let mut crew: Option<(Crew, (u64, u32))> = None;
    Box::new(move |owner, gpu, transfers| {
        let mut load = || -> Result<(), String> {
            let (parts, bytes) = {
                let ranges = ranges.lock();
                let parts = transfers.iter().flat_map(|transfer| ranges.parts_of(transfer));
                (parts.collect::<Option<Vec<Part>>>(), ranges.bytes())
            };
            let parts = parts.ok_or("some of it was not kept; this is a mistake of gpupool")?;
            if crew.as_ref().is_none_or(|(_, known)| *known != (owner, gpu)) {
                crew = None;
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

impl Ranges {
    fn bytes(&self) -> u64 {
        self.0.values().map(|(bytes, _)| bytes).sum()
    }

    /// Where the byte of this address is kept, and how many follow it there.
    fn at(&self, address: u64) -> Option<(usize, u64)> {
        let (start, &(bytes, host)) = self.0.range(..=address).next_back()?;
        let offset = address - start;
        (offset < bytes).then(|| (host + offset as usize, bytes - offset))
    }

    fn has(&self, address: u64, bytes: u64) -> bool {
        let mut done = 0;
        while done < bytes {
            let Some((_, follow)) = self.at(address + done) else { return false };
            done += follow;
        }
        true
    }

    /// Where the bytes of a transfer are; `None` for what is not kept.
    fn parts_of(&self, transfer: &Transfer) -> Vec<Option<Part>> {
        let &Transfer { from, to, bytes, .. } = transfer;
        let mut parts = Vec::new();
        let mut done = 0;
        while done < bytes {
            let Some((host, follow)) = self.at(from + done) else {
                parts.push(None);
                break;
            };
            let length = follow.min(bytes - done);
            parts.push(Some(Part { address: to + done, host, bytes: length, used: true }));
            done += length;
        }
        parts
    }

    /// Takes out what there is from `start` on and before `end`, and adds where it was.
    fn take(&mut self, start: u64, end: u64, taken: &mut Vec<(usize, u64)>) {
        let first = self.0.range(..=start).next_back().map_or(start, |(address, _)| *address);
        let touched: Vec<(u64, (u64, usize))> = self.0.range(first..end).map(|(at, what)| (*at, *what)).collect();
        for (address, (bytes, host)) in touched {
            let (from, to) = (start.max(address), end.min(address + bytes));
            if from >= to {
                continue;
            }
            self.0.remove(&address);
            if address < from {
                self.0.insert(address, (from - address, host));
            }
            if to < address + bytes {
                self.0.insert(to, (address + bytes - to, host + (to - address) as usize));
            }
            taken.push((host + (from - address) as usize, to - from));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_fills_one_area_after_the_other() {
        let range = |address, bytes| Range { owner: 1, home: 0, address, bytes };
        let areas = [(1000, 30, true), (2000, 10, true), (3000, 20, false)];
        let parts = laid_out(&[range(100, 20), range(200, 25), range(300, 15)], areas.into_iter());
        let parts: Vec<_> = parts.iter().map(|(.., part)| (part.address, part.host, part.bytes, part.used)).collect();
        let first = [(100, 1000, 20, true), (200, 1020, 10, true), (210, 2000, 10, true)];
        assert_eq!(parts, [&first[..], &[(220, 3000, 5, false), (300, 3005, 15, false)]].concat());
    }

    #[test]
    fn what_has_arrived_is_found_no_more_and_all_that_is_around_it_still_is() {
        let mut ranges = Ranges(BTreeMap::from([(100, (50, 1000)), (150, (50, 2000)), (300, (10, 3000))]));
        let mut taken = Vec::new();
        ranges.take(120, 160, &mut taken);
        assert_eq!(taken, [(1020, 30), (2000, 10)]);
        assert_eq!((ranges.at(119), ranges.at(120), ranges.at(159)), (Some((1019, 1)), None, None));
        assert_eq!((ranges.at(160), ranges.bytes()), (Some((2010, 40)), 70));
        // What is kept as a whole, by one range and by two beside each other, and what only begins so.
        assert!(ranges.has(160, 40) && ranges.has(300, 10) && !ranges.has(160, 41) && !ranges.has(159, 1));
        ranges.0.insert(200, (20, 4000));
        assert!(ranges.has(170, 50) && !ranges.has(170, 51));
        ranges.0.remove(&200);
        let transfer = |from, bytes| Transfer { from, to: 7000, bytes, inward: true, stored: true, between: false };
        assert!(ranges.parts_of(&transfer(110, 20)).iter().any(Option::is_none), "a part of it is gone");
        let whole: Vec<_> =
            ranges.parts_of(&transfer(170, 30)).into_iter().map(|part| part.map(|it| it.host)).collect();
        assert_eq!(whole, [Some(2020)]);
        // From before the first of them to behind the last, and once more.
        for left in [0, 0] {
            ranges.take(0, 1000, &mut taken);
            assert_eq!(ranges.bytes(), left);
        }
        assert_eq!(taken.iter().map(|(_, bytes)| bytes).sum::<u64>(), 110);
    }
}
