//! `gpupool suspend --to DIR`: a program's memory goes into files of a folder, and comes back.

use super::host::{ITS_HANDLE, waits_to_destroy};
use super::shared::findings;
use super::{MIB, at, ends_well, gpupool, page, refused, suspended, told};
use gpupool_metrics::{Place, Snapshot};
use harness::{Run, Running, artifact_folder, at_work, eventually, goes_on, held_writers};
use serde_json::Value;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn to_folder(folder: &Path) -> String {
    format!("suspend --to {}", folder.display())
}

/// Has all of it go there.
#[track_caller]
fn suspend_to(program: &Running, folder: &Path) -> Value {
    let left = told(program, &to_folder(folder));
    assert!(left["error"].is_null() && left["stayed_bytes"] == 0, "{left}");
    left
}

/// What is kept is as it was.
#[track_caller]
fn is_right(program: &mut Running) {
    program.ask("check");
    eventually("a look at it", || (program.ask("checked") == "0").then_some(()));
}

/// Bytes that the pool has in memory, and on the disk; and what the program made itself on GPUs.
fn lies(page: &Snapshot) -> (u64, u64, u64) {
    let rows = &page.levels.places.rows;
    let held = |on_disk: bool| rows.iter().filter(|place| place.on_disk == on_disk).map(|place| place.held).sum();
    (held(false), held(true), rows.iter().filter(|place| place.is_gpu()).map(|place| place.own).sum())
}

/// Bytes that the program made itself, at places of a kind.
fn own(page: &Snapshot, is_of_kind: impl Fn(&Place) -> bool) -> u64 {
    page.levels.places.rows.iter().filter(|place| is_of_kind(place)).map(|place| place.own).sum()
}

fn on_disk(place: &Place) -> bool {
    place.on_disk
}

/// Bytes on GPUs and on the host, the pool's and what the program made itself.
fn in_memory(page: &Snapshot) -> u64 {
    at(page, false) + at(page, true)
}

/// The files in a folder, of all depths.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).map(|entries| entries.flatten().map(|entry| entry.path()).collect());
    let entries: Vec<PathBuf> = entries.unwrap_or_default();
    entries.into_iter().flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// The largest file with memory in it.
fn data(folder: &Path) -> PathBuf {
    let is_data = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("data-"));
    let bytes = |path: &PathBuf| path.metadata().map_or(0, |status| status.len());
    files(folder).into_iter().filter(is_data).max_by_key(bytes).unwrap_or_else(|| panic!("nothing is stored"))
}

/// What is told of the files, of the compression and of the rate, where the files are so long.
#[track_caller]
fn pays(told: &Value, lengths: u64) {
    let number = |name: &str| told[name].as_f64().unwrap_or_else(|| panic!("{name}: {told}"));
    assert_eq!(told["stored_bytes"], lengths, "{told}");
    // Files have whole pages, of which the last one of a block is not always full.
    let most = number("bytes") + (16 * 2 * MIB) as f64;
    assert!(number("disk_bytes") >= (4 * 32 * MIB) as f64 && number("disk_bytes") <= most, "{told}");
    assert!((number("compression_ratio") - number("disk_bytes") / lengths as f64).abs() <= 0.001, "{told}");
    let rate = number("bytes") / (number("microseconds") - number("waited_microseconds")) * 1e6;
    assert!((number("bytes_per_second") - rate).abs() <= 1.0, "{rate}: {told}");
}

#[test]
fn memory_goes_into_files_and_comes_back_again_and_again_and_nothing_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("2x1GiB").log().start(None);
    at_work(&mut program, 4);
    // One that is there, and one that is not.
    let folders = [folder.path().to_owned(), folder.path().join("new")];
    for round in 0..6 {
        let to = folders[round % 2].clone();
        let left = suspend_to(&program, &to);
        assert!(left["bytes"].as_u64() >= Some(4 * 40 * MIB), "{left}");
        let rounds = program.ask("rounds");
        let empty = |page: &Snapshot| page.levels.suspended > 0 && lies(page).0 == 0;
        // What a call frees that was under way goes a moment later.
        let page = eventually("no memory of the pool", || page(&program).filter(empty));
        assert!(lies(&page).1 >= 4 * 32 * MIB && lies(&page).2 == 0, "{page:?}");
        let stored = files(&to);
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert!(!stored.is_empty() && stored.iter().all(|path| mode(path) == 0o600), "{stored:?}");
        assert!(stored.iter().all(|path| mode(path.parent().unwrap()) == 0o700), "{stored:?}");
        assert_eq!(program.ask("rounds"), rounds, "nobody does anything");
        let lengths: u64 = stored
            .iter()
            .filter(|path| path.to_string_lossy().contains("/data-"))
            .map(|path| path.metadata().unwrap().len())
            .sum();
        pays(&left, lengths);
        if round == 0 {
            let listed = gpupool(&program, "ps");
            let listed = String::from_utf8(listed.stdout).unwrap();
            assert!(listed.contains("suspended") && listed.contains("disk 1"), "{listed}");
            let own = std::fs::read_dir(&to).unwrap().next().unwrap().unwrap().path();
            let verified = gpupool(&program, &format!("store verify {}", own.display()));
            assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
        }
        let back = told(&program, "resume");
        assert_eq!((&back["bytes"], &back["stayed_bytes"]), (&left["bytes"], &Value::from(0)));
        assert_eq!(files(folder.path()), Vec::<PathBuf>::new(), "what is back is no longer stored");
        goes_on(&mut program);
    }
    let log = std::fs::read_to_string(program.log()).unwrap();
    ends_well(program);
    let event = log.lines().find(|line| line.contains("\"program.suspend\"")).unwrap();
    let event: Value = serde_json::from_str(event).unwrap();
    assert_eq!(event["to"], folder.path().to_str().unwrap(), "{event}");
    assert!(
        event["stored"].as_u64().is_some_and(|stored| stored > 0 && Some(stored) < event["bytes"].as_u64()),
        "{event}"
    );
}

