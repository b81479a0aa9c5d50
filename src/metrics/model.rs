//! What a page says, as programs want it. Times are microseconds since the epoch, sizes are bytes.

use crate::layout;
use crate::{Counter, Identity};
use serde::Serialize;
use serde::ser::SerializeStruct;
use std::time::{SystemTime, UNIX_EPOCH};
use zerocopy::FromZeros;

/// The time that pages speak of.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64
}

/// Who the process is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Process {
    /// By which it is known whether it still runs.
    pub identity: Identity,
    /// Its number among the ranks of its job on this host, if a launcher gave it one.
    pub rank: Option<u32>,
    /// How many ranks that job has on this host.
    pub world: Option<u32>,
    /// Its number among the ranks of the whole job, on all hosts.
    pub job_rank: Option<u32>,
    /// How many ranks the whole job has.
    pub job_world: Option<u32>,
    /// When the page was made.
    pub created: u64,
    /// The version of gpupool.
    pub library: String,
    /// The file that it runs, without its folder.
    pub name: String,
    /// Its arguments, separated by blanks.
    pub command: String,
}

/// What is held and in use, all at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Levels {
    /// When this was written.
    pub updated: u64,
    /// Who serves allocations, a value of `GPUPOOL_MODE`.
    pub mode: String,
    /// Blocks that the program holds.
    pub live_blocks: u64,
    /// Bytes that the program asked for in the blocks it holds.
    pub live_bytes: u64,
    /// The highest `live_bytes` so far.
    pub peak_live_bytes: u64,
    /// Pinned host memory.
    pub pinned: Pinned,
    /// Where the memory lies, as seen from the GPUs that use it.
    pub residence: Residence,
    /// Since when it is suspended (`gpupool suspend`); 0: it is not.
    pub suspended: u64,
    /// Whose memory gives way to whose (`GPUPOOL_PRIORITY`), 0 to 100.
    pub priority: u64,
    /// The GPUs that the process sees; none before it knows of any.
    pub gpus: Table<Gpu>,
    /// Where the pool may hold memory.
    pub places: Table<Place>,
    /// Which GPU's memory lies at which other place.
    pub loans: Table<Loan>,
}

impl Levels {
    /// The GPU that the program has this number for, if there is a row for it.
    pub fn gpu(&self, ordinal: u32) -> Option<&Gpu> {
        self.gpus.rows.iter().find(|gpu| gpu.ordinal == ordinal)
    }
}

/// Memory that was allocated for one GPU and lies at another place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loan {
    /// The GPU that it was allocated for.
    pub borrower: u32,
    /// The lender is the host, and not a GPU.
    pub on_host: bool,
    /// The lender: a GPU's ordinal, or the number of a NUMA node.
    pub number: u32,
    /// Bytes of live blocks.
    pub bytes: u64,
}

impl Loan {
    /// The lender: `gpu0`, `host0`, as in the log.
    pub fn lender(&self) -> String {
        place_name(self.on_host, self.number)
    }
}

/// A loan is written with the names of its places, as in the log.
impl Serialize for Loan {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut loan = serializer.serialize_struct("Loan", 3)?;
        loan.serialize_field("borrower", &place_name(false, self.borrower))?;
        loan.serialize_field("lender", &self.lender())?;
        loan.serialize_field("bytes", &self.bytes)?;
        loan.end()
    }
}

/// What says in the page that a place is a disk.
const DISK: u32 = 2;

fn place_name(on_host: bool, number: u32) -> String {
    format!("{}{number}", if on_host { "host" } else { "gpu" })
}

/// Where live blocks and what the program made by `cuMemCreate` lie, as seen from the GPU that each was asked for on, and what that costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Residence {
    /// Bytes on that GPU.
    pub near: u64,
    /// Bytes on other GPUs.
    pub on_peers: u64,
    /// Bytes on the host.
    pub on_host: u64,
    /// Microseconds that kernels have lost by reading far memory, as estimated from some launches.
    pub lost_microseconds: u64,
    /// Microseconds that kernels have saved by what moved, as measured on some launches; below 0 where they lost by it.
    pub saved_microseconds: i64,
}

/// Blocks to which the program gave one name (`gpupool_label`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Label {
    /// The name, as the program wrote it.
    pub name: String,
    /// Blocks that have it.
    pub blocks: u64,
    /// Bytes that were asked for in them.
    pub bytes: u64,
    /// The part on the GPUs that they were allocated for.
    pub near: u64,
    /// The part on other GPUs.
    pub on_peers: u64,
    /// The part on the host.
    pub on_host: u64,
    /// How much of it may be near, if the program set that.
    pub budget: Option<u64>,
}

