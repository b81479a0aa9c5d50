//! The kernels that run here. A test's PTX does the same on a real GPU; here only the name and the parameters count.

use crate::boundary::{Phase, phase};
use crate::clock;
use crate::coherence::{self, INCOHERENT};
use crate::context::Context;
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::space::{Kind, Origin, Span, access, granted, owner};
use crate::strict;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

/// Values of the parameters, each widened to 64 bits; a structure counts as its words.
pub type Args = Vec<u64>;

pub struct Kernel {
    pub name: &'static str,
    /// Sizes of the parameters; PTX with others means another kernel.
    pub params: &'static [usize],
    /// It also uses memory whose addresses it finds in memory.
    pub follows: bool,
    /// Stretches of memory it uses: which parameter points to how many bytes.
    touches: fn(&Args) -> Vec<(u64, u64)>,
    run: fn(&Args, &Context) -> Outcome,
}

impl Kernel {
    pub fn named(name: &str, sizes: &[usize]) -> Option<&'static Kernel> {
        KERNELS.iter().find(|kernel| kernel.name == name && kernel.params == sizes)
    }

    /// Address ranges as start and end. A length that no memory can have is left to the run, which faults.
    pub fn ranges(&self, args: &Args) -> Vec<(u64, u64)> {
        (self.touches)(args).into_iter().map(|(start, bytes)| (start, start.saturating_add(bytes))).collect()
    }

    pub fn run(&self, args: &Args, context: &Context) -> Outcome {
        (self.run)(args, context)
    }
}

fn words(count: u64) -> u64 {
    count.saturating_mul(4)
}

fn longs(count: u64) -> u64 {
    count.saturating_mul(8)
}

/// What `digest_u32` makes of sixteen bytes at an index, in units of sixteen bytes.
fn mixed(index: u64, [a, b]: [u64; 2], [k0, k1, k2, k3]: [u64; 4]) -> (u64, u64) {
    let mix = |word: u64, first: u64, second: u64| {
        let word = (word ^ word >> 29).wrapping_mul(first);
        let word = (word ^ word >> 32).wrapping_mul(second);
        word ^ word >> 32
    };
    let place = |offset: u64, step: u64| offset.wrapping_add(index.wrapping_mul(step));
    let x = mix(a ^ place(k0, k1), 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB);
    let y = mix(b ^ x.wrapping_add(place(k2, k3)), 0xFF51_AFD7_ED55_8CCD, 0xC4CE_B9FE_1A85_EC53);
    let z = mix(x.wrapping_add(y.rotate_left(23)), 0xD6E8_FEB8_6659_FD93, 0x9E37_79B9_7F4A_7C15);
    let w = mix(y.wrapping_add(z.rotate_left(37)), 0x9FB2_1C65_1E98_DF25, 0xD134_2543_DE82_EF95);
    (z, w)
}