#[test]
fn what_cannot_be_read_back_leaves_the_program_suspended_until_it_can() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("1x1GiB").start(None);
    at_work(&mut program, 2);
    program.ask("keep 24");
    suspend_to(&program, folder.path());
    let data = data(folder.path());
    let whole = std::fs::read(&data).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 4;
    for (wrong, words) in [(&flipped[..], "block"), (&whole[..whole.len() / 2], "damaged")] {
        std::fs::write(&data, wrong).unwrap();
        for _ in 0..2 {
            let why = refused(&program, "resume");
            assert!(why.contains(data.to_str().unwrap()) && why.contains(words), "{why}");
        }
        let rounds = program.ask("rounds");
        assert_eq!(program.ask("rounds"), rounds, "it is suspended still");
        eventually("a page that says so", || page(&program).filter(|page| page.levels.suspended > 0));
    }
    std::fs::write(&data, &whole).unwrap();
    assert_eq!(told(&program, "resume")["stayed_bytes"], 0);
    goes_on(&mut program);
    is_right(&mut program);
    assert_eq!(files(folder.path()), Vec::<PathBuf>::new());
    ends_well(program);
}

/// The end of each file that has memory in it, where what the program made itself is: what is the pool's can be read.
fn damage(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let is_data = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("data-"));
    let stored = files(folder).into_iter().filter(is_data);
    let damage = |path: PathBuf| {
        let whole = std::fs::read(&path).unwrap();
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 4;
        std::fs::write(&path, flipped).unwrap();
        (path, whole)
    };
    stored.map(damage).collect()
}

#[test]
fn what_came_back_before_a_damaged_part_leaves_again_and_all_of_it_comes_once_that_is_mended() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("1x1GiB").start(None);
    at_work(&mut program, 1);
    program.ask("keep 64");
    assert_eq!(program.ask("make 64"), "made");
    let left = suspend_to(&program, folder.path());
    let whole = damage(folder.path());
    for _ in 0..2 {
        let why = refused(&program, "resume");
        assert!(why.contains("data-") && !why.contains("came back"), "{why}");
        let page = page(&program).unwrap();
        assert!(page.levels.suspended > 0 && in_memory(&page) == 0, "{page:?}");
    }
    let listed: Value = serde_json::from_slice(&gpupool(&program, "ps --json").stdout).unwrap();
    assert_eq!(listed[0]["state"], "suspended", "{listed}");
    let shown = String::from_utf8(gpupool(&program, "top --once").stdout).unwrap();
    assert!(shown.contains("(suspended) "), "{shown}");
    let row = shown.lines().find(|line| line.contains("(suspended)")).unwrap_or_default();
    let cells: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(cells[1..6], ["0", "B", "0", "B", "-"], "nothing of it is in memory: {shown}");
    whole.iter().for_each(|(path, bytes)| std::fs::write(path, bytes).unwrap());
    assert_eq!(told(&program, "resume")["bytes"], left["bytes"]);
    goes_on(&mut program);
    is_right(&mut program);
    assert_eq!(files(folder.path()), Vec::<PathBuf>::new());
    ends_well(program);
}

/// As where somebody made room elsewhere meanwhile: the files that were open are in no folder then.
#[test]
fn files_that_were_moved_and_put_back_meanwhile_are_removed_too() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 64");
    let (to, kept) = (folder.path().join("to"), folder.path().join("kept"));
    suspend_to(&program, &to);
    let run = |command: &str, arguments: &[&Path]| {
        assert!(Command::new(command).args(["-r", "--"]).args(arguments).status().unwrap().success());
    };
    run("cp", &[&to, &kept]);
    run("rm", &[&to]);
    run("cp", &[&kept, &to]);
    for path in
        std::iter::once(to.clone()).chain(files(&to).iter().flat_map(|file| file.ancestors().map(Path::to_owned)))
    {
        if path.is_dir() && path.starts_with(&to) {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
        }
    }
    assert_eq!(told(&program, "resume")["stayed_bytes"], 0);
    is_right(&mut program);
    assert_eq!(files(&to), Vec::<PathBuf>::new());
    ends_well(program);
}

#[test]
fn a_program_that_ends_without_what_is_damaged_says_so_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("1x1GiB").log().start(None);
    at_work(&mut program, 1);
    program.ask("keep 64");
    assert_eq!(program.ask("make 64"), "made");
    suspend_to(&program, folder.path());
    damage(folder.path());
    let log = program.log();
    program.tell("exit");
    let (status, _folder) = program.end();
    assert_eq!(status.code(), Some(5), "{status}");
    let log = std::fs::read_to_string(log).unwrap();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("ends without what was put away")).collect();
    assert!(lines.len() == 1 && lines[0].contains("data-"), "{lines:?}");
}

