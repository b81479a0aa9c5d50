//! Findings: what is wrong, where, and how to mend it. Codes, titles and remedies are in one registry
//! (`gpupool_events::findings`), which `gpupool explain` and the report read too.

use crate::bell;
use crate::log::{self, verdict};
use crate::watch::site;
use gpupool_cuda::Device;
use gpupool_events::{Finding, FindingMade, Site};
use parking_lot::Mutex;
use std::collections::VecDeque;

/// Findings that are kept for the page.
const KEPT: usize = 64;

/// A finding that was made.
#[derive(Clone, Debug)]
pub struct Recent {
    /// Microseconds since the epoch.
    pub at: u64,
    pub code: &'static str,
    pub device: Option<u32>,
    pub what: String,
}

/// The last ones, and how many were made before them.
static RECENT: Mutex<(VecDeque<Recent>, u32)> = Mutex::new((VecDeque::new(), 0));

/// The last findings, oldest first, and how many were made before them.
pub fn recent() -> (Vec<Recent>, u32) {
    let recent = RECENT.lock();
    (recent.0.iter().cloned().collect(), recent.1)
}

fn keep(code: &'static str, device: Option<u32>, what: &str) {
    let at = gpupool_metrics::now();
    // In the child of a fork a thread may hold it that is no more there; the child has no page.
    let Some(mut recent) = RECENT.try_lock() else { return };
    if recent.0.len() == KEPT {
        recent.0.pop_front();
        recent.1 += 1;
    }
    recent.0.push_back(Recent { at, code, device, what: what.to_owned() });
}

/// Says a finding: one record in the log, and on stderr what, where and how to fix it. What becomes of these is up to the
/// log's filters; `gpupool run --fail-on` hears of it whatever they are.
pub fn make(finding: &Finding, device: Option<Device>, site: &Site, facts: &[(&str, String)], what: &str) {
    make_at(finding, device, Some(site), facts, what);
}

/// The same of what no call of the program brought about, so that it is nowhere in it.
pub fn make_by_itself(finding: &Finding, device: Option<Device>, facts: &[(&str, String)], what: &str) {
    make_at(finding, device, None, facts, what);
}

fn make_at(finding: &Finding, device: Option<Device>, site: Option<&Site>, facts: &[(&str, String)], what: &str) {
    let code = finding.code;
    let fix = finding.fix_for(facts.iter().find(|(name, _)| *name == "cause").map(|(_, cause)| cause.as_str()));
    // A program may have asked for a GPU that there is none of.
    let device = device.and_then(|device| u32::try_from(device.raw()).ok());
    keep(code, device, what);
    bell::changed();
    let made = FindingMade {
        code: code.to_owned(),
        device,
        what: what.to_owned(),
        site: site.cloned(),
        facts: facts.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
    };
    verdict::found(made.clone());
    log::emit(|| {
        let line = site.map_or_else(String::new, |site| format!("\n  where: {}", site::line(site)));
        (made, format!("{code}: {what}{line}\n  fix: {fix}\n  more: gpupool explain {code}"))
    });
}
