//! Every setting, right and wrong. A wrong one is named with its value and what to write, and the program runs as if we
//! were not there; a right one shows in what happens.

use gpupool_events::Event;
use harness::{Build, Output, Run};

/// A program that overflows its GPU: bare, its second allocation fails, so whether the pool takes part is seen.
fn overflowing() -> Run {
    Run::program("steps").args("a:150 a:150").sim("2x256MiB")
}

/// Variable, value, and a part of the message that says what to write.
const MALFORMED: &[(&str, &str, &str)] = &[
    ("GPUPOOL_MODE", "sideways", "pool"),
    ("GPUPOOL_PREFETCH", "always", "launch"),
    ("GPUPOOL_MANAGED_ADVICE", "yes", "on"),
    ("GPUPOOL_MIN_SIZE", "lots", "1MiB"),
    ("GPUPOOL_MIN_SIZE", "-1", "1MiB"),
    ("GPUPOOL_MIN_SIZE", "0", "at least 1"),
    ("GPUPOOL_SMALL", "off", "driver"),
    ("GPUPOOL_DEVICES", "first", "0,2"),
    ("GPUPOOL_DEVICES", "0,0", "0"),
    ("GPUPOOL_RESERVE", "70XB", "1GiB"),
    ("GPUPOOL_LIMIT", "0:70XB", "0:70GiB,1:40GiB"),
    ("GPUPOOL_LIMIT", "0:", "0:70GiB,1:40GiB"),
    ("GPUPOOL_HOST_LIMIT", "half", "64GiB"),
    ("GPUPOOL_HOST_LIMIT", "99999999999999999999GiB", "64GiB"),
    ("GPUPOOL_PLACEMENT", "random", "local-first"),
    ("GPUPOOL_FREE", "never", "strict"),
    ("GPUPOOL_PRIORITY", "101", "0 to 100"),
    ("GPUPOOL_SOFT_OOM", "maybe", "auto"),
    ("GPUPOOL_MEMINFO", "none", "device"),
    ("GPUPOOL_SUMMARY", "loud", "auto"),
    ("GPUPOOL_LOG_FILE", "log-%q", "%p"),
    ("GPUPOOL_LIMITS", "0:1GiB", "GPUPOOL_LIMIT"),
    ("GPUPOOL_ANYTHING_ELSE", "1", "--help"),
];

#[test]
fn each_malformed_setting_is_named_and_the_program_runs_without_us() {
    let bare = overflowing().go();
    bare.says("allocate 150: 2");
    for (name, value, expected) in MALFORMED {
        let shim = overflowing().shim().env(name, value).go();
        shim.same_as(&bare).warns(&format!("{name}={value}")).warns(expected);
    }
}

#[test]
fn all_malformed_settings_are_told_at_once() {
    let shim = overflowing().shim().env("GPUPOOL_MODE", "sideways").env("GPUPOOL_FREE", "never").go();
    shim.warns("GPUPOOL_MODE=sideways").warns("GPUPOOL_FREE=never");
}

/// Settings that are well formed and name what this machine does not have.
#[test]
fn what_the_machine_lacks_is_named_too() {
    let bare = overflowing().go();
    for (name, value, expected) in [
        ("GPUPOOL_DEVICES", "0,7", "GPUPOOL_DEVICES=0,7"),
        ("GPUPOOL_LIMIT", "0:1TiB", "GPU 0 has 256.0 MiB"),
        ("GPUPOOL_LIMIT", "9:64MiB", "GPUPOOL_LIMIT=9:64"),
        ("GPUPOOL_RESERVE", "1GiB", "no GPU here has more than 256.0 MiB"),
    ] {
        let shim = overflowing().shim().env(name, value).go();
        shim.same_as(&bare).warns(name).warns(expected);
    }
}

