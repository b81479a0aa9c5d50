//! Injected faults: "the third `cuMemMap` fails with 999", once.

use crate::boundary::FAULTS_ARMED;
use crate::error::Code;
use crate::registry;
use parking_lot::Mutex;
use std::sync::atomic::Ordering;

#[derive(Debug)]
struct Fault {
    /// Export or base name; `None` is any call.
    function: Option<String>,
    /// Matching calls still to let through.
    left: u64,
    code: Code,
}

static FAULTS: Mutex<Vec<Fault>> = Mutex::new(Vec::new());

/// Replaces the list by `spec`, `FUNCTION:NTH=CODE` comma separated, and starts counting at the next call. On a bad
/// spec the list stays and the message says what is allowed.
pub fn arm(spec: &str) -> Result<(), String> {
    let faults = spec
        .split(',')
        .map(str::trim)
        .filter(|item| !item.is_empty())
        .map(|item| {
            parse(item).ok_or_else(|| format!("{item}: expected FUNCTION:NTH=CODE, as in cuMemMap:3=999 or *:17=2"))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let mut list = FAULTS.lock();
    FAULTS_ARMED.store(!faults.is_empty(), Ordering::Relaxed);
    *list = faults;
    Ok(())
}

/// How many are left to strike.
pub fn left() -> u64 {
    FAULTS.lock().len() as u64
}

/// Counts a call of `export`; answers the code it has to fail with, if its turn has come.
pub fn strike(export: &str) -> Option<Code> {
    let mut list = FAULTS.lock();
    let mut struck = None;
    list.retain_mut(|fault| {
        if !fault.function.as_deref().is_none_or(|name| name == export || name == registry::base_name(export)) {
            return true;
        }
        fault.left -= 1;
        if fault.left == 0 {
            struck = struck.or(Some(fault.code));
        }
        fault.left > 0
    });
    struck
}

fn parse(item: &str) -> Option<Fault> {
    let (call, code) = item.split_once('=')?;
    let (function, nth) = call.split_once(':')?;
    let known = function == "*" || registry::API.iter().any(|row| row.is_called(function));
    let left = nth.parse().ok().filter(|&nth| nth > 0)?;
    known.then_some(())?;
    Some(Fault { function: (function != "*").then(|| function.to_owned()), left, code: Code(code.parse().ok()?) })
}
