//! `gpupool run`: what reaches the program, what it says when it refuses, and how it ends.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Bench, gpupool, made, output, stderr, stdout};

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
fn a_library_of_another_version_is_named_and_used() {
    let bench = Bench::new();
    let ours = output(gpupool().arg("--version").stdin(std::process::Stdio::null()));
    assert_eq!(stdout(&ours), format!("gpupool {}\n", gpupool_config::VERSION));
    let echo = |bench: &Bench| output(bench.gpupool("run", &[]).args(["echo", "ran"]));
    assert_eq!(stderr(&echo(&bench)), "");
    bench.library_of("0.0.9 (abc, 2020-01-01)");
    let other = echo(&bench);
    assert_eq!(stdout(&other), "ran\n");
    let words = format!("is 0.0.9 (abc, 2020-01-01), and this command {};", gpupool_config::VERSION);
    assert!(stderr(&other).contains(&words), "{}", stderr(&other));
    let doctor = output(gpupool().args(["doctor", "--library"]).arg(bench.library()));
    assert!(
        stdout(&doctor).split_whitespace().collect::<Vec<_>>().join(" ").contains("is 0.0.9 (abc, 2020-01-01)"),
        "{}",
        stdout(&doctor)
    );
}

/// A copy of the library whose path the loader would split, and an empty folder for the runtime's links.
fn library_with_a_space_in_its_path(bench: &Bench) -> (PathBuf, PathBuf) {
    let (folder, runtime) = (bench.path("My Projects"), bench.path("runtime"));
    for folder in [&folder, &runtime] {
        made(std::fs::create_dir(folder));
    }
    let library = folder.join("libgpupool.so");
    made(std::fs::copy(bench.library(), &library));
    (library, runtime)
}

#[test]
fn a_library_whose_path_the_loader_would_split_is_preloaded_by_a_link() {
    let bench = Bench::new();
    let (library, runtime) = library_with_a_space_in_its_path(&bench);
    let mut command = gpupool();
    command.args(["run", "--library"]).arg(&library).args([
        "sh",
        "-c",
        "echo $LD_PRELOAD; grep -c 'My Projects' /proc/self/maps",
    ]);
    let output = output(command.env("XDG_RUNTIME_DIR", &runtime));
    let text = stdout(&output);
    let (preload, mapped) = text.trim().split_once('\n').unwrap_or_else(|| panic!("{text}{}", stderr(&output)));
    assert!(Path::new(preload).starts_with(runtime.canonicalize().unwrap()), "{text}");
    assert_ne!(mapped, "0", "the link leads to the library");
    assert_eq!(Path::new(preload).canonicalize().unwrap(), library.canonicalize().unwrap());
}

#[test]
fn doctor_finds_that_no_link_can_be_made() {
    let bench = Bench::new();
    let (library, runtime) = library_with_a_space_in_its_path(&bench);
    let gpupool_with = |arguments: &[&str]| {
        let mut command = gpupool();
        command.env("XDG_RUNTIME_DIR", &runtime).args(&arguments[..1]).arg("--library").arg(&library);
        output(command.args(&arguments[1..]))
    };
    let link = PathBuf::from(stdout(&gpupool_with(&["run", "sh", "-c", "echo $LD_PRELOAD"])).trim());
    let doctor = || stdout(&gpupool_with(&["doctor"])).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(!doctor().contains("no link to it can be made"));
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink("/somewhere/else", &link).unwrap();
    assert_eq!(gpupool_with(&["run", "true"]).status.code(), Some(2));
    let told = doctor();
    assert!(told.contains("BROKEN library") && told.contains("no link to it can be made"), "{told}");
}

#[test]
fn a_program_that_nothing_can_be_loaded_into_runs_and_that_is_told() {
    let bench = Bench::new();
    let program = bench.compile("static", "int main(void) { return 7; }", &["-static"]);
    let log = bench.path("log.jsonl");
    let output = output(bench.gpupool("run", &["--log", log.to_str().unwrap()]).arg(&program));
    assert_eq!((output.status.code(), log.exists()), (Some(7), false));
    let said = stderr(&output);
    let words =
        "static is statically linked, so that nothing can be loaded into it: it runs without gpupool and writes no log";
    assert!(said.lines().count() == 1 && said.contains(words), "{said}");
    let quiet = stderr(&crate::common::output(bench.gpupool("run", &[]).arg("true")));
    assert_eq!(quiet, "");
}

