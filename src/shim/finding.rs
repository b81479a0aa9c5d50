//! Findings: what is wrong, where, and how to mend it. Codes, titles and remedies are in one registry
//! (`gpupool_events::findings`), which `gpupool explain` and the report read too.

use crate::site;
use cudarc::driver::sys::CUdevice;
use gpupool_events::{Finding, Site};

/// Says a finding: one record in the log, and on stderr what, where and how to fix it.
pub fn make(finding: &Finding, device: Option<CUdevice>, site: &Site, facts: &[(&str, String)], what: &str) {
    let Finding { code, fix, .. } = finding;
    let facts: serde_json::Map<String, serde_json::Value> =
        facts.iter().map(|(name, value)| ((*name).to_owned(), value.clone().into())).collect();
    tracing::warn!(
        target: "gpupool::finding", event = "finding", code, device, what, site.json = %site::json(site),
        facts.json = %serde_json::Value::from(facts),
        "{code}: {what}\n  where: {}\n  fix: {fix}\n  more: gpupool explain {code}", site::line(site)
    );
}
