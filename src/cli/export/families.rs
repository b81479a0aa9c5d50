//! What is exported, by name, and the text of it. Names and units are as Prometheus has them: bytes, seconds, `_total` for what only
//! grows, `_info` for words.
//!
//! The text is written here. `prometheus-client` writes OpenMetrics, which node_exporter's textfile collector does not read. With
//! `prometheus`, which writes the older text, a scrape of 64 processes took twice as long: 1.3 % of a core at one a second.

use std::collections::BTreeMap;
use std::fmt::Write;

use gpupool_events::finding;
use gpupool_metrics::{Counter, Snapshot};

use super::slots::Labels;
use crate::pages::{Listed, Look};
use crate::terminal::clean;

/// What a value does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Gauge,
    Counter,
}

/// One name.
#[derive(Debug)]
pub struct Family {
    pub name: &'static str,
    kind: Kind,
    help: &'static str,
    /// Labels beside `host`, and beside those of the process where it is of one.
    labels: &'static [&'static str],
    of_process: bool,
}

/// Labels of what is said of one process.
const OF_PROCESS: [&str; 3] = ["process", "rank", "slot"];

impl Family {
    /// Every label that it may have.
    #[cfg(test)]
    pub fn all_labels(&self) -> Vec<&'static str> {
        let process: &[&str] = if self.of_process { &OF_PROCESS } else { &[] };
        [&["host"], process, self.labels].concat()
    }
}

macro_rules! families {
    ($($name:ident: $kind:ident $of_process:literal $text:literal [$($label:literal),*] $help:literal;)*) => {
        $(static $name: Family = Family {
            name: $text,
            kind: Kind::$kind,
            help: $help,
            labels: &[$($label),*],
            of_process: $of_process,
        };)*
        /// Every name.
        #[cfg(test)]
        pub static ALL: &[&Family] = &[$(&$name),*];
    };
}