#[test]
fn a_program_of_another_machine_or_c_library_is_refused_in_one_line() {
    let bench = Bench::new();
    let source = "int main(void) { return 0; }";
    let musl = bench.compile("musl", source, &["-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1"]);
    let arm = bench.compile("arm", source, &[]);
    let mut bytes = std::fs::read(&arm).unwrap();
    // The machine's number, here that of AArch64.
    bytes[18..20].copy_from_slice(&183u16.to_le_bytes());
    std::fs::write(&arm, bytes).unwrap();
    for (program, words) in
        [(musl, "musl is linked to musl (/lib/ld-musl-x86_64.so.1);"), (arm, "arm is a program for Aarch64;")]
    {
        let output = output(bench.gpupool("run", &[]).arg(program));
        assert_eq!(output.status.code(), Some(2));
        let said = stderr(&output);
        assert!(said.lines().count() == 1 && said.contains(words), "{said}");
    }
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
            "mode=spill",
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
gpupool: --set colour=red: no such setting; `gpupool run --help` lists them
gpupool: GPUPOOL_LIMIT=0:70XB: not a size in bytes or with a unit (K, M, G, T, P, E, alone or with iB or B); write for example 0:70GiB,1:40GiB
gpupool: GPUPOOL_MODE=fast: not a mode; write one of pool|spill|managed|trace|off
";
    assert_eq!(stderr(&output), expected);
    assert!(!mark.exists());
}

#[test]
fn a_pair_that_sets_nothing_or_two_things_is_refused() {
    let bench = Bench::new();
    for (flags, expected) in [
        (&["--set", "limit"][..], "--set limit: not NAME=VALUE"),
        (&["--set", "=x"], "--set =x: no name in front of =; write for example --set min-size=2MiB"),
        (&["--set", "limits=1GiB"], "--set limits=1GiB: no such setting; did you mean GPUPOOL_LIMIT?"),
        (&["--set", "limits="], "--set limits=: no such setting; did you mean GPUPOOL_LIMIT?"),
        (&["--set", "verdicts=/tmp"], "--set verdicts=/tmp: GPUPOOL_VERDICTS is set by --fail-on, and by nobody else"),
        (&["--set", "verdicts="], "--set verdicts=: GPUPOOL_VERDICTS is set by --fail-on, and by nobody else"),
        (
            &["--mode", "off", "--set", "mode=pool"],
            "--set mode=pool and --mode off: two values for GPUPOOL_MODE; write one",
        ),
        (
            &["--set", "free=lazy", "--set", "FREE=strict"],
            "--set free=lazy and --set FREE=strict: two values for GPUPOOL_FREE",
        ),
    ] {
        let output = output(bench.gpupool("run", flags).args(["echo", "ran"]));
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""), "{flags:?}");
        assert!(stderr(&output).starts_with(&format!("gpupool: {expected}")), "{}", stderr(&output));
    }
}

#[test]
fn a_level_that_is_none_is_refused() {
    let bench = Bench::new();
    for bad in ["blah", "info,gpupol::memory=debug", "gpupool::memory=loud", "[[["] {
        let output = output(bench.gpupool("run", &["--set", &format!("log={bad}")]).arg("true"));
        assert_eq!(output.status.code(), Some(2), "{bad}");
        let said = stderr(&output);
        assert!(said.contains(&format!("GPUPOOL_LOG={bad}: ")), "{said}");
        assert!(said.contains("error, warn, info, debug, trace, off"), "{said}");
    }
    for good in ["off", "TRACE", "3", "warn,gpupool::memory=debug", "gpupool"] {
        let output = output(bench.gpupool("run", &["--set", &format!("log={good}")]).arg("true"));
        assert!(output.status.success(), "{good}: {}", stderr(&output));
    }
}

#[test]
fn a_log_that_can_not_be_written_is_refused() {
    let bench = Bench::new();
    std::fs::write(bench.path("old"), "").unwrap();
    for (path, reason) in [
        (bench.path("old"), "exists already"),
        (bench.path("no/folder"), "no: No such file or directory (os error 2); choose another"),
        (bench.path("no/%p"), "cannot write into the folder"),
        (bench.path("old/x"), "old: not a directory; choose another"),
        (bench.path("%z"), "%z means nothing"),
        ("/dev/null".into(), "is there already and no file; the log is a new file: choose another name"),
    ] {
        let output = output(bench.gpupool("run", &["--log", path.to_str().unwrap()]).arg("true"));
        assert_eq!(output.status.code(), Some(2), "{}", path.display());
        assert!(stderr(&output).contains(reason), "{}", stderr(&output));
    }
    let path = bench.path("%p.%e");
    assert!(output(bench.gpupool("run", &["--log", path.to_str().unwrap()]).arg("true")).status.success());
}