#[test]
fn what_cannot_be_written_leaves_the_program_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 64");
    at_work(&mut program, 2);
    let before = page(&program).map(|page| lies(&page));
    let to = folder.path().join("to");
    std::fs::create_dir(&to).unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let open = |mode| std::fs::set_permissions(&to, std::fs::Permissions::from_mode(mode)).unwrap();
    open(0o777);
    let why = refused(&program, &to_folder(&to));
    assert!(why.contains("others may write to it (mode 777)"), "{why}");
    open(0o700);
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let why = refused(&program, &to_folder(&file));
    assert!(why.contains(&text(&file)), "{why}");
    let why = refused(&program, &to_folder(&folder.path().join("none/below")));
    assert!(why.contains("has to be there and is not"), "{why}");
    if std::fs::metadata("/proc/self").unwrap().uid() == 0 {
        std::os::unix::fs::chown(&to, Some(4711), None).unwrap();
        let why = refused(&program, &to_folder(&to));
        assert!(why.contains("it is of user 4711"), "{why}");
        std::os::unix::fs::chown(&to, Some(0), None).unwrap();
    }
    goes_on(&mut program);
    // As long as no file may become longer than that.
    let pid = program.pid() as i32;
    let limit = |bytes| {
        let most = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: the pointer is to a local, and NULL asks for no answer.
        let set = unsafe { libc::prlimit(pid, libc::RLIMIT_FSIZE, &raw const most, std::ptr::null_mut()) };
        assert_eq!(set, 0);
    };
    limit(4 * MIB);
    let why = refused(&program, &to_folder(&to));
    assert!(why.contains(&text(&to)) && why.contains("cannot write"), "{why}");
    assert_eq!(files(&to), Vec::<PathBuf>::new(), "nothing is left of it");
    goes_on(&mut program);
    limit(libc::RLIM_INFINITY);
    let after = page(&program).map(|page| lies(&page));
    assert_eq!(after.map(|it| it.1), before.map(|it| it.1), "nothing is on the disk");
    suspend_to(&program, &to);
    told(&program, "resume");
    goes_on(&mut program);
    ends_well(program);
}

/// Where nothing can be written, no complaint can be either.
#[test]
fn a_program_whose_errors_go_to_a_file_that_cannot_grow_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("to");
    let run = Run::command("sh").arg("-c").arg("exec \"$0\" 2>errors").arg(harness::program("suspended"));
    let run = run.sim("1x1GiB").env("GPUPOOL_RESERVE", "16MiB").env("GPUPOOL_HOST_LIMIT", "4GiB").machine().nvml();
    let mut program = run.report().shim().start(None);
    at_work(&mut program, 1);
    let pid = program.pid() as i32;
    let limit = |bytes| {
        let most = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: the pointer is to a local, and NULL asks for no answer.
        let set = unsafe { libc::prlimit(pid, libc::RLIMIT_FSIZE, &raw const most, std::ptr::null_mut()) };
        assert_eq!(set, 0);
    };
    limit(0);
    let why = refused(&program, &to_folder(&to));
    assert!(why.contains(to.to_str().unwrap()), "{why}");
    limit(libc::RLIM_INFINITY);
    goes_on(&mut program);
    suspend_to(&program, &to);
    told(&program, "resume");
    goes_on(&mut program);
    ends_well(program);
}

/// What is read back from there becomes the program's memory.
#[test]
fn a_folder_that_others_may_replace_is_refused_as_for_images() {
    let around = tempfile::tempdir().unwrap();
    let mode = |mode| std::fs::set_permissions(around.path(), std::fs::Permissions::from_mode(mode)).unwrap();
    let to = around.path().join("to");
    let mut program = suspended("1x1GiB").start(None);
    at_work(&mut program, 1);
    let image = |program: &Running| {
        let ended = program.gpupool(&format!("checkpoint --json {} {}", program.pid(), to.display()));
        let told: Value = serde_json::from_slice(&ended.stdout).unwrap();
        told["error"].as_str().unwrap_or_else(|| panic!("an image was written: {told}")).to_owned()
    };
    mode(0o777);
    for is_there in [false, true] {
        if is_there {
            std::fs::create_dir_all(&to).unwrap();
            std::fs::set_permissions(&to, std::fs::Permissions::from_mode(0o700)).unwrap();
        }
        let why = refused(&program, &to_folder(&to));
        assert!(why.contains(&format!("{} lets others replace it", around.path().display())), "{why}");
        assert_eq!(image(&program), why);
        goes_on(&mut program);
    }
    // A link, which is another folder tomorrow.
    mode(0o700);
    let link = around.path().join("link");
    std::os::unix::fs::symlink(&to, &link).unwrap();
    let why = refused(&program, &to_folder(&link));
    assert!(why.contains("it is a link or no folder"), "{why}");
    assert_eq!(files(around.path()), Vec::<PathBuf>::new());
    suspend_to(&program, &to);
    told(&program, "resume");
    goes_on(&mut program);
    ends_well(program);
}

#[test]
fn what_is_freed_or_whose_context_ends_meanwhile_is_not_brought_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 64");
    at_work(&mut program, 1);
    let left = suspend_to(&program, folder.path());
    program.ask("drop");
    let back = told(&program, "resume");
    assert_eq!(back["bytes"].as_u64().map(|bytes| bytes + 64 * MIB), left["bytes"].as_u64(), "{left} {back}");
    goes_on(&mut program);
    eventually("an empty disk", || page(&program).filter(|page| lies(page).1 == 0));
    program.ask("keep 48");
    suspend_to(&program, folder.path());
    program.ask("destroy");
    told(&program, "resume");
    eventually("its end", || (program.ask("destroyed") == "yes").then_some(()));
    goes_on(&mut program);
    eventually("an empty disk", || page(&program).filter(|page| lies(page).1 == 0));
    ends_well(program);
}

