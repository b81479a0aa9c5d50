//! What users install: the wheel that `scripts/package.sh` makes of the built libraries, in every way that Python packages are
//! installed.

use harness::{Output, Run, artifact_folder, repository};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Runs to a good end; what it printed.
#[track_caller]
fn made(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{stdout}{stderr}", output.status);
    stdout.into_owned()
}

struct Built {
    folder: tempfile::TempDir,
    wheel: PathBuf,
}

/// Makes a wheel into a folder.
fn package(folder: &Path, variables: &[(&str, &str)]) -> PathBuf {
    let mut script = Command::new(repository().join("scripts/package.sh"));
    script.arg("--no-build").arg(artifact_folder()).env("GPUPOOL_PACKAGE_OUTPUT", folder);
    let said = made(script.envs(variables.iter().copied()));
    PathBuf::from(said.lines().next().unwrap_or_default())
}

/// The wheel of the libraries that the other tests use.
fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("no temporary folder: {error}"));
        let wheel = package(folder.path(), &[]);
        Built { folder, wheel }
    })
}

/// A Python with pip.
fn pip() -> Command {
    let mut pip = Command::new(repository().join(".venv/bin/python3"));
    pip.args(["-m", "pip", "--disable-pip-version-check", "--no-cache-dir", "--quiet"]);
    pip
}

/// An empty environment.
fn environment(folder: &Path) -> PathBuf {
    made(Command::new("python3").args(["-m", "venv", "--without-pip"]).arg(folder));
    folder.join("bin/python3")
}

/// All files and folders under one, with sizes.
fn tree(folder: &Path) -> BTreeMap<PathBuf, u64> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, data) = (entry.path(), entry.metadata());
        if data.as_ref().is_ok_and(|data| data.is_dir()) {
            all.extend(tree(&path));
        }
        all.insert(path, data.map_or(0, |data| data.len()));
    }
    all
}

/// A Python program of the environment, on two simulated GPUs.
fn client(python: &Path, name: &str) -> Run {
    let program = repository().join("tests/clients").join(name);
    Run::command(python).env("PYTHONDONTWRITEBYTECODE", "1").arg(program).sim("2x256MiB")
}

