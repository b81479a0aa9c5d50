//! Ranks of one job: how they are known, that they keep to their own GPUs, and which others they are lent.

use super::setup::{asked, gave, held, is_whole, launched, takes};
use super::{MIB, Machine, uuid};
use harness::{Run, Running, eventually};

impl Machine {
    /// A rank of a job, of which what was freed goes home soon.
    fn rank(&self, gpu: u32) -> Run {
        self.neighbour(gpu, 50).env("GPUPOOL_IDLE", "100ms")
    }
}

#[test]
fn ranks_that_no_launcher_tells_of_keep_to_their_own_gpus() {
    let machine = Machine::new("2x320MiB");
    let rank = |gpu: u32| machine.rank(gpu).env("GPUPOOL_LIMIT", format!("{gpu}:16MiB")).env("GPUPOOL_MOVE", "auto");
    let mut ranks = [machine.start(rank(0)), machine.start(rank(1))];
    keep_to_their_own_gpus(&machine, &mut ranks, [0, 1]);
    // They wait for each other, so the time that moves may take is that of both together.
    for program in &ranks {
        let log = std::fs::read_to_string(program.log()).unwrap();
        assert!(log.contains("moves may take 2.5% of this process's time"), "{log}");
    }
    let text = String::from_utf8(machine.gpupool("ps").stdout).unwrap();
    assert!(text.contains("gpu0 ") && text.contains("gpu1 ") && !text.contains("GPU-"), "{text}");
    // One that is named GPUs has them.
    let mut other = machine.start(rank(0).env("GPUPOOL_DEVICES", "0,1"));
    takes(&mut other, 40);
    machine.until(&other, "a loan", |page| held(page, 1) >= 20 * MIB);
    ranks.into_iter().chain([other]).for_each(|program| drop(is_whole(program)));
}

/// The kernels of each may wait for the other's: one alone is refused, and neither is suspended by itself.
#[test]
fn ranks_that_no_launcher_tells_of_are_suspended_together() {
    let machine = Machine::new("2x320MiB");
    let idle = |gpu: u32| machine.rank(gpu).env("GPUPOOL_IDLE_SUSPEND", "1s");
    let mut ranks = [machine.start(idle(0)), machine.start(idle(1))];
    for rank in &mut ranks {
        takes(rank, 24);
    }
    for rank in &ranks {
        machine.until(rank, "its page", |page| page.levels.live_bytes == 24 * MIB);
    }
    let [first, second] = [0, 1].map(|rank: usize| ranks[rank].pid());
    let alone = machine.gpupool(&format!("suspend --to host {first}"));
    let said = String::from_utf8_lossy(&alone.stderr).into_owned();
    assert!(!alone.status.success() && said.contains(&format!("process {second} runs the same program")), "{said}");
    assert!(said.contains(&format!("--job {first}")) && said.contains("GP022"), "{said}");
    let are_suspended =
        |ranks: &[Running; 2]| [0, 1].map(|rank: usize| machine.page(&ranks[rank]).levels.suspended > 0);
    assert_eq!(are_suspended(&ranks), [false; 2]);
    for rank in &ranks {
        let log = eventually("that it is not suspended by itself", || {
            let log = std::fs::read_to_string(rank.log()).ok()?;
            log.contains("this process is not suspended by itself, because another rank").then_some(log)
        });
        assert_eq!(log.matches("is not suspended by itself").count(), 1, "{log}");
    }
    assert_eq!(are_suspended(&ranks), [false; 2]);
    let (left, is_done) = machine.told(&format!("suspend --json --to host --job {second}"));
    assert!(is_done && left.as_array().is_some_and(|rows| rows.len() == 2), "{left}");
    assert_eq!(are_suspended(&ranks), [true; 2]);
    let (back, is_done) = machine.told(&format!("resume --json --job {first}"));
    assert!(is_done && back.as_array().is_some_and(|rows| rows.len() == 2), "{back}");
    for mut rank in ranks {
        assert_eq!(rank.ask("check"), "0");
        is_whole(rank);
    }
}

