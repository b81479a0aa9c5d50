//! Folders and files of pages, in folders of the tests.

#![cfg(not(any(loom, miri)))]
#![allow(clippy::unwrap_used, reason = "tests panic")]

use gpupool_metrics::drains;
use gpupool_metrics::folder::{Folder, Roots, Why};
use gpupool_metrics::{BYTES, Counter, Identity, Levels, Map, Page, Process, Table, Unreadable, read};
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// A machine's folders in one of the test's.
struct Machine {
    folder: TempDir,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["session", "run", "tmp", "users"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        Self { folder }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    fn roots(&self) -> Roots {
        Roots {
            session: Some(self.path("session")),
            run: self.path("run"),
            temporary: self.path("tmp"),
            sessions: self.path("users"),
        }
    }
}

fn process(identity: Identity) -> Process {
    Process {
        identity,
        rank: None,
        world: None,
        job_rank: None,
        job_world: None,
        created: 0,
        library: "0.1.0".to_owned(),
        name: "python".to_owned(),
        command: "python train.py".to_owned(),
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

fn names(folder: &Folder) -> Vec<String> {
    let mut names: Vec<String> = folder.pages().into_iter().map(|entry| entry.name).collect();
    names.sort();
    names
}

#[test]
fn the_sessions_folder_comes_first_and_is_the_users_alone() {
    let machine = Machine::new();
    let (folder, refused) = Folder::own(&machine.roots()).unwrap();
    assert_eq!(folder.path(), machine.path("session/gpupool"));
    assert_eq!((mode(folder.path()), refused.len()), (0o700, 0));
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    let (folder, _) = Folder::own(&machine.roots()).unwrap();
    assert_eq!(mode(folder.path()), 0o700, "nobody else reads it");
}

#[test]
fn without_a_session_it_is_the_systems_folder_and_then_the_temporary_one() {
    let machine = Machine::new();
    let roots = Roots { session: None, ..machine.roots() };
    assert_eq!(Folder::own(&roots).unwrap().0.path(), machine.path("run/gpupool"));
    let roots = Roots { run: machine.path("absent"), session: Some(machine.path("none")), ..roots };
    let (folder, refused) = Folder::own(&roots).unwrap();
    assert!(folder.path().starts_with(machine.path("tmp")), "{:?}", folder.path());
    assert!(refused.iter().all(|refused| !refused.why.is_suspicious()), "{refused:?}");
    let roots = Roots { temporary: machine.path("neither"), ..roots };
    assert_eq!(Folder::own(&roots).unwrap_err().len(), 3);
}

#[test]
fn a_folder_that_others_made_or_may_change_is_refused() {
    let machine = Machine::new();
    let path = machine.path("session/gpupool");
    let refused = || {
        let (folder, mut refused) = Folder::own(&machine.roots()).unwrap();
        assert_eq!(folder.path(), machine.path("run/gpupool"));
        let refused = refused.remove(0);
        assert_eq!(refused.path, path);
        assert!(refused.to_string().starts_with(&format!("{}: ", path.display())), "{refused}");
        refused.why
    };
    symlink(machine.path("tmp"), &path).unwrap();
    assert!(matches!(refused(), Why::NoFolder));
    fs::remove_file(&path).unwrap();
    fs::write(&path, "").unwrap();
    assert!(matches!(refused(), Why::NoFolder));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
    assert!(matches!(refused(), Why::Writable(_)));
    fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
    if chown(&path, Some(65534), None).is_ok() {
        assert!(matches!(refused(), Why::OwnedBy(65534)));
        chown(&path, Some(0), None).unwrap();
    }
    fs::set_permissions(machine.path("session"), Permissions::from_mode(0o777)).unwrap();
    assert!(matches!(refused(), Why::Around(_)));
    fs::set_permissions(machine.path("session"), Permissions::from_mode(0o1777)).unwrap();
    assert_eq!(Folder::own(&machine.roots()).unwrap().0.path(), path, "in a folder like /tmp, what is ours stays ours");
}

#[test]
fn pages_of_processes_that_are_gone_are_removed_and_no_others() {
    let machine = Machine::new();
    let (folder, _) = Folder::own(&machine.roots()).unwrap();
    let own = Identity::own().unwrap();
    let gone = [
        Identity { started: own.started + 2, ..own },
        Identity { pid: i32::MAX as u32, ..own },
        Identity { boot: [9; 16], started: 3, ..own },
    ];
    for identity in [own].iter().chain(&gone) {
        Map::create(&folder, &process(*identity)).unwrap();
    }
    // Of nobody that is known, and none of ours.
    for name in ["1-2.page", "notes.txt", "x-y.page", &format!(".{}-{}.page.new", own.pid, own.started)] {
        fs::write(folder.path().join(name), "").unwrap();
    }
    assert_eq!(folder.clean(), 3);
    let mut expected = vec!["1-2.page".to_owned(), format!("{}-{}.page", own.pid, own.started)];
    expected.sort();
    assert_eq!(names(&folder), expected);
    assert_eq!(folder.clean(), 0);
}

/// As of a container, of which the machine knows whether anybody is left in it, and another container does not.
#[test]
fn a_page_of_another_pid_namespace_is_removed_once_nobody_is_left_there() {
    let machine = Machine::new();
    let (folder, _) = Folder::own(&machine.roots()).unwrap();
    let own = Identity::own().unwrap();
    let mut contained = Command::new("unshare");
    contained.args(["--pid", "--fork", "--kill-child", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut contained = contained.spawn().unwrap();
    // It is there once it answers.
    let answers = contained.stdin.as_mut().unwrap().write_all(b"a").is_ok()
        && contained.stdout.as_mut().unwrap().read_exact(&mut [0]).is_ok();
    if !answers || own.namespace != 0xEFFF_FFFC {
        drop(contained.stdin.take());
        contained.wait().unwrap();
        println!("only root of the whole machine makes a PID namespace and sees all: not checked");
        return;
    }
    let namespace = fs::metadata(format!("/proc/{}/ns/pid_for_children", contained.id())).unwrap().ino();
    assert_ne!(namespace, own.namespace);
    Map::create(&folder, &process(Identity { namespace, pid: 1, ..own })).unwrap();
    assert_eq!((folder.clean(), names(&folder).len()), (0, 1));
    drop(contained.stdin.take());
    assert!(contained.wait().unwrap().success());
    assert_eq!((folder.clean(), names(&folder).len()), (1, 0));
}

#[test]
fn a_page_is_written_through_its_file() {
    let machine = Machine::new();
    let (folder, _) = Folder::own(&machine.roots()).unwrap();
    let own = process(Identity::own().unwrap());
    let (mut page, path) = Map::create(&folder, &own).unwrap();
    assert_eq!((mode(&path), fs::metadata(&path).unwrap().len()), (0o600, BYTES as u64));
    let levels = Levels { updated: 5, live_bytes: 1 << 40, mode: "pool".to_owned(), ..Levels::default() };
    assert!(page.levels(&levels));
    let (folders, _) = Folder::all(&machine.roots());
    let [folder] = &folders[..] else { panic!("{folders:?}") };
    let [entry] = &folder.pages()[..] else { panic!("{:?}", folder.pages()) };
    let told = read(&folder.page(entry).unwrap()).unwrap();
    assert_eq!((told.levels, told.process), (levels, own.clone()));
    // The program that this process becomes makes a page of the same name.
    let after = process(Identity { image: 16, ..own.identity });
    Map::create(folder, &after).unwrap();
    assert_eq!(names(folder).len(), 1);
    assert_eq!(read(&folder.page(entry).unwrap()).unwrap().process.identity.image, 16);
}

/// A process that was stored and brought back (CRIU) has started at another time, and what it has written is that of one that is gone.
#[test]
fn a_process_that_has_become_another_one_is_found_by_a_page_at_the_same_address() {
    let machine = Machine::new();
    let (folder, _) = Folder::own(&machine.roots()).unwrap();
    let now = Identity::own().unwrap();
    let before = Identity { started: now.started - 100, ..now };
    let (page, old) = Map::create(&folder, &process(before)).unwrap();
    let map = *page.memory();
    let file = |path: &Path| read(&OwnedFd::from(fs::File::open(path).unwrap())).unwrap();
    let told = |path: &Path| file(path).process.identity;
    assert!(told(&old).life().is_over());
    let (mut again, new) = map.create_again(&folder, &process(now)).unwrap();
    assert_eq!(
        (told(&new), read(&map).unwrap().process.identity),
        (now, now),
        "who has the old mapping has the new file"
    );
    again.levels(&Levels { suspended: 7, ..Levels::default() });
    assert_eq!(read(&map).unwrap().levels.suspended, 7);
    assert_eq!(file(&new).levels.suspended, 7);
    // The old file is whoever's it was, and is removed by whoever clears up.
    assert_eq!(told(&old), before);
    fs::remove_file(&new).unwrap();
    assert!(map.create_again(&folder, &process(now)).is_ok(), "also where it is gone");
}

#[test]
fn a_file_that_somebody_cuts_is_noticed_by_both_sides() {
    let machine = Machine::new();
    let (folder, _) = Folder::own(&machine.roots()).unwrap();
    let (mut page, path) = Map::create(&folder, &process(Identity::own().unwrap())).unwrap();
    let cut = |bytes| fs::File::options().write(true).open(&path).unwrap().set_len(bytes).unwrap();
    assert!(page.levels(&Levels::default()) && page.findings(&Table::default()));
    cut(4096);
    assert!(page.set(Counter::Trims, 1) && !page.findings(&Table::default()));
    let error = read(&folder.page(&folder.pages()[0]).unwrap()).unwrap_err();
    assert!(matches!(error, Unreadable::File(_)), "{error}");
    assert_eq!(error.to_string(), "it is shorter than 65536 bytes");
    cut(0);
    assert!(!page.set(Counter::Trims, 2) && !page.levels(&Levels::default()) && !Page::end(page.memory()));
}

#[test]
fn what_is_no_file_is_not_waited_for() {
    let machine = Machine::new();
    let (folder, _) = Folder::own(&machine.roots()).unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["1-2.page", "1-3.page", "1-4.page"] {
        fs::write(at(name), "no page").unwrap();
    }
    let entries = folder.pages();
    assert_eq!(names(&folder), ["1-2.page", "1-3.page", "1-4.page"]);
    entries.iter().for_each(|entry| fs::remove_file(at(&entry.name)).unwrap());
    assert!(std::process::Command::new("mkfifo").arg(at("1-2.page")).status().unwrap().success());
    symlink("/proc/self/stat", at("1-3.page")).unwrap();
    fs::create_dir(at("1-4.page")).unwrap();
    // Nor are they listed: whoever may write there could have everybody who asks complain of them.
    assert!(names(&folder).is_empty(), "{:?}", names(&folder));
    for entry in entries {
        assert!(folder.page(&entry).is_err(), "{entry:?}");
    }
}

#[test]
fn root_sees_the_pages_of_all_users() {
    let machine = Machine::new();
    let (session, temporary) = (machine.path("users/65534/gpupool"), machine.path("tmp/gpupool-65533"));
    fs::set_permissions(machine.path("tmp"), Permissions::from_mode(0o1777)).unwrap();
    for (path, user) in [(&session, 65534), (&temporary, 65533)] {
        fs::create_dir_all(path).unwrap();
        if chown(path, Some(user), None).is_err() {
            println!("only root can make others' folders: not checked");
            return;
        }
    }
    chown(machine.path("users/65534"), Some(65534), None).unwrap();
    // One that somebody made in another's name.
    fs::create_dir(machine.path("tmp/gpupool-65531")).unwrap();
    chown(machine.path("tmp/gpupool-65531"), Some(65533), None).unwrap();
    // Those of other commands begin alike.
    fs::create_dir(machine.path("tmp/gpupool-log-0Vj4og")).unwrap();
    let (folders, _) = Folder::all(&machine.roots());
    let mut owners: Vec<_> = folders.iter().map(|folder| (folder.path().to_owned(), folder.owner())).collect();
    owners.sort();
    let taken = (machine.path("tmp/gpupool-65531"), 65533);
    assert_eq!(owners, [taken, (temporary, 65533), (session, 65534)], "each is its owner's, whatever it is called");
    assert_eq!(folders.iter().map(Folder::clean).sum::<usize>(), 0, "others' folders are theirs to clean");
}

#[test]
fn a_mask_that_takes_everything_shuts_nobody_out() {
    let machine = Machine::new();
    fs::set_permissions(machine.path("tmp"), Permissions::from_mode(0o1777)).unwrap();
    fs::set_permissions(machine.path(""), Permissions::from_mode(0o755)).unwrap();
    let roots = Roots { session: None, run: machine.path("none"), ..machine.roots() };
    // Mask and user of this thread alone: what the C library does would change them for all.
    let found = std::thread::spawn(move || {
        const USER: libc::c_long = 65534;
        // SAFETY: the call takes a flag, and makes folder and mask of this thread its own.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_FS) }, 0);
        // SAFETY: neither call has a precondition. Who is not root stays who he is.
        unsafe {
            libc::umask(0o777);
            libc::syscall(libc::SYS_setresuid, USER, USER, USER);
        }
        Folder::own(&roots).map(|(folder, _)| (folder.path().to_owned(), folder.pages()))
    });
    let (path, pages) = found.join().unwrap().unwrap();
    assert_eq!((mode(&path), pages), (0o700, Vec::new()));
}

#[test]
fn a_gpu_is_drained_where_its_owner_or_root_says_so_and_until_it_is_unsaid() {
    let machine = Machine::new();
    let (roots, gpus) = (machine.roots(), [[1; 16], [2; 16], [3; 16]]);
    let among = || drains::among(&gpus, &roots, None);
    assert_eq!(among(), [[0; 16]; 0]);
    assert!(!machine.path("session/gpupool").exists(), "who only looks makes nothing");
    let drains::Said { folders: told, refused, is_news } = drains::say(&gpus[1], true, &roots);
    assert!(is_news);
    assert!(told == [machine.path("session/gpupool")] && refused.is_empty(), "{told:?} {refused:?}");
    assert_eq!(among(), [gpus[1]]);
    let again = drains::say(&gpus[1], true, &roots);
    assert!(again.refused.is_empty() && !again.is_news, "it is so already");
    // What is no file says nothing, and is not written to.
    let name =
        |gpu: u8| format!("GPU-{0}{0}{0}{0}-{0}{0}-{0}{0}-{0}{0}-{0}{0}{0}{0}{0}{0}.drained", format!("{gpu:02x}"));
    let outside = machine.path("outside");
    symlink(&outside, machine.path("session/gpupool").join(name(1))).unwrap();
    fs::create_dir(machine.path("session/gpupool").join(name(3))).unwrap();
    assert_eq!(among(), [gpus[1]]);
    assert_eq!(drains::say(&gpus[0], true, &roots).refused.len(), 1);
    assert!(!outside.exists());
    // A session that somebody made by hand is none of the machine's.
    let others = ["run/gpupool.drained", "run/gpupool", "tmp/gpupool-0"].map(|name| machine.path(name).exists());
    assert_eq!(others, [false; 3]);
    // A page may lie in a folder that is none of those today.
    let elsewhere = Roots { session: Some(machine.path("users")), ..machine.roots() };
    let folder = Folder::own(&elsewhere).unwrap().0;
    fs::write(folder.path().join(name(1)), "").unwrap();
    assert_eq!(drains::among(&gpus, &roots, Some(folder.path())), [gpus[0], gpus[1]]);
    assert!(drains::say(&gpus[1], false, &roots).is_news);
    let again = drains::say(&gpus[1], false, &roots);
    assert!(again.refused.is_empty() && !again.is_news, "it is so already");
    assert_eq!(among(), [[0; 16]; 0]);
}

#[test]
fn what_root_says_in_the_folder_of_the_machine_counts_for_everybody_and_what_others_put_there_does_not() {
    let machine = Machine::new();
    let (roots, gpu) = (Roots { session: None, ..machine.roots() }, [7; 16]);
    let refused = drains::say(&gpu, true, &roots).refused;
    assert!(refused.is_empty(), "{refused:?}");
    assert_eq!(drains::among(&[gpu], &roots, None), [gpu]);
    let folder = machine.path("run/gpupool.drained");
    if !folder.exists() {
        println!("only root speaks for the machine: not checked");
        return;
    }
    assert_eq!(mode(&folder), 0o755);
    // Said by the machine's folder alone.
    fs::remove_dir_all(machine.path("run/gpupool")).unwrap();
    assert_eq!(drains::among(&[gpu], &machine.roots(), None), [gpu]);
    assert_eq!(drains::still_said(&gpu, &roots).map(|path| path.starts_with(&folder)), Some(true));
    fs::set_permissions(&folder, Permissions::from_mode(0o777)).unwrap();
    assert_eq!(drains::among(&[gpu], &roots, None), [[0; 16]; 0], "anybody could have put it there");
    fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
    chown(&folder, Some(65534), None).unwrap();
    assert_eq!(drains::among(&[gpu], &roots, None), [[0; 16]; 0], "another user's");
    chown(&folder, Some(0), None).unwrap();
    assert!(drains::say(&gpu, false, &roots).refused.is_empty());
    assert_eq!((drains::among(&[gpu], &roots, None), drains::still_said(&gpu, &roots)), (Vec::new(), None));
}

/// As of a login session that has ended: pages and marks lie in the same folder, wherever that is.
#[test]
fn a_gpu_is_drained_where_the_pages_lie_also_if_the_session_has_no_folder_for_them() {
    let machine = Machine::new();
    let gpu = [7; 16];
    let file = machine.path("file");
    fs::write(&file, "").unwrap();
    for session in [machine.path("none"), file] {
        let roots = Roots { session: Some(session), run: machine.path("absent"), ..machine.roots() };
        let page = Folder::own(&roots).unwrap().0.path().to_owned();
        let drains::Said { folders, is_news, .. } = drains::say(&gpu, true, &roots);
        assert!(is_news && folders == [page], "{folders:?}");
        assert_eq!(drains::among(&[gpu], &roots, None), [gpu]);
        assert!(drains::say(&gpu, false, &roots).is_news);
        assert_eq!(drains::among(&[gpu], &roots, None), [[0; 16]; 0]);
    }
}