/// Who writes 10 means 10 GiB; it is obeyed all the same, and told.
#[test]
fn a_size_without_a_unit_that_is_no_likely_number_of_bytes_is_told() {
    let advice = |name, value| {
        let shim = overflowing().shim().env(name, value).go();
        let told = shim.stderr.lines().filter(|line| line.contains("as there is no unit"));
        told.map(str::to_owned).collect::<Vec<_>>()
    };
    for (name, value, number) in [
        ("GPUPOOL_LIMIT", "10", "10"),
        ("GPUPOOL_LIMIT", "0:64MiB,1:70", "70"),
        ("GPUPOOL_HOST_LIMIT", "64", "64"),
        ("GPUPOOL_RESERVE", " 2", "2"),
        ("GPUPOOL_PINNED_LIMIT", "4", "4"),
        ("GPUPOOL_GUARANTEE", "0:10", "10"),
    ] {
        let told = advice(name, value);
        let words = format!("{name}={value}: {number} bytes, as there is no unit; write {number}GiB if that is meant");
        assert!(told.len() == 1 && told[0].contains(&words), "{name}={value}: {told:?}");
    }
    for (name, value) in [
        ("GPUPOOL_LIMIT", "104857600"),
        ("GPUPOOL_LIMIT", "1:10MiB"),
        ("GPUPOOL_LIMIT", "10B"),
        ("GPUPOOL_HOST_LIMIT", "0"),
        ("GPUPOOL_MIN_SIZE", "1"),
        ("GPUPOOL_STACK_SIZE", "1024"),
    ] {
        assert_eq!(advice(name, value), [""; 0], "{name}={value}");
    }
}

/// Well formed, and as small or as large as a number can be.
#[test]
fn the_least_and_the_greatest_value_of_a_size_end_no_program() {
    for name in
        ["MIN_SIZE", "LIMIT", "HOST_LIMIT", "PINNED_LIMIT", "MALLOC_HEAP_SIZE", "STACK_SIZE", "PRINTF_FIFO_SIZE"]
    {
        for value in ["0", "1", "18446744073709551615"].iter().filter(|value| (name, **value) != ("MIN_SIZE", "0")) {
            let shim = overflowing().shim().env(&format!("GPUPOOL_{name}"), value).go();
            shim.succeeds().says("allocate 150: 0");
            assert!(!shim.stderr.contains("error"), "GPUPOOL_{name}={value}: {}", shim.stderr);
        }
    }
}

#[test]
fn a_log_that_cannot_be_written_is_told_and_nothing_else_changes() {
    for path in ["/no/such/folder/log.jsonl", "/dev/full/log", "/proc/log.jsonl"] {
        let shim = overflowing().shim().env("GPUPOOL_LOG_FILE", path).go();
        shim.succeeds().says("allocate 150: 0").warns("GPUPOOL_LOG_FILE").warns(path);
    }
}

#[test]
fn a_relative_log_lies_where_the_program_started() {
    let run = Run::program("moves").arg("/").sim("1x256MiB").shim().env("GPUPOOL_SUMMARY", "on");
    let shim = run.env("GPUPOOL_LOG_FILE", "mine.jsonl").go();
    shim.succeeds();
    assert_eq!(shim.files.len(), 1, "{:?} {}", shim.files, shim.stderr);
    shim.warns(&format!("log: {}", shim.files[0])).warns(&format!("gpupool report {}", shim.files[0]));
}

#[test]
fn a_log_that_is_not_there_any_more_is_not_named_as_one_to_read() {
    let run = Run::program("moves").args(". mine.jsonl").sim("1x256MiB").shim().env("GPUPOOL_SUMMARY", "on");
    let shim = run.env("GPUPOOL_LOG_FILE", "mine.jsonl").go();
    shim.succeeds().warns("mine.jsonl (it was removed)").leaves_no_file();
    assert!(!shim.stderr.contains("gpupool report"), "{}", shim.stderr);
    // The one that `gpupool run --fail-on` makes for itself is removed behind the program's end, or named by it.
    let folder = tempfile::tempdir().unwrap();
    let verdicts = folder.path().join("verdicts");
    std::fs::create_dir(&verdicts).unwrap();
    let run = Run::program("moves").arg(".").sim("1x256MiB").shim().env("GPUPOOL_SUMMARY", "on");
    let shim = run.env("GPUPOOL_VERDICTS", &verdicts).env("GPUPOOL_LOG_FILE", folder.path().join("%p.jsonl")).go();
    shim.succeeds().warns("no memory was pooled");
    assert!(!shim.stderr.contains(&folder.path().display().to_string()), "{}", shim.stderr);
}

