//! `gpupool explain`: every code has its text.

use gpupool_events::FINDINGS;
use std::os::unix::process::CommandExt;
use std::process::Stdio;

use crate::common::{golden, gpupool, output, stderr, stdout};

#[test]
fn every_code_is_explained_within_eighty_columns() {
    for finding in FINDINGS {
        let output = output(gpupool().args(["explain", finding.code]));
        assert!(output.status.success(), "{}", stderr(&output));
        let text = stdout(&output);
        assert!(text.starts_with(&format!("{}  {}\n\n", finding.code, finding.title)), "{text}");
        assert!(text.contains(finding.explain), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        // The advice wraps; its words are all there.
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.ends_with(&format!("In short: {}.", finding.fix)), "{words}");
    }
}

#[test]
fn codes_may_be_written_small() {
    assert!(stdout(&output(gpupool().args(["explain", "gp006"]))).starts_with("GP006  A fork"));
}

#[test]
fn without_a_code_all_are_listed() {
    golden("explain.txt", &stdout(&output(gpupool().arg("explain"))));
}

#[test]
fn an_unknown_code_gets_the_nearest() {
    let output = output(gpupool().args(["explain", "GP5"]));
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(stdout(&output), "");
    assert!(
        stderr(&output).starts_with("gpupool: GP5: no such finding; the nearest is GP005 ("),
        "{}",
        stderr(&output)
    );
}

/// The signal for that would end the command without a word.
#[test]
fn a_file_that_may_be_no_longer_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = gpupool();
    let most = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: setrlimit reads a local that was moved into the closure, and is a system call alone.
    unsafe {
        command.pre_exec(move || match libc::setrlimit(libc::RLIMIT_FSIZE, &raw const most) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        })
    };
    let file = std::fs::File::create(folder.path().join("out")).unwrap();
    let output = command
        .args(["explain", "GP006"])
        .stdout(file)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
        .wait_with_output()
        .unwrap();
    let said = stderr(&output);
    assert!(output.status.code() == Some(1) && said.contains("stdout: File too large"), "{}: {said}", output.status);
}
