//! Where the 8-byte words of a kernel's parameters lie. Asked of the driver once for each function, and then found without
//! a lock.

use gpupool_cuda::{Driver, Function};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// Eight bytes that may be a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word {
    /// Which parameter, and where in it.
    pub parameter: u32,
    pub offset: u32,
    /// Where in the buffer that holds all parameters.
    pub in_buffer: u32,
}

/// The words of one kernel's parameters.
#[derive(Debug, PartialEq, Eq)]
pub struct Layout {
    pub words: Vec<Word>,
}

/// Words that are looked at; kernels with more get them in structures of tables, not pointers.
const MOST_WORDS: usize = 512;

/// Functions whose layout is at hand. Others are asked for again, which costs some tens of nanoseconds a parameter.
const ROWS: usize = 1 << 12;
/// Rows that a function may be in.
const PROBES: usize = 4;
/// Stands for a function in a row that is being written.
const BUSY: usize = 1;

/// A row is written with its function BUSY, so a reader that finds the same function before and after its look at the
/// layout has the layout of that function.
struct Entry {
    function: AtomicUsize,
    layout: AtomicPtr<Layout>,
}

static TABLE: [Entry; ROWS] =
    [const { Entry { function: AtomicUsize::new(0), layout: AtomicPtr::new(std::ptr::null_mut()) } }; ROWS];
/// Every layout there was, each once and never freed: most kernels have the parameters of some other.
static LAYOUTS: Mutex<Vec<&'static Layout>> = Mutex::new(Vec::new());

fn rows(function: usize) -> impl Iterator<Item = &'static Entry> {
    // Handles are addresses of objects of one size, so their low bits say little; the multiplication spreads them.
    let first = (function.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (usize::BITS - ROWS.trailing_zeros())) % ROWS;
    (0..PROBES).filter_map(move |probe| TABLE.get((first + probe) % ROWS))
}

/// The layout of a function that was learned before. No lock.
#[inline]
pub fn known(function: Function) -> Option<&'static Layout> {
    let function = function.raw().addr();
    let row = rows(function).find(|row| row.function.load(Ordering::Acquire) == function)?;
    let layout = row.layout.load(Ordering::Acquire);
    // SAFETY: null or a layout, which are never freed.
    let layout = unsafe { layout.as_ref() }?;
    (row.function.load(Ordering::Acquire) == function).then_some(layout)
}

/// The layout of a function: known, or asked of the driver now.
pub fn of(driver: &Driver, function: Function) -> &'static Layout {
    known(function).unwrap_or_else(|| learn(driver, function))
}

/// Asks the driver, and remembers.
pub fn learn(driver: &Driver, function: Function) -> &'static Layout {
    let layout = shared(ask(driver, function));
    let handle = function.raw().addr();
    let free = rows(handle).find(|row| row.function.load(Ordering::Acquire) == 0).or_else(|| rows(handle).next());
    if let Some(row) = free {
        let old = row.function.load(Ordering::Acquire);
        let mine = row.function.compare_exchange(old, BUSY, Ordering::AcqRel, Ordering::Acquire);
        if old != BUSY && mine.is_ok() {
            row.layout.store(std::ptr::from_ref(layout).cast_mut(), Ordering::Release);
            row.function.store(handle, Ordering::Release);
        }
    }
    layout
}

/// Forgets every function: some are about to go, and the driver may give their handles to others. Called before they go,
/// while nobody may launch them any more.
pub fn forget() {
    for row in &TABLE {
        row.function.store(0, Ordering::Release);
    }
}

fn shared(words: Vec<Word>) -> &'static Layout {
    let mut layouts = LAYOUTS.lock();
    if let Some(known) = layouts.iter().find(|known| known.words == words) {
        return known;
    }
    let layout: &'static Layout = Box::leak(Box::new(Layout { words }));
    layouts.push(layout);
    layout
}

fn ask(driver: &Driver, function: Function) -> Vec<Word> {
    let parameter = |index| {
        // SAFETY: the function is the one that the program launches.
        unsafe { driver.parameter(function, index) }
    };
    let parameters: Vec<_> = (0..).map_while(parameter).collect();
    words(&parameters)
}

/// The aligned words in parameters of these offsets and sizes.
fn words(parameters: &[(usize, usize)]) -> Vec<Word> {
    let of = |(index, &(start, bytes)): (usize, &(usize, usize))| {
        let first = start.next_multiple_of(8);
        let last = (start + bytes).saturating_sub(8);
        (first..=last).step_by(8).filter(move |_| bytes >= 8).map(move |at| Word {
            parameter: index as u32,
            offset: (at - start) as u32,
            in_buffer: at as u32,
        })
    };
    parameters.iter().enumerate().flat_map(of).take(MOST_WORDS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_aligned_in_the_buffer_and_within_their_parameter() {
        // A struct of 24 bytes, 4 bytes, a pointer, 12 bytes from 40 on, 7 bytes.
        let layout = words(&[(0, 24), (24, 4), (32, 8), (44, 12), (56, 7)]);
        let found: Vec<_> = layout.iter().map(|word| (word.parameter, word.offset, word.in_buffer)).collect();
        assert_eq!(found, [(0, 0, 0), (0, 8, 8), (0, 16, 16), (2, 0, 32), (3, 4, 48)]);
        assert_eq!(words(&[]), []);
        assert_eq!(words(&[(0, 1 << 20)]).len(), MOST_WORDS);
    }

    /// One test, because the table is the process's.
    #[test]
    fn functions_are_found_until_they_are_forgotten_and_share_layouts() {
        let function = |number| Function::from_raw(std::ptr::without_provenance_mut(number)).unwrap();
        let one = shared(words(&[(0, 8)]));
        assert!(std::ptr::eq(one, shared(words(&[(0, 8)]))));
        assert!(known(function(0x1000)).is_none());
        for number in 1..=100 {
            let handle = number * 0x40;
            let row = rows(handle).find(|row| row.function.load(Ordering::Relaxed) == 0).unwrap();
            row.layout.store(std::ptr::from_ref(one).cast_mut(), Ordering::Relaxed);
            row.function.store(handle, Ordering::Relaxed);
        }
        assert!((1..=100_usize).all(|number| known(function(number * 0x40)).is_some_and(|known| known == one)));
        forget();
        assert!((1..=100_usize).all(|number| known(function(number * 0x40)).is_none()));
    }
}