static KERNELS: &[Kernel] = &[
    // fill_u32(pointer, n, value)
    Kernel {
        name: "fill_u32",
        params: &[8, 8, 4],
        follows: false,
        touches: |a| vec![(a[0], words(a[1]))],
        run: |a, context| {
            let target = Words::new(context, a[0], a[1], true)?;
            each([&target], |_, [at]| at.store(a[2] as u32, Ordering::Relaxed))
        },
    },
    // iota_u32(pointer, n, start): element i becomes start + i
    Kernel {
        name: "iota_u32",
        params: &[8, 8, 4],
        follows: false,
        touches: |a| vec![(a[0], words(a[1]))],
        run: |a, context| {
            let target = Words::new(context, a[0], a[1], true)?;
            each([&target], |index, [at]| at.store((a[2] + index) as u32, Ordering::Relaxed))
        },
    },
    // check_iota_u32(pointer, n, start, bad): adds to *bad the number of elements that are not start + i
    Kernel {
        name: "check_iota_u32",
        params: &[8, 8, 4, 8],
        follows: false,
        touches: |a| vec![(a[0], words(a[1])), (a[3], 8)],
        run: |a, context| {
            let source = Words::new(context, a[0], a[1], false)?;
            let mut bad = 0;
            each([&source], |index, [at]| bad += u64::from(at.load(Ordering::Relaxed) != (a[2] + index) as u32))?;
            add_to(context, a[3], bad)
        },
    },
    // add_u32(dst, a, b, n)
    Kernel { name: "add_u32", params: &[8, 8, 8, 8], follows: false, touches: add_touches, run: add },
    // add_struct(struct { dst, a, b, n })
    Kernel { name: "add_struct", params: &[32], follows: false, touches: add_touches, run: add },
    // copy_u32(dst, src, n)
    Kernel {
        name: "copy_u32",
        params: &[8, 8, 8],
        follows: false,
        touches: |a| a[..2].iter().map(|&pointer| (pointer, words(a[2]))).collect(),
        run: |a, context| {
            let (target, source) = (Words::new(context, a[0], a[2], true)?, Words::new(context, a[1], a[2], false)?);
            each([&target, &source], |_, [to, from]| to.store(from.load(Ordering::Relaxed), Ordering::Relaxed))
        },
    },
    // sum_u32(src, n, out): adds the 64-bit sum to *out
    Kernel {
        name: "sum_u32",
        params: &[8, 8, 8],
        follows: false,
        touches: |a| vec![(a[0], words(a[1])), (a[2], 8)],
        run: |a, context| {
            let source = Words::new(context, a[0], a[1], false)?;
            let mut sum = 0_u64;
            each([&source], |_, [at]| sum += u64::from(at.load(Ordering::Relaxed)))?;
            add_to(context, a[2], sum)
        },
    },
    // digest_u32(src, n, out, slots, k0, k1, k2, k3): two sums for each of so many blocks, which added up are a digest of the words; all in the first
    // here. The sums are those of src/cuda/digest.ptx, bit for bit.
    Kernel {
        name: "digest_u32",
        params: &[8, 8, 8, 8, 8, 8, 8, 8],
        follows: false,
        touches: |a| vec![(a[0], words(a[1])), (a[2], longs(a[3].saturating_mul(2)))],
        run: |a, context| {
            let source = Words::new(context, a[0], a[1], false)?;
            let keys = [a[4], a[5], a[6], a[7]];
            let (mut one, mut other) = (0_u64, 0_u64);
            let mut four = [0_u64; 4];
            each([&source], |index, [at]| {
                four[index as usize % 4] = u64::from(at.load(Ordering::Relaxed));
                if index % 4 == 3 {
                    let (z, w) = mixed(index / 4, [four[0] | four[1] << 32, four[2] | four[3] << 32], keys);
                    (one, other) = (one.wrapping_add(z), other.wrapping_add(w));
                }
            })?;
            let target = Words::new(context, a[2], a[3].saturating_mul(4), true)?;
            let sums = [one as u32, (one >> 32) as u32, other as u32, (other >> 32) as u32];
            each([&target], |index, [at]| at.store(sums.get(index as usize).copied().unwrap_or(0), Ordering::Relaxed))
        },
    },
    // sum_table_u32(table, count, n, out): adds to *out the sum of n words behind each of the pointers in a table
    Kernel {
        name: "sum_table_u32",
        params: &[8, 8, 8, 8],
        follows: true,
        touches: |a| vec![(a[0], longs(a[1])), (a[3], 8)],
        run: |a, context| {
            let mut sum = 0_u64;
            for index in 0..a[1] {
                let source = Words::new(context, load(context, a[0] + 8 * index)?, a[2], false)?;
                each([&source], |_, [at]| sum += u64::from(at.load(Ordering::Relaxed)))?;
            }
            add_to(context, a[3], sum)
        },
    },
    // fill_table_u32(table, count, n, value): writes n words behind each of them
    Kernel {
        name: "fill_table_u32",
        params: &[8, 8, 8, 4],
        follows: true,
        touches: |a| vec![(a[0], longs(a[1]))],
        run: |a, context| {
            for index in 0..a[1] {
                let target = Words::new(context, load(context, a[0] + 8 * index)?, a[2], true)?;
                each([&target], |_, [at]| at.store(a[3] as u32, Ordering::Relaxed))?;
            }
            Ok(())
        },
    },
    // sum_again_u32(src, n, times, out): goes through the memory so many times, and adds all of it to *out each time
    Kernel {
        name: "sum_again_u32",
        params: &[8, 8, 8, 8],
        follows: false,
        touches: |a| vec![(a[0], words(a[1])), (a[3], 8)],
        run: |a, context| {
            let mut sum = 0_u64;
            for time in 0..a[2] {
                // Each pass takes a GPU's time; what it finds is the same.
                let source = Words::new(context, a[0], a[1], false)?;
                if time == 0 {
                    each([&source], |_, [at]| sum += u64::from(at.load(Ordering::Relaxed)))?;
                }
            }
            add_to(context, a[3], sum.wrapping_mul(a[2]))
        },
    },
    // sum_list_u64(head, out, flag): waits for flag if there is one, then goes through a list of { next, value } and
    // adds the values to *out
    Kernel {
        name: "sum_list_u64",
        params: &[8, 8, 8],
        follows: true,
        touches: |a| vec![(a[0], 16), (a[1], 8), (a[2], 4)],
        run: |a, context| {
            if a[2] != 0 {
                wait_for(&Words::new(context, a[2], 1, false)?, context)?;
            }
            let (mut node, mut sum) = (a[0], 0_u64);
            while node != 0 && phase() == Phase::Ready {
                sum = sum.wrapping_add(load(context, node + 8)?);
                node = load(context, node)?;
            }
            add_to(context, a[1], sum)
        },
    },
    // add_list_u64(head, value): adds to the value of each node of such a list
    Kernel {
        name: "add_list_u64",
        params: &[8, 8],
        follows: true,
        touches: |a| vec![(a[0], 16)],
        run: |a, context| {
            let mut node = a[0];
            while node != 0 && phase() == Phase::Ready {
                add_to(context, node + 8, a[1])?;
                node = load(context, node)?;
            }
            Ok(())
        },
    },
    // wait_flag(flag): spins until the word at flag is not 0
    Kernel {
        name: "wait_flag",
        params: &[8],
        follows: false,
        touches: |a| vec![(a[0], 4)],
        run: |a, context| {
            let flag = Words::new(context, a[0], 1, false)?;
            wait_for(&flag, context)
        },
    },
    // spin_flag(flag, ns): writes 1 behind the flag and spins until the flag is not 0, so many nanoseconds at most
    Kernel {
        name: "spin_flag",
        params: &[8, 8],
        follows: false,
        touches: |a| vec![(a[0], 8)],
        run: |a, context| {
            let flag = Words::new(context, a[0], 2, true)?;
            until(&flag, a[1], context, || Ok(()))
        },
    },
    // check_until_u32(pointer, n, start, flag, ns, bad): check_iota_u32 again and again until the flag is set, as spin_flag
    Kernel {
        name: "check_until_u32",
        params: &[8, 8, 4, 8, 8, 8],
        follows: false,
        touches: |a| vec![(a[0], words(a[1])), (a[3], 8), (a[5], 8)],
        run: |a, context| {
            let (source, flag) = (Words::new(context, a[0], a[1], false)?, Words::new(context, a[3], 2, true)?);
            until(&flag, a[4], context, || {
                let mut bad = 0;
                each([&source], |index, [at]| bad += u64::from(at.load(Ordering::Relaxed) != (a[2] + index) as u32))?;
                add_to(context, a[5], bad)
            })
        },
    },
    // check_all_u32(pointer, n, stride, value, bad): adds to *bad how many of every stride-th word below n are not
    // the value; on a real GPU every block reads all of them
    Kernel {
        name: "check_all_u32",
        params: &[8, 8, 8, 4, 8],
        follows: false,
        touches: |a| vec![(a[0], words(a[1])), (a[4], 8)],
        run: |a, context| {
            let source = Words::new(context, a[0], a[1], false)?;
            let (mut bad, stride) = (0, a[2].max(1));
            each([&source], |index, [at]| {
                bad += u64::from(index.is_multiple_of(stride) && at.load(Ordering::Relaxed) != a[3] as u32);
            })?;
            add_to(context, a[4], bad)
        },
    },
    // add_each_u32(pointer, n, times, flag): waits for flag if there is one, as spin_flag without an end, and adds `times` to each
    // word atomically. Over a link without native atomics that is a read and a write, and what others add in between is lost.
    Kernel {
        name: "add_each_u32",
        params: &[8, 8, 4, 8],
        follows: false,
        touches: |a| vec![(a[0], words(a[1])), (a[3], 8)],
        run: |a, context| {
            let target = Words::new(context, a[0], a[1], true)?;
            let held = || match a[3] {
                0 => Ok(()),
                flag => until(&Words::new(context, flag, 2, true)?, u64::MAX, context, || Ok(())),
            };
            if target.has_atomics(context) {
                held()?;
                return each([&target], |_, [at]| {
                    at.fetch_add(a[2] as u32, Ordering::Relaxed);
                });
            }
            let mut found = Vec::new();
            each([&target], |_, [at]| found.push(at.load(Ordering::Relaxed)))?;
            held()?;
            each([&target], |index, [at]| {
                at.store(found[index as usize].wrapping_add(a[2] as u32), Ordering::Relaxed);
            })
        },
    },
];

