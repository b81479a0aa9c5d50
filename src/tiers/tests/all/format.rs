//! Traces as text, so that recorded ones can be added.
//!
//! One line each; `#` begins a comment. Numbers of bytes and nanoseconds are decimal, functions and addresses hexadecimal:
//! ```text
//! near 17179869184                     bytes of room on the home GPU
//! begin 7f0000000000 1073741824        a block
//! end 7f0000000000
//! launch 1a2b 184000 1.0 7f0000000000+1048576 7f0000100000+4096
//!                                      function, nanoseconds with all of it near, reuse, ranges (address+bytes, *reuse where it is its own)
//! copy 7f0000000000+1048576            a copy or a fill of a range
//! idle                                 the program has waited for the device
//! settled                              what follows counts as settled
//! ```
//! A recorder knows no ranges but the words of the parameters and, of each, how far it is to the next; nanoseconds are those measured
//! with everything near. Reuse is 1 where it was not measured.

use crate::machine::{Op, Step, Trace};
use gpupool_tiers::{Links, Range};

pub fn read(name: &str, text: &str, links: Links) -> Result<Trace, String> {
    let mut trace = Trace { name: name.to_owned(), near: 0, links, ops: Vec::new(), settled: 0 };
    let mut blocks: Vec<Range> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let words: Vec<&str> = line.split('#').next().unwrap_or_default().split_whitespace().collect();
        let wrong = || format!("{name}, line {}: {line}", number + 1);
        let decimal = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok()).ok_or_else(wrong);
        let real = |at: usize| words.get(at).and_then(|word| word.parse::<f64>().ok()).ok_or_else(wrong);
        let hex = |word: &str| u64::from_str_radix(word, 16).map_err(|_| wrong());
        match words.first().copied() {
            None => {}
            Some("near") => trace.near = decimal(1)?,
            Some("begin") => {
                let block = Range::of(hex(words.get(1).ok_or_else(wrong)?)?, decimal(2)?);
                blocks.push(block);
                trace.ops.push(Op::Begin(block));
            }
            Some("end") => {
                let start = hex(words.get(1).ok_or_else(wrong)?)?;
                let at = blocks.iter().position(|block| block.start == start).ok_or_else(wrong)?;
                trace.ops.push(Op::End(blocks.swap_remove(at)));
            }
            Some("launch") => {
                let function = hex(words.get(1).ok_or_else(wrong)?)?;
                let (compute_ns, reuse) = (real(2)?, real(3)?);
                let ranges = words[4..].iter().map(|word| {
                    let (place, bytes) = word.split_once('+').ok_or_else(wrong)?;
                    let (bytes, own) = bytes.split_once('*').map_or((bytes, None), |(bytes, own)| (bytes, Some(own)));
                    let own = own.map_or(Ok(reuse), str::parse).map_err(|_| wrong())?;
                    let (named, start) = place.split_once('>').unwrap_or((place, place));
                    Ok(((hex(named)?, own), Range::of(hex(start)?, bytes.parse().map_err(|_| wrong())?)))
                });
                let (named, ranges): (Vec<(u64, f64)>, Vec<Range>) =
                    ranges.collect::<Result<Vec<_>, String>>()?.into_iter().unzip();
                let (mut named, mut reuses): (Vec<u64>, Vec<f64>) = named.into_iter().unzip();
                if reuses.iter().all(|own| *own == reuse) {
                    reuses.clear();
                }
                if named.iter().zip(&ranges).all(|(named, range)| *named == range.start) {
                    named.clear();
                }
                // What reading it near takes is added by the machine.
                let near: f64 = ranges.iter().map(|range| range.bytes() as f64 / trace.links.near).sum();
                let compute_ns = (compute_ns - near).max(0.0);
                trace.ops.push(Op::Launch(Step { function, ranges, named, compute_ns, reuse, reuses }));
            }
            Some("copy") => {
                let (start, bytes) = words.get(1).and_then(|word| word.split_once('+')).ok_or_else(wrong)?;
                trace.ops.push(Op::Copy(Range::of(hex(start)?, bytes.parse().map_err(|_| wrong())?)));
            }
            Some("idle") => trace.ops.push(Op::Idle),
            Some("settled") => trace.settled = trace.ops.len(),
            Some(_) => return Err(wrong()),
        }
    }
    Ok(trace)
}

pub fn write(trace: &Trace) -> String {
    let mut text = format!("near {}\n", trace.near);
    for (number, op) in trace.ops.iter().enumerate() {
        if number == trace.settled {
            text += "settled\n";
        }
        text += &match op {
            Op::Begin(block) => format!("begin {:x} {}\n", block.start, block.bytes()),
            Op::End(block) => format!("end {:x}\n", block.start),
            Op::Launch(step) => {
                let near: f64 = step.ranges.iter().map(|range| range.bytes() as f64 / trace.links.near).sum();
                let places = step.words().into_iter().zip(&step.ranges).enumerate().map(|(at, (named, range))| {
                    let start = if named == range.start { String::new() } else { format!(">{:x}", range.start) };
                    let own = step.reuses.get(at).map(|own| format!("*{own}")).unwrap_or_default();
                    format!("{named:x}{start}+{}{own}", range.bytes())
                });
                let ranges: Vec<String> = places.collect();
                let (function, reuse) = (step.function, step.reuse);
                format!("launch {function:x} {:.0} {reuse} {}\n", step.compute_ns + near, ranges.join(" "))
            }
            Op::Copy(range) => format!("copy {:x}+{}\n", range.start, range.bytes()),
            Op::Idle => "idle\n".to_owned(),
        };
    }
    text
}

#[test]
fn a_trace_is_read_as_it_was_written() {
    let trace = crate::traces::experts(3, 12.0, "experts");
    let again = read("experts", &write(&trace), trace.links.clone()).unwrap();
    assert_eq!(write(&again), write(&trace));
    assert_eq!((again.ops.len(), again.settled, again.near), (trace.ops.len(), trace.settled, trace.near));
    let cost = |trace: &_| crate::policies::run(trace, &mut crate::policies::Never).total;
    assert!((cost(&again) - cost(&trace)).abs() < 1e-4 * cost(&trace));
}

#[test]
fn a_line_that_cannot_be_read_is_named() {
    let links = crate::traces::peer();
    assert_eq!(read("t", "near 5\nlaunch 1 2\n", links.clone()).unwrap_err(), "t, line 2: launch 1 2");
    assert_eq!(read("t", "near x", links.clone()).unwrap_err(), "t, line 1: near x");
    assert_eq!(read("t", "end 7f00", links).unwrap_err(), "t, line 1: end 7f00");
}
