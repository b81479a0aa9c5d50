//! Each call of the driver that a suspension and its end are made of fails once.

use super::{MIB, gpupool, page};
use harness::{Run, Running, eventually};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// What the command says of the program: how much moved and how much did not, or why nothing did.
fn told(program: &Running, arguments: &str) -> Result<(u64, u64), String> {
    let ended = gpupool(program, &format!("{arguments} --json {}", program.pid()));
    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
    let all: Value = serde_json::from_str(&text)
        .unwrap_or_else(|_| panic!("{arguments}: {text}{}", String::from_utf8_lossy(&ended.stderr)));
    match all[0]["error"].as_str() {
        Some(why) => Err(why.to_owned()),
        None => {
            let [moved, stayed] = ["bytes", "stayed_bytes"].map(|key| all[0][key].as_u64());
            Ok((moved.unwrap_or(0), stayed.unwrap_or(0)))
        }
    }
}

/// The program's memory, and what each part of it counts up from.
struct Memory(Vec<(u64, u64, u64)>);

impl Memory {
    /// A block of its own, one on slabs that it shares, and what the program makes itself.
    fn of(program: &mut Running) -> Self {
        let block = |(kib, seed): (u64, u64)| (program.ask(&format!("block {kib} {seed}")).parse().unwrap(), kib, seed);
        let mut all = [(6144, 5000), (40, 7000)].map(block).to_vec();
        all.push((program.ask("own 2048 9000").parse().unwrap(), 2048, 9000));
        Self(all)
    }

    #[track_caller]
    fn is_right(&self, program: &mut Running, what: &str) {
        for (address, kib, seed) in &self.0 {
            assert_eq!(program.ask(&format!("look {address} {kib}")), format!("{seed} 0"), "{what}");
        }
    }
}

/// Of a way there and back all calls, from the first to the last one.
#[track_caller]
fn each_call_fails(to: &str, gpus: &str, limit: &str, folder: Option<&Path>) {
    let run = Run::program("checkpointed").sim(gpus).env("SIMCUDA_STRICT", "on").env("GPUPOOL_RESERVE", "16MiB");
    let run = run.env("GPUPOOL_HOST_LIMIT", "1GiB").env("GPUPOOL_LIMIT", limit).report().log().shim();
    let mut program = run.start(None);
    let memory = Memory::of(&mut program);
    let mut whys = BTreeSet::new();
    let (mut refused, mut stuck, mut count) = (0, 0, 0);
    for number in 1.. {
        let code = [999, 2, 1][number % 3];
        let what = format!("suspend{to}, call {number} answers {code}");
        let before: usize = program.ask(&format!("fault {number} {code}")).parse().unwrap();
        match told(&program, &format!("suspend --wait 60s{to}")) {
            Ok((moved, stayed)) => {
                assert!(moved + stayed >= 6 * MIB && moved > 0, "{what}: {moved} left, {stayed} did not");
                let mut back = told(&program, "resume");
                // What it had is there still, and nothing fails any more.
                program.ask("fault 0 0");
                if let Err(why) = back {
                    stuck += 1;
                    whys.insert(why);
                    back = told(&program, "resume");
                }
                // What found no way back to its GPU has one now, and comes by itself as well.
                if back.unwrap_or_else(|why| panic!("{what}: {why}")).1 > 0 {
                    let _ = told(&program, "resume");
                }
            }
            Err(why) => {
                refused += 1;
                whys.insert(why);
            }
        }
        let calls = program.ask("fault 0 0").parse::<usize>().unwrap() - before;
        memory.is_right(&mut program, &what);
        // Whether it came back or never left, the program has it where it had it.
        eventually(&format!("all of it on its GPU ({what})"), || {
            let page = page(&program)?;
            let mut places = page.levels.places.rows.iter();
            places.all(|place| !place.on_host && place.number == 0 || place.used == 0).then_some(())
        });
        if let Some(folder) = folder {
            let left = std::fs::read_dir(folder).unwrap().count();
            assert_eq!(left, 0, "{what}: files are left");
        }
        if calls < number {
            count = number;
            break;
        }
    }
    println!(
        "suspend{to}: {count} calls, {refused} times it did not leave, {stuck} times not come back at once: {whys:#?}"
    );
    assert!(count > 40 && !whys.is_empty(), "{count} calls: {whys:?}");
    assert_eq!(program.ask("end"), "ended");
    let (status, folder) = program.end();
    assert!(status.success(), "{status}");
    let report: Value = serde_json::from_str(&std::fs::read_to_string(folder.path().join("report")).unwrap()).unwrap();
    assert_eq!(report["violations"], serde_json::json!([]), "{report}");
}

#[test]
fn whichever_call_of_the_driver_fails_on_the_way_to_the_host_or_back_nothing_is_lost() {
    each_call_fails(" --to host", "1x1GiB", "0:1GiB", None);
}

#[test]
fn whichever_call_of_the_driver_fails_on_the_way_to_peers_or_back_nothing_is_lost() {
    each_call_fails(" --to peers", "2x1GiB", "1:1GiB", None);
}

/// What goes to the host fails where some is on a peer already.
#[test]
fn whichever_call_of_the_driver_fails_on_the_way_to_a_peer_that_has_room_for_some_nothing_is_lost() {
    each_call_fails("", "2x1GiB", "1:4MiB", None);
}

#[test]
fn whichever_call_of_the_driver_fails_on_the_way_to_a_disk_or_back_nothing_is_lost() {
    let around = tempfile::tempdir().unwrap();
    let to = around.path().join("to");
    std::fs::create_dir(&to).unwrap();
    each_call_fails(&format!(" --to {}", to.display()), "1x1GiB", "0:1GiB", Some(&to));
}
