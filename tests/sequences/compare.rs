//! Plays a case bare and under the shim, and says where the two part.

use crate::intended::Service;
use crate::play::Case;
use harness::{Output, Run};

/// A way to run under the shim. The bare run has room for everything; a small machine makes the pool use every place.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    pub name: &'static str,
    pub service: Service,
    gpus: &'static str,
    settings: &'static [(&'static str, &'static str)],
}

impl Variant {
    /// As `sequences variants` prints it: name, service, `NAME=VALUE` for each setting.
    pub fn line(&self) -> String {
        let settings = self.settings.iter().map(|(name, value)| format!(" {name}={value}"));
        format!("{} {}{}", self.name, self.service.name(), settings.collect::<String>())
    }
}

/// Every way. A seed is played in one of them, so that as many seeds as there are variants cover all.
pub const VARIANTS: &[Variant] = &[
    Variant { name: "pool", service: Service::Pool, gpus: "2x8GiB", settings: &[] },
    Variant {
        name: "small",
        service: Service::Pool,
        gpus: "2x256MiB",
        settings: &[("GPUPOOL_MIN_SIZE", "1"), ("GPUPOOL_LIMIT", "48MiB"), ("GPUPOOL_HOST_LIMIT", "4GiB")],
    },
    Variant {
        name: "lazy",
        service: Service::Pool,
        gpus: "2x8GiB",
        settings: &[("GPUPOOL_FREE", "lazy"), ("GPUPOOL_MIN_SIZE", "1")],
    },
    Variant {
        name: "spill",
        service: Service::Driver,
        gpus: "2x256MiB",
        settings: &[("GPUPOOL_MODE", "spill"), ("GPUPOOL_HOST_LIMIT", "4GiB")],
    },
    Variant {
        name: "interleave",
        service: Service::Pool,
        gpus: "2x1GiB",
        settings: &[("GPUPOOL_PLACEMENT", "interleave"), ("GPUPOOL_MIN_SIZE", "64KiB"), ("GPUPOOL_FREE", "lazy")],
    },
    Variant {
        name: "managed",
        service: Service::Managed,
        gpus: "2x8GiB",
        settings: &[("GPUPOOL_MODE", "managed"), ("GPUPOOL_MIN_SIZE", "1")],
    },
    Variant {
        name: "stress",
        service: Service::Pool,
        gpus: "2x1GiB",
        settings: &[
            ("GPUPOOL_MIN_SIZE", "64KiB"),
            ("GPUPOOL_LIMIT", "0:96MiB"),
            ("GPUPOOL_HOST_LIMIT", "4GiB"),
            ("GPUPOOL_MOVE", "stress"),
        ],
    },
    Variant {
        name: "trace",
        service: Service::Driver,
        gpus: "2x8GiB",
        settings: &[("GPUPOOL_MODE", "trace"), ("GPUPOOL_LOG", "error")],
    },
];

/// Not one of them: a fault of the driver that only the shim's run meets, to see that a difference is found.
pub const PLANTED: Variant = Variant {
    name: "planted",
    service: Service::Pool,
    gpus: "2x8GiB",
    settings: &[("SIMCUDA_FAULT", "cuMemcpyDtoH_v2:40=1")],
};

fn run(case: &Case, gpus: &str) -> Run {
    let exe = std::env::current_exe().unwrap_or_else(|error| panic!("own path: {error}"));
    // The last of a name wins, so a person's own setting for the machine does not get in.
    Run::command(exe).arg("play").arg(case.arguments()).sim(gpus).env("SIMCUDA_HOST", "8GiB")
}

/// What was found, if anything: the first lines that differ, and both runs.
pub struct Difference {
    line: usize,
    bare: String,
    shim: String,
    round: String,
    command: String,
    stderr: String,
}

/// Plays a case both ways.
pub fn compare(case: &Case, variant: &Variant) -> Option<Difference> {
    let bare = ended(run(case, "2x8GiB"));
    let shim = variant.settings.iter().fold(run(case, variant.gpus).shim(), |run, (name, value)| run.env(name, value));
    let shim = ended(shim.env("GPUPOOL_SUMMARY", "off"));
    let (one, other): (Vec<&str>, Vec<&str>) = (bare.0.lines().collect(), shim.0.lines().collect());
    let is_wrong = |line: &str| line.contains("WRONG") || line.contains("expected 0") || line.starts_with("panic");
    let line = (0..one.len().max(other.len())).find(|&at| one.get(at) != other.get(at) || is_wrong(one[at]));
    // A transcript that ends early ends in the same way on both sides only if the status says so.
    let line = line.or((bare.1 != shim.1).then_some(one.len()))?;
    let round = one[..line.min(one.len())].iter().rfind(|line| line.starts_with("round") || line.starts_with("second"));
    let show =
        |lines: &[&str], status: &str| lines.get(line).map_or_else(|| format!("end, {status}"), |it| (*it).to_owned());
    Some(Difference {
        line: line + 1,
        bare: show(&one, &bare.1),
        shim: show(&other, &shim.1),
        round: round.copied().unwrap_or_default().to_owned(),
        command: shim.2,
        stderr: shim.3,
    })
}

/// Transcript, status, command and stderr; a run that hangs is one that was ended.
fn ended(run: Run) -> (String, String, String, String) {
    let told: Result<Output, _> = std::panic::catch_unwind(|| run.go());
    match told {
        Ok(output) => (output.stdout, output.status.to_string(), output.description, output.stderr),
        Err(why) => {
            let why = why.downcast_ref::<String>().cloned().unwrap_or_default();
            let transcript: String = why.split("--- stdout\n").skip(1).collect();
            (transcript, "did not end".to_owned(), why.lines().next().unwrap_or_default().to_owned(), String::new())
        }
    }
}

/// The fewest rounds, and then threads and processes, that still show a difference; and that difference.
pub fn shrink(case: Case, variant: &Variant, found: Difference) -> (Case, Difference) {
    let (mut case, mut found) = (case, found);
    let (mut passes, mut fails) = (0, case.rounds);
    while fails - passes > 1 {
        let rounds = (passes + fails) / 2;
        let shorter = Case { rounds, ..case };
        match compare(&shorter, variant) {
            Some(difference) => (case, found, fails) = (shorter, difference, rounds),
            None => passes = rounds,
        }
    }
    for smaller in [Case { processes: 1, ..case }, Case { threads: 2, ..case }, Case { threads: 1, ..case }] {
        let smaller = Case { processes: smaller.processes.min(case.processes), ..smaller };
        if smaller != case
            && let Some(difference) = compare(&smaller, variant)
        {
            (case, found) = (smaller, difference);
        }
    }
    (case, found)
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Difference { line, bare, shim, round, command, stderr } = self;
        write!(f, "line {line}, in {round}\n  bare {bare}\n  shim {shim}\n$ {command}\n{stderr}")
    }
}
