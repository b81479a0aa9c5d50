//! GPU memory of a suspended or checkpointed program, on a disk. Nothing here knows CUDA.
//!
//! A folder holds generations, each the memory of a process at one moment:
//!
//! ```text
//! DIR/                      0700, of this user
//!   lock                    flock'ed by who writes; holds its number
//!   gen-000007/             0700; whole, because it has this name
//!     data-00 … data-15     0600; parts, one file for each thread that wrote
//!     manifest              0600; what is where
//!   .gen-000008.new/        being written, or left by who did not get to the end; its successor removes it
//!   .gen-000006.gone/       being removed, likewise
//! ```
//!
//! A generation may have files of the one before it, by a second name (`data-00-000006`), where some of its parts are the same (`older.rs`).
//!
//! A generation is a folder and not one file: threads write files of their own, which no file system makes them take turns for,
//! and the manifest can be read by eye. It gets its name in one step all the same. In order: data and `fdatasync`, manifest and
//! `fsync`, `fsync` of its folder, rename, `fsync` of the folder around it. At whichever moment the power goes, what is called `gen-` is whole.
//! A failed `fsync` is not tried again: what it was for may be lost, and the next one would not say so.
//!
//! # Format, version 2
//!
//! The **manifest** is a line `gpupool-store 2`, a JSON object ([`Manifest`]) on one line, and a line `xxh3-64 ` with the XXH3-64 of all bytes before the
//! end of the line above it, 16 hexadecimal digits. JSON, so that it can be read where there is no gpupool
//! (`sed -n 2p manifest | jq .blocks`); it is a
//! thousandth of the memory. Members that a reader does not know are passed over; what it must not pass over makes a new version. A reader refuses a newer version before it reads on.
//!
//! A **part** is up to 8 MiB of a block, or any number of bytes that repeat eight of them, which take no room in a file. In a data file, parts
//! follow on each other, each with zeros up to a multiple of 4096 bytes behind it, so that direct I/O can read and write it. How it is stored is its [`Codec`]:
//!
//! * `fill`: not at all; the manifest has the eight bytes.
//! * `none`: as it is.
//! * `lz4`: one LZ4 block.
//! * `zstd`: one zstd frame.
//! * `planes2`, `planes4`: of numbers of 2 or 4 bytes, first all first bytes, then all second ones and so on. Stored are the lengths of the planes
//!   as they are stored (4 bytes each, little-endian), the planes, and the bytes that make no whole number. A plane that has its full
//!   length is stored as it is, any other is a zstd frame.
//!
//! Version 1 has no files of other generations, in which there may be bytes of no part, and no two parts at one place; what has none of them says so still.
//!
//! The hash of a part is that of the memory, not of what is stored: it says that the whole way there and back was right.
//!
//! # Use
//!
//! ```no_run
//! # use gpupool_store::{About, Meta, Options, Reader, Which, Writer};
//! # fn store(folder: &std::path::Path, memory: &[u8]) -> gpupool_store::Result<()> {
//! let options = Options { expected: memory.len() as u64, keep: Some(1), ..Options::default() };
//! let writer = Writer::create(folder, Meta::default(), options)?;
//! let block = writer.block(About { id: 1, address: 0x7f00_0000_0000, bytes: memory.len() as u64, ..About::default() })?;
//! writer.write(block, 0, memory)?;
//! let written = writer.finish()?;
//!
//! let reader = Reader::open(folder, Which::Number(written.generation), 0)?;
//! let mut back = vec![0; memory.len()];
//! reader.read_into(1, 0, &mut back)?;
//! written.remove()
//! # }
//! ```
//!
//! # In a program that is not ours
//!
//! Nothing here panics, prints, or handles a signal. Threads have all signals blocked, also the one that a limit on the length of files
//! raises, and end before [`Writer::finish`], its drop and [`Reader::read_into`] return. Memory is bounded ([`Options::memory`]) and given back to the system. A
//! descriptor is compared with what it led to before each use; one that the program closed is an error. In the child of a fork a
//! writer does nothing when it is dropped; it must not be used there.
//!
//! | file | question it answers |
//! | --- | --- |
//! | `error.rs`, `signals.rs`, `buffer.rs` | What can go wrong? How does a thread get no signals? Where is memory for direct I/O? |
//! | `disk.rs` | Files and folders, by descriptors that the program may close. |
//! | `codec.rs` | How is a part stored, and which way is worth its time here? |
//! | `manifest.rs` | What does a generation say of itself, and does it make sense? |
//! | `store.rs` | Whose folder is it, which generations are in it, who may change it, how does one become whole? |
//! | `older.rs` | What is the same as in the generation before? |
//! | `writer.rs`, `reader.rs` | How do bytes get there and back by several threads? |
//! | `job.rs` | Which generations of several processes belong together? |
//! | `meeting.rs` | How do those agree who write an image of one job on several hosts? |
//! | `look.rs` | What is there, and is it right? |

mod buffer;
mod codec;
mod disk;
mod error;
mod job;
mod look;
mod manifest;
mod meeting;
#[cfg(test)]
mod meeting_faults;
mod older;
mod reader;
pub mod signals;
mod store;
#[cfg(test)]
mod tests;
mod writer;

pub use codec::Codec;
pub use error::{Error, Result};
pub use job::{
    Job, JobWriter, ListedJob, RankImage, VerifiedJob, folders_in, job_around, jobs, rank_folder, verify_jobs,
};
pub use look::{Listed, Summary, Verified, keep, list, remove, show, verify};
pub use manifest::{About, Block, Data, Manifest, Meta, Name, OfRanks, Part, Process, Word};
pub use meeting::{Meeting, Pace, Who};
pub use reader::{Reader, Which};
pub use store::{is_image, may_be_own, number_of, own_folder};
pub use writer::{Key, Options, Room, Unnamed, Writer, Written};

/// The version of the format that is written, and the newest that is read.
pub const VERSION: u32 = 2;

/// The longest part, in bytes: long enough that a disk is not slowed down by the number of writes, and short enough that a thread
/// has a few.
pub const PART: usize = 8 << 20;

/// How many processors this process may use.
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}
