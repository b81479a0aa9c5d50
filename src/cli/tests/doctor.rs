//! `gpupool doctor` on simulated machines and broken ones. Needs the simulated driver beside the executable, as the demo
//! does.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

use crate::common::{Bench, golden, gpupool, output, stderr, stdout};

const GPUPOOL: &str = env!("CARGO_BIN_EXE_gpupool");

/// Doctor on a simulated machine, with a library to find and a `python3` that answers `python`.
fn simulated(bench: &Bench, machine: &[&str], python: &str, arguments: &[&str]) -> Command {
    let mut command = gpupool();
    command.arg("sim").args(machine).args(["--", GPUPOOL]);
    complete(bench, &mut command, python, arguments);
    command
}

fn complete(bench: &Bench, command: &mut Command, python: &str, arguments: &[&str]) {
    let interpreter = bench.path("python3");
    crate::common::script(&interpreter, &format!("#!/bin/sh\necho '{python}'\n"));
    let path = format!("{}:{}", bench.path("").display(), std::env::var("PATH").unwrap_or_default());
    command.args(["doctor", "--library"]).arg(bench.library()).args(arguments).env("PATH", path);
    command.env_remove("CUDA_VISIBLE_DEVICES");
}

/// The check called `name`.
fn check(output: &Output, name: &str) -> serde_json::Value {
    let json: serde_json::Value =
        serde_json::from_str(&stdout(output)).unwrap_or_else(|error| panic!("{error}: {}", stderr(output)));
    let checks = json["checks"].as_array().into_iter().flatten();
    let named = checks.filter(|check| check["name"] == name).max_by_key(|check| check["state"] != "fine");
    named.cloned().unwrap_or_else(|| panic!("no check {name} in {json:#}"))
}

const GOOD_PYTHON: &str = "3 12 True cpython";

#[test]
fn four_gpus_that_are_all_well() {
    let bench = Bench::new();
    let output = output(&mut simulated(&bench, &["--gpus", "4x32GiB"], GOOD_PYTHON, &[]));
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
    let text = stdout(&output);
    assert!(text.lines().all(|line| line.chars().count() <= 80 || line.contains("/")), "{text}");
    golden("doctor.txt", &of_gpus(&text));
    assert!(text.contains("python3 is 3.12\n") && text.ends_with("settings   all as by default\n"), "{text}");
}

#[test]
fn what_keeping_lenders_awake_brings_and_costs_is_told_where_there_are_any() {
    let bench = Bench::new();
    let said = |machine: &[&str], setting: &str| {
        let mut command = simulated(&bench, machine, GOOD_PYTHON, &["--json"]);
        let output = output(command.env("GPUPOOL_LENDERS", setting));
        let json: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
        let checks = json["checks"].as_array().cloned().unwrap_or_default();
        checks
            .into_iter()
            .find(|check| check["name"] == "lenders")
            .map(|check| check["what"].as_str().unwrap_or_default().to_owned())
    };
    let asleep = said(&["--gpus", "2x32GiB"], "asleep").unwrap();
    assert!(asleep.contains("more slowly") && asleep.contains("523 MiB and 52 W"), "{asleep}");
    let awake = said(&["--gpus", "2x32GiB"], "awake").unwrap();
    assert!(awake.starts_with("GPUPOOL_LENDERS=awake: a helper process"), "{awake}");
    assert_eq!(said(&["--gpus", "1x32GiB"], "awake"), None);
    assert_eq!(said(&["--gpus", "2x32GiB", "--link", "pcie"], "awake"), None);
}