#[test]
fn what_a_call_is_given_that_was_under_way_when_the_program_was_stopped_goes_into_the_files_too() {
    // It is seen once all has been written, and in the middle of that.
    for kept in [64, 600] {
        let folder = tempfile::tempdir().unwrap();
        let mut program = suspended("1x1GiB").start(None);
        program.ask(&format!("keep {kept}"));
        is_right(&mut program);
        // In the middle of being given memory by the driver.
        assert_eq!(program.ask("hold cuMemCreate"), "it will");
        program.ask("allocate 100");
        eventually("a call that stands", || (program.ask("stands") == "yes").then_some(()));
        let mut command = Command::new(artifact_folder().join("gpupool"));
        command.args(["suspend", "--json", "--to"]).arg(folder.path()).arg(program.pid().to_string());
        command.env("XDG_RUNTIME_DIR", program.session()).env_remove("LD_PRELOAD").stdout(Stdio::piped());
        let command = command.spawn().unwrap();
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let writers = eventually("the writing", || held_writers(&program, processors.min(16)));
        program.ask("let");
        eventually("memory", || (program.ask("allocated") == "yes").then_some(()));
        drop(writers);
        let told_of: Value = serde_json::from_slice(&command.wait_with_output().unwrap().stdout).unwrap();
        assert_eq!(told_of[0]["stayed_bytes"], 0, "{told_of}");
        assert_eq!(told_of[0]["bytes"], (kept + 100) * MIB, "{told_of}");
        eventually("all of it on the disk", || page(&program).filter(|page| lies(page).0 == 0));
        told(&program, "resume");
        is_right(&mut program);
        assert_eq!(files(folder.path()), Vec::<PathBuf>::new());
        ends_well(program);
    }
}

#[test]
fn the_end_of_the_process_brings_everything_back_for_its_handlers() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 64");
    program.ask("atexit");
    at_work(&mut program, 2);
    suspend_to(&program, folder.path());
    assert_eq!(program.ask("fork"), "child ended with 7");
    assert!(!files(folder.path()).is_empty(), "a child removes nothing");
    program.tell("exit");
    let (status, _folder) = program.end();
    assert_eq!(status.code(), Some(12), "{status}");

    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");

    // What cannot be read keeps nobody from the end.
    let mut program = suspended("1x1GiB").log().start(None);
    program.ask("keep 64");
    suspend_to(&program, folder.path());
    std::fs::write(data(folder.path()), "").unwrap();
    program.tell("exit");
    let log = program.log();
    let (status, _folder) = program.end();
    assert_eq!(status.code(), Some(5), "{status}");
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains("the program ends without what was put away") && !log.contains("stays suspended"), "{log}");
}

#[test]
fn a_program_that_is_killed_leaves_files_that_the_next_one_removes() {
    let folder = tempfile::tempdir().unwrap();
    for signal in [libc::SIGTERM, libc::SIGKILL] {
        let mut program = suspended("1x1GiB").start(None);
        at_work(&mut program, 1);
        suspend_to(&program, folder.path());
        let entries = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(entries, 1, "that of the one before is gone");
        program.signal(signal);
        let (status, _folder) = program.end();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(signal), "{status}");
    }
    // One that lives keeps its own.
    let mut programs = [0, 1].map(|_| suspended("1x1GiB").start(None));
    for program in &mut programs {
        at_work(program, 1);
        suspend_to(program, folder.path());
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    for mut program in programs {
        told(&program, "resume");
        goes_on(&mut program);
        ends_well(program);
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// It is killed before it has written all, and the command by which it was asked says so.
#[test]
fn a_program_that_is_killed_while_it_goes_to_a_disk_leaves_files_that_the_next_one_removes() {
    let folder = tempfile::tempdir().unwrap();
    let processors = std::thread::available_parallelism().unwrap().get();
    let entries = || std::fs::read_dir(folder.path()).unwrap().count();
    for _ in 0..2 {
        let mut program = suspended("1x1GiB").start(None);
        program.ask("keep 640");
        let mut command = Command::new(artifact_folder().join("gpupool"));
        command.args(["suspend", "--to"]).arg(folder.path()).arg(program.pid().to_string());
        command.env("XDG_RUNTIME_DIR", program.session()).env_remove("LD_PRELOAD").stderr(Stdio::piped());
        let asked = command.spawn().unwrap();
        let writers = eventually("the writing", || held_writers(&program, processors.min(16)));
        eventually("its folder", || (entries() == 1).then_some(()));
        program.signal(libc::SIGKILL);
        drop(writers);
        let (status, _folder) = program.end();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGKILL), "{status}");
        let ended = asked.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(!ended.status.success() && said.lines().count() == 1 && said.contains("it ended before"), "{said}");
        assert_eq!(entries(), 1, "what the one before left is gone, and nobody has removed this one's");
    }
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 64");
    suspend_to(&program, folder.path());
    let own: Vec<_> = std::fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.path()).collect();
    assert_eq!(own.len(), 1, "{own:?}");
    let verified = gpupool(&program, &format!("store verify {}", own[0].display()));
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
    told(&program, "resume");
    assert_eq!(entries(), 0);
    is_right(&mut program);
    ends_well(program);
}