/// What bash makes of `gpupool rep` with the completions that are installed there.
#[track_caller]
fn completed(root: &Path) -> String {
    let words =
        "source \"$1\"; COMP_WORDS=(gpupool rep); COMP_CWORD=1; _gpupool gpupool rep gpupool; echo ${COMPREPLY[@]}";
    let bash = root.join("share/bash-completion/completions/gpupool");
    made(Command::new("bash").args(["-c", words, "bash"]).arg(bash))
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

#[test]
fn the_wheel_has_these_files_and_a_second_one_the_same_bytes() {
    let Built { folder, wheel } = built();
    let list = "import sys, zipfile; print(*sorted(zipfile.ZipFile(sys.argv[1]).namelist()), sep='\\n')";
    let names = made(Command::new("python3").args(["-c", list]).arg(wheel));
    let expected = [
        "VERSION.data/data/share/bash-completion/completions/gpupool",
        "VERSION.data/data/share/fish/vendor_completions.d/gpupool.fish",
        "VERSION.data/data/share/man/man1/gpupool-checkpoint.1",
        "VERSION.data/data/share/man/man1/gpupool-completions.1",
        "VERSION.data/data/share/man/man1/gpupool-demo.1",
        "VERSION.data/data/share/man/man1/gpupool-diff.1",
        "VERSION.data/data/share/man/man1/gpupool-doctor.1",
        "VERSION.data/data/share/man/man1/gpupool-drain.1",
        "VERSION.data/data/share/man/man1/gpupool-explain.1",
        "VERSION.data/data/share/man/man1/gpupool-export.1",
        "VERSION.data/data/share/man/man1/gpupool-kernel.1",
        "VERSION.data/data/share/man/man1/gpupool-manual.1",
        "VERSION.data/data/share/man/man1/gpupool-plan.1",
        "VERSION.data/data/share/man/man1/gpupool-priority.1",
        "VERSION.data/data/share/man/man1/gpupool-ps.1",
        "VERSION.data/data/share/man/man1/gpupool-report.1",
        "VERSION.data/data/share/man/man1/gpupool-resume.1",
        "VERSION.data/data/share/man/man1/gpupool-run.1",
        "VERSION.data/data/share/man/man1/gpupool-set.1",
        "VERSION.data/data/share/man/man1/gpupool-sim.1",
        "VERSION.data/data/share/man/man1/gpupool-store.1",
        "VERSION.data/data/share/man/man1/gpupool-suspend.1",
        "VERSION.data/data/share/man/man1/gpupool-top.1",
        "VERSION.data/data/share/man/man1/gpupool-undrain.1",
        "VERSION.data/data/share/man/man1/gpupool.1",
        "VERSION.data/data/share/zsh/site-functions/_gpupool",
        "VERSION.data/scripts/gpupool",
        "VERSION.dist-info/METADATA",
        "VERSION.dist-info/RECORD",
        "VERSION.dist-info/WHEEL",
        "VERSION.dist-info/licenses/LICENSE",
        "VERSION.dist-info/licenses/THIRD-PARTY.txt",
        "VERSION.dist-info/sboms/gpupool.cdx.json",
        "/__init__.py",
        "/__main__.py",
        "/_command.py",
        "/_frameworks.py",
        "/_interface.py",
        "/_logs.py",
        "/_notebook.py",
        "/_preload.py",
        "/_version.py",
        "/examples/placing.c",
        "/examples/with_cupy.py",
        "/examples/with_pytorch.py",
        "/examples/with_rmm.py",
        "/include/gpupool.h",
        "/lib/libgpupool.so",
        "/lib/libsimcuda.so",
        "/lib/libsimnvml.so",
        "/lib/two_arrays",
        "/py.typed",
    ];
    let expected = expected.map(|name| format!("gpupool{}", name.replace("VERSION", &format!("-{VERSION}"))));
    assert_eq!(names.lines().collect::<Vec<_>>(), expected);
    let again = tempfile::tempdir().unwrap();
    let other = package(again.path(), &[("TZ", "Asia/Tokyo"), ("LC_ALL", "tr_TR.UTF-8")]);
    assert_eq!(other.file_name(), wheel.file_name());
    let sums = |folder: &Path| fs::read_to_string(folder.join("SHA256SUMS")).unwrap();
    assert_eq!(sums(again.path()), sums(folder.path()), "two packages of the same files differ");
    made(Command::new("sha256sum").args(["--check", "--quiet", "SHA256SUMS"]).current_dir(folder.path()));
}

/// Before anything is fetched or built: the same sources are other bytes from another one.
#[test]
fn what_is_for_every_linux_is_built_by_one_compiler_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (compiler, out) = (folder.path().join("rustc"), folder.path().join("package"));
    harness::script(&compiler, "#!/bin/sh\necho 'rustc 1.80.0 (051478957 2024-07-21)'\n");
    let mut script = Command::new(repository().join("scripts/package.sh"));
    let said = script.env("RUSTC", &compiler).env("GPUPOOL_PACKAGE_OUTPUT", &out).output().unwrap();
    assert_eq!(said.status.code(), Some(1), "{said:?}");
    assert_eq!(
        String::from_utf8_lossy(&said.stderr),
        "package.sh: packages are built by rustc 1.95.0, and here is rustc 1.80.0 (051478957 2024-07-21); rustup toolchain install 1.95.0, \
         and start again with RUSTUP_TOOLCHAIN=1.95.0 (scripts/package.sh --no-build takes what any other has built)\n"
    );
    assert!(!out.join("tools").exists() && !out.join("sysroot").exists(), "{:?}", tree(&out));
}

