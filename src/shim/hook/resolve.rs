//! Bodies: how functions are found through the driver itself.

use super::{Real, trampoline::SLOTS};
use crate::watch::{site, submitted};
use gpupool_cuda::CuResult;
use parking_lot::Mutex;
use std::ffi::{CStr, c_char, c_void};

/// `cuGetProcAddress`, both forms: the driver's status, version rules and errors are its own; only the pointer changes.
///
/// # Safety
/// `symbol` and `pfn` are the program's arguments of that call.
pub unsafe fn proc_address(real: &mut Real, symbol: *const c_char, pfn: *mut *mut c_void) -> CuResult {
    let result = real.call();
    if result.is_ok() && !pfn.is_null() && !symbol.is_null() {
        // SAFETY: the driver answered success, so it has read the name.
        let name = unsafe { CStr::from_ptr(symbol) };
        // SAFETY: the driver answered success, so it has written through `pfn`.
        unsafe { *pfn = SLOTS.given(*pfn, name.to_bytes()) };
    }
    result
}

/// `cuGetExportTable`: the tables are the driver's private interface, with a check of their own against changes, so what is
/// called through them is not seen. The log says which were asked for, once each: a context that "appeared" came that way.
///
/// # Safety
/// `id` is the program's argument of that call.
pub unsafe fn export_table(real: &mut Real, id: *const [u8; 16]) -> CuResult {
    let result = real.call();
    if !result.is_ok() {
        return result;
    }
    // SAFETY: the driver read the identifier, or it would not have answered success.
    if let Some(id) = unsafe { id.as_ref() } {
        submitted::table_taken(id, || guid(id));
        if tracing::enabled!(target: "gpupool::call", tracing::Level::DEBUG) {
            report_table(id);
        }
    }
    result
}

fn report_table(id: &[u8; 16]) {
    static SEEN: Mutex<Vec<([u8; 16], String)>> = Mutex::new(Vec::new());
    let site = site::here();
    let caller = site::caller(&site).unwrap_or("unknown").to_owned();
    let seen = (*id, caller);
    {
        let mut all = SEEN.lock();
        if all.contains(&seen) {
            return;
        }
        all.push(seen.clone());
    }
    let (table, caller) = (guid(id), seen.1);
    tracing::debug!(
        target: "gpupool::call", about = "export_table", table, caller,
        "{caller} asked for the driver's private table {table}; what it calls there is not seen"
    );
}

/// A `CUuuid` as tools print it: the first three groups are little-endian numbers.
fn guid(id: &[u8; 16]) -> String {
    let order = [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15];
    let hex: Vec<String> = order.iter().map(|&at| format!("{:02X}", id[at])).collect();
    format!(
        "{}-{}-{}-{}-{}",
        hex[..4].concat(),
        hex[4..6].concat(),
        hex[6..8].concat(),
        hex[8..10].concat(),
        hex[10..].concat()
    )
}