/// In the same files as the pool's, and nothing of it is on the host meanwhile.
#[test]
fn what_the_program_made_itself_goes_to_the_files_as_well_and_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("1x1GiB").start(None);
    assert_eq!(program.ask("make 64"), "made");
    // Also where that is all it has, and where its files are damaged meanwhile.
    let left = suspend_to(&program, folder.path());
    assert_eq!(left["bytes"], 64 * MIB, "{left}");
    // The pool has nothing there, and it is told all the same.
    let is_told = |page: &Snapshot| page.levels.suspended > 0 && own(page, on_disk) == 64 * MIB;
    eventually("a page that says so", || page(&program).filter(is_told));
    let listed = String::from_utf8(gpupool(&program, "ps").stdout).unwrap();
    assert!(listed.contains("disk 64.0 MiB of its own"), "{listed}");
    let stored = data(folder.path());
    let bytes = std::fs::read(&stored).unwrap();
    std::fs::write(&stored, &bytes[..bytes.len() / 2]).unwrap();
    let damaged = told(&program, "resume");
    assert!(damaged["error"].as_str().is_some_and(|why| why.contains("data-")), "{damaged}");
    std::fs::write(&stored, &bytes).unwrap();
    let back = eventually("a resume", || Some(told(&program, "resume")).filter(|back| back["error"].is_null()));
    assert_eq!(back["bytes"], 64 * MIB, "{back}");
    is_right(&mut program);
    assert_eq!(program.ask("handle"), ITS_HANDLE);
    at_work(&mut program, 1);
    for _ in 0..3 {
        let left = suspend_to(&program, folder.path());
        assert!(left["bytes"].as_u64() >= Some((64 + 40) * MIB), "{left}");
        let empty = |page: &Snapshot| page.levels.suspended > 0 && lies(page).2 == 0 && lies(page).0 == 0;
        let page = eventually("empty GPUs", || page(&program).filter(empty));
        assert!(own(&page, |place| place.on_host) == 0 && own(&page, on_disk) >= 64 * MIB, "{page:?}");
        assert!(left["disk_bytes"].as_u64() >= Some((64 + 32) * MIB), "{left}");
        // What a thread at work has of the pool, and not the rest.
        assert!((32 * MIB..64 * MIB).contains(&lies(&page).1), "{page:?}");
        let back = told(&program, "resume");
        assert_eq!((&back["bytes"], &back["stayed_bytes"]), (&left["bytes"], &Value::from(0)));
        goes_on(&mut program);
        is_right(&mut program);
        assert_eq!(program.ask("handle"), ITS_HANDLE);
    }
    assert_eq!(files(folder.path()), Vec::<PathBuf>::new());
    program.ask("drop");
    ends_well(program);
}

/// Of what the program made itself, all is read and written by a GPU that may use it or that is let use it for this.
#[test]
fn what_the_program_made_itself_goes_into_the_files_whoever_may_use_it() {
    let folder = tempfile::tempdir().unwrap();
    for (made, more) in [("make 64", "shut"), ("make 64 1", ""), ("make 64 1", "visit 1"), ("make 64 1", "shut")] {
        let mut program = suspended("2x1GiB").start(None);
        assert_eq!(program.ask(made), "made");
        if !more.is_empty() {
            program.ask(more);
        }
        let what = format!("{made}, {more}");
        for _ in 0..2 {
            let left = suspend_to(&program, folder.path());
            assert_eq!(
                (&left["bytes"], &left["disk_bytes"]),
                (&(64 * MIB).into(), &(64 * MIB).into()),
                "{what}: {left}"
            );
            let empty = |page: &Snapshot| page.levels.suspended > 0 && in_memory(page) == 0;
            let page = eventually("no memory anywhere", || page(&program).filter(empty));
            assert_eq!(own(&page, on_disk), 64 * MIB, "{what}: {page:?}");
            let back = told(&program, "resume");
            assert_eq!((&back["bytes"], &back["stayed_bytes"]), (&(64 * MIB).into(), &0.into()), "{what}: {back}");
            assert_eq!(files(folder.path()), Vec::<PathBuf>::new());
        }
        if more == "shut" {
            assert_eq!(program.ask("open up"), "open");
        }
        is_right(&mut program);
        assert!(program.ask("handle").ends_with(", the same, right"), "{what}");
        program.ask("drop");
        ends_well(program);
    }
}

/// Some of it had no room on its GPU when it was made, and lies on the host.
#[test]
fn what_the_program_made_itself_and_lies_on_the_host_goes_into_the_files_and_comes_back_to_where_it_lay() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("1x1GiB").env("GPUPOOL_LIMIT", "0:32MiB").start(None);
    assert_eq!(program.ask("make 64"), "made");
    let is_split =
        |page: &Snapshot| own(page, |place| place.on_host) == 32 * MIB && own(page, Place::is_gpu) == 32 * MIB;
    let split = |program: &Running| eventually("half of it on the host", || page(program).filter(is_split));
    split(&program);
    for _ in 0..2 {
        let left = suspend_to(&program, folder.path());
        assert_eq!((&left["bytes"], &left["disk_bytes"]), (&(64 * MIB).into(), &(64 * MIB).into()), "{left}");
        eventually("no memory anywhere", || page(&program).filter(|page| in_memory(page) == 0));
        let back = told(&program, "resume");
        assert_eq!((&back["bytes"], &back["stayed_bytes"]), (&(64 * MIB).into(), &0.into()), "{back}");
        split(&program);
        is_right(&mut program);
    }
    assert_eq!(program.ask("handle"), ITS_HANDLE);
    program.ask("drop");
    ends_well(program);
}

