//! `gpupool checkpoint`: images of a program's memory, written while it runs.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

#[path = "checkpoint/hosts.rs"]
mod hosts;
#[path = "checkpoint/jobs.rs"]
mod jobs;
#[path = "checkpoint/one.rs"]
mod one;
#[path = "checkpoint/process.rs"]
mod process;
#[path = "checkpoint/restore.rs"]
mod restore;
#[path = "checkpoint/unchanged.rs"]
mod unchanged;

use gpupool_store::{Reader, Which};
use harness::{Run, Running, Traced, artifact_folder, eventually, held_writers};
use serde_json::Value;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const KINDS: usize = 4;

fn checkpointed(gpus: &str) -> Run {
    let run = Run::program("checkpointed").sim(gpus).env("SIMCUDA_STRICT", "on").env("GPUPOOL_RESERVE", "16MiB");
    run.env("GPUPOOL_HOST_LIMIT", "1GiB").report().log().shim()
}

/// A folder in which images can lie: nobody else may replace it.
fn store() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("images");
    (folder, path)
}

/// What the command says of an image, or of why there is none.
#[track_caller]
fn told(program: &Running, folder: &Path, more: &str) -> Value {
    let ended = program.gpupool(&format!("checkpoint --json {} {} {more}", program.pid(), folder.display()));
    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
    let told: Value = serde_json::from_str(&text)
        .unwrap_or_else(|_| panic!("{more}: {text}{}", String::from_utf8_lossy(&ended.stderr)));
    assert_eq!(ended.status.success(), told.get("error").is_none(), "{told}");
    told
}

#[track_caller]
fn image(program: &Running, folder: &Path, more: &str) -> Value {
    let told = told(program, folder, more);
    assert_eq!(told.get("error"), None, "{told}");
    told
}

#[track_caller]
fn refused(program: &Running, folder: &Path, more: &str) -> String {
    let told = told(program, folder, more);
    told["error"].as_str().unwrap_or_else(|| panic!("it was not refused: {told}")).to_owned()
}

/// It ends, and the simulated driver has seen no breach of the rules.
#[track_caller]
fn ends_well(mut program: Running) {
    assert_eq!(program.ask("end"), "ended");
    let (status, folder) = program.end();
    assert!(status.success(), "{status}");
    let report = std::fs::read_to_string(folder.path().join("report")).unwrap();
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["violations"], serde_json::json!([]), "{report}");
}

/// What an image says of where memory was copied to in its stop, in MiB: to GPUs, to the host, and to the disk.
#[track_caller]
fn copied(told: &Value) -> [u64; 3] {
    let copied = ["to_gpus_bytes", "to_host_bytes", "in_stop_bytes"].map(|place| told[place].as_u64().unwrap());
    let all = copied.iter().sum::<u64>() + not_copied(told);
    assert_eq!(told["bytes"].as_u64(), Some(all), "{told}");
    copied.map(|bytes| bytes / MIB)
}

/// Bytes of which the GPUs saw that the image before has them.
#[track_caller]
fn not_copied(told: &Value) -> u64 {
    told["not_copied_bytes"].as_u64().unwrap()
}

/// The bytes at an address of the program, as the newest image has them.
#[track_caller]
fn stored(folder: &Path, address: u64, bytes: usize) -> Vec<u32> {
    let reader = Reader::open(folder, Which::Newest, 1).unwrap();
    let mut blocks = reader.manifest().blocks.iter().map(|block| &block.about);
    let block = blocks
        .find(|about| (about.address..about.address + about.bytes).contains(&address))
        .unwrap_or_else(|| panic!("{address:#x} is in no block"));
    let mut found = vec![0; bytes];
    reader.read_into(block.id, address - block.address, &mut found).unwrap();
    found.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

/// In which round each kind of this thread's memory was written.
#[track_caller]
fn rounds_of(program: &mut Running, folder: &Path, thread: u32) -> Vec<u32> {
    let sizes = [2 * MIB + 20480, MIB, 40 << 10, 2 * MIB];
    let told = program.ask(&format!("where {thread}"));
    let addresses: Vec<u64> = told.split_whitespace().map(|address| address.parse().unwrap()).collect();
    assert_eq!(addresses.len(), KINDS);
    let round = |(address, bytes): (&u64, u64)| {
        let words = stored(folder, *address, usize::try_from(bytes).unwrap());
        let first = words[0];
        let torn = words.iter().zip(0..).position(|(word, at)| *word != first.wrapping_add(at));
        assert_eq!(torn, None, "thread {thread}: memory of two rounds in one block");
        assert_eq!(first % 1000, 0);
        first / 1000
    };
    addresses.iter().zip(sizes).map(round).collect()
}

/// All of it is of one moment: each round writes one kind after the other.
#[track_caller]
fn agrees(program: &mut Running, folder: &Path, threads: u32) {
    for thread in 0..threads {
        let rounds = rounds_of(program, folder, thread);
        let falls = rounds.windows(2).all(|pair| pair[0] >= pair[1]);
        assert!(falls && rounds[0] - rounds[KINDS - 1] <= 1, "thread {thread}: {rounds:?}");
    }
}

fn generations(folder: &Path) -> Vec<u64> {
    gpupool_store::list(folder).unwrap_or_default().into_iter().map(|listed| listed.generation).collect()
}

#[track_caller]
fn verifies(folder: &Path) {
    for verified in gpupool_store::verify(folder, None, 1).unwrap() {
        assert_eq!(verified.wrong, []);
    }
}

/// Bytes of an image that is not whole yet; `None`: there is none.
fn unfinished(folder: &Path) -> Option<u64> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let new = entries.map(|entry| entry.path()).find(|path| path.extension().is_some_and(|kind| kind == "new"))?;
    let files = std::fs::read_dir(new).ok()?.flatten();
    Some(files.filter_map(|file| file.metadata().ok()).map(|file| file.len()).sum())
}

