//! Rows that change nothing: the call is the driver's, and the log at level trace has it.

use super::{Row, boundary};
use crate::driver::CuResult;

/// After the call.
#[inline]
pub fn through(row: Row, result: CuResult) {
    boundary::trace(row, result);
}
