//! `gpupool run --fail-on`: what the program's end becomes, by what its processes found and by what nobody knows.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gpupool_events::{Began, Event, FindingMade, Reader, VerdictLine};

use crate::common::{Bench, golden_folder, gpupool, made, output, stderr, stdout};

/// The findings of a log of `tests/golden`.
fn findings(log: &str) -> Vec<FindingMade> {
    let log = made(std::fs::File::open(golden_folder().join(log)));
    let records = Reader::new(std::io::BufReader::new(log));
    let findings = records.filter_map(|record| match made(record).event {
        Event::FindingMade(finding) => Some(finding),
        _ => None,
    });
    findings.collect()
}

fn began(pid: u32) -> VerdictLine {
    VerdictLine::Began(Began::new(pid, 1000 + u64::from(pid), 1.5, "/bin/x".to_owned()))
}

/// What a process writes that came to its end with these findings.
fn whole(pid: u32, findings: Vec<FindingMade>) -> Vec<VerdictLine> {
    let ended = VerdictLine::Ended { findings: findings.len() as u64 };
    std::iter::once(began(pid)).chain(findings.into_iter().map(VerdictLine::Finding)).chain([ended]).collect()
}

/// A program that puts `files` into the folder of verdicts and runs `script`.
fn program(bench: &Bench, flags: &[&str], files: &[(&str, Vec<VerdictLine>)], script: &str) -> Command {
    let prepared = bench.path("verdicts");
    let _ = std::fs::remove_dir_all(&prepared);
    made(std::fs::create_dir(&prepared));
    for (name, lines) in files {
        let text: String = lines.iter().map(|line| made(line.to_json())).collect();
        made(std::fs::write(prepared.join(name), text));
    }
    let mut command = bench.gpupool("run", flags);
    let script =
        format!("for file in \"$0\"/*; do [ ! -e \"$file\" ] || cp \"$file\" \"$GPUPOOL_VERDICTS\"; done; {script}");
    command.args(["sh", "-c", &script]).arg(prepared);
    made(std::fs::create_dir_all(bench.path("tmp")));
    command.env("TMPDIR", bench.path("tmp"));
    command
}

/// What is left in the temporary folder.
fn left(bench: &Bench) -> Vec<PathBuf> {
    made(std::fs::read_dir(bench.path("tmp"))).map(|entry| made(entry).path()).collect()
}

fn code_and_words(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), stderr(output))
}

#[test]
fn a_finding_fails_a_program_that_succeeds() {
    let bench = Bench::new();
    let files = [("7-1", whole(7, findings("train.jsonl")))];
    let script = "to=$(echo \"$GPUPOOL_LOG_FILE\" | sed s/%p/$$/); echo > \"$to\"; echo \"$to\"";
    let output = output(&mut program(&bench, &["--fail-on", "GP001"], &files, script));
    let log = stdout(&output).trim().to_owned();
    let expected = format!(
        "gpupool: GP001: A context that nobody uses: a context on GPU 0 was made by cudaDeviceSynchronize \
         and nothing ran in it, ≈519.0 MiB; this process works on GPU 3\ngpupool:   /home/ada/work/train.py:88 in report_speed\ngpupool: gpupool report {log}\n"
    );
    assert_eq!(code_and_words(&output), (Some(3), expected));
    // The log is kept for the command that was just named, and nothing else is.
    assert_eq!(left(&bench), [Path::new(&log).parent().unwrap().to_owned()]);
    assert_eq!(std::fs::read_dir(&left(&bench)[0]).unwrap().count(), 1);
}

#[test]
fn other_findings_do_not_and_leave_nothing_behind() {
    let bench = Bench::new();
    let files = [("7-1", whole(7, findings("train.jsonl")))];
    let output = output(&mut program(&bench, &["--fail-on", "GP006"], &files, "true"));
    assert_eq!(code_and_words(&output), (Some(0), String::new()));
    assert_eq!(left(&bench), Vec::<PathBuf>::new());
}

