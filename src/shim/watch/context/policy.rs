//! Where contexts may be made (`GPUPOOL_CONTEXTS=deny`).

use crate::watch::{finding, site};
use crate::{log, process};
use gpupool_config::Contexts;
use gpupool_cuda::{CuResult, Device};
use gpupool_events::{ContextDenied, Finding};

/// What the driver answers where a GPU takes no further context (compute mode "exclusive process").
const DEVICE_UNAVAILABLE: CuResult = CuResult(46);

/// Whether a context may be made on this device. Who asked for one that may not is said, and the answer is his.
pub fn allow(device: Device, call: &'static str) -> Result<(), CuResult> {
    let settings = process::settings();
    if settings.contexts != Contexts::Deny {
        return Ok(());
    }
    let allowed = settings.context_devices.as_deref().unwrap_or_default();
    if allowed.contains(&device.ordinal()) {
        return Ok(());
    }
    let site = site::here();
    log::emit(|| {
        let event = ContextDenied { device: device.ordinal(), call: call.to_owned(), site: Some(site.clone()) };
        (event, format!("context on GPU {device} denied ({call}) to {}", site::line(&site)))
    });
    let list = allowed.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    finding::make(
        &Finding::CONTEXT_DENIED,
        Some(device),
        &site,
        &[("call", call.to_owned()), ("allowed", list.clone())],
        &format!("{call} for GPU {device} was refused: GPUPOOL_CONTEXTS=deny allows contexts on GPU {list} only"),
    );
    Err(DEVICE_UNAVAILABLE)
}
