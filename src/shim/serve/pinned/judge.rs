//! What is wrong with a program's use of pinned memory, as far as it shows at the end of the process, and the account of
//! every place.

use super::holders::{self, Growing, Remains, WORTH_SAYING};
use super::staging;
use crate::watch::{finding, site};
use crate::{clock, log};
use gpupool_config::format_size;
use gpupool_events::{Finding, PinnedSite, Site};

/// Places in the log; what comes after these is small.
const PLACES: usize = 64;
/// Time in the driver that is worth a word: this much, and this part of the process's life.
const SECONDS: f64 = 1.0;
const PART: f64 = 0.05;
/// Pieces of a leak, allocated with work on the GPU between each two. A set of buffers that is made at once and kept to
/// the end is none.
const STRETCHES: u64 = 4;

/// Logs what every place did, and makes the findings about them.
pub fn judge() {
    let accounts = holders::remains();
    for account in accounts.iter().take(PLACES) {
        report(account);
    }
    for account in &accounts {
        rounded(account);
        leaked(account);
    }
    slow(&accounts);
    staging::judge();
}

fn report(account: &Remains) {
    let place = &account.place;
    log::emit(|| {
        let event = PinnedSite {
            allocations: place.allocations,
            requested: place.requested,
            pinned: place.pinned,
            peak: place.peak,
            live: place.live,
            seconds: seconds(place.nanos),
            site: Some(place.site.clone()),
        };
        let (peak, line) = (format_size(place.peak), site::line(&place.site));
        (event, format!("pinned memory: {} allocations, at most {peak} at a time, by {line}", place.allocations))
    });
}

fn seconds(nanos: u64) -> f64 {
    nanos as f64 * 1e-9
}

fn rounded(account: &Remains) {
    let place = &account.place;
    let Some(framework) = place.framework.filter(|_| place.unreached >= WORTH_SAYING) else { return };
    let blocks = match place.unreached_blocks {
        1 => "a pinned buffer".to_owned(),
        many => format!("{many} pinned buffers"),
    };
    let what = format!(
        "{} asked for {blocks} of {} together, which are powers of two, and no copy ever reached {} of that{}",
        framework.name,
        format_size(place.unreached_of),
        format_size(place.unreached),
        framework.remedy
    );
    let facts = [
        ("framework", framework.name.to_owned()),
        ("bytes", place.unreached_of.to_string()),
        ("unreached", place.unreached.to_string()),
        ("buffers", place.unreached_blocks.to_string()),
    ];
    finding::make(&Finding::PINNED_ROUNDED, None, &place.site, &facts, &what);
}

fn leaked(account: &Remains) {
    let place = &account.place;
    let by_design = place.framework.is_some();
    if by_design || place.said.growing || place.live < WORTH_SAYING || account.stretches < STRETCHES {
        return;
    }
    let what = format!(
        "{} in {} pieces of pinned memory were never freed; they were allocated one after the other while the GPU worked",
        format_size(place.live),
        account.pieces
    );
    let facts = [("bytes", place.live.to_string()), ("pieces", account.pieces.to_string())];
    finding::make(&Finding::PINNED_LEAKED, None, &place.site, &facts, &what);
}

fn slow(accounts: &[Remains]) {
    let spent = seconds(accounts.iter().map(|account| account.place.nanos).sum());
    let uptime = clock::uptime();
    let worst = accounts.iter().max_by_key(|account| account.place.nanos);
    let Some(worst) = worst.filter(|_| spent >= SECONDS && spent >= PART * uptime) else { return };
    let what = format!(
        "the driver took {spent:.1} s of {uptime:.1} s to pin memory, {:.1} s of that for this place",
        seconds(worst.place.nanos)
    );
    finding::make(&Finding::PINNING_SLOW, None, &worst.place.site, &[], &what);
}

/// While the process runs: one place allocates and allocates.
pub fn growing(growing: &Growing) {
    let Growing { site, live, peaks } = growing;
    let what = format!(
        "pinned memory keeps growing: {peaks} new peaks since this place last freed any, {} by now",
        format_size(*live)
    );
    let facts = [("bytes", live.to_string()), ("peaks", peaks.to_string())];
    finding::make(&Finding::PINNED_GROWING, None, site, &facts, &what);
}

/// The limit of the pool was met for the first time.
pub fn over_limit(bytes: u64, limit: u64) {
    let what = format!(
        "{} of pinned memory would have taken the pool over its limit of {}; the driver pinned them",
        format_size(bytes),
        format_size(limit)
    );
    let facts = [("bytes", bytes.to_string()), ("limit", limit.to_string())];
    finding::make(&Finding::PINNED_LIMIT, None, &site::here(), &facts, &what);
}

/// The driver refused to register what is registered.
pub fn registered_twice(address: u64, bytes: u64, site: &Site) {
    let what = format!("{} were to be registered, and are registered already, all or in part", format_size(bytes));
    let first = holders::overlapping(address, bytes).map(|place| site::line(&place));
    let what = first.as_ref().map_or(what.clone(), |line| format!("{what}, by {line}"));
    let mut facts = vec![("bytes", bytes.to_string())];
    facts.extend(first.map(|line| ("registered_by", line)));
    finding::make(&Finding::REGISTERED_TWICE, None, site, &facts, &what);
}
