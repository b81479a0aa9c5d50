//! GPUs that are lent to a rank while nobody works there, and what is borrowed beside programs that cannot ask: who counts as working there, and how all of it
//! leaves as soon as somebody comes, also where that takes more than one try, and while its program is suspended.

use super::setup::{held, is_whole, launched, takes};
use super::{MIB, Machine};
use gpupool_metrics::Snapshot;
use harness::{Run, Running, eventually};
use std::path::Path;

/// A try that has to be over before the test goes on takes three times as long at most.
const SHORT: &str = "100ms";

/// A first rank of two, which may have so many MiB of its own GPU, holds so many MiB, and is lent the rest.
fn borrowing(machine: &Machine, run: Run, limit: u64, mib: u64) -> Running {
    let rank = machine.holder(run.env("GPUPOOL_LIMIT", format!("0:{limit}MiB")), mib);
    machine.until(&rank, "a loan", |page| held(page, 2) >= (mib - limit) * MIB);
    rank
}

fn rank(machine: &Machine) -> Run {
    launched(machine, 0, 2, 50).env("GPUPOOL_IDLE", "100ms")
}

/// One without gpupool, which has a context there.
fn comes(machine: &Machine, gpu: u32) -> Running {
    let mut bare = machine.start(machine.bare(gpu));
    assert_eq!(bare.ask("check"), "0", "it has begun");
    bare
}

#[track_caller]
fn ends(bare: Running) {
    let (status, _folder) = bare.end();
    assert!(status.success(), "{status}");
}

fn on_host(page: &Snapshot) -> u64 {
    page.levels.places.rows.iter().filter(|place| place.on_host).map(|place| place.held + place.own).sum()
}

pub(super) fn log_of(program: &Running) -> String {
    std::fs::read_to_string(program.log()).unwrap_or_default()
}

/// A first try has been in vain.
#[track_caller]
fn stays(program: &Running) {
    eventually("a try in vain", || log_of(program).contains("could leave for").then_some(()));
}

#[test]
fn what_cannot_leave_while_a_kernel_runs_leaves_once_that_has_ended() {
    let machine = Machine::new("3x320MiB");
    let lent = borrowing(&machine, rank(&machine).env("GPUPOOL_RECALL_WAIT", SHORT), 120, 200);
    let borrowed = machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1").env("GPUPOOL_LIMIT", "0:2MiB");
    let borrowed = machine.holder(borrowed.env("GPUPOOL_RECALL_WAIT", SHORT), 80);
    machine.until(&borrowed, "a loan", |page| held(page, 1) >= 76 * MIB);
    for (gpu, mut program) in [(2, lent), (1, borrowed)] {
        program.ask("spin");
        let mut bare = comes(&machine, gpu);
        stays(&program);
        assert!(held(&machine.page(&program), gpu) >= 76 * MIB, "it left in spite of its kernel");
        program.ask("release");
        machine.until(&program, "an empty GPU", |page| held(page, gpu) == 0);
        takes(&mut bare, 280);
        assert_eq!(bare.ask("check"), "0");
        is_whole(program);
        ends(bare);
    }
}

/// The host takes a part. As it is the program's own GPU that has room for the rest in the end, nothing was moved for it but what somebody waited for.
#[test]
fn what_has_no_room_elsewhere_leaves_in_part_and_the_rest_once_there_is_room() {
    let machine = Machine::new("3x320MiB");
    let run = rank(&machine).env("GPUPOOL_RECALL_WAIT", SHORT).env("GPUPOOL_HOST_LIMIT", "40MiB");
    let mut program = borrowing(&machine, run, 120, 220);
    let bare = comes(&machine, 2);
    machine.until(&program, "a part on the host", |page| on_host(page) >= 20 * MIB && held(page, 2) <= 80 * MIB);
    stays(&program);
    let page = machine.page(&program);
    assert!(held(&page, 2) >= 60 * MIB, "{page:?}");
    (0..3).for_each(|_| assert_eq!(program.ask("drop"), "dropped"));
    let page = machine.until(&program, "an empty GPU", |page| held(page, 2) == 0);
    assert_eq!(page.levels.live_bytes, 160 * MIB, "{page:?}");
    is_whole(program);
    ends(bare);
}

