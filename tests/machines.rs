//! Machines that lack something: no driver, no GPU, no peer access, no virtual memory management, no host memory; and
//! jobs whose ranks share one host.

use gpupool_events::Event;
use harness::{Build, Driver, Output, Run, library, repository};
use serde_json::Value;
use std::fs;
use tempfile::TempDir;

#[test]
fn without_any_driver_programs_fail_as_bare() {
    // An empty folder in place of the driver: where the system has one of its own, both runs find that.
    for arguments in ["dlsym /dev/null", "gpa2 /dev/null 0"] {
        let run = Run::program("resolve").args(arguments).driver(Driver::System);
        run.same_under_shim(&[]).is_quiet();
    }
    let linked = Run::program("steps").arg("a:1").driver(Driver::System);
    linked.same_under_shim(&[]);
}

#[test]
fn without_a_gpu_the_driver_says_so_itself() {
    for program in ["steps", "bad_input", "queries"] {
        let run = Run::program(program).sim("2x256MiB").env("CUDA_VISIBLE_DEVICES", "");
        let shim = run.same_under_shim(&[]);
        shim.is_quiet();
    }
}

#[test]
fn visible_devices_bound_the_pool() {
    let run = Run::program("steps").args("a:150 a:150 a:150 u").sim("4x256MiB").env("CUDA_VISIBLE_DEVICES", "2,1");
    let shim = run.shim().env("GPUPOOL_HOST_LIMIT", "1GiB").report().go();
    shim.succeeds();
    // The report counts visible GPUs only, by the ordinals of the program.
    assert_eq!(shim.reported("gpus").as_array().map(Vec::len), Some(2));
}

/// Whether each GPU has ever had a context, by what the contexts on it cost now.
fn with_contexts(output: &Output) -> Vec<bool> {
    let gpus = output.reported("gpus").as_array().cloned().unwrap_or_default();
    gpus.iter().map(|gpu| gpu.get("contexts").and_then(Value::as_u64) != Some(0)).collect()
}

#[test]
fn lending_gpus_get_no_context() {
    let shim = Run::program("steps").args("a:200 a:200 a:200 c:0 c:1 c:2").sim("4x256MiB").shim().report().go();
    shim.succeeds();
    assert_eq!(with_contexts(&shim), [true, false, false, false]);
    let lent = shim.reported("gpus").pointer("/1/vmm").and_then(Value::as_u64);
    assert!(lent.is_some_and(|bytes| bytes > 0), "GPU 1 lent nothing: {lent:?}");
}

#[test]
fn without_peer_access_a_gpu_has_itself_and_the_host() {
    let run = Run::program("steps").args("a:150 a:150 u c:0 c:1").sim("2x256MiB").env("SIMCUDA_LINK", "none");
    let shim = run.env("GPUPOOL_HOST_LIMIT", "512MiB").shim().go();
    shim.succeeds().says("allocate 150: 0").says("block 1: 0 wrong");
    let used = shim.stdout.lines().find(|line| line.starts_with("used:")).unwrap_or("");
    assert!(used.contains(" gpu1 0 "), "{used}");
}

#[test]
fn pcie_links_lend_too() {
    let shim = Run::program("fill_spread").args("200 200").sim("2x256MiB").env("SIMCUDA_LINK", "pcie").shim().go();
    shim.succeeds().says("array 0: 0 wrong by kernel, 0 by copy").says("array 1: 0 wrong by kernel, 0 by copy");
}

#[test]
fn where_host_memory_is_not_permitted_the_pool_goes_on_without_it() {
    let run = Run::program("steps").args("a:150 a:150 a:200 c:0 c:1").sim("2x256MiB").env("SIMCUDA_HOST", "none");
    let shim = run.shim().log().go();
    shim.says("block 0: 0 wrong").says("block 1: 0 wrong").says("allocate 200: 2").warns("host");
    assert!(!shim.events("pool.unavailable").is_empty(), "{:?}", shim.records);
}

