//! What was where when a program was told OUT_OF_MEMORY (`gpupool report --oom`).

use gpupool_config::format_size;
use gpupool_events::{HolderAtRefusal, OutOfMemory, PlaceAtRefusal, Remedy};

use super::rows::{BELOW, CONTEXT_ROWS, ROWS, show};
use crate::report::model::{BySetting, Logs, Process, Refusal, SettingThatRefuses, labels};
use crate::terminal::{Page, Table, clean, width, wrap};
use crate::words;

/// Processes that are told of in full: the ranks of a job run out of memory alike.
const FULL: usize = 4;

/// The page: of each process the last refusal in full, and the ones before in a line each.
pub fn page(logs: &Logs, colours: bool) -> String {
    let labels = labels(logs);
    let mut page = Page::new(colours);
    let refused: Vec<(&Process, &String)> =
        logs.processes.iter().zip(&labels).filter(|(process, _)| process.refusals.times > 0).collect();
    for (process, label) in refused.iter().take(FULL) {
        section(&mut page, process, label);
    }
    others(&mut page, refused.get(FULL..).unwrap_or_default());
    let is_told = by_settings(&mut page, logs, &labels);
    if refused.is_empty() && !is_told && !logs.processes.is_empty() {
        page.heading("Out of memory");
        page.entry(
            "  ",
            "no process of these logs was told OUT_OF_MEMORY, or none that wrote it down: logs of level info or more have it, of this \
             version of gpupool or a newer one",
        );
    }
    super::problems::missing(&mut page, logs, &labels);
    page.into_text()
}

/// Requests that a setting had refused, while there was room: whether there are any.
fn by_settings(page: &mut Page, logs: &Logs, labels: &[String]) -> bool {
    let all = logs.processes.iter().zip(labels);
    let all = all.flat_map(|(process, label)| process.refusals.by_setting.iter().map(move |it| (process, label, it)));
    let all: Vec<_> = all.collect();
    if all.is_empty() {
        return false;
    }
    page.heading("Out of memory because of a setting");
    for (process, label, (setting, BySetting { times, last, bytes, home })) in all.iter().take(ROWS) {
        let (times, name) = (words::count(*times, "refusal", "refusals"), setting.name());
        let at = words::time(last - process.origin());
        let why = match setting {
            SettingThatRefuses::SoftOom => format!(
                "once before GPU {home} overflows, so that a program that caches returns its cache and asks again; one that does not ask \
                 again needs {name}=off"
            ),
            SettingThatRefuses::FarLimit => format!(
                "as more of the time than that is lost by reading what lies far from GPU {home} already; a higher one, or off, lets more lie far"
            ),
        };
        let what = format!("{times} by {name}, the last at {at} for {} on GPU {home}", format_size(*bytes));
        page.entry(&format!("  {label} "), &format!("{what}: {why}"));
    }
    if all.len() > ROWS {
        page.line(&format!("  {} more; --json has them", all.len() - ROWS));
    }
    true
}

/// A line for each of the other processes.
fn others(page: &mut Page, refused: &[(&Process, &String)]) {
    if refused.is_empty() {
        return;
    }
    page.heading("Out of memory in other processes; the log of one alone has all of it");
    let mut table = Table::new(&["process", "at", "GPU", "asked for", "room", "would have helped"], b"lrrrrl", BELOW);
    for (process, label) in refused.iter().take(CONTEXT_ROWS) {
        let Some(Refusal { t, told }) = process.refusals.all().next_back() else { continue };
        let helps = told.remedies.iter().find(|remedy| remedy.enough);
        let helps = helps.map_or_else(|| "no setting alone".to_owned(), Remedy::said);
        let at = words::time(t - process.origin());
        let cells =
            [(*label).clone(), at, told.home.to_string(), format_size(told.bytes), format_size(told.fits), helps];
        table.row(cells.into(), Vec::new());
    }
    show(page, table, refused.len().saturating_sub(CONTEXT_ROWS));
}

/// A line for each process that was refused memory, in the report as a whole.
pub fn told(page: &mut Page, logs: &Logs, labels: &[String]) {
    let refused = logs.processes.iter().zip(labels).filter_map(|(process, label)| {
        let last = process.refusals.all().next_back()?;
        Some((process, label, &last.told))
    });
    let refused: Vec<(&Process, &String, &OutOfMemory)> = refused.collect();
    if refused.is_empty() {
        return;
    }
    page.heading("Out of memory");
    for (process, label, last) in refused.iter().take(ROWS) {
        let times = words::count(process.refusals.times, "refusal", "refusals");
        let what = format!("{times} at least, the last told for {} on GPU {}", format_size(last.bytes), last.home);
        page.entry(
            &format!("  {label} "),
            &format!("{what}; gpupool report --oom has who held what, and what would have helped"),
        );
    }
    if refused.len() > ROWS {
        page.line(&format!("  {} more; --json has them", refused.len() - ROWS));
    }
}

