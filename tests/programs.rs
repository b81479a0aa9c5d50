//! Every program of `tests/programs` that fits on one GPU prints the same bare and under the shim, in every mode.

use harness::{Output, Run, repository};

/// One line of `tests/programs/runs.txt`, which says what the words mean.
struct Listed {
    kept: String,
    when: String,
    name: String,
    arguments: String,
}

fn runs() -> Vec<Listed> {
    let listed: Vec<Listed> = include_str!("programs/runs.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| {
            let mut words = line.split_whitespace().map(str::to_owned);
            let (kept, when, name) = (words.next()?, words.next()?, words.next()?);
            Some(Listed { kept, when, name, arguments: words.collect::<Vec<_>>().join(" ") })
        })
        .collect();
    assert!(listed.len() > 10, "runs.txt lists {} runs", listed.len());
    listed
}

#[test]
fn the_simulated_driver_says_what_a_real_one_said() {
    for Listed { kept, name, arguments, .. } in runs().iter().filter(|run| run.kept != "-") {
        let path = repository().join(format!("tests/programs/expected/{kept}.txt"));
        let real = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Run::program(name).args(arguments).sim("2x8GiB").go().prints(&real);
    }
}

/// What `probe_*.c` ask real drivers. They say it by their status, too; what they measure is not looked at here.
#[test]
fn the_simulated_driver_answers_probes_as_moves_rely_on() {
    let digest = format!("{} 2", repository().join("src/cuda/digest.ptx").display());
    for (name, arguments) in [
        ("probe_markers", "connections 8"),
        ("probe_markers", "coverage"),
        ("probe_contexts", ""),
        ("probe_grants", "same 8 lock"),
        ("probe_grants", "growing 8 lock"),
        ("probe_grants", "neighbours 8"),
        ("probe_grants", "coming 8 lock"),
        ("probe_grants", "ending 8 lock"),
        ("probe_grants", "first 8 lock"),
        ("probe_ranges", "0"),
        ("probe_ranges", "-1"),
        ("probe_adapters", ""),
        ("probe_room", "1"),
        ("probe_remaps", "60 3"),
        ("probe_aliases", "2"),
        ("probe_events", "64"),
        ("probe_digest", &digest),
        // It runs no such kernels; what remains is that each place is asked about.
        ("probe_atomics", ""),
    ] {
        for gpus in ["1x8GiB", "2x8GiB"] {
            Run::program(name).args(arguments).sim(gpus).go().succeeds().says("every rule stands");
        }
    }
}

/// Whoever asked a process for room that ends looks then.
#[test]
fn what_a_killed_process_had_is_free_once_it_has_ended() {
    let machine = tempfile::tempdir().unwrap();
    let run = Run::program("probe_ended").args("1024 4").sim("1x4GiB");
    run.env("SIMCUDA_MACHINE", machine.path().join("machine")).go().succeeds().says("every rule stands");
}

/// Two threads that give access to one range at once get into each other's way in a real driver, which answers one of them 208, or lets a GPU fault that it said has access.
#[test]
fn the_simulated_driver_tells_of_threads_that_give_access_to_one_range_at_once() {
    for question in ["same", "growing", "first"] {
        let output = Run::program("probe_grants").args(&format!("{question} 40")).sim("4x8GiB").may_violate().go();
        let is_told = |violation: &String| violation.contains("while another thread's of ");
        assert!(output.violations.iter().any(is_told), "{question}: {:?}", output.violations);
    }
}

/// Asks of another process, so there has to be a machine that both are on.
#[test]
fn the_simulated_driver_takes_processes_off_its_gpus_and_loses_them_as_a_real_one_does() {
    for gpus in ["1x8GiB", "2x8GiB"] {
        let output = Run::program("probe_checkpoint").args("4").sim(gpus).machine().go();
        output.succeeds().says("every rule stands");
        assert!(output.stdout.contains("managed memory: lock 0, checkpoint 801"), "{}", output.stdout);
    }
}

