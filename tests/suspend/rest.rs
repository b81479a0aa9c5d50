//! Memory that finds no room on its GPU when a program is resumed comes back later.

use super::{MIB, ends_well, page, suspended, told};
use gpupool_metrics::Snapshot;
use harness::{Run, Running, eventually};
use serde_json::Value;

/// Bytes of the pool in use on this GPU.
fn on(page: &Snapshot, gpu: u32) -> u64 {
    let here = page.levels.places.rows.iter().filter(|place| place.is_gpu() && place.number == gpu);
    here.map(|place| place.used).sum()
}

#[track_caller]
fn is_right(program: &mut Running) {
    program.ask("check");
    eventually("a look at it", || (program.ask("checked") == "0").then_some(()));
}

/// Another program has taken the GPU meanwhile, and lets go of it.
#[test]
fn what_stayed_on_the_host_comes_back_once_there_is_room() {
    let folder = tempfile::tempdir().unwrap();
    let machine = folder.path().join("machine");
    let mut program = suspended("1x1GiB").env("SIMCUDA_MACHINE", &machine).start(None);
    program.ask("keep 600");
    told(&program, "suspend --to host");
    let mut other = Run::program("suspended").sim("1x1GiB").env("SIMCUDA_MACHINE", &machine).start(None);
    assert_eq!(other.ask("keep 700"), "kept");
    let back = told(&program, "resume");
    assert!(back["stayed_bytes"].as_u64() >= Some(500 * MIB), "{back}");
    assert_eq!((&back["on_host_bytes"], &back["on_other_gpus_bytes"]), (&back["stayed_bytes"], &0.into()), "{back}");
    is_right(&mut program);
    // Whoever asks once more hears how it is.
    let again = told(&program, "resume");
    assert_eq!((&again["bytes"], &again["stayed_bytes"]), (&0.into(), &back["stayed_bytes"]), "{again}");
    assert_eq!(other.ask("drop"), "freed");
    let is_home = |page: &Snapshot| on(page, 0) >= 600 * MIB;
    eventually("memory that is back", || page(&program).filter(is_home));
    is_right(&mut program);
    let why = super::refused(&program, "resume");
    assert!(why.contains("it is not suspended") && !why.contains("the host"), "{why}");
}

/// Of a program that runs: what came, and what is elsewhere for which nothing was to come.
#[test]
fn a_program_that_runs_is_told_what_a_resume_did_or_why_its_far_memory_stays() {
    let mut program = suspended("2x1GiB").env("GPUPOOL_LIMIT", "0:64MiB").start(None);
    program.ask("keep 64");
    program.ask("keep 40");
    let why = super::refused(&program, "resume");
    assert!(why.contains("it is not suspended") && why.contains("40.0 MiB on other GPUs had no room"), "{why}");
    assert!(why.contains(&format!("gpupool set {} limit=", program.pid())), "{why}");
    ends_well(program);

    let folder = tempfile::tempdir().unwrap();
    let machine = folder.path().join("machine");
    // With auto nothing comes back by itself.
    let run = suspended("1x1GiB").env("SIMCUDA_MACHINE", &machine).env("GPUPOOL_MOVE", "auto");
    let mut program = run.start(None);
    program.ask("keep 600");
    told(&program, "suspend --to host");
    let mut other = Run::program("suspended").sim("1x1GiB").env("SIMCUDA_MACHINE", &machine).start(None);
    assert_eq!(other.ask("keep 700"), "kept");
    told(&program, "resume");
    assert_eq!(other.ask("drop"), "freed");
    drop(other);
    let back = program.gpupool(&format!("resume {}", program.pid()));
    let text = String::from_utf8(back.stdout).unwrap();
    assert!(text.contains(" came back to GPUs that it had left (it was not suspended) in "), "{text}");
    assert_eq!(page(&program).map(|page| on(&page, 0) >= 600 * MIB), Some(true));
    is_right(&mut program);
}