/// Pinned host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pinned {
    /// The most that the pool may pin; 0 while it has pinned nothing.
    pub limit: u64,
    /// All that is pinned: by the pool, by the driver and by the program.
    pub pinned: u64,
    /// What the program holds in it.
    pub requested: u64,
    /// The part that the program registered.
    pub registered: u64,
    /// The most that was ever pinned.
    pub peak_pinned: u64,
    /// The most that the program ever held.
    pub peak_requested: u64,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// By the program's own numbering.
    pub ordinal: u32,
    /// UUID of the device, which `nvidia-smi -L` prints behind `GPU-`.
    #[serde(serialize_with = "as_uuid")]
    pub uuid: [u8; 16],
    /// `NVIDIA H200`.
    pub name: String,
    /// Bytes of its memory.
    pub total: u64,
}

impl Gpu {
    /// As `nvidia-smi -L` prints it, `GPU-` included. `None` where it is not known.
    pub fn uuid_text(&self) -> Option<String> {
        (self.uuid != [0; 16]).then(|| uuid_text(&self.uuid))
    }
}

/// One place, and what the pool has there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The host's memory, and not a GPU's.
    pub on_host: bool,
    /// No memory, but a disk that memory of the program was put on while it is suspended.
    pub on_disk: bool,
    /// A GPU's ordinal, or the number of a NUMA node.
    pub number: u32,
    /// The most that the pool may hold.
    pub limit: u64,
    /// Physical memory that the pool holds.
    pub held: u64,
    /// The part of it that live blocks stand on.
    pub used: u64,
    /// The most that `used` ever was.
    pub peak_used: u64,
    /// The part of `held` that must stay where it is.
    pub anchored: u64,
    /// Memory that the program made itself (`cuMemCreate`) and that lies here.
    pub own: u64,
    /// What the pool leaves free here, beyond the limit (`GPUPOOL_RESERVE`); 0 on the host.
    pub reserve: u64,
    /// Nothing new goes here (`gpupool drain`); `limit` is 0 then.
    pub drained: bool,
}

impl Place {
    /// `gpu0`, `host0`, `disk`, as in the log.
    pub fn name(&self) -> String {
        if self.on_disk { "disk".to_owned() } else { place_name(self.on_host, self.number) }
    }

    /// Whether this is memory of a GPU.
    pub fn is_gpu(&self) -> bool {
        !self.on_host && !self.on_disk
    }
}

/// A place is written with its name, `gpu0`, as in the log.
impl Serialize for Place {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let Self { on_host: _, on_disk: _, number: _, limit, held, used, peak_used, anchored, own, reserve, drained } =
            *self;
        let mut place = serializer.serialize_struct("Place", 9)?;
        place.serialize_field("place", &self.name())?;
        for (name, bytes) in [
            ("limit", limit),
            ("held", held),
            ("used", used),
            ("peak_used", peak_used),
            ("anchored", anchored),
            ("own", own),
            ("reserve", reserve),
        ] {
            place.serialize_field(name, &bytes)?;
        }
        place.serialize_field("drained", &drained)?;
        place.end()
    }
}

/// One context that lives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Context {
    /// Counts from 1 in this process.
    pub id: u64,
    /// The GPU's ordinal.
    pub device: u32,
    /// `primary`, `created`, `found` or `appeared`.
    pub kind: String,
    /// What the GPU lost with it, if that is known.
    pub cost: Option<u64>,
    /// The call that made it.
    pub call: String,
    /// Where in the program that was.
    pub site: String,
    /// Kernels launched, as of [`Levels::updated`]: a launch does not have the page written.
    pub launches: u64,
    /// Copies, as of [`Levels::updated`]: a copy does not have the page written.
    pub copies: u64,
    /// Allocations of device memory.
    pub allocations: u64,
}

impl Context {
    /// Whether nothing was done in it so far.
    pub fn is_unused(&self) -> bool {
        self.launches == 0 && self.copies == 0 && self.allocations == 0
    }
}

/// One place in the program that holds memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Site {
    /// What kind of memory: `device` or `pinned`.
    pub memory: String,
    /// File, line and function, or the object of native code.
    pub text: String,
    /// Bytes that it holds.
    pub live: u64,
    /// Blocks that it holds.
    pub blocks: u64,
    /// Bytes that it asked for over the life of the process; of device memory only as far as that was looked at.
    pub total: u64,
}

/// Something that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// When it was found.
    pub at: u64,
    /// `GP001`.
    pub code: String,
    /// The GPU's ordinal.
    pub device: Option<u32>,
    /// One sentence.
    pub text: String,
}

