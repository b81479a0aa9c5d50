//! `gpupool suspend`: what is refused before anybody is asked. What becomes of programs is in `tests/suspend.rs` of the repository.

use crate::common::{gpupool, output, stderr, stdout};

/// The process is there and none of ours: to look for it would be another line.
#[test]
fn the_whole_process_leaves_for_the_host_or_a_folder_alone() {
    let pid = std::process::id().to_string();
    for to in [&[][..], &["--to", "any"], &["--to", "peers"]] {
        let output = output(gpupool().args(["suspend", "--process", &pid]).args(to));
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""), "{to:?}");
        assert_eq!(
            stderr(&output),
            "gpupool: --process needs --to host or --to DIR beside it, since the driver cannot bring back what lies on other GPUs; nothing was done\n",
            "{to:?}"
        );
    }
    // With one of these it is looked for.
    let output = output(gpupool().args(["suspend", "--process", "--to", "host", &pid]));
    assert!(stderr(&output).contains("is not known to run under gpupool"), "{}", stderr(&output));
}