#[test]
fn a_program_that_fails_keeps_its_own_end() {
    let bench = Bench::new();
    let files = [("7-1", whole(7, findings("train.jsonl"))), ("8-1", vec![began(8)])];
    let failed = output(&mut program(&bench, &["--fail-on", "any"], &files, "exit 7"));
    assert_eq!(failed.status.code(), Some(7));
    assert!(stderr(&failed).contains("GP001") && stderr(&failed).contains("GP010"), "{}", stderr(&failed));
    let died = output(&mut program(&bench, &["--fail-on", "any"], &files, "kill -SEGV $$"));
    assert_eq!(died.status.signal(), Some(libc::SIGSEGV));
    assert_eq!(left(&bench), Vec::<PathBuf>::new());
    let missing = output(bench.gpupool("run", &["--fail-on", "any"]).arg("/no/such/program"));
    assert_eq!(missing.status.code(), Some(127));
}

#[test]
fn what_is_not_known_fails_a_program_that_succeeds() {
    let bench = Bench::new();
    let all = findings("train.jsonl");
    let lost = vec![began(7), VerdictLine::Finding(all[0].clone()), VerdictLine::Ended { findings: 2 }];
    for (lines, reason) in [
        (
            vec![began(7)],
            "/bin/x (pid 7) did not come to its end: it was killed, left by _exit, became another program (exec) that used no CUDA, \
             or is still running",
        ),
        (vec![], "pid 7 could not write into "),
        (lost, "/bin/x (pid 7) could not write all of it: 2 findings were made and 1 are here"),
    ] {
        let files = [("7-1", lines), ("8-1", whole(8, Vec::new()))];
        let output = output(&mut program(&bench, &["--fail-on", "GP006"], &files, "true"));
        assert_eq!(output.status.code(), Some(4), "{}", stderr(&output));
        let expected = format!("gpupool: --fail-on: not everything that was found is known: {reason}");
        assert!(stderr(&output).starts_with(&expected), "{}", stderr(&output));
    }
    let replaced = [("7-1", vec![began(7)]), ("7-2", whole(7, Vec::new()))];
    let replaced = output(&mut program(&bench, &["--fail-on", "any"], &replaced, "true"));
    assert_eq!(replaced.status.code(), Some(4));
    assert!(stderr(&replaced).contains("became another program (exec)"), "{}", stderr(&replaced));
    // A finding that is known counts for more.
    let both = [("7-1", vec![began(7), VerdictLine::Finding(all[0].clone())])];
    let both = output(&mut program(&bench, &["--fail-on", "any"], &both, "true"));
    assert_eq!(both.status.code(), Some(3), "{}", stderr(&both));
    assert!(stderr(&both).contains("GP010") && stderr(&both).contains("not everything"), "{}", stderr(&both));
    // The folder itself is gone.
    let gone = output(&mut program(&bench, &["--fail-on", "any"], &[], "rm -r \"$GPUPOOL_VERDICTS\""));
    assert_eq!(gone.status.code(), Some(4), "{}", stderr(&gone));
}

#[test]
fn logs_that_were_asked_for_are_left_as_they_were_asked_for() {
    let bench = Bench::new();
    let script = "echo $GPUPOOL_LOG_FILE $GPUPOOL_LOG";
    for (flags, words) in [
        (&["--fail-on", "any", "--log", "/tmp/%p.x"][..], "/tmp/%p.x\n"),
        (&["--fail-on", "any", "--set", "log=error"], "error\n"),
        (&["--fail-on", "any", "--set", "log=gpupool::context=debug"], "gpupool::context=debug\n"),
    ] {
        let files = [("7-1", whole(7, Vec::new()))];
        let output = output(&mut program(&bench, flags, &files, script));
        assert_eq!(code_and_words(&output), (Some(0), String::new()), "{flags:?}");
        assert_eq!(stdout(&output), words);
    }
}

/// A library that says nothing, as one does that is not loaded.
#[test]
fn where_nobody_reports_nothing_is_known() {
    let bench = Bench::new();
    let source = format!("int gpupool_version; char GPUPOOL_BUILD[] = \"{}\";", gpupool_config::VERSION);
    let silent = bench.compile("silent.so", &source, &["-shared", "-fPIC"]);
    let output = output(gpupool().args(["run", "--fail-on", "any", "--library"]).arg(silent).args(["--", "true"]));
    assert_eq!(output.status.code(), Some(4));
    let said = stderr(&output);
    assert!(
        said.starts_with("gpupool: --fail-on: not everything that was found is known: no process loaded"),
        "{said}"
    );
    assert!(said.contains("LD_PRELOAD"), "{said}");
}

