//! A fault at each operation by which the commands of two hosts meet in a folder, and a host that reaches the folder no more from there on, as one whose command was
//! killed. All cases wait side by side.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::scope;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;

use crate::disk::Disk;
use crate::{About, JobWriter, Meeting, Meta, Options, Pace, Reader, Which, Who, Writer, jobs, list, rank_folder};

/// How long it is waited for the other one to come, and to say that it has come to rest.
const TO_COME: Duration = Duration::from_secs(20);
const TO_REST: Duration = Duration::from_secs(20);
/// Nobody needs longer than both of these and ten seconds without a sign of life; several times that on a machine that stands still now and then.
const BOUND: Duration = Duration::from_secs(300);
const LOOK: Duration = Duration::from_millis(10);

fn who(node: u32) -> Who {
    Who { node, host: format!("host{node}"), pid: 100 + node }
}

fn memory(seed: u8, rank: u32) -> Vec<u8> {
    vec![seed ^ u8::try_from(rank).unwrap(); 5000]
}

/// The image of a rank, which is another process and writes to a disk without faults.
fn rank_image(folder: &Path, rank: u32, seed: u8) -> (u32, u64) {
    let options = Options { threads: 1, ..Options::default() };
    let writer = Writer::create(&rank_folder(folder, rank), Meta::default(), options).unwrap();
    let bytes = memory(seed, rank);
    let block = writer.block(About { bytes: bytes.len() as u64, ..About::default() }).unwrap();
    writer.write(block, 0, &bytes).unwrap();
    (rank, writer.finish().unwrap().generation)
}

type Images = Vec<(u32, u64)>;

/// What the command does on one of two hosts with a rank each: the number of the job's image.
fn command(folder: &Path, node: u32, seed: u8, disk: &Disk) -> Result<u64, String> {
    let until = Instant::now() + TO_COME;
    let own = (who(node), node);
    let (mut writer, mut meeting) = if node == 0 {
        let writer = JobWriter::create(folder).map_err(|error| error.to_string())?;
        (Some(writer), Meeting::lead_on(folder, 2, own, until, &|| true, |_| Ok(()), disk)?)
    } else {
        (None, Meeting::join_on(folder, 2, own, until, &|| true, disk)?)
    };
    let all = |words: Vec<(Who, bool)>| words.into_iter().all(|(_, word)| word);
    for (step, within) in [("ready", None), ("rest", Some(TO_REST)), ("copied", None)] {
        match meeting.agree(step, true, Pace { within, look: LOOK }, all) {
            Ok(true) => {}
            Ok(false) => return Err(meeting.leave(format!("not all are at {step}"))),
            Err(why) => {
                let why = meeting.leave(why);
                let _ = writer.map(JobWriter::give_up);
                return Err(why);
            }
        }
    }
    let own = rank_image(folder, node, seed);
    let decide = |words: Vec<(Who, Images)>| -> Result<u64, String> {
        let images: Images = words.into_iter().flat_map(|(_, images)| images).collect();
        let writer = writer.take().unwrap();
        writer.finish(&images, Vec::new(), Some(1)).map(|(generation, _)| generation).map_err(|error| error.to_string())
    };
    let agreed = meeting.agree("written", vec![own], Pace { within: None, look: LOOK }, decide);
    drop(meeting);
    let _ = writer.map(JobWriter::give_up);
    agreed?
}

/// Both of them, with the disk that each has.
fn commands(folder: &Path, seed: u8, disks: &[Disk; 2]) -> [Result<u64, String>; 2] {
    scope(|scope| {
        let both = [0, 1].map(|node: u32| {
            let disk = &disks[node as usize];
            scope.spawn(move || command(folder, node, seed, disk))
        });
        both.map(|command| command.join().unwrap())
    })
}

/// The newest image of the job that is whole is this one.
#[track_caller]
fn is_job_of(folder: &Path, seed: u8) -> bool {
    let newest = jobs(folder).unwrap().into_iter().find_map(|listed| listed.told.ok()).unwrap();
    let has = |rank: u32| {
        let image = newest.ranks.iter().find(|image| image.rank == rank).unwrap();
        let reader = Reader::open(&rank_folder(folder, rank), Which::Number(image.generation), 1).unwrap();
        let mut bytes = vec![0; memory(seed, rank).len()];
        reader.read_into(0, 0, &mut bytes).unwrap();
        bytes == memory(seed, rank)
    };
    let [first, second] = [0, 1].map(has);
    assert_eq!(first, second, "ranks of two images");
    first
}

#[derive(Clone, Copy, Debug)]
struct Case {
    node: u32,
    /// Whether it only looks: at names, or what a file has.
    looks: bool,
    failing: usize,
    /// All from there on, or that one alone.
    is_one: bool,
}