/// An arena that no GPU had room for lies on two. The host may have little more than all of it, so what is counted there twice has no room the next time.
#[test]
fn memory_of_its_own_in_parts_goes_into_files_or_to_the_host_part_by_part_and_comes_back_to_where_each_lay() {
    let folder = tempfile::tempdir().unwrap();
    for moves in ["off", "auto"] {
        let run = suspended("2x1GiB").env("GPUPOOL_LIMIT", "0:64MiB").env("GPUPOOL_HOST_LIMIT", "500MiB");
        let mut program = run.env("GPUPOOL_MOVE", moves).start(None);
        program.ask("create 400");
        eventually("memory that is filled", || (program.ask("filled") == "yes").then_some(()));
        let on_gpus = |page: &Snapshot| -> Vec<u64> {
            page.levels.places.rows.iter().filter(|place| place.is_gpu()).map(|place| place.own).collect()
        };
        let all = |page: &Snapshot| (on_gpus(page).iter().sum::<u64>() == 400 * MIB).then(|| on_gpus(page));
        let before = eventually("all of it", || all(&page(&program)?));
        assert!(before.iter().all(|bytes| *bytes > 0), "{before:?}");
        let to_disk = to_folder(folder.path());
        for to in [&to_disk, "suspend --to host", &to_disk, "suspend --to host"] {
            let left = told(&program, to);
            assert_eq!((&left["bytes"], &left["stayed_bytes"]), (&(400 * MIB).into(), &0.into()), "{to}: {left}");
            let gone = eventually("empty GPUs", || page(&program).filter(|page| at(page, false) == 0));
            if to == to_disk {
                assert_eq!((left["disk_bytes"].as_u64(), in_memory(&gone)), (Some(400 * MIB), 0), "{left}");
                assert_eq!(own(&gone, on_disk), 400 * MIB, "{gone:?}");
            } else {
                assert_eq!(own(&gone, |place| place.on_host), 400 * MIB, "{gone:?}");
            }
            let back = told(&program, "resume");
            assert_eq!((&back["bytes"], &back["stayed_bytes"]), (&(400 * MIB).into(), &0.into()), "{to}: {back}");
            assert_eq!(eventually("all of it", || all(&page(&program)?)), before, "{to}");
            assert_eq!(program.ask("created"), "0");
        }
        ends_well(program);
    }
}

#[test]
fn what_cannot_be_read_or_taken_away_of_what_the_program_made_itself_stays_and_is_told_and_the_rest_goes() {
    let folder = tempfile::tempdir().unwrap();
    let run = suspended("2x1GiB").env("SIMCUDA_LINK", "none").log();
    let mut program = run.start(None);
    assert_eq!((program.ask("make 64"), program.ask("lend")), ("made".to_owned(), "lent".to_owned()));
    assert_eq!((program.ask("apart 12 1"), program.ask("unmapped 8")), ("made".to_owned(), "made".to_owned()));
    let left = told(&program, &to_folder(folder.path()));
    assert_eq!((&left["bytes"], &left["disk_bytes"]), (&(60 * MIB).into(), &(60 * MIB).into()), "{left}");
    assert_eq!(left["stayed_bytes"], 24 * MIB, "{left}");
    let mut found = findings(&program);
    found.sort();
    assert_eq!(
        found.iter().map(|found| found.0.as_str()).collect::<Vec<_>>(),
        ["own", "reach", "unmapped"],
        "{found:?}"
    );
    assert!(found[0].1.contains("4.0 MiB stayed on its GPU") && found[0].1.contains("by its pages"), "{found:?}");
    assert!(found[1].1.contains("12.0 MiB stayed on its GPU") && found[1].1.contains("reaches it"), "{found:?}");
    assert_eq!(own(&page(&program).unwrap(), |place| place.on_host), 0, "nor does it go elsewhere");
    told(&program, "resume");
    is_right(&mut program);
    assert_eq!(program.ask("handle"), ITS_HANDLE);
    program.ask("released");
    program.ask("drop");
    ends_well(program);
}

#[test]
fn what_the_program_made_itself_is_as_it_was_where_it_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("to");
    let mut program = suspended("1x1GiB").start(None);
    assert_eq!((program.ask("make 64"), program.ask("shut")), ("made".to_owned(), "shut".to_owned()));
    let pid = program.pid() as i32;
    let limit = |bytes| {
        let most = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: the pointer is to a local, and NULL asks for no answer.
        let set = unsafe { libc::prlimit(pid, libc::RLIMIT_FSIZE, &raw const most, std::ptr::null_mut()) };
        assert_eq!(set, 0);
    };
    // As long as no file may become longer than that, as on a disk that is full.
    limit(4 * MIB);
    let why = refused(&program, &to_folder(&to));
    assert!(why.contains(to.to_str().unwrap()) && why.contains("cannot write") && why.lines().count() == 1, "{why}");
    assert_eq!(files(&to), Vec::<PathBuf>::new(), "nothing is left of it");
    eventually("all of it on its GPU", || page(&program).filter(|page| own(page, Place::is_gpu) == 64 * MIB));
    limit(libc::RLIM_INFINITY);
    assert_eq!(suspend_to(&program, &to)["disk_bytes"], 64 * MIB);
    // And where the folder is gone for a while.
    let moved = folder.path().join("elsewhere");
    std::fs::rename(&to, &moved).unwrap();
    let why = refused(&program, "resume");
    assert!(why.contains(to.to_str().unwrap()) && why.lines().count() == 1, "{why}");
    std::fs::rename(&moved, &to).unwrap();
    assert_eq!(told(&program, "resume")["stayed_bytes"], 0);
    assert_eq!(program.ask("open up"), "open");
    is_right(&mut program);
    assert_eq!(program.ask("handle"), ITS_HANDLE);
    assert_eq!(files(folder.path()), Vec::<PathBuf>::new());
    program.ask("drop");
    ends_well(program);
}