/// Says in the word behind the flag that it runs, and does `round` until the flag is not 0 or so many nanoseconds are over.
fn until(flag: &Words, nanoseconds: u64, context: &Context, mut round: impl FnMut() -> Outcome) -> Outcome {
    let (mut raised, start) = (false, Instant::now());
    each([flag], |index, [at]| {
        if index == 1 {
            at.store(1, Ordering::Release);
        }
    })?;
    loop {
        round()?;
        each([flag], |index, [at]| raised |= index == 0 && at.load(Ordering::Acquire) != 0)?;
        let over = start.elapsed().as_nanos() >= u128::from(nanoseconds);
        if raised || over || phase() != Phase::Ready || context.check_fault().is_err() {
            break;
        }
        std::thread::yield_now();
    }
    clock::spend(start.elapsed());
    Ok(())
}

/// Spins until the word is not 0.
fn wait_for(flag: &Words, context: &Context) -> Outcome {
    let (mut raised, start) = (false, Instant::now());
    while !raised && phase() == Phase::Ready && context.check_fault().is_ok() {
        each([flag], |_, [at]| raised = at.load(Ordering::Acquire) != 0)?;
        std::thread::yield_now();
    }
    clock::spend(start.elapsed());
    Ok(())
}

fn add_touches(a: &Args) -> Vec<(u64, u64)> {
    a[..3].iter().map(|&pointer| (pointer, words(a[3]))).collect()
}