/// Another program has taken most of the GPU meanwhile, and the rest of the memory goes to the other one.
#[test]
fn what_lies_on_another_gpu_since_its_own_is_full_has_not_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let machine = folder.path().join("machine");
    let mut program = suspended("2x1GiB").env("SIMCUDA_MACHINE", &machine).log().start(None);
    program.ask("keep 600");
    told(&program, "suspend --to host");
    let other = Run::program("suspended").sim("2x1GiB").env("SIMCUDA_MACHINE", &machine);
    let mut other = other.start(None);
    assert_eq!(other.ask("keep 850"), "kept");
    let back = told(&program, "resume");
    let now = eventually("a page", || page(&program));
    let [there, bytes, stayed] = [Some(on(&now, 1)), back["bytes"].as_u64(), back["stayed_bytes"].as_u64()];
    assert!(there >= Some(400 * MIB) && stayed == there, "{there:?}: {back}");
    assert_eq!(bytes, Some(on(&now, 0)), "{back}");
    let log = std::fs::read_to_string(program.log()).unwrap();
    let event = log.lines().find(|line| line.contains("program.resume")).unwrap();
    let event: Value = serde_json::from_str(event).unwrap();
    assert_eq!(event["stayed"].as_u64(), stayed, "{event}");
    // Whoever asks once more hears how it is.
    let again = told(&program, "resume");
    assert_eq!((again["bytes"].as_u64(), again["stayed_bytes"].as_u64()), (Some(0), stayed), "{again}");
    is_right(&mut program);
    assert_eq!(other.ask("drop"), "freed");
    eventually("memory that is back", || page(&program).filter(|page| on(page, 0) >= 600 * MIB));
    is_right(&mut program);
}

/// Neither GPU has room for the large block beside the small one, which is nearer to its place; the other one has room for the small one.
#[test]
fn what_is_small_goes_to_another_gpu_where_what_is_large_has_no_room_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let machine = folder.path().join("machine");
    let mut program = suspended("2x640MiB").env("SIMCUDA_MACHINE", &machine).start(None);
    program.ask("allocate 60");
    eventually("the small block", || (program.ask("allocated") == "yes").then_some(()));
    program.ask("keep 400");
    told(&program, "suspend --to host");
    let mut others: Vec<Running> = [(0, 168), (1, 528)]
        .map(|(gpu, mib)| {
            let other = Run::program("neighbour").arg(gpu.to_string()).sim("2x640MiB").env("SIMCUDA_MACHINE", &machine);
            let mut other = other.start(None);
            other.ask(&format!("take {mib}"));
            other
        })
        .into();
    let back = told(&program, "resume");
    let now = eventually("a page", || page(&program));
    assert_eq!(now.levels.residence.on_host, 0, "{back}: {now:?}");
    assert!(on(&now, 0) >= 400 * MIB && on(&now, 1) >= 60 * MIB, "{now:?}");
    is_right(&mut program);
    // It is missed where it was.
    assert_eq!(others[0].ask("drop"), "dropped");
    eventually("memory that is back", || page(&program).filter(|page| on(page, 0) >= 460 * MIB));
    is_right(&mut program);
}

#[test]
fn what_a_drain_kept_from_coming_back_comes_back_behind_it() {
    let mut program = suspended("2x1GiB").start(None);
    program.ask("keep 64");
    told(&program, "suspend --to host");
    let gpu = eventually("a page", || page(&program)).levels.gpu(0).unwrap().uuid_text().unwrap();
    // The context stays, which is told as what could not leave.
    let drained = program.gpupool(&format!("drain {gpu}"));
    assert!(String::from_utf8_lossy(&drained.stdout).contains("a context"), "{drained:?}");
    let back = program.gpupool(&format!("resume {}", program.pid()));
    let text = String::from_utf8(back.stdout).unwrap();
    assert!(text.contains("; 64.0 MiB did not (it has 64.0 MiB on other GPUs now): GPU-"), "{text}");
    assert!(text.contains(&format!("comes back with gpupool undrain {gpu}")), "{text}");
    let drained = eventually("a page", || page(&program));
    assert_eq!((on(&drained, 0), on(&drained, 1)), (0, 64 * MIB), "{drained:?}");
    assert!(program.gpupool(&format!("undrain {gpu}")).status.success());
    eventually("memory that is back", || page(&program).filter(|page| on(page, 0) >= 64 * MIB));
    is_right(&mut program);
}

