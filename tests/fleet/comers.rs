//! Who is about to come to a GPU that is borrowed from: its memory in use grows before NVML lists anybody there, and what is borrowed leaves for that.

use super::setup::{held, is_whole, launched, takes, was_there_before};
use super::{MIB, Machine};
use gpupool_events::{Event, RecallSign};
use harness::{Run, Running, eventually};

impl Machine {
    /// One without gpupool that begins as it is told to. Its `cuInit` takes so much of that GPU, as a real one was seen to.
    fn comer(&self, gpu: u32) -> Run {
        self.bare(gpu).arg("steps").env("SIMCUDA_INIT_MIB", format!("{gpu}=4"))
    }
}

/// It looks at a GPU's memory in use, and has seen all that it has taken there, this last.
#[track_caller]
fn watches(program: &mut Running, gpu: u32, mib: u64) {
    eventually("one that looks", || {
        let log = std::fs::read_to_string(program.log()).unwrap_or_default();
        let told = |when: &str| log.matches(&format!("how much of GPU {gpu} is in use is looked at {when}")).count();
        (told("from now on") > told("no more")).then_some(())
    });
    // A look may fall into the middle of it.
    let seen = |program: &Running| -> u64 {
        let log = std::fs::read_to_string(program.log()).unwrap_or_default();
        let words = format!("the memory in use of GPU {gpu} grew by ");
        let grew = log.split(&words).skip(1);
        grew.filter_map(|told| told.split_once(".0 MiB, by this process")?.0.parse::<u64>().ok()).sum()
    };
    let before = seen(program);
    takes(program, mib);
    eventually("that it has seen what it took", || (seen(program) >= before + mib).then_some(()));
}

#[track_caller]
fn begins(program: &mut Running) {
    assert_eq!(program.ask("init"), "begun");
}

#[track_caller]
fn makes_its_context(program: &mut Running) {
    assert_eq!(program.ask("context"), "there");
}

#[track_caller]
fn says(program: &Running, words: &str) {
    let log = || std::fs::read_to_string(program.log()).unwrap_or_default();
    eventually(words, || log().contains(words).then_some(()));
}

#[track_caller]
fn ends(bare: Running) {
    let (status, _folder) = bare.end();
    assert!(status.success(), "{status}");
}

/// By how much a GPU had grown, and whether all left for that.
fn signs(events: &[Event]) -> Vec<(u32, u64, bool)> {
    let sign = |event: &Event| match event {
        Event::RecallSign(RecallSign { device, bytes, leaves, .. }) => Some((*device, *bytes, *leaves)),
        _ => None,
    };
    events.iter().filter_map(sign).collect()
}

/// Bytes that left for this reason.
fn gave_for(events: &[Event], why: &str) -> u64 {
    let of = |event: &Event| match event {
        Event::RecallGive(event) if event.why == why => event.freed,
        _ => 0,
    };
    events.iter().map(of).sum()
}

#[test]
fn a_program_without_gpupool_has_all_of_a_borrowed_gpu_at_its_first_allocation() {
    let machine = Machine::new("2x320MiB");
    let mut debtor = machine.debtor(200);
    watches(&mut debtor, 1, 26);
    let mut comer = machine.start(machine.comer(1));
    begins(&mut comer);
    // It has no context yet, and nobody lists it.
    let page = machine.until(&debtor, "an empty GPU 1", |page| held(page, 1) == 0);
    assert_eq!(page.levels.live_bytes, 226 * MIB);
    makes_its_context(&mut comer);
    takes(&mut comer, 300);
    assert_eq!(comer.ask("check"), "0");
    says(&debtor, "\"why\":\"growth\"");
    let report = machine.gpupool(&format!("report {}", debtor.log().display()));
    let text = String::from_utf8_lossy(&report.stdout);
    assert!(
        text.contains("one about to come: memory in use grew"),
        "{text}{}",
        String::from_utf8_lossy(&report.stderr)
    );
    let events = is_whole(debtor);
    assert_eq!(signs(&events), [(1, 4 * MIB, true)]);
    assert!(gave_for(&events, "growth") >= 222 * MIB, "{events:?}");
    ends(comer);
}