#[test]
fn a_driver_that_keeps_refusing_to_share_memory_is_asked_for_less() {
    // Both properties refused, each twice in a row; then neither is asked for again. One block is one piece.
    let faults = |calls: &[u32]| calls.iter().map(|nth| format!("cuMemCreate:{nth}=801")).collect::<Vec<_>>().join(",");
    let run = Run::program("steps").args("a:40 a:40 a:40 a:40 a:40 c:0 c:4").sim("1x512MiB");
    let shim = run.clone().env("SIMCUDA_FAULT", faults(&[1, 2, 4, 5, 7, 9])).shim().go();
    shim.succeeds().says("block 4: 0 wrong").warns("can be given this memory").warns("shared with other processes");
    assert_eq!(shim.stderr.matches("refused a property").count(), 2, "{}", shim.stderr);
    // A refusal that passes.
    run.env("SIMCUDA_FAULT", faults(&[1, 4])).shim().go().succeeds().is_quiet();
}

#[test]
fn without_virtual_memory_management_everything_is_the_drivers() {
    let run = Run::program("steps").args("a:100 a:200 f:0").sim("2x256MiB").env("SIMCUDA_VMM", "off");
    let bare = run.clone().go();
    let shim = run.shim().go();
    shim.same_as(&bare).warns("gpupool: ");
}

#[test]
fn ranks_of_one_host_keep_to_their_own_gpu() {
    for variable in ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"] {
        let run = Run::program("steps").args("a:150 a:150 c:0 c:1").sim("4x256MiB").env(variable, "4");
        let run = run.env("SLURM_STEP_ID", "0");
        let shim = run.env("GPUPOOL_HOST_LIMIT", "512MiB").shim().log().report().go();
        shim.succeeds().says("block 1: 0 wrong");
        for other in 1..4 {
            let lent = shim.reported("gpus").pointer(&format!("/{other}/vmm")).and_then(Value::as_u64);
            assert_eq!(lent, Some(0), "{variable}: GPU {other}");
        }
        assert!(shim.reported("hosts").pointer("/0/vmm").and_then(Value::as_u64) > Some(0), "{variable}");
        let said = shim.records.iter().any(|record| record.message.contains(variable));
        assert!(said, "{variable} is not named in the log: {:?}", shim.records);
    }
}

#[test]
fn a_single_rank_and_an_explicit_list_use_other_gpus() {
    for variables in [
        &[("LOCAL_WORLD_SIZE", "1")][..],
        &[("LOCAL_WORLD_SIZE", "4"), ("GPUPOOL_DEVICES", "0,1,2,3")],
        // A job's script, as `sbatch -n4` starts it, and a step of one task in it.
        &[("SLURM_JOB_ID", "3"), ("SLURM_LOCALID", "0"), ("SLURM_TASKS_PER_NODE", "4")],
        &[("SLURM_STEP_ID", "1"), ("SLURM_TASKS_PER_NODE", "4"), ("SLURM_STEP_TASKS_PER_NODE", "1")],
    ] {
        let run = Run::program("steps").args("a:150 a:150").sim("4x256MiB").shim().report();
        let shim = variables.iter().fold(run, |run, (name, value)| run.env(name, value)).go();
        shim.succeeds();
        let lent = shim.reported("gpus").pointer("/1/vmm").and_then(Value::as_u64);
        assert!(lent > Some(0), "{variables:?}");
    }
}

#[test]
fn gpus_of_different_sizes_lend_what_they_have() {
    let shim = Run::program("fill_spread").args("120 400").sim("1x128MiB,1x512MiB,1x64MiB").shim().go();
    shim.succeeds().says("array 1: 0 wrong by kernel, 0 by copy");
}

/// A host that is described by these files, and not by the kernel's.
struct MadeHost(TempDir);

impl MadeHost {
    /// 64 GiB, 48 of them available, and these files of `/proc/self` and of the memory controller.
    fn new(files: &[(&str, &str)]) -> Self {
        let meminfo = ("proc/meminfo", "MemTotal:       67108864 kB\nMemAvailable:   50331648 kB\n");
        Self::without_proc(&[&[meminfo], files].concat())
    }

