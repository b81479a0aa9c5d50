//! Random sequences of every kind of allocation, free, copy and question, from several threads and two processes, on the
//! simulated driver: bare and under the shim each call answers the same and each byte is the same, but for what
//! `intended.rs` lists.
//!
//! ```text
//! sequences [--seeds=FIRST..END] [--seconds=N] [--rounds=N] [--threads=N] [--processes=1|2] [--variant=NAME]
//! sequences variants
//! sequences play --seed=N [--rounds=N] [--threads=N] [--processes=1|2] [--service=NAME]
//! ```
//! Without `--seeds` it goes on from seed 0, for so many seconds or 60. A seed that fails is played again with fewer
//! rounds, threads and processes, and the shortest case that fails is printed with the command that plays it. Exit code 1:
//! something differed.
//!
//! `variants` prints the ways to run, a line each: name, service, settings. `play` plays one case on the driver that is there, which may be a real
//! one, and prints its transcript: `scripts/gpu-check.sh --only sequences` compares those of a GPU.

mod calls;
mod compare;
mod driver;
mod intended;
mod kernels;
mod peer;
mod play;
mod world;

use compare::{PLANTED, VARIANTS, Variant, compare, shrink};
use intended::Service;
use play::Case;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// What the command line says.
struct Arguments {
    case: Case,
    seeds: Option<(u64, u64)>,
    seconds: u64,
    variant: Option<String>,
}

fn main() -> ExitCode {
    let words: Vec<String> =
        std::env::args().skip(1).flat_map(|word| word.split(' ').map(str::to_owned).collect::<Vec<_>>()).collect();
    let (role, options) = match words.first().map(String::as_str) {
        Some(role @ ("play" | "peer" | "variants")) => (role, &words[1..]),
        _ => ("compare", &words[..]),
    };
    let Some(arguments) = read(options) else {
        eprintln!("sequences: cannot use {words:?}; see the head of tests/sequences/main.rs");
        return ExitCode::from(2);
    };
    match role {
        "play" => play::play(arguments.case, 0),
        "peer" => play::play(arguments.case, 1),
        "variants" => VARIANTS.iter().for_each(|variant| println!("{}", variant.line())),
        _ => return compare_all(&arguments),
    }
    ExitCode::SUCCESS
}

fn read(options: &[String]) -> Option<Arguments> {
    let case = Case { seed: 0, rounds: 60, threads: 4, processes: 2, service: Service::Pool };
    let mut read = Arguments { case, seeds: None, seconds: 60, variant: None };
    for option in options {
        let (name, value) = option.split_once('=')?;
        match name {
            "--seed" => read.case.seed = value.parse().ok()?,
            "--rounds" => read.case.rounds = value.parse().ok()?,
            "--threads" => read.case.threads = value.parse().ok().filter(|threads| *threads > 0)?,
            "--processes" => read.case.processes = value.parse().ok()?,
            "--service" => read.case.service = Service::ALL.iter().find(|(name, _)| *name == value)?.1,
            "--seconds" => read.seconds = value.parse().ok()?,
            "--variant" => read.variant = Some(value.to_owned()),
            "--seeds" => {
                let (first, end) = value.split_once("..")?;
                read.seeds = Some((first.parse().ok()?, end.parse().ok()?));
            }
            _ => return None,
        }
    }
    Some(read)
}

fn compare_all(arguments: &Arguments) -> ExitCode {
    // The panic of a run that hangs is told with the difference.
    std::panic::set_hook(Box::new(|_| {}));
    let begun = Instant::now();
    let (first, end) = arguments.seeds.unwrap_or((0, u64::MAX));
    let (mut played, mut failed) = (0, 0);
    for seed in first..end {
        if arguments.seeds.is_none() && begun.elapsed() >= Duration::from_secs(arguments.seconds) {
            break;
        }
        let is_chosen = |variant: &&Variant| Some(variant.name) == arguments.variant.as_deref();
        let chosen = VARIANTS.iter().chain([&PLANTED]).find(is_chosen);
        let variant = chosen.unwrap_or(&VARIANTS[seed as usize % VARIANTS.len()]);
        let case = Case { seed, service: variant.service, ..arguments.case };
        played += 1;
        if let Some(difference) = compare(&case, variant) {
            failed += 1;
            let (case, difference) = shrink(case, variant, difference);
            let Case { rounds, threads, processes, .. } = case;
            let name = variant.name;
            println!("seed {seed} differs in variant {name}: {difference}");
            println!(
                "again: sequences --seeds={seed}..{} --variant={name} --rounds={rounds} --threads={threads} --processes={processes}",
                seed + 1
            );
        }
    }
    println!("{played} sequences, {failed} with a difference");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