families! {
    EXPORTER: Gauge false "gpupool_exporter_info" ["version"] "The exporter.";
    SKIPPED: Gauge false "gpupool_exporter_skipped_pages" ["reason"]
        "Pages of processes, or folders of such, that were not read: newer than the exporter, half written, of processes that are gone.";
    OMITTED: Gauge false "gpupool_exporter_omitted_processes" [] "Processes that are not exported because there are too many.";
    GPU: Gauge false "gpupool_gpu_info" ["gpu", "name"] "A GPU that a process sees.";
    GPU_MEMORY: Gauge false "gpupool_gpu_memory_bytes" ["gpu"] "Memory of a GPU.";

    PROCESS: Gauge true "gpupool_process_info" ["pid", "user", "mode", "version"] "A process that runs under gpupool.";
    STOPPED: Gauge true "gpupool_process_stopped" [] "1 while the process is stopped (SIGSTOP, a debugger) or frozen (its control group), and what it told last is old.";
    SUSPENDED: Gauge true "gpupool_process_suspended" [] "1 while the process is suspended (gpupool suspend, GPUPOOL_IDLE_SUSPEND): its memory has left its GPUs.";
    SUSPENDED_SINCE: Gauge true "gpupool_process_suspended_timestamp_seconds" [] "When the process was suspended; not there while it is not.";
    CREATED: Gauge true "gpupool_process_first_allocation_timestamp_seconds" [] "When the process first allocated.";
    UPDATED: Gauge true "gpupool_process_updated_timestamp_seconds" [] "When the process last told of a change.";

    PLACE_LIMIT: Gauge true "gpupool_place_limit_bytes" ["gpu", "place"] "The most that the pool of the process may hold in a place.";
    PLACE_HELD: Gauge true "gpupool_place_held_bytes" ["gpu", "place"] "Memory that the pool of the process holds in a place.";
    PLACE_USED: Gauge true "gpupool_place_used_bytes" ["gpu", "place"] "The part of what is held that live blocks stand on.";
    PLACE_PEAK: Gauge true "gpupool_place_peak_used_bytes" ["gpu", "place"] "The most that was used in a place so far.";
    PLACE_ANCHORED: Gauge true "gpupool_place_anchored_bytes" ["gpu", "place"] "The part of what is held that must stay where it is.";
    PLACE_RESERVE: Gauge true "gpupool_place_reserve_bytes" ["gpu", "place"] "What the pool of the process leaves free in a place, beyond its limit.";
    BORROWED: Gauge true "gpupool_borrowed_bytes" ["borrower", "lender", "place"]
        "Memory that was allocated for a GPU (borrower) and lies on another one (lender) or, without one, on the host; place is the lender's.";
    PLACE_OWN: Gauge true "gpupool_place_own_bytes" ["gpu", "place"] "Memory that the program made itself (cuMemCreate), beside what is held.";

    LIVE_BLOCKS: Gauge true "gpupool_live_blocks" [] "Blocks that the program holds.";
    LIVE: Gauge true "gpupool_live_bytes" [] "Bytes that the program asked for in the blocks that it holds.";
    LIVE_PEAK: Gauge true "gpupool_peak_live_bytes" [] "The most that was live so far.";
    RESIDENT: Gauge true "gpupool_resident_bytes" ["residence"]
        "Bytes of live blocks and of cuMemCreate on the GPU that they were asked for on (near), on other GPUs (peers) and on the host (host).";
    LABELS: Gauge true "gpupool_labels" [] "Names that the program gave to live blocks (gpupool_label).";
    LABEL: Gauge true "gpupool_label_bytes" ["label", "residence"]
        "Bytes of live blocks by the name that the program gave them, by where they lie; other: those behind the largest sixteen.";
    LABEL_BUDGET: Gauge true "gpupool_label_budget_bytes" ["label"] "How much of a label the program lets lie near.";
    FAR_LOST: Counter true "gpupool_far_lost_seconds_total" [] "Time that kernels lost by reading far memory, estimated from some launches.";
    FAR_READ: Counter true "gpupool_far_read_bytes_total" []
        "Bytes that kernels have read over links from memory on other GPUs and the host, estimated from some launches.";
    MOVE_SAVED: Gauge true "gpupool_move_saved_seconds" [] "Time that kernels saved by what moved, measured on some launches; below 0 where they lost by it.";

    PINNED: Gauge true "gpupool_pinned_bytes" [] "Pinned host memory: of the pool, the driver and the program.";
    PINNED_REQUESTED: Gauge true "gpupool_pinned_requested_bytes" [] "What the program holds of pinned memory.";
    PINNED_REGISTERED: Gauge true "gpupool_pinned_registered_bytes" [] "The part of pinned memory that the program registered.";
    PINNED_LIMIT: Gauge true "gpupool_pinned_limit_bytes" [] "The most that the pool may pin; 0 while it has pinned nothing.";
    PINNED_PEAK: Gauge true "gpupool_peak_pinned_bytes" [] "The most that was pinned so far.";
    PINNED_REQUESTED_PEAK: Gauge true "gpupool_peak_pinned_requested_bytes" [] "The most pinned memory that the program held so far.";

    CONTEXTS: Gauge true "gpupool_contexts" ["gpu", "place"] "CUDA contexts; without a place those that the page has no room for.";
    CONTEXTS_UNUSED: Gauge true "gpupool_contexts_unused" ["gpu", "place"] "CUDA contexts in which nothing was launched, copied or allocated so far.";
    CONTEXTS_COST: Gauge true "gpupool_context_cost_bytes" ["gpu", "place"] "What the GPU lost with the contexts, as far as that is known.";
    FINDINGS: Counter true "gpupool_findings_total" [] "Findings so far.";
    FINDINGS_RECENT: Gauge true "gpupool_recent_findings" ["code"] "The last findings, 64 at most, by code (gpupool explain).";

    ALLOCATIONS: Counter true "gpupool_allocations_total" [] "Blocks that the pool served.";
    FREES: Counter true "gpupool_frees_total" [] "Blocks of the pool that ended.";
    REUSES: Counter true "gpupool_reuses_total" [] "Blocks that the pool served from freed memory.";
    ALLOCATED: Counter true "gpupool_allocated_bytes_total" [] "Bytes of blocks that the pool served.";
    PASSED_ON: Counter true "gpupool_passed_on_total" [] "Requests for device memory that the driver served.";
    SOFT_REFUSALS: Counter true "gpupool_soft_refusals_total" [] "OUT_OF_MEMORY said once to a program that caches.";
    REFUSALS: Counter true "gpupool_refusals_total" [] "Requests that no place had room for; the driver was asked.";
    FALLBACKS: Counter true "gpupool_fallbacks_total" [] "Blocks that could not be made although there was room; the driver was asked.";
    TRIMS: Counter true "gpupool_trims_total" [] "Times that freed memory went back to the driver because somebody needed or asked for it.";
    TRIMMED: Counter true "gpupool_trimmed_bytes_total" [] "Bytes that went back to the driver.";
    SPILLED: Counter true "gpupool_spilled_bytes_total" [] "Bytes of blocks and handles that lay outside their GPU when they were made.";
    EXPORTS: Counter true "gpupool_exports_total" [] "Blocks of which another process was given a handle.";
    IMPORTS: Counter true "gpupool_imports_total" [] "Blocks of other processes that were opened.";
    MOVES: Counter true "gpupool_moves_total" [] "Times that memory of the pool changed places while the program ran.";
    MOVED: Counter true "gpupool_moved_bytes_total" ["direction", "residence"]
        "Bytes that came near to the GPU that uses them, or left it (away), by where they were or are then: peers or host.";
    MOVING: Counter true "gpupool_moving_seconds_total" [] "Time for which moves held a thread of the program up, beyond the work in front of them.";
    AWAITING: Counter true "gpupool_move_awaiting_seconds_total" [] "Time for which moves waited for the work in front of them.";
    SUSPENSIONS: Counter true "gpupool_suspensions_total" [] "Times that the process was suspended.";
    RESUMES: Counter true "gpupool_resumes_total" [] "Times that the process was resumed after that.";
    IMAGES: Counter true "gpupool_images_total" [] "Images of the memory of the process that are whole (gpupool checkpoint).";
    IMAGE_STOPS: Counter true "gpupool_image_stop_seconds_total" [] "Time for which the process was stopped for its images.";
    STOPS: Counter true "gpupool_move_stops_total" ["reason"] "Times that moving stopped, or a move was not made.";
}