/// Two containers with one folder for their logs have processes of the same numbers.
#[test]
fn logs_of_different_pid_namespaces_have_different_names() {
    let folder = tempfile::tempdir().unwrap();
    let program = Build::program("moves").path();
    let contained = |command: &str| {
        let run =
            Run::command("unshare").args("--pid --fork --mount-proc").arg(command).arg("/").sim("1x256MiB").shim();
        run.env("GPUPOOL_LOG_FILE", folder.path().join("log.%p.jsonl")).go()
    };
    if !contained("/bin/true").status.success() {
        println!("only root can make a PID namespace here: not checked");
        return;
    }
    for logs in 1..=2 {
        contained(&program.display().to_string()).succeeds().is_quiet();
        let names = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
        assert_eq!(names.len(), logs, "{names:?}");
        assert!(names.iter().all(|name| name.starts_with("log.1-")), "{names:?}");
    }
}

#[test]
fn a_log_file_is_never_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("precious");
    std::fs::write(&path, "precious").unwrap();
    let shim = overflowing().shim().env("GPUPOOL_LOG_FILE", &path).go();
    shim.succeeds().warns("GPUPOOL_LOG_FILE");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn the_log_file_is_private() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.jsonl");
    overflowing().shim().env("GPUPOOL_LOG_FILE", &path).go().succeeds();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn bad_log_directives_are_told_and_the_default_is_used() {
    let shim = overflowing().shim().env("GPUPOOL_LOG", "gpupool=[[[").go();
    shim.succeeds().says("allocate 150: 0").warns("GPUPOOL_LOG");
}

#[test]
fn a_subject_of_the_log_that_there_is_none_of_is_told_once_with_those_that_there_are() {
    let asked = "warn,gpupool::nonsense=trace";
    let shim = overflowing().shim().env("GPUPOOL_LOG", asked).go();
    shim.succeeds().says("allocate 150: 0").warns(&format!("GPUPOOL_LOG={asked}: ")).warns("memory, metrics, module");
    assert_eq!(shim.stderr.matches("nonsense=trace").count(), 2, "the value and the part of it, once: {}", shim.stderr);
}

/// MiB in use on each GPU and the host after these steps, by the simulated driver.
fn used(steps: &str, gpus: &str, settings: &[&str]) -> (Output, Vec<u64>) {
    let run = Run::program("steps").args(steps).arg("u").sim(gpus).env("SIMCUDA_CONTEXT_MIB", "0");
    let run = settings.iter().filter_map(|it| it.split_once('=')).fold(run, |run, (name, value)| run.env(name, value));
    let shim = run.shim().log().go();
    shim.succeeds();
    let line = shim.stdout.lines().find(|line| line.starts_with("used:")).unwrap_or("").to_owned();
    let numbers = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    (shim, numbers)
}

#[test]
fn devices_says_who_lends() {
    let (_, mib) = used("a:150 a:150 a:100", "4x256MiB", &["GPUPOOL_DEVICES=0,2"]);
    assert_eq!((mib[1], mib[3]), (0, 0), "{mib:?}");
    assert!(mib[0] > 150 && mib[2] > 100, "{mib:?}");
}

#[test]
fn a_home_gpu_outside_the_list_is_left_to_the_driver() {
    let bare = overflowing().go();
    let shim = overflowing().shim().log().env("GPUPOOL_DEVICES", "1").go();
    shim.same_as(&bare);
    assert!(shim.events("block.allocate").is_empty(), "{:?}", shim.records);
    // It is said, once, with what to write; in every mode that pools, and whatever the program allocates with.
    for mode in ["pool", "spill", "managed"] {
        let shim = overflowing().shim().env("GPUPOOL_MODE", mode).env("GPUPOOL_DEVICES", "1").go();
        shim.same_as(&bare).warns("warning: GPUPOOL_DEVICES=1 does not name GPU 0").warns("GPUPOOL_DEVICES=0,1");
        assert_eq!(shim.stderr.matches("does not name").count(), 1, "{}", shim.stderr);
    }
    let handles = Run::program("own_memory").args("c:300").sim("2x256MiB").shim().env("GPUPOOL_DEVICES", "1").go();
    handles.warns("GPUPOOL_DEVICES=1 does not name GPU 0");
    // Not where nothing was asked for there, or nothing is pooled.
    for (steps, mode) in [("g:1 a:150", "pool"), ("a:150", "trace")] {
        let run = Run::program("steps").args(steps).sim("2x256MiB").shim().log();
        let shim = run.env("GPUPOOL_MODE", mode).env("GPUPOOL_DEVICES", "1").go();
        shim.succeeds();
        assert!(!shim.stderr.contains("does not name"), "{}", shim.stderr);
    }
}