/// Every crate that is linked into what is shipped has a licence, by its name and by its text.
#[test]
fn every_crate_has_a_licence() {
    let notices = built().folder.path().join("notices");
    let list: serde_json::Value = serde_json::from_slice(&fs::read(notices.join("gpupool.cdx.json")).unwrap()).unwrap();
    let texts = fs::read_to_string(notices.join("THIRD-PARTY.txt")).unwrap();
    let components = list["components"].as_array().unwrap();
    assert!(components.len() > 30, "{list}");
    for component in components {
        assert!(component["licenses"][0]["expression"].is_string(), "{component}");
        if component["purl"].is_string() {
            let name = format!("{} {}", component["name"].as_str().unwrap(), component["version"].as_str().unwrap());
            // Once in the overview, and in front of a text.
            assert!(texts.matches(&name).count() >= 2, "{name}");
        }
    }
    for known in ["parking_lot", "clap", "backtrace", "uPlot"] {
        assert!(components.iter().any(|component| component["name"] == known), "{known}");
    }
    for tests_only in ["proptest", "cbindgen", "criterion", "syn"] {
        assert!(!components.iter().any(|component| component["name"] == tests_only), "{tests_only}");
    }
}

/// In a folder whose name no preload can hold: the demo, a program that starts itself anew, and nothing left afterwards.
#[test]
fn installed_it_runs_and_uninstalled_it_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().join("My Projects $1");
    let python = environment(&home);
    let before = tree(&home);
    made(pip().arg("--python").arg(&python).args(["install", "--no-index"]).arg(&built().wheel));
    let command = home.join("bin/gpupool");
    let demo = Run::command(&command).args("demo --gpus 2x2GiB").go();
    assert_eq!(demo.succeeds().stdout.matches("contents right").count(), 3, "{}", demo.stdout);

    let manual = fs::read_to_string(home.join("share/man/man1/gpupool-run.1")).unwrap();
    assert!(manual.contains(".SH EXAMPLES"), "{manual}");
    assert_eq!(completed(&home), "report\n");

    let said = client(&python, "package_client.py").arg("a word").go();
    said.succeeds().prints(
        "begins: False ['a word']\nbegins: True ['a word']\nstate: IDLE True 0 []\n\
         early: NOT_ACTIVE: gpupool_pieces: NOT_ACTIVE (-1): no function of the CUDA driver was called yet; make this call after the first use of \
         CUDA\nstate: ACTIVE True pool ''\nlive: 1 64\n\
         lies: {'gpu0': 64}\nmoved: {'gpu1': 64}\n\
         anchored: ['ANCHORED'] STAYED: gpupool_prefetch: STAYED (-6): some of the memory stayed where it was; pieces() tells where it lies \
         and what must stay there\nfull: CUDA_ERROR_OUT_OF_MEMORY: gpupool_prefetch: CUDA_ERROR_OUT_OF_MEMORY (2): the place has no room; free \
         memory there (places() tells what is held), or choose another\nhome: {'gpu0': 64}\nlabels: [('kv', 1, 64, 64, None)]\nbudget: 32\n\
         far: {'gpu1': 8} near: {'gpu0': 8} {'gpu0': 8}\nscopes: [('kv', 1), ('activations', 3), ('state', 1)]\n\
         too long: INVALID_ARGUMENT\n\
         stranger: NOT_POOLED: gpupool_pieces: NOT_POOLED (-3): the address lies in no live block of the pool's, but is freed, the driver's or \
         nobody's; name memory that cudaMalloc gave while gpupool served it\nplaces: ['gpu0', 'gpu1', 'host0']\n\
         used: 64\ntrimmed: True\nchild: True\n",
    );
    assert_eq!(said.stderr, "");

    let log = folder.path().join("logs.jsonl");
    client(&python, "package_logs.py").arg(&log).go().succeeds().prints(
        "no log: NoLog: this process has no log\nlive: 64 MiB on gpu0, 64 MiB on gpu1\nsame: True True True\n\
         at: ['cuda_calls.py:call', 'package_logs.py:weights', 'package_logs.py:main', 'package_logs.py:<module>']\n\
         written: True\nsaid: [True, True, True]\ngpupool: 128.0 MiB in 2 blocks, at most 128.0 MiB; 3 allocations, 1 of them from freed memory\n\
         picture: True True\nchange: True\n",
    );

    let module = Run::command(&python).args("-m gpupool --version").go();
    module.succeeds().prints(&Run::command(&command).arg("--version").go().stdout);
    assert!(module.stdout.starts_with(&format!("gpupool {VERSION} (")), "{}", module.stdout);
    made(pip().arg("--python").arg(&python).args(["uninstall", "--yes", "gpupool"]));
    let mut after = tree(&home);
    // pip removes the files of every package there, and leaves the folders that others have a part in, empty.
    after.retain(|path, _| path.is_file() || !path.starts_with(home.join("share")));
    assert_eq!(after, before);
}

