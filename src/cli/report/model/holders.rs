//! Who holds pooled memory: blocks as they come and go, summed up by the place in the program that asked for them and by the name it gave
//! them.

use std::collections::{BTreeMap, HashMap};

use gpupool_events::{BlockAllocate, PlaceBytes, Site};

use super::timeline::Timeline;

/// Holders that are kept apart; further ones are one, without place and name.
const HOLDERS: usize = 2048;
/// Blocks that are known at a time. Of further ones, which are the smallest programs' own, nothing is said but how many there were.
const BLOCKS: usize = 1 << 20;

/// The live blocks of a process and who holds them. Empty where the log has no line for each block (level `debug`).
#[derive(Default)]
pub struct Holders {
    /// By address.
    blocks: BTreeMap<u64, Live>,
    holders: Vec<Holder>,
    by_name: HashMap<(Option<u64>, Option<String>), usize>,
    /// What the numbers of places mean.
    sites: HashMap<u64, Site>,
    now: u64,
    peak: u64,
    /// When the peak was, seconds from the start.
    peak_at: f64,
    /// Counts peaks, so that a holder knows whether it has changed since the last.
    peaks: u64,
    /// Blocks that were too many.
    pub left_out: u64,
}

/// A block that was allocated and not freed.
#[derive(Clone, Copy, Debug)]
pub struct Live {
    /// Bytes asked for.
    pub bytes: u64,
    /// Bytes of it on another GPU than the one that asked, or on the host.
    pub far: u64,
    /// The GPU that asked.
    home: u32,
    holder: usize,
}

/// What one place in the program holds of one name.
#[derive(Default)]
pub struct Holder {
    /// The number of the place ([`Holders::site`]).
    site: Option<u64>,
    /// What the program calls these blocks.
    pub label: Option<String>,
    /// Bytes over time.
    pub line: Timeline,
    /// Bytes of them that lay elsewhere, over time.
    pub far: Timeline,
    /// Blocks allocated in the life of the process.
    pub blocks: u64,
    now: [u64; 2],
    at_peak: [u64; 2],
    /// The peak that `at_peak` is of.
    seen: u64,
}

impl Holders {
    /// What the number of a place means.
    pub fn name_site(&mut self, id: u64, site: Site) {
        if self.sites.len() < HOLDERS {
            self.sites.insert(id, site);
        }
    }

    /// A block came, `now` seconds from the start.
    pub fn allocate(&mut self, now: f64, made: &BlockAllocate) {
        // Its end was lost.
        self.free(now, made.address);
        if self.blocks.len() >= BLOCKS {
            self.left_out += 1;
            return;
        }
        let holder = self.holder(made.site, None);
        let far = made.on_peers.saturating_add(made.on_host).min(made.bytes);
        self.blocks.insert(made.address, Live { bytes: made.bytes, far, home: made.home, holder });
        self.holders[holder].blocks += 1;
        self.change(now, holder, |[bytes, elsewhere]| {
            [bytes.saturating_add(made.bytes), elsewhere.saturating_add(far)]
        });
        self.now = self.now.saturating_add(made.bytes);
        if self.now > self.peak {
            (self.peak, self.peak_at) = (self.now, now);
            self.peaks += 1;
        }
    }

    /// A block went.
    pub fn free(&mut self, now: f64, address: u64) {
        if let Some(Live { bytes, far, holder, .. }) = self.blocks.remove(&address) {
            self.change(now, holder, |[all, elsewhere]| [all.saturating_sub(bytes), elsewhere.saturating_sub(far)]);
            self.now = self.now.saturating_sub(bytes);
        }
    }

    /// The block that starts at this address lies there now.
    pub fn lies(&mut self, now: f64, address: u64, places: &[PlaceBytes]) {
        if let Some(home) = self.blocks.get(&address).map(|live| format!("gpu{}", live.home)) {
            let far = places.iter().filter(|part| part.place != home).map(|part| part.bytes);
            self.placed(now, address, far.fold(0, u64::saturating_add));
        }
    }

    /// So much of the block that starts at this address lies elsewhere now.
    pub fn placed(&mut self, now: f64, address: u64, far: u64) {
        if let Some(live) = self.blocks.get_mut(&address) {
            let before = std::mem::replace(&mut live.far, far.min(live.bytes));
            let (after, holder) = (live.far, live.holder);
            self.change(now, holder, |[all, elsewhere]| [all, elsewhere.saturating_sub(before).saturating_add(after)]);
        }
    }

    /// The program named a block, or took the name back.
    pub fn label(&mut self, now: f64, address: u64, label: Option<String>) {
        let Some(Live { bytes, far, holder: before, .. }) = self.blocks.get(&address).copied() else { return };
        let after = self.holder(self.holders[before].site, label);
        if let Some(live) = self.blocks.get_mut(&address) {
            live.holder = after;
        }
        self.holders[after].blocks += 1;
        self.change(now, before, |[all, elsewhere]| [all.saturating_sub(bytes), elsewhere.saturating_sub(far)]);
        self.change(now, after, |[all, elsewhere]| [all.saturating_add(bytes), elsewhere.saturating_add(far)]);
    }