fn add(a: &Args, context: &Context) -> Outcome {
    let target = Words::new(context, a[0], a[3], true)?;
    let (left, right) = (Words::new(context, a[1], a[3], false)?, Words::new(context, a[2], a[3], false)?);
    each([&target, &left, &right], |_, [to, x, y]| {
        to.store(x.load(Ordering::Relaxed).wrapping_add(y.load(Ordering::Relaxed)), Ordering::Relaxed);
    })
}

/// Memory of a kernel as 32-bit words. Atomics, because other streams, the program and other GPUs may use it meanwhile.
struct Words {
    spans: Vec<Span>,
    count: u64,
    uses: coherence::Guard,
}

impl Words {
    /// As the hardware sees it: ILLEGAL_ADDRESS where nothing is mapped or a peer's memory was not opened, LAUNCH_FAILED
    /// where a mapping does not grant this device access.
    fn new(context: &Context, address: u64, count: u64, write: bool) -> Outcome<Self> {
        let bytes = count.checked_mul(4).ok_or(Code::ILLEGAL_ADDRESS)?;
        if !address.is_multiple_of(4) {
            return Err(Code::ILLEGAL_ADDRESS);
        }
        let spans = driver().space.spans(address, bytes, false).map_err(|_| Code::ILLEGAL_ADDRESS)?;
        for span in &spans {
            permitted(context, span, write)?;
        }
        access(&spans, context.device)?;
        spans.iter().filter_map(|span| span.region.as_ref()).for_each(strict::used_by_kernel);
        clock::kernel(context.device, &spans, write);
        let uses = coherence::open(&spans, write);
        Ok(Self { spans, count, uses })
    }
}

