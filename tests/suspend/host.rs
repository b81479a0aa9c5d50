//! `gpupool suspend --to host`: a program's memory lies in plain memory of the host, once, and comes back.

use super::shared::findings;
use super::{MIB, at, at_work, ends_well, goes_on, gpupool, page, refused, suspended, told};
use gpupool_metrics::Snapshot;
use harness::{Run, Running, artifact_folder, eventually};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Has all of it go there.
#[track_caller]
fn suspend(program: &Running) -> u64 {
    // As long as it takes where the processors are others', too.
    let left = told(program, "suspend --to host --wait 60s");
    assert!(left["error"].is_null() && left["stayed_bytes"] == 0, "{left}");
    left["bytes"].as_u64().unwrap_or(0)
}

/// What is kept is as it was.
#[track_caller]
fn is_right(program: &mut Running) {
    program.ask("check");
    eventually("a look at it", || (program.ask("checked") == "0").then_some(()));
}

/// Bytes of plain memory that it has.
fn plain(program: &Running) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", program.pid())).unwrap_or_default();
    let kib =
        status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or_else(|| panic!("{status}")) << 10
}

/// What the page says of the host: bytes that are held there, and the most that may be.
fn on_host(page: &Snapshot) -> (u64, u64) {
    let rows: Vec<_> = page.levels.places.rows.iter().filter(|place| place.on_host).collect();
    assert_eq!(rows.len(), 1, "{page:?}");
    assert!(page.levels.places.rows.iter().all(|place| !place.on_disk), "{page:?}");
    (rows[0].held, rows[0].limit)
}

#[test]
fn memory_lies_on_the_host_once_and_none_of_it_stays_there() {
    let mut program = suspended("2x1GiB").env("GPUPOOL_IDLE", "100ms").log().start(None);
    program.ask("keep 256");
    at_work(&mut program, 8);
    for round in 0..6 {
        let before = plain(&program);
        let bytes = suspend(&program);
        assert!(bytes >= (256 + 8 * 40) * MIB, "{bytes}");
        let empty = |page: &Snapshot| page.levels.suspended > 0 && at(page, false) == 0;
        let page = eventually("empty GPUs", || page(&program).filter(empty));
        let (held, limit) = on_host(&page);
        // What the program made itself is counted beside it.
        assert!(held >= (256 + 8 * 32) * MIB && held <= bytes && limit == 4 << 30, "{held} of {bytes}, {limit}");
        let added = plain(&program) - before;
        assert!((256 * MIB..bytes + 64 * MIB).contains(&added), "{added} for {bytes}");
        if round == 0 {
            let listed = String::from_utf8(gpupool(&program, "ps").stdout).unwrap();
            assert!(listed.contains("suspended") && listed.contains("host") && !listed.contains("disk"), "{listed}");
        }
        let back = told(&program, "resume");
        assert_eq!((back["bytes"].as_u64(), &back["stayed_bytes"]), (Some(bytes), &0.into()));
        eventually("its memory given back", || (plain(&program) < before + 64 * MIB).then_some(()));
        goes_on(&mut program);
    }
    is_right(&mut program);
    let log = std::fs::read_to_string(program.log()).unwrap();
    ends_well(program);
    let event = log.lines().find(|line| line.contains("\"program.suspend\"")).unwrap();
    let event: serde_json::Value = serde_json::from_str(event).unwrap();
    assert!(event["waited_microseconds"].as_u64() < event["microseconds"].as_u64(), "{event}");
    assert!(event["to"] == "host" && event["stored"].is_null(), "{event}");
}

#[test]
fn memory_that_is_zero_takes_none_of_the_host() {
    let mut program = suspended("1x1GiB").start(None);
    program.ask("clear 512");
    let before = plain(&program);
    assert!(suspend(&program) >= 512 * MIB);
    assert!(plain(&program) < before + 128 * MIB, "{} and {before}", plain(&program));
    told(&program, "resume");
    is_right(&mut program);
    ends_well(program);
}

