//! `gpupool kernel install`: what Jupyter finds then, and what is refused.

use crate::common::{gpupool, output, stderr, stdout};

/// A Python with ipykernel, or one without.
fn python(folder: &std::path::Path, has_it: bool) -> std::path::PathBuf {
    let path = folder.join(if has_it { "python with it" } else { "bare" });
    let script = format!("#!/bin/sh\n[ \"$2\" = \"import ipykernel\" ] && {has_it}\n");
    crate::common::script(&path, &script);
    path
}

#[test]
fn jupyter_finds_a_kernel_that_is_started_by_run() {
    let folder = tempfile::tempdir().unwrap();
    let python = python(folder.path(), true);
    let mut command = gpupool();
    command.args(["kernel", "install", "--name", "big", "--set", "limit=0:70GiB", "--python"]).arg(&python);
    let output = output(command.env("JUPYTER_DATA_DIR", folder.path()));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let file = folder.path().join("kernels/big/kernel.json");
    assert!(stdout(&output).contains(&*file.to_string_lossy()), "{}", stdout(&output));
    let kernel: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let words: Vec<&str> = kernel["argv"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    assert_eq!(
        std::path::Path::new(words[0]),
        std::path::Path::new(env!("CARGO_BIN_EXE_gpupool")).canonicalize().unwrap()
    );
    let rest = [
        "run",
        "--set",
        "limit=0:70GiB",
        "--",
        &python.to_string_lossy(),
        "-m",
        "ipykernel_launcher",
        "-f",
        "{connection_file}",
    ];
    assert_eq!(words[1..], rest);
    // It may be made anew; one that is not ours may not.
    assert_eq!(crate::common::output(&mut command).status.code(), Some(0));
    let foreign = "{\"argv\": [\"R\"], \"display_name\": \"R\", \"language\": \"R\"}";
    std::fs::write(&file, foreign).unwrap();
    let refused = crate::common::output(&mut command);
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        stderr(&refused).contains("--name big: ") && stderr(&refused).contains("another kernel's"),
        "{}",
        stderr(&refused)
    );
    assert_eq!(std::fs::read_to_string(&file).unwrap(), foreign);
    assert_eq!((&kernel["display_name"], &kernel["language"]), (&"Python 3 (big)".into(), &"python".into()));
}

#[test]
fn what_could_not_start_is_refused_and_nothing_written() {
    let folder = tempfile::tempdir().unwrap();
    let (good, bare) = (python(folder.path(), true), python(folder.path(), false));
    let missing = folder.path().join("none");
    for (flags, python, words) in [
        (&["--set", "limits=1GiB"][..], &good, "--set limits=1GiB: no such setting; did you mean GPUPOOL_LIMIT?"),
        (&["--set", "limit=0:1XB"], &good, "GPUPOOL_LIMIT=0:1XB: not a size"),
        (&["--name", "../up"], &good, "--name ../up: Jupyter takes letters"),
        (&[], &bare, "has no ipykernel"),
        (&[], &missing, "name another Python with --python"),
    ] {
        let mut command = gpupool();
        command.args(["kernel", "install"]).args(flags).arg("--python").arg(python);
        let output = output(command.env("JUPYTER_DATA_DIR", folder.path().join("data")));
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
        assert!(!folder.path().join("data").exists());
    }
}
