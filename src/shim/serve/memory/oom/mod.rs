//! What is told when the program hears OUT_OF_MEMORY and nobody helps it: who holds what, what would have fit where, and which setting
//! would have made room ([`remedies`]).
//!
//! Nothing of it costs anything before that. It takes some milliseconds then, holds a row for each live block meanwhile, and is done for
//! the first refusal, the second, the fourth and so on, and for each 1024th: a program that asks for less and less, or again and again,
//! does not fill its log.

mod remedies;

use super::{accounts, call_sites, labels, pieces, pool_usage};
use crate::backing::plan::Plan;
use crate::backing::{self, copies, host, open, residence, terms};
use crate::bypass::Bypass;
use crate::serve::pinned::{self, holders};
use crate::watch::{context, site};
use crate::{log, process};
use gpupool_config::format_size;
use gpupool_cuda::{Device, Driver};
use gpupool_events::{HolderAtRefusal, OutOfMemory, PlaceAtRefusal, Site};
use gpupool_interpose::cancel::Map;
use gpupool_pool::{Claim, Place, Usage};
use once_cell::race::OnceBox;
use remedies::Asked;
use std::cmp::Reverse;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Holders of device memory that are told, and of pinned memory.
const HOLDERS: usize = 16;
const PINNED: usize = 4;
/// Frames of Python of a holder, among which the program's own are, and native ones.
const FRAMES: usize = 32;
const NATIVE: usize = 8;
/// Blocks of which it is looked up where they lie.
const LOOKED_UP: usize = 1 << 14;

static REFUSALS: AtomicU64 = AtomicU64::new(0);
/// Those of them that asked for memory as there might be, and the bytes of the largest of these.
static POSSIBLE: AtomicU64 = AtomicU64::new(0);
static LARGEST: AtomicU64 = AtomicU64::new(0);
/// Bytes of a process's addresses (x86-64, aarch64): more no machine could give, and who asks for that tries what the answer is.
const ADDRESSES: u64 = 1 << 47;

/// How often the program was told OUT_OF_MEMORY of what a machine might have, and the most that it had asked for then.
pub fn refusals() -> (u64, u64) {
    (POSSIBLE.load(Relaxed), LARGEST.load(Relaxed))
}

/// Bytes of the program's own memory at a place that are in no account. Who knows handles lies above this module.
static UNCHARGED: OnceBox<fn(Place) -> u64> = OnceBox::new();

/// Asks this one about memory of the program's own that no account has.
pub fn ask_about_handles(uncharged: fn(Place) -> u64) {
    let _ = UNCHARGED.set(Box::new(uncharged));
}

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Block,
    Handle,
    Stream,
    /// A context, which takes about so much.
    Context,
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::Handle => "handle",
            Self::Stream => "stream",
            Self::Context => "context",
        }
    }
}

/// Why there was none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// `GPUPOOL_FAR_LIMIT`.
    Far,
    /// The driver, for this reason, and it had none either.
    Left(Bypass),
}

/// The program was told OUT_OF_MEMORY for so many bytes on the GPU of the current context.
#[cold]
pub fn refused_here(bytes: u64, kind: Kind, why: Why) {
    if let Some(device) = process::driver().and_then(|driver| driver.current_device().ok()) {
        refused(device, bytes, kind, why);
    }
}

