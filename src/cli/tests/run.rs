//! `gpupool run`: what reaches the program, what it says when it refuses, and how it ends.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;

use crate::common::{Bench, golden_folder, gpupool, output, stderr, stdout};

const PRINT_ARGUMENTS: &str = r#"printf '[%s]' "$@""#;

#[test]
fn arguments_arrive_untouched() {
    let bench = Bench::new();
    let mut command = bench.gpupool("run", &[]);
    command.args(["sh", "-c", PRINT_ARGUMENTS, "sh", "--mode", "-x", "", "a b", "--", "$HOME", "ü\n"]);
    command.arg(OsStr::from_bytes(b"\xff"));
    let output = output(&mut command);
    assert_eq!(output.stdout, b"[--mode][-x][][a b][--][$HOME][\xc3\xbc\n][\xff]", "{}", stderr(&output));
}

#[test]
fn the_two_dashes_may_be_left_out() {
    let bench = Bench::new();
    let mut command = gpupool();
    command.args(["run", "--library"]).arg(bench.library()).args([
        "sh",
        "-c",
        PRINT_ARGUMENTS,
        "sh",
        "--set",
        "--",
        "x",
    ]);
    assert_eq!(stdout(&output(&mut command)), "[--set][--][x]");
}

#[test]
fn the_library_is_preloaded_before_others() {
    let bench = Bench::new();
    let other = bench.compile("other.so", "int other;", &["-shared", "-fPIC"]);
    let mut command = bench.gpupool("run", &[]);
    command.args(["sh", "-c", "echo $LD_PRELOAD; grep -c -e empty.so -e other.so /proc/self/maps"]);
    let output = output(command.env("LD_PRELOAD", &other));
    let (library, other) = (bench.library().canonicalize().unwrap(), other.canonicalize().unwrap());
    let text = stdout(&output);
    let (list, mapped) = text.trim().split_once('\n').unwrap();
    assert_eq!(list, format!("{}:{}", library.display(), other.display()));
    assert!(mapped.parse::<u32>().unwrap() > 2, "{text}");
}

#[test]
fn settings_come_from_flags_and_win_over_the_environment() {
    let bench = Bench::new();
    let mut command = bench.gpupool(
        "run",
        &[
            "--set",
            "min-size=2MiB",
            "--set",
            "GPUPOOL_FREE=lazy",
            "--set",
            "mode=trace",
            "--mode",
            "spill",
            "--summary",
        ],
    );
    command.args(["sh", "-c", "echo $GPUPOOL_MIN_SIZE $GPUPOOL_FREE $GPUPOOL_MODE $GPUPOOL_SUMMARY $GPUPOOL_MEMINFO"]);
    command.envs([("GPUPOOL_MIN_SIZE", "nonsense"), ("GPUPOOL_MEMINFO", "device")]);
    let output = output(&mut command);
    assert_eq!(stdout(&output), "2MiB lazy spill on device\n", "{}", stderr(&output));
}

#[test]
fn bad_settings_refuse_the_start_and_are_all_named() {
    let bench = Bench::new();
    let mark = bench.path("ran");
    let mut command = bench.gpupool("run", &["--set", "limit=0:70XB", "--set", "colour=red"]);
    let output = output(command.arg("touch").arg(&mark).env("GPUPOOL_MODE", "fast"));
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(stdout(&output), "");
    let expected = "\
gpupool: GPUPOOL_COLOUR=red: no such setting; `gpupool run --help` lists them
gpupool: GPUPOOL_LIMIT=0:70XB: not a size; write for example 0:70GiB,1:40GiB
gpupool: GPUPOOL_MODE=fast: not a mode; write one of pool|spill|managed|trace|off
";
    assert_eq!(stderr(&output), expected);
    assert!(!mark.exists());
}

#[test]
fn a_setting_that_is_no_pair_is_refused() {
    let bench = Bench::new();
    let output = output(bench.gpupool("run", &["--set", "limit"]).arg("true"));
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).starts_with("gpupool: --set limit: not NAME=VALUE"), "{}", stderr(&output));
}