#[test]
fn what_the_host_has_no_room_for_stays_and_where_it_may_have_nothing_the_program_runs_on() {
    let mut program = suspended("1x1GiB").env("GPUPOOL_HOST_LIMIT", "0").start(None);
    program.ask("keep 64");
    let why = refused(&program, "suspend --to host");
    assert!(why.contains("nothing of it can leave: 64.0 MiB would stay"), "{why}");
    is_right(&mut program);
    ends_well(program);
}

/// Blocks that share a chunk, which moves as a whole, and something small beside them that was freed.
#[test]
fn what_stands_beside_freed_memory_leaves_whole() {
    let run = Run::program("checkpointed").sim("1x2GiB").env("SIMCUDA_STRICT", "on").env("GPUPOOL_IDLE", "off");
    let mut program = run.env("GPUPOOL_HOST_LIMIT", "1GiB").report().log().shim().start(None);
    let mut block = |kib: u64, seed: u32| -> u64 { program.ask(&format!("block {kib} {seed}")).parse().unwrap() };
    let small = block(300, 1000);
    let first = block(30 << 10, 2000);
    program.ask(&format!("drop {first}"));
    let blocks = [(12, 3000), (24, 4000), (8, 5000)];
    let [second, third, fourth] =
        blocks.map(|(mib, seed)| program.ask(&format!("block {} {seed}", mib << 10)).parse::<u64>().unwrap());
    // The slab that it stood on stays for the next one, between the others.
    program.ask(&format!("drop {small}"));
    for _ in 0..2 {
        let left = told(&program, "suspend --to host");
        assert_eq!(left["stayed_bytes"], 0, "{left}");
        assert_eq!(left["bytes"], 44 * MIB, "{left}");
        let page = eventually("a page that says so", || page(&program).filter(|page| page.levels.suspended > 0));
        assert_eq!(at(&page, false), 0, "{page:?}");
        told(&program, "resume");
        for (address, (mib, seed)) in [second, third, fourth].into_iter().zip(blocks) {
            assert_eq!(program.ask(&format!("look {address} {}", mib << 10)), format!("{seed} 0"));
        }
    }
    let log = std::fs::read_to_string(program.log()).unwrap();
    assert!(!log.contains("GP022"), "{log}");
    assert_eq!(program.ask("end"), "ended");
    assert!(program.end().0.success());
}

/// An arena that its GPU had no room for lies in parts, on several GPUs.
#[test]
fn memory_of_its_own_in_parts_leaves_and_comes_back_part_by_part() {
    let run = suspended("2x512MiB").env("GPUPOOL_LIMIT", "0:64MiB");
    let mut program = run.env("GPUPOOL_MOVE", "off").start(None);
    program.ask("create 240");
    eventually("memory that is filled", || (program.ask("filled") == "yes").then_some(()));
    let on = |page: &Snapshot| -> Vec<u64> { page.levels.places.rows.iter().map(|place| place.own).collect() };
    let before = on(&page(&program).unwrap());
    assert_eq!(before[..2].iter().sum::<u64>(), 240 * MIB);
    assert!(before[..2].iter().all(|bytes| *bytes > 0), "{before:?}");
    for _ in 0..2 {
        let left = told(&program, "suspend --to host");
        assert_eq!((&left["bytes"], &left["stayed_bytes"]), (&(240 * MIB).into(), &0.into()), "{left}");
        assert_eq!(on(&page(&program).unwrap()), [0, 0, 240 * MIB]);
        let back = told(&program, "resume");
        assert_eq!(back["stayed_bytes"], 0, "{back}");
        assert_eq!(on(&page(&program).unwrap()), before);
        assert_eq!(program.ask("created"), "0");
    }
    // So does what is on one GPU that is drained.
    let gpu = page(&program).unwrap().levels.gpu(1).unwrap().uuid_text().unwrap();
    let drained = program.gpupool(&format!("drain {gpu}"));
    assert!(drained.status.success(), "{drained:?}");
    assert_eq!(on(&page(&program).unwrap()), [before[0], 0, before[1]]);
    assert!(program.gpupool(&format!("undrain {gpu}")).status.success());
    assert_eq!(on(&page(&program).unwrap()), before);
    assert_eq!(program.ask("created"), "0");
    ends_well(program);
}