#[test]
fn that_nobody_keeps_lenders_awake_for_a_user_who_may_be_anybody_is_told() {
    let bench = Bench::new();
    std::fs::set_permissions(bench.path(""), PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = simulated(&bench, &["--gpus", "2x32GiB"], GOOD_PYTHON, &["--json"]);
    command.env("GPUPOOL_LENDERS", "awake").env("TMPDIR", "/tmp").uid(65534).gid(65534);
    match command.output() {
        Ok(told) => {
            let said = check(&told, "lenders");
            let what = said["what"].as_str().unwrap_or_default();
            assert!(what.starts_with("GPUPOOL_LENDERS=awake keeps no GPU awake here: "), "{said}");
            assert!(what.contains("user 65534 stands for every user"), "{said}");
            assert_eq!(said["state"], "finding", "{said}");
        }
        Err(error) => println!("no other user to be here ({error}): not checked"),
    }
}

/// What comes before and after depends on the machine: paths, memory of the host.
#[test]
fn a_domain_of_several_hosts_is_named_where_the_gpus_are_in_one() {
    let bench = Bench::new();
    let mut command = simulated(&bench, &["--gpus", "2x4GiB"], GOOD_PYTHON, &["--json"]);
    let domain = output(command.env("SIMCUDA_FABRIC", "0123456789abcdef0123456789abcdef:7"));
    let said = check(&domain, "fabric");
    let named = "(01234567-89ab-cdef-0123-456789abcdef, clique 7)";
    assert!(said["what"].as_str().is_some_and(|words| words.contains(named)), "{said}");
    assert_eq!((&said["state"], domain.status.code()), (&"fine".into(), Some(0)));
    // The switches of one host have no number.
    for alone in ["", "00000000000000000000000000000000:0"] {
        let mut command = simulated(&bench, &["--gpus", "2x4GiB"], GOOD_PYTHON, &["--json"]);
        assert!(!stdout(&output(command.env("SIMCUDA_FABRIC", alone))).contains("\"name\": \"fabric\""), "{alone}");
    }
}

/// What it says of GPUs, without what is each machine's own in their UUIDs.
fn of_gpus(text: &str) -> String {
    const FIXED: &str = "GPU-73696d63-7564-612d-";
    let mut parts = text.split(FIXED);
    let first = parts.next().unwrap_or_default().to_owned();
    let text = parts.fold(first, |text, part| text + FIXED + "6770-752d" + &part["6770-752d".len()..]);
    let lines = text.lines().skip_while(|line| !line.contains("GPUs ")).take_while(|line| !line.contains("host  "));
    lines.flat_map(|line| [line, "\n"]).collect()
}

#[test]
fn where_there_is_no_nvml_the_driver_alone_tells() {
    let bench = Bench::new();
    let output = output(&mut simulated(&bench, &["--gpus", "4x32GiB", "--no-nvml"], GOOD_PYTHON, &[]));
    let text = stdout(&output);
    golden("doctor_no_nvml.txt", &of_gpus(&text));
    assert!(text.contains("free memory is not known: libnvidia-ml.so.1 is not there"), "{text}");
    // Of one GPU nothing could be lent, and with NVML it is.
    for gpus in [&["--gpus", "1x32GiB", "--no-nvml"][..], &["--gpus", "4x32GiB"]] {
        let other = self::output(&mut simulated(&bench, gpus, GOOD_PYTHON, &[]));
        assert!(text.contains("loans ") && !stdout(&other).contains("loans "), "{gpus:?}: {text}");
    }
}

#[test]
fn links_are_told_pair_by_pair() {
    let bench = Bench::new();
    let links = bench.path("links.txt");
    let matrix =
        "GPU0 GPU1 GPU2 GPU3\nGPU0 X NV2 PHB SYS\nGPU1 NV2 X NV1 SYS\nGPU2 PHB NV1 X PIX\nGPU3 SYS SYS PIX X\n";
    std::fs::write(&links, matrix).unwrap();
    let machine = ["--link", &format!("matrix:{}", links.display())];
    let output = output(&mut simulated(&bench, &machine, GOOD_PYTHON, &["--json"]));
    let peers = check(&output, "peers");
    let row = |from: usize| peers["facts"][from].to_string();
    assert_eq!(
        [0, 1, 2, 3].map(row),
        [
            r#"["Itself",{"Nvlink":2},"Pcie","None"]"#,
            r#"[{"Nvlink":2},"Itself",{"Nvlink":1},"None"]"#,
            r#"["Pcie",{"Nvlink":1},"Itself","Pcie"]"#,
            r#"["None","None","Pcie","Itself"]"#,
        ]
    );
}

#[test]
fn the_same_as_json() {
    let bench = Bench::new();
    let output = output(&mut simulated(&bench, &["--gpus", "2x16GiB"], GOOD_PYTHON, &["--json"]));
    let gpus = check(&output, "GPUs");
    assert_eq!(gpus["facts"][1]["total"], 16u64 << 30);
    assert_eq!(gpus["facts"][1]["pci"], "0000:11:00.0");
    assert_eq!(check(&output, "driver")["facts"]["cuda"], 13_000);
    assert_eq!(check(&output, "HOST_NUMA")["facts"][0]["result"], 0);
    assert_eq!(check(&output, "python")["facts"]["understood"][0], "3.10");
}

#[test]
fn what_the_machine_lacks_is_a_finding() {
    let bench = Bench::new();
    for (machine, name, words) in [
        (&["--gpus", "2x16GiB", "--link", "none"][..], "peers", "no GPU reaches another"),
        (&["--gpus", "2x16GiB", "--host", "none"], "HOST_NUMA", "the pool goes on without the host's memory"),
        (&["--gpus", "2x16GiB", "--fault", "cuMemCreate:1=800"], "HOST_NUMA", "answers 800"),
    ] {
        let output = output(&mut simulated(&bench, machine, GOOD_PYTHON, &["--json"]));
        assert_eq!(output.status.code(), Some(1), "{machine:?}: {}", stdout(&output));
        let found = check(&output, name);
        assert_eq!(found["state"], "finding", "{machine:?}");
        assert!(found["what"].as_str().unwrap().contains(words), "{found}");
        assert!(found["advice"].is_string(), "{found}");
    }
    let output = output(&mut simulated(&bench, &["--gpus", "2x16GiB", "--link", "pcie"], GOOD_PYTHON, &["--json"]));
    assert_eq!(check(&output, "peers")["what"], "every GPU reaches every other, some over PCIe");
}

#[test]
fn a_driver_that_can_not_be_used_is_broken() {
    let bench = Bench::new();
    let failing = output(&mut simulated(&bench, &["--fault", "cuInit:1=999"], GOOD_PYTHON, &["--json"]));
    assert_eq!(failing.status.code(), Some(2));
    let driver = check(&failing, "driver");
    assert!(driver["what"].as_str().unwrap().contains("answers CUDA_ERROR_UNKNOWN (999)"), "{driver}");

    let mut hidden = simulated(&bench, &[], GOOD_PYTHON, &["--json"]);
    let hidden = output(hidden.env("CUDA_VISIBLE_DEVICES", "-1"));
    assert_eq!(hidden.status.code(), Some(2), "{}", stdout(&hidden));
    let driver = check(&hidden, "driver");
    assert!(driver["advice"].as_str().unwrap().contains("CUDA_VISIBLE_DEVICES"), "{driver}");
}

#[test]
fn a_driver_that_does_not_load_or_kills_its_process_is_broken_too() {
    let bench = Bench::new();
    let doctor = |folder: &str| {
        let mut command = gpupool();
        complete(&bench, &mut command, GOOD_PYTHON, &["--json"]);
        output(command.env("LD_LIBRARY_PATH", bench.path(folder)))
    };
    for folder in ["text", "deadly"] {
        std::fs::create_dir(bench.path(folder)).unwrap();
    }
    std::fs::write(bench.path("text/libcuda.so.1"), "no library").unwrap();
    let output = doctor("text");
    assert_eq!(output.status.code(), Some(2));
    assert!(check(&output, "driver")["what"].as_str().unwrap().contains("libcuda.so.1"), "{}", stdout(&output));
    let source = "#include <stdlib.h>\n__attribute__((constructor)) static void start(void) { abort(); }";
    bench.compile("deadly/libcuda.so.1", source, &["-shared", "-fPIC", "-x", "c"]);
    let output = doctor("deadly");
    assert_eq!(output.status.code(), Some(2));
    let what = check(&output, "driver")["what"].to_string();
    assert!(what.contains("asking the driver ended with signal: 6"), "{what}");
}

#[test]
fn a_library_that_is_none_is_broken() {
    let bench = Bench::new();
    for (library, words) in
        [("/etc/passwd", "no library"), ("/no/such.so", "no such file"), ("/bin/sh", "libgpupool.so")]
    {
        let mut command = gpupool();
        command.args(["doctor", "--json", "--library", library]);
        let output = output(&mut command);
        assert_eq!(output.status.code(), Some(2), "{library}");
        let check = check(&output, "library");
        assert_eq!(check["state"], "broken", "{check}");
        assert!(check["what"].as_str().unwrap().contains(words), "{check}");
    }
    let good = output(gpupool().args(["doctor", "--json", "--library"]).arg(bench.library()));
    assert_eq!(check(&good, "library")["state"], "fine");
}

#[test]
fn rivals_among_the_preloads_are_named() {
    let bench = Bench::new();
    let build = |name: &str, version: &str| {
        let source =
            format!("const char *gpupool_version(void) {{ return \"\"; }} char GPUPOOL_BUILD[] = \"{version}\";");
        bench.compile(name, &source, &["-shared", "-fPIC"])
    };
    let ours = build("libgpupool.so", gpupool_config::VERSION);
    let copy = build("copy.so", gpupool_config::VERSION);
    let older = build("older.so", "0.1.9 (old)");
    let rival = bench.compile("rival.so", "int cuMemAlloc_v2(void) { return 0; }", &["-shared", "-fPIC"]);
    for (order, words, position) in [
        ([&rival, &ours], "answers for cuMemAlloc_v2 before gpupool does", "gpupool is number 2 of 2"),
        ([&ours, &rival], "after gpupool it may miss calls", "gpupool comes first"),
        ([&ours, &copy], "copy.so is a second copy of gpupool, and does nothing", "gpupool comes first"),
        ([&ours, &older], "older.so is a second copy of gpupool, and does nothing", "gpupool comes first"),
        ([&older, &older], "older.so is 0.1.9 (old), and this command ", "gpupool comes first"),
    ] {
        let preload = order.map(|path| path.display().to_string()).join(":");
        let mut command = simulated(&bench, &[], GOOD_PYTHON, &["--json"]);
        let output = output(command.env("LD_PRELOAD", preload));
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(check(&output, "preload")["what"].as_str().unwrap().contains(words), "{}", stdout(&output));
        assert!(stdout(&output).contains(position), "{}", stdout(&output));
    }
}

#[test]
fn interpreters_that_can_not_be_read_are_findings() {
    let bench = Bench::new();
    for (python, words) in [
        ("3 9 True cpython", "python3 is 3.9"),
        ("3 13 False cpython", "python3 is a free-threaded 3.13, whose lines cannot be"),
        ("3 10 True pypy", "python3 is pypy 3.10"),
        ("no version", "python3 is no version"),
    ] {
        let output = output(&mut simulated(&bench, &[], python, &["--json"]));
        assert_eq!(output.status.code(), Some(1), "{python}");
        assert!(check(&output, "python")["what"].as_str().unwrap().ends_with(words), "{}", stdout(&output));
    }
}

#[test]
fn settings_are_judged_as_the_library_would() {
    let bench = Bench::new();
    for (name, value, state, words) in [
        ("GPUPOOL_MODE", "fast", "broken", "not a mode"),
        ("GPUPOOL_DEVICES", "0,9", "broken", "there is no GPU 9"),
        ("GPUPOOL_CONTEXTS", "deny", "broken", "GPUPOOL_CONTEXT_DEVICES"),
        ("GPUPOOL_MODE", "off", "finding", "nothing is intercepted"),
        ("GPUPOOL_FREE", "lazy", "fine", "as follows"),
        ("GPUPOOL_LIMIT", "1", "finding", "GPUPOOL_LIMIT=1: 1 byte, as there is no unit; write 1GiB if"),
        ("GPUPOOL_LIMIT", "10", "finding", "GPUPOOL_LIMIT=10: 10 bytes, as there is no unit; write 10GiB if"),
        ("GPUPOOL_HOST_LIMIT", "0", "fine", "as follows"),
    ] {
        let mut command = simulated(&bench, &[], GOOD_PYTHON, &["--json"]);
        let output = output(command.env(name, value));
        let settings = check(&output, "settings");
        assert_eq!(settings["state"], state, "{settings}");
        assert!(settings["what"].as_str().unwrap().contains(words), "{settings}");
        assert_eq!(settings["facts"][name], value);
    }
}

/// What the machine lacks keeps no program from starting, so doctor does not say that `run` does.
#[test]
fn doctor_says_of_settings_what_run_does() {
    let bench = Bench::new();
    for (name, value) in [
        ("GPUPOOL_MODE", "fast"),
        ("GPUPOOL_NO_SUCH", "1"),
        ("GPUPOOL_LOG", "blah"),
        ("GPUPOOL_DEVICES", "0,9"),
        ("GPUPOOL_LIMIT", "9:1GiB"),
        ("GPUPOOL_LIMIT", "0:70GiB"),
        ("GPUPOOL_GUARANTEE", "9:1GiB"),
        ("GPUPOOL_CONTEXT_DEVICES", "0"),
    ] {
        let mut doctor = simulated(&bench, &["--gpus", "2x16GiB"], GOOD_PYTHON, &["--json"]);
        let advice = check(&output(doctor.env(name, value)), "settings")["advice"].to_string();
        let mut run = gpupool();
        run.args(["sim", "--gpus", "2x16GiB", "--", GPUPOOL, "run", "--library"]).arg(bench.library());
        let starts = output(run.args(["--", "echo", "started"]).env(name, value)).stdout == b"started\n";
        assert_eq!(advice.contains("refuses to start"), !starts, "{name}={value}: {advice}");
    }
}

/// No two lines say different things of one memory.
#[test]
fn the_host_is_told_of_as_the_driver_and_the_settings_leave_it() {
    let bench = Bench::new();
    for (host, variable, value, words, numa) in [
        ("none", "GPUPOOL_MODE", "pool", "takes none of it (the driver gives none, see HOST_NUMA)", "finding"),
        ("none", "GPUPOOL_HOST_LIMIT", "0", "takes none of it (GPUPOOL_HOST_LIMIT=0)", "fine"),
        ("none", "GPUPOOL_MODE", "managed", "takes up to ", "fine"),
        ("64GiB", "GPUPOOL_MODE", "trace", "takes none of it (GPUPOOL_MODE=trace) and pins none", "fine"),
        ("64GiB", "GPUPOOL_MODE", "off", "takes none of it (GPUPOOL_MODE=off) and pins none", "fine"),
        ("64GiB", "GPUPOOL_HOST_LIMIT", "1MiB", "takes up to 1.0 MiB and pins up to ", "fine"),
        ("64GiB", "GPUPOOL_HOST_LIMIT", "900TiB", " are there now, and pins up to ", "fine"),
    ] {
        let mut command = simulated(&bench, &["--gpus", "1x16GiB", "--host", host], GOOD_PYTHON, &["--json"]);
        let output = output(command.env(variable, value));
        let said = check(&output, "host");
        assert!(said["what"].as_str().is_some_and(|said| said.contains(words)), "{variable}={value}: {said}");
        assert_eq!(check(&output, "HOST_NUMA")["state"], numa, "{variable}={value}");
    }
}

/// What `run` refuses is found here, also where the settings say that nothing is to be done.
#[test]
fn doctor_finds_what_run_refuses() {
    let bench = Bench::new();
    let nowhere = bench.path("no/folder");
    let suspend = format!("1min:{}", nowhere.display());
    let bare = tempfile::tempdir().unwrap();
    for (variables, name, words) in [
        (&[("GPUPOOL_MODE", "off"), ("GPUPOOL_LOG", "blah")][..], "settings", "neither a level nor a part of gpupool"),
        (&[("TMPDIR", nowhere.to_str().unwrap())], "temporary", "cannot make a folder"),
        (&[("GPUPOOL_RESTORE", nowhere.to_str().unwrap())], "settings", "nothing comes back from there: "),
        (
            &[("GPUPOOL_RESTORE", bare.path().to_str().unwrap())],
            "settings",
            "there is no image yet, so nothing comes back",
        ),
        (&[("GPUPOOL_IDLE_SUSPEND", &suspend)], "settings", "no memory can go there: "),
        (&[("GPUPOOL_MODE", "off"), ("GPUPOOL_SUMMARY", "on")], "settings", "GPUPOOL_SUMMARY=on: says nothing with"),
        (
            &[("GPUPOOL_PRIORITY", "80"), ("GPUPOOL_METRICS", "off")],
            "settings",
            "GPUPOOL_PRIORITY=80: says nothing with",
        ),
        (&[("LOCAL_RANK", "first")], "ranks", "LOCAL_RANK=first is not the number of a rank"),
        (&[("SLURM_TASKS_PER_NODE", "many")], "ranks", "SLURM_TASKS_PER_NODE=many is not a number of ranks"),
    ] {
        let mut command = gpupool();
        // Set for doctor alone: the simulated driver needs a folder of its own.
        command.args(["sim", "--gpus", "2x16GiB", "--", "env"]);
        command.args(variables.iter().map(|(name, value)| format!("{name}={value}"))).arg(GPUPOOL);
        complete(&bench, &mut command, GOOD_PYTHON, &["--json"]);
        let output = output(&mut command);
        let json: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
        let found = json["checks"].as_array().unwrap().iter().find(|check| {
            check["name"] == name && check["state"] == "finding" && check["what"].as_str().unwrap().contains(words)
        });
        assert!(found.is_some(), "{variables:?}: {json:#}");
    }
}

#[test]
fn settings_of_the_log_that_say_nothing_are_found() {
    let bench = Bench::new();
    let folder = bench.path("no/folder/log.jsonl");
    for (name, value, words) in [
        ("GPUPOOL_LOG", "blah", "neither a level nor a part of gpupool"),
        ("GPUPOOL_LOG_FILE", "/dev/null", "is there already and no file"),
        ("GPUPOOL_LOG_FILE", folder.to_str().unwrap(), "cannot write into the folder"),
    ] {
        let mut command = simulated(&bench, &["--gpus", "2x16GiB"], GOOD_PYTHON, &["--json"]);
        let output = output(command.env(name, value));
        assert_eq!(output.status.code(), Some(1), "{name}={value}: {}", stdout(&output));
        let found = check(&output, "settings");
        assert_eq!(found["state"], "finding", "{found}");
        assert!(found["what"].as_str().unwrap().contains(words), "{found}");
    }
}