#[test]
fn nothing_leaves_for_what_programs_under_gpupool_take() {
    let machine = Machine::new("2x640MiB");
    let mut debtor = machine.debtor(200);
    watches(&mut debtor, 1, 26);
    // One that has no page yet, and goes to another GPU.
    let run = machine.neighbour(0, 50).arg("steps").env("GPUPOOL_DEVICES", "0,1").env("GPUPOOL_LIMIT", "0:2MiB");
    let mut other = machine.start(run.env("SIMCUDA_INIT_MIB", "1=4"));
    begins(&mut other);
    says(&debtor, &format!("grew by 4.0 MiB, by process {} under gpupool, which begins to use CUDA", other.pid()));
    makes_its_context(&mut other);
    // One that borrows there as well, and says so at once.
    takes(&mut other, 20);
    // All but what its own GPU has room for. Two growths between two looks would be one.
    says(&debtor, &format!("grew by 18.0 MiB, by process {}", other.pid()));
    watches(&mut other, 1, 44);
    says(&debtor, &format!("grew by 44.0 MiB, by process {}", other.pid()));
    // And what it takes itself.
    watches(&mut debtor, 1, 42);
    for (program, mib) in [(&debtor, 264), (&other, 60)] {
        machine.until(program, "its memory", |page| held(page, 1) >= mib * MIB);
    }
    // It was looked at all the time.
    let mut comer = machine.start(machine.comer(1));
    begins(&mut comer);
    let is_empty = |program: &Running| held(&machine.page(program), 1) == 0;
    eventually("one that gives way", || [&debtor, &other].into_iter().any(is_empty).then_some(()));
    // To the other one what that freed may have hidden it.
    makes_its_context(&mut comer);
    for program in [&debtor, &other] {
        machine.until(program, "an empty GPU 1", |page| held(page, 1) == 0);
    }
    let told = [debtor, other].map(|program| signs(&is_whole(program)));
    let is_sign = |sign: &(u32, u64, bool)| *sign == (1, 4 * MIB, true);
    assert!(told.iter().flatten().count() > 0 && told.iter().flatten().all(is_sign), "{told:?}");
    ends(comer);
}

/// Of a program that has begun and ended between two looks nothing is left to find, and what it took has gone as well.
#[test]
fn nothing_leaves_for_one_of_ours_that_has_ended_when_it_is_looked_for() {
    let machine = Machine::new("2x320MiB");
    let mut debtor = machine.debtor(200);
    watches(&mut debtor, 1, 26);
    let agent = super::upset::agent(&debtor);
    let mut other = machine.start(machine.neighbour(0, 50).arg("steps").env("SIMCUDA_INIT_MIB", "1=4"));
    begins(&mut other);
    // It has seen the growth, and begins to read who there is.
    agent.ends_call(libc::SYS_getdents64, |_| true);
    other.signal(libc::SIGKILL);
    drop(other);
    drop(agent);
    says(&debtor, "grew by 4.0 MiB, by a process that has ended since");
    // The next one takes another amount, all of which is its own, and for it all leaves.
    let mut comer = machine.start(machine.comer(1).env("SIMCUDA_INIT_MIB", "1=6"));
    begins(&mut comer);
    machine.until(&debtor, "an empty GPU 1", |page| held(page, 1) == 0);
    assert_eq!(signs(&is_whole(debtor)), [(1, 6 * MIB, true)]);
    ends(comer);
}

#[test]
fn what_left_for_one_who_never_came_comes_back_and_stays_until_the_next_one_makes_a_context_there() {
    let machine = Machine::new("2x320MiB");
    let mut debtor = machine.debtor(200);
    watches(&mut debtor, 1, 26);
    let mut comer = machine.start(machine.comer(1));
    begins(&mut comer);
    machine.until(&debtor, "an empty GPU 1", |page| held(page, 1) == 0);
    ends(comer);
    says(&debtor, "nobody came to GPU 1 after all");
    machine.until(&debtor, "what had left", |page| held(page, 1) >= 222 * MIB);
    watches(&mut debtor, 1, 28);
    let mut comer = machine.start(machine.comer(1));
    begins(&mut comer);
    says(&debtor, "nobody came behind the last such sign");
    // All but what is lacking of what is kept free, if anything is.
    assert!(held(&machine.page(&debtor), 1) >= 222 * MIB);
    makes_its_context(&mut comer);
    machine.until(&debtor, "an empty GPU 1 again", |page| held(page, 1) == 0);
    takes(&mut comer, 300);
    let events = is_whole(debtor);
    // What a context takes beside that is more than of a program that goes elsewhere.
    assert_eq!(signs(&events), [(1, 4 * MIB, true), (1, 4 * MIB, false), (1, 4 * MIB, true)]);
    assert!(gave_for(&events, "growth") >= 2 * 222 * MIB, "{events:?}");
    ends(comer);
}

