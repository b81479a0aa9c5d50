//! A trace for `https://ui.perfetto.dev` in Perfetto's own format (protobuf): a counter for each place, slices for moves and contexts, and
//! findings and what else happened as instants.
//!
//! Not in Chrome's JSON, which Perfetto calls legacy and opens as well as it can: it knows no unit of a counter and no tree of tracks, and
//! browsers gave up on such files of a gigabyte. Packets are written one by one as the log is read, so a log of any length takes the memory
//! of its tracks.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use gpupool_events::{Event, FindingMade, Level, Record, finding};
use prost::Message;

use crate::report::model::{Context, Found, Logs, NEAR_AND_FAR, Process, labels};

/// Tracks that a trace may have; names of labels and places come from the log.
const TRACKS: usize = 1 << 13;
/// Who wrote these packets. There is one writer.
const SEQUENCE: u32 = 1;

/// The messages of `protos/perfetto/trace`, as far as they are needed; the tags are theirs.
pub(super) mod proto {
    use prost::{Message, Oneof};

    /// `TracePacket`; `data` is field 11 or 60.
    #[derive(Clone, PartialEq, Message)]
    pub struct Packet {
        #[prost(uint64, optional, tag = "8")]
        pub timestamp: Option<u64>,
        #[prost(uint32, optional, tag = "10")]
        pub trusted_packet_sequence_id: Option<u32>,
        #[prost(oneof = "Data", tags = "11, 60")]
        pub data: Option<Data>,
    }

