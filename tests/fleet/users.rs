//! Who is none of ours: programs of another user, and those on another machine whose pages lie in the same folder.

use super::setup::{asked, gave, held, is_whole, takes};
use super::{EACH, MIB, Machine, at_work, ends_well};
use harness::{artifact_folder, eventually, goes_on, page_of};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;

/// Nobody, on most systems.
pub(super) const OTHER: u32 = 65534;

/// Whether a test can be another user, who can read what was built.
pub(super) fn can_become_another() -> bool {
    // SAFETY: the call has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        println!("only root can become another user: not checked");
        return false;
    }
    let is_closed = |folder: &&Path| folder.metadata().is_ok_and(|folder| folder.mode() & 0o001 == 0);
    if let Some(folder) = artifact_folder().ancestors().find(is_closed) {
        println!("{} is closed to other users: not checked", folder.display());
        return false;
    }
    true
}

impl Machine {
    /// A machine that programs of all users are on.
    fn of_all_users(gpus: &'static str) -> Self {
        let machine = Self::new(gpus);
        let allow = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        allow(machine.folder.path(), 0o711);
        let file = machine.folder.path().join("machine");
        std::fs::write(&file, "").unwrap();
        allow(&file, 0o666);
        machine
    }
}

/// Root sees that it has the library, and all the same it can neither ask nor be asked.
#[test]
fn a_program_of_another_user_is_given_what_is_borrowed_on_its_gpu_and_nothing_else() {
    if !can_become_another() {
        return;
    }
    let machine = Machine::of_all_users("2x320MiB");
    let mut debtor = machine.debtor(240);
    let mut other = machine.neighbour(1, 50).user(OTHER).start(None);
    assert_eq!(other.ask("check"), "0", "it has begun");
    machine.until(&debtor, "an empty GPU 1", |page| held(page, 1) == 0);
    takes(&mut other, 280);
    let theirs =
        eventually("their page", || page_of(&other.session(), other.pid()).filter(|page| held(page, 1) >= 280 * MIB));
    assert_eq!((theirs.levels.residence.on_host, debtor.ask("check")), (0, "0".to_owned()));

    // What somebody has on their own GPU is nobody's but theirs, however much another user's program matters.
    let low = machine.holder(machine.neighbour(0, 1), 240);
    let mut high = machine.neighbour(0, 100).user(OTHER).start(None);
    takes(&mut high, 120);
    eventually("their page", || {
        page_of(&high.session(), high.pid()).filter(|page| page.levels.residence.on_host >= 40 * MIB)
    });
    assert_eq!(held(&machine.page(&low), 0), 240 * MIB);

    let questions = asked(&is_whole(high));
    assert!(questions.iter().all(|(_, freed)| *freed == 0), "{questions:?}");
    assert_eq!(gave(&is_whole(low)), 0);
    assert!(gave(&is_whole(debtor)) >= 236 * MIB);
    is_whole(other);
}

/// By its own session's folder, where the other one's page is not, and by the other one's, which is closed to it.
#[test]
fn a_command_of_another_user_changes_nothing() {
    if !can_become_another() {
        return;
    }
    let machine = Machine::of_all_users("2x1GiB");
    let mut program = machine.borrower();
    let before = machine.page(&program);
    let pid = program.pid();
    let theirs = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(theirs.path(), Some(OTHER), Some(OTHER)).unwrap();
    for session in [theirs.path(), machine.folder.path()] {
        for arguments in [
            format!("suspend {pid}"),
            format!("set {pid} priority=1"),
            format!("checkpoint {pid} {}", theirs.path().display()),
        ] {
            let mut command = machine.command(&arguments);
            let ended = command.env("XDG_RUNTIME_DIR", session).uid(OTHER).gid(OTHER).output().unwrap();
            assert!(!ended.status.success() && !ended.stderr.is_empty(), "{arguments}: {ended:?}");
        }
        let mut command = machine.command("drain 1");
        let _ = command.env("XDG_RUNTIME_DIR", session).uid(OTHER).gid(OTHER).output().unwrap();
    }
    goes_on(&mut program);
    let after = machine.page(&program);
    assert_eq!((after.levels.suspended, after.levels.priority), (0, before.levels.priority), "{after:?}");
    assert!(held(&after, 1) >= EACH / 2, "{after:?}");
    ends_well(program);
}

/// Who is not root is told so, and not that it has come to nothing.
#[test]
fn what_root_has_drained_for_the_whole_machine_only_root_ends() {
    if !can_become_another() {
        return;
    }
    let machine = Machine::of_all_users("2x1GiB");
    let theirs = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(theirs.path(), Some(OTHER), Some(OTHER)).unwrap();
    let by_them = |arguments: &str| {
        let mut command = machine.command(arguments);
        let ended = command.env("XDG_RUNTIME_DIR", theirs.path()).uid(OTHER).gid(OTHER).output().unwrap();
        let text = [ended.stdout, ended.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
        (ended.status.success(), text)
    };
    // Where a session's folder was set by hand, root speaks for that session alone.
    let by_root = |arguments: &str| {
        let ended = machine.command(arguments).env_remove("XDG_RUNTIME_DIR").output().unwrap();
        assert!(ended.status.success(), "{arguments}: {ended:?}");
    };
    by_root("drain 1");
    let (done, text) = by_them("drain 1");
    let ends = "root has drained it for the whole machine, and gpupool undrain 1 by root ends that";
    assert!(done && text.contains(ends), "{text}");
    let (done, text) = by_them("undrain 1");
    assert!(
        !done && text.contains("the GPU is drained by root for the whole machine (/run/gpupool.drained/"),
        "{text}"
    );
    assert!(text.contains("gpupool undrain 1 by root ends that"), "{text}");
    by_root("undrain 1");
    let (done, text) = by_them("undrain 1");
    assert!(done && text.contains("was not drained"), "what they had said themselves they have unsaid: {text}");
    let (done, text) = by_them("drain 1");
    assert!(done && text.contains("gpupool undrain 1 ends that") && !text.contains("root"), "{text}");
    assert!(by_them("undrain 1").0);
}

/// As two `gpupool sim` of one user, which have one folder of pages.
#[test]
fn what_is_said_of_a_gpu_concerns_no_other_machines() {
    let [machine, other] = [Machine::new("2x1GiB"), Machine::new("2x1GiB")];
    let mut here = machine.borrower();
    let mut there = other.run().env("GPUPOOL_LIMIT", "0:4MiB").start(Some(machine.folder.path()));
    at_work(&mut there, 1);
    machine.until(&there, "memory on GPU 1", |page| held(page, 1) >= EACH / 2);
    let (told, all) = machine.told("drain --json 1");
    let pids: Vec<_> = told.as_array().unwrap().iter().map(|row| row["pid"].as_u64().unwrap()).collect();
    assert!(all && pids == [u64::from(here.pid())], "{told}");
    machine.until(&here, "an empty GPU 1", |page| held(page, 1) == 0);
    goes_on(&mut there);
    let page = machine.page(&there);
    assert!(held(&page, 1) >= EACH / 2 && !super::at(&page, 1).drained, "{page:?}");
    goes_on(&mut here);
    ends_well(here);
    ends_well(there);
}