#[test]
fn a_log_that_can_not_be_written_is_refused() {
    let bench = Bench::new();
    std::fs::write(bench.path("old"), "").unwrap();
    for (path, reason) in [
        (bench.path("old"), "exists already"),
        (bench.path("no/folder"), "can not write into the folder"),
        (bench.path("no/%p"), "can not write into the folder"),
        (bench.path("%z"), "%z means nothing"),
    ] {
        let output = output(bench.gpupool("run", &["--log", path.to_str().unwrap()]).arg("true"));
        assert_eq!(output.status.code(), Some(2), "{}", path.display());
        assert!(stderr(&output).contains(reason), "{}", stderr(&output));
    }
    let path = bench.path("%p.%e");
    assert!(output(bench.gpupool("run", &["--log", path.to_str().unwrap()]).arg("true")).status.success());
}

#[test]
fn a_missing_library_is_named_with_the_ways_out() {
    let output = output(gpupool().args(["run", "--library", "/no/such.so", "--", "true"]));
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(stderr(&output), "gpupool: --library /no/such.so: no such file\n");
}

#[test]
fn the_exit_code_is_the_programs() {
    let bench = Bench::new();
    for code in [0, 1, 2, 7, 126, 255] {
        let output = output(bench.gpupool("run", &[]).args(["sh", "-c", &format!("exit {code}")]));
        assert_eq!(output.status.code(), Some(code));
        assert_eq!(stderr(&output), "");
    }
}

#[test]
fn a_program_that_is_not_there_or_can_not_start_ends_as_in_a_shell() {
    let bench = Bench::new();
    let missing = output(bench.gpupool("run", &[]).arg("/no/such/program"));
    assert_eq!(missing.status.code(), Some(127));
    assert!(stderr(&missing).starts_with("gpupool: /no/such/program: "), "{}", stderr(&missing));
    let text = bench.path("text");
    std::fs::write(&text, "no program").unwrap();
    let refused = output(bench.gpupool("run", &[]).arg(&text));
    assert_eq!(refused.status.code(), Some(126));
    assert!(stderr(&refused).contains(text.to_str().unwrap()), "{}", stderr(&refused));
}

#[test]
fn the_program_is_the_process_that_was_started() {
    let bench = Bench::new();
    let mut command = bench.gpupool("run", &[]);
    command.args(["sh", "-c", "echo $$; kill -TERM $$"]).stdout(std::process::Stdio::piped());
    let child = command.spawn().unwrap();
    let id = child.id();
    let output = child.wait_with_output().unwrap();
    assert_eq!(stdout(&output).trim(), id.to_string());
    assert_eq!(output.status.signal(), Some(libc::SIGTERM));
}