/// What distributions install, and what is unpacked anywhere: the same files, in which the command finds its libraries.
#[test]
fn the_deb_and_the_archive_run_where_they_are_unpacked() {
    let Built { folder: packages, .. } = built();
    let folder = tempfile::tempdir().unwrap();
    let (deb, archive) = (folder.path().join("deb"), folder.path().join("archive"));
    fs::create_dir(&archive).unwrap();
    made(
        Command::new("dpkg-deb").arg("-x").arg(packages.path().join(format!("gpupool_{VERSION}_amd64.deb"))).arg(&deb),
    );
    let name = format!("gpupool-{VERSION}-x86_64-linux");
    made(Command::new("tar").arg("-xzf").arg(packages.path().join(format!("{name}.tar.gz"))).arg("-C").arg(&archive));
    for root in [deb.join("usr"), archive.join(name)] {
        let demo = Run::command(root.join("bin/gpupool")).args("demo --gpus 1x2GiB").go();
        assert_eq!(demo.succeeds().stdout.matches("contents right").count(), 1, "{}", demo.stdout);
        let documents = root.join("share/doc/gpupool");
        for file in ["man/man1/gpupool.1.gz", "man/man1/gpupool-run.1.gz", "zsh/site-functions/_gpupool"] {
            assert!(root.join("share").join(file).is_file(), "{file}");
        }
        assert_eq!(completed(&root), "report\n");
        for file in
            ["copyright", "THIRD-PARTY.txt", "gpupool.cdx.json", "examples/kubernetes.yaml", "examples/with_cupy.py"]
        {
            assert!(documents.join(file).is_file(), "{file}");
        }
    }
    let control =
        made(Command::new("dpkg-deb").arg("-f").arg(packages.path().join(format!("gpupool_{VERSION}_amd64.deb"))));
    assert!(control.contains("Depends: libc6 (>= 2."), "{control}");
    // What `apt install` says it will take.
    let size = control.lines().find_map(|line| line.strip_prefix("Installed-Size: ")).unwrap_or("none");
    let files: u64 =
        fs::read_dir(deb.join("usr/lib/gpupool")).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
    assert!(size.parse::<u64>().is_ok_and(|size| size * 1024 > files), "{size} of {files} bytes: {control}");
}