/// The system gives the process no more addresses than this: memory of the driver's and of the program's, which it has, and some for what leaves.
#[test]
fn where_the_process_may_map_no_more_what_has_no_room_stays_and_the_rest_leaves() {
    let mut program = suspended("1x2GiB").env("GPUPOOL_IDLE", "off").log().start(None);
    for mib in [64, 512] {
        assert_eq!(program.ask(&format!("keep {mib}")), "kept");
    }
    let mapped = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", program.pid())).unwrap();
        let kib = status
            .lines()
            .find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        kib.unwrap() << 10
    };
    let limit_to = |bytes: u64| {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: the number is the child's, which was not waited for, and the limit a local.
        let set =
            unsafe { libc::prlimit(program.pid() as i32, libc::RLIMIT_AS, &raw const limit, std::ptr::null_mut()) };
        assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    };
    // Two gibibytes are left free, as it would otherwise not come back.
    limit_to(mapped() + (2048 + 128) * MIB);
    let left = told(&program, "suspend --to host --wait 60s");
    let [bytes, stayed] = ["bytes", "stayed_bytes"].map(|key| left[key].as_u64().unwrap());
    assert_eq!((bytes, stayed), (64 * MIB, 512 * MIB), "{left}");
    told(&program, "resume");
    // Nothing at all: it is refused, and says what is to be done.
    limit_to(mapped());
    let why = refused(&program, "suspend --to host --wait 60s");
    assert!(why.contains("nothing of it can leave") && why.contains("RLIMIT_AS"), "{why}");
    limit_to(libc::RLIM_INFINITY);
    is_right(&mut program);
    let log = std::fs::read_to_string(program.log()).unwrap();
    assert!(log.contains("GP022") && log.contains("RLIMIT_AS"), "{log}");
    ends_well(program);
}

#[test]
fn what_is_freed_or_whose_context_ends_meanwhile_is_not_brought_back() {
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 64");
    at_work(&mut program, 1);
    let left = suspend(&program);
    program.ask("drop");
    assert_eq!(told(&program, "resume")["bytes"].as_u64(), Some(left - 64 * MIB));
    goes_on(&mut program);
    program.ask("keep 48");
    suspend(&program);
    program.ask("destroy");
    told(&program, "resume");
    eventually("its end", || (program.ask("destroyed") == "yes").then_some(()));
    goes_on(&mut program);
    ends_well(program);
}

#[test]
fn the_end_of_the_process_brings_everything_back_for_its_handlers_and_a_child_has_none_of_it() {
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 64");
    program.ask("atexit");
    at_work(&mut program, 2);
    suspend(&program);
    // Neither a child nor a core dump has it again.
    let maps = std::fs::read_to_string(format!("/proc/{}/smaps", program.pid())).unwrap();
    let of = |map: &str, key: &str| -> String {
        map.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default().trim().to_owned()
    };
    let is_large =
        |map: &&str| of(map, "Anonymous:").trim_end_matches(" kB").parse().is_ok_and(|kib: u64| kib >= 60 << 10);
    // Each ends with its flags.
    let mut maps = maps.split_inclusive("\nVmFlags: ").zip(maps.split("\nVmFlags: ").skip(1));
    let large = maps.find(|(map, _)| is_large(map)).map(|(_, flags)| flags.lines().next().unwrap_or_default());
    assert!(large.is_some_and(|flags| flags.contains("dc") && flags.contains("dd")), "{large:?}");
    assert_eq!(program.ask("fork"), "child ended with 7");
    program.tell("exit");
    let (status, _folder) = program.end();
    assert_eq!(status.code(), Some(12), "{status}");
}