/// Wherever it lay meanwhile, and whether it had left before the program was suspended or leaves then: once that has been resumed, it is at home.
#[test]
fn what_left_a_drained_gpu_is_back_with_the_resume_where_that_was_undrained_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let to_disk = format!("suspend --to {}", folder.path().display());
    for (gpus, moving, suspend) in [
        ("1x1GiB", "auto", "suspend --to host"),
        ("1x1GiB", "off", "suspend --to host"),
        ("1x1GiB", "auto", &to_disk),
        ("2x1GiB", "auto", "suspend --to host"),
        ("2x1GiB", "auto", &to_disk),
    ] {
        let what = format!("{gpus}, {moving}, {suspend}");
        let mut program = suspended(gpus).env("GPUPOOL_MOVE", moving).start(None);
        program.ask("keep 64");
        let gpu = eventually("a page", || page(&program)).levels.gpu(0).unwrap().uuid_text().unwrap();
        program.gpupool(&format!("drain {gpu}"));
        assert_eq!(page(&program).map(|page| on(&page, 0)), Some(0), "{what}");
        told(&program, suspend);
        assert!(program.gpupool(&format!("undrain {gpu}")).status.success(), "{what}");
        let back = told(&program, "resume");
        assert_eq!(back["stayed_bytes"], 0, "{what}: {back}");
        let after = page(&program).unwrap();
        assert_eq!((on(&after, 0), on(&after, 1)), (64 * MIB, 0), "{what}: {back} {after:?}");
        is_right(&mut program);
        assert!(super::refused(&program, "resume").contains("it is not suspended"), "{what}");
        ends_well(program);
    }
}

/// Blocks that came to stand where another one was when it left have left nothing, and come home as a whole; the second time they are suspended they come back as well.
#[test]
fn what_stands_where_a_block_left_a_drained_gpu_and_was_freed_is_nobody_else_s() {
    let folder = tempfile::tempdir().unwrap();
    let to_disk = format!("suspend --to {}", folder.path().display());
    for to in ["suspend --to host", &to_disk] {
        let run = Run::program("checkpointed").sim("2x1GiB").env("SIMCUDA_STRICT", "on").report().shim();
        let mut program = run.env("GPUPOOL_RESERVE", "16MiB").env("GPUPOOL_HOST_LIMIT", "1GiB").start(None);
        let gone = program.ask("block 5120 1000");
        let gpu = eventually("a page", || page(&program).filter(|page| on(page, 0) > 0));
        let gpu = gpu.levels.gpu(0).unwrap().uuid_text().unwrap();
        program.gpupool(&format!("drain {gpu}"));
        assert_eq!(program.ask(&format!("drop {gone}")), "dropped");
        let mut blocks = vec![(program.ask("block 2048 2000"), 2048, 2000)];
        told(&program, to);
        told(&program, "resume");
        blocks.push((program.ask("block 5120 3000"), 5120, 3000));
        let undrained = program.gpupool(&format!("undrain {gpu}"));
        assert!(!String::from_utf8_lossy(&undrained.stdout).contains("not"), "{to}: {undrained:?}");
        let back = page(&program).unwrap();
        assert_eq!((on(&back, 0), on(&back, 1)), (8 * MIB, 0), "{to}: {back:?}");
        for _ in 0..2 {
            let left = told(&program, to);
            let back = told(&program, "resume");
            assert_eq!((&back["bytes"], &back["stayed_bytes"]), (&left["bytes"], &0.into()), "{to}: {left} {back}");
        }
        for (block, kib, first) in blocks {
            assert_eq!(program.ask(&format!("look {block} {kib}")), format!("{first} 0"), "{to}");
        }
        let (status, folder) = program.end();
        assert!(status.success(), "{to}: {status}");
        let report = std::fs::read_to_string(folder.path().join("report")).unwrap();
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["violations"], serde_json::json!([]), "{to}: {report}");
    }
}