#[test]
fn gpus_that_do_not_lend_use_pooled_memory_as_the_drivers() {
    let run = Run::program("other_gpus").sim("3x256MiB");
    for settings in [&["GPUPOOL_DEVICES=0"][..], &["GPUPOOL_DEVICES=0,2"], &["GPUPOOL_DEVICES=0", "GPUPOOL_FREE=lazy"]]
    {
        run.same_under_shim(settings).succeeds().says("GPU 1: its context is alive: 0");
    }
    // On islands, too, of which only some GPUs reach others.
    let islands = format!("matrix:{}", harness::repository().join("src/simcuda/links/pcie-islands.txt").display());
    let run_there = Run::program("other_gpus").sim("4x256MiB").env("SIMCUDA_LINK", &islands);
    run_there.same_under_shim(&["GPUPOOL_MIN_SIZE=1"]).succeeds().warns("some of the 4 GPUs have no peer access");
    // Where they do not reach its memory, the driver stages what it has given itself.
    let shim = run.env("SIMCUDA_LINK", "none").same_under_shim(&["GPUPOOL_DEVICES=0"]);
    shim.succeeds().says("GPU 2: copy from GPU 0: 0 0, 0 wrong").warns("no peer access to each other");
    // Memory that is spilled is staged, too.
    let steps = "c:30 c:30 m:1 x:1 o:1 u:1 r:1";
    let run = Run::program("own_memory").args(steps).sim("4x64MiB").env("GPUPOOL_DEVICES", "0,1");
    let shim = run.env("GPUPOOL_RESERVE", "8MiB").shim().go();
    shim.succeeds().says("handle 1 in GPU 2's context: 0 wrong").says("handle 1 in GPU 3's context: 0 wrong");
}

#[test]
fn what_a_launcher_says_is_read_with_the_settings() {
    let shim = Run::program("late_ranks").sim("2x256MiB").env("SIMCUDA_CONTEXT_MIB", "0").shim().go();
    shim.succeeds();
    let on_the_peer = shim.stdout.split_whitespace().nth(4).and_then(|mib| mib.parse::<u64>().ok());
    assert!(on_the_peer > Some(0), "it keeps to itself: {}", shim.stdout);
}

#[test]
fn gpus_that_do_not_answer_are_asked_again_and_one_that_never_does_is_told_once() {
    let run = Run::program("steps").args("a:2 a:2 a:2 a:2 a:2 a:2 a:2 a:2 a:2 a:2 a:2 c:0 c:10").sim("2x256MiB");
    let faults =
        |count: u32| -> Vec<String> { (1..=count).map(|nth| format!("cuDeviceCanAccessPeer:{nth}=999")).collect() };
    let passing = run.clone().env("SIMCUDA_FAULT", faults(3).join(",")).shim().log().go();
    passing.succeeds().is_quiet();
    assert!(!passing.events("block.allocate").is_empty(), "{:?}", passing.records);
    let lasting = run.env("SIMCUDA_FAULT", faults(60).join(",")).shim().log().go();
    lasting.succeeds().warns("cuDeviceCanAccessPeer of GPU 0 to GPU 1: CUDA_ERROR_UNKNOWN (999), 8 times");
    assert_eq!(lasting.stderr.matches("cuDeviceCanAccessPeer").count(), 1, "{}", lasting.stderr);
    assert!(lasting.events("block.allocate").is_empty(), "{:?}", lasting.records);
}

