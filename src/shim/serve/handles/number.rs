//! The numbers by which a program knows its physical memory, in place of the driver's handles.
//!
//! The driver gives an address of its heap as a handle. These numbers lie where no processor has addresses for programs, so none is
//! ever a handle of the driver's, and none is given twice: a number that the program kept too long is no other memory's.

use gpupool_cuda::Physical;

/// What the program calls a piece of physical memory by: a number of ours, or the driver's handle where that never changes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Number(u64);

/// The upper 16 bits of every number of ours. On x86 an address of a program has zeros from bit 56 on; on aarch64 it may have anything
/// from there on, but zeros from bit 52 to 55.
const MARK: u64 = 0x6770;

impl Number {
    /// What the program means by this argument.
    pub const fn from_raw(handle: u64) -> Self {
        Self(handle)
    }

    /// What the program is given.
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// The number of memory that keeps the driver's handle.
    pub const fn same(handle: Physical) -> Self {
        Self(handle.raw())
    }

    /// Whether it is one of ours.
    pub const fn is_own(self) -> bool {
        self.0 >> 48 == MARK
    }
}

/// Gives numbers out, each once.
#[derive(Debug)]
pub struct Numbers(u64);

impl Default for Numbers {
    fn default() -> Self {
        Self(MARK << 48)
    }
}

impl Numbers {
    /// The next number. At one a microsecond they last for eight years.
    pub fn next(&mut self) -> Number {
        self.0 += 1;
        Number(self.0)
    }

    /// How many were given so far.
    pub fn count(&self) -> u64 {
        self.0 - (MARK << 48)
    }

    /// The driver gave this handle. Where it is such a number against all expectation, only higher ones follow. Whether it is.
    pub fn avoid(&mut self, handle: Physical) -> bool {
        let same = Number::same(handle);
        if same.is_own() {
            self.0 = self.0.max(same.0);
        }
        same.is_own()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_new_and_none_is_one_that_the_driver_gave() {
        let mut numbers = Numbers::default();
        let first = numbers.next();
        assert!(first.is_own() && numbers.next() > first);
        // Of x86 with five levels of tables, of aarch64 with 52 bits and with tags in the uppermost byte, too.
        for address in [0, 3, 0x5649_1be8_7570, 0x7fff_ffff_f000, 0xff_ffff_ffff_f000, 0x670f_ffff_ffff_f000] {
            assert!(!numbers.avoid(Physical::from_raw(address)), "{address:#x}");
        }
        let taken = Physical::from_raw(first.raw() + 1000);
        assert!(numbers.avoid(taken));
        assert!(numbers.next() > Number::same(taken));
    }
}
