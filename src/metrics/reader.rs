//! The reading side. Nothing that stands in a page is trusted: counts are cut to what there is room for, text may be any
//! bytes, and a file that is too short is an error, not a signal, since it is read and not mapped.

use crate::layout::{self, BYTES, Counter, Group, Header, MAGIC, VERSION};
use crate::model::{Process, Snapshot, Took, zeroed};
use crate::process::Identity;
use crate::seqlock;
use crate::sync::{AtomicU64, Ordering};
use std::fmt::{Display, Formatter};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::OwnedFd;
use zerocopy::{FromBytes, IntoBytes};

/// What a page can be read from.
pub trait Source {
    /// Fills `into` with what begins at byte `at`.
    ///
    /// # Errors
    /// Where there are not so many bytes.
    fn read(&self, at: usize, into: &mut [u8]) -> Result<()>;
}

impl Source for OwnedFd {
    fn read(&self, at: usize, into: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < into.len() {
            match rustix::io::pread(self, &mut into[done..], (at + done) as u64) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => done += bytes,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

impl Source for [u8] {
    fn read(&self, at: usize, into: &mut [u8]) -> Result<()> {
        let from = self.get(at..).and_then(|rest| rest.get(..into.len())).ok_or(ErrorKind::UnexpectedEof)?;
        into.copy_from_slice(from);
        Ok(())
    }
}

/// The words of a page in this process, which another thread may be writing.
impl Source for [AtomicU64] {
    fn read(&self, at: usize, into: &mut [u8]) -> Result<()> {
        const WORD: usize = size_of::<u64>();
        let words = at.is_multiple_of(WORD).then(|| self.get(at / WORD..)).flatten();
        let words = words.filter(|words| words.len() >= into.len().div_ceil(WORD)).ok_or(ErrorKind::UnexpectedEof)?;
        let (whole, rest) = into.as_chunks_mut();
        for (bytes, word) in whole.iter_mut().zip(words) {
            *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        if let Some(word) = words.get(whole.len()).filter(|_| !rest.is_empty()) {
            rest.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes()[..rest.len()]);
        }
        Ok(())
    }
}

/// Why a page cannot be read.
#[derive(Debug)]
pub enum Unreadable {
    /// It does not begin like a page.
    Foreign,
    /// The layout has this version, which is not the reader's.
    Version(u32),
    /// It says that it is of another size than its version has.
    Size(u32),
    /// This part of it was being written each time: its process was stopped or killed in the middle.
    Torn(&'static str),
    /// It is too short, or the system does not give it.
    File(Error),
}

impl Display for Unreadable {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Foreign => out.write_str("it is not a metrics page of gpupool"),
            Self::Version(found) => write!(
                out,
                "its layout has version {found}, and this gpupool reads version {VERSION}; use the gpupool that is as new as \
                 the program's"
            ),
            Self::Size(found) => write!(out, "it says that it has {found} bytes, and pages have {BYTES}"),
            Self::Torn(part) => write!(out, "its {part} are half written: the process was stopped or killed meanwhile"),
            Self::File(error) if error.kind() == ErrorKind::UnexpectedEof => {
                write!(out, "it is shorter than {BYTES} bytes")
            }
            Self::File(error) => write!(out, "it cannot be read: {error}"),
        }
    }
}

impl std::error::Error for Unreadable {}

impl From<Error> for Unreadable {
    fn from(error: Error) -> Self {
        Self::File(error)
    }
}

/// Whose page it is, whatever the version of its layout.
///
/// # Errors
/// Where it is none.
pub fn identify(source: &(impl Source + ?Sized)) -> std::result::Result<Identity, Unreadable> {
    Ok(Identity::from(&*header(source)?))
}

fn header(source: &(impl Source + ?Sized)) -> std::result::Result<Box<Header>, Unreadable> {
    let header: Box<Header> = part(source, 0)?;
    if header.magic == MAGIC { Ok(header) } else { Err(Unreadable::Foreign) }
}

/// All that a page says.
///
/// # Errors
/// Where it cannot be read, or not as a whole.
pub fn read(source: &(impl Source + ?Sized)) -> std::result::Result<Snapshot, Unreadable> {
    let header = header(source)?;
    if header.version != VERSION {
        return Err(Unreadable::Version(header.version));
    }
    if header.bytes as usize != BYTES {
        return Err(Unreadable::Size(header.bytes));
    }
    // A page that was cut is an error, also where what was cut off is empty.
    source.read(BYTES - size_of::<u64>(), &mut [0; size_of::<u64>()])?;
    let mut counters = [0; Counter::ALL.len()];
    source.read(layout::COUNTERS_AT, counters.as_mut_bytes())?;
    Ok(Snapshot {
        process: Process::from(&*header),
        ended: *part::<u64>(source, layout::STATE)? != layout::RUNNING,
        took: Took::of_word(*part::<u64>(source, layout::TOOK)?),
        moves: moves(source),
        counters,
        levels: (&*group::<layout::Levels>(source)?).into(),
        contexts: (&*group::<layout::Contexts>(source)?).into(),
        sites: (&*group::<layout::Sites>(source)?).into(),
        findings: (&*group::<layout::Findings>(source)?).into(),
        labels: (&*group::<layout::Labels>(source)?).into(),
    })
}

/// [`Snapshot::moves`] alone, of a page of this version. `false` where it cannot be read.
pub fn moves(source: &(impl Source + ?Sized)) -> bool {
    part::<u64>(source, layout::MOVES).is_ok_and(|word| *word != 0)
}

fn part<T: FromBytes + IntoBytes>(source: &(impl Source + ?Sized), at: usize) -> Result<Box<T>> {
    let mut value = zeroed::<T>();
    source.read(at, value.as_mut_bytes())?;
    Ok(value)
}

fn group<G: Group>(source: &(impl Source + ?Sized)) -> std::result::Result<Box<G>, Unreadable> {
    let mut value = zeroed::<G>();
    match seqlock::read(source, G::AT, value.as_mut_bytes())? {
        true => Ok(value),
        false => Err(Unreadable::Torn(G::NAME)),
    }
}