/// Rows that a page has room for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Table<T> {
    /// The rows that it holds.
    pub rows: Vec<T>,
    /// Rows that there was no room for.
    pub more: u32,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { rows: Vec::new(), more: 0 }
    }
}

impl<T> From<Vec<T>> for Table<T> {
    fn from(rows: Vec<T>) -> Self {
        Self { rows, more: 0 }
    }
}

/// Whether a process takes memory of a GPU that it has no context on, or makes a context: what others see of a GPU as in use and cannot see whose it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Took {
    /// It does so now.
    pub is_taking: bool,
    /// When it had last done so, in nanoseconds of the monotonic clock; 0: never.
    pub last: u64,
}

impl Took {
    /// Whether it did at any time since then.
    pub fn is_since(self, nanoseconds: u64) -> bool {
        self.is_taking || self.last != 0 && self.last >= nanoseconds
    }

    pub(crate) fn word(self) -> u64 {
        self.last << 1 | u64::from(self.is_taking)
    }

    pub(crate) fn of_word(word: u64) -> Self {
        Self { is_taking: word & 1 != 0, last: word >> 1 }
    }
}

/// All that a page said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// Who it is.
    pub process: Process,
    /// The process has said that it is about to end.
    pub ended: bool,
    /// Whether it takes memory of GPUs that it has no context on.
    #[serde(skip)]
    pub took: Took,
    /// Memory comes to GPUs or leaves them at this moment: what it has there is not what the tables say.
    #[serde(skip)]
    pub moves: bool,
    /// By [`Counter`]; see [`Snapshot::counter`].
    #[serde(serialize_with = "by_name")]
    pub counters: [u64; Counter::ALL.len()],
    /// What is held and in use.
    pub levels: Levels,
    /// Contexts, oldest first.
    pub contexts: Table<Context>,
    /// Places in the program, those that hold most first.
    pub sites: Table<Site>,
    /// The last findings, oldest first; `more` were made before these.
    pub findings: Table<Finding>,
    /// Names of blocks, those that hold most first.
    pub labels: Table<Label>,
}

impl Snapshot {
    /// One of the counters.
    pub fn counter(&self, counter: Counter) -> u64 {
        self.counters[counter as usize]
    }
}

fn by_name<S: serde::Serializer>(
    counters: &[u64; Counter::ALL.len()],
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_map(Counter::ALL.iter().zip(counters))
}

fn as_uuid<S: serde::Serializer>(uuid: &[u8; 16], serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_str(&uuid_text(uuid))
}