#[test]
fn a_command_that_is_killed_before_it_has_answered_has_asked_for_nothing() {
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 512");
    at_work(&mut program, 1);
    let pid = program.pid().to_string();
    for round in 0..6 {
        let before = plain(&program);
        let mut command = Command::new(artifact_folder().join("gpupool"));
        command.args(["suspend", "--to", "host", &pid]).env("XDG_RUNTIME_DIR", program.session());
        let mut child = command.env_remove("LD_PRELOAD").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        // From before it is heard to in the middle of copying.
        if round % 2 == 1 {
            let begun = |program: &Running| plain(program) > before + 32 * MIB;
            eventually("a beginning", || (begun(&program) || child.try_wait().unwrap().is_some()).then_some(()));
        }
        child.kill().unwrap();
        // A command that has not answered has asked for nothing: nobody has to resume the program.
        if !child.wait_with_output().unwrap().stdout.is_empty() {
            eventually("a program that can be asked", || {
                let ended = gpupool(&program, &format!("resume {pid}"));
                let text = String::from_utf8_lossy(&ended.stderr).into_owned();
                (ended.status.success() || text.contains("is not suspended")).then_some(())
            });
        }
        goes_on(&mut program);
    }
    is_right(&mut program);
    ends_well(program);
}

/// Calls of the driver that the way out and the way back are made of, and that the program makes none of meanwhile; each with how many a round
/// has.
const CALLS: [(&str, u32); 14] = [
    ("cuMemCreate", 1),
    ("cuMemMap", 2),
    ("cuMemSetAccess", 2),
    ("cuMemUnmap", 2),
    ("cuMemRelease", 1),
    ("cuMemAddressReserve", 1),
    ("cuMemAddressFree", 1),
    ("cuMemcpyDtoHAsync_v2", 20),
    ("cuMemcpyHtoDAsync_v2", 5),
    ("cuMemHostRegister_v2", 2),
    ("cuMemHostUnregister", 2),
    ("cuStreamCreate", 4),
    ("cuStreamSynchronize", 30),
    ("cuStreamDestroy_v2", 4),
];

/// Each call fails once in about eight rounds, each time at another place in them.
#[test]
fn a_call_of_the_driver_that_fails_on_the_way_there_or_back_loses_nothing() {
    let of = |(at, (call, round)): (u32, (&str, u32))| -> Vec<String> {
        let code = [2, 999, 1][at as usize % 3];
        (0..4).map(|time| format!("{call}:{}={code}", 3 + (at % 8 + time * 8) * round + time)).collect()
    };
    let faults: Vec<String> = (0..).zip(CALLS).flat_map(of).collect();
    let mut program = suspended("1x1GiB").env("SIMCUDA_FAULT", faults.join(",")).start(None);
    program.ask("keep 40");
    let (mut refused, mut stuck) = (0, 0);
    for _ in 0..30 {
        let left = told(&program, "suspend --to host");
        if left["error"].is_null() {
            // Once more for each failure in a row, of which there are few.
            let back = (0..8).map(|_| told(&program, "resume")).find(|back| {
                stuck += u32::from(!back["error"].is_null());
                back["error"].is_null()
            });
            assert!(back.is_some(), "it does not come back");
        } else {
            refused += 1;
        }
        is_right(&mut program);
        // What could not come back to its GPU lies on the host for good, and does not leave.
        if left["bytes"] == 0 {
            program.ask("drop");
            program.ask("keep 40");
        }
    }
    assert!(refused > 3 && stuck > 3, "{refused} refused, {stuck} failed to come back");
    program.ask("drop");
    ends_well(program);
}

