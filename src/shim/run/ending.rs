//! What the process did, at its end.

use crate::backing;
use crate::log::{self, MovedSummary, PlaceSummary, Summary};
use crate::process;
use crate::restore;
use crate::serve;
use crate::serve::{handles, ipc, memory, pinned};
use crate::tiers;
use crate::watch::{context, environment, module, unneeded};
use gpupool_events::{PlacePeak, ProcessExit, TierTotal};
use gpupool_pool::{Place, PlaceUsage, Usage};

/// The most that the pool was ever allowed to have there, as a recall or a drain may have narrowed it since; a disk is limited by others.
fn limit_of(place: Place, limit: u64) -> Option<u64> {
    let most = memory::accounts().map_or(limit, |accounts| accounts.highest_limit(place));
    (!place.is_stored()).then_some(most)
}

/// The places, and the most that the program used of each, what it made itself included. Where nothing was pooled, those that it used at all.
fn places(usage: &Usage) -> Vec<(PlaceUsage, u64)> {
    let peak = |it: &PlaceUsage| {
        memory::accounts().map_or(it.peak_used, |accounts| accounts.peak_used(it.place, it.peak_used))
    };
    let places = serve::places(usage).into_iter().map(|it| (it, peak(&it)));
    places.filter(|(_, peak)| *peak > 0 || !usage.places.is_empty()).collect()
}

/// Logs `process.exit` and writes the summary to stderr.
pub fn write() {
    // Where launches and copies go unseen, every context would look unused.
    if process::is_preloaded() {
        unneeded::judge();
        module::judge();
        pinned::judge();
        environment::judge();
        tiers::judge();
    }
    ipc::judge();
    restore::judge();
    backing::level::report_last();
    let usage = serve::usage().unwrap_or_default();
    let places = places(&usage);
    let handles = handles::by_hand::live();
    let moved = tiers::totals::summary();
    if moved.times > 0 {
        let MovedSummary { times, came, left, took, saved } = moved;
        log::emit(|| (TierTotal { times, came, left, took, saved }, "what moves came to"));
    }
    log::emit(|| {
        let of = |&(PlaceUsage { place, held, limit, .. }, peak_used): &(PlaceUsage, u64)| PlacePeak {
            place: place.to_string(),
            held,
            peak_used,
            limit: limit_of(place, limit),
        };
        let event = ProcessExit {
            peak: places.iter().map(of).collect(),
            live_blocks: usage.live_blocks,
            live_bytes: usage.live_bytes,
            live_handles: handles.count,
            live_handle_bytes: handles.bytes,
            allocations: usage.allocations,
            reuses: usage.reuses,
        };
        (event, "end of the process")
    });
    let places = places.iter().map(|(usage, peak_used)| PlaceSummary {
        name: usage.place.to_string(),
        peak_used: *peak_used,
        limit: limit_of(usage.place, usage.limit),
        // Beyond the peak of its blocks there is only what the pool took and never gave out.
        unused: usage.held.saturating_sub(usage.peak_used),
    });
    let contexts = context::all();
    log::write_summary(
        process::settings().summary,
        &Summary {
            places: places.collect(),
            contexts: contexts.iter().map(|it| (it.device.ordinal(), it.kind.word().to_owned())).collect(),
            warnings: log::warnings(),
            log_file: log::lasting_file(),
            log_removed: log::lasting_file().is_some_and(|path| !path.exists()),
            spilled: memory::spilled(),
            far: backing::residence::of(&usage).far() + handles.far,
            moved,
            lost: tiers::far::worst(),
            pinned: pinned::peak(),
            lost_lines: log::lost(),
            refused: memory::oom::refusals(),
        },
    );
}