fn section(page: &mut Page, process: &Process, label: &str) {
    let mut refusals = process.refusals.all().rev();
    let Some(last) = refusals.next() else { return };
    let OutOfMemory { home, bytes, fits, why, site, kind, .. } = &last.told;
    page.heading(&format!("Out of memory in {label}, {}", when(process, last)));
    let what = match kind.as_str() {
        "handle" => " (cuMemCreate)",
        "stream" => " (stream-ordered)",
        "context" => " (a context)",
        _ => "",
    };
    page.entry("  asked for  ", &format!("{}{what} on GPU {home}", format_size(*bytes)));
    for (depth, line) in words::places(site.as_ref(), width() - 13).iter().enumerate() {
        page.line(&format!("{}{line}", if depth == 0 { "  by         " } else { "             " }));
    }
    page.entry("  refused    ", &format!("because {why}"));
    let fits = if fits >= bytes {
        format!("there were {} of room, in pieces that did not come together", format_size(*fits))
    } else {
        format!("{} would have fit, {} were missing", format_size(*fits), format_size(bytes - fits))
    };
    page.entry("  room       ", &fits);
    helps(page, &last.told);
    places(page, &last.told);
    holders(page, &last.told);
    before(page, process, refusals);
}

fn when(process: &Process, refusal: &Refusal) -> String {
    let time = words::time(refusal.t - process.origin());
    match refusal.told.number {
        1 => format!("at {time}"),
        number => format!("at {time}, refusal {number}"),
    }
}

fn helps(page: &mut Page, told: &OutOfMemory) {
    page.heading("What would have helped");
    if told.remedies.is_empty() {
        let too_large = |place: &PlaceAtRefusal| place.out.as_deref() == Some("too large") && place.room > 0;
        let smaller = told.largest_whole.filter(|_| told.places.iter().any(too_large)).map_or_else(
            || "every byte that there was is in use. A smaller batch, fewer other programs or more GPUs would".to_owned(),
            |most| {
                format!(
                    "the GPUs had no more, and the host takes handles of {} at most. Smaller ones, a smaller batch, fewer other programs or \
                     more GPUs would",
                    format_size(most)
                )
            },
        );
        page.entry("  ", &format!("no setting of gpupool: {smaller}"));
        return;
    }
    for remedy in told.remedies.iter().take(ROWS) {
        let gain = format_size(remedy.gain);
        let enough = if remedy.enough { "enough" } else { "not enough alone" };
        page.entry(&format!("  {}  ", clean(&remedy.said())), &format!("{gain} more, {enough}"));
        page.entry("      ", &remedy.note);
    }
    if !told.remedies.iter().any(|remedy| remedy.enough) {
        // The host has a handle whole or not at all, and so it adds nothing to GPUs.
        let is_handle = told.kind == "handle";
        let adds = |remedy: &&Remedy| !(is_handle && remedy.setting == "GPUPOOL_HOST_LIMIT");
        let all = told.remedies.iter().filter(adds).fold(0, |all: u64, remedy| all.saturating_add(remedy.gain));
        let on_gpus = told.places.iter().filter(|place| place.out.is_none() && place.total.is_some());
        let on_gpus = on_gpus.fold(0, |all: u64, place| all.saturating_add(place.room));
        let fits = if is_handle { on_gpus } else { told.fits };
        let verdict = if fits.saturating_add(all) >= told.bytes { "enough" } else { "still not enough" };
        page.entry("  together  ", &format!("{} more, {verdict}", format_size(all)));
    }
}