/// While a process makes its context NVML's list answers late, and the sum of what is in use at once.
#[test]
fn what_is_borrowed_leaves_before_a_slow_list_has_answered() {
    let borrows =
        |machine: &Machine| machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1").env("GPUPOOL_LIMIT", "0:2MiB");
    let is_lent =
        |machine: &Machine| launched(machine, 0, 2, 50).env("GPUPOOL_IDLE", "100ms").env("GPUPOOL_LIMIT", "0:120MiB");
    for (gpus, run, gpu) in [("2x320MiB", &borrows as &dyn Fn(&Machine) -> Run, 1), ("3x320MiB", &is_lent, 2)] {
        let machine = Machine::new(gpus);
        let mut debtor = machine.holder(run(&machine).env("SIMCUDA_LIST_MS", "600000"), 200);
        watches(&mut debtor, gpu, 26);
        let before = machine.until(&debtor, "a loan", |page| held(page, gpu) >= 76 * MIB);
        let mut comer = machine.start(machine.comer(gpu));
        begins(&mut comer);
        // The list has not answered anybody, and will not before there is a context.
        says(&debtor, "\"why\":\"growth\"");
        makes_its_context(&mut comer);
        takes(&mut comer, 300);
        let events = is_whole(debtor);
        assert!(gave_for(&events, "growth") >= held(&before, gpu), "{events:?}");
        ends(comer);
    }
}

/// A context that takes nothing is seen on the list alone.
#[test]
fn one_whose_memory_in_use_does_not_show_is_given_way_to_once_it_is_listed() {
    let machine = Machine::new("2x320MiB");
    let mut debtor = machine.debtor(200);
    watches(&mut debtor, 1, 26);
    let mut comer = machine.start(machine.bare(1).arg("steps").env("SIMCUDA_CONTEXT_MIB", "0"));
    begins(&mut comer);
    makes_its_context(&mut comer);
    machine.until(&debtor, "an empty GPU 1", |page| held(page, 1) == 0);
    takes(&mut comer, 300);
    let events = is_whole(debtor);
    assert_eq!(signs(&events), []);
    assert!(gave_for(&events, "context") >= 222 * MIB, "{events:?}");
    ends(comer);
}

/// A GPU that a rank is lent for as long as nobody works there, twice: who comes has the next one believed as well.
#[test]
fn a_rank_leaves_a_gpu_that_it_is_lent_before_somebody_works_there() {
    let machine = Machine::new("3x320MiB");
    let run = launched(&machine, 0, 2, 50).env("GPUPOOL_IDLE", "100ms").env("GPUPOOL_LIMIT", "0:120MiB");
    let mut rank = machine.holder(run, 200);
    for more in [26, 28] {
        machine.until(&rank, "a loan", |page| held(page, 2) >= 76 * MIB);
        watches(&mut rank, 2, more);
        let mut comer = machine.start(machine.comer(2));
        begins(&mut comer);
        machine.until(&rank, "an empty GPU 2", |page| held(page, 2) == 0);
        makes_its_context(&mut comer);
        takes(&mut comer, 300);
        ends(comer);
    }
    let events = is_whole(rank);
    assert_eq!(signs(&events), [(2, 4 * MIB, true); 2]);
    assert!(gave_for(&events, "growth") >= 2 * 76 * MIB, "{events:?}");
}

/// On a machine where contexts take memory.
fn with_contexts(run: Run) -> Run {
    run.env("SIMCUDA_CONTEXT_MIB", "16")
}

/// Works on GPU 0, where next to nothing of its memory may be; the rest goes to the others of these GPUs.
fn borrower(machine: &Machine, devices: &str) -> Running {
    let run = machine.neighbour(0, 50).env("GPUPOOL_DEVICES", devices).env("GPUPOOL_LIMIT", "0:2MiB");
    machine.start(with_contexts(run.env("GPUPOOL_RESERVE", "16MiB")))
}

/// Comes to GPU 1 step by step, and takes 3 MiB there by `cuInit`.
fn slow_comer(machine: &Machine) -> Run {
    with_contexts(machine.bare(1).arg("steps").env("SIMCUDA_INIT_MIB", "1=3"))
}

/// A borrower whose memory left GPU 1 for one that did not come after all, and is back: the GPU is full but for what is kept free, and the next sign is not believed.
fn behind_a_false_alarm(machine: &Machine, devices: &str) -> Running {
    let mut debtor = borrower(machine, devices);
    takes(&mut debtor, 150);
    watches(&mut debtor, 1, 26);
    machine.until(&debtor, "a loan", |page| held(page, 1) >= 170 * MIB);
    let mut first = machine.start(slow_comer(machine));
    begins(&mut first);
    machine.until(&debtor, "an empty GPU 1", |page| held(page, 1) == 0);
    ends(first);
    says(&debtor, "nobody came to GPU 1 after all");
    machine.until(&debtor, "what had left", |page| held(page, 1) >= 170 * MIB);
    watches(&mut debtor, 1, 28);
    watches(&mut debtor, 1, 34);
    debtor
}