/// What the program hears of the first handle that it made, at both of its addresses.
pub(super) const ITS_HANDLE: &str = "on 0 of kind 1, access 1, the same, right";

#[test]
fn what_the_program_made_itself_goes_the_same_way() {
    let mut program = suspended("2x1GiB").env("GPUPOOL_IDLE", "100ms").log().start(None);
    assert_eq!(program.ask("make 256"), "made");
    assert_eq!(program.ask("handle"), ITS_HANDLE);
    at_work(&mut program, 2);
    let before = page(&program).unwrap();
    for _ in 0..3 {
        let anonymous = plain(&program);
        let bytes = suspend(&program);
        assert!(bytes >= (256 + 2 * 40) * MIB, "{bytes}");
        let added = plain(&program) - anonymous;
        assert!((256 * MIB..bytes + 64 * MIB).contains(&added), "{added} for {bytes}");
        let empty = |page: &Snapshot| page.levels.suspended > 0 && at(page, false) == 0;
        let page = eventually("empty GPUs", || page(&program).filter(empty));
        assert!((bytes..bytes + 16 * MIB).contains(&at(&page, true)), "{page:?}");
        assert_eq!(told(&program, "resume")["bytes"].as_u64(), Some(bytes));
        eventually("its memory given back", || (plain(&program) < anonymous + 64 * MIB).then_some(()));
        is_right(&mut program);
        assert_eq!(program.ask("handle"), ITS_HANDLE);
        goes_on(&mut program);
    }
    let is_back = |page: &Snapshot| at(page, true) == at(&before, true) && page.levels.suspended == 0;
    eventually("nothing on the host", || page(&program).filter(is_back));
    program.ask("drop");
    ends_well(program);
}

/// What the program made itself goes to no disk, and neither its GPU's lenders nor the host need be full: a setting says that they take no more.
#[test]
fn what_a_limit_keeps_is_told_with_the_setting_that_says_so() {
    let cases = [
        (
            "GPUPOOL_HOST_LIMIT",
            "8MiB",
            "host",
            "host_limit",
            "host0 has no room for it: GPUPOOL_HOST_LIMIT allows 8.0 MiB",
        ),
        (
            "GPUPOOL_LIMIT",
            "1:8MiB",
            "peers",
            "gpu_limit",
            "gpu1 has no room for it: GPUPOOL_LIMIT allows 8.0 MiB of GPU 1",
        ),
    ];
    for (setting, value, to, cause, said) in cases {
        let mut program = suspended("2x1GiB").env(setting, value).log().start(None);
        assert_eq!(program.ask("make 16"), "made");
        let left = told(&program, &format!("suspend --to {to}"));
        assert_eq!(
            (&left["bytes"], &left["stayed_bytes"]),
            (&(8 * MIB).into(), &(8 * MIB).into()),
            "{setting}: {left}"
        );
        let log = std::fs::read_to_string(program.log()).unwrap();
        let finding = log.lines().find(|line| line.contains("GP022")).unwrap_or_else(|| panic!("{log}"));
        let finding: serde_json::Value = serde_json::from_str(finding).unwrap();
        let (message, fix) = finding["message"].as_str().unwrap().split_once("fix: ").unwrap();
        assert!(message.contains(said) && !message.contains("driver answered"), "{finding}");
        assert_eq!(finding["facts"]["cause"], cause, "{finding}");
        assert!(fix.starts_with(&format!("raise {setting}")), "{finding}");
        told(&program, "resume");
        is_right(&mut program);
        ends_well(program);
    }
    let mut program = suspended("1x1GiB").env("GPUPOOL_HOST_LIMIT", "0").start(None);
    assert_eq!(program.ask("make 16"), "made");
    let why = refused(&program, "suspend --to host");
    assert!(why.contains("because GPUPOOL_HOST_LIMIT=0 leaves it no place on the host"), "{why}");
    ends_well(program);
}