/// The library passes then, and says nothing.
#[test]
fn a_summary_or_a_log_that_nobody_writes_with_mode_off_is_told() {
    let bench = Bench::new();
    let log = bench.path("log.jsonl");
    let said = |flags: &[&str]| {
        let output = output(bench.gpupool("run", flags).arg("true"));
        assert!(output.status.success(), "{}", stderr(&output));
        stderr(&output)
    };
    let off = "says nothing with GPUPOOL_MODE=off: gpupool has no part in the program, and";
    let summary = format!("gpupool: warning: GPUPOOL_SUMMARY=on: {off} there is no summary\n");
    assert_eq!(said(&["--mode", "off", "--summary"]), summary);
    let logged = said(&["--mode", "off", "--log", log.to_str().unwrap()]);
    assert_eq!(logged, format!("gpupool: warning: GPUPOOL_LOG_FILE={}: {off} no log is written\n", log.display()));
    assert_eq!(said(&["--mode", "off"]), "");
    assert_eq!(said(&["--summary"]), "");
}

/// The program would start with empty memory, and nobody would hear of it.
#[test]
fn a_folder_that_nothing_can_come_back_from_is_refused() {
    let bench = Bench::new();
    let restore = |folder: &str| output(bench.gpupool("run", &["--restore", folder]).args(["echo", "started"]));
    let none = bench.path("none");
    let refused = restore(none.to_str().unwrap());
    assert_eq!((refused.status.code(), refused.stdout.len()), (Some(2), 0));
    let said =
        format!("GPUPOOL_RESTORE={0}: nothing comes back from there: {0}: there is no such folder", none.display());
    assert!(stderr(&refused).contains(&said), "{}", stderr(&refused));
    std::fs::write(bench.path("file"), "").unwrap();
    assert_eq!(restore(bench.path("file").to_str().unwrap()).status.code(), Some(2));
    let empty = bench.path("empty");
    std::fs::create_dir(&empty).unwrap();
    std::fs::set_permissions(&empty, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let begun = restore(empty.to_str().unwrap());
    assert_eq!(String::from_utf8_lossy(&begun.stdout), "started\n", "{}", stderr(&begun));
}

/// Before anything starts: the number, or what the folder has in its place.
#[test]
fn an_image_that_is_asked_for_by_its_number_has_to_be_there() {
    let bench = Bench::new();
    let folder = bench.path("images");
    for _ in 0..2 {
        let writer = gpupool_store::Writer::create(&folder, Default::default(), Default::default()).unwrap();
        writer.finish().unwrap();
    }
    let run = |number: &str| {
        let flags = ["--restore", folder.to_str().unwrap(), "--generation", number];
        output(bench.gpupool("run", &flags).args(["sh", "-c", "echo $GPUPOOL_RESTORE_GENERATION"]))
    };
    let absent = run("7");
    assert_eq!(absent.status.code(), Some(2));
    assert!(stderr(&absent).contains("it has no image 7, and these: 2, 1"), "{}", stderr(&absent));
    assert!(stderr(&run("x")).contains("invalid value 'x' for '--generation <N>'"));
    assert_eq!(String::from_utf8_lossy(&run("1").stdout), "1\n");
    let alone = output(bench.gpupool("run", &["--generation", "1"]).arg("true"));
    assert_eq!(alone.status.code(), Some(2), "{}", stderr(&alone));
}

/// Before any process is looked for.
#[test]
fn a_setting_where_the_process_is_to_be_is_told_what_is_missing() {
    let said = output(gpupool().args(["set", "limit=0:100MiB"]));
    assert_eq!(said.status.code(), Some(2));
    assert!(stderr(&said).contains("the number of the process comes first"), "{}", stderr(&said));
    for words in ["limit=10", "guarantee=0:10"] {
        let said = output(gpupool().args(["set", "1", words]));
        assert_eq!(said.status.code(), Some(2), "{words}");
        assert!(
            stderr(&said).contains("10 bytes, as there is no unit; write 10GiB if that is meant"),
            "{}",
            stderr(&said)
        );
    }
}

#[test]
fn a_missing_library_is_named_with_the_ways_out() {
    let output = output(gpupool().args(["run", "--library", "/no/such.so", "--", "true"]));
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(stderr(&output), "gpupool: --library /no/such.so: no such file\n");
}

#[test]
fn a_library_that_is_not_the_pool_is_refused() {
    let bench = Bench::new();
    let other = bench.compile("other.so", "int other;", &["-shared", "-fPIC"]);
    let object = bench.compile("gpupool.o", "int gpupool_version, cuInit;", &["-c"]);
    std::fs::write(bench.path("cut.so"), &std::fs::read(bench.library()).unwrap()[..5000]).unwrap();
    let mut foreign = std::fs::read(bench.library()).unwrap();
    foreign[18] = 183; // e_machine: aarch64
    std::fs::write(bench.path("foreign.so"), foreign).unwrap();
    for (command, flag) in [("run", "--library"), ("sim", "--driver")] {
        for (library, reason) in [
            (Path::new("/etc/passwd"), "no library"),
            (&other, "not lib"),
            (&object, "no library: not a shared object"),
            (&bench.path("cut.so"), "no library"),
            (&bench.path("foreign.so"), "a library for Aarch64"),
        ] {
            let output = output(gpupool().args([command, flag]).arg(library).args(["--", "echo", "ran"]));
            assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""), "{}", library.display());
            let complaint = stderr(&output);
            assert!(complaint.contains(reason) && complaint.contains(flag), "{complaint}");
        }
    }
}