/// Processes that are exported at most. Whoever makes more pages than that wants to fill somebody's disk.
const MOST: usize = 1024;

/// Names of blocks that are exported of one process: each is as many series as there are residences, and a program may make names without
/// end. What is left of the page's is summed, and what the page has no room for is counted.
const MOST_NAMES: usize = 16;

/// A label that stands nowhere, as Prometheus has it.
const NONE: &str = "";

/// What tells the values of one name apart: the process, by its place among them, and the text of the labels beside its own.
type Key = (Option<usize>, String);

/// Values by name and labels.
pub struct Families<'a> {
    host: &'a str,
    processes: &'a [Labels],
    values: BTreeMap<&'static str, (&'static Family, BTreeMap<Key, f64>)>,
}

impl<'a> Families<'a> {
    /// What a look has found, whose rows have these labels.
    pub fn of(host: &'a str, look: &Look, processes: &'a [Labels]) -> Self {
        let mut families = Self { host, processes, values: BTreeMap::new() };
        families.set(&EXPORTER, None, &[gpupool_config::VERSION], 1.0);
        families.set(&OMITTED, None, &[], look.rows.len().saturating_sub(MOST) as f64);
        for skipped in &look.skipped {
            families.add(&SKIPPED, None, &[skipped.reason], 1.0);
        }
        for (number, row) in look.rows.iter().enumerate().take(processes.len().min(MOST)) {
            families.process(row, number);
        }
        families
    }

