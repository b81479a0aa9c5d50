//! How parts are stored: the codecs, and which one a sample of a part speaks for.
//!
//! Weights and optimizer state are floats: their mantissas are noise, and their exponents are few. LZ4 finds nothing there, and
//! zstd little, unless the bytes of a number are laid apart in planes first; then the planes of exponents shrink, and those of
//! noise are stored as they are.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::{CParameter, ParamSwitch};

use crate::PART;
use crate::buffer::Buffer;

/// How a part is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Codec {
    /// Nothing is: eight bytes repeat. Zeros are the most frequent ones.
    Fill,
    /// As it is.
    None,
    /// An LZ4 block.
    Lz4,
    /// A zstd frame.
    Zstd,
    /// Numbers of two bytes: planes, each a zstd frame or as it is.
    Planes2,
    /// Numbers of four bytes.
    Planes4,
}

impl Codec {
    /// All of them.
    pub const ALL: [Codec; 6] = [Codec::Fill, Codec::None, Codec::Lz4, Codec::Zstd, Codec::Planes2, Codec::Planes4];

    /// As manifests have it.
    pub fn word(self) -> &'static str {
        match self {
            Codec::Fill => "fill",
            Codec::None => "none",
            Codec::Lz4 => "lz4",
            Codec::Zstd => "zstd",
            Codec::Planes2 => "planes2",
            Codec::Planes4 => "planes4",
        }
    }
}

/// zstd's level: the next ones take twice the time for hundredths of the size.
const LEVEL: i32 = 1;
/// zstd's level for planes, which hardly looks for what repeats and so leaves nearly all to its Huffman coder. Exponents repeat only by
/// chance: level 1 took three times as long for a result that was a tenth longer.
const PLANES_LEVEL: i32 = -1000;
/// A part is compressed if at most this much of it is left, in hundredths.
const WORTH: usize = 95;
/// How many places of a part are sampled, and how many bytes at each. A multiple of four.
const SAMPLES: usize = 4;
const SAMPLE: usize = 8 << 10;
/// What is used of a plane to see whether it shrinks.
const PLANE_SAMPLE: usize = 8 << 10;

/// How long the output for a part of `bytes` has to be, for every codec: LZ4 takes none that might be too short, so that it need
/// not look whether it is.
pub fn output_for(bytes: usize) -> usize {
    lz4_flex::block::get_maximum_output_size(bytes).max(bytes)
}

/// What zstd makes, which panics where there is no memory for it.
fn had<T>(make: impl FnOnce() -> std::io::Result<T>) -> Result<T, Errno> {
    catch_unwind(AssertUnwindSafe(make)).ok().and_then(Result::ok).ok_or(Errno::NOMEM)
}

/// What a thread needs to compress.
pub struct Encoder {
    zstd: Compressor<'static>,
    /// For planes.
    huffman: Compressor<'static>,
    planes: Buffer,
    sample: Vec<u8>,
    out: Vec<u8>,
    costs: Arc<Costs>,
}

/// The codecs that are sampled.
const SAMPLED: [Codec; 4] = [Codec::Lz4, Codec::Zstd, Codec::Planes2, Codec::Planes4];

/// What a codec was seen to cost here, in seconds a byte. By the clock: what other threads take from this one counts.
#[derive(Clone, Copy, Default)]
struct Cost {
    /// In samples; 0 before there was one.
    sample: f64,
    /// How many times as much whole parts cost, which do not fit into a processor's cache; 0 before there was one.
    whole: f64,
}

/// What each of [`SAMPLED`] costs, for all threads of a writer.
#[derive(Default)]
pub struct Costs(Mutex<[Cost; SAMPLED.len()]>);

impl Costs {
    /// What is assumed of whole parts before there was one.
    const WHOLE: f64 = 2.0;

    /// Notes what a byte of a sample took; what one of a whole part may take then.
    fn of_sample(&self, number: usize, took: f64) -> f64 {
        let mut costs = self.0.lock();
        let cost = &mut costs[number];
        cost.sample = mix(cost.sample, took);
        cost.sample * if cost.whole == 0.0 { Self::WHOLE } else { cost.whole }
    }

    fn note_whole(&self, number: usize, took: f64) {
        let mut costs = self.0.lock();
        let cost = &mut costs[number];
        if cost.sample > 0.0 {
            cost.whole = mix(cost.whole, took / cost.sample);
        }
    }
}

/// What there is to know, of which a quarter is new. A single figure may be far off: the thread may have lost its processor.
fn mix(known: f64, new: f64) -> f64 {
    if known == 0.0 { new } else { 0.75 * known + 0.25 * new.min(known * 4.0) }
}