/// A short visit does not leave a rank with its memory on the host for good.
#[test]
fn what_left_for_somebody_comes_back_once_nobody_works_there_any_more() {
    let machine = Machine::new("3x320MiB");
    let mut program = borrowing(&machine, rank(&machine), 120, 200);
    let mut bare = comes(&machine, 2);
    machine.until(&program, "an empty GPU", |page| held(page, 2) == 0);
    takes(&mut bare, 100);
    ends(bare);
    machine.until(&program, "what had left", |page| held(page, 2) >= 76 * MIB && on_host(page) == 0);
    // And it is looked at who comes there next.
    let bare = comes(&machine, 2);
    machine.until(&program, "an empty GPU again", |page| held(page, 2) == 0);
    assert_eq!(program.ask("check"), "0");
    is_whole(program);
    ends(bare);
}

/// Having to leave is to need memory: a GPU that lends no more because nothing was there for a while does again.
#[test]
fn what_has_to_leave_a_gpu_that_a_rank_is_lent_goes_to_another_one_that_nobody_works_on_and_not_to_the_host() {
    let machine = Machine::new("4x320MiB");
    let program = borrowing(&machine, rank(&machine), 120, 200);
    let lends_no_more = |gpu: u32| {
        let text = format!("has nothing on GPU {gpu}");
        eventually("a GPU that lends no more", || log_of(&program).contains(&text).then_some(()));
    };
    lends_no_more(3);
    done(&machine, "drain --json 2");
    let page = machine.until(&program, "an empty GPU", |page| held(page, 2) == 0);
    assert!(held(&page, 3) >= 76 * MIB && on_host(&page) == 0, "{page:?}");
    lends_no_more(2);
    done(&machine, "undrain --json 2");
    machine.until(&program, "its memory back", |page| held(page, 2) >= 76 * MIB && held(page, 3) == 0);
    // And for somebody who comes.
    let times = log_of(&program).matches("has nothing on GPU 3").count();
    eventually("that again", || (log_of(&program).matches("has nothing on GPU 3").count() > times).then_some(()));
    let bare = comes(&machine, 2);
    let page = machine.until(&program, "an empty GPU again", |page| held(page, 2) == 0);
    assert!(held(&page, 3) >= 76 * MIB && on_host(&page) == 0, "{page:?}");
    is_whole(program);
    ends(bare);
}

/// Such a GPU lends no more once nothing was there for a while; and where somebody works there by then, that is the reason.
#[test]
fn what_left_a_drained_gpu_that_a_rank_is_lent_comes_back_behind_undrain_or_once_nobody_works_there() {
    let machine = Machine::new("3x320MiB");
    let program = borrowing(&machine, rank(&machine), 120, 200);
    let drain = |times: usize| {
        done(&machine, "drain --json 2");
        let page = machine.until(&program, "an empty GPU", |page| held(page, 2) == 0);
        assert!(on_host(&page) >= 76 * MIB, "{page:?}");
        let lends_no_more = || (log_of(&program).matches("has nothing on GPU 2").count() >= times).then_some(());
        eventually("a GPU that lends no more", lends_no_more);
    };
    let is_back = |what: &str| {
        machine.until(&program, what, |page| held(page, 2) >= 76 * MIB && on_host(page) == 0);
    };
    drain(1);
    let (told, all) = machine.told("undrain --json 2");
    assert!(all && told[0]["stayed"] == serde_json::json!([]), "{told}");
    is_back("its memory back");
    drain(2);
    let bare = comes(&machine, 2);
    let (told, _) = machine.told("undrain --json 2");
    let why = told[0]["stayed"][0]["what"].as_str().unwrap_or_default();
    assert!(why.contains("only while nobody is seen to work there"), "{told}");
    assert_eq!(held(&machine.page(&program), 2), 0);
    ends(bare);
    is_back("its memory back by itself");
    is_whole(program);
}

/// A fork is under way when it is looked whether what left may come back, and nothing else wakes the agent afterwards: nothing is on a GPU, so it need not look at the health
/// of any.
#[test]
fn what_left_comes_back_where_a_fork_was_in_the_way_of_asking_who_works_there() {
    let machine = Machine::new("3x320MiB");
    let mut program = borrowing(&machine, rank(&machine), 0, 80);
    let bare = comes(&machine, 2);
    machine.until(&program, "an empty GPU", |page| held(page, 2) == 0);
    program.ask("fork and stand");
    eventually("a fork under way", || (program.ask("stands") == "yes").then_some(()));
    ends(bare);
    eventually("a question that cannot be asked", || {
        log_of(&program).contains("since the program forks").then_some(())
    });
    program.ask("let");
    machine.until(&program, "what had left", |page| held(page, 2) >= 76 * MIB && on_host(page) == 0);
    is_whole(program);
}

