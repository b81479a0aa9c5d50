//! Which memory an image is of, and from where it can be read while the program's threads go on freeing.
//!
//! A program that is stopped frees all the same, and memory of a block that ended may go back to the driver. So each piece of memory is
//! mapped a second time, at an address of ours, which keeps it; blocks that live still when all of them are mapped are in the image, with what
//! they had when the program was stopped.

use crate::backing::open::Opened;
use crate::serve::handles::by_hand::{self, NOBODY, Read};
use crate::serve::memory::names::{self, Named};
use crate::serve::memory::{call_sites, labels};
use crate::watch::site;
use gpupool_cuda::{CuResult, Driver};
use gpupool_pool::{Backend, Block, Fault, Mover, Place};
use gpupool_store::{About, Name};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes that lie behind each other where they are read, and what they are of.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// The block, by its place in [`Subject::blocks`], and where in it.
    pub block: usize,
    pub offset: u64,
    /// Where they are read.
    pub address: u64,
    pub bytes: u64,
    /// Whose context copies them, on which GPU.
    pub owner: u64,
    pub gpu: u32,
    /// Whether that GPU has them.
    pub is_near: bool,
}

/// All that an image is of.
pub struct Subject {
    opened: &'static Opened,
    pub blocks: Vec<About>,
    pub spans: Vec<Span>,
    /// Bytes of the program's own that no GPU reaches which it works on.
    pub left_out: u64,
    /// Which contexts there were before any of this was mapped ([`Backend::readers`]).
    pub readers: u64,
    /// By the address of a chunk of the pool: its second mapping, and how long it is.
    aliases: BTreeMap<u64, (u64, u64)>,
    /// The same of memory of the program's own.
    own_aliases: Vec<(u64, u64)>,
}

/// What a place begins with that another block of the same size was asked for at.
pub const GUESSED: &str = "as others of its size: ";
/// What small blocks begin at multiples of.
const SMALLEST: u64 = 512;
/// Of the program's own memory, blocks have numbers from here on, which none of the pool reaches.
pub const OWN: u64 = 1 << 63;

/// Bytes of all blocks now: for a first guess at the room that they need.
pub fn bytes(opened: &Opened) -> u64 {
    let pooled: u64 = opened.pool.stretches().iter().map(|(block, _)| block.bytes).sum();
    pooled + by_hand::all_mapped().iter().map(|own| own.bytes).sum::<u64>()
}