#[test]
fn one_inside_another_tells_the_outer_one_too() {
    let bench = Bench::new();
    let mut inner = program(&bench, &["--fail-on", "GP006"], &[("7-1", whole(7, findings("train.jsonl")))], "true");
    let mut outer = bench.gpupool("run", &["--fail-on", "GP001"]);
    outer.arg(inner.get_program()).args(inner.get_args()).env("TMPDIR", bench.path("tmp"));
    assert_eq!(output(&mut inner).status.code(), Some(0));
    let output = output(&mut outer);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
}

#[test]
fn what_could_never_find_anything_is_refused() {
    let bench = Bench::new();
    let static_program = bench.compile("static", "int main(void) { return 0; }", &["-static"]);
    let static_program = static_program.to_str().unwrap();
    for (flags, program, reason) in [
        (&["--fail-on", "GP1"][..], "true", "--fail-on GP1: no such finding; the nearest is GP001"),
        (&["--fail-on", "GP001,"], "true", "--fail-on: an empty code; write codes with a comma between them"),
        (&["--fail-on", ""], "true", "--fail-on: an empty code; write codes with a comma between them"),
        (
            &["--fail-on", "GP001 GP005"],
            "true",
            "--fail-on \"GP001 GP005\": a space in a code; write codes with a comma",
        ),
        (&["--fail-on", "any,GP99"], "true", "--fail-on GP99: no such finding; the nearest is GP023"),
        (&["--fail-on", "any", "--mode", "off"], "true", "nothing is looked at"),
        (&["--fail-on", "any"], static_program, "is statically linked, so that nothing in it can be looked at"),
    ] {
        let output = output(bench.gpupool("run", flags).arg(program));
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        assert!(stderr(&output).contains(reason), "{}", stderr(&output));
    }
    assert!(output(bench.gpupool("run", &[]).arg(static_program)).status.success());
}

/// 1 is an answer of programs; what is gpupool's own is 2.
#[test]
fn without_a_folder_for_it_nothing_is_started() {
    let bench = Bench::new();
    let folder = bench.path("not there");
    let output = output(bench.gpupool("run", &["--fail-on", "any"]).args(["echo", "x"]).env("TMPDIR", &folder));
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""), "{}", stderr(&output));
    assert!(stderr(&output).contains(&format!("{}: ", folder.display())), "{}", stderr(&output));
}

#[test]
fn nothing_that_was_found_moves_the_cursor() {
    let bench = Bench::new();
    let (code, what) = ("GP\u{1b}[2J".to_owned(), "\u{7}\u{202e}\nx".to_owned());
    let hostile = FindingMade { code, device: None, what, site: None, facts: BTreeMap::new() };
    let output = output(&mut program(&bench, &["--fail-on", "any"], &[("7-1", whole(7, vec![hostile]))], "true"));
    assert_eq!(output.status.code(), Some(3));
    assert!(!stderr(&output).contains(['\x1b', '\x07', '\u{202e}']), "{:?}", stderr(&output));
    assert_eq!(stderr(&output).lines().count(), 1, "{}", stderr(&output));
}