/// The time of all of them is told.
#[test]
fn a_try_to_leave_in_vain_holds_the_program_up_for_a_bounded_time() {
    let machine = Machine::new("3x320MiB");
    // Who asks would be waited for for 30 s, and three times as long.
    let mut program = borrowing(&machine, rank(&machine), 120, 200);
    program.ask("spin");
    let bare = comes(&machine, 2);
    stays(&program);
    program.ask("release");
    machine.until(&program, "an empty GPU", |page| held(page, 2) == 0);
    let told = |words: &str| {
        let log = log_of(&program);
        let line = log.lines().find(|line| line.contains(words));
        line.map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
    };
    let first = told("could leave for").unwrap();
    let [tries, held] = ["tries", "held_ms"].map(|name| first[name].as_u64().unwrap());
    assert!(tries == 1 && (1..5000).contains(&held), "{first}");
    let sum = eventually("the sum of all", || told("nothing has to leave other GPUs for anybody any more"));
    assert!(sum["tries"].as_u64() >= Some(1) && sum["held_ms"].as_u64() >= Some(held), "{sum}");
    is_whole(program);
    ends(bare);
}

/// A small block that found the GPU full is the driver's, and stands in what is to stay free: what was there before that has its room all the same.
#[test]
fn a_program_alone_is_back_where_it_was_when_it_is_resumed_also_where_small_blocks_stand_in_the_reserve() {
    let machine = Machine::new("1x128MiB");
    let mut program = machine.holder(machine.neighbour(0, 50), 100);
    takes(&mut program, 16);
    let full = machine.until(&program, "a full GPU", |page| page.levels.live_bytes >= 116 * MIB);
    let (there, beside) = (held(&full, 0), on_host(&full));
    assert!(there >= 100 * MIB && beside > 0, "{full:?}");
    assert!(program.ask("piece 40").parse::<f64>().is_ok(), "a small block");
    for _ in 0..2 {
        done(&machine, &format!("suspend --json --to host {}", program.pid()));
        let (told, all) = machine.told(&format!("resume --json {}", program.pid()));
        assert!(all && told[0]["stayed_bytes"] == 0, "{told}");
        let page = machine.until(&program, "its memory back", |page| page.levels.suspended == 0 && held(page, 0) > 0);
        assert_eq!((held(&page, 0), page.levels.residence.on_host), (there, full.levels.residence.on_host), "{page:?}");
    }
    is_whole(program);
}

/// As much as a context takes here stays free, which is more than `GPUPOOL_RESERVE`: one that was refused it would never be seen.
#[test]
fn who_comes_to_a_gpu_that_loans_have_filled_has_room_for_its_context() {
    let machine = Machine::new("3x320MiB");
    let context = |run: Run| run.env("SIMCUDA_CONTEXT_MIB", "36").env("GPUPOOL_RESERVE", "4MiB");
    let mut program = machine.holder(context(rank(&machine)).env("GPUPOOL_LIMIT", "0:20MiB"), 20);
    (0..20).for_each(|_| assert!(takes(&mut program, 20) < u64::MAX));
    let page = machine.until(&program, "more than the GPU has", |page| on_host(page) >= 40 * MIB);
    assert!(held(&page, 2) >= 260 * MIB, "{page:?}");
    let mut bare = machine.start(machine.bare(2).env("SIMCUDA_CONTEXT_MIB", "36"));
    assert_eq!(bare.ask("check"), "0", "it has begun");
    machine.until(&program, "an empty GPU", |page| held(page, 2) == 0);
    takes(&mut bare, 240);
    is_whole(program);
    ends(bare);
}

#[test]
fn a_rank_that_is_lent_nothing_because_nvml_is_missing_says_so_once() {
    let machine = Machine::new("3x320MiB");
    let run = rank(&machine).env("GPUPOOL_LIMIT", "0:60MiB");
    let run = run.without_nvml();
    let mut program = machine.holder(run, 100);
    let page = machine.until(&program, "memory on the host", |page| on_host(page) >= 40 * MIB);
    assert_eq!(held(&page, 1) + held(&page, 2), 0, "{page:?}");
    takes(&mut program, 20);
    let log = log_of(&program);
    assert_eq!(log.matches("only NVML tells that nobody works on one").count(), 1, "{log}");
    is_whole(program);
}