/// As a launcher that starts a script for each starts them, told of by it or not.
#[test]
fn ranks_behind_a_shell_each_are_suspended_together() {
    for is_told in [false, true] {
        let machine = Machine::new("2x320MiB");
        let rank = |gpu: u32| {
            let shell = Run::command("sh").arg("-c").arg(format!("\"$0\" {gpu} | cat; exit $?"));
            let run = machine.with_priority(shell.arg(harness::program("neighbour")), 50);
            if is_told { run.env("LOCAL_RANK", gpu.to_string()).env("LOCAL_WORLD_SIZE", "2") } else { run }
        };
        let mut ranks = [machine.start(rank(0)), machine.start(rank(1))];
        for rank in &mut ranks {
            takes(rank, 24);
        }
        let pids = eventually("both pages", || {
            let (rows, _) = machine.told("ps --json");
            let rows = rows.as_array()?.iter().filter(|row| row["levels"]["live_bytes"] == 24 * MIB);
            let pids: Vec<u64> = rows.filter_map(|row| row["process"]["identity"]["pid"].as_u64()).collect();
            <[u64; 2]>::try_from(pids).ok()
        });
        let alone = machine.gpupool(&format!("suspend --to host {}", pids[0]));
        let said = String::from_utf8_lossy(&alone.stderr).into_owned();
        assert!(!alone.status.success() && said.contains(&format!("process {} runs ", pids[1])), "{is_told}: {said}");
        let (left, is_done) = machine.told(&format!("suspend --json --to host --job {}", pids[1]));
        assert!(is_done && left.as_array().is_some_and(|rows| rows.len() == 2), "{is_told}: {left}");
        let (back, is_done) = machine.told(&format!("resume --json --job {}", pids[0]));
        assert!(is_done && back.as_array().is_some_and(|rows| rows.len() == 2), "{is_told}: {back}");
        ranks.into_iter().for_each(|rank| drop(is_whole(rank)));
    }
}

/// Of another session, started by another process, another program, or another notebook of one server: each looks like a rank, and is nobody's.
#[test]
fn programs_that_only_look_like_ranks_lend_each_other_their_gpus() {
    let renamed = tempfile::tempdir().unwrap();
    let renamed = renamed.path().join("another");
    harness::copy_program(&harness::program("neighbour"), &renamed);
    // Two scripts of one interpreter.
    let folder = tempfile::tempdir().unwrap();
    let python = folder.path().join("python3");
    harness::copy_program(&harness::program("neighbour"), &python);
    let server = std::process::id().to_string();
    for is in
        ["another session", "another parent", "another program", "another script", "another notebook", "another kernel"]
    {
        let machine = Machine::new("2x320MiB");
        let of = |run: Run, gpu: u32| {
            let run = machine.with_priority(run, 50).env("GPUPOOL_IDLE", "100ms");
            run.env("GPUPOOL_LIMIT", format!("{gpu}:16MiB"))
        };
        // Of IPython, as an editor starts them in its own session: the number is by what each sees.
        let notebook =
            |list: &str| Run::command(&python).args("-m ipykernel_launcher").env("CUDA_VISIBLE_DEVICES", list);
        let first = match is {
            "another script" => Run::command(&python).arg("0"),
            "another notebook" => notebook("0,1"),
            "another kernel" => Run::program("neighbour").arg("0").env("JPY_PARENT_PID", &server),
            _ => Run::program("neighbour").arg("0"),
        };
        let mut first = machine.start(of(first, 0));
        let other = match is {
            "another script" => Run::command(&python).arg("1"),
            "another notebook" => notebook("1,0"),
            "another kernel" => Run::program("neighbour").arg("1").env("JPY_PARENT_PID", &server),
            "another session" => Run::command("setsid").arg(harness::program("neighbour")).arg("1"),
            // It starts the program, and waits for it.
            "another parent" => {
                Run::command("sh").arg("-c").arg("\"$0\" 1; exit $?").arg(harness::program("neighbour"))
            }
            _ => Run::command(&renamed).arg("1"),
        };
        let mut other = machine.start(of(other, if is == "another notebook" { 0 } else { 1 }));
        takes(&mut other, 24);
        takes(&mut first, 24);
        let others = |machine: &Machine| machine.files().iter().filter(|name| name.ends_with(".page")).count();
        eventually("the other one's page", || (others(&machine) == 2).then_some(()));
        // It looks who else is there once a second at most, and each time that its page says something new.
        for mib in [26, 28, 30] {
            takes(&mut first, 2);
            machine.until(&first, "a look", |page| page.levels.live_bytes == mib * MIB);
        }
        takes(&mut first, 40);
        let page = machine.until(&first, "a loan", |page| page.levels.live_bytes == 70 * MIB);
        let log = std::fs::read_to_string(first.log()).unwrap();
        assert!(held(&page, 1) >= 40 * MIB && page.levels.residence.on_host == 0, "{is}: {page:?}");
        assert!(!log.contains("home_only"), "{is}: {log}");
        assert_eq!(other.ask("check"), "0");
        is_whole(first);
        is_whole(other);
    }
}