#[test]
fn a_program_with_a_sanitizer_of_its_own_starts() {
    let bench = Bench::new();
    for (flag, runtime) in [("-fsanitize=address", "libasan.so"), ("-fsanitize=thread", "libtsan.so")] {
        let source = bench.path("sanitized.c");
        std::fs::write(&source, "#include <stdio.h>\nint main(void) { puts(\"ran\"); return 5; }").unwrap();
        let program = bench.path(runtime);
        let compiled = Command::new("cc").args([flag, "-o"]).arg(&program).arg(&source).output().unwrap();
        if !compiled.status.success() || !stdout(&output(&mut Command::new(&program))).contains("ran") {
            println!("skipped {flag}: the compiler has no {runtime}, or it does not run on this machine");
            continue;
        }
        let direct = output(bench.gpupool("run", &[]).arg(&program));
        assert_eq!((stdout(&direct).as_str(), direct.status.code()), ("ran\n", Some(5)), "{}", stderr(&direct));
        // Through a script, and from the search path.
        let script = bench.path("script");
        crate::common::script(&script, &format!("#!{}\n", program.display()));
        let path = format!("{}:{}", bench.path("").display(), std::env::var("PATH").unwrap());
        let found = output(bench.gpupool("run", &[]).arg("script").env("PATH", path));
        assert_eq!((stdout(&found).as_str(), found.status.code()), ("ran\n", Some(5)), "{}", stderr(&found));
    }
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
fn what_cannot_be_said_is_a_failure() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    // Of doctor, 1 is an answer.
    for (arguments, code) in [
        (&["--help"][..], 1),
        (&["run", "--help"], 1),
        (&["--version"], 1),
        (&["explain"], 1),
        (&["doctor"], 2),
        (&["doctor", "--json"], 2),
    ] {
        let output = output(gpupool().args(arguments).stdout(full()));
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
        assert_eq!(stderr(&output), "gpupool: stdout: No space left on device (os error 28)\n", "{arguments:?}");
    }
    // There is nothing better to do than to keep the code.
    assert_eq!(gpupool().args(["explain", "GP999"]).stderr(full()).status().unwrap().code(), Some(2));
    assert_eq!(gpupool().arg("fly").stderr(full()).status().unwrap().code(), Some(2));
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
    let modes = text.split_once("Who serves an allocation: ").unwrap().1.split_once(" (GPUPOOL_MODE)").unwrap().0;
    assert_eq!(modes, "pool, spill, managed, trace or off");
    assert!(text.contains("and with 4 when that is not known"), "{text}");
}

/// Each process of the program would take a relative one from the folder that it is in when it starts.
#[test]
fn a_relative_log_is_taken_from_the_folder_in_which_it_was_asked_for() {
    let bench = Bench::new();
    let folder = bench.path("100%");
    std::fs::create_dir(&folder).unwrap();
    let expected = format!("{}%/log.%p\n", folder.display());
    let told = |gpupool: &mut std::process::Command| {
        stdout(&output(gpupool.args(["sh", "-c", "cd / && echo $GPUPOOL_LOG_FILE"]).current_dir(&folder)))
    };
    assert_eq!(told(&mut bench.gpupool("run", &["--log", "log.%p"])), expected);
    assert_eq!(told(&mut bench.gpupool("run", &["--set", "log-file=log.%p"])), expected);
    assert_eq!(told(bench.gpupool("run", &[]).env("GPUPOOL_LOG_FILE", "log.%p")), expected);
    assert_eq!(told(&mut bench.gpupool("run", &["--log", "/tmp/%p"])), "/tmp/%p\n");
    assert_eq!(told(&mut bench.gpupool("run", &[])), "\n");
}