/// Has a generation be one that a newer gpupool wrote; its manifest.
fn make_newer(folder: &Path, generation: u64) -> String {
    let path = folder.join(format!("gen-{generation:06}/manifest"));
    let text = std::fs::read_to_string(&path).unwrap();
    let (_, rest) = text.split_once('\n').unwrap();
    let text = format!("gpupool-store 99\n{rest}");
    std::fs::write(&path, &text).unwrap();
    text
}

/// Files of the newest generation with memory in them.
fn data(folder: &Path) -> Vec<PathBuf> {
    let newest = generations(folder).into_iter().max().unwrap();
    let all = std::fs::read_dir(folder.join(format!("gen-{newest:06}"))).unwrap().flatten().map(|entry| entry.path());
    all.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("data-"))).collect()
}

/// Runs the command as a user of this session, on the machine that a program is on.
fn gpupool(program: &Running, session: &Path, arguments: &str) -> std::process::Output {
    let environment = std::fs::read(format!("/proc/{}/environ", program.pid())).unwrap();
    let variables = environment.split(|byte| *byte == 0).filter_map(|pair| {
        let (name, value) = std::str::from_utf8(pair).ok()?.split_once('=')?;
        (name.starts_with("SIMCUDA_") || name == "LD_LIBRARY_PATH").then(|| (name.to_owned(), value.to_owned()))
    });
    let mut command = std::process::Command::new(harness::artifact_folder().join("gpupool"));
    command.args(arguments.split_whitespace()).env("XDG_RUNTIME_DIR", session).envs(variables).env_remove("LD_PRELOAD");
    command.output().unwrap()
}

/// A folder for the pages of several programs.
fn session() -> TempDir {
    let session = tempfile::tempdir().unwrap();
    std::fs::set_permissions(session.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    session
}

/// The command, which writes an image of it meanwhile.
fn begin_image(program: &Running, folder: &Path) -> Child {
    begin(program, folder, &[])
}

fn begin(program: &Running, folder: &Path, more: &[&str]) -> Child {
    let mut command = Command::new(artifact_folder().join("gpupool"));
    command.args(["checkpoint".as_ref(), OsStr::new(&program.pid().to_string()), folder.as_os_str()]).args(more);
    command.env("XDG_RUNTIME_DIR", program.session()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// An image of a program that is in the middle of being written, by the command: as long as its writers are held. All of it is copied, as there may be one already by which it is known.
fn image_under_way(program: &Running, folder: &Path) -> (Child, Vec<Traced>) {
    eventually("an image in the middle of being written", || {
        let mut command = begin(program, folder, &["--full"]);
        loop {
            match held_writers(program, writers()) {
                Some(writers) => return Some((command, writers)),
                None if command.try_wait().unwrap().is_some() => return None,
                None => {}
            }
        }
    })
}

/// How many threads write an image.
fn writers() -> usize {
    let processors = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    (processors / 2).clamp(2, 8)
}

/// Blocks of a program, in the order in which it asks for them: their addresses.
fn blocks_of(program: &mut Running, sizes: &[u64], seed: u64) -> Vec<u64> {
    let block = |(size, number): (&u64, u64)| {
        program.ask(&format!("block {size} {}", seed + number * 100_000)).parse().unwrap()
    };
    sizes.iter().zip(0..).map(block).collect()
}