/// Compressed memory, and what else the driver makes in a way of its own, has no place but the one where it is.
#[test]
fn what_only_the_driver_can_place_stays_and_is_in_no_image_and_both_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("2x1GiB").log().start(None);
    program.ask("compress");
    assert_eq!(program.ask("make 16"), "made");
    let log = |program: &Running| std::fs::read_to_string(program.log()).unwrap();
    let image = |program: &Running| -> serde_json::Value {
        let told = gpupool(program, &format!("checkpoint --json {} {}", program.pid(), folder.path().display()));
        serde_json::from_slice(&told.stdout).unwrap()
    };
    let left = image(&program);
    assert_eq!((&left["bytes"], &left["left_out_bytes"]), (&0.into(), &(16 * MIB).into()), "{left}");
    assert!(log(&program).contains("of a kind that only the driver can place (compressed"), "{}", log(&program));
    let left = told(&program, "suspend --to host");
    assert_eq!((&left["bytes"], &left["stayed_bytes"]), (&0.into(), &(16 * MIB).into()), "{left}");
    let log = log(&program);
    let finding = log.lines().find(|line| line.contains("GP022")).unwrap_or_else(|| panic!("{log}"));
    assert!(finding.contains("\"kind\"") && finding.contains("16.0 MiB stayed on its GPU"), "{finding}");
    told(&program, "resume");
    is_right(&mut program);
    // Every second handle has no reference any more: each of these is there for its mapping alone.
    program.ask("drop");
    assert_eq!(image(&program)["left_out_bytes"], 0);
    ends_well(program);
}

#[test]
fn what_is_mapped_nowhere_stays_and_that_is_told() {
    let mut program = suspended("1x1GiB").log().start(None);
    program.ask("keep 32");
    assert_eq!(program.ask("unmapped 64"), "made");
    let left = told(&program, "suspend --to host");
    assert_eq!((left["bytes"].as_u64(), left["stayed_bytes"].as_u64()), (Some(32 * MIB), Some(64 * MIB)), "{left}");
    let log = std::fs::read_to_string(program.log()).unwrap();
    let finding = log.lines().find(|line| line.contains("GP022")).unwrap_or_else(|| panic!("{log}"));
    assert!(finding.contains("\"unmapped\"") && finding.contains("64.0 MiB stayed on its GPU"), "{finding}");
    told(&program, "resume");
    is_right(&mut program);
    assert_eq!(program.ask("released"), "released");
    let left = told(&program, "suspend --to host");
    assert_eq!((left["bytes"].as_u64(), left["stayed_bytes"].as_u64()), (Some(32 * MIB), Some(0)), "{left}");
    told(&program, "resume");
    program.ask("drop");
    ends_well(program);
}

#[test]
fn what_the_program_made_itself_on_a_gpu_without_a_context_goes_too() {
    let mut program = suspended("2x1GiB").start(None);
    assert_eq!(program.ask("make 64 1"), "made");
    for _ in 0..2 {
        assert_eq!(suspend(&program), 64 * MIB);
        let back = told(&program, "resume");
        assert_eq!((back["bytes"].as_u64(), back["stayed_bytes"].as_u64()), (Some(64 * MIB), Some(0)), "{back}");
        is_right(&mut program);
    }
    program.ask("drop");
    ends_well(program);
}

#[test]
fn what_the_program_made_itself_goes_otherwise_where_somebody_else_knows_its_pages() {
    let mut program = suspended("1x1GiB").log().start(None);
    assert_eq!((program.ask("make 64"), program.ask("lend")), ("made".to_owned(), "lent".to_owned()));
    let left = told(&program, "suspend --to host");
    assert_eq!((left["bytes"].as_u64(), left["stayed_bytes"].as_u64()), (Some(60 * MIB), Some(4 * MIB)), "{left}");
    let found = findings(&program);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].0 == "own" && found[0].1.contains("4.0 MiB stayed on its GPU"), "{found:?}");
    assert!(found[0].1.contains("others know it by its pages"), "{found:?}");
    told(&program, "resume");
    is_right(&mut program);
    assert_eq!(program.ask("handle"), ITS_HANDLE);
    program.ask("drop");
    ends_well(program);
}