#[test]
fn what_the_program_made_itself_goes_to_a_disk_once_no_gpu_is_used_for_long() {
    let folder = tempfile::tempdir().unwrap();
    let setting = format!("1s:{}", folder.path().display());
    let mut program = suspended("1x1GiB").env("GPUPOOL_IDLE_SUSPEND", &setting).start(None);
    assert_eq!(program.ask("make 64"), "made");
    for _ in 0..2 {
        let is_on_disk = |page: &Snapshot| in_memory(page) == 0 && own(page, on_disk) == 64 * MIB;
        eventually("no memory anywhere", || page(&program).filter(is_on_disk));
        is_right(&mut program);
    }
    assert_eq!(program.ask("handle"), ITS_HANDLE);
    program.ask("drop");
    ends_well(program);
}

#[test]
fn what_the_program_made_itself_is_back_from_the_disk_before_its_last_context_or_its_process_ends() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("1x1GiB").start(None);
    assert_eq!(program.ask("make 64"), "made");
    suspend_to(&program, folder.path());
    waits_to_destroy(&mut program);
    assert_eq!(told(&program, "resume")["bytes"].as_u64(), Some(64 * MIB));
    eventually("its end", || (program.ask("destroyed") == "yes").then_some(()));
    program.ask("end");

    let mut program = suspended("1x1GiB").start(None);
    assert_eq!((program.ask("make 64"), program.ask("atexit")), ("made".to_owned(), "registered".to_owned()));
    suspend_to(&program, folder.path());
    assert_eq!(program.ask("fork"), "child ended with 7");
    program.tell("exit");
    let (status, _folder) = program.end();
    assert_eq!(status.code(), Some(12), "{status}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
}

/// What removes them ends with it.
#[test]
fn a_program_that_is_resumed_by_a_signal_and_ends_at_once_leaves_no_files() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        let mut program = suspended("1x1GiB").start(None);
        program.ask("keep 256");
        at_work(&mut program, 1);
        suspend_to(&program, folder.path());
        assert!(!files(folder.path()).is_empty());
        program.ask("quit");
        program.tell("signal");
        let (status, _kept) = program.ends();
        assert_eq!(status.code(), Some(4), "{status}");
        let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.path()).collect();
        assert_eq!(left, Vec::<PathBuf>::new());
    }
}

#[test]
fn a_misspelt_word_makes_no_folder_and_the_answer_names_the_one_that_was_meant() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 8");
    let ended = gpupool(&program, &format!("suspend --to hosts {}", program.pid()));
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(!ended.status.success() && said.contains("neither any, peers nor host"), "{said}");
    assert!(said.contains("./hosts"), "{said}");
    let ended = gpupool(&program, &format!("{} {}", to_folder(folder.path()), program.pid()));
    let said = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert!(said.contains(&format!("left the GPUs for {}", folder.path().display())), "{said}");
    // Its own folder in there nobody is told of, but by whoever is asked for the one around it.
    let ended = gpupool(&program, &format!("store list {}", folder.path().display()));
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(said.contains(&format!("{}/suspended-", folder.path().display())), "{said}");
    told(&program, "resume");
    is_right(&mut program);
    ends_well(program);
}

#[test]
fn a_command_that_is_killed_leaves_a_program_that_works_or_is_suspended() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 256");
    at_work(&mut program, 1);
    let pid = program.pid().to_string();
    for round in 0..6 {
        let mut command = Command::new(artifact_folder().join("gpupool"));
        command.args(["suspend", "--to"]).arg(folder.path()).arg(&pid).env("XDG_RUNTIME_DIR", program.session());
        let mut child = command.env_remove("LD_PRELOAD").stderr(Stdio::null()).spawn().unwrap();
        // From before it is heard to in the middle of writing.
        if round % 2 == 1 {
            eventually("a beginning", || {
                (!files(folder.path()).is_empty() || child.try_wait().unwrap().is_some()).then_some(())
            });
        }
        child.kill().unwrap();
        child.wait().unwrap();
        eventually("a program that can be asked", || {
            let ended = gpupool(&program, &format!("resume {pid}"));
            let text = String::from_utf8_lossy(&ended.stderr).into_owned();
            (ended.status.success() || text.contains("is not suspended")).then_some(())
        });
        eventually("a clean folder", || files(folder.path()).is_empty().then_some(()));
        goes_on(&mut program);
    }
    is_right(&mut program);
    ends_well(program);
}

#[test]
fn a_program_that_uses_no_gpu_for_long_goes_to_a_disk_and_is_resumed_by_its_next_call() {
    let folder = tempfile::tempdir().unwrap();
    let setting = format!("1s:{}", folder.path().display());
    let mut program = suspended("1x1GiB").env("GPUPOOL_IDLE_SUSPEND", &setting).start(None);
    program.ask("keep 64");
    for _ in 0..2 {
        let dormant = |page: &Snapshot| page.levels.suspended > 0 && lies(page).0 == 0 && lies(page).1 >= 64 * MIB;
        eventually("an empty GPU", || page(&program).filter(dormant));
        is_right(&mut program);
    }
    // Where it cannot be read, whoever waits does so until it can.
    // Before it has its name, it is not whole, and its files move with it.
    let is_named = |path: &Path| {
        path.parent().and_then(Path::file_name).is_some_and(|name| name.to_string_lossy().starts_with("gen-"))
    };
    let is_whole = || files(folder.path()).iter().any(|path| path.ends_with("manifest") && is_named(path));
    // What was stored the last time is removed once the program goes on.
    eventually("an empty folder", || files(folder.path()).is_empty().then_some(()));
    eventually("all of it stored again", || is_whole().then_some(()));
    let data = data(folder.path());
    let whole = std::fs::read(&data).unwrap();
    std::fs::write(&data, &whole[1..]).unwrap();
    program.ask("check");
    assert!(refused(&program, "resume").contains("damaged"));
    assert_eq!(program.ask("checked"), "-1");
    std::fs::write(&data, &whole).unwrap();
    eventually("a look at it", || (program.ask("checked") == "0").then_some(()));
    ends_well(program);
}

