//! Who holds pooled memory.

use serde_json::{Value, json};

use crate::report::model::Holders;

/// Holders that are told, those with the highest peak.
const TOLD: usize = 200;

/// Who held how much; null where the log has no line for each block.
pub fn object(holders: &Holders) -> Value {
    if !holders.is_known() {
        return Value::Null;
    }
    let all = holders.all();
    let told = all.iter().take(TOLD).map(|holder| {
        let [at_peak, far_at_peak] = holders.at_peak(holder);
        let [at_end, far_at_end] = holders.now(holder);
        json!({
            "site": holders.site(holder), "label": holder.label, "blocks": holder.blocks, "peak": holder.line.peak(),
            "at_peak": at_peak, "far_at_peak": far_at_peak, "at_end": at_end, "far_at_end": far_at_end,
        })
    });
    let (_, peak, peak_at) = holders.total();
    json!({
        "peak": peak, "peak_at": peak_at, "holders": told.collect::<Vec<_>>(),
        "more_holders": all.len().saturating_sub(TOLD), "blocks_left_out": holders.left_out,
    })
}
