//! Device limits: the malloc heap, stack and printf buffer that kernels have. The heap must be set before the first module
//! that uses it is loaded, which a program that learns too late cannot do; the environment can.

use super::within_own;
use crate::log;
use crate::process;
use crate::watch::site;
use gpupool_config::format_size;
use gpupool_cuda::{self as cuda, CuResult, Device, Driver};
use gpupool_events::LimitSet;

/// `CUlimit` values that have a name in the log.
pub const STACK_SIZE: i32 = 0;
pub const PRINTF_FIFO_SIZE: i32 = 1;
pub const MALLOC_HEAP_SIZE: i32 = 2;

/// The heap that a context starts with: 8 MiB on every GPU so far.
pub const DEFAULT_HEAP: u64 = 8 << 20;

/// A limit's name in the log; its number where it has none here.
pub fn name(limit: i32) -> String {
    match limit {
        STACK_SIZE => "stack_size".to_owned(),
        PRINTF_FIFO_SIZE => "printf_fifo_size".to_owned(),
        MALLOC_HEAP_SIZE => "malloc_heap_size".to_owned(),
        other => format!("limit_{other}"),
    }
}

/// Sets the limits that the environment asks for in a context that was just made.
pub fn apply(driver: &Driver, context: cuda::Context, device: Device) {
    let settings = process::settings();
    let wanted = [
        (STACK_SIZE, settings.stack_size, "GPUPOOL_STACK_SIZE"),
        (PRINTF_FIFO_SIZE, settings.printf_fifo_size, "GPUPOOL_PRINTF_FIFO_SIZE"),
        (MALLOC_HEAP_SIZE, settings.malloc_heap_size, "GPUPOOL_MALLOC_HEAP_SIZE"),
    ];
    for (limit, bytes, variable) in wanted {
        let Some(bytes) = bytes else { continue };
        let set = || driver.set_limit(limit, bytes);
        let Some(result) = within_own(driver, context, set) else { continue };
        let limit = name(limit);
        log::emit(|| {
            let size = format_size(bytes);
            let text = format!("{limit} of the new context on GPU {device} set to {size}: {result}");
            let (device, by) = (device.ordinal(), "gpupool".to_owned());
            (LimitSet { device, limit, value: bytes, result: result.0, by, site: None }, text)
        });
        if !result.is_ok() {
            crate::log::warn_once(
                variable,
                format_args!("{variable}={}: the driver answered {result} on GPU {device}", format_size(bytes)),
            );
        }
    }
}

/// The program set a limit itself; the driver has answered.
pub fn report(device: Device, limit: i32, value: u64, result: CuResult) {
    let (limit, site) = (name(limit), site::here());
    log::emit(|| {
        let text = format!("{limit} set to {} by {}: {result}", format_size(value), site::line(&site));
        let (device, by) = (device.ordinal(), "program".to_owned());
        (LimitSet { device, limit, value, result: result.0, by, site: Some(site) }, text)
    });
}

/// The heap limit of the current context, if it is still what the driver starts with.
pub fn heap_is_default(driver: &Driver) -> bool {
    driver.limit(MALLOC_HEAP_SIZE) == Ok(DEFAULT_HEAP)
}
