//! The metrics pages of all processes that run under gpupool: who lists them (`ps`), shows them (`top`) and exports them (`export`)
//! reads them here, so that none takes for alive what the others do not. No process is asked anything.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpupool_config::parse_duration;
use gpupool_machine::{Nvml, Uuid, dashed};
use gpupool_metrics::folder::{Entry, Folder, Roots};
use gpupool_metrics::{Identity, Life, Place, Snapshot, Unreadable, identify, may_be_of, read};
use serde::{Serialize, Serializer};

use crate::failure;

/// A process that has a page.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Whether it runs.
    pub state: Life,
    /// The user's number.
    pub owner: u32,
    /// Where the page lies.
    pub page: PathBuf,
    /// What stands there.
    pub told: Snapshot,
}

/// As the page has it, with what people are told that it does.
impl Serialize for Listed {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Row<'a> {
            state: &'static str,
            owner: u32,
            page: &'a Path,
            #[serde(flatten)]
            told: &'a Snapshot,
        }
        Row { state: self.word(), owner: self.owner, page: &self.page, told: &self.told }.serialize(serializer)
    }
}

/// What tells listed processes apart, also those that one process was. With the owner of the page: whoever writes one can give it any
/// process's number.
pub type Key = (u32, u64, u32, u64, u64);

impl Listed {
    /// See [`Key`].
    pub fn key(&self) -> Key {
        let Identity { namespace, pid, started, image, boot: _ } = self.told.process.identity;
        (self.owner, namespace, pid, started, image)
    }

    /// What it does, for people. One that is suspended waits, whether or not it is stopped as well.
    pub fn word(&self) -> &'static str {
        if self.told.levels.suspended > 0 { "suspended" } else { self.state.word() }
    }

    /// Bytes of GPUs and of the host that its live blocks take, and what it made itself (`cuMemCreate`).
    pub fn used(&self) -> u64 {
        self.in_memory(|place| place.used)
    }

    /// The same with freed memory that the pool keeps.
    pub fn held(&self) -> u64 {
        self.in_memory(|place| place.held)
    }

    /// What lies on a disk is in no memory.
    fn in_memory(&self, of: fn(&Place) -> u64) -> u64 {
        let places = self.told.levels.places.rows.iter().filter(|place| !place.on_disk);
        places.fold(0, |sum, place| sum.saturating_add(of(place)).saturating_add(place.own))
    }
}

/// A folder or page that is not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// One word, which there are few of.
    pub reason: &'static str,
    /// Of a page: the number of its process, by its name.
    pub pid: Option<u32>,
    /// Which, and why.
    pub why: String,
}

/// What one look found.
#[derive(Debug, Default)]
pub struct Look {
    /// By number.
    pub rows: Vec<Listed>,
    /// What cannot be read, and pages that were left by processes which are gone.
    pub skipped: Vec<Skipped>,
}

impl Look {
    /// Without those of which nobody here can tell whether they still run: what is kept for long must not say for ever what a process
    /// held that is gone.
    pub fn without_doubtful(mut self) -> Self {
        let (known, doubtful) =
            self.rows.into_iter().partition(|row| matches!(row.state, Life::Running | Life::Stopped | Life::Frozen));
        self.rows = known;
        self.skipped.extend(Vec::into_iter(doubtful).map(|row: Listed| {
            let (reason, why) = match row.state {
                Life::Elsewhere => {
                    ("elsewhere", "its process is in another PID namespace (a container), and only an exporter there")
                }
                _ => ("unknown", "the system does not let this user look at its process, and only another one"),
            };
            let pid = Some(row.told.process.identity.pid);
            Skipped { reason, pid, why: format!("{}: {why} can tell whether it still runs", row.page.display()) }
        }));
        self
    }
}

/// Whether one number of a GPU means different ones to these processes: each may see others, or the same in another order.
fn differently_numbered<'a>(told: impl Iterator<Item = &'a Snapshot>) -> bool {
    let mut known = BTreeMap::new();
    let mut gpus = told.flat_map(|told| &told.levels.gpus.rows);
    gpus.any(|gpu| *known.entry(gpu.ordinal).or_insert(gpu.uuid) != gpu.uuid)
}

/// The numbers that the machine's GPUs have where `gpupool drain` takes one: NVML's, as `nvidia-smi` has them.
#[derive(Clone, Debug, Default)]
pub struct Numbers {
    known: Option<BTreeMap<Uuid, u32>>,
}