/// What a thread needs to decompress.
pub struct Decoder {
    zstd: Decompressor<'static>,
    planes: Buffer,
}

/// What a sample tells of a codec.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Which.
    pub codec: Codec,
    /// How much is left, of 1.
    pub ratio: f64,
    /// Seconds of one thread for each byte.
    pub cost: f64,
}

/// Where a plane begins and ends among `planes`.
fn plane(width: usize, length: usize, number: usize) -> std::ops::Range<usize> {
    let each = length / width;
    number * each..(number + 1) * each
}

/// Lays the bytes of numbers apart: all first bytes, then all second ones. What is no whole number stays behind them.
fn split(source: &[u8], width: usize, planes: &mut [u8]) {
    let each = source.len() / width;
    let (apart, rest) = planes.split_at_mut(each * width);
    match width {
        2 => {
            let (low, high) = apart.split_at_mut(each);
            for ((number, low), high) in source.chunks_exact(2).zip(low).zip(high) {
                (*low, *high) = (number[0], number[1]);
            }
        }
        _ => {
            let (low, high) = apart.split_at_mut(each * 2);
            let ((a, b), (c, d)) = (low.split_at_mut(each), high.split_at_mut(each));
            for ((((number, a), b), c), d) in source.chunks_exact(4).zip(a).zip(b).zip(c).zip(d) {
                (*a, *b, *c, *d) = (number[0], number[1], number[2], number[3]);
            }
        }
    }
    rest.copy_from_slice(&source[each * width..]);
}

/// Puts numbers together again.
fn join(planes: &[u8], width: usize, out: &mut [u8]) {
    let each = out.len() / width;
    let (apart, rest) = planes.split_at(each * width);
    match width {
        2 => {
            let (low, high) = apart.split_at(each);
            for ((number, low), high) in out.chunks_exact_mut(2).zip(low).zip(high) {
                number.copy_from_slice(&[*low, *high]);
            }
        }
        _ => {
            let (low, high) = apart.split_at(each * 2);
            let ((a, b), (c, d)) = (low.split_at(each), high.split_at(each));
            for ((((number, a), b), c), d) in out.chunks_exact_mut(4).zip(a).zip(b).zip(c).zip(d) {
                number.copy_from_slice(&[*a, *b, *c, *d]);
            }
        }
    }
    out[each * width..].copy_from_slice(rest);
}

impl Encoder {
    /// # Errors
    /// There is no memory for it.
    pub fn new(costs: &Arc<Costs>) -> Result<Self, Errno> {
        let zstd = had(|| Compressor::new(LEVEL))?;
        let mut huffman = had(|| Compressor::new(PLANES_LEVEL))?;
        let set = huffman.set_parameter(CParameter::LiteralCompressionMode(ParamSwitch::Enable));
        set.map_err(|_| Errno::INVAL)?;
        let out = vec![0; output_for(SAMPLES * SAMPLE)];
        let (planes, costs) = (Buffer::new(PART)?, Arc::clone(costs));
        Ok(Self { zstd, huffman, planes, sample: Vec::new(), out, costs })
    }

    /// Compresses into `out`, which is as long as [`output_for`] says; the result's length. `None`: that is not worth it, and the
    /// source is to be stored as it is.
    pub fn encode(&mut self, codec: Codec, source: &[u8], out: &mut [u8]) -> Option<usize> {
        let begun = Instant::now();
        let most = source.len() / 100 * WORTH;
        let length = match codec {
            Codec::Fill | Codec::None => None,
            Codec::Lz4 => lz4_flex::block::compress_into(source, out).ok(),
            Codec::Zstd => self.zstd.compress_to_buffer(source, &mut out[..most]).ok(),
            Codec::Planes2 => self.encode_planes(2, source, &mut out[..most]),
            Codec::Planes4 => self.encode_planes(4, source, &mut out[..most]),
        };
        if let Some(number) = SAMPLED.iter().position(|sampled| *sampled == codec) {
            self.costs.note_whole(number, begun.elapsed().as_secs_f64() / source.len().max(1) as f64);
        }
        length.filter(|length| *length <= most)
    }

