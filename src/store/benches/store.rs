//! How fast a store is written and read, by what memory holds; and beside it what a plain writer reaches on the same folder, at the same sitting.
//!
//! `cargo bench -p gpupool-store -- [FOLDER [MIB [THREADS [READERS]]]]`. The folder is made and emptied again; without one it is in the folder for
//! temporary files, which may be memory.

#![allow(clippy::unwrap_used, reason = "a program for measuring")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use common::{Kind, about, memory, meta};
use gpupool_store::{Codec, Options, PART, Reader, Which, Writer};
use rustix::fs::{CWD, Mode, OFlags, openat};

/// As much memory is made; it is handed over again and again, and no codec looks as far back.
const MADE: usize = 64 << 20;
/// How often each is done; the best and the worst are printed.
const TIMES: usize = 3;

/// On a page's border, as direct I/O and the shim's buffers are.
struct Pages {
    bytes: Vec<u8>,
    from: usize,
}

impl Pages {
    fn of(contents: &[u8]) -> Self {
        let mut bytes = vec![0; contents.len() + 4096];
        let from = bytes.as_ptr().align_offset(4096);
        bytes[from..from + contents.len()].copy_from_slice(contents);
        Self { bytes, from }
    }

    fn all(&self) -> &[u8] {
        &self.bytes[self.from..self.from + self.bytes.len() - 4096]
    }

    fn all_mut(&mut self) -> &mut [u8] {
        let length = self.bytes.len() - 4096;
        &mut self.bytes[self.from..self.from + length]
    }
}

/// Each thread a file, direct I/O, writes of 8 MiB, `fdatasync`: what there is to reach.
fn plain(folder: &Path, memory: &[u8], rounds: usize, threads: usize) -> (f64, f64) {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::DIRECT;
    let open = |name: &PathBuf| {
        openat(CWD, name, flags, Mode::RUSR | Mode::WUSR)
            .or_else(|_| openat(CWD, name, flags - OFlags::DIRECT, Mode::RUSR | Mode::WUSR))
            .unwrap()
    };
    let names: Vec<PathBuf> = (0..threads).map(|number| folder.join(format!("plain-{number}"))).collect();
    let writes = rounds * memory.len() / PART / threads;
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for name in &names {
            scope.spawn(|| {
                let file = open(name);
                for number in 0..writes {
                    let part = &memory[number * PART % memory.len()..][..PART];
                    assert_eq!(rustix::io::pwrite(&file, part, (number * PART) as u64).unwrap(), PART);
                }
                rustix::fs::fdatasync(&file).unwrap();
            });
        }
    });
    let wrote = begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for name in &names {
            scope.spawn(|| {
                let file = open(name);
                let mut pages = Pages::of(&vec![0; PART]);
                for number in 0..writes {
                    assert_eq!(rustix::io::pread(&file, pages.all_mut(), (number * PART) as u64).unwrap(), PART);
                }
            });
        }
    });
    let read = begun.elapsed().as_secs_f64();
    names.iter().for_each(|name| fs::remove_file(name).unwrap());
    let bytes = (writes * threads * PART) as f64 / 1e9;
    (bytes / wrote, bytes / read)
}

/// What one way there and back made: GB of memory a second, what is left of it, and how many parts are stored how.
struct Made {
    write: f64,
    /// By [`Reader::read_into`], [`MADE`] bytes at a time, whose threads end together.
    read: f64,
    /// By as many threads that read a part each, and none of which waits for another ([`Reader::read_here`]).
    each: f64,
    left: f64,
    codecs: BTreeMap<&'static str, u32>,
}

/// Reads all of a block by threads that each take the next part.
fn read_each(reader: &Reader, bytes: usize, threads: usize) -> f64 {
    let next = AtomicUsize::new(0);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut part = Pages::of(&vec![0; PART]);
                loop {
                    let at = next.fetch_add(PART, Ordering::Relaxed);
                    if at >= bytes {
                        break;
                    }
                    reader.read_here(1, at as u64, part.all_mut()).unwrap();
                }
            });
        }
    });
    bytes as f64 / 1e9 / begun.elapsed().as_secs_f64()
}