/// Of both sides, to people and to programs; and no number is cut where several places are named in one line.
#[test]
fn ps_tells_who_borrows_what_of_whom() {
    let machine = Machine::new("4x320MiB");
    let owner = machine.holder(machine.neighbour(1, 50), 40);
    let run = machine.neighbour(0, 50).env("GPUPOOL_LIMIT", "0:4MiB,1:40MiB,2:40MiB,3:40MiB");
    let debtor = machine.holder(run.env("GPUPOOL_DEVICES", "0,1,2,3"), 160);
    let lent = debtor.pid();
    let listed = eventually("both", || {
        let text = String::from_utf8(machine.gpupool("ps").stdout).unwrap();
        (text.contains(" of gpu1 for gpu0") && text.contains(&format!(" of gpu1 to process {lent}"))).then_some(text)
    });
    assert!(listed.contains("borrows: ") && listed.contains("lends: "), "{listed}");
    let whole = ["gpu0 4.0 MiB", "gpu1 40.0 MiB", "gpu2 40.0 MiB", "gpu3 40.0 MiB", "host0 36.0 MiB"];
    assert!(whole.iter().all(|part| listed.contains(part)) && !listed.contains('…'), "{listed}");
    assert!(listed.lines().all(|line| line.len() <= 80), "{listed}");
    let (all, done) = machine.told("ps --json");
    let row = |pid: u32| all.as_array().unwrap().iter().find(|row| row["process"]["identity"]["pid"] == pid).unwrap();
    let lends = &row(owner.pid())["lends"][0];
    assert!(done && lends["pid"] == lent && lends["gpu"] == "gpu1", "{all}");
    let loans = row(lent)["levels"]["loans"]["rows"].as_array().unwrap();
    let loan = loans.iter().find(|loan| loan["lender"] == "gpu1").unwrap();
    assert_eq!((&loan["borrower"], &loan["bytes"]), (&"gpu0".into(), &lends["bytes"]), "{all}");
    is_whole(owner);
    is_whole(debtor);
}

/// Two programs work on the GPU of which a third has some: each lends all of that, and not as much more.
#[test]
fn what_two_lend_together_is_told_as_the_same() {
    let machine = Machine::new("2x320MiB");
    let owners = [20, 20].map(|mib| machine.holder(machine.neighbour(1, 50), mib));
    let debtor = machine.debtor(40);
    let pids = owners.each_ref().map(Running::pid);
    eventually("both", || {
        let (all, _) = machine.told("ps --json");
        let row = |pid: u32| all.as_array()?.iter().find(|row| row["process"]["identity"]["pid"] == pid);
        let with = |pid: u32| Some(row(pid)?["lends"][0]["with"].clone());
        (with(pids[0])? == serde_json::json!([pids[1]]) && with(pids[1])? == serde_json::json!([pids[0]])).then_some(())
    });
    let text = String::from_utf8(machine.gpupool("ps").stdout).unwrap();
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(pids.iter().all(|pid| words.contains(&format!("(the same that process {pid} lends)"))), "{text}");
    owners.into_iter().chain([debtor]).for_each(|program| _ = is_whole(program));
}

/// So it is looked at who comes there next.
#[test]
fn what_has_not_left_before_whoever_came_has_gone_stays_and_leaves_for_the_next_one() {
    let machine = Machine::new("3x320MiB");
    let mut program = borrowing(&machine, rank(&machine).env("GPUPOOL_RECALL_WAIT", SHORT), 120, 200);
    program.ask("spin");
    let bare = comes(&machine, 2);
    // Until then it leaves for one who is about to come, and is lent as before.
    eventually("one that is seen there", || log_of(&program).contains("somebody works on GPU 2 now").then_some(()));
    stays(&program);
    ends(bare);
    eventually("a GPU that lends again", || log_of(&program).contains("works on GPU 2 any more").then_some(()));
    program.ask("release");
    let page = machine.page(&program);
    assert!(held(&page, 2) >= 80 * MIB, "{page:?}");
    let mut bare = comes(&machine, 2);
    machine.until(&program, "an empty GPU", |page| held(page, 2) == 0);
    takes(&mut bare, 280);
    is_whole(program);
    ends(bare);
}