/// The page that small blocks stand on leaves and comes back as a whole, whichever of them have ended meanwhile.
#[test]
fn small_blocks_that_left_a_drained_gpu_are_home_behind_undrain_and_leave_and_come_back_with_the_rest() {
    let run = || {
        let run = Run::program("checkpointed").sim("2x1GiB").env("SIMCUDA_STRICT", "on").report().shim();
        run.env("GPUPOOL_RESERVE", "16MiB").env("GPUPOOL_HOST_LIMIT", "1GiB")
    };
    let folder = tempfile::tempdir().unwrap();
    let to_disk = format!("suspend --to {}", folder.path().display());
    for (ends, to) in [(false, "suspend --to host"), (true, "suspend --to host"), (true, &to_disk), (true, "suspend")] {
        let mut program = run().start(None);
        let [first, second] = [0, 1].map(|_| program.ask("block 10 5000"));
        let gpu = eventually("a page", || page(&program).filter(|page| on(page, 0) > 0));
        let gpu = gpu.levels.gpu(0).unwrap().uuid_text().unwrap();
        program.gpupool(&format!("drain {gpu}"));
        assert_eq!(page(&program).map(|page| on(&page, 0)), Some(0), "{to}");
        if ends {
            assert_eq!(program.ask(&format!("drop {first}")), "dropped");
        }
        assert!(program.gpupool(&format!("undrain {gpu}")).status.success(), "{to}");
        let back = page(&program).unwrap();
        assert_eq!((on(&back, 0), on(&back, 1)), (2 * MIB, 0), "{to}, {ends}: {back:?}");
        for _ in 0..2 {
            told(&program, to);
            let back = told(&program, "resume");
            assert_eq!((&back["bytes"], &back["stayed_bytes"]), (&(2 * MIB).into(), &0.into()), "{to}, {ends}: {back}");
        }
        assert_eq!(program.ask(&format!("look {second} 10")), "5000 0");
        let (status, folder) = program.end();
        assert!(status.success(), "{status}");
        let report = std::fs::read_to_string(folder.path().join("report")).unwrap();
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["violations"], serde_json::json!([]), "{report}");
    }
}

/// What a resumed program has on another GPU is far, as if it had been allocated there, and so is what lies there while it is suspended.
#[test]
fn what_left_a_gpu_and_came_to_another_one_counts_as_far() {
    let folder = tempfile::tempdir().unwrap();
    let machine = folder.path().join("machine");
    let mut program = suspended("2x1GiB").env("SIMCUDA_MACHINE", &machine).start(None);
    assert_eq!(program.ask("keep 300"), "kept");
    let far = |page: &Snapshot| page.levels.residence.on_peers + page.levels.residence.on_host;
    assert_eq!(page(&program).map(|page| far(&page)), Some(0));
    told(&program, "suspend --to peers");
    let away = |page: &Snapshot| page.levels.residence.on_peers >= 300 * MIB;
    eventually("memory on the other GPU", || page(&program).filter(away));
    told(&program, "resume");
    eventually("all of it near", || page(&program).filter(|page| far(page) == 0));

    told(&program, "suspend --to host");
    let run = Run::program("suspended").sim("2x1GiB").env("SIMCUDA_MACHINE", &machine);
    let mut other = run.env("CUDA_VISIBLE_DEVICES", "0").start(None);
    assert_eq!(other.ask("keep 900"), "kept");
    assert!(told(&program, "resume")["error"].is_null());
    eventually("memory on the other GPU", || page(&program).filter(|page| page.levels.residence.on_peers >= 200 * MIB));
    assert_eq!(other.ask("drop"), "freed");
    is_right(&mut program);
    ends_well(program);
}

/// The part of it on the other GPU had left with it, and all of it came back only where there was room for that part once more.
#[test]
fn a_block_of_which_a_part_lay_on_another_gpu_is_where_it_was_again() {
    let run = suspended("3x1GiB").env("GPUPOOL_LIMIT", "0:64MiB,1:160MiB,2:96MiB");
    let mut program = run.start(None);
    for mib in [40, 50, 134] {
        assert_eq!(program.ask(&format!("keep {mib}")), "kept");
    }
    let lies = |page: &Snapshot| [0, 1, 2].map(|gpu| on(page, gpu) / MIB);
    eventually("two full GPUs", || page(&program).filter(|page| lies(page) == [64, 160, 0]));
    for to in ["", "--to peers"] {
        let left = told(&program, &format!("suspend {to}"));
        assert_eq!((&left["bytes"], &left["stayed_bytes"]), (&Value::from(64 * MIB), &Value::from(0)), "{left}");
        let there = eventually("an empty GPU", || page(&program).filter(|page| on(page, 0) == 0));
        assert_eq!(lies(&there), [0, 160, 64], "only what was on the program's GPU leaves");
        let back = told(&program, "resume");
        assert_eq!((&back["bytes"], &back["stayed_bytes"]), (&Value::from(64 * MIB), &Value::from(0)), "{back}");
        assert_eq!(page(&program).map(|page| lies(&page)), Some([64, 160, 0]), "{back}");
    }
    ends_well(program);
}