/// It belongs to no context, and the last one is what it is copied back with.
#[test]
fn the_last_context_of_what_the_program_made_itself_ends_once_it_is_back() {
    let mut program = suspended("1x1GiB").start(None);
    assert_eq!(program.ask("make 64"), "made");
    assert_eq!(suspend(&program), 64 * MIB);
    waits_to_destroy(&mut program);
    assert_eq!(told(&program, "resume")["bytes"].as_u64(), Some(64 * MIB));
    eventually("its end", || (program.ask("destroyed") == "yes").then_some(()));
    program.ask("end");
}

/// Its context is to end, and does not before it is resumed.
#[track_caller]
pub(super) fn waits_to_destroy(program: &mut Running) {
    let tasks = format!("/proc/{}/task", program.pid());
    let threads = || -> Vec<_> {
        let all = std::fs::read_dir(&tasks).unwrap();
        all.flatten().map(|thread| thread.path()).collect()
    };
    let before = threads();
    program.ask("destroy");
    let sleeps = |thread: &PathBuf| {
        let status = std::fs::read_to_string(thread.join("status")).unwrap_or_default();
        !before.contains(thread) && status.contains("State:\tS")
    };
    eventually("a thread that waits", || threads().iter().any(sleeps).then_some(()));
    assert_eq!(program.ask("destroyed"), "no");
}

#[test]
fn what_the_program_made_itself_is_back_for_the_handlers_of_its_end() {
    let mut program = suspended("1x1GiB").start(None);
    assert_eq!((program.ask("make 64"), program.ask("atexit")), ("made".to_owned(), "registered".to_owned()));
    suspend(&program);
    assert_eq!(program.ask("fork"), "child ended with 7");
    program.tell("exit");
    let (status, _folder) = program.end();
    assert_eq!(status.code(), Some(12), "{status}");
}

/// Another program has taken the GPU meanwhile.
#[test]
fn what_the_program_made_itself_lies_far_where_its_gpu_has_no_room_until_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let machine = folder.path().join("machine");
    let mut program = suspended("1x1GiB").env("SIMCUDA_MACHINE", &machine).start(None);
    assert_eq!(program.ask("make 300"), "made");
    assert_eq!(suspend(&program), 300 * MIB);
    let mut other = Run::program("suspended").sim("1x1GiB").env("SIMCUDA_MACHINE", &machine).start(None);
    assert_eq!(other.ask("keep 900"), "kept");
    let back = told(&program, "resume");
    assert!(back["stayed_bytes"].as_u64() >= Some(200 * MIB) && back["error"].is_null(), "{back}");
    is_right(&mut program);
    assert_eq!(program.ask("handle"), ITS_HANDLE);
    assert_eq!(other.ask("drop"), "freed");
    let is_home = |page: &Snapshot| at(page, true) == 0;
    eventually("all of it at home", || {
        let _ = gpupool(&program, &format!("resume {}", program.pid()));
        page(&program).filter(is_home)
    });
    is_right(&mut program);
    assert_eq!(program.ask("handle"), ITS_HANDLE);
    program.ask("drop");
    ends_well(program);
}

