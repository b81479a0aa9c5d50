//! What the page is to say now, gathered from those who know it.

use crate::backing::{self, residence};
use crate::checkpoint;
use crate::live;
use crate::serve;
use crate::serve::memory::{call_sites, labels};
use crate::serve::pinned::holders::{self, Holder};
use crate::serve::{handles, ipc, memory, pinned};
use crate::suspend;
use crate::tiers;
use crate::watch::{
    context::{self, Record},
    finding::{self, Recent},
    site,
};
use gpupool_metrics::{
    Context, Counter, Finding, Gpu, LABELS, Label, Levels, Loan, Map, Page, Pinned, Place, Residence, Site, Table, now,
};
use gpupool_pool::{Place as Where, PlaceUsage, Usage};
use std::sync::atomic::Ordering::Relaxed;

/// All that can change, without the time.
#[derive(PartialEq)]
pub struct Look {
    counters: Vec<(Counter, u64)>,
    levels: Levels,
    contexts: Table<Context>,
    sites: Table<Site>,
    findings: Table<Finding>,
    labels: Table<Label>,
}

impl Look {
    /// Looks. Locks are taken one after the other, and none is held at the end.
    pub fn now() -> Self {
        let usage = serve::usage().unwrap_or_default();
        let (contexts, tally) = context::living();
        let (findings, before) = finding::recent();
        let (labels, unnamed) = labels::largest(LABELS);
        Self {
            counters: counters(&usage, tally),
            levels: levels(&usage),
            contexts: contexts.iter().map(context).collect::<Vec<_>>().into(),
            sites: sites(),
            findings: Table { rows: findings.iter().map(found).collect(), more: before },
            labels: Table { rows: labels.into_iter().map(label).collect(), more: unnamed },
        }
    }

    /// Has the page say it. `false`: the page cannot be written any more.
    pub fn tell(&self, page: &mut Page<Map>) -> bool {
        self.counters.iter().all(|(counter, value)| page.set(*counter, *value))
            && page.contexts(&self.contexts)
            && page.sites(&self.sites)
            && page.findings(&self.findings)
            && page.labels(&self.labels)
            && page.levels(&Levels { updated: now(), ..self.levels.clone() })
    }
}

fn counters(usage: &Usage, tally: context::Totals) -> Vec<(Counter, u64)> {
    let memory::Told { soft_refusals, refusals, fallbacks, trims } = memory::told();
    let (exports, imports) = ipc::counts();
    let mut counters = vec![
        (Counter::Allocations, usage.allocations),
        (Counter::Frees, usage.allocations.saturating_sub(usage.live_blocks)),
        (Counter::Reuses, usage.reuses),
        (Counter::AllocatedBytes, tally.pooled_bytes),
        // Contexts count what the pool and what the driver served.
        (Counter::PassedOn, tally.allocations.saturating_sub(usage.allocations)),
        (Counter::SoftRefusals, soft_refusals),
        (Counter::Refusals, refusals),
        (Counter::Fallbacks, fallbacks),
        (Counter::Trims, trims),
        (Counter::TrimmedBytes, usage.trimmed_bytes),
        (Counter::SpilledBytes, memory::spilled()),
        (Counter::Exports, exports),
        (Counter::Imports, imports),
        (Counter::FarReadBytes, tiers::far::read_bytes()),
    ];
    counters.extend(tiers::totals::counters());
    counters.extend(suspend::totals::counters());
    counters
}