    /// For each plane a length of four bytes, then the planes, then what was no whole number. A plane that has its own length
    /// is stored as it is.
    fn encode_planes(&mut self, width: usize, source: &[u8], out: &mut [u8]) -> Option<usize> {
        let Self { planes, huffman, out: aside, .. } = self;
        let planes = planes.get_mut(..source.len())?;
        split(source, width, planes);
        let mut at = width * 4;
        let put = |out: &mut [u8], at: usize, bytes: &[u8]| {
            out.get_mut(at..at + bytes.len()).map(|room| room.copy_from_slice(bytes))
        };
        for number in 0..width {
            let bytes = &planes[plane(width, planes.len(), number)];
            // By a sample from its middle.
            let length = bytes.len().min(PLANE_SAMPLE);
            let from = (bytes.len() - length) / 2;
            let shrinks = ratio(huffman, &bytes[from..from + length], aside) * 100.0 < WORTH as f64;
            let packed = out.get_mut(at..).filter(|_| shrinks);
            // Not shorter, and it could not be told from one that is stored as it is.
            let packed = packed.and_then(|room| huffman.compress_to_buffer(bytes, room).ok());
            let length = match packed.filter(|length| *length < bytes.len()) {
                Some(length) => length,
                None => {
                    put(out, at, bytes)?;
                    bytes.len()
                }
            };
            put(out, number * 4, &u32::try_from(length).ok()?.to_le_bytes())?;
            at += length;
        }
        let rest = &planes[planes.len() / width * width..];
        put(out, at, rest)?;
        Some(at + rest.len())
    }

    /// What a sample of `source` tells of each codec that takes time.
    pub fn estimate(&mut self, source: &[u8]) -> [Estimate; 4] {
        let mut sample = std::mem::take(&mut self.sample);
        sample.clear();
        if source.len() <= SAMPLES * SAMPLE {
            sample.extend_from_slice(source);
        } else {
            // Numbers begin where the part begins, whatever their width is.
            let apart = ((source.len() - SAMPLE) / (SAMPLES - 1)).next_multiple_of(4) - 4;
            (0..SAMPLES).for_each(|number| sample.extend_from_slice(&source[number * apart..][..SAMPLE]));
        }
        let mut number = 0;
        let estimates = SAMPLED.map(|codec| {
            let begun = Instant::now();
            let ratio = self.ratio(codec, &sample);
            let took = begun.elapsed().as_secs_f64() / sample.len().max(1) as f64;
            number += 1;
            Estimate { codec, ratio, cost: self.costs.of_sample(number - 1, took) }
        });
        self.sample = sample;
        estimates
    }

    fn ratio(&mut self, codec: Codec, sample: &[u8]) -> f64 {
        let width = match codec {
            Codec::Planes2 => 2,
            Codec::Planes4 => 4,
            Codec::Zstd => return ratio(&mut self.zstd, sample, &mut self.out),
            _ => {
                let length = lz4_flex::block::compress_into(sample, &mut self.out).unwrap_or(sample.len());
                return length as f64 / sample.len().max(1) as f64;
            }
        };
        let Self { planes, huffman, out, .. } = self;
        let planes = &mut planes[..sample.len()];
        split(sample, width, planes);
        let sum: f64 = (0..width).map(|number| ratio(huffman, &planes[plane(width, planes.len(), number)], out)).sum();
        sum / width as f64
    }
}

/// How much a compressor leaves of some bytes.
fn ratio(compressor: &mut Compressor<'static>, bytes: &[u8], out: &mut [u8]) -> f64 {
    let length = compressor.compress_to_buffer(bytes, out).unwrap_or(bytes.len());
    length.min(bytes.len()) as f64 / bytes.len().max(1) as f64
}

/// How fast parts get to the disk.
#[derive(Clone, Copy, Debug)]
pub struct Speed {
    /// How many threads compress and write, each one after the other.
    pub threads: usize,
    /// Bytes a second that the disk takes of all of them.
    pub disk: f64,
    /// Seconds for which a thread waits for each byte that it writes.
    pub wait: f64,
}

/// Chooses how a part is stored.
///
/// A part takes as long as the disk takes for what is left of it, or its share of the time of all threads where that is
/// more. Among codecs that take about as long, the smallest result is chosen. One that the processors cannot feed to the disk
/// is thus left out, however much it saves.
pub fn choose(estimates: &[Estimate], speed: Speed) -> Codec {
    /// What of the least time another may take, in return for a smaller result.
    const LONGER: f64 = 1.1;
    let plain = Estimate { codec: Codec::None, ratio: 1.0, cost: 0.0 };
    let time = |of: &Estimate| {
        let of_threads = (of.cost + of.ratio * speed.wait) / speed.threads.max(1) as f64;
        of_threads.max(of.ratio / speed.disk)
    };
    let worth = estimates.iter().filter(|of| of.ratio * 100.0 <= WORTH as f64);
    let all = || worth.clone().chain([&plain]);
    let least = all().map(time).fold(f64::INFINITY, f64::min);
    let fast = all().filter(|of| time(of) <= least * LONGER);
    fast.min_by(|a, b| a.ratio.total_cmp(&b.ratio)).map_or(Codec::None, |of| of.codec)
}