impl Subject {
    /// Looks what there is, while the program is stopped.
    ///
    /// # Errors
    /// The driver's answer to the second mapping.
    pub fn find(driver: &Driver, opened: &'static Opened) -> Result<Self, CuResult> {
        let mut found = Self {
            opened,
            blocks: Vec::new(),
            spans: Vec::new(),
            left_out: 0,
            readers: opened.pool.backend().readers(),
            aliases: BTreeMap::new(),
            own_aliases: Vec::new(),
        };
        // What small blocks stood on is there for a while or not, as it comes, and is nobody's memory.
        opened.pool.free_empty_slabs();
        let stretches = opened.pool.stretches();
        for piece in stretches.iter().flat_map(|(_, pieces)| pieces) {
            let Entry::Vacant(alias) = found.aliases.entry(piece.chunk_address) else { continue };
            match opened.pool.backend().alias(piece.handle, piece.chunk_bytes, piece.place) {
                Ok(address) => {
                    alias.insert((address, piece.chunk_bytes));
                }
                // Freed meanwhile, most likely, which the second look tells. A block that lives has no chunk without a mapping.
                Err(Fault::Failed(CuResult::INVALID_VALUE)) => {}
                Err(
                    Fault::Failed(result)
                    | Fault::OutOfMemory(result)
                    | Fault::Unavailable(result)
                    | Fault::NotReady(result),
                ) => return Err(result),
            }
        }
        let live: BTreeSet<(u64, u64)> =
            opened.pool.stretches().iter().map(|(block, _)| (block.address, block.id)).collect();
        for (block, pieces) in stretches {
            if !live.contains(&(block.address, block.id)) {
                continue;
            }
            let at = found.blocks.len();
            found.blocks.push(About { small: small_in(opened, &block), ..about(&block) });
            for piece in pieces {
                let Some((alias, _)) = found.aliases.get(&piece.chunk_address) else {
                    return Err(CuResult::INVALID_VALUE);
                };
                found.spans.push(Span {
                    block: at,
                    offset: piece.address - block.address,
                    address: alias + (piece.address - piece.chunk_address),
                    bytes: piece.bytes,
                    owner: block.owner,
                    gpu: block.home,
                    is_near: piece.place == Place::Gpu(block.home),
                });
            }
        }
        // Nobody unmaps or releases it while the program is stopped. Programs make memory for GPUs on which they have no context, and let another one use it.
        for (number, own) in (0..).zip(by_hand::all_mapped()) {
            let (gpu, address) = match by_hand::readable(driver, opened, &own)? {
                Some(Read::There(gpu)) => (gpu, own.address),
                Some(Read::Aliased(gpu, alias)) => {
                    found.own_aliases.push((alias, own.bytes));
                    (gpu, alias)
                }
                None => {
                    found.left_out += own.bytes;
                    continue;
                }
            };
            let block = found.blocks.len();
            let home = Some(own.asked);
            found.blocks.push(About {
                id: OWN + number,
                address: own.address,
                bytes: own.bytes,
                home,
                ..About::default()
            });
            let (bytes, is_near) = (own.bytes, own.place == Place::Gpu(gpu));
            found.spans.push(Span { block, offset: 0, address, bytes, owner: NOBODY, gpu, is_near });
        }
        for Named { name, address, bytes, .. } in names::all() {
            let is_in = |about: &&mut About| about.address <= address && address + bytes <= about.address + about.bytes;
            if let Some(about) = found.blocks.iter_mut().find(is_in) {
                let offset = address - about.address;
                about.names.push(Name { name, offset, bytes });
            }
        }
        // GPU by GPU, since each has its own buffers.
        found.spans.sort_by_key(|span| (span.gpu, span.owner));
        Ok(found)
    }

    pub fn bytes(&self) -> u64 {
        self.blocks.iter().map(|about| about.bytes).sum()
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        for (alias, bytes) in self.aliases.values().chain(&self.own_aliases) {
            // One that stays mapped keeps memory from the driver, and there is no second way.
            let _ = self.opened.pool.backend().drop_alias(*alias, *bytes);
        }
    }
}

/// How small blocks lie in a stretch that they have in common; nothing where it is a block of its own.
pub fn small_in(opened: &Opened, stretch: &Block) -> Vec<(u64, u64)> {
    let end = stretch.address + stretch.bytes;
    let mut found = Vec::new();
    let mut at = stretch.address;
    while at < end {
        match opened.pool.block_at(at) {
            Some(block) if (block.address, block.id) == (stretch.address, stretch.id) => return Vec::new(),
            Some(block) => {
                found.push((block.address - stretch.address, block.bytes));
                at = (block.address + block.bytes.max(1)).next_multiple_of(SMALLEST);
            }
            None => at += SMALLEST,
        }
    }
    found
}

/// What the program is told asked for a block; empty where only another block of its size is known.
pub fn site_of(block: &Block) -> String {
    let asked = call_sites::of(block).filter(|asked| !asked.is_guessed);
    asked.and_then(|asked| call_sites::place(asked.site)).map(|site| site::line(&site)).unwrap_or_default()
}

fn about(block: &Block) -> About {
    let site = call_sites::of(block).and_then(|asked| Some((call_sites::place(asked.site)?, asked.is_guessed)));
    let site = site.map(|(site, is_guessed)| {
        let line = site::line(&site);
        if is_guessed && !line.is_empty() { format!("{GUESSED}{line}") } else { line }
    });
    About {
        id: block.id,
        address: block.address,
        bytes: block.bytes,
        home: Some(block.home),
        site: site.unwrap_or_default(),
        label: labels::of(block).unwrap_or_default(),
        names: Vec::new(),
        small: Vec::new(),
    }
}