fn places(page: &mut Page, told: &OutOfMemory) {
    let places = &told.places;
    page.heading("What would have fit where");
    let headings = &["place", "room", "limit", "in use", "own", "others", "free"];
    let mut table = Table::new(headings, b"lrrrrrr", BELOW);
    for place in places.iter().take(2 * ROWS) {
        let known = |bytes: Option<u64>| bytes.map_or_else(|| "?".to_owned(), format_size);
        // A host without any says nothing of it.
        let own = |bytes: u64| if place.total.is_some() || bytes > 0 { format_size(bytes) } else { String::new() };
        let room = if place.out.is_some() { "-".to_owned() } else { format_size(place.room) };
        let cells = vec![
            place.place.clone(),
            room,
            format_size(place.limit),
            format_size(place.used),
            own(place.own.saturating_add(place.contexts)),
            if place.total.is_some() { known(place.others) } else { String::new() },
            known(place.free),
        ];
        let mut below: Vec<String> = place
            .out
            .as_deref()
            .map_or_else(Vec::new, |why| wrap(&clean(&out(why, told.largest_whole)), width() - BELOW));
        let kept = place.held.saturating_sub(place.used);
        if kept > 0 {
            below.push(format!("and {} of freed memory that the pool still held", format_size(kept)));
        }
        if place.for_context > place.reserve {
            below.push(format!(
                "{} of what is free stay so for a context of another program",
                format_size(place.for_context)
            ));
        }
        table.row(cells, below);
    }
    show(page, table, places.len().saturating_sub(2 * ROWS));
    page.entry(
        "  ",
        "in use: blocks of the pool; own: contexts, and what the program made with cuMemCreate; others: other programs, and what the driver \
         made for this one; free: as the system says, of which GPUPOOL_RESERVE stays free",
    );
}

/// Why nothing of a place was asked for.
fn out(word: &str, largest_whole: Option<u64>) -> String {
    match word {
        "not listed" => "does not lend: GPUPOOL_DEVICES leaves it out, or it cannot".to_owned(),
        "another rank's" => "does not lend: the process is, or was taken for, one rank of several, which keep to their own GPUs; GPUPOOL_DEVICES=list overrides that".to_owned(),
        "out of reach" => "does not lend: the GPU has no peer access to it".to_owned(),
        "not lent" => "does not lend: its limit is 0".to_owned(),
        "drained" => "holds nothing new: the GPU is drained (gpupool drain) until gpupool undrain takes that back".to_owned(),
        "too large" => {
            let most = largest_whole.map_or_else(String::new, |most| format!(", here {}", format_size(most)));
            format!("takes no handle of more than half its GPU's memory or limit{most}: such a one lies in parts, and on GPUs alone")
        }
        // Of older logs, which said it of any handle.
        "no handles" => "was not reckoned with for a handle".to_owned(),
        other => format!("does not lend: {other}"),
    }
}

fn holders(page: &mut Page, told: &OutOfMemory) {
    page.heading("Who held memory");
    let mut table = Table::new(&["bytes", "blocks", "far", "what"], b"rrrl", BELOW);
    for holder in &told.holders {
        let HolderAtRefusal { memory, site, label, blocks, bytes, on_peers, on_host, guessed } = holder;
        let name = match (label, memory.as_str()) {
            (Some(label), _) => label.clone(),
            (None, "device") => String::new(),
            (None, memory) => memory.to_owned(),
        };
        let far = if memory == "device" { format_size(on_peers.saturating_add(*on_host)) } else { String::new() };
        let mut below = words::places(site.as_ref(), width() - BELOW);
        if below.is_empty() {
            below.push("a place that was not looked at".to_owned());
        }
        if *guessed > 0 {
            below
                .push(format!("{} of it by size: blocks of that size were last asked for here", format_size(*guessed)));
        }
        table.row(vec![format_size(*bytes), blocks.to_string(), far, name], below);
    }
    page.table(&table);
    if told.more_holders > 0 {
        let others = words::count(told.more_holders, "other place", "other places");
        page.line(&format!("  {} in {others}", format_size(told.more_bytes)));
    }
    if told.small > 0 {
        page.line(&format!("  {} in blocks of less than 1 MiB", format_size(told.small)));
    }
    let own = told.places.iter().fold(0, |all: u64, place| all.saturating_add(place.own));
    let own = if own > 0 { format!(", {} in handles (cuMemCreate)", format_size(own)) } else { String::new() };
    let all = format!("{} in blocks of the pool{own}", format_size(told.live_bytes));
    let pinned =
        if told.pinned > 0 { format!(", {} of host memory pinned", format_size(told.pinned)) } else { String::new() };
    page.line(&format!("  {all}{pinned}"));
}

fn before<'a>(page: &mut Page, process: &Process, refusals: impl Iterator<Item = &'a Refusal>) {
    let refusals: Vec<&Refusal> = refusals.collect();
    if refusals.is_empty() {
        return;
    }
    page.heading(&format!("Before that; there were at least {} refusals", process.refusals.times));
    let mut table = Table::new(&["refusal", "at", "GPU", "asked for", "room", "by"], b"rrrrrl", BELOW);
    for Refusal { t, told } in refusals.iter().copied() {
        let by = told.site.as_ref().map_or_else(String::new, |site| words::place(site, width() / 2));
        let at = words::time(t - process.origin());
        let cells =
            [told.number.to_string(), at, told.home.to_string(), format_size(told.bytes), format_size(told.fits), by];
        table.row(cells.into(), Vec::new());
    }
    page.table(&table);
}