    #[derive(Clone, PartialEq, Oneof)]
    pub enum Data {
        #[prost(message, tag = "11")]
        Event(TrackEvent),
        #[prost(message, tag = "60")]
        Track(TrackDescriptor),
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct TrackDescriptor {
        #[prost(uint64, optional, tag = "1")]
        pub uuid: Option<u64>,
        #[prost(string, optional, tag = "2")]
        pub name: Option<String>,
        #[prost(message, optional, tag = "3")]
        pub process: Option<ProcessDescriptor>,
        #[prost(uint64, optional, tag = "5")]
        pub parent_uuid: Option<u64>,
        #[prost(message, optional, tag = "8")]
        pub counter: Option<CounterDescriptor>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct ProcessDescriptor {
        #[prost(int32, optional, tag = "1")]
        pub pid: Option<i32>,
        #[prost(string, optional, tag = "6")]
        pub process_name: Option<String>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct CounterDescriptor {
        /// 3: bytes.
        #[prost(int32, optional, tag = "3")]
        pub unit: Option<i32>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct TrackEvent {
        #[prost(message, repeated, tag = "4")]
        pub debug_annotations: Vec<DebugAnnotation>,
        /// 1: a slice begins, 2: it ends, 3: an instant, 4: a counter.
        #[prost(int32, optional, tag = "9")]
        pub r#type: Option<i32>,
        #[prost(uint64, optional, tag = "11")]
        pub track_uuid: Option<u64>,
        #[prost(string, repeated, tag = "22")]
        pub categories: Vec<String>,
        #[prost(string, optional, tag = "23")]
        pub name: Option<String>,
        #[prost(int64, optional, tag = "30")]
        pub counter_value: Option<i64>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct DebugAnnotation {
        #[prost(uint64, optional, tag = "3")]
        pub uint_value: Option<u64>,
        #[prost(string, optional, tag = "6")]
        pub string_value: Option<String>,
        #[prost(string, optional, tag = "10")]
        pub name: Option<String>,
    }

    /// `Trace`: what the file as a whole is.
    #[derive(Clone, PartialEq, Message)]
    pub struct Trace {
        #[prost(message, repeated, tag = "1")]
        pub packet: Vec<Packet>,
    }
}

use proto::{CounterDescriptor, Data, DebugAnnotation, Packet, ProcessDescriptor, TrackDescriptor, TrackEvent};

const BEGIN: i32 = 1;
const END: i32 = 2;
const INSTANT: i32 = 3;
const COUNTER: i32 = 4;
const BYTES: i32 = 3;

/// A trace while it is written.
pub struct Perfetto<W> {
    out: W,
    /// By process and name.
    tracks: HashMap<(usize, String), u64>,
    last: u64,
    /// When the last slice of a track ended: slices of one track are told in the order of their ends, and must not lap over each other.
    ends: HashMap<u64, u64>,
    /// What processes are called so far.
    named: BTreeMap<usize, String>,
    failed: Option<io::Error>,
    left_out: u64,
}

impl<W: Write> Perfetto<W> {
    /// Begins a trace.
    pub fn new(out: W) -> Self {
        let (tracks, ends, named) = (HashMap::new(), HashMap::new(), BTreeMap::new());
        Perfetto { out, tracks, last: 0, ends, named, failed: None, left_out: 0 }
    }

    /// Writes what a record says.
    pub fn look(&mut self, process: &Process, record: &Record) {
        let now = nanoseconds(record.t);
        let met = process.met;
        self.name(process, record);
        match &record.event {
            Event::PoolLevel(level) => {
                for place in &level.places {
                    self.count(met, &format!("{} used", place.place), now, place.used);
                    self.count(met, &format!("{} held", place.place), now, place.held);
                }
            }
            Event::PoolResidence(lies) => {
                for (name, bytes) in NEAR_AND_FAR.into_iter().zip([lies.near, lies.on_peers, lies.on_host]) {
                    let name =
                        if name == "near" { "memory near its GPU".to_owned() } else { format!("memory far, {name}") };
                    self.count(met, &name, now, bytes);
                }
            }
            Event::LabelLevel(level) => self.count(met, &format!("label {}", level.label), now, level.bytes),
            Event::PinnedLevel(level) => {
                self.count(met, "pinned", now, level.pinned);
                self.count(met, "pinned, asked for", now, level.requested);
            }
            Event::TierSwap(swap) => {
                let facts = [
                    ("bytes in", swap.bytes_in),
                    ("bytes out", swap.bytes_out),
                    ("bytes stayed", swap.stayed),
                    ("stopped, microseconds", swap.stopped),
                    ("bytes out as they came, not copied", swap.as_it_came),
                ];
                let took = swap.microseconds.saturating_mul(1000);
                self.slice(met, &format!("moves for GPU {}", swap.home), &swap.why, now, took, &record.message, &facts);
            }
            Event::PoolRepack(repack) => {
                let facts = [("bytes freed", repack.freed), ("bytes copied", repack.copied)];
                let took = repack.microseconds.saturating_mul(1000);
                self.slice(met, "chunks cut anew", &repack.place, now, took, &record.message, &facts);
            }
            Event::BlockMove(moved) => {
                let facts = [("bytes", moved.bytes), ("bytes stayed", moved.stayed)];
                let name = format!("to {}", moved.place);
                self.instant(met, "moves by hand", &name, now, &record.message, &facts);
            }
            Event::FindingMade(made) => self.finding(met, now, made),
            Event::ContextDestroy(gone) => {
                let same = |context: &&Context| context.made.id == gone.id && context.made.device == gone.device;
                if let Some(context) = process.contexts.iter().rfind(same) {
                    self.context(process, context, now);
                }
            }
            Event::PoolGrow(_)
            | Event::PoolSpill(_)
            | Event::PoolTrim(_)
            | Event::PoolRefuse(_)
            | Event::VmmSteer(_) => {
                self.instant(met, "pool", record.event.name(), now, &record.message, &[]);
            }
            Event::ProgramSuspend(_)
            | Event::ProgramResume(_)
            | Event::ProgramCheckpoint(_)
            | Event::GpuDrain(_)
            | Event::GpuUndrain(_) => {
                self.instant(met, "commands", record.event.name(), now, &record.message, &[]);
            }
            Event::RecallAsk(_) | Event::RecallGive(_) | Event::RecallSign(_) => {
                self.instant(met, "other programs", record.event.name(), now, &record.message, &[]);
            }
            // What a later version tells, and what is worth a warning.
            Event::Other { .. } => self.instant(met, "other", record.event.name(), now, &record.message, &[]),
            _ if record.level <= Level::Warn => {
                self.instant(met, "warnings", record.event.name(), now, &record.message, &[]);
            }
            _ => {}
        }
    }

    /// Writes what is known at the end alone, and ends the trace; how much is missing for want of tracks.
    ///
    /// # Errors
    /// The first write that failed.
    pub fn finish(mut self, logs: &Logs, found: &[Found]) -> io::Result<u64> {
        for (process, label) in logs.processes.iter().zip(labels(logs)) {
            let end = nanoseconds(process.last);
            for context in process.contexts.iter().filter(|context| context.gone.is_none()) {
                self.context(process, context, end);
            }
            let exe = process.start.as_ref().map_or("", |start| start.exe.rsplit('/').next().unwrap_or_default());
            self.describe(process, format!("{label} {exe}").trim_end().to_owned());
        }
        // What only the logs together show is in none of them.
        for found in found {
            let told = |met: &usize| logs.processes[*met].findings.iter().any(|(made, _)| made.code == found.code);
            for process in found.processes.iter().filter(|met| !told(met)).map(|met| &logs.processes[*met]) {
                let title = finding(&found.code).map_or("", |known| known.title);
                let name = format!("{} {title}", found.code);
                self.instant(process.met, "findings", &name, nanoseconds(process.last), &found.what, &[]);
            }
        }
        self.failed.take().map_or_else(|| self.out.flush(), Err)?;
        Ok(self.left_out)
    }

    fn finding(&mut self, met: usize, now: u64, made: &FindingMade) {
        let title = finding(&made.code).map_or("", |known| known.title);
        let site = made.site.as_ref().and_then(|site| site.program_frame()).map(ToString::to_string);
        let what = site.map_or_else(|| made.what.clone(), |site| format!("{} ({site})", made.what));
        self.instant(met, "findings", &format!("{} {title}", made.code), now, &what, &[]);
    }

    /// A context from its beginning to this moment. Each has a track of its own, since they may lap over each other.
    fn context(&mut self, process: &Process, context: &Context, now: u64) {
        let made = &context.made;
        let began = nanoseconds(process.origin() + made.seconds).min(now);
        let track = format!("context {} on GPU {}", made.id, made.device);
        let line = made.site.as_ref().map(ToString::to_string).unwrap_or_default();
        let facts = [("bytes", made.cost.unwrap_or(0))];
        self.slice(process.met, &track, &made.kind, now, now - began, &format!("{} {line}", made.call), &facts);
    }

    /// Describes the process of a record where that is known better by it.
    fn name(&mut self, process: &Process, record: &Record) {
        if let (true, Event::ProcessStart(start)) = (self.named.contains_key(&process.met), &record.event) {
            let exe = start.exe.rsplit('/').next().unwrap_or_default();
            self.describe(process, format!("pid {} {exe}", process.pid));
        } else if !self.named.contains_key(&process.met) {
            self.describe(process, format!("pid {}", process.pid));
        }
    }

    fn describe(&mut self, process: &Process, name: String) {
        if self.named.get(&process.met) == Some(&name) {
            return;
        }
        let uuid = self.track_of(process.met, "");
        let pid = i32::try_from(process.pid).ok();
        let track = TrackDescriptor {
            uuid,
            process: Some(ProcessDescriptor { pid, process_name: Some(name.clone()) }),
            ..TrackDescriptor::default()
        };
        self.write(Packet { data: Some(Data::Track(track)), ..Packet::default() });
        self.named.insert(process.met, name);
    }

    /// The number of a track, if there is room for it.
    fn track_of(&mut self, met: usize, name: &str) -> Option<u64> {
        let key = (met, name.to_owned());
        if let Some(known) = self.tracks.get(&key) {
            return Some(*known);
        }
        if self.tracks.len() >= TRACKS {
            self.left_out += 1;
            return None;
        }
        self.last += 1;
        self.tracks.insert(key, self.last);
        Some(self.last)
    }

    /// A track below that of its process.
    fn track(&mut self, met: usize, name: &str, is_counter: bool) -> Option<u64> {
        let before = self.last;
        let uuid = self.track_of(met, name)?;
        if self.last > before {
            let track = TrackDescriptor {
                uuid: Some(uuid),
                name: Some(name.to_owned()),
                parent_uuid: self.track_of(met, ""),
                counter: is_counter.then_some(CounterDescriptor { unit: Some(BYTES) }),
                ..TrackDescriptor::default()
            };
            self.write(Packet { data: Some(Data::Track(track)), ..Packet::default() });
        }
        Some(uuid)
    }

    fn count(&mut self, met: usize, name: &str, now: u64, value: u64) {
        let Some(track) = self.track(met, name, true) else { return };
        let counter_value = Some(i64::try_from(value).unwrap_or(i64::MAX));
        self.event(now, TrackEvent { r#type: Some(COUNTER), counter_value, ..on(track) });
    }

    fn instant(&mut self, met: usize, track: &str, name: &str, now: u64, what: &str, facts: &[(&str, u64)]) {
        let Some(uuid) = self.track(met, track, false) else { return };
        let event = TrackEvent { debug_annotations: annotations(what, facts), ..on(uuid) };
        let (name, categories) = (Some(name.to_owned()), vec![track.to_owned()]);
        self.event(now, TrackEvent { r#type: Some(INSTANT), name, categories, ..event });
    }

    /// Something that ended now and took so many nanoseconds.
    #[allow(
        clippy::too_many_arguments,
        reason = "where, what, when and what is known of it: a struct would name them once more"
    )]
    fn slice(&mut self, met: usize, track: &str, name: &str, now: u64, took: u64, what: &str, facts: &[(&str, u64)]) {
        let Some(uuid) = self.track(met, track, false) else { return };
        let before = self.ends.get(&uuid).copied().unwrap_or(0);
        let began = now.saturating_sub(took).max(before);
        let now = now.max(began);
        self.ends.insert(uuid, now);
        let event = TrackEvent { debug_annotations: annotations(what, facts), ..on(uuid) };
        let (name, categories) = (Some(name.to_owned()), vec![track.to_owned()]);
        self.event(began, TrackEvent { r#type: Some(BEGIN), name, categories, ..event });
        self.event(now, TrackEvent { r#type: Some(END), ..on(uuid) });
    }

    fn event(&mut self, now: u64, event: TrackEvent) {
        self.write(Packet { timestamp: Some(now), data: Some(Data::Event(event)), ..Packet::default() });
    }

    fn write(&mut self, packet: Packet) {
        if self.failed.is_none() {
            let packet = Packet { trusted_packet_sequence_id: Some(SEQUENCE), ..packet };
            let trace = proto::Trace { packet: vec![packet] };
            self.failed = self.out.write_all(&trace.encode_to_vec()).err();
        }
    }
}

fn on(track: u64) -> TrackEvent {
    TrackEvent { track_uuid: Some(track), ..TrackEvent::default() }
}

fn annotations(what: &str, facts: &[(&str, u64)]) -> Vec<DebugAnnotation> {
    let fact = |(name, value): &(&str, u64)| DebugAnnotation {
        name: Some((*name).to_owned()),
        uint_value: Some(*value),
        ..DebugAnnotation::default()
    };
    let what = DebugAnnotation {
        name: Some("what".to_owned()),
        string_value: Some(what.to_owned()),
        ..DebugAnnotation::default()
    };
    std::iter::once(what).chain(facts.iter().map(fact)).collect()
}

fn nanoseconds(seconds: f64) -> u64 {
    // A time that makes no sense is 0 in an integer.
    (seconds * 1e9) as u64
}