/// Calls of the driver that the way out and the way back are made of, and that the program makes none of meanwhile; each with how many a round
/// has.
const CALLS: [(&str, u32); 14] = [
    ("cuMemCreate", 1),
    ("cuMemMap", 2),
    ("cuMemSetAccess", 2),
    ("cuMemUnmap", 2),
    ("cuMemRelease", 1),
    ("cuMemAddressReserve", 1),
    ("cuMemAddressFree", 1),
    ("cuMemcpyDtoHAsync_v2", 5),
    ("cuMemcpyHtoDAsync_v2", 3),
    ("cuMemHostAlloc", 2),
    ("cuMemFreeHost", 2),
    ("cuStreamCreate", 4),
    ("cuStreamSynchronize", 12),
    ("cuStreamDestroy_v2", 4),
];

/// Each call fails once in about eight rounds, each time at another place in them.
#[test]
fn a_call_of_the_driver_that_fails_on_the_way_there_or_back_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let of = |(at, (call, round)): (u32, (&str, u32))| -> Vec<String> {
        let code = [2, 999, 1][at as usize % 3];
        (0..4).map(|time| format!("{call}:{}={code}", 3 + (at % 8 + time * 8) * round + time)).collect()
    };
    let faults: Vec<String> = (0..).zip(CALLS).flat_map(of).collect();
    let mut program = suspended("1x1GiB").env("SIMCUDA_FAULT", faults.join(",")).start(None);
    program.ask("keep 40");
    let (mut refused, mut stuck) = (0, 0);
    for _ in 0..30 {
        let left = told(&program, &to_folder(folder.path()));
        if left["error"].is_null() {
            // Once more for each failure in a row, of which there are few.
            let back = (0..8).map(|_| told(&program, "resume")).find(|back| {
                stuck += u32::from(!back["error"].is_null());
                back["error"].is_null()
            });
            assert!(back.is_some(), "it does not come back");
        } else {
            refused += 1;
        }
        is_right(&mut program);
        assert_eq!(files(folder.path()), Vec::<PathBuf>::new());
    }
    assert!(refused > 3 && stuck > 3, "{refused} refused, {stuck} failed to come back");
    program.ask("drop");
    ends_well(program);
}

#[test]
fn a_folder_that_cannot_be_used_for_an_idle_program_is_told_of() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    // An image's own folder, which goes with the image.
    let image = folder.path().join("gen-000003");
    std::fs::create_dir(&image).unwrap();
    std::fs::write(image.join("manifest"), "gpupool-store 2\n").unwrap();
    for to in [file, image] {
        let setting = format!("1s:{}", to.display());
        let mut program = suspended("1x1GiB").env("GPUPOOL_IDLE_SUSPEND", &setting).log().start(None);
        program.ask("keep 8");
        let log = eventually("a warning", || {
            let log = std::fs::read_to_string(program.log()).ok()?;
            log.contains("GPUPOOL_IDLE_SUSPEND: the program is not suspended").then_some(log)
        });
        assert!(log.contains(to.to_str().unwrap()), "{log}");
        is_right(&mut program);
        ends_well(program);
    }
}

#[test]
fn an_images_own_folder_is_refused_before_anything_is_stopped() {
    let around = tempfile::tempdir().unwrap();
    let images = around.path().join("images");
    let mut program = suspended("1x1GiB").start(None);
    at_work(&mut program, 1);
    let image = gpupool(&program, &format!("checkpoint {} {}", program.pid(), images.display()));
    assert!(image.status.success(), "{image:?}");
    let ended = gpupool(&program, &format!("{}/gen-000001 {}", to_folder(&images), program.pid()));
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    let expected = format!("name the folder around it, {}", images.display());
    assert!(ended.status.code() == Some(2) && said.contains("it is one image") && said.contains(&expected), "{said}");
    goes_on(&mut program);
    // Beside images each has a folder of its own.
    suspend_to(&program, &images);
    told(&program, "resume");
    goes_on(&mut program);
    ends_well(program);
}

/// Another program has taken the GPU meanwhile.
#[test]
fn what_has_room_nowhere_stays_on_the_disk_until_there_is_some() {
    let folder = tempfile::tempdir().unwrap();
    let machine = folder.path().join("machine");
    let run = suspended("1x1GiB").env("SIMCUDA_MACHINE", &machine);
    let mut program = run.env("GPUPOOL_HOST_LIMIT", "0").start(None);
    program.ask("keep 600");
    let to = folder.path().join("to");
    suspend_to(&program, &to);
    let mut other = Run::program("suspended").sim("1x1GiB").env("SIMCUDA_MACHINE", &machine).start(None);
    assert_eq!(other.ask("keep 700"), "kept");
    let why = refused(&program, "resume");
    assert!(why.contains("of it found no room on gpu0"), "{why}");
    assert!(!files(&to).is_empty());
    program.ask("check");
    assert_eq!(other.ask("drop"), "freed");
    assert_eq!(told(&program, "resume")["stayed_bytes"], 0);
    eventually("a look at it", || (program.ask("checked") == "0").then_some(()));
    assert_eq!(files(&to), Vec::<PathBuf>::new());
    ends_well(program);
}