#[test]
fn limit_is_the_most_that_is_taken() {
    let (_, mib) = used("a:150 a:100", "2x256MiB", &["GPUPOOL_LIMIT=0:64MiB,1:200MiB", "GPUPOOL_HOST_LIMIT=1GiB"]);
    assert!(mib[0] <= 64 && mib[1] <= 200, "{mib:?}");
    assert_eq!(mib.iter().sum::<u64>(), 250, "{mib:?}");
    let (_, mib) = used("a:100", "2x256MiB", &["GPUPOOL_LIMIT=80MiB"]);
    assert!(mib[0] <= 80 && mib[1] <= 80, "{mib:?}");
}

#[test]
fn reserve_is_left_free() {
    let (_, mib) = used("a:150 a:150", "2x256MiB", &["GPUPOOL_RESERVE=100MiB", "GPUPOOL_HOST_LIMIT=1GiB"]);
    assert!(mib[0] <= 156 && mib[1] <= 156, "{mib:?}");
    assert_eq!(mib.iter().sum::<u64>(), 300, "{mib:?}");
}

/// What was not the pool's to begin with counts, too: here the contexts, of GPUs that borrow from each other. With NVML and
/// without, as in a container that was not given it.
#[test]
fn reserve_is_left_free_beside_contexts_whoever_borrows() {
    for nvml in [true, false] {
        let run =
            Run::program("steps").args("g:1 g:0 a:300 g:1 a:300 u").sim("2x256MiB").env("SIMCUDA_CONTEXT_MIB", "60");
        let run = if nvml { run.nvml() } else { run };
        let shim = run.shim().env("GPUPOOL_RESERVE", "100MiB").env("GPUPOOL_HOST_LIMIT", "1GiB").go();
        shim.succeeds().says("used: gpu0 156 gpu1 156 host 408");
    }
}

#[test]
fn host_limit_bounds_the_host() {
    let (_, mib) = used("a:400 a:150 a:50", "2x256MiB", &["GPUPOOL_HOST_LIMIT=128MiB", "GPUPOOL_RESERVE=16MiB"]);
    assert!(mib[2] > 0 && mib[2] <= 128, "{mib:?}");
    let (_, mib) = used("a:400 a:150 a:50", "2x256MiB", &["GPUPOOL_HOST_LIMIT=0", "GPUPOOL_RESERVE=16MiB"]);
    assert_eq!(mib[2], 0, "{mib:?}");
}

#[test]
fn placement_says_where_blocks_go() {
    let (_, mib) = used("a:128", "4x256MiB", &["GPUPOOL_PLACEMENT=local-first"]);
    assert_eq!(mib, [128, 0, 0, 0, 0]);
    let (_, mib) = used("a:128", "4x256MiB", &["GPUPOOL_PLACEMENT=interleave"]);
    assert_eq!(mib, [32, 32, 32, 32, 0]);
    // GPU 0 already has 100 MiB of the program's, below the size that is pooled.
    let (_, mib) = used("a:100 a:150", "2x256MiB", &["GPUPOOL_PLACEMENT=most-free", "GPUPOOL_MIN_SIZE=120MiB"]);
    assert_eq!(mib, [100, 150, 0]);
}

#[test]
fn min_size_leaves_small_requests_to_the_driver() {
    let pooled = |size: &str| {
        let (shim, _) = used("a:8", "1x256MiB", &[&format!("GPUPOOL_MIN_SIZE={size}")]);
        shim.events("block.allocate").len()
    };
    assert_eq!((pooled("1"), pooled("8MiB"), pooled("9MiB")), (1, 1, 0));
}