impl Words {
    /// Whether atomics of this device are whole there whoever else works on it: at home, and where the link has native ones, that to the
    /// host included.
    fn has_atomics(&self, context: &Context) -> bool {
        let driver = driver();
        let mut regions = self.spans.iter().filter_map(|span| span.region.as_ref());
        let native =
            |at: usize| driver.settings.links.between(driver.gpus[context.device].index, driver.gpus[at].index);
        regions.all(|region| match owner(&region.kind) {
            Some(at) => at == context.device || native(at).is_nvlink(),
            None => driver.settings.host_atomics || matches!(region.kind, Kind::Managed { .. }),
        })
    }
}

fn permitted(context: &Context, span: &Span, write: bool) -> Outcome {
    if !granted(span, context.device, write) {
        return Err(Code::LAUNCH_FAILED);
    }
    let reachable = match span.region.as_ref().map(|region| &region.kind) {
        Some(kind @ Kind::Plain { origin, .. }) => owner(kind).is_none_or(|device| match origin {
            Origin::Pool(pool) => device == context.device || crate::mempool::grants(*pool, context.device),
            // Opening what another process shares enables peer access where it is needed.
            Origin::Ipc | Origin::Shared => true,
            Origin::Graph(devices) => devices & 1 << context.device != 0,
            Origin::Alloc => context.reaches(device),
        }),
        _ => true,
    };
    if reachable { Ok(()) } else { Err(Code::ILLEGAL_ADDRESS) }
}

/// Calls `body` with each index and the words there of all operands, across the borders of their mappings.
fn each<const N: usize>(operands: [&Words; N], mut body: impl FnMut(u64, [&AtomicU32; N])) -> Outcome {
    let count = operands.iter().map(|words| words.count).min().unwrap_or(0);
    let mut at = [(0, 0); N];
    let mut index = 0;
    while index < count {
        let mut run = count - index;
        for (words, (span, offset)) in operands.iter().zip(&mut at) {
            while words.spans[*span].bytes - *offset < 4 {
                (*span, *offset) = (*span + 1, 0);
            }
            run = run.min(((words.spans[*span].bytes - *offset) / 4) as u64);
        }
        let base: [usize; N] =
            std::array::from_fn(|operand| operands[operand].spans[at[operand].0].alias + at[operand].1);
        let incoherent = [const { AtomicU32::new(INCOHERENT) }; N];
        let stale = operands.map(|words| words.uses.is_stale());
        for step in 0..run as usize {
            let words = std::array::from_fn(|operand| match stale[operand] {
                true => &incoherent[operand],
                // SAFETY: within spans whose memory the operands hold, 4-byte aligned as device addresses and borders are.
                false => unsafe { AtomicU32::from_ptr((base[operand] + step * 4) as *mut u32) },
            });
            body(index + step as u64, words);
        }
        for (_, offset) in &mut at {
            *offset += run as usize * 4;
        }
        index += run;
    }
    Ok(())
}

/// The 64-bit word at `address`.
fn long(context: &Context, address: u64, write: bool) -> Outcome<(Words, usize)> {
    let words = Words::new(context, address, 2, write)?;
    let whole = words.spans.first().filter(|span| span.bytes == 8 && address.is_multiple_of(8));
    let alias = whole.ok_or(Code::ILLEGAL_ADDRESS)?.alias;
    Ok((words, alias))
}

fn load(context: &Context, address: u64) -> Outcome<u64> {
    let (words, alias) = long(context, address, false)?;
    if words.uses.is_stale() {
        return Ok(u64::from(INCOHERENT));
    }
    // SAFETY: eight aligned bytes of a span that is held.
    Ok(unsafe { AtomicU64::from_ptr(alias as *mut u64) }.load(Ordering::Acquire))
}

/// Adds to the 64-bit counter at `address`.
fn add_to(context: &Context, address: u64, value: u64) -> Outcome {
    let (_words, alias) = long(context, address, true)?;
    // SAFETY: eight aligned bytes of a span that is held.
    unsafe { AtomicU64::from_ptr(alias as *mut u64) }.fetch_add(value, Ordering::Relaxed);
    Ok(())
}