/// The program was told OUT_OF_MEMORY.
#[cold]
pub fn refused(device: Device, bytes: u64, kind: Kind, why: Why) {
    let number = REFUSALS.fetch_add(1, Relaxed) + 1;
    if bytes < ADDRESSES {
        POSSIBLE.fetch_add(1, Relaxed);
        LARGEST.fetch_max(bytes, Relaxed);
    }
    let is_told = number.is_power_of_two() || number.is_multiple_of(1024);
    // In the child of a fork the locks that are taken below may be held by threads that it does not have.
    let is_told = is_told && process::is_active() && log::has_events_of_memory();
    let Some(driver) = process::driver().filter(|_| is_told) else { return };
    let home = device.ordinal();
    let usage = pool_usage().unwrap_or_default();
    let plan = open::plan(driver);
    let largest_whole = plan.filter(|_| kind == Kind::Handle).map(|plan| terms::largest_on_host_of(plan, home));
    let places =
        plan.map_or_else(Vec::new, |plan| places(driver, plan, home, largest_whole.map(|most| (bytes, most)), &usage));
    let rooms = |on_gpus: bool| {
        let there = places.iter().filter(move |place| place.out.is_none() && place.total.is_some() == on_gpus);
        there.map(|place| place.room)
    };
    let on_gpus = rooms(true).fold(0, u64::saturating_add);
    let on_host = rooms(false).fold(0, u64::saturating_add);
    // A block lies everywhere at once. A handle lies in parts on GPUs, or whole on the host if it is not too large for that.
    let (fits, asked) = match largest_whole {
        // It lies on its GPU, and what stays free there is for it.
        None if kind == Kind::Context => {
            let there = places.iter().find(|known| known.place == device.place().to_string());
            let fits = there.and_then(|known| known.free).unwrap_or(0);
            (fits, Asked { bytes, fits, fits_on_host: fits, is_far: false })
        }
        None => {
            let fits = on_gpus.saturating_add(on_host);
            (fits, Asked { bytes, fits, fits_on_host: fits, is_far: why == Why::Far })
        }
        Some(most) => {
            // What a drained GPU is asked for may lie on both.
            let with_gpus = on_gpus.saturating_add(on_host);
            let whole = rooms(false).max().unwrap_or(0);
            let fits_on_host = if terms::is_drained(home) { with_gpus } else { whole };
            let asked = Asked { bytes, fits: on_gpus, fits_on_host, is_far: why == Why::Far };
            (on_gpus.max(fits_on_host.min(most)), asked)
        }
    };
    let remedies =
        if kind == Kind::Context { Vec::new() } else { remedies::remedies(asked, &places, process::settings()) };
    let (holders, more_holders, more_bytes, large) = device_holders();
    // In the places they are in use; nobody in the program holds them.
    let live_bytes = open::opened().map_or(0, |opened| copies::usage_without(opened).live_bytes);
    log::emit(|| {
        let why = match why {
            Why::Far => "more of the time than GPUPOOL_FAR_LIMIT is lost by far memory".to_owned(),
            Why::Left(why) => why.to_string(),
        };
        let [size, room] = [bytes, fits].map(format_size);
        let helps = remedies
            .iter()
            .find(|remedy| remedy.enough)
            .map_or_else(String::new, |remedy| format!("; {} would have made room", remedy.said()));
        let of = if kind == Kind::Context { "a context of about " } else { "" };
        let text = format!("OUT_OF_MEMORY for {of}{size} on GPU {home}, where {room} would have fit{helps}");
        let event = OutOfMemory {
            number,
            home,
            bytes,
            kind: kind.word().to_owned(),
            why,
            fits,
            largest_whole,
            site: Some(shortened(&site::here())),
            places,
            holders,
            more_holders,
            more_bytes,
            small: live_bytes.saturating_sub(large),
            live_bytes,
            pinned: pinned::levels().now.pinned,
            remedies,
        };
        (event, text)
    });
}

/// Where memory could be, and what was there. `handle`: how large the one is that was asked for, and how large one may be that lies whole elsewhere.
fn places(
    driver: &'static Driver,
    plan: &Plan,
    home: u32,
    handle: Option<(u64, u64)>,
    usage: &Usage,
) -> Vec<PlaceAtRefusal> {
    let own_at = |place: Place| {
        let charged = accounts().map_or(0, |accounts| accounts.of(Claim::Handles, place));
        charged.saturating_add(UNCHARGED.get().map_or(0, |uncharged| uncharged(place)))
    };
    let settings = process::settings();
    let in_pool = |place: Place| usage.places.iter().find(|known| known.place == place);
    let mut places = Vec::new();
    for gpu in &plan.topology.gpus {
        let place = Place::Gpu(gpu.ordinal);
        let free = backing::free_on(driver, gpu.ordinal, &gpu.uuid);
        let is_member = plan.members.contains_key(&gpu.ordinal);
        let reserve = settings.reserve_of(gpu.total);
        let (held, used) = in_pool(place).map_or((0, 0), |known| (known.held, known.used));
        let own = own_at(place);
        let contexts = context::cost_on(Device::of(gpu.ordinal));
        let out = match () {
            // Also the program's own: nothing new goes there.
            () if terms::is_drained(gpu.ordinal) && plan.topology.reach(home, gpu.ordinal) => Some(remedies::DRAINED),
            () if gpu.ordinal == home && is_member => None,
            () if !is_member => Some(remedies::NOT_LISTED),
            () if !plan.lends(gpu.ordinal) => Some(remedies::ANOTHERS),
            () if !plan.topology.reach(home, gpu.ordinal) => Some(remedies::OUT_OF_REACH),
            () => None,
        };
        let known = held.saturating_add(own).saturating_add(contexts);
        let mut row = PlaceAtRefusal {
            place: place.to_string(),
            total: Some(gpu.total),
            limit: if is_member { plan.limit(place) } else { 0 },
            held,
            used,
            own,
            contexts,
            reserve,
            for_context: plan.kept_for_context(gpu.ordinal),
            free,
            others: free.map(|free| gpu.total.saturating_sub(free).saturating_sub(known)),
            room: 0,
            out: out.map(str::to_owned),
        };
        row.room = room(&row, accounts().map_or(0, |accounts| accounts.taken(place)));
        places.push(row);
    }
    let hosts: Vec<Place> = plan.places.iter().map(|spec| spec.place).filter(|place| place.is_host()).collect();
    let free = host::available();
    let too_large = handle.filter(|(bytes, most)| bytes > most).map(|_| remedies::TOO_LARGE);
    for &place in &hosts {
        let (held, used) = in_pool(place).map_or((0, 0), |known| (known.held, known.used));
        let share = free.map(|free| free / hosts.len() as u64);
        let mut row = PlaceAtRefusal {
            place: place.to_string(),
            limit: plan.limit(place),
            held,
            used,
            own: own_at(place),
            free: share,
            out: too_large.map(str::to_owned),
            ..PlaceAtRefusal::default()
        };
        row.room = room(&row, accounts().map_or(0, |accounts| accounts.taken(place)));
        places.push(row);
    }
    if hosts.is_empty() {
        let out = too_large.unwrap_or(remedies::NOT_LENT);
        places.push(PlaceAtRefusal {
            place: Place::Host(0).to_string(),
            free,
            out: Some(out.to_owned()),
            ..PlaceAtRefusal::default()
        });
    }
    places
}

