//! How does an image of a program's memory get into a store while the program runs (`gpupool checkpoint`)?
//!
//! The program is stopped as for a suspension, so that the image is of one moment, and for no longer than it takes to copy its memory to where there
//! is room: its own GPUs, others, plain memory of the host ([`shelter`]). What is as the last image has it is not copied ([`unchanged`]). From there it is written while the program goes on. What finds no room is written
//! before that.
//!
//! A thread of its own does all this, since the agent has others to answer, and ends with it.
//!
//! **Whoever fails, the older generation stays**: a generation is there once it is whole ([`gpupool_store`]). The program goes on in any case.

pub mod blocks;
mod shelter;
mod unchanged;

use crate::backing::open::Opened;
use crate::backing::{level, terms};
use crate::gate::{self, Held};
use crate::image::{self, Failed, Shuttle};
use crate::serve::handles::of_kind;
use crate::serve::memory::unpooled;
use crate::suspend::{self, Agreement, Alone, totals};
use crate::watch::context::Keeping;
use crate::{bell, log};
use blocks::Subject;
use gpupool_config::format_size;
use gpupool_cuda::Driver;
use gpupool_events::ProgramCheckpoint;
use gpupool_store::{Key, Options, Writer, Written};
pub use shelter::bytes_on_host;
use shelter::{Shelter, Sheltered};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use unchanged::{Last, Looked};

/// Where an image goes.
#[derive(Clone, Debug)]
pub struct Asked {
    pub folder: PathBuf,
    /// How many generations are left there, this one among them; `None`: all.
    pub keep: Option<usize>,
    /// All of it is copied, whatever is as it was.
    pub full: bool,
    /// For how long what the image before has is read, before the program is stopped: without its turn to be read, none of that is taken without a copy.
    pub ahead: Duration,
}

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Done {
    pub generation: u64,
    /// Of memory.
    pub bytes: u64,
    /// On the disk.
    pub stored: u64,
    /// Of that: written now.
    pub fresh: u64,
    /// Of memory: the same as in the image before, and not written again.
    pub unchanged: u64,
    /// Of memory: the same, but what the image before had of it was damaged, so it was written again.
    pub damaged: u64,
    /// Bytes of the program's own that no GPU reaches which it works on, and that are not in it.
    pub left_out: u64,
    /// Bytes that the driver made as the pool had no room for them, and that are not in it either.
    pub unpooled: u64,
    /// Bytes of kinds that only the driver can place, and that are not in it either.
    pub of_kind: u64,
    /// Bytes that the program asked for on the host by `cuMemCreate`, and that are not in it either.
    pub made_on_host: u64,
    /// Bytes of which the GPUs saw that the image before has them, so that they were not copied.
    pub not_copied: u64,
    /// Bytes that were copied to GPUs while it was stopped.
    pub to_gpus: u64,
    /// Bytes that were copied to plain memory of the host then.
    pub to_host: u64,
    /// Bytes for which there was no room elsewhere, so that the program waited until they were with the store.
    pub in_stop: u64,
    /// For how long the program was stopped.
    pub stopped: Duration,
    pub took: Duration,
    /// Why older images, or what was left of such, are there still that were to be removed; empty where none is.
    pub not_removed: String,
}

impl Done {
    /// Bytes of the program's that are not in it, for whatever reason.
    pub fn all_left_out(&self) -> u64 {
        self.left_out + self.unpooled + self.of_kind + self.made_on_host
    }
}

/// Threads that compress and write beside a program that needs its processors.
const MOST_THREADS: usize = 8;

/// How long the process's end waits for an image that is given up, and how often it looks: a disk may hang.
const TO_GIVE_UP: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(5);
/// For how long a call is waited for, while the program is stopped, that is about to end the last context of a GPU.
const TO_END: Duration = Duration::from_secs(1);
/// Why no image was written of a process that ends.
const ENDS: &str = "the process ends";

static IS_BUSY: AtomicBool = AtomicBool::new(false);

/// Held while an image is written: there is one at a time.
pub struct Busy(());