/// Whose arguments differ, each sees its own GPU first.
#[test]
fn one_script_that_an_interpreter_runs_twice_is_ranks_of_one_job_and_says_why_memory_lies_on_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let python = folder.path().join("python3");
    harness::copy_program(&harness::program("neighbour"), &python);
    let machine = Machine::new("2x320MiB");
    let rank = |list: &str| {
        let run = machine.with_priority(Run::command(&python).args("-u 0").arg(format!("--gpus={list}")), 50);
        run.env("GPUPOOL_LIMIT", "0:16MiB").env("GPUPOOL_IDLE", "100ms").env("CUDA_VISIBLE_DEVICES", list)
    };
    let mut ranks = [machine.start(rank("0,1")), machine.start(rank("1,0"))];
    keep_to_their_own_gpus(&machine, &mut ranks, [0, 0]);
    for program in &ranks {
        let log = std::fs::read_to_string(program.log()).unwrap();
        assert!(
            log.contains("was taken for one of several ranks of a job") && log.contains("gpupool set PID devices=0,1"),
            "{log}"
        );
        assert!(!log.contains("no GPU that can lend has room"), "{log}");
    }
    ranks.into_iter().for_each(|program| drop(is_whole(program)));
}

/// As Dask-CUDA starts its workers: each sees all GPUs, its own one first.
#[test]
fn workers_that_see_the_gpus_in_turn_keep_to_their_own_and_are_told_apart() {
    let machine = Machine::new("2x320MiB");
    let worker =
        |list: &str| machine.neighbour(0, 50).env("GPUPOOL_LIMIT", "0:16MiB").env("CUDA_VISIBLE_DEVICES", list);
    let mut workers = [machine.start(worker("0,1")), machine.start(worker("1,0"))];
    keep_to_their_own_gpus(&machine, &mut workers, [0, 0]);
    let text = String::from_utf8(machine.gpupool("ps").stdout).unwrap();
    for (program, number) in workers.iter().zip(0..) {
        let gpu = uuid(&machine.page(program), 0);
        assert!(text.contains(&format!("gpu0 is GPU {number} ({gpu})\n")), "{text}");
    }
    workers.into_iter().for_each(|program| drop(is_whole(program)));
}

/// They have nothing, and know of each other.
fn know_of_each_other(programs: &mut [Running; 2]) {
    for program in programs.iter_mut() {
        takes(program, 24);
    }
    for program in programs.iter() {
        let said = || std::fs::read_to_string(program.log()).unwrap_or_default().contains("home_only").then_some(());
        eventually("a program that knows of the other", said);
    }
    // What it took before they knew of each other lay where there was room.
    programs.iter_mut().for_each(|program| assert_eq!(program.ask("drop"), "dropped"));
}

/// Once they know of each other, what a program's GPU has no room for goes to the host alone; `own`: the GPU of each, by its own numbering.
fn keep_to_their_own_gpus(machine: &Machine, programs: &mut [Running; 2], own: [u32; 2]) {
    know_of_each_other(programs);
    for (gpu, program) in own.into_iter().zip(programs.iter_mut()) {
        machine.until(program, "an empty GPU of the other", |page| held(page, 1 - gpu) == 0);
        takes(program, 40);
    }
    for (gpu, program) in own.into_iter().zip(programs) {
        let page = machine.until(program, "memory on the host", |page| page.levels.residence.on_host >= 20 * MIB);
        assert_eq!(held(&page, 1 - gpu), 0, "{page:?}");
    }
}

#[test]
fn ranks_are_lent_the_gpus_that_nobody_works_on_until_somebody_does() {
    let machine = Machine::new("4x320MiB");
    let mut ranks = [0, 1].map(|number| machine.holder(launched(&machine, number, 2, 50), 480));
    for (other, program) in [1, 0].into_iter().zip(&ranks) {
        let page = machine.until(program, "loans", |page| held(page, 2) + held(page, 3) >= 160 * MIB);
        assert_eq!((held(&page, other), page.levels.residence.on_host), (0, 0), "{page:?}");
    }
    // One that cannot ask, and one that can, each as soon as it is there.
    let mut bare = machine.start(machine.bare(2));
    assert_eq!(bare.ask("check"), "0", "it has begun");
    let left = |machine: &Machine, ranks: &[Running], gpu| {
        ranks.iter().for_each(|program| {
            let page = machine.until(program, "an empty GPU", |page| held(page, gpu) == 0);
            assert_eq!(page.levels.live_bytes, 480 * MIB, "{page:?}");
        });
    };
    left(&machine, &ranks, 2);
    takes(&mut bare, 280);
    let mut sibling = machine.start(machine.neighbour(3, 50));
    assert_eq!(sibling.ask("check"), "0", "it has begun");
    left(&machine, &ranks, 3);
    takes(&mut sibling, 280);
    machine.until(&sibling, "its memory", |page| held(page, 3) >= 280 * MIB);
    // What they go on to need lies on the host.
    for (number, program) in [0, 1].into_iter().zip(&mut ranks) {
        takes(program, 40);
        let page = machine.until(program, "more on the host", |page| page.levels.live_bytes == 520 * MIB);
        assert!(page.levels.residence.on_host >= 200 * MIB, "{page:?}");
        (0..4).filter(|gpu| *gpu != number).for_each(|gpu| assert_eq!(held(&page, gpu), 0, "{page:?}"));
    }
    assert_eq!(bare.ask("check"), "0");
    ranks.into_iter().chain([sibling]).for_each(|program| drop(is_whole(program)));
    assert!(bare.end().0.success());
}