/// What is kept free on a GPU is what a context takes, and `cuInit` has taken some of that.
#[test]
fn who_comes_behind_one_who_never_came_has_room_for_its_context() {
    let machine = Machine::new("2x256MiB");
    let debtor = behind_a_false_alarm(&machine, "0,1");
    let mut second = machine.start(slow_comer(&machine));
    begins(&mut second);
    says(&debtor, "nobody came behind the last such sign");
    says(&debtor, "\"why\":\"reserve\"");
    makes_its_context(&mut second);
    machine.until(&debtor, "an empty GPU 1 again", |page| held(page, 1) == 0);
    is_whole(debtor);
    ends(second);
}

/// Room for the context of whoever was about to come is asked for no more once one of ours is there, which asks for what it needs.
#[test]
fn nothing_leaves_for_a_comer_that_is_not_believed_once_one_of_ours_has_come() {
    let machine = Machine::new("3x256MiB");
    let mut debtor = behind_a_false_alarm(&machine, "0,1,2");
    // The rest lies on GPU 2.
    takes(&mut debtor, 40);
    machine.until(&debtor, "a second loan", |page| held(page, 2) >= 30 * MIB);
    let before = held(&machine.page(&debtor), 1);
    // What it uses cannot leave.
    debtor.ask("spin");
    let mut second = machine.start(slow_comer(&machine));
    begins(&mut second);
    says(&debtor, "nobody came behind the last such sign");
    says(&debtor, "nothing of what this process has on GPU 1 for other GPUs could leave");
    let mut ours = machine.start(machine.neighbour(1, 50).arg("steps"));
    begins(&mut ours);
    makes_its_context(&mut ours);
    let looks =
        || std::fs::read_to_string(debtor.log()).unwrap().matches("of GPU 1 is in use is looked at no more").count();
    eventually("one that is seen on GPU 1", || (looks() > 0).then_some(()));
    // All that is asked for leaves in one go, of GPU 1 before GPU 2.
    let bare = machine.start(machine.bare(2));
    debtor.ask("release");
    let page = machine.until(&debtor, "an empty GPU 2", |page| held(page, 2) == 0);
    assert_eq!(held(&page, 1), before);
    assert_eq!(gave_for(&is_whole(debtor), "reserve"), 0);
    is_whole(ours);
    [second, bare].into_iter().for_each(ends);
}

/// Nothing could leave for it in that time: what is kept free is for what `cuInit` takes and for the context.
#[test]
fn who_comes_while_nothing_can_leave_has_room_for_its_context() {
    let machine = Machine::new("2x256MiB");
    let mut debtor = borrower(&machine, "0,1");
    for mib in [150, 60, 60] {
        takes(&mut debtor, mib);
    }
    let page = machine.until(&debtor, "more than both GPUs have", |page| page.levels.residence.on_host > 0);
    assert!(held(&page, 1) >= 230 * MIB, "{page:?}");
    let agent = super::upset::agent(&debtor);
    let mut comer = machine.start(with_contexts(machine.comer(1)));
    begins(&mut comer);
    makes_its_context(&mut comer);
    drop(agent);
    machine.until(&debtor, "an empty GPU 1", |page| held(page, 1) == 0);
    takes(&mut comer, 200);
    is_whole(debtor);
    ends(comer);
}

/// What is kept free for a program that was there before is asked for no more once that has ended.
#[test]
fn nothing_leaves_for_one_that_was_there_before_and_has_ended() {
    let machine = Machine::new("3x320MiB");
    let mut bare = machine.start(machine.bare(1));
    takes(&mut bare, 20);
    was_there_before(&bare);
    let run = machine.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1,2").env("GPUPOOL_LIMIT", "0:2MiB");
    let mut debtor = machine.holder(run, 320);
    let page = machine.until(&debtor, "loans", |page| held(page, 1) >= 260 * MIB && held(page, 2) >= 30 * MIB);
    let before = held(&page, 1);
    // What it uses cannot leave.
    debtor.ask("spin");
    takes(&mut bare, 16);
    says(&debtor, "nothing of what this process has on GPU 1 for other GPUs could leave");
    ends(bare);
    says(&debtor, "how much of GPU 1 is in use is looked at from now on");
    // All that is asked for leaves in one go, of GPU 1 before GPU 2.
    let bare = machine.start(machine.bare(2));
    debtor.ask("release");
    let page = machine.until(&debtor, "an empty GPU 2", |page| held(page, 2) == 0);
    assert_eq!(held(&page, 1), before);
    assert_eq!(gave_for(&is_whole(debtor), "reserve"), 0);
    ends(bare);
}