impl Busy {
    /// For the agent, before it hears anything else: a suspension that is asked for behind an image finds that one under way, although nobody has begun to
    /// write it. `None`: one is written already. Whoever gets none makes none, as its end would be taken for that of the other one.
    pub fn begin() -> Option<Self> {
        (!IS_BUSY.swap(true, Ordering::AcqRel)).then(|| Self(()))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        IS_BUSY.store(false, Ordering::Release);
    }
}

/// Whether an image of this process is being written. Its writer uses the GPUs, as the program does.
pub fn is_under_way() -> bool {
    IS_BUSY.load(Ordering::Acquire)
}

/// The process ends: an image that is being written is given up, so that nothing of it is left in its folder.
fn give_up_for_end() {
    let until = Instant::now() + TO_GIVE_UP;
    while is_under_way() && Instant::now() < until {
        std::thread::sleep(LOOK);
    }
}

/// In the child of a fork: nobody writes an image of it.
pub fn after_fork_in_child() {
    IS_BUSY.store(false, Ordering::Relaxed);
    shelter::after_fork_in_child();
}

fn unless_ending() -> Result<(), String> {
    if gate::is_ending() { Err(ENDS.to_owned()) } else { Ok(()) }
}

/// Writes an image, for which it was [begun](Busy::begin). The program's work is waited for until `deadline`, as long as that `is_wanted` and as there is an agreement to stop; what is begun then is
/// finished. `progress` is told how many bytes of how many are with the store.
///
/// # Errors
/// Why not, in words; the program runs on, and the folder has what it had.
pub fn take(
    asked: &Asked,
    busy: Option<Busy>,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    agreement: &mut dyn Agreement,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Done, String> {
    let begun = Instant::now();
    // Known before the driver is asked for anything: of a program that is suspended whole it answers nothing. Nobody suspends one meanwhile of which an image is under way.
    let is_there = if suspend::since() == 0 { Ok(()) } else { Err(suspend::FIRST.to_owned()) };
    let taken = is_there.and_then(|()| Prepared::new(asked, busy)).and_then(|prepared| {
        // What was read meanwhile costs the program's work no time.
        write(prepared, deadline + begun.elapsed(), is_wanted, agreement, progress)
    });
    told_of(asked, begun, taken)
}

/// As [`take`], of a program that is held and goes on being so: all of it is with the store before this returns. `prepared`: before it was held.
///
/// # Errors
/// As of [`take`].
pub fn take_held(prepared: Prepared, held: &Held, progress: &mut dyn FnMut(u64, u64)) -> Result<Done, String> {
    let (asked, begun) = (prepared.asked.clone(), Instant::now());
    told_of(&asked, begun, write_held(prepared, held, progress))
}

/// What is written down, in the log, of an image or of why there is none.
fn told_of(asked: &Asked, begun: Instant, taken: Result<Done, String>) -> Result<Done, String> {
    level::report();
    match taken {
        Ok(mut done) => {
            done = Done { took: begun.elapsed(), ..done };
            if !done.not_removed.is_empty() {
                say(&asked.folder, &format!("older generations could not be removed: {}", done.not_removed));
            }
            if done.damaged > 0 {
                say(
                    &asked.folder,
                    &format!(
                        "{} of the image before were damaged on the disk, and are written anew; the older images have the damage still: gpupool store \
                         verify {}",
                        format_size(done.damaged),
                        asked.folder.display()
                    ),
                );
            }
            if done.left_out > 0 {
                say(
                    &asked.folder,
                    &format!(
                        "{} that the program made by cuMemCreate are not in the image, since none of the GPUs that it works on reaches the place where \
                         they lie",
                        format_size(done.left_out)
                    ),
                );
            }
            if done.unpooled > 0 {
                say(
                    &asked.folder,
                    &format!(
                        "{} that the driver made, since the pool had no room for them when they were asked for, are not in the image; GPUPOOL_LIMIT gives it more",
                        format_size(done.unpooled)
                    ),
                );
            }
            if done.of_kind > 0 {
                say(
                    &asked.folder,
                    &format!(
                        "{} that the program made by cuMemCreate are not in the image, since they are of a kind that only the driver can place (compressed, \
                         shared over a fabric, for sparse textures or for hardware decompression)",
                        format_size(done.of_kind)
                    ),
                );
            }
            if done.made_on_host > 0 {
                say(
                    &asked.folder,
                    &format!(
                        "{} that the program made on the host by cuMemCreate are not in the image: what it asks for there is none of the GPUs' memory",
                        format_size(done.made_on_host)
                    ),
                );
            }
            totals::has_image(done.stopped);
            bell::changed();
            log::emit(|| told(&asked.folder, &done));
            Ok(done)
        }
        // Whoever asked hears that it ended, and that is no fault of the program's.
        Err(why) if gate::is_ending() => Err(why),
        Err(why) => {
            say(&asked.folder, &format!("no image was written: {why}"));
            Err(why)
        }
    }
}

fn say(folder: &Path, what: &str) {
    tracing::warn!(target: "gpupool::memory", about = "checkpoint", "checkpoint to {}: {what}", folder.display());
}

fn told(folder: &Path, done: &Done) -> (ProgramCheckpoint, String) {
    let &Done { generation, bytes, stored, fresh, unchanged, damaged, .. } = done;
    let left_out = done.all_left_out();
    let &Done { not_copied, to_gpus, to_host, in_stop, stopped, took, .. } = done;
    let text = format!(
        "generation {generation} in {}: {} of memory, {} of it unchanged ({} not even copied), {} on the disk, {} of that new; stopped for {:.3} s of {:.3}",
        folder.display(),
        format_size(bytes),
        format_size(unchanged),
        format_size(not_copied),
        format_size(stored),
        format_size(fresh),
        stopped.as_secs_f64(),
        took.as_secs_f64()
    );
    let event = ProgramCheckpoint {
        folder: folder.display().to_string(),
        generation,
        bytes,
        stored,
        fresh,
        unchanged,
        damaged,
        left_out,
        not_copied,
        to_gpus,
        to_host,
        in_stop,
        stopped_microseconds: stopped.as_micros() as u64,
        microseconds: took.as_micros() as u64,
    };
    (event, text)
}

/// All that can be known and made before the program is stopped.
pub struct Prepared {
    asked: Asked,
    driver: &'static Driver,
    opened: &'static Opened,
    writer: Writer,
    /// The image before, as far as what it has can be taken from it.
    last: Option<Arc<Last>>,
    /// Last, as it is the end of the writing.
    _busy: Busy,
}

impl Prepared {
    /// For one image, whose folder will do as far as can be known. `busy`: that it was begun, if nobody else writes one.
    ///
    /// # Errors
    /// There can be none now, or none there; why, in words.
    pub fn new(asked: &Asked, busy: Option<Busy>) -> Result<Self, String> {
        gate::at_end(give_up_for_end);
        let busy = busy.ok_or_else(|| "an image of it is being written already".to_owned())?;
        let (driver, opened) = suspend::pool()?;
        if opened
            .pool
            .stretches()
            .iter()
            .flat_map(|(_, pieces)| pieces)
            .any(|piece| terms::is_place_left_alone(piece.place))
        {
            return Err("some of its memory lies on a GPU with a grave error, from which nothing is copied before gpupool drain asks for it".to_owned());
        }
        let processors = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let options = Options {
            threads: (processors / 2).clamp(2, MOST_THREADS),
            expected: blocks::bytes(opened),
            keep: asked.keep,
            reuse: true,
            ..Options::default()
        };
        let writer = Writer::create(&asked.folder, image::meta(opened), options).map_err(|error| error.to_string())?;
        let last = if asked.full { None } else { unchanged::last(&writer) };
        if !asked.full {
            unchanged::learn(driver, opened);
        }
        if last.is_some() {
            let until = Instant::now() + asked.ahead;
            writer.read_ahead(&|| Instant::now() < until && !gate::is_ending());
        }
        Ok(Self { asked: asked.clone(), driver, opened, writer, last, _busy: busy })
    }
}

fn write(
    prepared: Prepared,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    agreement: &mut dyn Agreement,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Done, String> {
    let Prepared { asked, _busy, driver, opened, writer, last } = prepared;
    // Its shuttles keep contexts alive, and a call that is to end one of these waits for this thread, which must not wait for it, as whoever asks whether a context has
    // finished would.
    let _keeping = Keeping::begin();
    let stop = |held: Held, agreement: &mut dyn Agreement| {
        // It goes on at the end of this.
        let shelter = Some(Shelter::new(opened, driver));
        let way = Way { writer: &writer, shelter, looks: !asked.full, last: last.as_deref() };
        stopped(driver, opened, way, &held, agreement, progress)
    };
    let stop = suspend::while_stopped(driver, deadline, is_wanted, agreement, stop)?;
    let Stop { sheltered, mut shuttles, done, total, looked } = stop?;
    let mut stored = done.in_stop + done.not_copied;
    for batch in sheltered {
        unless_ending()?;
        let bytes = batch.bytes();
        batch.write(&mut shuttles, &writer).map_err(|failed| failed.to_string())?;
        stored += bytes;
        progress(stored, total);
    }
    finish(writer, done, looked)
}

fn write_held(prepared: Prepared, held: &Held, progress: &mut dyn FnMut(u64, u64)) -> Result<Done, String> {
    let Prepared { asked, _busy, driver, opened, writer, last } = prepared;
    let _keeping = Keeping::begin();
    // Nobody waits for the end of the stop, so nothing is copied twice.
    let way = Way { writer: &writer, shelter: None, looks: !asked.full, last: last.as_deref() };
    let Stop { done, looked, .. } = stopped(driver, opened, way, held, &mut Alone::default(), progress)?;
    finish(writer, done, looked)
}

/// How what there is gets to the store.
struct Way<'a> {
    writer: &'a Writer,
    /// Where it waits for the disk.
    shelter: Option<Shelter>,
    /// Whether GPUs look at what they have: for this image, with what the one before is known by, and for the next one.
    looks: bool,
    last: Option<&'a Last>,
}

/// All of it is with the store.
fn finish(writer: Writer, done: Done, looked: Looked) -> Result<Done, String> {
    unless_ending()?;
    let written = writer.finish().map_err(|error| error.to_string())?;
    unchanged::remember(looked, &written);
    let not_removed = written.not_removed.as_ref().map_or_else(String::new, ToString::to_string);
    let Written { generation, bytes, stored, fresh, unchanged, damaged, .. } = written;
    Ok(Done { generation, bytes, stored, fresh, unchanged, damaged, not_removed, ..done })
}

/// For each GPU and owner. Made during the stop, as that would wait for kernels that run.
type Shuttles = BTreeMap<(u32, u64), Shuttle>;

/// What the stop leaves.
struct Stop {
    sheltered: Vec<Sheltered>,
    shuttles: Shuttles,
    done: Done,
    total: u64,
    looked: Looked,
}

/// What there is, and who copies it. A context may be about to end, and what was allocated in it with it, where no other one is left on its GPU: then what there is
/// without that is what counts, as it was freed while the program was stopped.
fn found(driver: &'static Driver, opened: &'static Opened) -> Result<(Subject, Shuttles), String> {
    let mapped = |result| format!("the driver answered {result} to mapping its memory a second time");
    let until = Instant::now() + TO_END;
    loop {
        let subject = Subject::find(driver, opened).map_err(mapped)?;
        // Made anew each time: whoever keeps a context alive keeps up the call that is to end it.
        match shuttles(driver, &subject) {
            Ok(shuttles) => return Ok((subject, shuttles)),
            Err(Failed::NoContext { .. }) if Instant::now() < until && !gate::is_ending() => {}
            Err(failed) => return Err(failed.to_string()),
        }
        drop(subject);
        std::thread::sleep(LOOK);
    }
}

fn shuttles(driver: &'static Driver, subject: &Subject) -> Result<Shuttles, Failed> {
    let mut shuttles = BTreeMap::new();
    for span in &subject.spans {
        if let Entry::Vacant(shuttle) = shuttles.entry((span.gpu, span.owner)) {
            shuttle.insert(Shuttle::new(driver, span.owner, span.gpu)?);
        }
    }
    Ok(shuttles)
}

/// What the time is spent with in which the program is stopped, for the log.
struct Parts {
    last: Instant,
    all: Vec<(&'static str, Duration)>,
}

impl Parts {
    fn new(begun: Instant) -> Self {
        Self { last: begun, all: Vec::new() }
    }

    fn end(&mut self, what: &'static str) {
        let now = Instant::now();
        self.all.push((what, now - self.last));
        self.last = now;
    }

    fn tell(&self) {
        let words = |(what, took): &(&str, Duration)| format!("{:.3} s of {what}", took.as_secs_f64());
        let all: Vec<String> = self.all.iter().map(words).collect();
        tracing::debug!(target: "gpupool::memory", about = "checkpoint_stop", "the program was stopped for {}", all.join(", "));
    }
}

/// What is done while the program is stopped: all of its memory is with the store when this returns, or copied to where nobody else writes.
fn stopped(
    driver: &'static Driver,
    opened: &'static Opened,
    Way { writer, shelter, looks, last }: Way<'_>,
    held: &Held,
    agreement: &mut dyn Agreement,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Stop, String> {
    let begun = Instant::now();
    let mut parts = Parts::new(begun);
    let (subject, mut shuttles) = found(driver, opened)?;
    parts.end("mapping it a second time");
    let keys = subject.blocks.iter().map(|about| writer.block(about.clone()));
    let keys: Vec<Key> = keys.collect::<Result<_, _>>().map_err(|error| error.to_string())?;
    let total = subject.bytes();
    progress(0, total);
    let (changed, not_copied, looked) = if looks {
        unchanged::look(opened, &subject, &keys, writer, last).map_err(|error| error.to_string())?
    } else {
        (subject.spans.clone(), 0, Looked::default())
    };
    parts.end("looking what has changed");
    let (sheltered, rest) = match shelter {
        Some(mut shelter) => {
            let rest = shelter.take_all(&changed, &keys);
            (shelter.into_batches(), rest)
        }
        None => (Vec::new(), changed),
    };
    let on_host = |batch: &&Sheltered| batch.is_on_host();
    let to_host = sheltered.iter().filter(on_host).map(Sheltered::bytes).sum();
    let to_gpus = sheltered.iter().map(Sheltered::bytes).sum::<u64>() - to_host;
    parts.end("copying to where nobody writes");
    let mut in_stop = 0;
    progress(not_copied, total);
    for span in rest {
        let Some(shuttle) = shuttles.get_mut(&(span.gpu, span.owner)) else { continue };
        unless_ending()?;
        let saved = shuttle.save(writer, keys[span.block], span.offset, span.address, span.bytes);
        saved.map_err(|failed| failed.to_string())?;
        in_stop += span.bytes;
        progress(not_copied + in_stop, total);
    }
    for shuttle in shuttles.values_mut() {
        shuttle.saved(writer).map_err(|failed| failed.to_string())?;
    }
    parts.end("copying to the store");
    // Others may write to its memory as soon as they go on.
    if !agreement.is_done() {
        return Err("the images of the others are not written".to_owned());
    }
    // The end of the process waits for nobody here, and lets the program go on: then this is not of one moment.
    held.is_still_quiet(driver)
        .map_err(|disturbed| format!("the program went on before all was copied: {disturbed}"))?;
    let stopped = begun.elapsed();
    parts.end("waiting for others");
    parts.tell();
    let (left_out, unpooled) = (subject.left_out, unpooled::bytes());
    let (of_kind, made_on_host) = (of_kind::bytes_on_gpus(), of_kind::bytes_on_host());
    let done = Done {
        left_out,
        unpooled,
        of_kind,
        made_on_host,
        not_copied,
        to_gpus,
        to_host,
        in_stop,
        stopped,
        ..Done::default()
    };
    Ok(Stop { sheltered, shuttles, done, total, looked })
}