#[test]
fn a_call_of_the_driver_that_fails_loses_nothing_of_what_the_program_made_itself() {
    let of = |(at, (call, round)): (u32, (&str, u32))| -> Vec<String> {
        let code = [2, 999, 1][at as usize % 3];
        (0..4).map(|time| format!("{call}:{}={code}", 20 + (at % 8 + time * 8) * round + time)).collect()
    };
    // Of each handle one is made, and is mapped in a window and at its addresses.
    let own = [("cuMemCreate", 5), ("cuMemMap", 11), ("cuMemSetAccess", 8), ("cuMemUnmap", 8), ("cuMemRelease", 4)];
    let calls = CALLS.into_iter().filter(|(call, _)| own.iter().all(|(other, _)| other != call)).chain(own);
    let faults: Vec<String> = (0..).zip(calls).flat_map(of).collect();
    let mut program = suspended("1x1GiB").env("SIMCUDA_FAULT", faults.join(",")).start(None);
    assert_eq!(program.ask("make 20"), "made");
    let (mut refused, mut stuck) = (0, 0);
    for _ in 0..30 {
        let left = told(&program, "suspend --to host");
        if left["error"].is_null() {
            let back = (0..8).map(|_| told(&program, "resume")).find(|back| {
                stuck += u32::from(!back["error"].is_null());
                back["error"].is_null()
            });
            assert!(back.is_some(), "it does not come back");
        } else {
            refused += 1;
        }
        is_right(&mut program);
    }
    eprintln!("{refused} refused, {stuck} failed to come back");
    assert!(refused > 3 && stuck > 0, "{refused} refused, {stuck} failed to come back");
    assert_eq!(program.ask("handle"), ITS_HANDLE);
    program.ask("drop");
    ends_well(program);
}

/// The most memory that it had at once since it was asked to count anew, and what it has now.
fn most(program: &Running) -> (u64, u64) {
    let status = std::fs::read_to_string(format!("/proc/{}/status", program.pid()))
        .unwrap_or_else(|error| panic!("its status: {error}"));
    let of = |key: &str| {
        let kib =
            status.lines().find_map(|line| line.strip_prefix(key)?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        kib.unwrap_or_else(|| panic!("{key} {status}")) << 10
    };
    (of("VmHWM:"), of("VmRSS:"))
}

#[test]
fn what_goes_from_plain_memory_to_other_memory_of_the_host_is_there_once() {
    let folder = tempfile::tempdir().unwrap();
    let machine = folder.path().join("machine");
    let mut program = suspended("1x1GiB").env("SIMCUDA_MACHINE", &machine).start(None);
    at_work(&mut program, 16);
    let bytes = suspend(&program);
    assert!(bytes >= 16 * 32 * MIB, "{bytes}");
    let mut other = Run::program("suspended").sim("1x1GiB").env("SIMCUDA_MACHINE", &machine).start(None);
    assert_eq!(other.ask("keep 900"), "kept");
    std::fs::write(format!("/proc/{}/clear_refs", program.pid()), "5").unwrap();
    let (_, before) = most(&program);
    let back = told(&program, "resume");
    let (most, _) = most(&program);
    assert!(back["stayed_bytes"].as_u64() >= Some(300 * MIB) && back["error"].is_null(), "{back}");
    assert!(most < before + 200 * MIB, "{} MiB more than the {} MiB before", (most - before) / MIB, before / MIB);
    goes_on(&mut program);
    assert_eq!(other.ask("drop"), "freed");
    ends_well(program);
}

/// Another program has taken the GPU meanwhile.
#[test]
fn what_has_no_room_on_its_gpu_any_more_lies_far_and_is_right() {
    let folder = tempfile::tempdir().unwrap();
    let machine = folder.path().join("machine");
    let mut program = suspended("1x1GiB").env("SIMCUDA_MACHINE", &machine).start(None);
    program.ask("keep 300");
    assert_eq!(suspend(&program), 300 * MIB);
    let mut other = Run::program("suspended").sim("1x1GiB").env("SIMCUDA_MACHINE", &machine).start(None);
    assert_eq!(other.ask("keep 900"), "kept");
    let back = told(&program, "resume");
    assert!(back["stayed_bytes"].as_u64() >= Some(200 * MIB) && back["error"].is_null(), "{back}");
    is_right(&mut program);
    assert_eq!(other.ask("drop"), "freed");
    ends_well(program);
}