#[track_caller]
fn done(machine: &Machine, arguments: &str) {
    let (told, all) = machine.told(arguments);
    assert!(all, "{arguments}: {told}");
}

/// Its own GPU is others' meanwhile. Where somebody works on the other one when it is resumed, what it had there before stays on the host.
#[test]
fn what_a_suspended_rank_has_on_a_gpu_that_it_is_lent_leaves_for_the_host_and_its_own_gpu_stays_empty() {
    let machine = Machine::new("3x320MiB");
    let program = borrowing(&machine, rank(&machine), 120, 200);
    let pid = program.pid();
    done(&machine, &format!("suspend --json --to peers {pid}"));
    let page = machine.until(&program, "all on the peer", |page| held(page, 2) >= 200 * MIB);
    assert_eq!((held(&page, 0), on_host(&page)), (0, 0), "{page:?}");
    let mut bare = comes(&machine, 2);
    let page = machine.until(&program, "an empty GPU", |page| held(page, 2) == 0);
    assert!(page.levels.suspended > 0 && on_host(&page) >= 200 * MIB, "{page:?}");
    assert_eq!((held(&page, 0), held(&page, 1)), (0, 0), "{page:?}");
    let listed = String::from_utf8(machine.gpupool("ps").stdout).unwrap();
    assert!(listed.contains("suspended"), "{listed}");
    takes(&mut bare, 280);
    // One that works where it does has all of that.
    let mut other = machine.start(machine.bare(0));
    takes(&mut other, 280);
    ends(other);
    done(&machine, &format!("resume --json {pid}"));
    let page =
        machine.until(&program, "all of it back", |page| page.levels.suspended == 0 && held(page, 0) >= 116 * MIB);
    assert!(held(&page, 2) == 0 && page.levels.residence.on_host >= 80 * MIB, "{page:?}");
    is_whole(program);
    ends(bare);
}

/// Whether it has been lent any before or not.
#[test]
fn a_rank_is_suspended_to_a_gpu_that_nobody_works_on_and_leaves_it_when_somebody_comes() {
    for to in ["any", "peers"] {
        let machine = Machine::new("3x320MiB");
        let program = machine.holder(rank(&machine), 100);
        let pid = program.pid();
        done(&machine, &format!("suspend --json --to {to} {pid}"));
        let page = machine.until(&program, "all on the GPU that nobody works on", |page| held(page, 2) >= 100 * MIB);
        assert_eq!((held(&page, 0), held(&page, 1), on_host(&page)), (0, 0, 0), "{to}: {page:?}");
        let mut bare = comes(&machine, 2);
        let page = machine.until(&program, "an empty GPU", |page| held(page, 2) == 0);
        assert!(held(&page, 0) == 0 && on_host(&page) >= 100 * MIB, "{to}: {page:?}");
        takes(&mut bare, 280);
        done(&machine, &format!("resume --json {pid}"));
        machine.until(&program, "all of it at home", |page| held(page, 0) >= 100 * MIB && held(page, 2) == 0);
        is_whole(program);
        ends(bare);
    }
}

/// The GPU lends no more once nothing was there for a while.
#[test]
fn what_a_rank_had_on_a_gpu_that_it_was_lent_comes_back_there_when_it_is_resumed_from_the_host_or_a_disk() {
    let machine = Machine::new("3x320MiB");
    let folder = tempfile::tempdir().unwrap();
    let program = borrowing(&machine, rank(&machine), 120, 200);
    let pid = program.pid();
    for (times, to) in (1..).zip([Path::new("host"), folder.path()]) {
        done(&machine, &format!("suspend --json --to {} {pid}", to.display()));
        machine.until(&program, "empty GPUs", |page| (0..3).all(|gpu| held(page, gpu) == 0));
        let lends_no_more = || (log_of(&program).matches("has nothing on GPU 2").count() == times).then_some(());
        eventually("a GPU that lends no more", lends_no_more);
        done(&machine, &format!("resume --json {pid}"));
        let page = machine.until(&program, "all of it", |page| page.levels.suspended == 0 && held(page, 0) > 0);
        assert!(held(&page, 0) >= 116 * MIB && held(&page, 2) >= 80 * MIB, "{}: {page:?}", to.display());
    }
    is_whole(program);
}

