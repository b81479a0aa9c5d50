//! What a command says that was given something else than it takes: what that was, what was expected, and what to do.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use crate::common::{gpupool, output, stderr, stdout};

/// Runs it in a folder of its own and says what it said; nothing was done.
#[track_caller]
fn refused(words: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let output = output(gpupool().args(words.split_whitespace()).current_dir(folder.path()));
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""), "{words}: {}", stderr(&output));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "{words}: something was made");
    stderr(&output)
}

#[test]
fn what_is_no_process_number_is_told_so() {
    for words in ["suspend abc", "resume abc", "priority abc 3", "set abc", "checkpoint abc /scratch/x"] {
        let said = refused(words);
        assert!(said.contains("'abc'") && said.contains("this is no process number; gpupool ps lists"), "{said}");
        assert!(!said.contains("invalid digit"), "{said}");
    }
    let said = refused("set limit=1GiB");
    assert!(said.contains("this is a setting; the number of the process comes first, as gpupool ps lists it: gpupool set 4711 limit=0:20GiB"), "{said}");
}

/// The last word is the folder, which would be made wherever somebody is.
#[test]
fn a_process_number_in_the_place_of_the_folder_makes_none() {
    for words in ["checkpoint 4711", "checkpoint 4710 4711", "checkpoint --job 4711"] {
        let said = refused(words);
        assert!(said.contains("4711 stands last, where the folder of the images does"), "{said}");
        assert!(said.contains("gpupool checkpoint 4711 /scratch/train") && said.contains("./4711"), "{said}");
    }
    let said = refused("checkpoint /scratch/train");
    assert!(said.contains("no process is named, of which /scratch/train is to have an image: its number"), "{said}");
}

#[test]
fn a_setting_without_a_value_is_named_as_it_was_written() {
    let said = refused("set 4711 limit");
    assert_eq!(
        said,
        "gpupool: limit: is not NAME=VALUE; write for example limit=0:20GiB (limit= with nothing after the = unsets it)\n"
    );
}

#[test]
fn a_gpu_of_so_many_bytes_was_meant_in_gib() {
    for words in ["sim --gpus 4x32 -- true", "plan --gpus 4x32 x.jsonl", "sim --gpus 1x1GiB,4x32 -- true"] {
        let said = refused(words);
        assert!(said.contains("a GPU of 32 bytes, as there is no unit; write 4x32GiB if that is meant"), "{said}");
    }
}

#[test]
fn what_an_argument_is_that_is_missing_is_said() {
    for (words, expected) in [
        ("drain", "gpupool: <GPU>: Its number as nvidia-smi -L lists it, or its UUID"),
        ("undrain", "gpupool: <GPU>: Its number as nvidia-smi -L lists it, or its UUID"),
        ("store verify", "gpupool: <DIR>: The folder"),
        ("set", "gpupool: <PID>: Its number, as gpupool ps lists it"),
    ] {
        let said = refused(words);
        assert!(said.lines().any(|line| line.starts_with(expected)), "{words}: {said}");
    }
}

#[test]
fn what_is_no_gpu_is_told_so() {
    let said = refused("drain gpu0");
    assert!(
        said.contains("\"gpu0\" is neither the number of a GPU nor a UUID (gpu0 and so on, as gpupool ps"),
        "{said}"
    );
    assert!(said.contains("nvidia-smi -L lists both"), "{said}");
    let said = refused("drain x");
    assert!(said.contains("\"x\" is neither the number of a GPU nor a UUID; nvidia-smi -L"), "{said}");
    // Without NVML nobody knows numbers.
    let folder = tempfile::tempdir().unwrap();
    let mut command = gpupool();
    let said = output(
        command
            .args(["sim", "--no-nvml", "--"])
            .arg(env!("CARGO_BIN_EXE_gpupool"))
            .args(["drain", "0"])
            .current_dir(folder.path()),
    );
    let said = stderr(&said);
    let begins = "gpupool: GPU 0 cannot be found by its number, which is NVML's to know: ";
    assert!(said.starts_with(begins) && said.contains("; give its UUID instead, for example GPU-"), "{said}");
}

#[test]
fn a_folder_for_pages_that_cannot_be_made_is_named_with_the_reason() {
    let output = output(gpupool().args(["manual", "--to", "/proc/nope"]));
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    assert!(said.starts_with("gpupool: the folder /proc/nope cannot be made: No such file"), "{said}");
    assert!(said.contains("choose another one with --to"), "{said}");
}

/// Where people put them: behind the number.
#[test]
fn an_option_of_checkpoint_may_stand_anywhere() {
    for words in [
        "checkpoint 4294967295 --every 3s ./x --keep 2",
        "checkpoint 4294967295 ./x --keep 2 --every 3s",
        "checkpoint --keep=2 4294967295 --full ./x",
    ] {
        assert_eq!(
            refused(words),
            "gpupool: there is no process 4294967295 here; gpupool ps lists those that run under gpupool\n",
            "{words}"
        );
    }
}

/// Ten bytes are nobody's limit, and a plan with them says that nothing fits.
#[test]
fn a_limit_of_a_few_bytes_is_refused_where_it_is_written_on_the_command_line() {
    for words in [
        "plan x.jsonl --limit 10",
        "plan x.jsonl --host 10",
        "run --set limit=10 -- true",
        "run --set guarantee=0:10 -- true",
    ] {
        let said = refused(words);
        assert!(said.contains("10 bytes, as there is no unit; write 10GiB if that is meant"), "{words}: {said}");
    }
}

/// A folder that cannot be opened is no folder that is not there, and a program that runs is not none.
#[test]
fn a_command_without_descriptors_says_so_and_not_that_no_program_runs() {
    for words in ["ps", "top --once", "suspend 1", "checkpoint 1 /nowhere/x", "drain 0"] {
        let mut command = std::process::Command::new("sh");
        let gpupool = env!("CARGO_BIN_EXE_gpupool");
        command.args(["-c", &format!("ulimit -n 4; exec {gpupool} {words}")]);
        let output = output(&mut command);
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(1), ""), "{words}: {}", stderr(&output));
        let said = stderr(&output);
        assert!(said.contains("Too many open files") && said.contains("ulimit -n"), "{words}: {said}");
    }
}