/// From 1 MiB on nothing is packed: the driver has them as long as its GPU has room, and then the pool.
#[test]
fn a_min_size_above_a_mebibyte_leaves_what_is_between_to_the_driver_until_its_gpu_is_full() {
    const KIB: u64 = 1 << 10;
    let script = format!("b:{}{}", 512 * KIB, " a:4".repeat(20));
    let (shim, _) = used(&script, "2x64MiB", &["GPUPOOL_MIN_SIZE=8MiB"]);
    shim.succeeds();
    assert_eq!(shim.stdout.matches("allocate 4: 0\n").count(), 20, "{}", shim.stdout);
    let pooled = shim.picked(|event| match event {
        Event::BlockAllocate(block) => Some((block.bytes / KIB, block.on_peers / KIB)),
        _ => None,
    });
    assert_eq!(pooled[0], (512, 0), "{pooled:?}");
    let beyond = &pooled[1..];
    assert!((1..19).contains(&beyond.len()) && beyond.iter().all(|block| *block == (4096, 4096)), "{pooled:?}");
}

#[test]
fn meminfo_says_the_pool_or_the_device() {
    let bare = Run::program("steps").args("i a:100 i").sim("4x256MiB").go();
    let device = Run::program("steps").args("i a:100 i").sim("4x256MiB").shim().env("GPUPOOL_MEMINFO", "device").go();
    device.same_as(&bare);
    let freed = |run: Run| run.args("i a:100 i f:0 i").sim("4x256MiB");
    let bare = freed(Run::program("steps")).go();
    freed(Run::program("steps")).shim().env("GPUPOOL_MEMINFO", "device").go().same_as(&bare);
    let pool = Run::program("steps").args("i a:500 i f:0 i").sim("4x256MiB").shim().go();
    let lines: Vec<Vec<u64>> = pool
        .stdout
        .lines()
        .filter_map(|line| line.strip_prefix("memory: "))
        .map(|line| line.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect())
        .collect();
    let [before, during, after] = &lines[..] else { pool.fail("three answers expected") };
    assert!(before[1] > 700 && before[1] <= 1024, "the four GPUs together: {before:?}");
    assert_eq!(before[1], before[2], "cuMemGetInfo and cuDeviceTotalMem agree");
    assert_eq!(before[0] - during[0], 500, "{before:?} {during:?}");
    assert_eq!(before, after);
}

#[test]
fn meminfo_counts_no_gpu_twice_where_the_program_works_on_several() {
    let totals = |steps: &str| -> Vec<u64> {
        let run = Run::program("steps").args(steps).sim("4x256MiB").shim().go();
        let lines = run.succeeds().stdout.lines().filter_map(|line| line.split(", total ").nth(1)?.split(',').next());
        lines.map(|total| total.parse().expect("a number")).collect()
    };
    let [alone, second, first] = totals("i g:1 i g:0 i")[..] else { panic!("three answers expected") };
    assert_eq!(
        (second, first),
        (alone / 4 * 3, alone / 4 * 3),
        "each has its own GPU and the two that nobody works on"
    );
}

#[test]
fn spill_asks_the_driver_first() {
    let shim = overflowing().shim().log().env("GPUPOOL_MODE", "spill").go();
    shim.succeeds().prints("allocate 150: 0\nallocate 150: 0\n");
    assert_eq!(shim.events("block.allocate").len(), 1, "only the second block is pooled: {:?}", shim.records);
}

#[test]
fn trace_redirects_nothing_and_tells_every_call() {
    let bare = overflowing().go();
    let shim = overflowing().shim().log().env("GPUPOOL_MODE", "trace").env("GPUPOOL_LOG", "trace").go();
    shim.same_as(&bare);
    let calls = |name: &str| {
        shim.records.iter().filter(|record| matches!(&record.event, Event::Call(call) if call.api == name)).count()
    };
    assert_eq!(calls("cuMemAlloc_v2"), 2, "{:?}", shim.records);
    assert_eq!(calls("cuInit"), 1);
    assert!(shim.events("block.allocate").is_empty());
}

