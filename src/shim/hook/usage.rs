//! Bodies: launches and copies, counted for the context that is current. Nothing else happens here; a launch takes two
//! microseconds, and these must not show in it.

use super::{Row, boundary};
use crate::context::{self, Usage};
use crate::driver::CuResult;
use crate::process;

/// After a launch.
#[inline]
pub fn launched(row: Row, result: CuResult) {
    count(row, result, Usage::launched);
}

/// After a copy or a fill.
#[inline]
pub fn copied(row: Row, result: CuResult) {
    count(row, result, Usage::copied);
}

#[inline]
fn count(row: Row, result: CuResult, as_what: impl Fn(&Usage)) {
    if process::counts()
        && let Some(context) = context::driver().and_then(context::current)
    {
        as_what(&context.usage);
    }
    boundary::trace(row, result);
}
