//! `gpupool sim`: the machine that a program finds, the signals it gets, and how it ends.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{Bench, gpupool, output, stderr, stdout};

/// Blocks what may be forwarded, says that it did, waits for one signal, names it and exits with its number.
const WAIT_FOR_A_SIGNAL: &str = r#"
#include <signal.h>
#include <stdio.h>
int main(void) {
    int all[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}, got;
    sigset_t set;
    sigemptyset(&set);
    for (int i = 0; i < 6; i++) sigaddset(&set, all[i]);
    sigprocmask(SIG_BLOCK, &set, 0);
    puts("ready");
    fflush(stdout);
    sigwait(&set, &got);
    printf("got %d\n", got);
    return got;
}
"#;

#[test]
fn the_simulated_driver_is_found_first_and_gone_afterwards() {
    let bench = Bench::new();
    let mut command = bench.gpupool("sim", &[]);
    command.args(["sh", "-c", r#"echo "$LD_LIBRARY_PATH"; readlink "${LD_LIBRARY_PATH%%:*}"/*"#]);
    let output = output(command.env("LD_LIBRARY_PATH", "/a:/b"));
    let text = stdout(&output);
    let lines: Vec<_> = text.lines().collect();
    let library = bench.library().canonicalize().unwrap();
    assert_eq!(lines[1..], [library.to_str().unwrap(); 2], "{}", stderr(&output));
    let folder = lines[0].strip_suffix(":/a:/b").unwrap();
    assert!(!Path::new(folder).exists(), "{folder} was left behind");
}

/// Whoever may write to it could put a library of his own in place of the driver's.
#[test]
fn nobody_else_gets_into_its_folder_whatever_the_umask_says() {
    for mask in ["000", "022", "777"] {
        let bench = Bench::new();
        let sim = bench.gpupool("sim", &[]);
        let mut command = Command::new("sh");
        command.args(["-c", &format!("umask {mask}; exec \"$0\" \"$@\"")]).arg(sim.get_program()).args(sim.get_args());
        command.args(["sh", "-c", r#"stat -c %a "${LD_LIBRARY_PATH%%:*}""#]);
        command.envs(sim.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let output = output(&mut command);
        assert_eq!(stdout(&output), "700\n", "umask {mask}: {}", stderr(&output));
    }
}

#[test]
fn flags_describe_the_machine_and_the_rest_is_inherited() {
    let bench = Bench::new();
    let show = ["sh", "-c", "echo $SIMCUDA_GPUS $SIMCUDA_LINK $SIMCUDA_HOST $SIMCUDA_FAULT"];
    let flags = ["--gpus", "4x32GiB", "--link", "none", "--host", "8GiB", "--fault", "cuMemMap:3=999"];
    assert_eq!(stdout(&output(bench.gpupool("sim", &flags).args(show))), "4x32GiB none 8GiB cuMemMap:3=999\n");
    let inherited = output(bench.gpupool("sim", &["--link", "pcie"]).args(show).env("SIMCUDA_GPUS", "1x1GiB"));
    assert_eq!(stdout(&inherited), "1x1GiB pcie\n");
}

/// A test that injects a fault into a call that is none would test nothing.
#[test]
fn a_fault_in_a_call_that_the_driver_lacks_is_refused() {
    let bench = Bench::new();
    for (fault, expected) in [
        ("cuMemMop:3=999", "--fault cuMemMop:3=999: the driver has no cuMemMop; did you mean cuMemMap?"),
        ("cuInit:1=3,cuNopeAtAllEver:1=2", "--fault cuNopeAtAllEver:1=2: the driver has no cuNopeAtAllEver"),
    ] {
        let output = output(bench.gpupool("sim", &["--fault", fault]).args(["echo", "ran"]));
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""), "{fault}");
        assert!(stderr(&output).starts_with(&format!("gpupool: {expected}")), "{}", stderr(&output));
    }
    for fault in ["*:3=2", "cuMemMap:1=2, cuInit:7=999"] {
        assert!(output(bench.gpupool("sim", &["--fault", fault]).arg("true")).status.success(), "{fault}");
    }
    // The real one, whose calls have versions and twins.
    for fault in ["cuMemAlloc:1=2", "cuMemAlloc_v2:1=2", "cuMemcpyHtoDAsync_v2_ptsz:1=2", "cuCtxCreate:1=2"] {
        let output = output(gpupool().args(["sim", "--fault", fault, "--", "true"]));
        assert!(output.status.success(), "{fault}: {}", stderr(&output));
    }
}

#[test]
fn every_sim_is_a_machine_of_its_own_and_a_matrix_is_named_by_its_whole_path() {
    let bench = Bench::new();
    std::fs::write(bench.path("links.txt"), "GPU0\nGPU0 X\n").unwrap();
    let mut outer = bench.gpupool("sim", &["--link", "matrix:links.txt"]);
    outer.current_dir(bench.path("")).args([
        "sh",
        "-c",
        r#"echo "$SIMCUDA_LINK $SIMCUDA_MACHINE"; "$0" sim --driver "$1" -- \
         sh -c 'echo "$SIMCUDA_LINK $SIMCUDA_MACHINE"'"#,
    ]);
    let output = output(outer.arg(env!("CARGO_BIN_EXE_gpupool")).arg(bench.library()));
    let text = stdout(&output);
    let lines: Vec<_> = text.lines().filter_map(|line| line.split_once(' ')).collect();
    let link = format!("matrix:{}", bench.path("links.txt").canonicalize().unwrap().display());
    assert_eq!(lines.iter().map(|(link, _)| *link).collect::<Vec<_>>(), [link.as_str(); 2], "{}", stderr(&output));
    assert!(lines[0].1.ends_with("/machine") && lines[1].1.ends_with("/machine") && lines[0].1 != lines[1].1, "{text}");
}

#[test]
fn nvml_is_found_where_it_lies_beside_the_driver() {
    let bench = Bench::new();
    let show = ["sh", "-c", r#"readlink "${LD_LIBRARY_PATH%%:*}/libnvidia-ml.so.1""#];
    assert_eq!(stdout(&output(bench.gpupool("sim", &[]).args(show))), "");
    std::fs::write(bench.path("libsimnvml.so"), "").unwrap();
    let beside = bench.path("libsimnvml.so").canonicalize().unwrap();
    assert_eq!(stdout(&output(bench.gpupool("sim", &[]).args(show))), format!("{}\n", beside.display()));
    assert_eq!(stdout(&output(bench.gpupool("sim", &["--no-nvml"]).args(show))), "");
}

#[test]
fn machines_that_make_no_sense_are_refused() {
    let bench = Bench::new();
    let refused = [
        ["--gpus", "4x"],
        ["--gpus", "0x32GiB"],
        ["--link", "string"],
        ["--link", "matrix:/no/such/file"],
        ["--host", "lots"],
        ["--fault", "cuMemMap=3"],
    ];
    let refusal = |flags: &[&str]| {
        let output = output(bench.gpupool("sim", flags).arg("true"));
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        stderr(&output)
    };
    for flags in refused {
        assert!(refusal(&flags).contains(flags[1]), "{flags:?}");
    }
    for (flags, words) in [
        (["--gpus", "100x1GiB"], "100 GPUs, where a simulated machine has 32 at most"),
        (["--gpus", "30x1GiB,3x2GiB"], "33 GPUs, where"),
        (["--gpus", "2x8TiB"], "a GPU of 8TiB, where one has 64MiB to 4TiB"),
        (["--gpus", "1x1MiB"], "a GPU of 1MiB, where one has"),
        (["--host", "8TiB"], "a host of 8TiB, where one has 4TiB at most"),
    ] {
        let said = refusal(&flags);
        assert!(said.contains(words), "{flags:?}: {said}");
    }
    for flags in [["--gpus", "32x64MiB"], ["--gpus", "1x1.5GiB"], ["--host", "0"]] {
        let output = output(bench.gpupool("sim", &flags).arg("true"));
        assert!(output.status.success(), "{flags:?}: {}", stderr(&output));
    }
}

#[test]
fn exit_codes_and_failures_to_start_pass_through() {
    let bench = Bench::new();
    for code in [0, 1, 7, 255] {
        assert_eq!(
            output(bench.gpupool("sim", &[]).args(["sh", "-c", &format!("exit {code}")])).status.code(),
            Some(code)
        );
    }
    let missing = output(bench.gpupool("sim", &[]).arg("/no/such/program"));
    assert_eq!(missing.status.code(), Some(127));
    assert!(stderr(&missing).starts_with("gpupool: /no/such/program: "), "{}", stderr(&missing));
    let text = bench.path("text");
    std::fs::write(&text, "no program").unwrap();
    assert_eq!(output(bench.gpupool("sim", &[]).arg(&text)).status.code(), Some(126));
}

#[test]
fn sim_and_run_compose() {
    let bench = Bench::new();
    let mut command = bench.gpupool("sim", &["--gpus", "2x1GiB"]);
    command.arg(env!("CARGO_BIN_EXE_gpupool")).args(["run", "--library"]).arg(bench.library());
    command.args(["--mode", "spill", "--", "sh", "-c", "echo $SIMCUDA_GPUS $GPUPOOL_MODE; exit 3"]);
    let output = output(&mut command);
    assert_eq!((stdout(&output).as_str(), output.status.code()), ("2x1GiB spill\n", Some(3)), "{}", stderr(&output));
}

#[test]
fn a_death_by_signal_is_a_death_by_that_signal() {
    let bench = Bench::new();
    for signal in [libc::SIGTERM, libc::SIGKILL, libc::SIGSEGV, libc::SIGABRT, libc::SIGPIPE, libc::SIGHUP] {
        let script = format!("ulimit -c 0; echo ${{LD_LIBRARY_PATH%%:*}}; kill -{signal} $$");
        let output = output(bench.gpupool("sim", &[]).args(["sh", "-c", &script]));
        assert_eq!(output.status.signal(), Some(signal));
        assert!(!output.status.core_dumped());
        assert!(!Path::new(stdout(&output).trim()).exists());
    }
}

#[test]
fn signals_reach_the_program_and_its_answer_counts() {
    let bench = Bench::new();
    let waiter = bench.compile("waiter", WAIT_FOR_A_SIGNAL, &[]);
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2] {
        let mut child = bench.gpupool("sim", &[]).arg(&waiter).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        // SAFETY: plain integers; the child was not waited for yet, so its number is still its own.
        let sent = unsafe { libc::kill(child.id().cast_signed(), signal) };
        assert_eq!(sent, 0);
        let mut rest = String::new();
        said.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, format!("got {signal}\n"));
        assert_eq!(child.wait().unwrap().code(), Some(signal));
    }
}

#[test]
fn a_temporary_folder_of_any_name_will_do() {
    let bench = Bench::new();
    std::fs::create_dir(bench.path("a:b;c $ORIGIN")).unwrap();
    std::fs::create_dir(bench.path("relative")).unwrap();
    let absolute = bench.path("a:b;c $ORIGIN");
    let script = r#"cd /; readlink "${LD_LIBRARY_PATH%%:*}"/libcuda.so.1; echo "$LD_LIBRARY_PATH""#;
    for temporary in [absolute.as_os_str(), "relative".as_ref(), "".as_ref()] {
        let mut command = bench.gpupool("sim", &[]);
        command.args(["sh", "-c", script]).env("TMPDIR", temporary).current_dir(bench.path(""));
        let output = output(&mut command);
        let text = stdout(&output);
        let (target, folder) = text.trim_end().split_once('\n').unwrap_or_else(|| panic!("{}", stderr(&output)));
        assert_eq!(target, bench.library().canonicalize().unwrap().to_str().unwrap());
        assert!(!Path::new(folder).exists());
    }
    let none = output(bench.gpupool("sim", &[]).arg("true").env("TMPDIR", "/no/such/folder"));
    assert_eq!(none.status.code(), Some(2));
    assert!(stderr(&none).contains("in /no/such/folder: No such file"), "{}", stderr(&none));
}

/// Initialises the driver, and exits with 9 where that fails.
const INITIALISES: &str = r#"
#include <dlfcn.h>
int main(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    return ((int (*)(int))dlsym(driver, "cuInit"))(0) ? 9 : 0;
}
"#;

/// The simulated driver beside the command, as a build puts it.
fn simulated(script: &str, bench: &Bench) -> std::process::Output {
    let program = bench.compile("initialises", INITIALISES, &["-ldl"]);
    let mut command = gpupool();
    let real = command.get_program().to_owned();
    command = Command::new("sh");
    command.args(["-c", script]).arg(real).arg(program).arg(bench.path("full"));
    output(&mut command)
}

#[test]
fn a_machine_that_a_limit_leaves_no_room_for_names_the_limit() {
    let bench = Bench::new();
    for (limit, name) in [("ulimit -f 64", "ulimit -f"), ("ulimit -v 4000000", "ulimit -v")] {
        let output = simulated(&format!("{limit}; exec \"$0\" sim --gpus 2x4GiB -- \"$1\""), &bench);
        assert_eq!(output.status.code(), Some(9), "{limit}: {:?} {}", output.status, stderr(&output));
        assert!(stderr(&output).contains(name), "{limit}: {}", stderr(&output));
    }
}

/// The file of the machine's accounts has holes, and who writes into one that the disk has no room for is ended by a signal.
#[test]
fn a_machine_on_a_full_disk_says_so() {
    let bench = Bench::new();
    let script = "mkdir \"$2\"; unshare -m sh -c 'mount -t tmpfs -o size=300k none \"$2\" || exit 77; TMPDIR=\"$2\" exec \"$0\" sim \
                  --gpus 2x4GiB -- \"$1\"' \"$0\" \"$1\" \"$2\" || exit $?";
    let output = simulated(script, &bench);
    if output.status.code() != Some(9) && ["unshare", "mount"].iter().any(|tool| stderr(&output).starts_with(tool)) {
        println!("only root can mount a small disk: not checked: {}", stderr(&output));
        return;
    }
    assert_eq!(output.status.code(), Some(9), "{:?} {}", output.status, stderr(&output));
    assert!(stderr(&output).contains("has no room") && stderr(&output).contains("TMPDIR"), "{}", stderr(&output));
}

/// What cannot start is 2, and 1 is an answer of programs.
#[test]
fn without_a_proc_file_system_nothing_is_started() {
    for command in ["run --fail-on any", "run", "sim"] {
        // In a container there may be another one below it.
        let script = format!(
            "while umount -l /proc 2>&-; do :; done; [ ! -e /proc/self ] || exit 77; exec \"$0\" {command} -- true"
        );
        let output = output(Command::new("unshare").args(["-m", "sh", "-c", &script]).arg(gpupool().get_program()));
        if output.status.code() == Some(77) || stderr(&output).starts_with("unshare") {
            println!("only root can take /proc away: not checked: {}", stderr(&output));
            return;
        }
        assert_eq!(output.status.code(), Some(2), "{command}: {}", stderr(&output));
        assert!(stderr(&output).contains("/proc"), "{command}: {}", stderr(&output));
    }
}

#[test]
fn what_is_printed_to_a_closed_stdout_is_not_printed() {
    for words in ["explain GP001", "--help", "run --help", "sim --help", "ps", "manual"] {
        let script = format!("exec \"$0\" {words} >&-");
        let output = output(Command::new("sh").args(["-c", &script]).arg(gpupool().get_program()));
        let said = (output.status.code(), stderr(&output));
        assert_eq!(said, (Some(1), "gpupool: stdout: it is closed; nothing can be printed\n".to_owned()), "{words}");
    }
}

#[test]
fn a_temporary_folder_that_is_not_used_is_named() {
    let bench = Bench::new();
    for (command, flags) in [("sim", &[][..]), ("run", &["--fail-on", "any"])] {
        let output = output(bench.gpupool(command, flags).arg("true").env("TMPDIR", "/proc"));
        assert_eq!(output.status.code(), Some(0), "{command}: {}", stderr(&output));
        let said: Vec<_> = stderr(&output).lines().filter(|line| line.contains("/proc")).map(str::to_owned).collect();
        let [line] = &said[..] else { panic!("{command}: {said:?}") };
        assert!(line.starts_with("gpupool: warning: no folder for ") && line.ends_with("it is in /tmp"), "{line}");
    }
}
