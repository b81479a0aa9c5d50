//! Which interpreters the shim can read.

/// The minor versions of CPython 3 whose frames the shim reads. No setting, but here for the same reason as the settings:
/// the shim obeys it and the command line shows it.
pub const PYTHON_MINORS: [u8; 5] = [10, 11, 12, 13, 14];