impl Numbers {
    /// Asks for them once a process tells of a GPU: before that nobody wants to know, and NVML wakes every GPU that sleeps, which none does that a program has a context on.
    pub fn learn(&mut self, rows: &[Listed]) {
        if self.known.is_none() && rows.iter().any(|row| !row.told.levels.gpus.rows.is_empty()) {
            let nvml = Nvml::get().ok();
            let of = |number: u32| Some((nvml?.uuid_of(number)?, number));
            self.known = Some((0..).map_while(of).collect());
        }
    }

    /// These and no others.
    #[cfg(test)]
    pub fn known(known: impl IntoIterator<Item = (Uuid, u32)>) -> Self {
        Self { known: Some(known.into_iter().collect()) }
    }

    /// The number of this one, where it is known.
    pub fn of(&self, uuid: &Uuid) -> Option<u32> {
        self.known.as_ref()?.get(uuid).copied()
    }

    /// Whether any of these processes has another number for a GPU than the machine, or than another process, so that a number alone says too little.
    pub fn are_others<'a>(&self, told: impl Iterator<Item = &'a Snapshot> + Clone) -> bool {
        let mut gpus = told.clone().flat_map(|told| &told.levels.gpus.rows);
        gpus.any(|gpu| self.of(&gpu.uuid).is_some_and(|number| number != gpu.ordinal)) || differently_numbered(told)
    }

    /// What a GPU is, whoever asks: by its number where the machine has one, and its UUID.
    pub fn name(&self, uuid: &Uuid) -> String {
        let text = format!("GPU-{}", dashed(uuid));
        self.of(uuid).map_or(text.clone(), |number| format!("GPU {number} ({text})"))
    }
}

/// Whoever looks, once or again and again.
pub struct Pages {
    roots: Roots,
    looked: bool,
    /// What was complained of when it was last there.
    said: BTreeSet<String>,
}

impl Pages {
    /// The folders of this machine: this user's, and for root those of all users.
    pub fn new() -> Self {
        Self::under(Roots::new(std::env::var_os("XDG_RUNTIME_DIR")))
    }

    fn under(roots: Roots) -> Self {
        Self { roots, looked: false, said: BTreeSet::new() }
    }

    /// Reads every page. Those of processes that are gone are removed.
    pub fn look(&mut self) -> Look {
        let (folders, refused) = Folder::all(&self.roots);
        let mut look = Look::default();
        let refusal = |refused| Skipped { reason: "folder", pid: None, why: format!("not read: {refused}") };
        let refusals = refused.iter().map(refusal);
        look.skipped.extend(refusals);
        for folder in &folders {
            let mut left_over = !self.looked;
            for entry in folder.pages() {
                let page = folder.path().join(&entry.name);
                match read_page(folder, &entry) {
                    Ok((state, told)) => look.rows.push(Listed { state, owner: folder.owner(), page, told }),
                    Err(None) => {}
                    Err(Some((reason, why))) => {
                        left_over |= reason == GONE;
                        let why = format!("{}: {why}", page.display());
                        look.skipped.push(Skipped { reason, pid: Some(entry.pid), why });
                    }
                }
            }
            // Behind the reading, so that what is removed was told of. It opens every page once more, so not each time.
            if left_over {
                folder.clean();
            }
        }
        self.looked = true;
        look.rows.sort_by_key(|row| (row.told.process.identity.pid, row.key()));
        // A page that was copied to another folder of its user.
        look.rows.dedup_by_key(|row| row.key());
        look
    }

    /// Says on stderr what was not read, as long as it is there only once. What a process left that is gone was removed, and is nobody's concern.
    pub fn complain(&mut self, look: &Look) {
        let unread = look.skipped.iter().filter(|skipped| skipped.reason != GONE);
        let now: BTreeSet<String> = unread.map(|skipped| skipped.why.clone()).collect();
        now.difference(&self.said).for_each(|why| failure::complain(why));
        self.said = now;
    }
}

/// The time between two looks, as an argument. What is shorter would show nothing new: a page is written once a second at most.
///
/// # Errors
/// It is none, or too short.
pub fn interval(text: &str) -> Result<Duration, String> {
    const LEAST: Duration = Duration::from_millis(100);
    let interval = parse_duration(text).map_err(|error| error.to_string())?;
    if interval < LEAST { Err("at least 100ms".to_owned()) } else { Ok(interval) }
}