/// Also where a GPU that it is suspended to is drained, and of one that borrows without being a rank.
#[test]
fn a_drained_gpu_that_a_program_is_suspended_to_is_left_for_the_host_and_not_for_its_own() {
    let machine = Machine::new("2x320MiB");
    let program = machine.holder(machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1"), 200);
    let pid = program.pid();
    done(&machine, &format!("suspend --json --to peers {pid}"));
    machine.until(&program, "all on the peer", |page| held(page, 1) >= 200 * MIB && held(page, 0) == 0);
    done(&machine, "drain --json 1");
    let page = machine.until(&program, "an empty GPU", |page| held(page, 1) == 0);
    assert!(held(&page, 0) == 0 && page.levels.suspended > 0 && on_host(&page) >= 200 * MIB, "{page:?}");
    done(&machine, &format!("resume --json {pid}"));
    machine.until(&program, "its memory at home", |page| held(page, 0) >= 200 * MIB && held(page, 1) == 0);
    done(&machine, "undrain --json 1");
    is_whole(program);
}

/// A rank that holds more than its own GPU has room for, and of the others has none.
#[track_caller]
fn is_lent_nothing(machine: &Machine, run: Run) {
    let program = machine.holder(run, 400);
    let page = machine.until(&program, "memory on the host", |page| page.levels.residence.on_host >= 80 * MIB);
    (1..4).for_each(|gpu| assert_eq!(held(&page, gpu), 0, "{page:?}"));
    is_whole(program);
}

/// As of two jobs on one host, each with half of the GPUs: the other rank of the second one may have to start yet.
#[test]
fn no_rank_is_lent_what_it_sees_where_the_other_ranks_of_its_job_see_theirs() {
    let machine = Machine::new("4x320MiB");
    is_lent_nothing(&machine, launched(&machine, 0, 2, 50).env("CUDA_VISIBLE_DEVICES", "2,3"));
}

/// As Dask-CUDA has its workers see the GPUs: of two ranks the second one sees the first one's GPU last.
#[test]
fn no_rank_is_lent_the_first_gpus_of_the_machine_wherever_it_sees_them() {
    let machine = Machine::new("3x320MiB");
    let second = launched(&machine, 0, 2, 50).env("LOCAL_RANK", "1").env("CUDA_VISIBLE_DEVICES", "1,2,0");
    is_lent_nothing(&machine, second);
}

#[test]
fn no_rank_is_lent_a_gpu_on_which_nvml_tells_of_somebody() {
    let machine = Machine::new("3x320MiB");
    let bare = comes(&machine, 2);
    is_lent_nothing(&machine, launched(&machine, 0, 2, 50));
    ends(bare);
}

/// The driver's checkpoint has taken its contexts away, so that NVML knows of none, and it needs all of their room at once when it comes back.
#[test]
fn no_rank_is_lent_the_gpu_of_a_program_that_has_left_it_whole() {
    let machine = Machine::new("3x320MiB");
    let away = machine.holder(machine.neighbour(2, 50).env("GPUPOOL_DEVICES", "2"), 40);
    done(&machine, &format!("suspend --json --process --to host {}", away.pid()));
    is_lent_nothing(&machine, launched(&machine, 0, 2, 50));
    done(&machine, &format!("resume --json {}", away.pid()));
    is_whole(away);
}

/// It works on none.
#[test]
fn the_helper_that_keeps_a_gpu_awake_does_not_keep_it_from_being_lent() {
    let machine = Machine::new("3x320MiB");
    let mut program = borrowing(&machine, rank(&machine).env("GPUPOOL_LENDERS", "awake"), 120, 200);
    eventually("a helper", || log_of(&program).contains("lender.awake").then_some(()));
    // Before its page tells of more, the agent has looked who is there.
    for mib in [220, 240] {
        takes(&mut program, 20);
        machine.until(&program, "another look", |page| page.levels.live_bytes == mib * MIB);
    }
    let page = machine.until(&program, "more of it", |page| held(page, 2) >= 120 * MIB);
    assert_eq!(on_host(&page), 0, "{page:?}");
    assert!(!log_of(&program).contains("somebody works on GPU 2 now"));
    is_whole(program);
}