/// A program that cannot begin again goes on as it is, and is told why.
#[test]
fn a_program_that_cannot_be_started_anew_is_told_why() {
    let folder = tempfile::tempdir().unwrap();
    let python = environment(folder.path());
    made(pip().arg("--python").arg(&python).args(["install", "--no-index"]).arg(&built().wheel));
    let refused = |case: &str, words: &str| {
        let said = client(&python, "package_refusals.py").arg(case).go();
        said.succeeds();
        assert_eq!(said.stdout, format!("{words}\npreloaded: False\n"), "{case}: {}", said.stderr);
    };
    refused("threads", "other threads run already (loader), which would be lost; call it before they are started");
    refused(
        "cuda",
        "CUDA is in use in this process already; call gpupool.activate() before, best as the program's first line",
    );
    refused("setting", "gpupool: --set limits=1GiB: no such setting; did you mean GPUPOOL_LIMIT?");

    let program = "import gpupool; gpupool.activate(); print(gpupool.is_active())";
    Run::command(&python).arg("-c").arg(program).go().succeeds().prints("True\n");
    let mut typed = Command::new(&python);
    let file = folder.path().join("typed");
    fs::write(&file, program).unwrap();
    let typed = typed.arg("-").stdin(fs::File::open(&file).unwrap()).output().unwrap();
    assert!(String::from_utf8_lossy(&typed.stderr).contains("came from standard input"), "{typed:?}");

    // What cannot be read a second time: a pipe; and a file of another folder than the one that the module was imported in.
    let shell = |script: &str| {
        let mut command = Command::new("sh");
        command.current_dir(folder.path()).args(["-c", script, "sh"]).arg(&python).output().unwrap()
    };
    for script in [
        "cat typed | \"$1\" /dev/stdin",
        "echo 'import os; os.chdir(\"/\"); import gpupool; gpupool.activate()' >moved.py; \"$1\" moved.py",
    ] {
        let said = shell(script);
        let error = String::from_utf8_lossy(&said.stderr);
        assert!(!said.status.success() && error.contains("is not there a second time"), "{script}: {error}");
    }
    // To import it needs no folder.
    let said =
        shell("mkdir gone; cd gone; rmdir ../gone; \"$1\" -c 'import gpupool; print(gpupool.why()[:28], end=\"\")'");
    assert_eq!(String::from_utf8_lossy(&said.stdout), "the library is not preloaded", "{said:?}");
}

#[test]
fn the_rpm_owns_the_folders_that_it_makes() {
    let rpm = built().folder.path().join(format!("gpupool-{VERSION}-1.x86_64.rpm"));
    if !rpm.is_file() {
        println!("no rpmbuild here, so no rpm was made");
        return;
    }
    let list = made(Command::new("rpm").args(["-qpl", "--dbpath", "/nonexistent"]).arg(&rpm));
    for file in list.lines() {
        let folders = Path::new(file).ancestors().skip(1).map(|folder| folder.display().to_string());
        for folder in folders.filter(|folder| folder.contains("/gpupool")) {
            assert!(list.lines().any(|line| line == folder), "{folder}, which is left behind, is not in:\n{list}");
        }
    }
}

/// Where installers put things: everywhere the command finds its library, and the module its command.
#[test]
fn every_way_to_install_it_works() {
    let folder = tempfile::tempdir().unwrap();
    let check = |command: &Path, python: Run, what: &str| {
        let output: Output = Run::command(command).args("run -- sh -c").arg("grep -c libgpupool /proc/self/maps").go();
        assert_ne!(output.succeeds().stdout.trim(), "0", "{what}");
        let words = "import gpupool; print(gpupool.command()); print(gpupool.run(['true']).returncode)";
        python
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .arg("-c")
            .arg(words)
            .go()
            .succeeds()
            .prints(&format!("{}\n0\n", command.display()));
    };
    let target = folder.path().join("target");
    made(pip().args(["install", "--no-index", "--target"]).arg(&target).arg(&built().wheel));
    check(&target.join("bin/gpupool"), Run::command("python3").env("PYTHONPATH", &target), "--target");

    let user = folder.path().join("user");
    made(pip().args(["install", "--no-index", "--prefix"]).arg(&user).arg(&built().wheel).arg("--ignore-installed"));
    let packages = fs::read_dir(user.join("lib")).unwrap().next().unwrap().unwrap().path().join("site-packages");
    check(&user.join("bin/gpupool"), Run::command("python3").env("PYTHONPATH", &packages), "--prefix, as --user");

    // As pipx and uv do: a link to the command in a folder of all commands.
    let link = folder.path().join("gpupool");
    std::os::unix::fs::symlink(user.join("bin/gpupool"), &link).unwrap();
    Run::command(&link).args("sim --gpus 1x1GiB --").arg(&link).args("run -- true").go().succeeds();
}

