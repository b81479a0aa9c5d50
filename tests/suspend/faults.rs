//! Each call of the driver that a suspension and its end are made of fails once.

use super::{MIB, gpupool, page};
use gpupool_metrics::Snapshot;
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

/// What the program makes itself.
#[derive(Clone, Copy)]
struct Own {
    kib: u64,
    /// Whether it is mapped for nobody.
    is_shut: bool,
}

/// The program's memory, and what each part of it counts up from.
struct Memory {
    blocks: Vec<(u64, u64, u64)>,
    shut: Option<(u64, u64)>,
}

impl Memory {
    /// A block of its own, one on slabs that it shares, and what the program makes itself.
    fn of(program: &mut Running, Own { kib, is_shut }: Own) -> Self {
        let block = |(kib, seed): (u64, u64)| (program.ask(&format!("block {kib} {seed}")).parse().unwrap(), kib, seed);
        let mut blocks = [(6144, 5000), (40, 7000)].map(block).to_vec();
        let own = program.ask(&format!("own {kib} 9000")).parse().unwrap();
        blocks.push((own, kib, 9000));
        let memory = Self { blocks, shut: is_shut.then_some((own, kib)) };
        memory.shut(program);
        memory
    }

    fn shut(&self, program: &mut Running) {
        if let Some((address, kib)) = self.shut {
            assert_eq!(program.ask(&format!("shut {address} {kib}")), "shut");
        }
    }

    #[track_caller]
    fn is_right(&self, program: &mut Running, what: &str) {
        if let Some((address, kib)) = self.shut {
            assert_eq!(program.ask(&format!("open {address} {kib}")), "open");
        }
        for (address, kib, seed) in &self.blocks {
            assert_eq!(program.ask(&format!("look {address} {kib}")), format!("{seed} 0"), "{what}");
        }
        self.shut(program);
    }
}

/// Bytes that the program made itself, place by place where there are any.
fn own(page: &Snapshot) -> Vec<(bool, bool, u32, u64)> {
    let rows = page.levels.places.rows.iter().filter(|place| place.own > 0);
    rows.map(|place| (place.on_host, place.on_disk, place.number, place.own)).collect()
}

/// Of a way there and back all calls, from the first to the last one.
#[track_caller]
fn each_call_fails(to: &str, gpus: &str, limit: &str, folder: Option<&Path>) {
    each_call_fails_of(Own { kib: 2048, is_shut: false }, 1, to, gpus, limit, folder);
}

/// The same of a program of which what it makes itself lies at so many places.
#[track_caller]
fn each_call_fails_of(makes: Own, places: usize, to: &str, gpus: &str, limit: &str, folder: Option<&Path>) {
    let run = Run::program("checkpointed").sim(gpus).env("SIMCUDA_STRICT", "on").env("GPUPOOL_RESERVE", "16MiB");
    let run = run.env("GPUPOOL_HOST_LIMIT", "1GiB").env("GPUPOOL_LIMIT", limit).report().log().shim();
    let mut program = run.start(None);
    let memory = Memory::of(&mut program, makes);
    let all = |page: &Snapshot| own(page).iter().map(|(.., bytes)| bytes).sum::<u64>() == makes.kib << 10;
    let lay = own(&eventually("what it made itself", || page(&program).filter(all)));
    assert_eq!(lay.len(), places, "{lay:?}");
    if folder.is_some() {
        let left = told(&program, &format!("suspend{to}")).unwrap();
        assert_eq!(left.1, 0, "all of it goes to the disk: {left:?}");
        let on_disk = |page: &Snapshot| own(page).iter().all(|(_, on_disk, ..)| *on_disk) && all(page);
        eventually("what it made itself on the disk", || page(&program).filter(on_disk));
        told(&program, "resume").unwrap();
    }
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
            let is_there = places.all(|place| !place.on_host && place.number == 0 || place.used == 0);
            (is_there && own(&page) == lay).then_some(())
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

/// It lies on two GPUs, on the host, or where none may read it.
#[test]
fn whichever_call_of_the_driver_fails_on_the_way_to_a_disk_or_back_nothing_is_lost_of_what_the_program_made_itself() {
    let around = tempfile::tempdir().unwrap();
    let to = around.path().join("to");
    std::fs::create_dir(&to).unwrap();
    let own = |kib, is_shut| Own { kib, is_shut };
    for (makes, places, gpus, limit) in [
        (own(24 << 10, false), 2, "2x1GiB", "0:20MiB"),
        (own(2048, false), 1, "1x1GiB", "0:9MiB"),
        (own(2048, true), 1, "1x1GiB", "0:1GiB"),
    ] {
        each_call_fails_of(makes, places, &format!(" --to {}", to.display()), gpus, limit, Some(&to));
    }
}

/// The same in parts, where only those on GPUs leave.
#[test]
fn whichever_call_of_the_driver_fails_on_the_way_to_the_host_or_back_nothing_is_lost_of_memory_in_parts() {
    let own = Own { kib: 24 << 10, is_shut: false };
    each_call_fails_of(own, 2, " --to host", "2x1GiB", "0:20MiB", None);
    // The peer that has one part has no room for the other.
    each_call_fails_of(own, 2, "", "2x1GiB", "0:20MiB,1:16MiB", None);
}