impl Case {
    /// Its disk, how many operations it has been asked for, and what failed first.
    fn disk(self) -> (Disk, Arc<AtomicUsize>, Arc<Mutex<Option<&'static str>>>) {
        let (count, first) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(None)));
        let (counts, begins) = (Arc::clone(&count), Arc::clone(&first));
        let Self { looks, failing, is_one, .. } = self;
        let has_begun = Arc::new(AtomicUsize::new(0));
        let fault = move |is_look: bool, doing: &'static str| {
            let number = if is_look == looks { counts.fetch_add(1, Ordering::Relaxed) } else { 0 };
            // Whoever does not reach the folder any more reaches nothing there.
            let fails = if is_look == looks {
                number == failing || number > failing && !is_one
            } else {
                !is_one && has_begun.load(Ordering::Relaxed) > 0
            };
            if fails {
                has_begun.fetch_add(1, Ordering::Relaxed);
                begins.lock().get_or_insert(doing);
                return Err(Errno::IO);
            }
            Ok(())
        };
        let fault = Arc::new(fault);
        let also = Arc::clone(&fault);
        let disk = Disk::with_faults(move |doing| fault(false, doing)).with_unread(move |doing| also(true, doing));
        (disk, count, first)
    }

    /// What failed, if so many operations were made.
    fn play(self) -> Option<&'static str> {
        const SEEDS: [u8; 3] = [10, 20, 30];
        let around = tempfile::tempdir().unwrap();
        let folder: &PathBuf = &around.path().join("job");
        let writer = JobWriter::create(folder).unwrap();
        writer.finish(&[0, 1].map(|rank| rank_image(folder, rank, SEEDS[0])), Vec::new(), None).unwrap();
        let (disk, _, first) = self.disk();
        let disks = if self.node == 0 { [disk, Disk::default()] } else { [Disk::default(), disk] };
        let begun = Instant::now();
        let told = commands(folder, SEEDS[1], &disks);
        assert!(begun.elapsed() < BOUND, "{self:?}: {:?}", begun.elapsed());
        let failed = *first.lock();
        let is_there = is_job_of(folder, SEEDS[1]);
        assert!(is_there || is_job_of(folder, SEEDS[0]), "{self:?}: {told:?}");
        assert!(
            is_there || told.iter().all(Result::is_err),
            "{self:?}: one is told of an image that is none: {told:?}"
        );
        assert!(failed.is_some() || is_there && told.iter().all(Result::is_ok), "{self:?}: {told:?}");
        for (node, why) in (0..).zip(&told).filter_map(|(node, told)| Some((node, told.as_ref().err()?))) {
            let names_folder = why.contains(folder.to_str().unwrap());
            let names_other = why.contains(&format!("node {} (host host{}", self.node, self.node))
                || why.contains(&format!("node {} of 2", self.node));
            assert!(
                if node == self.node { names_folder } else { names_folder || names_other },
                "{self:?}, {failed:?}: node {node} is told: {why}"
            );
            // Why, as far as that could be said.
            let own = told[self.node as usize].as_ref().err();
            let is_told = own.is_some_and(|own| why.ends_with(&format!("has given up: {own}")));
            assert!(
                !self.is_one || is_told || !why.contains("has given up") || own.is_some_and(|own| own.contains(why)),
                "{self:?}, {failed:?}: node {node} is told: {why}; the other one: {own:?}"
            );
            // Not that the other one has done what it has not.
            let is_wrong = node == self.node && why.contains(&format!("node {} of 2 has not come", 1 - self.node));
            assert!(!is_wrong || !self.is_one, "{self:?}, {failed:?}: node {node} is told: {why}");
        }
        // What is left disturbs nobody, and goes.
        let next = commands(folder, SEEDS[2], &[Disk::default(), Disk::default()]);
        assert!(next.iter().all(Result::is_ok) && next[0] == next[1], "{self:?}, {failed:?}: {told:?}, then {next:?}");
        assert!(is_job_of(folder, SEEDS[2]), "{self:?}");
        let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let left: Vec<String> = names.filter(|name| name.starts_with('.')).collect();
        assert_eq!(left, [""; 0], "{self:?}, {failed:?}");
        assert_eq!(jobs(folder).unwrap().len(), 1, "{self:?}");
        for rank in 0..2 {
            assert_eq!(list(&rank_folder(folder, rank)).unwrap().len(), 1, "{self:?}: rank {rank}");
        }
        failed
    }
}

/// All of these side by side; what failed.
fn each(cases: impl Iterator<Item = Case>) -> BTreeSet<&'static str> {
    scope(|scope| {
        let running: Vec<_> = cases.map(|case| scope.spawn(move || case.play())).collect();
        running.into_iter().filter_map(|case| case.join().unwrap()).collect()
    })
}

#[test]
fn whichever_change_of_a_meeting_fails_the_older_image_stays_and_all_hear_of_it_in_time() {
    let numbers = (0..28).flat_map(|failing| [true, false].map(|is_one| (failing, is_one)));
    let cases = numbers.flat_map(|(failing, is_one)| [0, 1].map(|node| Case { node, looks: false, failing, is_one }));
    let failed = each(cases);
    assert_eq!(failed.into_iter().collect::<Vec<_>>(), ["create", "make", "remove", "rename", "write"]);
}

/// How often it is looked depends on how long others take, so these are the first ones and then some.
#[test]
fn whichever_look_at_a_meeting_fails_the_older_image_stays_and_all_hear_of_it_in_time() {
    let numbers = (0..24).chain((24..120).step_by(8)).flat_map(|failing| [true, false].map(|is_one| (failing, is_one)));
    let cases = numbers.flat_map(|(failing, is_one)| [0, 1].map(|node| Case { node, looks: true, failing, is_one }));
    let failed = each(cases);
    assert_eq!(failed.into_iter().collect::<Vec<_>>(), ["list", "open", "read"]);
}