/// Documented, and stricter than what was measured of a real driver: it may refuse to update a graph whose operands moved away.
#[test]
fn graphs_over_memory_that_moved_may_refuse_what_is_made_there() {
    let output = Run::program("probe_graphs").sim("2x8GiB").go();
    output.exits(1).says("on GPU 1: updated with a graph that was made there: 910, reason 5, data right");
    output.says("on GPU 1: the copy's: 1, data right").says("on GPU 1: instantiated anew: 0, data right");
    let falls = output.stdout.lines().filter(|line| line.starts_with("  FALLS: A9")).count();
    // The update, the copy's parameters and the fill's, on GPU 1 and on the host.
    assert_eq!(falls, 6, "{}", output.stdout);
}

const CROWDED: &[&str] = &["GPUPOOL_LIMIT=32MiB", "GPUPOOL_HOST_LIMIT=1GiB"];

#[test]
fn what_no_argument_names_is_right_wherever_it_lies() {
    for (gpus, checksum) in [("1", "checksum f990551abd8217c5"), ("2", "checksum 652c13c8dadba465")] {
        let run = Run::program("all_at_once").arg(gpus).sim("2x2GiB");
        for settings in [&[], CROWDED] {
            run.same_under_shim(settings).says(checksum);
        }
    }
}

#[test]
fn programs_whose_gpus_are_never_idle_end() {
    for part in ["persistent", "host", "functions", "flags", "capture", "ahead", "connections"] {
        let run = Run::program("never_stuck").arg(part).sim("2x2GiB");
        let blocks = if part == "connections" { 8 } else { 12 };
        run.same_under_shim(CROWDED).says(&format!("{blocks} blocks used meanwhile, 0 words wrong"));
    }
}

#[track_caller]
fn on_one_gpu(name: &str, arguments: &str, settings: &[&str]) -> Output {
    Run::program(name).args(arguments).sim("1x8GiB").same_under_shim(settings)
}

/// All that are listed with one of these words. They fit into 8 GiB.
fn all_alike(settings: &[&str], when: &[&str]) {
    for run in runs().iter().filter(|run| when.contains(&run.when.as_str())) {
        on_one_gpu(&run.name, &run.arguments, settings);
    }
}

const MANAGED: &[&str] = &["beside", "alone"];
const UNMANAGED: &[&str] = &["beside", "alone", "plain"];

#[test]
fn programs_print_the_same_in_mode_pool() {
    all_alike(&[], UNMANAGED);
}

#[test]
fn programs_print_the_same_when_every_request_is_pooled() {
    all_alike(&["GPUPOOL_MIN_SIZE=1"], UNMANAGED);
}

#[test]
fn programs_print_the_same_in_mode_spill() {
    all_alike(&["GPUPOOL_MODE=spill"], UNMANAGED);
}

#[test]
fn programs_print_the_same_in_mode_managed() {
    // `managed.rs` says what the answers to questions differ in.
    for prefetch in ["alloc", "launch"] {
        all_alike(&["GPUPOOL_MODE=managed", &format!("GPUPOOL_PREFETCH={prefetch}")], MANAGED);
    }
}

#[test]
fn programs_print_the_same_in_mode_trace() {
    all_alike(&["GPUPOOL_MODE=trace"], UNMANAGED);
}

#[test]
fn programs_print_the_same_in_mode_off() {
    all_alike(&["GPUPOOL_MODE=off"], UNMANAGED);
}

#[test]
fn nothing_is_said_on_stderr_while_nothing_is_wrong() {
    for (name, arguments) in [("fill_spread", "8 64"), ("pitch", ""), ("threads_contexts", ""), ("bad_input", "")] {
        on_one_gpu(name, arguments, &[]).is_quiet();
    }
}

#[test]
fn programs_that_need_four_gpus_print_the_same() {
    let four: Vec<Listed> = runs().into_iter().filter(|run| run.when == "four").collect();
    assert!(!four.is_empty());
    for run in four {
        Run::program(&run.name).args(&run.arguments).sim("4x2GiB").same_under_shim(&[]).succeeds();
    }
}

#[test]
fn copies_between_two_gpus_are_the_same() {
    let shim = Run::program("peers").sim("2x1GiB").same_under_shim(&[]);
    shim.succeeds().says("peer copy 0 to 1: 0 wrong");
}