    fn without_proc(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("no temporary folder: {e}"));
        for (path, text) in files {
            let path = folder.path().join(path);
            let made = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(&path, text));
            made.unwrap_or_else(|e| panic!("cannot write {}: {e}", path.display()));
        }
        Self(folder)
    }

    /// The job of a scheduler that may use so much, with 64 MiB of that in use. The step inside it has no limit.
    fn job(limit: u64, version: u8) -> Self {
        let (limit, used) = (limit.to_string(), (64u64 << 20).to_string());
        match version {
            1 => Self::new(&[
                ("proc/self/mountinfo", "36 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"),
                ("proc/self/cgroup", "4:memory:/slurm/uid_1/job_7/step_0\n0::/\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", &used),
                ("sys/fs/cgroup/memory/slurm/uid_1/job_7/memory.limit_in_bytes", &limit),
                ("sys/fs/cgroup/memory/slurm/uid_1/job_7/memory.usage_in_bytes", &used),
            ]),
            _ => Self::new(&[
                ("proc/self/mountinfo", "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
                ("proc/self/cgroup", "0::/system.slice/slurmstepd.scope/job_7/step_0\n"),
                ("sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/memory.max", &limit),
                ("sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/memory.current", &used),
                ("sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/memory.max", "max\n"),
                ("sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/memory.current", &used),
            ]),
        }
    }

    /// A run there.
    fn see(&self, run: Run) -> Run {
        run.preload(Build::library("made_host", "made_host").path()).env("MADE_HOST", self.0.path())
    }

    /// Whether the second of two blocks, which no GPU has room for, found these MiB on the host.
    #[track_caller]
    fn lends(&self, mib: u64, variables: &[(&str, &str)]) -> bool {
        let run = self.see(Run::program("steps").arg("a:150").arg(format!("a:{mib}")).sim("1x256MiB")).shim();
        let shim = variables.iter().fold(run, |run, (name, value)| run.env(name, value)).go();
        shim.succeeds();
        shim.stdout.contains(&format!("allocate {mib}: 0\n"))
    }

    /// How many of eight pinned blocks of 4 MiB the pool took, before its limit.
    #[track_caller]
    fn pins(&self, variables: &[(&str, &str)]) -> usize {
        let run = self.see(Run::program("pinned_cases").arg("limits").sim("2x1GiB")).shim().log();
        let shim = variables.iter().fold(run, |run, (name, value)| run.env(name, value)).go();
        shim.succeeds().says("8 blocks used and freed");
        let pooled = shim.picked(|event| match event {
            Event::PinnedAllocate(made) if made.by == "pool" => Some(()),
            _ => None,
        });
        assert_eq!(shim.stderr.contains("GP018"), pooled.len() < 8, "{}", shim.stderr);
        pooled.len()
    }
}

const MIB: u64 = 1 << 20;

/// 2 GiB are kept back and half of the rest is lent: 480 MiB.
#[test]
fn a_limit_of_a_scheduler_bounds_what_the_host_lends() {
    for version in [1, 2] {
        let host = MadeHost::job(3072 * MIB, version);
        assert!(host.lends(400, &[]), "version {version}");
        assert!(!host.lends(700, &[]), "version {version}");
        assert!(host.lends(700, &[("GPUPOOL_HOST_LIMIT", "900MiB")]), "version {version}: a setting has its way");
    }
    assert!(MadeHost::new(&[]).lends(700, &[]));
}

#[test]
fn a_limit_of_a_scheduler_bounds_what_is_pinned() {
    for version in [1, 2] {
        assert_eq!(MadeHost::job(40 * MIB, version).pins(&[]), 2, "version {version}: a quarter is 10 MiB");
        assert_eq!(MadeHost::job(200 * MIB, version).pins(&[]), 8, "version {version}");
    }
    assert_eq!(MadeHost::job(40 * MIB, 2).pins(&[("GPUPOOL_PINNED_LIMIT", "1GiB")]), 8);
}

