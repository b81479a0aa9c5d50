//! What reading 20 Python frames costs, on every CPython at hand. Fails where it is over its budget.

#[allow(dead_code, reason = "embedding is for the tests")]
mod pythons;

use std::path::Path;
use std::process::{Command, ExitCode};

/// Nanoseconds for 20 frames: captured, and captured with text.
const BUDGET: (f64, f64) = (100.0, 3000.0);

fn main() -> ExitCode {
    let client = Path::new(env!("CARGO_MANIFEST_DIR")).join("clients/bench.py");
    let mut over = false;
    eprintln!("{:>10} {:>8} {:>12} {:>12}", "CPython", "frames", "captured/ns", "with text/ns");
    for python in pythons::all() {
        for frames in [5, 20, 64] {
            let mut command = Command::new(&python.path);
            command.arg("-B").arg(&client).arg(frames.to_string()).env("FRAMES_PROBE", pythons::probe());
            let told = match command.output() {
                Ok(told) => told,
                Err(error) => panic!("{} does not start: {error}", python.path.display()),
            };
            let out = String::from_utf8_lossy(&told.stdout);
            let numbers: Vec<f64> = out.split_whitespace().map_while(|number| number.parse().ok()).collect();
            let [raw, text] = numbers[..] else {
                panic!("CPython {}: {out}{}", python.version, String::from_utf8_lossy(&told.stderr));
            };
            eprintln!("{:>10} {frames:>8} {raw:>12} {text:>12}", python.version);
            over |= frames == 20 && (raw > BUDGET.0 || text > BUDGET.1);
        }
    }
    if over {
        eprintln!("over the budget of {} ns captured, {} ns with text, for 20 frames", BUDGET.0, BUDGET.1);
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