/// It was alone when it took that, or did not know yet that it was not.
#[test]
fn what_a_rank_borrowed_before_it_knew_of_the_others_leaves_for_the_host_once_it_does() {
    let machine = Machine::new("2x320MiB");
    let run = |gpu: u32| machine.rank(gpu).env("GPUPOOL_LIMIT", format!("{gpu}:16MiB"));
    let mut first = machine.start(run(1));
    takes(&mut first, 60);
    machine.until(&first, "a loan", |page| held(page, 0) >= 40 * MIB);
    let mut other = machine.start(run(0));
    takes(&mut other, 10);
    let said = || std::fs::read_to_string(first.log()).unwrap_or_default().contains("home_only").then_some(());
    eventually("a program that knows of the other", said);
    let page = machine.until(&first, "an empty GPU of the other", |page| held(page, 0) == 0);
    assert!(page.levels.live_bytes == 60 * MIB && page.levels.residence.on_host >= 40 * MIB, "{page:?}");
    assert_eq!(other.ask("check"), "0");
    is_whole(first);
    is_whole(other);
}

/// Neither those of ranks that have not started, nor those that a rank sees at another place than others do.
#[test]
fn no_rank_is_lent_the_gpu_of_another_one() {
    let on_host = |machine: &Machine, program: &Running, mib: u64| {
        let page = machine.until(program, "memory on the host", |page| page.levels.residence.on_host >= mib * MIB);
        (1..3).for_each(|gpu| assert_eq!(held(&page, gpu), 0, "{page:?}"));
    };
    let machine = Machine::new("3x320MiB");
    let first = machine.holder(launched(&machine, 0, 3, 50), 400);
    on_host(&machine, &first, 80);
    drop(is_whole(first));
    let second = launched(&machine, 0, 2, 50).env("LOCAL_RANK", "1").env("CUDA_VISIBLE_DEVICES", "1,2,0");
    let second = machine.holder(second, 400);
    on_host(&machine, &second, 80);
    drop(is_whole(second));
    // With one of them as a GPU of its own that nobody counted: NVML tells of it.
    let third = machine.holder(machine.neighbour(2, 50), 20);
    let first = machine.holder(launched(&machine, 0, 2, 50), 400);
    on_host(&machine, &first, 80);
    [first, third].into_iter().for_each(|program| drop(is_whole(program)));
}

#[test]
fn the_rank_that_matters_more_has_the_gpu_that_nobody_works_on() {
    let machine = Machine::new("3x320MiB");
    let mut low = machine.holder(launched(&machine, 0, 2, 10), 540);
    machine.until(&low, "a loan", |page| held(page, 2) >= 220 * MIB);
    let high = machine.holder(launched(&machine, 1, 2, 90), 540);
    let page = machine.until(&high, "a loan", |page| held(page, 2) >= 220 * MIB);
    assert_eq!((held(&page, 0), page.levels.residence.on_host), (0, 0), "{page:?}");
    machine.until(&low, "what is left", |page| held(page, 2) <= 80 * MIB);
    takes(&mut low, 40);
    let page = machine.page(&high);
    assert_eq!(page.levels.residence.on_host, 0, "{page:?}");
    let events = is_whole(low);
    assert!(gave(&events) >= 140 * MIB && asked(&events).iter().all(|(_, freed)| *freed == 0), "{:?}", asked(&events));
    assert_eq!(gave(&is_whole(high)), 0);
}

/// What a program makes itself, and programs that no launcher tells of.
#[test]
fn ranks_that_no_launcher_tells_of_are_lent_gpus_that_nobody_works_on() {
    let machine = Machine::new("3x320MiB");
    let rank = |gpu: u32| machine.rank(gpu).env("GPUPOOL_LIMIT", format!("{gpu}:16MiB"));
    let mut ranks = [machine.start(rank(0)), machine.start(rank(1))];
    know_of_each_other(&mut ranks);
    for (other, program) in [1, 0].into_iter().zip(&mut ranks) {
        machine.until(program, "an empty GPU of the other", |page| held(page, other) == 0);
        takes(program, 40);
        program.ask("own 40");
        let page = machine.until(program, "loans", |page| held(page, 2) >= 60 * MIB);
        assert_eq!((held(&page, other), page.levels.residence.on_host), (0, 0), "{page:?}");
    }
    ranks.into_iter().for_each(|program| drop(is_whole(program)));
}