#[test]
fn the_doctor_tells_of_the_limit_that_the_library_obeys() {
    for version in [1, 2] {
        let host = MadeHost::job(3072 * MIB, version);
        let doctor = host.see(Run::command(library("gpupool")).args("doctor --json")).go();
        let told: Value = serde_json::from_str(&doctor.stdout).unwrap_or_else(|e| doctor.fail(&e.to_string()));
        let checks = told.pointer("/checks").and_then(Value::as_array).cloned().unwrap_or_default();
        let Some(check) = checks.iter().find(|check| check.get("name") == Some(&Value::from("host"))) else {
            doctor.fail("no check of the host")
        };
        let limit = check.pointer("/facts/cgroup/limit").and_then(Value::as_u64);
        assert_eq!(limit, Some(3072 * MIB), "{check:#}");
        assert_eq!(check.pointer("/facts/host_limit").and_then(Value::as_u64), Some(480 * MIB), "{check:#}");
        assert_eq!(check.pointer("/facts/pinned_limit").and_then(Value::as_u64), Some(768 * MIB), "{check:#}");
    }
}

#[test]
fn a_control_groups_limit_on_a_gpu_holds_and_is_told() {
    let host = MadeHost::new(&[
        ("proc/self/mountinfo", "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
        ("proc/self/cgroup", "0::/job/step\n"),
        ("sys/fs/cgroup/job/dmem.max", "drm/0000:10:00.0/vram0 104857600\ndrm/0000:11:00.0/vram0 max\n"),
    ]);
    let run = host.see(Run::program("steps").arg("a:80").arg("a:80").sim("2x256MiB")).shim().log().go();
    run.succeeds();
    let peaks = run.picked(|event| if let Event::ProcessExit(exit) = event { Some(exit.peak.clone()) } else { None });
    let held = |name: &str| peaks.iter().flatten().find(|peak| peak.place == name).map_or(0, |peak| peak.peak_used);
    assert!(held("gpu0") > 0 && held("gpu0") <= 100 * MIB && held("gpu1") >= 60 * MIB, "{peaks:?}");
    let told = "job/dmem.max lets this process use 100.0 MiB of GPU 0";
    assert_eq!(run.records.iter().filter(|record| record.message.contains(told)).count(), 1, "{:#?}", run.records);
    let doctor = host.see(Run::command(library("gpupool")).args("doctor --json").sim("2x256MiB").nvml()).go();
    assert!(doctor.stdout.contains("/sys/fs/cgroup/job/dmem.max"), "{}", doctor.stdout);
}

#[test]
fn what_nvml_limits_a_control_group_to_holds_and_is_told() {
    let host = MadeHost::new(&[
        ("proc/self/mountinfo", "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
        ("proc/self/cgroup", "0::/job/step\n"),
        ("sys/fs/cgroup/job/step/cgroup.procs", "1\n"),
    ]);
    // The group around it is limited as well, to more.
    let limits = "0=/sys/fs/cgroup/job/step:33554432:104857600,0=/sys/fs/cgroup/job:0:209715200";
    let limited = |run: Run| host.see(run.sim("2x256MiB")).nvml().env("SIMCUDA_MEMORY_LIMITS", limits);
    let run = limited(Run::program("steps").arg("a:80").arg("a:80")).shim().log().go();
    run.succeeds();
    let peaks = run.picked(|event| if let Event::ProcessExit(exit) = event { Some(exit.peak.clone()) } else { None });
    let held = |name: &str| peaks.iter().flatten().find(|peak| peak.place == name).map_or(0, |peak| peak.peak_used);
    assert!(held("gpu0") > 0 && held("gpu0") <= 100 * MIB && held("gpu1") >= 60 * MIB, "{peaks:?}");
    let told = "NVML's limit of /sys/fs/cgroup/job/step lets this process use 100.0 MiB of GPU 0";
    assert_eq!(run.records.iter().filter(|record| record.message.contains(told)).count(), 1, "{:#?}", run.records);
    let doctor = limited(Run::command(library("gpupool")).args("doctor --json")).go();
    let told = "NVML's limit of /sys/fs/cgroup/job/step, which promises 32.0 MiB,";
    assert!(doctor.stdout.contains(told), "{}", doctor.stdout);
}

/// Half of 6 GiB for each of eight ranks would be four times what there is.
#[test]
fn ranks_of_one_host_divide_its_memory() {
    for variable in ["LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE"] {
        let host = MadeHost::job((6144 + 2048 + 64) * MIB, 2);
        let ranks = |count| [(variable, count), ("SLURM_STEP_ID", "0")];
        assert!(host.lends(300, &ranks("8")), "{variable}: an eighth of 3 GiB");
        assert!(!host.lends(600, &ranks("8")), "{variable}: an eighth of 3 GiB");
        assert!(host.lends(600, &ranks("1")), "{variable}: one rank has it all");
        let set = [&ranks("8")[..], &[("GPUPOOL_HOST_LIMIT", "1GiB")]].concat();
        assert!(host.lends(600, &set), "a setting is for each rank");
    }
    let host = MadeHost::job(320 * MIB, 2);
    assert_eq!((host.pins(&[]), host.pins(&[("LOCAL_WORLD_SIZE", "8")])), (8, 2));
}

#[test]
fn without_proc_there_is_host_memory_to_lend_and_to_pin() {
    let host = MadeHost::without_proc(&[]);
    assert!(host.lends(700, &[]));
    assert_eq!(host.pins(&[]), 8);
    // A container's limit can be read without /proc.
    let limited = MadeHost::without_proc(&[("sys/fs/cgroup/memory.max", "41943040\n")]);
    assert_eq!(limited.pins(&[]), 2);
    assert!(!limited.lends(400, &[]));
}

/// Processes that play the steps of `ipc` on one machine, where a context costs 16 MiB.
fn together(steps: &str) -> Run {
    Run::program("ipc").args(steps).sim("2x256MiB").machine().nvml()
}

#[test]
fn processes_of_one_machine_see_each_others_memory() {
    let steps = "A:alloc:0:102400 B:info B:nvml A:alloc:1:102400 B:alloc:0:40960 B:info A:info A:kill B:info B:nvml \
                 B:alloc:0:204800 B:nvml";
    let bare = together(steps).go();
    bare.succeeds().says("B:info: 124 of 256 MiB").says("B:nvml: 132 MiB, 16 of it mine, 2 processes, 1980 MHz");
    bare.says("B:alloc:0:40960: 2").says("B:info: 24 of 256 MiB").says("A:info: 24 of 256 MiB");
    // Killed, and at once nothing of it is left.
    bare.says("A:kill: -9").says("B:info: 240 of 256 MiB").says("B:nvml: 16 MiB, 16 of it mine, 1 processes, 1980 MHz");
    bare.says("B:alloc:0:204800: 0").says("B:nvml: 216 MiB, 216 of it mine, 1 processes, 1980 MHz");
}

#[test]
fn a_process_of_its_own_machine_sees_only_itself() {
    let run = Run::program("ipc").args("A:alloc:0:102400 B:info B:nvml A:nvml").sim("2x256MiB").nvml();
    let bare = run.go();
    bare.succeeds().says("B:info: 240 of 256 MiB").says("B:nvml: 16 MiB, 16 of it mine, 1 processes, 1980 MHz");
    bare.says("A:nvml: 116 MiB, 116 of it mine, 1 processes, 1980 MHz");
}

#[test]
fn what_a_killed_exporter_shared_lives_as_long_as_its_importer() {
    let steps =
        "A:alloc:0:65536 A:fill:0:7 A:get:0:0 B:open:0 A:nvml A:kill B:check:0:7 B:info B:free:0 B:close:0 B:info";
    let bare = together(steps).go();
    bare.succeeds().says("A:nvml: 96 MiB, 80 of it mine, 2 processes, 1980 MHz");
    bare.says("B:check:0:7: 0 wrong, ends right").says("B:info: 176 of 256 MiB").says("B:info: 240 of 256 MiB");
}

#[test]
fn pools_of_two_programs_take_what_the_other_leaves() {
    // 150 MiB each on GPU 0, then 150 MiB for which GPU 0 has no room and GPU 1 has; the rest is on the host.
    let steps = "A:alloc:0:153600 B:alloc:1:153600 A:alloc:2:153600 A:fill:0:100 B:fill:1:200 A:fill:2:300 A:check:0:100 \
                 B:check:1:200 A:check:2:300 A:left A:kill B:check:1:200 B:alloc:3:204800 B:fill:3:1 B:check:3:1 B:left";
    for nvml in [true, false] {
        let run = Run::program("ipc").args(steps).sim("2x256MiB").machine().shim();
        let run = run.env("GPUPOOL_HOST_LIMIT", "128MiB").env("GPUPOOL_RESERVE", "8MiB");
        let shim = if nvml { run.nvml() } else { run }.go();
        shim.succeeds().says("B:alloc:3:204800: 0").says("B:check:3:1: 0 wrong, ends right");
        for check in ["A:check:0:100", "B:check:1:200", "A:check:2:300", "B:check:1:200"] {
            shim.says(&format!("{check}: 0 wrong, ends right"));
        }
    }
}

#[test]
fn nvml_tells_of_the_machine() {
    let machine = |actions: &str| Run::program("nvml_machine").args(actions).sim("2x256MiB").nvml();
    let told = machine("gpus idle handles ended").go();
    told.succeeds().says("before init: 1").says("after shutdown: 1");
    told.says("GPU 1: Simulated GPU 0 GiB, GPU-73696d63-7564-612d-6770-752d00000001, 0000:11:00.0, 00000000:11:00.0");
    told.says("   40/0/0 0/99/99; NVLinks 18 to GPUs, 0 to a switch, 0 refused");
    told.says("0: 345 MHz, 0 processes, mine 0 MiB, used 0 MiB")
        .says("1: 1980 MHz, 1 processes, mine 16 MiB, used 16 MiB");
    told.says("2: 345 MHz, 0 processes, mine 0 MiB, used 0 MiB").says("52 W more with a context, 0 W afterwards");
    told.says("version 2: 0, adds up: 1, another version: 25");
    told.says("GPU 0: 1 1 1").says("GPU 1: 1 1 1").says("strangers: 2 6 2 2");
    machine("gpus idle handles").same_under_shim(&[]);
    machine("again").machine().go().succeeds().says("mapped by 100 questions: nothing");
    // NVML counts all GPUs of the machine.
    machine("handles").env("CUDA_VISIBLE_DEVICES", "1").go().says("GPU 1: 1 1 1");
}

/// In the order that was measured: memory is in use, then there is a context.
#[test]
fn memory_is_in_use_before_nvml_lists_who_begins() {
    let run = Run::program("nvml_machine").arg("begins").sim("2x256MiB").nvml();
    let told = run.clone().env("SIMCUDA_INIT_MIB", "0=2,1=4").go();
    told.succeeds().says("before: 0 MiB, 0 processes; 0 MiB, 0 processes");
    told.says("begun: 2 MiB, 0 processes; 4 MiB, 0 processes").says("there: 2 MiB, 0 processes; 20 MiB, 1 processes");
    told.says("left: 2 MiB, 0 processes; 4 MiB, 0 processes");
    run.go().says("begun: 0 MiB, 0 processes; 0 MiB, 0 processes");
}

#[test]
fn nvml_tells_what_happens_to_the_gpus() {
    let events = Run::program("nvml_machine").arg("events").sim("2x256MiB").nvml().env("SIMCUDA_EVENTS", "events").go();
    events.succeeds().prints(
        "before init: 1\n\
         register: 0, of a type that there is not: 3\n\
         wait: 10, GPU -1, type 0, data 0\n\
         wait: 0, GPU 0, type 0x8, data 79\n\
         wait: 0, GPU 0, type 0x400, data 0\n\
         wait: 0, GPU 0, type 0x800, data 0\n\
         wait: 10, GPU -1, type 0, data 0\n\
         wait: 0, GPU 0, type 0x8, data 31\n\
         rows: 0 corrected, 1 uncorrected, pending 1, failed 1; 2 errors\n\
         free: 0\n\
         once more: 2\n",
    );
}

/// A matrix of links that comes with the simulated driver.
fn matrix(name: &str) -> String {
    format!("matrix:{}", repository().join("src/simcuda/links").join(name).display())
}

/// MiB in use on each GPU, by the program's last line of them.
fn used_by_gpu(output: &Output) -> Vec<u64> {
    let line = output.stdout.lines().rfind(|line| line.starts_with("used:")).unwrap_or("");
    let words: Vec<&str> = line.split(' ').collect();
    words.windows(2).filter(|pair| pair[0].starts_with("gpu")).filter_map(|pair| pair[1].parse().ok()).collect()
}

#[test]
fn a_gpu_on_another_island_does_not_lend() {
    for (visible, expected) in [("0,1,2,3", [true, true, false, false]), ("2,0,3,1", [true, false, true, false])] {
        let run = Run::program("steps").args("a:200 a:200 a:200 c:0 c:1 c:2 u").sim("4x256MiB").shim();
        let run = run.env("SIMCUDA_LINK", matrix("pcie-islands.txt")).env("CUDA_VISIBLE_DEVICES", visible);
        let shim = run.env("GPUPOOL_HOST_LIMIT", "512MiB").go();
        shim.succeeds().says("block 2: 0 wrong");
        let lends: Vec<bool> = used_by_gpu(&shim).into_iter().map(|mib| mib > 0).collect();
        assert_eq!(lends, expected, "CUDA_VISIBLE_DEVICES={visible}\n{}", shim.stdout);
    }
}

#[test]
fn the_widest_link_lends_first_and_what_has_none_never() {
    let run = Run::program("steps").sim("8x256MiB").shim().env("SIMCUDA_LINK", matrix("dgx1.txt"));
    let run = run.env("GPUPOOL_HOST_LIMIT", "512MiB");
    // GPU 0 has two links to GPUs 3 and 4, one to GPUs 1 and 2, and none to the others.
    let shim = run.clone().args("a:200 a:200 a:200 c:0 c:1 c:2 u").go();
    let lends: Vec<bool> = used_by_gpu(shim.succeeds()).into_iter().map(|mib| mib > 0).collect();
    assert_eq!(lends, [true, false, false, true, true, false, false, false], "{}", shim.stdout);
    let shim = run.args("a:200 a:200 a:200 a:200 a:200 a:200 u").go();
    let lends: Vec<bool> = used_by_gpu(shim.says("allocate 200: 0")).into_iter().map(|mib| mib > 0).collect();
    assert_eq!(lends, [true, true, true, true, true, false, false, false], "{}", shim.stdout);
}

#[test]
fn a_bad_matrix_is_named_with_its_line() {
    let file = tempfile::NamedTempFile::new().unwrap_or_else(|e| panic!("no temporary file: {e}"));
    std::fs::write(file.path(), "GPU0 GPU1\nGPU0 X NV1\nGPU1 NV1 Y\n").unwrap_or_else(|e| panic!("{e}"));
    let link = format!("matrix:{}", file.path().display());
    let told = Run::program("steps").arg("a:1").env("SIMCUDA_LINK", &link).go();
    told.exits(1)
        .warns(&format!("simcuda: SIMCUDA_LINK={link}: line 3: expected NV1 to NV18, PIX, PXB, PHB, NODE or SYS"));
    let told = Run::program("steps").arg("a:1").sim("4x256MiB").env("SIMCUDA_LINK", matrix("dgx1.txt")).go();
    told.exits(1).warns("expected 4 GPUs, as in SIMCUDA_GPUS, found 8");
}

#[test]
fn a_program_without_standard_output_prints_into_what_it_opens_next() {
    let lines = "numbers taken: 0\nin the file: the program's own words\nwords that are wrong: 0\n";
    for run in [Run::program("closed_output").sim("1x256MiB"), Run::program("closed_output").sim("1x256MiB").machine()]
    {
        run.clone().go().prints(lines);
        run.shim().go().prints(lines);
    }
}