/// What could have been had at a place of which so much is taken: what its limit leaves and what is free, with what is held unused there.
fn room(place: &PlaceAtRefusal, taken: u64) -> u64 {
    let idle = place.held.saturating_sub(place.used);
    let by_limit = place.limit.saturating_sub(taken.saturating_sub(idle));
    let free = place.free.map_or(u64::MAX, |free| free.saturating_sub(place.kept_free()).saturating_add(idle));
    by_limit.min(free)
}

/// A place in the program, and a name that it gave.
type Who = (Option<u64>, Option<String>);

/// Who holds most, how many others hold how much, and the bytes of all blocks that were looked at.
fn device_holders() -> (Vec<HolderAtRefusal>, u64, u64, u64) {
    let mut sums: Map<Who, HolderAtRefusal> = Map::default();
    let mut all = 0u64;
    let mut looked_up = 0;
    for block in super::live() {
        all = all.saturating_add(block.bytes);
        let asked = call_sites::of(&block);
        let sum = sums.entry((asked.map(|asked| asked.site), labels::of(&block))).or_default();
        sum.blocks += 1;
        sum.bytes += block.bytes;
        if asked.is_some_and(|asked| asked.is_guessed) {
            sum.guessed += block.bytes;
        }
        if residence::was_far() && looked_up < LOOKED_UP {
            looked_up += 1;
            for piece in pieces(block.address, block.bytes) {
                match piece.place {
                    Place::Gpu(gpu) if gpu == block.home => {}
                    Place::Gpu(_) => sum.on_peers += piece.bytes,
                    Place::Host(_) | Place::Pageable => sum.on_host += piece.bytes,
                    Place::Disk => {}
                }
            }
        }
    }
    let mut sums: Vec<(Who, HolderAtRefusal)> = sums.into_iter().collect();
    sums.sort_by(|(a, of_a), (b, of_b)| Reverse(of_a.bytes).cmp(&Reverse(of_b.bytes)).then_with(|| a.cmp(b)));
    let rest = sums.split_off(HOLDERS.min(sums.len()));
    let more_bytes = rest.iter().map(|(_, sum)| sum.bytes).sum();
    let told = sums.into_iter().map(|((site, label), sum)| HolderAtRefusal {
        memory: "device".to_owned(),
        site: site.and_then(call_sites::place).map(|site| shortened(&site)),
        label,
        ..sum
    });
    let pinned = holders::sites().into_iter().take(PINNED).map(|(site, blocks, bytes)| HolderAtRefusal {
        memory: "pinned".to_owned(),
        site: Some(shortened(&site)),
        blocks,
        bytes,
        on_host: bytes,
        ..HolderAtRefusal::default()
    });
    (told.chain(pinned).collect(), rest.len() as u64, more_bytes, all)
}

/// A place with its innermost frames: of Python, or native ones where there are none of Python.
fn shortened(site: &Site) -> Site {
    let Site { python, native, truncated } = site;
    let native = if python.is_empty() { &native[..] } else { &[] };
    let is_cut = python.len() > FRAMES || native.len() > NATIVE;
    Site {
        python: python.iter().take(FRAMES).cloned().collect(),
        native: native.iter().take(NATIVE).cloned().collect(),
        truncated: *truncated || is_cut,
    }
}