/// Makes a context on GPU 0 that nobody uses, and works on GPU 1. `children`: in two processes; `exec`: and again as another
/// program; `cut`: empties its log; `full`: has no room for its
/// end; `killed`: and is killed. `ranks A B`: nothing but two ranks of a job, at work on GPUs A and B; `alone A`: one of them.
/// `worker HOW`: a forked child does nothing with CUDA (`idle`), counts the GPUs (`count`) or uses them (`use`), and leaves by
/// `_exit`; `parent`: as `idle`, of a parent that has used CUDA. `left`: leaves by `_exit` without CUDA, and so
/// does a child of `vfork` before; `deleted`: deletes its verdict. `starts HOW`: works, and starts `true` without an
/// environment; `fails`: and something that is not there. `outlives`: a child does
/// the same as without words once its parent is gone; `stays FILE`: one does nothing for ever, and its number is in the file.
/// `drops HOW`: is another user's before it uses CUDA, or has another root folder (`root`), or no descriptor (`closed`), or becomes
/// the other user's later (`after`), or only a forked child does (`child`); `clean`: and nothing is to be found in it; `becomes`,
/// `spawns`: and it becomes or starts another program.
const STRAY: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
static void *driver;
static void call(const char *name, long a, long b, long c) {
    int (*function)(long, long, long) = dlsym(driver, name);
    int result = function(a, b, c);
    if (result) { fprintf(stderr, "%s: %d\n", name, result); exit(9); }
}
static void work(int gpu) {
    void *context, *memory;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    call("cuInit", 0, 0, 0);
    call("cuDevicePrimaryCtxRetain", (long)&context, gpu, 0);
    call("cuCtxSetCurrent", (long)context, 0, 0);
    call("cuMemAlloc_v2", (long)&memory, 4 << 20, 0);
    call("cuMemsetD8_v2", (long)memory, 1, 4 << 20);
}
static int ranks(char **gpus) {
    int status, sum = 0;
    for (int i = 0; i < 2; i++) if (!fork()) {
        setenv("LOCAL_RANK", i ? "1" : "0", 1);
        setenv("LOCAL_WORLD_SIZE", "2", 1);
        work(atoi(gpus[i]));
        exit(0);
    }
    while (wait(&status) > 0) sum |= status;
    return sum != 0;
}
static int worker(const char *how) {
    int status, count;
    if (!strcmp(how, "parent")) work(0);
    if (!fork()) {
        if (!strcmp(how, "use")) work(0);
        if (!strcmp(how, "count")) {
            driver = dlopen("libcuda.so.1", RTLD_NOW);
            call("cuInit", 0, 0, 0);
            call("cuDeviceGetCount", (long)&count, 0, 0);
        }
        _exit(0);
    }
    wait(&status);
    return status;
}
static int stray(void) {
    void *contexts[2], *memory;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    call("cuInit", 0, 0, 0);
    call("cuDevicePrimaryCtxRetain", (long)&contexts[0], 0, 0);
    call("cuDevicePrimaryCtxRetain", (long)&contexts[1], 1, 0);
    call("cuCtxSetCurrent", (long)contexts[1], 0, 0);
    call("cuMemAlloc_v2", (long)&memory, 4 << 20, 0);
    call("cuMemsetD8_v2", (long)memory, 1, 4 << 20);
    return 0;
}
static int starts(const char *how) {
    char *words[] = {"true", 0}, *empty[] = {0};
    int status = 1, child;
    work(0);
    if (!strcmp(how, "spawn")) posix_spawn(&child, "/bin/true", 0, 0, words, empty);
    else if (!strcmp(how, "spawnp")) posix_spawnp(&child, "true", 0, 0, words, empty);
    else if (!strcmp(how, "vfork")) { if (!vfork()) { execve("/bin/true", words, empty); _exit(1); } }
    else if (!fork()) {
        if (!strcmp(how, "execle")) execle("/bin/true", "true", (char *)0, empty);
        if (!strcmp(how, "execlp")) { clearenv(); execlp("true", "true", (char *)0); }
        if (!strcmp(how, "execl")) { clearenv(); execl("/bin/true", "a", "b", "c", "d", "e", "f", "g", (char *)0); }
        if (!strcmp(how, "execv")) { clearenv(); execv("/bin/true", words); }
        if (!strcmp(how, "execvp")) { clearenv(); execvp("true", words); }
        if (!strcmp(how, "execvpe")) execvpe("true", words, empty);
        if (!strcmp(how, "fexecve")) fexecve(open("/bin/true", O_RDONLY), words, empty);
        if (!strcmp(how, "execveat")) execveat(AT_FDCWD, "/bin/true", words, empty, 0);
        if (!strcmp(how, "execle9")) execle("/bin/true", "a", "b", "c", "d", "e", "f", "g", "h", (char *)0, empty);
        if (!strcmp(how, "execle4")) execle("/bin/true", "a", "b", "c", "d", (char *)0, empty);
        if (!strcmp(how, "system")) { clearenv(); system("true"); _exit(0); }
        if (!strcmp(how, "popen")) { clearenv(); pclose(popen("true", "r")); _exit(0); }
        if (!strcmp(how, "fails")) { execle("/no/such", "such", (char *)0, empty); _exit(0); }
        _exit(1);
    }
    wait(&status);
    return status != 0;
}
static int outlives(const char *file) {
    int ends[2], number;
    char end;
    pipe(ends);
    if (fork()) return 0;
    setsid();
    close(ends[1]);
    if (!file) { read(ends[0], &end, 1); exit(stray()); }
    FILE *told = fopen(file, "w");
    fprintf(told, "%d", getpid());
    fclose(told);
    for (number = 0; number < 3; number++) close(number);
    for (;;) pause();
}
static int drops(const char *how) {
    char *words[] = {"true", 0};
    int status = 1, child;
    /* A machine of its own: it has no way to the other one's file. */
    unsetenv("SIMCUDA_MACHINE");
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!strcmp(how, "after")) stray();
    if (!strcmp(how, "child")) {
        work(0);
        if (fork()) return wait(&status) < 0 || status;
    }
    if (!strcmp(how, "closed")) for (int number = 3; number < 1024; number++) close(number);
    if (!strcmp(how, "root") ? mkdir("empty", 0700) || chroot("empty") : setresuid(65534, 65534, 65534)) return 77;
    if (!strcmp(how, "child")) {
        void *memory;
        ((int (*)(void **, size_t))dlsym(driver, "cuMemAlloc_v2"))(&memory, 4096);
        exit(0);
    }
    if (!strcmp(how, "becomes")) execv("/bin/true", words);
    if (!strcmp(how, "spawns")) return posix_spawn(&child, "/bin/true", 0, 0, words, environ) || wait(&status) < 0;
    if (!strcmp(how, "clean")) work(0);
    else if (strcmp(how, "after")) stray();
    return 0;
}
int main(int count, char **words) {
    const char *how = count > 1 ? words[1] : "";
    if (!strcmp(how, "children")) {
        int status, sum = 0;
        for (int i = 0; i < 2; i++) if (!fork()) exit(stray());
        while (wait(&status) > 0) sum |= status;
        return sum != 0;
    }
    if (!strcmp(how, "ranks")) return ranks(words + 2);
    if (!strcmp(how, "alone")) { work(atoi(words[2])); return 0; }
    if (!strcmp(how, "worker")) return worker(words[2]);
    if (!strcmp(how, "starts")) return starts(words[2]);
    if (!strcmp(how, "drops")) return drops(words[2]);
    if (!strcmp(how, "outlives")) return outlives(0);
    if (!strcmp(how, "stays")) return outlives(words[2]);
    if (!strcmp(how, "left")) {
        if (!vfork()) _exit(0);
        _exit(0);
    }
    if (!strcmp(how, "deleted")) { work(0); return system("rm \"$GPUPOOL_VERDICTS\"/*-*"); }
    if (!strcmp(how, "becomes")) { work(0); execl("/bin/true", "true", (char *)0); }
    if (!strcmp(how, "exec")) { stray(); execl(words[0], words[0], (char *)0); }
    if (!strcmp(how, "killed") && !fork()) { stray(); raise(SIGKILL); }
    if (!strcmp(how, "killed")) { wait(0); return 0; }
    stray();
    if (!strcmp(how, "cut")) return truncate(words[2], 0);
    if (!strcmp(how, "full")) return setrlimit(RLIMIT_FSIZE, &(struct rlimit){0, 0});
    return 0;
}
"#;