    fn process(&mut self, row: &Listed, number: usize) {
        let Listed { state, owner, told, .. } = row;
        let Snapshot { process, levels, .. } = told;
        let of = Some(number);
        let (pid, user) = (process.identity.pid.to_string(), owner.to_string());
        self.set(&PROCESS, of, &[&pid, &user, &levels.mode, &process.library], 1.0);
        self.set(&STOPPED, of, &[], f64::from(u8::from(state.is_halted())));
        self.set(&SUSPENDED, of, &[], f64::from(u8::from(levels.suspended > 0)));
        if levels.suspended > 0 {
            self.set(&SUSPENDED_SINCE, of, &[], seconds(levels.suspended));
        }
        self.set(&CREATED, of, &[], seconds(process.created));
        // A page begins before its first levels are known.
        if levels.updated > 0 {
            self.set(&UPDATED, of, &[], seconds(levels.updated));
        }
        for gpu in &levels.gpus.rows {
            if let Some(uuid) = gpu.uuid_text() {
                self.set(&GPU, None, &[&uuid, &gpu.name], 1.0);
                self.set(&GPU_MEMORY, None, &[&uuid], gpu.total as f64);
            }
        }
        for place in &levels.places.rows {
            let gpu = levels.gpu(place.number).filter(|_| place.is_gpu()).and_then(|gpu| gpu.uuid_text());
            let at = [gpu.as_deref().unwrap_or(NONE), &place.name()];
            for (family, bytes) in [
                (&PLACE_LIMIT, place.limit),
                (&PLACE_HELD, place.held),
                (&PLACE_USED, place.used),
                (&PLACE_PEAK, place.peak_used),
                (&PLACE_ANCHORED, place.anchored),
                (&PLACE_OWN, place.own),
            ] {
                self.set(family, of, &at, bytes as f64);
            }
            if place.is_gpu() {
                self.set(&PLACE_RESERVE, of, &at, place.reserve as f64);
            }
        }
        for loan in &levels.loans.rows {
            let uuid = |ordinal| levels.gpu(ordinal).and_then(|gpu| gpu.uuid_text()).unwrap_or_default();
            let lender = if loan.on_host { String::new() } else { uuid(loan.number) };
            self.add(&BORROWED, of, &[&uuid(loan.borrower), &lender, &loan.lender()], loan.bytes as f64);
        }
        let (residence, pinned) = (&levels.residence, &levels.pinned);
        for (family, value) in [
            (&LIVE_BLOCKS, levels.live_blocks),
            (&LIVE, levels.live_bytes),
            (&LIVE_PEAK, levels.peak_live_bytes),
            (&PINNED, pinned.pinned),
            (&PINNED_REQUESTED, pinned.requested),
            (&PINNED_REGISTERED, pinned.registered),
            (&PINNED_LIMIT, pinned.limit),
            (&PINNED_PEAK, pinned.peak_pinned),
            (&PINNED_REQUESTED_PEAK, pinned.peak_requested),
        ] {
            self.set(family, of, &[], value as f64);
        }
        for (at, bytes) in [("near", residence.near), ("peers", residence.on_peers), ("host", residence.on_host)] {
            self.set(&RESIDENT, of, &[at], bytes as f64);
        }
        self.set(&FAR_LOST, of, &[], seconds(residence.lost_microseconds));
        self.set(&MOVE_SAVED, of, &[], residence.saved_microseconds as f64 / 1e6);
        for counter in Counter::ALL {
            let (family, at, unit) = exported_as(counter);
            self.set(family, of, at, told.counter(counter) as f64 / unit);
        }
        self.contexts(told, number);
        self.findings(told, number);
        self.names(told, number);
    }

    /// Of blocks. The page has the largest first.
    fn names(&mut self, told: &Snapshot, number: usize) {
        let of = Some(number);
        self.set(&LABELS, of, &[], told.labels.rows.len() as f64 + f64::from(told.labels.more));
        for (nth, label) in told.labels.rows.iter().enumerate() {
            let name = if nth < MOST_NAMES { &label.name } else { "other" };
            for (at, bytes) in [("near", label.near), ("peers", label.on_peers), ("host", label.on_host)] {
                self.add(&LABEL, of, &[name, at], bytes as f64);
            }
            if let Some(budget) = label.budget.filter(|_| nth < MOST_NAMES) {
                self.set(&LABEL_BUDGET, of, &[name], budget as f64);
            }
        }
    }

    fn contexts(&mut self, told: &Snapshot, number: usize) {
        let of = Some(number);
        for context in &told.contexts.rows {
            let gpu = told.levels.gpu(context.device).and_then(|gpu| gpu.uuid_text());
            let place = format!("gpu{}", context.device);
            let at = [gpu.as_deref().unwrap_or(NONE), &place];
            self.add(&CONTEXTS, of, &at, 1.0);
            self.add(&CONTEXTS_UNUSED, of, &at, f64::from(u8::from(context.is_unused())));
            self.add(&CONTEXTS_COST, of, &at, context.cost.unwrap_or(0) as f64);
        }
        if told.contexts.more > 0 {
            self.set(&CONTEXTS, of, &[NONE, NONE], f64::from(told.contexts.more));
        }
    }

    fn findings(&mut self, told: &Snapshot, number: usize) {
        let of = Some(number);
        self.set(&FINDINGS, of, &[], told.findings.rows.len() as f64 + f64::from(told.findings.more));
        for found in &told.findings.rows {
            // There are as many series as there are codes, whatever a page says.
            let code = finding(&found.code).map_or("other", |finding| finding.code);
            self.add(&FINDINGS_RECENT, of, &[code], 1.0);
        }
    }

    fn set(&mut self, family: &'static Family, of: Option<usize>, labels: &[&str], value: f64) {
        *self.at(family, of, labels) = value;
    }

    fn add(&mut self, family: &'static Family, of: Option<usize>, labels: &[&str], value: f64) {
        *self.at(family, of, labels) += value;
    }

