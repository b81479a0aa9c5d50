//! What a process has to say that can write into no file any more: it changed its user or its root folder, may write no file of this
//! size, or the disk is full.
//!
//! `run --fail-on` makes the file `spare`, with room for [`Spare::BYTES`], and every process maps it, shared, as the library
//! is loaded into it. The mapping goes along with a fork and needs neither a descriptor nor a right, only a later program
//! (`exec`) does not have it. A descriptor that is kept open instead would be the program's to close, and the page of metrics is for
//! who looks on, and has room for numbers only.
//!
//! The file is a list of 32-bit words in the order of the machine. The first is how many of the following are taken; a
//! process takes the words for a line by adding to it. A line is a word of its own with the length in bytes, whose highest
//! bit is set when the line is whole, and the bytes: the name of the file that it belongs in, a line feed, and the line.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// The bit of a line that is whole.
const WHOLE: u32 = 1 << 31;
/// Bytes of a word.
const WORD: usize = size_of::<u32>();

/// The file as a process writes to it.
#[derive(Clone, Copy, Debug)]
pub struct Spare<'a>(&'a [AtomicU32]);

impl<'a> Spare<'a> {
    /// The file's name.
    pub const FILE: &'static str = "spare";
    /// The file's size in bytes: room for some hundred findings. Its maker writes them all, since a process that touches a page which the disk
    /// has no room for is ended by a signal.
    pub const BYTES: usize = 256 << 10;

    /// These words, the whole file, are it.
    pub fn new(words: &'a [AtomicU32]) -> Spare<'a> {
        Spare(words)
    }

    /// Adds whole lines of the file called `name`; whether there was room. Takes no lock and allocates nothing.
    #[must_use]
    pub fn add(&self, name: &[u8], lines: &[u8]) -> bool {
        let Some((taken, words)) = self.0.split_first() else { return false };
        let bytes = name.len() + 1 + lines.len();
        let Some(length) = u32::try_from(bytes).ok().filter(|length| *length < WHOLE / 2) else { return false };
        let wanted = 1 + length.div_ceil(WORD as u32);
        // One that does not fit is added all the same, which says that something was lost, and later ones are not.
        let fits = |taken: &u32| (*taken as usize) <= words.len();
        let add = |taken: u32| Some(taken).filter(fits).map(|taken| taken + wanted);
        let Ok(start) = taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) else { return false };
        let Some((head, body)) =
            words.get(start as usize..(start + wanted) as usize).and_then(<[AtomicU32]>::split_first)
        else {
            return false;
        };
        head.store(length, Ordering::Relaxed);
        let mut bytes = name.iter().chain(b"\n").chain(lines);
        for word in body {
            let word_bytes: [u8; WORD] = std::array::from_fn(|_| bytes.next().copied().unwrap_or(0));
            word.store(u32::from_ne_bytes(word_bytes), Ordering::Relaxed);
        }
        head.store(length | WHOLE, Ordering::Release);
        true
    }
}

/// What is in the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spared {
    /// Lines with the name of the file that they belong in, in the order in which they were begun.
    pub lines: Vec<(String, Vec<u8>)>,
    /// Whether there was no room for one, or one is not whole.
    pub is_cut_off: bool,
}

impl Spared {
    /// Reads the file in `folder`. Where there is none, nobody could write to it.
    pub fn read(folder: &Path) -> Spared {
        Spared::of(&fs::read(folder.join(Spare::FILE)).unwrap_or_default())
    }

    fn of(bytes: &[u8]) -> Spared {
        let (words, _) = bytes.as_chunks::<WORD>();
        let mut spared = Spared::default();
        let Some((taken, words)) = words.split_first() else { return spared };
        let mut rest = words.get(..u32::from_ne_bytes(*taken) as usize).unwrap_or_else(|| {
            spared.is_cut_off = true;
            words
        });
        while let Some((head, behind)) = rest.split_first() {
            let head = u32::from_ne_bytes(*head);
            let bytes = (head & !WHOLE) as usize;
            let Some((line, next)) = behind.split_at_checked(bytes.div_ceil(WORD)).filter(|_| bytes > 0) else {
                spared.is_cut_off = true;
                break;
            };
            rest = next;
            let mut parts = line.as_flattened()[..bytes].splitn(2, |byte| *byte == b'\n');
            match (parts.next(), parts.next()) {
                (Some(name), Some(text)) if head & WHOLE != 0 => {
                    spared.lines.push((String::from_utf8_lossy(name).into_owned(), text.to_vec()));
                }
                _ => spared.is_cut_off = true,
            }
        }
        spared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(count: usize) -> Vec<AtomicU32> {
        (0..count).map(|_| AtomicU32::new(0)).collect()
    }

    fn read(words: &[AtomicU32]) -> Spared {
        Spared::of(&words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect::<Vec<u8>>())
    }

    #[test]
    fn lines_of_several_threads_are_all_there_and_whole() {
        let words = words(4096);
        let spare = Spare::new(&words);
        let line = |thread: u8, number: usize| vec![b'a' + thread; 1 + number];
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || (0..50).for_each(|number| assert!(spare.add(b"7-0", &line(thread, number)))));
            }
        });
        let read = read(&words);
        assert!(!read.is_cut_off && read.lines.iter().all(|(name, _)| name == "7-0"));
        for thread in 0..4 {
            let own = read.lines.iter().map(|(_, text)| text).filter(|text| text[0] == b'a' + thread);
            assert_eq!(
                own.cloned().collect::<Vec<_>>(),
                (0..50).map(|number| line(thread, number)).collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn what_has_no_room_and_what_is_not_whole_is_seen() {
        assert_eq!(Spared::of(b""), Spared::default());
        assert!(!Spare::new(&[]).add(b"a", b"b"));
        let words = words(8);
        let spare = Spare::new(&words);
        assert_eq!(read(&words), Spared::default());
        assert!(spare.add(b"a", b"line\n"));
        assert_eq!(read(&words).lines, [("a".to_owned(), b"line\n".to_vec())]);
        assert!(!read(&words).is_cut_off);
        // As by somebody who was killed meanwhile: its length is known, or not even that.
        words[1].fetch_and(!WHOLE, Ordering::Relaxed);
        assert!(spare.add(b"b", b"c"));
        assert_eq!(read(&words), Spared { lines: vec![("b".to_owned(), b"c".to_vec())], is_cut_off: true });
        words[1].store(0, Ordering::Relaxed);
        assert_eq!(read(&words), Spared { lines: Vec::new(), is_cut_off: true });
        words[1].store(7 | WHOLE, Ordering::Relaxed);
        assert!(!read(&words).is_cut_off);
        assert!(!spare.add(b"c", b"too long for it") && !spare.add(b"d", b""));
        let cut = read(&words);
        assert!(cut.is_cut_off && cut.lines.len() == 2, "{cut:?}");
    }
}
