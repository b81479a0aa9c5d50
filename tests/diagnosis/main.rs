//! What is said about contexts, modules, limits, the environment, pinned and far memory: each classic mistake is a small program run by
//! `gpupool run` on four simulated GPUs, and beside each stands a program that nearly makes the mistake, about which
//! nothing may be said. The texts that people read are kept in `expected`.

mod case;
mod context_events;
mod contexts;
mod denial;
mod environment;
mod far;
mod forks;
mod lent;
mod modules;
mod normal;
mod pinned;
mod ranks;
mod suspended;

use gpupool_events::FINDINGS;
use std::fs;

#[test]
fn every_finding_has_a_text_that_a_program_made() {
    let files = fs::read_dir(case::expected_folder()).expect("the folder is part of the repository");
    let texts = files.map(|file| fs::read_to_string(file.expect("a file").path()).expect("UTF-8"));
    let said: String = texts.collect();
    for finding in FINDINGS {
        assert!(said.contains(&format!("{} {}\n", finding.code, finding.title)), "{} is in no report", finding.code);
    }
}