/// A page that its process will write no more.
const GONE: &str = "gone";

/// Why a page is not shown: nothing where its process ends just now.
type NotShown = Option<(&'static str, String)>;

fn read_page(folder: &Folder, entry: &Entry) -> Result<(Life, Snapshot), NotShown> {
    let file = match folder.page(entry) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(None),
        answer => answer.map_err(|error| unreadable(&Unreadable::File(error)))?,
    };
    let identity = identify(&file).map_err(|error| unreadable(&error))?;
    let life = identity.life();
    // Of one that ended in this moment there is nothing to tell: it has said so, or taken its page with it since that was found.
    let has_ended = || {
        let is_taken = folder.page(entry).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound);
        is_taken || read(&file).is_ok_and(|told| told.ended)
    };
    match life {
        Life::Gone if has_ended() => return Err(None),
        Life::Gone => return Err(Some((GONE, "its process is gone".to_owned()))),
        Life::Elsewhere if identity.is_deserted() => {
            return Err(Some((GONE, "its process is gone, with the container that it was in".to_owned())));
        }
        Life::Replaced => return Err(Some((GONE, "its process runs another program now".to_owned()))),
        // Only root reads others' folders, in which anybody may put a page of any process's number.
        Life::Running | Life::Stopped | Life::Frozen if !may_be_of(entry.pid, folder.owner()) => {
            let owner = folder.owner();
            return Err(Some(("owner", format!("made by user {owner}, and its process is another user's"))));
        }
        Life::Running | Life::Stopped | Life::Frozen | Life::Elsewhere | Life::Unknown => {}
    }
    let told = read(&file).map_err(|error| unreadable(&error))?;
    let identity = &told.process.identity;
    if (identity.pid, identity.started) != (entry.pid, entry.started) {
        return Err(unreadable(&Unreadable::Foreign));
    }
    if told.ended { Err(None) } else { Ok((life, told)) }
}

