//! Memory of this process that may be gone, or was never there: what a program names without having to be right.
//!
//! Nothing here takes a lock or allocates: it also runs in handlers of signals and in children of `vfork`.

use std::ffi::c_void;

/// What is read at once never reaches into the next page, which may not be there while what is looked for ends before it.
const PAGE: usize = 4096;

/// Reads it. False where it is gone, or where a sandbox forbids to look.
pub fn read(address: u64, into: &mut [u8]) -> bool {
    let to = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let from = libc::iovec { iov_base: address as *mut c_void, iov_len: into.len() };
    // SAFETY: `to` is the slice; whatever `from` says, the kernel checks it.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &raw const to, 1, &raw const from, 1, 0) };
    usize::try_from(read) == Ok(into.len())
}

/// The bytes of a C string, up to its NUL or to where it cannot be read.
#[derive(Clone)]
pub struct Text {
    /// Of the piece that comes next.
    address: usize,
    piece: [u8; Self::PIECE],
    /// What of the piece was not given out yet.
    left: std::ops::Range<usize>,
}

impl Text {
    const PIECE: usize = 64;

    /// The string at an address.
    pub fn at(address: usize) -> Self {
        Self { address, piece: [0; Self::PIECE], left: 0..0 }
    }
}

impl Iterator for Text {
    type Item = u8;

    fn next(&mut self) -> Option<u8> {
        if self.left.is_empty() {
            let bytes = Self::PIECE.min(PAGE - self.address % PAGE);
            if !read(self.address as u64, &mut self.piece[..bytes]) {
                return None;
            }
            self.address = self.address.wrapping_add(bytes);
            self.left = 0..bytes;
        }
        let byte = self.piece[self.left.start];
        // The NUL stays, so that the end is the end however often it is asked for.
        (byte != 0).then(|| {
            self.left.start += 1;
            byte
        })
    }
}

/// The addresses in a list that ends with NULL, up to there or to where it cannot be read.
pub fn list(address: usize) -> impl Iterator<Item = usize> {
    const WORD: usize = size_of::<usize>();
    let addresses = (0..).map(move |at: usize| {
        let mut word = [0; WORD];
        let is_there = read(address.wrapping_add(at * WORD) as u64, &mut word);
        if is_there { usize::from_ne_bytes(word) } else { 0 }
    });
    addresses.take_while(|address| *address != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;

    #[test]
    fn a_string_is_read_to_its_end_and_no_further() {
        for length in [0, 1, 63, 64, 65, 5000] {
            let text = CString::new(vec![b'x'; length]).unwrap();
            let mut read = Text::at(text.as_ptr().addr());
            assert_eq!(read.by_ref().count(), length);
            assert_eq!(read.next(), None);
        }
        assert_eq!(Text::at(0).count(), 0);
        assert_eq!(Text::at(usize::MAX).count(), 0);
    }

    #[test]
    fn a_list_is_read_to_its_end_and_no_further() {
        assert_eq!(list([7_usize, 8, 0, 9].as_ptr().addr()).collect::<Vec<_>>(), [7, 8]);
        assert_eq!(list(0).count(), 0);
        assert_eq!(list(usize::MAX).count(), 0);
    }
}