    fn holder(&mut self, site: Option<u64>, label: Option<String>) -> usize {
        let mut name = (site, label);
        if self.holders.len() >= HOLDERS && !self.by_name.contains_key(&name) {
            name = (None, None);
        }
        if let Some(known) = self.by_name.get(&name) {
            return *known;
        }
        self.holders.push(Holder { site: name.0, label: name.1.clone(), ..Holder::default() });
        self.by_name.insert(name, self.holders.len() - 1);
        self.holders.len() - 1
    }

    fn change(&mut self, now: f64, holder: usize, change: impl FnOnce([u64; 2]) -> [u64; 2]) {
        let peaks = self.peaks;
        let holder = &mut self.holders[holder];
        holder.look(peaks);
        holder.now = change(holder.now);
        holder.line.add(now, holder.now[0]);
        if holder.far.peak() > 0 || holder.now[1] > 0 {
            holder.far.add(now, holder.now[1]);
        }
    }

    /// Whether the log told of any block.
    pub fn is_known(&self) -> bool {
        !self.holders.is_empty()
    }

    /// Blocks that are live, in address order, each with its holder.
    pub fn blocks(&self) -> impl Iterator<Item = (u64, &Live, &Holder)> {
        self.blocks.iter().map(|(address, live)| (*address, live, &self.holders[live.holder]))
    }

    /// Everybody who ever held anything, those with the highest peak first.
    pub fn all(&self) -> Vec<&Holder> {
        let mut all: Vec<&Holder> = self.holders.iter().collect();
        all.sort_by_key(|holder| std::cmp::Reverse(holder.line.peak()));
        all
    }

    /// The place of a holder, where the log tells it.
    pub fn site(&self, holder: &Holder) -> Option<&Site> {
        self.sites.get(&holder.site?)
    }

    /// The place of this number.
    pub fn site_of(&self, number: u64) -> Option<&Site> {
        self.sites.get(&number)
    }

    /// Bytes that a holder has now and bytes of them that lie elsewhere.
    pub fn now(&self, holder: &Holder) -> [u64; 2] {
        holder.now
    }

    /// The same when all blocks together were the most.
    pub fn at_peak(&self, holder: &Holder) -> [u64; 2] {
        if holder.seen == self.peaks { holder.at_peak } else { holder.now }
    }

    /// Bytes of all live blocks, and the most there were, with the time of that in seconds from the start.
    pub fn total(&self) -> (u64, u64, f64) {
        (self.now, self.peak, self.peak_at)
    }
}

impl Holder {
    /// Before it changes: what it has now it had at the last peak, unless it has changed since then already. So that each peak costs
    /// nothing, however many holders there are.
    fn look(&mut self, peaks: u64) {
        if self.seen != peaks {
            (self.seen, self.at_peak) = (peaks, self.now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(address: u64, bytes: u64, on_peers: u64, site: Option<u64>) -> BlockAllocate {
        BlockAllocate { address, bytes, home: 0, reused: false, on_peers, on_host: 0, site }
    }

    #[test]
    fn who_held_what_at_the_peak_is_known_afterwards() {
        let mut holders = Holders::default();
        holders.allocate(1.0, &block(0x10, 100, 0, Some(1)));
        holders.allocate(2.0, &block(0x20, 50, 20, Some(2)));
        holders.free(3.0, 0x10);
        holders.allocate(4.0, &block(0x30, 70, 0, Some(3)));
        let at_peak: Vec<[u64; 2]> = holders.all().into_iter().map(|holder| holders.at_peak(holder)).collect();
        assert_eq!(at_peak, [[100, 0], [0, 0], [50, 20]]);
        assert_eq!(holders.total(), (120, 150, 2.0));
    }

    #[test]
    fn a_name_takes_bytes_from_one_holder_to_another() {
        let mut holders = Holders::default();
        holders.allocate(1.0, &block(0x10, 100, 0, Some(1)));
        holders.label(2.0, 0x10, Some("kv".to_owned()));
        holders.placed(3.0, 0x10, 40);
        let now: Vec<_> = holders.all().into_iter().map(|one| (one.label.as_deref(), holders.now(one))).collect();
        assert_eq!(now, [(None, [0, 0]), (Some("kv"), [100, 40])]);
        holders.free(4.0, 0x10);
        assert_eq!(holders.total().0, 0);
    }

    #[test]
    fn ends_that_nobody_saw_and_blocks_that_nobody_knows_are_no_matter() {
        let mut holders = Holders::default();
        holders.free(0.0, 0x99);
        holders.placed(0.0, 0x99, 5);
        holders.allocate(1.0, &block(0x10, 100, 0, None));
        holders.allocate(2.0, &block(0x10, 30, 90, None));
        assert_eq!((holders.total().0, holders.now(holders.all()[0])), (30, [30, 30]));
    }
}