impl Decoder {
    /// # Errors
    /// There is no memory for it.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self { zstd: had(Decompressor::new)?, planes: Buffer::new(PART)? })
    }

    /// Fills `out` from what is stored. Whether that is right is for the hash to say.
    ///
    /// # Errors
    /// What is stored is no such thing, or of another length.
    pub fn decode(&mut self, codec: Codec, stored: &[u8], out: &mut [u8]) -> Result<(), String> {
        let full = out.len();
        let length = match codec {
            Codec::Fill => Err("no bytes to store".to_owned()),
            Codec::None if stored.len() == full => {
                out.copy_from_slice(stored);
                Ok(full)
            }
            Codec::None => Ok(stored.len()),
            Codec::Lz4 => lz4_flex::block::decompress_into(stored, out).map_err(|error| error.to_string()),
            Codec::Zstd => self.zstd.decompress_to_buffer(stored, out).map_err(|error| error.to_string()),
            Codec::Planes2 => self.decode_planes(2, stored, out),
            Codec::Planes4 => self.decode_planes(4, stored, out),
        }?;
        if length == full { Ok(()) } else { Err(format!("{length} bytes")) }
    }

    fn decode_planes(&mut self, width: usize, stored: &[u8], out: &mut [u8]) -> Result<usize, String> {
        let short = || "planes that end too early".to_owned();
        let planes = self.planes.get_mut(..out.len()).ok_or_else(short)?;
        let (lengths, mut stored) = stored.split_at_checked(width * 4).ok_or_else(short)?;
        for (number, length) in lengths.chunks_exact(4).enumerate() {
            let length = u32::from_le_bytes(length.try_into().map_err(|_| short())?) as usize;
            let (packed, rest) = stored.split_at_checked(length).ok_or_else(short)?;
            let room = &mut planes[plane(width, out.len(), number)];
            if length == room.len() {
                room.copy_from_slice(packed);
            } else {
                let full = self.zstd.decompress_to_buffer(packed, room).map_err(|error| error.to_string())?;
                if full != room.len() {
                    return Err(format!("a plane of {full} bytes"));
                }
            }
            stored = rest;
        }
        let whole = out.len() / width * width;
        if stored.len() != out.len() - whole {
            return Err(short());
        }
        planes[whole..].copy_from_slice(stored);
        join(planes, width, out);
        Ok(out.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(codec: Codec, ratio: f64, gigabytes_a_second: f64) -> Estimate {
        Estimate { codec, ratio, cost: 1e-9 / gigabytes_a_second }
    }

    #[test]
    fn a_codec_is_taken_as_long_as_it_keeps_the_disk_busy() {
        let speed = |threads, disk| Speed { threads, disk, wait: threads as f64 / disk };
        let weights = [of(Codec::Lz4, 1.0, 2.0), of(Codec::Zstd, 0.8, 0.3), of(Codec::Planes2, 0.66, 1.5)];
        assert_eq!(choose(&weights, speed(16, 7e9)), Codec::Planes2, "16 threads feed a disk of 7 GB/s");
        assert_eq!(choose(&weights, speed(2, 7e9)), Codec::None, "two do not");
        assert_eq!(choose(&weights, speed(2, 0.5e9)), Codec::Planes2, "but one of 0.5 GB/s");
        let text = [of(Codec::Lz4, 0.5, 0.7), of(Codec::Zstd, 0.35, 0.4)];
        assert_eq!(choose(&text, speed(2, 0.2e9)), Codec::Zstd);
        assert_eq!(choose(&text, speed(2, 0.6e9)), Codec::Lz4, "the smaller one would be the slower one");
        assert_eq!(choose(&[of(Codec::Lz4, 0.96, 100.0)], speed(16, 1e6)), Codec::None, "hardly anything is saved");
    }

    #[test]
    fn bytes_that_nothing_encoded_are_refused_and_not_believed() {
        let mut decoder = Decoder::new().unwrap();
        let mut out = vec![0; 10_000];
        let mut state = 1_u32;
        for length in 0..600 {
            let stored: Vec<u8> = (0..length)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 29) as u8
                })
                .collect();
            for codec in Codec::ALL {
                assert!(decoder.decode(codec, &stored, &mut out).is_err(), "{codec:?}, {length} bytes");
            }
        }
    }
}