/// At level trace, a call that the driver answers says why gpupool did not.
#[test]
fn what_is_left_to_the_driver_is_told_with_the_reason() {
    let steps = |steps: &str| Run::program("steps").args(steps).sim("2x256MiB");
    let pinned = || Run::program("pinned_queries").sim("2x1GiB");
    let capture = Run::program("pinned_cases").args("capture_growth").sim("2x1GiB");
    let cases: [(Run, &[&str], &str, &str); 10] = [
        (
            steps("a:1 a:50"),
            &["GPUPOOL_MIN_SIZE=2MiB"],
            "cuMemAlloc_v2",
            "less than GPUPOOL_MIN_SIZE=2.0 MiB was asked for",
        ),
        (steps("a:1 f:0"), &["GPUPOOL_MIN_SIZE=2MiB"], "cuMemFree_v2", "gpupool did not give this memory out"),
        (steps("a:50"), &["GPUPOOL_DEVICES=1"], "cuMemAlloc_v2", "GPU 0 is not in the pool (GPUPOOL_DEVICES"),
        (steps("a:50"), &["GPUPOOL_MODE=spill"], "cuMemAlloc_v2", "in mode spill it is asked first, and it had room"),
        (steps("a:50"), &["GPUPOOL_MODE=trace"], "cuMemAlloc_v2", "GPUPOOL_MODE=trace"),
        (steps("a:900"), &["GPUPOOL_HOST_LIMIT=0"], "cuMemAlloc_v2", "no place of the pool has room"),
        (steps("i"), &["GPUPOOL_MEMINFO=device"], "cuMemGetInfo_v2", "GPUPOOL_MEMINFO=device"),
        (pinned(), &["GPUPOOL_PINNED=off"], "cuMemHostAlloc", "pinned memory is not pooled (GPUPOOL_PINNED"),
        (
            pinned(),
            &["GPUPOOL_PINNED_LIMIT=1MiB"],
            "cuMemHostAlloc",
            "the pool would hold more pinned memory than its limit",
        ),
        (capture, &[], "cuMemHostAlloc", "a stream is being captured"),
    ];
    for (run, settings, call, why) in cases {
        let set = settings.iter().filter_map(|setting| setting.split_once('='));
        let shim =
            set.fold(run.shim().log().env("GPUPOOL_LOG", "trace"), |run, (name, value)| run.env(name, value)).go();
        shim.succeeds();
        let begin = format!("{call} is answered by the driver: ");
        let told: Vec<&str> = shim.records.iter().filter_map(|record| record.message.strip_prefix(&begin)).collect();
        assert!(
            told.iter().any(|told| told.starts_with(why)),
            "{settings:?}: {call} should say {why:?}, not {told:#?}"
        );
    }
    // What the pool serves gives no reason.
    let shim = steps("a:50").shim().log().env("GPUPOOL_LOG", "trace").go();
    shim.succeeds();
    assert!(!shim.records.iter().any(|record| record.message.starts_with("cuMemAlloc_v2 is answered by the driver")));
}

#[test]
fn off_is_silent() {
    let bare = overflowing().go();
    let shim = overflowing().shim().log().env("GPUPOOL_MODE", "off").go();
    shim.same_as(&bare).is_quiet();
    assert!(shim.records.is_empty());
}

#[test]
fn a_log_has_the_story_of_the_process() {
    let shim = overflowing().arg("f:0").shim().log().go();
    shim.succeeds();
    for event in [
        "process.start",
        "pool.open",
        "context.create",
        "pool.grow",
        "pool.spill",
        "block.allocate",
        "block.placed",
        "block.free",
    ] {
        assert!(!shim.events(event).is_empty(), "no {event} in {:?}", shim.records);
    }
    let exit = shim.event("process.exit", |event| match event {
        Event::ProcessExit(exit) => Some(exit.clone()),
        _ => None,
    });
    assert_eq!((exit.live_blocks, exit.allocations), (1, 2), "{exit:?}");
    assert_eq!(exit.live_bytes, 150 << 20);
    let gpu0 = exit.peak.iter().find(|peak| peak.place == "gpu0");
    assert!(gpu0.is_some_and(|peak| peak.peak_used > 150 << 20), "{exit:?}");
}

#[test]
fn the_summary_is_short_and_names_the_gpus() {
    let shim = overflowing().shim().env("GPUPOOL_SUMMARY", "on").go();
    shim.succeeds().warns("gpu0").warns("gpu1");
    assert!(shim.stderr.lines().count() <= 12, "{}", shim.stderr);
    overflowing().shim().env("GPUPOOL_SUMMARY", "off").go().succeeds().is_quiet();
}