#[test]
fn mistakes_on_the_command_line_are_exit_2_and_on_stderr() {
    for arguments in
        [&[][..], &["run"], &["run", "--sumary", "--", "true"], &["fly"], &["sim", "--gpus", "many", "--", "true"]]
    {
        let output = output(gpupool().args(arguments));
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn help_lists_every_setting() {
    let output = output(gpupool().args(["run", "--help"]));
    assert!(output.status.success());
    // The help wraps its lines to the terminal.
    let text = stdout(&output).split_whitespace().collect::<Vec<_>>().join(" ");
    for row in gpupool_config::SETTINGS {
        let expected = format!("{} ({}) {} [default: {}]", row.name, row.values, row.help, row.default);
        assert!(text.contains(&expected), "{expected}\n{text}");
    }
}

/// A program that writes the log that the pool would have written, from `tests/golden`, and ends with `code`.
fn logging(bench: &Bench, flags: &[&str], log: &str, code: i32) -> std::process::Command {
    let log = golden_folder().join(log);
    let mut command = bench.gpupool("run", flags);
    let script = format!(
        "to=$(echo \"$GPUPOOL_LOG_FILE\" | sed s/%p/$$/); [ -z \"$1\" ] || cp \"$1\" \"$to\"; echo \"$to\"; exit {code}"
    );
    command.args(["sh", "-c", &script, "sh"]).arg(log);
    command
}

#[test]
fn a_finding_fails_a_program_that_succeeds() {
    let bench = Bench::new();
    let output = output(&mut logging(&bench, &["--fail-on", "GP005,GP001"], "train.jsonl", 0));
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    let log = stdout(&output).trim().to_owned();
    let expected = format!(
        "gpupool: GP001: A context that nobody uses: the primary context on GPU 0 took ≈519.0 MiB 8.1 s after the start \
         and nothing was done in it\ngpupool:   /home/ada/work/train.py:88 in report_speed\ngpupool: gpupool report {log}\n"
    );
    assert_eq!(stderr(&output), expected);
    // The log is kept for the command that was just named.
    std::fs::remove_dir_all(std::path::Path::new(&log).parent().unwrap()).unwrap();
}

#[test]
fn other_findings_do_not_and_leave_nothing_behind() {
    let bench = Bench::new();
    let output = output(&mut logging(&bench, &["--fail-on", "GP006"], "train.jsonl", 0));
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
    assert!(!std::path::Path::new(stdout(&output).trim()).parent().unwrap().exists());
}

#[test]
fn a_program_that_fails_keeps_its_own_code() {
    let bench = Bench::new();
    let output = output(&mut logging(&bench, &["--fail-on", "any"], "train.jsonl", 7));
    assert_eq!(output.status.code(), Some(7));
    assert!(stderr(&output).contains("GP001") && stderr(&output).contains("GP010"), "{}", stderr(&output));
    std::fs::remove_dir_all(std::path::Path::new(stdout(&output).trim()).parent().unwrap()).unwrap();
}

#[test]
fn a_log_that_was_asked_for_is_used_and_older_ones_are_not_read() {
    let bench = Bench::new();
    std::fs::copy(golden_folder().join("train.jsonl"), bench.path("old.jsonl")).unwrap();
    let template = bench.path("%p.jsonl");
    let clean =
        output(&mut logging(&bench, &["--fail-on", "any", "--log", template.to_str().unwrap()], "rank0.jsonl", 0));
    assert_eq!((clean.status.code(), stderr(&clean).as_str()), (Some(0), ""));
    assert!(std::path::Path::new(stdout(&clean).trim()).exists());
    let found =
        output(&mut logging(&bench, &["--fail-on", "any", "--log", template.to_str().unwrap()], "train.jsonl", 0));
    assert_eq!(found.status.code(), Some(3), "{}", stderr(&found));
    // A path without a folder is meant from here, wherever the program goes.
    let mut command = logging(&bench, &["--fail-on", "any", "--log", "%p.rel"], "train.jsonl", 0);
    let relative = output(command.current_dir(bench.path("")));
    assert_eq!(relative.status.code(), Some(3), "{}", stderr(&relative));
}

#[test]
fn no_log_at_all_is_said() {
    let bench = Bench::new();
    let output = output(bench.gpupool("run", &["--fail-on", "any"]).arg("true"));
    assert_eq!(output.status.code(), Some(0));
    assert!(stderr(&output).starts_with("gpupool: --fail-on: no log was written"), "{}", stderr(&output));
}

#[test]
fn judging_a_program_changes_neither_its_code_nor_its_death() {
    let bench = Bench::new();
    let code = output(bench.gpupool("run", &["--fail-on", "any"]).args(["sh", "-c", "exit 9"]));
    assert_eq!(code.status.code(), Some(9));
    let death = output(bench.gpupool("run", &["--fail-on", "any"]).args(["sh", "-c", "kill -SEGV $$"]));
    assert_eq!(death.status.signal(), Some(libc::SIGSEGV));
    let missing = output(bench.gpupool("run", &["--fail-on", "any"]).arg("/no/such/program"));
    assert_eq!(missing.status.code(), Some(127));
}

#[test]
fn what_could_never_find_anything_is_refused() {
    let bench = Bench::new();
    for (flags, reason) in [
        (&["--fail-on", "GP1"][..], "GP1: no such finding; the nearest is GP001"),
        (&["--fail-on", "any", "--mode", "off"], "nothing is looked at"),
        (&["--fail-on", "any", "--set", "log=error"], "would not be logged"),
    ] {
        let output = output(bench.gpupool("run", flags).arg("true"));
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        assert!(stderr(&output).contains(reason), "{}", stderr(&output));
    }
}