/// Slurm's plugin in a host program of ours that has the calls of Slurm's that it uses: what a task's `LD_PRELOAD` becomes. Under Slurm itself
/// it was run by hand; its head names the versions.
#[test]
fn the_slurm_plugin_preloads_the_library_once_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let header = folder.path().join("slurm/spank.h");
    fs::create_dir(folder.path().join("slurm")).unwrap();
    fs::write(
        header,
        r#"
#include <stdlib.h>
typedef int spank_t;
typedef enum { ESPANK_SUCCESS, ESPANK_ERROR = 3000, ESPANK_ENV_NOEXIST, ESPANK_NOSPACE } spank_err_t;
struct spank_option { const char *name, *arginfo, *usage; int has_arg, val; int (*cb)(int, const char *, int); };
#define SPANK_PLUGIN(name, version) const char plugin_name[] = #name;
#define slurm_error(...) (printf(__VA_ARGS__), puts(""))
spank_err_t spank_option_register(spank_t spank, struct spank_option *option);
spank_err_t spank_getenv(spank_t spank, const char *name, char *value, int size);
spank_err_t spank_setenv(spank_t spank, const char *name, const char *value, int overwrite);
const char *spank_strerror(spank_err_t error);
"#,
    )
    .unwrap();
    let host = folder.path().join("host.c");
    fs::write(
        &host,
        r#"
#include PLUGIN
spank_err_t spank_option_register(spank_t spank, struct spank_option *option) {
    return (void)spank, getenv("ASKED") ? option->cb(0, NULL, 1) : ESPANK_SUCCESS;
}
spank_err_t spank_getenv(spank_t spank, const char *name, char *value, int size) {
    const char *is = getenv(name);
    return (void)spank, is == NULL ? ESPANK_ENV_NOEXIST : snprintf(value, size, "%s", is) < size ? ESPANK_SUCCESS : ESPANK_NOSPACE;
}
spank_err_t spank_setenv(spank_t spank, const char *name, const char *value, int overwrite) {
    return (void)spank, setenv(name, value, overwrite) ? ESPANK_ERROR : ESPANK_SUCCESS;
}
const char *spank_strerror(spank_err_t error) { return error == ESPANK_NOSPACE ? "too small" : "other"; }
int main(int count, char **arguments) {
    /* Not by the environment: the loader would take it. */
    if (count > 2) setenv("LD_PRELOAD", arguments[2], 1);
    slurm_spank_init(0, 1, arguments + 1);
    slurm_spank_task_init(0, 1, arguments + 1);
    const char *is = getenv("LD_PRELOAD");
    printf("%s\n", is ? is : "-");
}
"#,
    )
    .unwrap();
    let program = folder.path().join("host");
    let plugin = repository().join("src/package/deploy/spank_gpupool.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-Wall", "-Wextra", "-Werror", "-o"]).arg(&program).arg("-I").arg(folder.path());
    made(compiler.arg(format!("-DPLUGIN=\"{}\"", plugin.display())).arg(&host));
    let library = artifact_folder().join("libgpupool.so").display().to_string();
    let task = |asked: bool, library: &str, before: Option<&str>| {
        let mut task = Command::new(&program);
        task.arg(format!("library={library}")).args(before);
        made(if asked { task.env("ASKED", "1") } else { task.env_remove("ASKED") })
    };
    assert_eq!(task(false, &library, None), "-\n");
    assert_eq!(task(true, &library, None), format!("{library}\n"));
    assert_eq!(task(true, &library, Some("/a.so:/b.so")), format!("{library}:/a.so:/b.so\n"));
    assert_eq!(task(true, &library, Some(&format!("{library}.1"))), format!("{library}:{library}.1\n"));
    // A step of a job's script.
    for before in [library.clone(), format!("/a.so {library}"), format!("{library}:/a.so")] {
        assert_eq!(task(true, &library, Some(&before)), format!("{before}\n"));
    }
    let long = ["/a.so"; 900].join(":");
    let said = task(true, &library, Some(&long));
    assert_eq!(said, format!("gpupool: LD_PRELOAD cannot be read: too small; nothing was changed\n{long}\n"));
    let said = task(true, "/nowhere/libgpupool.so", None);
    assert!(
        said.starts_with("gpupool: /nowhere/libgpupool.so cannot be read on this node; ") && said.ends_with("\n-\n"),
        "{said}"
    );
}