/// That program under `--fail-on`, with the real libraries, which a build puts beside the executable, as for the demo.
struct Real {
    bench: Bench,
    program: PathBuf,
}

impl Real {
    fn new() -> Real {
        let bench = Bench::new();
        let program = bench.compile("stray", STRAY, &["-ldl", "-w", "-Wl,--no-as-needed"]);
        Real { bench, program }
    }

    fn command(&self, codes: &str, flags: &[&str]) -> Command {
        let mut command = gpupool();
        command.args(["sim", "--gpus", "2x2GiB", "--", env!("CARGO_BIN_EXE_gpupool"), "run", "--fail-on", codes]);
        command.args(flags).arg("--").current_dir(self.bench.path("")).env("TMPDIR", self.bench.path(""));
        command
    }

    fn run(&self, codes: &str, flags: &[&str], words: &[&str]) -> Output {
        output(self.command(codes, flags).arg(&self.program).args(words))
    }
}

#[track_caller]
fn ends_with(code: i32, output: &Output) {
    assert_eq!(output.status.code(), Some(code), "{}", stderr(output));
}

#[test]
fn ranks_on_one_gpu_are_found_whatever_is_logged() {
    let real = Real::new();
    for flags in [&[][..], &["--set", "log=off"], &["--log", "fixed.jsonl"], &["--set", "log=off", "--log", "one.%p"]] {
        let both = real.run("GP002", flags, &["ranks", "0", "0"]);
        ends_with(3, &both);
        assert!(stderr(&both).contains("local ranks 0-1"), "{}", stderr(&both));
        let _ = std::fs::remove_file(real.bench.path("fixed.jsonl"));
        ends_with(0, &real.run("GP002", flags, &["ranks", "0", "1"]));
        let _ = std::fs::remove_file(real.bench.path("fixed.jsonl"));
    }
}