pub(crate) fn uuid_text(uuid: &[u8; 16]) -> String {
    let parts = [&uuid[..4], &uuid[4..6], &uuid[6..8], &uuid[8..10], &uuid[10..]].map(hexadecimal);
    format!("GPU-{}", parts.join("-"))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A text in its room: where it is too long, its beginning and an ellipsis.
fn text<const N: usize>(text: &str) -> layout::Text<N> {
    const MORE: &str = "…";
    let mut room = [0; N];
    let kept = if text.len() <= N { text.len() } else { text.floor_char_boundary(N - MORE.len()) };
    room[..kept].copy_from_slice(&text.as_bytes()[..kept]);
    if kept < text.len() {
        room[kept..kept + MORE.len()].copy_from_slice(MORE.as_bytes());
    }
    room
}

/// What is in such a room, whatever it is.
fn read_text(room: &[u8]) -> String {
    let text = room.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// The value that stands for none.
fn number(value: i32) -> Option<u32> {
    u32::try_from(value).ok()
}

fn or_none(value: Option<u32>) -> i32 {
    value.and_then(|value| i32::try_from(value).ok()).unwrap_or(-1)
}

/// Puts rows into their room; how many have one, and how many have none.
fn fill<T, R>(room: &mut [R], table: &Table<T>, row: impl Fn(&T) -> R) -> (u32, u32) {
    for (to, from) in room.iter_mut().zip(&table.rows) {
        *to = row(from);
    }
    let kept = table.rows.len().min(room.len());
    (kept as u32, table.more.saturating_add((table.rows.len() - kept) as u32))
}

/// The first `count` rows; a count that there is no room for is cut.
fn take<T, R>(room: &[R], count: u32, more: u32, row: impl Fn(&R) -> T) -> Table<T> {
    Table { rows: room.iter().take(count as usize).map(row).collect(), more }
}

impl From<&Process> for layout::Header {
    fn from(process: &Process) -> Self {
        let Identity { boot, started, namespace, image, pid } = process.identity;
        Self {
            magic: layout::MAGIC,
            version: layout::VERSION,
            bytes: layout::BYTES as u32,
            boot,
            started,
            namespace,
            image,
            pid,
            rank: or_none(process.rank),
            world: process.world.unwrap_or(0),
            job_rank: or_none(process.job_rank),
            created: process.created,
            job_world: process.job_world.unwrap_or(0),
            reserved: 0,
            library: text(&process.library),
            name: text(&process.name),
            command: text(&process.command),
        }
    }
}

impl From<&layout::Header> for Identity {
    fn from(header: &layout::Header) -> Self {
        let layout::Header { boot, started, namespace, image, pid, .. } = *header;
        Self { boot, started, namespace, image, pid }
    }
}

impl From<&layout::Header> for Process {
    fn from(header: &layout::Header) -> Self {
        Self {
            identity: header.into(),
            rank: number(header.rank),
            world: Some(header.world).filter(|world| *world > 0),
            job_rank: number(header.job_rank),
            job_world: Some(header.job_world).filter(|world| *world > 0),
            created: header.created,
            library: read_text(&header.library),
            name: read_text(&header.name),
            command: read_text(&header.command),
        }
    }
}

impl From<&Levels> for Box<layout::Levels> {
    fn from(levels: &Levels) -> Self {
        let mut raw = zeroed::<layout::Levels>();
        let Pinned { limit, pinned, requested, registered, peak_pinned, peak_requested } = levels.pinned;
        raw.updated = levels.updated;
        raw.mode = text(&levels.mode);
        raw.live_blocks = levels.live_blocks;
        raw.live_bytes = levels.live_bytes;
        raw.peak_live_bytes = levels.peak_live_bytes;
        raw.suspended = levels.suspended;
        raw.priority = levels.priority;
        raw.pinned_limit = limit;
        (raw.pinned, raw.requested, raw.registered) = (pinned, requested, registered);
        (raw.peak_pinned, raw.peak_requested) = (peak_pinned, peak_requested);
        let Residence { near, on_peers, on_host, lost_microseconds, saved_microseconds } = levels.residence;
        (raw.near, raw.on_peers, raw.on_host) = (near, on_peers, on_host);
        (raw.lost_microseconds, raw.saved_microseconds) = (lost_microseconds, saved_microseconds);
        (raw.gpu_count, raw.more_gpus) = fill(&mut raw.gpus, &levels.gpus, |gpu| layout::Gpu {
            ordinal: gpu.ordinal,
            reserved: 0,
            total: gpu.total,
            uuid: gpu.uuid,
            name: text(&gpu.name),
        });
        (raw.place_count, raw.more_places) = fill(&mut raw.places, &levels.places, |place| {
            let Place { on_host, on_disk, number, limit, held, used, peak_used, anchored, own, reserve, drained } =
                *place;
            let kind = if on_disk { DISK } else { on_host.into() };
            let drained = drained.into();
            layout::Place { kind, number, limit, held, used, peak_used, anchored, own, reserve, drained }
        });
        (raw.loan_count, raw.more_loans) = fill(&mut raw.loans, &levels.loans, |loan| {
            let Loan { borrower, on_host, number, bytes } = *loan;
            layout::Loan { borrower, on_host: on_host.into(), number, reserved: 0, bytes }
        });
        raw
    }
}

impl From<&layout::Levels> for Levels {
    fn from(raw: &layout::Levels) -> Self {
        Self {
            updated: raw.updated,
            mode: read_text(&raw.mode),
            live_blocks: raw.live_blocks,
            live_bytes: raw.live_bytes,
            peak_live_bytes: raw.peak_live_bytes,
            suspended: raw.suspended,
            priority: raw.priority,
            pinned: Pinned {
                limit: raw.pinned_limit,
                pinned: raw.pinned,
                requested: raw.requested,
                registered: raw.registered,
                peak_pinned: raw.peak_pinned,
                peak_requested: raw.peak_requested,
            },
            residence: Residence {
                near: raw.near,
                on_peers: raw.on_peers,
                on_host: raw.on_host,
                lost_microseconds: raw.lost_microseconds,
                saved_microseconds: raw.saved_microseconds,
            },
            gpus: take(&raw.gpus, raw.gpu_count, raw.more_gpus, |gpu| Gpu {
                ordinal: gpu.ordinal,
                uuid: gpu.uuid,
                name: read_text(&gpu.name),
                total: gpu.total,
            }),
            places: take(&raw.places, raw.place_count, raw.more_places, |place| {
                let layout::Place { kind, number, limit, held, used, peak_used, anchored, own, reserve, drained } =
                    *place;
                let (on_host, on_disk) = (kind != 0 && kind != DISK, kind == DISK);
                let drained = drained != 0;
                Place { on_host, on_disk, number, limit, held, used, peak_used, anchored, own, reserve, drained }
            }),
            loans: take(&raw.loans, raw.loan_count, raw.more_loans, |loan| {
                let layout::Loan { borrower, on_host, number, bytes, .. } = *loan;
                Loan { borrower, on_host: on_host != 0, number, bytes }
            }),
        }
    }
}

impl From<&Table<Context>> for Box<layout::Contexts> {
    fn from(contexts: &Table<Context>) -> Self {
        let mut raw = zeroed::<layout::Contexts>();
        (raw.count, raw.more) = fill(&mut raw.rows, contexts, |context| layout::Context {
            id: context.id,
            device: context.device,
            reserved: 0,
            cost: context.cost.unwrap_or(u64::MAX),
            launches: context.launches,
            copies: context.copies,
            allocations: context.allocations,
            kind: text(&context.kind),
            call: text(&context.call),
            site: text(&context.site),
        });
        raw
    }
}

impl From<&layout::Contexts> for Table<Context> {
    fn from(raw: &layout::Contexts) -> Self {
        take(&raw.rows, raw.count, raw.more, |row| Context {
            id: row.id,
            device: row.device,
            kind: read_text(&row.kind),
            cost: Some(row.cost).filter(|cost| *cost != u64::MAX),
            call: read_text(&row.call),
            site: read_text(&row.site),
            launches: row.launches,
            copies: row.copies,
            allocations: row.allocations,
        })
    }
}

impl From<&Table<Site>> for Box<layout::Sites> {
    fn from(sites: &Table<Site>) -> Self {
        let mut raw = zeroed::<layout::Sites>();
        (raw.count, raw.more) = fill(&mut raw.rows, sites, |site| layout::Site {
            live: site.live,
            blocks: site.blocks,
            total: site.total,
            memory: text(&site.memory),
            text: text(&site.text),
        });
        raw
    }
}

impl From<&layout::Sites> for Table<Site> {
    fn from(raw: &layout::Sites) -> Self {
        take(&raw.rows, raw.count, raw.more, |row| Site {
            memory: read_text(&row.memory),
            text: read_text(&row.text),
            live: row.live,
            blocks: row.blocks,
            total: row.total,
        })
    }
}

impl From<&Table<Finding>> for Box<layout::Findings> {
    /// Where there is no room for all, the last ones are kept.
    fn from(findings: &Table<Finding>) -> Self {
        let mut raw = zeroed::<layout::Findings>();
        let skipped = findings.rows.len().saturating_sub(raw.rows.len());
        for (to, finding) in raw.rows.iter_mut().zip(&findings.rows[skipped..]) {
            *to = layout::Finding {
                at: finding.at,
                device: or_none(finding.device),
                reserved: 0,
                code: text(&finding.code),
                text: text(&finding.text),
            };
        }
        raw.count = (findings.rows.len() - skipped) as u32;
        raw.more = findings.more.saturating_add(skipped as u32);
        raw
    }
}

impl From<&layout::Findings> for Table<Finding> {
    fn from(raw: &layout::Findings) -> Self {
        take(&raw.rows, raw.count, raw.more, |row| Finding {
            at: row.at,
            code: read_text(&row.code),
            device: number(row.device),
            text: read_text(&row.text),
        })
    }
}

impl From<&Table<Label>> for Box<layout::Labels> {
    fn from(labels: &Table<Label>) -> Self {
        let mut raw = zeroed::<layout::Labels>();
        (raw.count, raw.more) = fill(&mut raw.rows, labels, |label| layout::Label {
            blocks: label.blocks,
            bytes: label.bytes,
            near: label.near,
            on_peers: label.on_peers,
            on_host: label.on_host,
            budget: label.budget.unwrap_or(u64::MAX),
            name: text(&label.name),
        });
        raw
    }
}

impl From<&layout::Labels> for Table<Label> {
    fn from(raw: &layout::Labels) -> Self {
        take(&raw.rows, raw.count, raw.more, |row| Label {
            name: read_text(&row.name),
            blocks: row.blocks,
            bytes: row.bytes,
            near: row.near,
            on_peers: row.on_peers,
            on_host: row.on_host,
            budget: Some(row.budget).filter(|budget| *budget != u64::MAX),
        })
    }
}

/// On the heap from the start: some of these are larger than what a small thread has of a stack.
pub(crate) fn zeroed<T: FromZeros>() -> Box<T> {
    T::new_box_zeroed().unwrap_or_else(|_| Box::new(T::new_zeroed()))
}
