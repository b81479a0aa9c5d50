//! Findings: what is wrong, where, and how to mend it. Codes, titles and remedies are in one registry
//! (`gpupool_events::findings`), which `gpupool explain` and the report read too.

use crate::log::verdict;
use crate::site;
use cudarc::driver::sys::CUdevice;
use gpupool_events::{Finding, FindingMade, Site};

/// Says a finding: one record in the log, and on stderr what, where and how to fix it. What becomes of these is up to the
/// log's filters; `gpupool run --fail-on` hears of it whatever they are.
pub fn make(finding: &Finding, device: Option<CUdevice>, site: &Site, facts: &[(&str, String)], what: &str) {
    let Finding { code, fix, .. } = finding;
    verdict::found(FindingMade {
        code: (*code).to_owned(),
        device: device.and_then(|device| u32::try_from(device).ok()),
        what: what.to_owned(),
        site: Some(site.clone()),
        facts: facts.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
    });
    let facts: serde_json::Map<String, serde_json::Value> =
        facts.iter().map(|(name, value)| ((*name).to_owned(), value.clone().into())).collect();
    tracing::warn!(
        target: "gpupool::finding", event = "finding", code, device, what, site.json = %site::json(site),
        facts.json = %serde_json::Value::from(facts),
        "{code}: {what}\n  where: {}\n  fix: {fix}\n  more: gpupool explain {code}", site::line(site)
    );
}