fn unreadable(error: &Unreadable) -> NotShown {
    let reason = match error {
        Unreadable::Foreign => "foreign",
        Unreadable::Version(_) => "version",
        Unreadable::Size(_) => "size",
        Unreadable::Torn(_) => "torn",
        Unreadable::File(_) => "file",
    };
    Some((reason, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_metrics::{BYTES, Memory, Page, Process, VERSION};
    use std::cell::RefCell;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    /// The bytes of a page, as a process would have written them.
    struct Bytes(RefCell<Vec<u8>>);

    impl Memory for Bytes {
        fn store(&self, at: usize, bytes: &[u8]) -> bool {
            self.0.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
            true
        }
    }

    fn page(process: &Process, levels: &gpupool_metrics::Levels) -> Vec<u8> {
        let mut page = Page::begin(Bytes(RefCell::new(vec![0; BYTES])), process).unwrap();
        assert!(page.levels(levels));
        page.memory().0.borrow().clone()
    }

    fn process(identity: Identity) -> Process {
        Process {
            identity,
            rank: None,
            world: None,
            job_rank: None,
            job_world: None,
            created: 1,
            library: "0.2.0".to_owned(),
            name: "train".to_owned(),
            command: "train".to_owned(),
        }
    }

    fn session() -> (tempfile::TempDir, Pages) {
        let session = tempfile::tempdir().unwrap();
        fs::set_permissions(session.path(), Permissions::from_mode(0o700)).unwrap();
        let folder = session.path().join("gpupool");
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(folder, Permissions::from_mode(0o700)).unwrap();
        let nowhere = session.path().join("none");
        let roots = Roots {
            session: Some(session.path().to_owned()),
            run: nowhere.clone(),
            temporary: nowhere.clone(),
            sessions: nowhere,
        };
        (session, Pages::under(roots))
    }

    fn put(session: &Path, identity: &Identity, bytes: &[u8]) -> PathBuf {
        let path = session.join(format!("gpupool/{}-{}.page", identity.pid, identity.started));
        fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn what_cannot_be_read_is_skipped_with_its_reason_and_the_rest_is_listed() {
        let own = Identity::own().unwrap();
        let (session, mut pages) = session();
        let whole = page(&process(own), &gpupool_metrics::Levels { live_bytes: 77, ..Default::default() });
        put(session.path(), &own, &whole);
        // A count that is odd: its writer was killed in the middle.
        let changed = |at: usize, value: u8, name: u32| {
            let mut bytes = whole.clone();
            bytes[at] = value;
            put(session.path(), &Identity { pid: name, ..own }, &bytes)
        };
        changed(8, VERSION as u8 + 1, 1);
        changed(1024, 1, 2);
        changed(0, b'x', 3);
        put(session.path(), &Identity { pid: 4, ..own }, &whole[..BYTES - 8]);
        // Another process's name on it.
        put(session.path(), &Identity { pid: 5, ..own }, &whole);
        let dead = Identity { started: own.started + 2, ..own };
        let left = put(session.path(), &dead, &page(&process(dead), &gpupool_metrics::Levels::default()));
        // One that has said that it ends, and has not come to take its page with it.
        let ended = Identity { started: own.started + 3, ..own };
        let bytes = Bytes(RefCell::new(page(&process(ended), &gpupool_metrics::Levels::default())));
        assert!(Page::end(&bytes));
        put(session.path(), &ended, &bytes.0.borrow());
        let look = pages.look();
        let [row] = &look.rows[..] else { panic!("{look:?}") };
        assert_eq!((row.state, row.told.levels.live_bytes), (Life::Running, 77));
        let mut reasons: Vec<_> = look.skipped.iter().map(|skipped| skipped.reason).collect();
        reasons.sort_unstable();
        assert_eq!(reasons, ["file", "foreign", "foreign", "gone", "torn", "version"]);
        assert!(!left.exists(), "what a process left behind that is gone");
        assert_eq!(pages.look().skipped.len(), 5);
    }

    /// Root reads the folders of all users, and anybody may write what he likes into his own.
    #[test]
    fn a_page_that_another_user_made_up_for_a_process_is_not_shown() {
        let own = Identity::own().unwrap();
        let (session, mut pages) = session();
        let path = put(session.path(), &own, &page(&process(own), &gpupool_metrics::Levels::default()));
        assert_eq!(pages.look().rows.len(), 1);
        let user = Some(65534);
        for path in [&path, path.parent().unwrap(), session.path()] {
            if std::os::unix::fs::chown(path, user, None).is_err() {
                println!("only root can make others' folders: not checked");
                return;
            }
        }
        let look = pages.look();
        let [Skipped { reason: "owner", why, .. }] = &look.skipped[..] else { panic!("{look:?}") };
        assert!(look.rows.is_empty() && why.contains("made by user 65534"), "{why}");
    }

    #[test]
    fn a_page_that_lies_in_two_folders_is_of_one_process() {
        let own = Identity::own().unwrap();
        let (session, mut pages) = session();
        let bytes = page(&process(own), &gpupool_metrics::Levels::default());
        let path = put(session.path(), &own, &bytes);
        let other = session.path().join("none/gpupool");
        fs::create_dir_all(&other).unwrap();
        fs::set_permissions(other.parent().unwrap(), Permissions::from_mode(0o700)).unwrap();
        fs::set_permissions(&other, Permissions::from_mode(0o700)).unwrap();
        fs::copy(&path, other.join(path.file_name().unwrap())).unwrap();
        assert_eq!(Folder::all(&pages.roots).0.len(), 2);
        assert_eq!(pages.look().rows.len(), 1);
    }

    #[test]
    fn who_may_be_gone_is_not_told_of_for_ever() {
        let mut rows = vec![crate::sample::listed(1, "train"), crate::sample::listed(2, "train")];
        rows[0].state = Life::Elsewhere;
        rows[1].state = Life::Stopped;
        let look = Look { rows, skipped: Vec::new() }.without_doubtful();
        assert_eq!(look.rows.iter().map(|row| row.state).collect::<Vec<_>>(), [Life::Stopped]);
        let [Skipped { reason: "elsewhere", why, .. }] = &look.skipped[..] else { panic!("{look:?}") };
        assert!(why.contains("an exporter there can tell whether it still runs"), "{why}");
    }

    #[test]
    fn what_is_still_there_is_not_complained_of_again() {
        let (session, mut pages) = session();
        let path = put(session.path(), &Identity::default(), b"no page");
        let look = pages.look();
        pages.complain(&look);
        assert_eq!(pages.said.len(), 1);
        fs::remove_file(path).unwrap();
        let look = pages.look();
        pages.complain(&look);
        assert!(pages.said.is_empty(), "what is gone is forgotten");
    }
}