/// Writes one generation and reads it twice.
fn store(folder: &Path, pages: &'static Pages, rounds: usize, options: Options, readers: usize) -> Made {
    let bytes = rounds * MADE;
    let begun = Instant::now();
    let writer = Writer::create(folder, meta(), options).unwrap();
    let block = writer.block(about(1, bytes)).unwrap();
    (0..rounds).for_each(|round| writer.submit(block, (round * MADE) as u64, pages.all()).unwrap());
    let written = writer.finish().unwrap();
    let wrote = begun.elapsed().as_secs_f64();
    let mut back = Pages::of(&vec![0; MADE]);
    let begun = Instant::now();
    let reader = Reader::open(folder, Which::Newest, options.threads).unwrap();
    (0..rounds).for_each(|round| reader.read_into(1, (round * MADE) as u64, back.all_mut()).unwrap());
    let read = begun.elapsed().as_secs_f64();
    assert!(back.all() == pages.all());
    let each = read_each(&reader, bytes, readers);
    let mut codecs = BTreeMap::new();
    reader.manifest().blocks[0].parts.iter().for_each(|part| *codecs.entry(part.codec.word()).or_default() += 1);
    let left = written.stored as f64 / bytes as f64;
    written.remove().unwrap();
    let rate = |seconds: f64| bytes as f64 / 1e9 / seconds;
    Made { write: rate(wrote), read: rate(read), each, left, codecs }
}

fn range(figures: &[f64]) -> String {
    let (least, most) =
        figures.iter().fold((f64::INFINITY, 0_f64), |(least, most), one| (least.min(*one), most.max(*one)));
    format!("{least:.2}-{most:.2}")
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let around = tempfile::tempdir().unwrap();
    let folder = words.first().map_or_else(|| around.path().join("store"), PathBuf::from);
    let mib = words.get(1).map_or(1024, |mib| mib.parse().unwrap());
    let processors = std::thread::available_parallelism().unwrap().get();
    let threads = words.get(2).map_or(processors.min(16), |threads| threads.parse().unwrap());
    // As many as the shim has buffers.
    let readers = words.get(3).map_or((processors + 2).clamp(4, 18), |readers| readers.parse().unwrap());
    let rounds = (mib << 20) / MADE;
    fs::create_dir_all(&folder).unwrap();
    println!(
        "{}: {mib} MiB, {threads} threads, {processors} processors; GB/s of memory, least and most of {TIMES}",
        folder.display()
    );
    let each = format!("{readers} each");
    println!("{:10} {:10} {:>11} {:>11} {each:>11} {:>6}  parts", "memory", "codec", "write", "read", "left");
    let kinds = [Kind::Zeros, Kind::Constant, Kind::Bf16, Kind::F32, Kind::Random];
    for kind in kinds {
        let pages: &'static Pages = Box::leak(Box::new(Pages::of(&memory(kind, MADE, 1))));
        let best = match kind {
            Kind::Bf16 => Some(Codec::Planes2),
            Kind::F32 => Some(Codec::Planes4),
            _ => None,
        };
        let fixed = [Some(Codec::Lz4), Some(Codec::Zstd), best];
        let fixed = fixed.into_iter().flatten().filter(|_| best.is_some()).map(Some);
        for codec in std::iter::once(None).chain(fixed) {
            let (mut write, mut read, mut each, mut last) = (Vec::new(), Vec::new(), Vec::new(), None);
            for _ in 0..TIMES {
                let options = Options { threads, codec, ..Options::default() };
                let made = store(&folder, pages, rounds, options, readers);
                write.push(made.write);
                read.push(made.read);
                each.push(made.each);
                last = Some((made.left, made.codecs));
            }
            let (left, codecs) = last.unwrap();
            let (kind, codec) = (format!("{kind:?}"), codec.map_or("chosen", Codec::word));
            let (write, read, each) = (range(&write), range(&read), range(&each));
            println!("{kind:10} {codec:10} {write:>11} {read:>11} {each:>11} {left:>6.3}  {codecs:?}");
        }
        if kind == Kind::Random {
            let both: Vec<_> = (0..TIMES).map(|_| plain(&folder, pages.all(), rounds, threads)).collect();
            let (write, read): (Vec<_>, Vec<_>) = both.into_iter().unzip();
            println!(
                "{:10} {:10} {:>11} {:>11} {:>11} {:>6}",
                "Random",
                "plain",
                range(&write),
                range(&read),
                "",
                "1.000"
            );
        }
    }
    let _ = fs::remove_file(folder.join("lock"));
    let _ = fs::remove_dir(&folder);
}