    fn at(&mut self, family: &'static Family, of: Option<usize>, labels: &[&str]) -> &mut f64 {
        debug_assert_eq!((family.of_process, family.labels.len()), (of.is_some(), labels.len()), "{}", family.name);
        let mut text = String::new();
        for (name, value) in family.labels.iter().zip(labels) {
            label(&mut text, name, value);
        }
        self.values.entry(family.name).or_insert((family, BTreeMap::new())).1.entry((of, text)).or_default()
    }

    /// As Prometheus reads it.
    pub fn text(&self) -> String {
        let mut host = String::new();
        label(&mut host, "host", self.host);
        let of_process = self.processes.iter().map(|labels| {
            let mut text = host.clone();
            let Labels { process, rank, slot } = labels;
            for (name, value) in OF_PROCESS.iter().zip([process, rank, &slot.to_string()]) {
                label(&mut text, name, value);
            }
            text
        });
        let of_process: Vec<String> = of_process.collect();
        let mut text = String::new();
        for (name, (family, values)) in &self.values {
            let kind = if family.kind == Kind::Counter { "counter" } else { "gauge" };
            let _ = write!(text, "# HELP {name} {}\n# TYPE {name} {kind}\n", family.help);
            for ((of, labels), value) in values {
                let of = of.and_then(|number| of_process.get(number)).unwrap_or(&host);
                // A whole number is written as one, without an exponent.
                let _ = writeln!(text, "{name}{{{of}{labels}}} {value}");
            }
        }
        text
    }
}

/// Adds a label; one that is empty stands nowhere, as Prometheus has it. Texts are the program's, and go to terminals, too: what these
/// obey is made visible, the end of a line as well.
fn label(text: &mut String, name: &str, value: &str) {
    if value.is_empty() {
        return;
    }
    // The host is first.
    let comma = if name == "host" { "" } else { "," };
    let value = clean(value).replace('\\', "\\\\").replace('"', "\\\"");
    let _ = write!(text, "{comma}{name}=\"{value}\"");
}

fn seconds(microseconds: u64) -> f64 {
    microseconds as f64 / 1e6
}

/// The name of a counter, its labels, and what it is divided by.
fn exported_as(counter: Counter) -> (&'static Family, &'static [&'static str], f64) {
    const MICROSECONDS: f64 = 1e6;
    let plain = |family| (family, &[][..], 1.0);
    match counter {
        Counter::Allocations => plain(&ALLOCATIONS),
        Counter::Frees => plain(&FREES),
        Counter::Reuses => plain(&REUSES),
        Counter::AllocatedBytes => plain(&ALLOCATED),
        Counter::PassedOn => plain(&PASSED_ON),
        Counter::SoftRefusals => plain(&SOFT_REFUSALS),
        Counter::Refusals => plain(&REFUSALS),
        Counter::Fallbacks => plain(&FALLBACKS),
        Counter::Trims => plain(&TRIMS),
        Counter::TrimmedBytes => plain(&TRIMMED),
        Counter::SpilledBytes => plain(&SPILLED),
        Counter::Exports => plain(&EXPORTS),
        Counter::Imports => plain(&IMPORTS),
        Counter::Moves => plain(&MOVES),
        Counter::CameFromPeersBytes => (&MOVED, &["near", "peers"], 1.0),
        Counter::CameFromHostBytes => (&MOVED, &["near", "host"], 1.0),
        Counter::LeftForPeersBytes => (&MOVED, &["away", "peers"], 1.0),
        Counter::LeftForHostBytes => (&MOVED, &["away", "host"], 1.0),
        Counter::MovingMicroseconds => (&MOVING, &[], MICROSECONDS),
        Counter::AwaitingMicroseconds => (&AWAITING, &[], MICROSECONDS),
        Counter::StopsSlower => (&STOPS, &["slower"], 1.0),
        Counter::StopsUnpaid => (&STOPS, &["unpaid"], 1.0),
        Counter::StopsNotQuiet => (&STOPS, &["not_quiet"], 1.0),
        Counter::StopsNoRoom => (&STOPS, &["no_room"], 1.0),
        Counter::StopsGraphs => (&STOPS, &["graphs"], 1.0),
        Counter::StopsOff => (&STOPS, &["off"], 1.0),
        Counter::FarReadBytes => plain(&FAR_READ),
        Counter::Suspensions => plain(&SUSPENSIONS),
        Counter::Resumes => plain(&RESUMES),
        Counter::Images => plain(&IMAGES),
        Counter::ImageStopMicroseconds => (&IMAGE_STOPS, &[], MICROSECONDS),
    }
}