/// Where each rank has a `gpupool run` of its own, what the others do cannot be known.
#[test]
fn a_rank_that_is_seen_alone_on_the_gpu_of_another_is_not_judged() {
    let real = Real::new();
    for (rank, gpu, code) in [("0", "0", 0), ("1", "1", 0), ("1", "0", 4)] {
        let mut command = real.command("GP002", &["--set", "log=off"]);
        command.arg(&real.program).args(["alone", gpu]);
        let output = output(command.env("OMPI_COMM_WORLD_LOCAL_RANK", rank).env("OMPI_COMM_WORLD_LOCAL_SIZE", "2"));
        ends_with(code, &output);
        assert_eq!(stderr(&output).contains("in front of the launcher"), code == 4, "{}", stderr(&output));
    }
}

#[test]
fn a_program_that_the_library_was_kept_out_of_is_not_known() {
    let real = Real::new();
    for words in
        [&["env", "-i", "true"][..], &["env", "-u", "LD_PRELOAD", "true"], &["sh", "-c", "env -i true; exit 0"]]
    {
        let output = output(real.command("any", &[]).args(words));
        ends_with(4, &output);
        assert!(stderr(&output).contains("LD_PRELOAD"), "{}", stderr(&output));
    }
    let deleted = real.run("any", &[], &["deleted"]);
    ends_with(4, &deleted);
    assert!(stderr(&deleted).contains("was deleted"), "{}", stderr(&deleted));
    let all = output(real.command("any", &[]).args(["sh", "-c", "rm \"$GPUPOOL_VERDICTS\"/*"]));
    ends_with(4, &all);
}

/// What one process does says nothing about another that the library was kept out of.
#[test]
fn a_program_without_the_library_is_not_known_whoever_is_beside_it() {
    let real = Real::new();
    for script in [
        "\"$0\" alone 0; LD_PRELOAD= \"$0\"; true",
        "\"$0\" alone 0; env -i LD_LIBRARY_PATH=\"$LD_LIBRARY_PATH\" \"$0\"; true",
        "\"$0\" alone 0; GPUPOOL_VERDICTS=/nope \"$0\"; true",
        "LD_PRELOAD= \"$0\"; true",
        "unset GPUPOOL_VERDICTS; \"$0\"",
    ] {
        let output = output(real.command("any", &[]).args(["sh", "-c", script]).arg(&real.program));
        assert_eq!(output.status.code(), Some(4), "{script}: {}", stderr(&output));
        assert!(stderr(&output).contains("LD_PRELOAD and GPUPOOL_VERDICTS"), "{script}: {}", stderr(&output));
    }
}

#[test]
fn however_a_program_without_the_library_is_started_it_is_not_known() {
    let real = Real::new();
    let exec = ["execle", "execle4", "execle9", "execlp", "execl", "execv", "execvp", "execvpe", "fexecve", "execveat"];
    for how in exec.into_iter().chain(["vfork", "spawn", "spawnp", "system", "popen"]) {
        let output = real.run("any", &[], &["starts", how]);
        assert_eq!(output.status.code(), Some(4), "{how}: {}", stderr(&output));
        assert!(stderr(&output).contains("without libgpupool.so"), "{how}: {}", stderr(&output));
    }
}

#[test]
fn a_program_without_cuda_that_took_the_place_of_one_with_it_is_named_as_a_cause() {
    let real = Real::new();
    let output = real.run("any", &[], &["becomes"]);
    ends_with(4, &output);
    assert!(stderr(&output).contains("became another program (exec)"), "{}", stderr(&output));
}

