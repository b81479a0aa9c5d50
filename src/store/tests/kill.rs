//! Writers that end in the middle. Each is a process of its own: this program, started again with a word that says what to do. Hence it
//! has no harness of tests around it.
//!
//! `GPUPOOL_STORE_KILLS=200` kills that many instead of 40.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{KINDS, Numbers, about, load, memory, meta, store};
use gpupool_store::{Options, Reader, Which, Writer, verify};

const BLOCKS: u64 = 6;

/// What generation `number` holds.
fn contents(number: u64) -> Vec<Vec<u8>> {
    let block = |id: u64| {
        // Some stay the same for a while.
        let mut numbers = Numbers(number / [1, 1, 2, 5, 50][id as usize % 5] * BLOCKS + id);
        memory(KINDS[numbers.below(KINDS.len() as u64) as usize], numbers.below(1_000_000) as usize, numbers.next())
    };
    (0..BLOCKS).map(block).collect()
}

/// Writes generations until it is killed.
fn write(folder: &Path) -> ! {
    loop {
        let options = Options { threads: 2, keep: Some(2), reuse: true, ..Options::default() };
        let writer = Writer::create(folder, meta(), options).unwrap();
        let contents = contents(writer.generation());
        println!("{}", writer.generation());
        for (id, bytes) in contents.iter().enumerate() {
            let block = writer.block(about(id as u64, bytes.len())).unwrap();
            writer.write(block, 0, bytes).unwrap();
        }
        drop(writer.finish().unwrap());
    }
}

/// Writes with a limit on the length of files, whose signal ends a program that does nothing about it.
fn full(folder: &Path) {
    let limit = libc::rlimit { rlim_cur: 300_000, rlim_max: 300_000 };
    // SAFETY: the limit is read only.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
    let block = memory(common::Kind::Random, 2_000_000, 1);
    println!("{}", store(folder, Options::default(), &[block]).unwrap_err());
    // Here it is the manifest that is too long.
    let writer = Writer::create(folder, meta(), Options::default()).unwrap();
    (0..2_000).for_each(|id| {
        let block = writer.block(about(id, 8)).unwrap();
        writer.write(block, 0, &[0; 8]).unwrap();
    });
    println!("{}", writer.finish().unwrap_err());
    let limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
    println!("{}", store(folder, Options::default(), &[]).unwrap_err());
}

fn child(word: &str, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([word.as_ref(), folder.as_os_str()]).stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

fn whichever_moment_a_writer_is_killed_at_the_newest_generation_is_whole() {
    let rounds = std::env::var("GPUPOOL_STORE_KILLS").map_or(40, |rounds| rounds.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    drop(store(folder.path(), Options::default(), &contents(1)).unwrap());
    // Some of them get to their end, on whichever machine.
    let longest = begun.elapsed().as_micros() as u64 * 4;
    let (mut newest, mut in_the_middle, mut moments) = (1, 0, Numbers(4711));
    for round in 0..rounds {
        let mut writer = child("write", folder.path()).spawn().unwrap();
        let mut said = BufReader::new(writer.stdout.take().unwrap());
        said.read_line(&mut String::new()).unwrap();
        // This moment is what the test is about: nothing waits for anything here.
        std::thread::sleep(Duration::from_micros(moments.below(longest)));
        writer.kill().unwrap();
        assert_eq!(writer.wait().unwrap().signal(), Some(libc::SIGKILL), "round {round}: it ended by itself");
        drop(said);
        let unfinished = |entry: std::fs::DirEntry| entry.file_name().to_str().unwrap().starts_with(".gen-");
        in_the_middle += usize::from(std::fs::read_dir(folder.path()).unwrap().flatten().any(unfinished));

        let reader = Reader::open(folder.path(), Which::Newest, 2).unwrap();
        assert!(reader.skipped().is_empty(), "round {round}: {:?}", reader.skipped());
        let number = reader.manifest().generation;
        assert!(number >= newest, "round {round}: generation {number} is the newest, after {newest}");
        newest = number;
        assert!(load(folder.path(), Which::Newest).unwrap() == contents(number), "round {round}: {number} is another");
        let all = verify(folder.path(), None, 2).unwrap();
        assert!(all.iter().all(|one| one.wrong.is_empty()), "round {round}: {all:?}");
    }
    assert!(in_the_middle * 2 > rounds, "only {in_the_middle} of {rounds} were killed in the middle");
    println!("{rounds} killed, {in_the_middle} in the middle of a generation; {newest} generations were written");
}

fn a_file_that_may_not_grow_is_an_error_and_the_program_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    drop(store(folder.path(), Options::default(), &contents(1)).unwrap());
    let ended = child("full", folder.path()).output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    let said = String::from_utf8(ended.stdout).unwrap();
    let unfinished = folder.path().join(".gen-000002.new");
    let expected = |name: &str| format!("{}/{name}: cannot write: File too large (os error 27)", unfinished.display());
    let [data, manifest, lock] = said.lines().collect::<Vec<_>>()[..] else { panic!("{said}") };
    assert!(data.starts_with(unfinished.join("data-").to_str().unwrap()) && data.ends_with("(os error 27)"), "{data}");
    assert_eq!(manifest, expected("manifest"));
    assert_eq!(lock, format!("{}: cannot write: File too large (os error 27)", folder.path().join("lock").display()));
    assert!(load(folder.path(), Which::Newest).unwrap() == contents(1));
}

fn main() {
    let words: Vec<String> = std::env::args().collect();
    match &words[1..] {
        [word, folder] if word == "write" => write(folder.as_ref()),
        [word, folder] if word == "full" => return full(folder.as_ref()),
        _ => {}
    }
    let tests: [(&str, fn()); 2] = [
        (
            "whichever_moment_a_writer_is_killed_at_the_newest_generation_is_whole",
            whichever_moment_a_writer_is_killed_at_the_newest_generation_is_whole,
        ),
        (
            "a_file_that_may_not_grow_is_an_error_and_the_program_goes_on",
            a_file_that_may_not_grow_is_an_error_and_the_program_goes_on,
        ),
    ];
    // As the harness of tests takes a name, and says what became of it: scripts/test.sh counts such lines.
    let wanted =
        |name: &str| words[1..].iter().filter(|word| !word.starts_with('-')).all(|word| name.contains(word.as_str()));
    let mut passed = 0;
    for (name, test) in tests.iter().filter(|(name, _)| wanted(name)) {
        test();
        println!("test {name} ... ok");
        passed += 1;
    }
    println!("\ntest result: ok. {passed} passed; 0 failed");
}