fn levels(usage: &Usage) -> Levels {
    let gpus = backing::open::plan_made().into_iter().flat_map(|plan| &plan.topology.gpus);
    let gpus = gpus.map(|gpu| Gpu { ordinal: gpu.ordinal, uuid: gpu.uuid, name: gpu.name.clone(), total: gpu.total });
    let pinned = pinned::levels();
    let mut loans = residence::loans(usage);
    let mut lies = residence::in_sum(usage, &loans);
    lies.add(&handles::by_hand::by_home(), &mut loans);
    let residence::Residence { near, on_peers, on_host } = lies;
    Levels {
        updated: 0,
        mode: memory::mode().to_string_lossy().into_owned(),
        live_blocks: usage.live_blocks,
        live_bytes: usage.live_bytes,
        peak_live_bytes: usage.peak_live_bytes,
        suspended: suspend::since(),
        priority: u64::from(live::priority()),
        pinned: Pinned {
            limit: pinned.limit,
            pinned: pinned.now.pinned,
            requested: pinned.now.requested,
            registered: pinned.now.registered,
            peak_pinned: pinned.peak.pinned,
            peak_requested: pinned.peak.requested,
        },
        residence: Residence {
            near,
            on_peers,
            on_host,
            lost_microseconds: tiers::far::lost_microseconds(),
            saved_microseconds: tiers::totals::saved_microseconds(),
        },
        gpus: gpus.collect::<Vec<_>>().into(),
        places: serve::places(usage).iter().map(place).collect::<Vec<_>>().into(),
        loans: loans.into_iter().map(loan).collect::<Vec<_>>().into(),
    }
}

fn place(usage: &PlaceUsage) -> Place {
    let PlaceUsage { place, limit, held, used, peak_used, anchored } = *usage;
    let (on_host, number) = numbered(place);
    let on_disk = place == Where::Disk;
    let reserve = backing::open::plan_made().and_then(|plan| plan.members.get(&number)).copied();
    let reserve = reserve.filter(|_| matches!(place, Where::Gpu(_))).unwrap_or(0);
    // What is charged to the place is less: without a limit nothing of it is.
    // What of it is in plain memory is the host's, as of the pool's.
    let kept = if place == Where::Host(0) { handles::by_hand::bytes_at(Where::Pageable) } else { 0 };
    let own = handles::by_hand::bytes_at(place) + kept;
    let plain = || suspend::spare::bytes() + checkpoint::bytes_on_host();
    let held = held + if place == Where::Host(0) { plain() } else { 0 };
    // What a disk takes is the disk's to say.
    let limit = if on_disk { peak_used.max(held.saturating_add(own)) } else { limit };
    let drained = matches!(place, Where::Gpu(_)) && backing::terms::is_drained(number);
    Place { on_host, on_disk, number, limit, held, used, peak_used, anchored, own, reserve, drained }
}

fn numbered(place: Where) -> (bool, u32) {
    match place {
        Where::Gpu(ordinal) => (false, ordinal),
        Where::Host(node) => (true, node),
        Where::Pageable => (true, 0),
        Where::Disk => (false, 0),
    }
}

fn loan(((borrower, place), bytes): ((u32, Where), u64)) -> Loan {
    let (on_host, number) = numbered(place);
    Loan { borrower, on_host, number, bytes }
}

fn context(record: &Record) -> Context {
    let Record { id, device, kind, origin, usage, .. } = record;
    Context {
        id: *id,
        device: device.ordinal(),
        kind: kind.word().to_owned(),
        cost: origin.cost,
        call: origin.call.clone(),
        site: site::line(&origin.site),
        launches: usage.launches.load(Relaxed),
        copies: usage.copies.load(Relaxed),
        allocations: usage.allocations(),
    }
}

/// Places in the program that hold memory of either kind, those that hold most first.
fn sites() -> Table<Site> {
    let (pinned, more) = holders::holders();
    let (device, others) = call_sites::holders();
    let device = device.iter().map(|holder| {
        let call_sites::Holder { text, live, blocks, total } = holder;
        Site { memory: "device".to_owned(), text: text.clone(), live: *live, blocks: *blocks, total: *total }
    });
    let mut rows: Vec<Site> = pinned.iter().map(site).chain(device).collect();
    rows.sort_by_key(|site| std::cmp::Reverse(site.live));
    Table { rows, more: more.saturating_add(others) }
}

fn site(holder: &Holder) -> Site {
    let Holder { text, live, blocks, total } = holder;
    Site { memory: "pinned".to_owned(), text: text.clone(), live: *live, blocks: *blocks, total: *total }
}

fn label(usage: labels::Usage) -> Label {
    let labels::Usage { name, blocks, bytes, at_home, on_peers, on_host, budget } = usage;
    Label { name, blocks, bytes, near: at_home, on_peers, on_host, budget }
}

fn found(recent: &Recent) -> Finding {
    let Recent { at, code, device, what } = recent;
    Finding { at: *at, code: (*code).to_owned(), device: *device, text: what.clone() }
}
