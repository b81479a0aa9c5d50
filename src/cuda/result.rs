//! Result codes of the driver, as plain numbers.

use std::fmt;

/// A `CUresult`. A number and not cudarc's enum: a driver newer than the header may answer a code that the enum has no
/// variant for, and such a value in a Rust enum is undefined behaviour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
#[must_use]
pub struct CuResult(pub i32);

impl CuResult {
    pub const SUCCESS: Self = Self(0);
    pub const INVALID_VALUE: Self = Self(1);
    pub const OUT_OF_MEMORY: Self = Self(2);
    pub const NOT_INITIALIZED: Self = Self(3);
    pub const DEINITIALIZED: Self = Self(4);
    pub const INVALID_DEVICE: Self = Self(101);
    pub const INVALID_CONTEXT: Self = Self(201);
    pub const OPERATING_SYSTEM: Self = Self(304);
    /// Also what a handle of another kind gets.
    pub const INVALID_HANDLE: Self = Self(400);
    pub const NOT_FOUND: Self = Self(500);
    pub const NOT_READY: Self = Self(600);
    pub const HOST_MEMORY_ALREADY_REGISTERED: Self = Self(712);
    pub const HOST_MEMORY_NOT_REGISTERED: Self = Self(713);
    pub const CONTEXT_IS_DESTROYED: Self = Self(709);
    pub const NOT_PERMITTED: Self = Self(800);
    pub const NOT_SUPPORTED: Self = Self(801);
    pub const STREAM_CAPTURE_UNSUPPORTED: Self = Self(900);
    pub const STREAM_CAPTURE_INVALIDATED: Self = Self(901);
    pub const STREAM_CAPTURE_IMPLICIT: Self = Self(906);

    /// `CUDA_SUCCESS`.
    #[inline]
    pub fn is_ok(self) -> bool {
        self == Self::SUCCESS
    }

    /// Whether every later call in the same context may answer so, too: errors that CUDA's documentation says leave the
    /// process or the GPU in a state in which no more work is done, and the one that stands for any.
    pub fn may_stick(self) -> bool {
        matches!(self.0, 214 | 220 | 226 | 700 | 702 | 710 | 714..=719 | 721 | 911 | 999)
    }

    /// `Err` with the code unless it is `CUDA_SUCCESS`.
    #[inline]
    pub fn ok(self) -> Result<(), Self> {
        if self.is_ok() { Ok(()) } else { Err(self) }
    }

    /// The code of an outcome: `CUDA_SUCCESS`, whatever came of it, or the error's.
    #[inline]
    pub fn of<T>(outcome: Result<T, Self>) -> Self {
        outcome.err().unwrap_or(Self::SUCCESS)
    }

    fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            0 => "CUDA_SUCCESS",
            1 => "CUDA_ERROR_INVALID_VALUE",
            2 => "CUDA_ERROR_OUT_OF_MEMORY",
            3 => "CUDA_ERROR_NOT_INITIALIZED",
            4 => "CUDA_ERROR_DEINITIALIZED",
            46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
            100 => "CUDA_ERROR_NO_DEVICE",
            101 => "CUDA_ERROR_INVALID_DEVICE",
            201 => "CUDA_ERROR_INVALID_CONTEXT",
            208 => "CUDA_ERROR_ALREADY_MAPPED",
            304 => "CUDA_ERROR_OPERATING_SYSTEM",
            500 => "CUDA_ERROR_NOT_FOUND",
            400 => "CUDA_ERROR_INVALID_HANDLE",
            600 => "CUDA_ERROR_NOT_READY",
            700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
            709 => "CUDA_ERROR_CONTEXT_IS_DESTROYED",
            719 => "CUDA_ERROR_LAUNCH_FAILED",
            800 => "CUDA_ERROR_NOT_PERMITTED",
            801 => "CUDA_ERROR_NOT_SUPPORTED",
            900 => "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            901 => "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
            999 => "CUDA_ERROR_UNKNOWN",
            _ => return None,
        })
    }
}

impl fmt::Display for CuResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "CUDA error {}", self.0),
        }
    }
}