/// Neither does the one beside it that used CUDA make a difference.
#[test]
fn what_cannot_have_used_cuda_leaves_nothing_unknown() {
    let real = Real::new();
    let static_program = real.bench.compile("static", "int main(void) { return 0; }", &["-static"]);
    for script in [
        "yes | head -1",
        "/no/such; true",
        "env -i \"$1\"",
        "env -i /sbin/ldconfig -p",
        "sh -c 'kill -KILL $$'",
        "sleep 1000 & kill -KILL $!; wait",
    ] {
        for before in ["", "\"$0\" alone 0; "] {
            let script = format!("{before}{script}; true");
            let output =
                output(real.command("any", &[]).args(["sh", "-c", &script]).arg(&real.program).arg(&static_program));
            assert_eq!(output.status.code(), Some(0), "{script}: {}", stderr(&output));
        }
    }
    ends_with(0, &real.run("any", &[], &["starts", "fails"]));
}

#[test]
fn who_outlives_the_command_is_waited_for_and_then_not_known() {
    let real = Real::new();
    ends_with(3, &real.run("any", &[], &["outlives"]));
    let file = real.bench.path("pid");
    let output = real.run("any", &[], &["stays", file.to_str().unwrap()]);
    let pid: libc::pid_t = std::fs::read_to_string(&file).unwrap().parse().unwrap();
    // SAFETY: plain integers: the process that just wrote its number there and does nothing.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    ends_with(4, &output);
    assert!(stderr(&output).contains(&format!("pid {pid}")), "{}", stderr(&output));
}

#[test]
fn a_program_without_cuda_has_no_finding_however_it_leaves() {
    let real = Real::new();
    for words in [&["true"][..], &["sh", "-c", "true; exec sh -c 'true; true'"], &["sh", "-c", "(exit 3); env true"]] {
        let output = output(real.command("any", &[]).args(words));
        ends_with(0, &output);
        assert!(stderr(&output).contains("no process used CUDA"), "{}", stderr(&output));
    }
    ends_with(0, &real.run("any", &[], &["left"]));
}

#[test]
fn a_forked_worker_that_uses_no_gpu_leaves_nothing_unknown() {
    let real = Real::new();
    for how in ["idle", "parent", "count"] {
        ends_with(0, &real.run("any", &[], &["worker", how]));
    }
    ends_with(4, &real.run("any", &[], &["worker", "use"]));
}

#[test]
fn what_a_process_finds_that_has_no_way_to_its_file_any_more_counts() {
    let real = Real::new();
    for (how, code, words) in [
        ("before", 3, "GP001"),
        ("after", 3, "GP001"),
        ("closed", 3, "GP001"),
        ("root", 3, "GP001"),
        ("child", 3, "GP006"),
        ("clean", 0, ""),
        ("becomes", 4, "/bin/true (pid"),
        ("spawns", 4, "/bin/true (pid"),
    ] {
        let output = real.run("any", &[], &["drops", how]);
        if output.status.code() == Some(77) {
            println!("only root can become another user: not checked");
            return;
        }
        assert_eq!(output.status.code(), Some(code), "{how}: {}", stderr(&output));
        assert!(stderr(&output).contains(words), "{how}: {}", stderr(&output));
    }
}

#[test]
fn whatever_is_logged_a_finding_that_was_made_counts() {
    let real = Real::new();
    let run = |flags: &[&str], words: &[&str]| real.run("GP001", flags, words);
    let fixed = ["--log", "fixed.jsonl"];
    for log in ["error", "off", "0", "1", "gpupool::context=debug", "error,gpupool::memory=info"] {
        let log = format!("log={log}");
        for flags in [&["--set", &log][..], &["--set", &log, "--log", "log.%p"]] {
            let output = run(flags, &[]);
            assert_eq!(output.status.code(), Some(3), "{flags:?}: {}", stderr(&output));
        }
    }
    for (flags, words, code) in [
        (&[][..], &["children"][..], 3),
        (&fixed, &["children"], 3),
        (&["--log", "cut"], &["cut", "cut"], 3),
        // Each program of a process is judged at its end; the one that was replaced had none.
        (&[], &["exec"], 3),
        (&["--mode", "trace"], &[], 3),
        (&[], &["killed"], 4),
        (&[], &["full"], 3),
    ] {
        let output = run(flags, words);
        assert_eq!(output.status.code(), Some(code), "{flags:?} {words:?}: {}", stderr(&output));
    }
}
