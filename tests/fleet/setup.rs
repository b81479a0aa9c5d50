//! What tests of several programs begin and end with: programs on the GPUs of one machine, what they have there, and what their logs say of it.

use super::{MIB, Machine};
use gpupool_events::{Event, Reader};
use gpupool_metrics::Snapshot;
use harness::{Run, Running, eventually};
use serde_json::Value;
use std::io::BufReader;

impl Machine {
    /// A program on this GPU that matters so much.
    pub(super) fn neighbour(&self, gpu: u32, priority: u32) -> Run {
        self.with_priority(Run::program("neighbour").arg(gpu.to_string()), priority)
    }

    /// The same of this run.
    pub(super) fn with_priority(&self, run: Run, priority: u32) -> Run {
        let run = run.sim(self.gpus).nvml();
        let run = run.env("SIMCUDA_MACHINE", self.folder.path().join("machine")).env("SIMCUDA_CONTEXT_MIB", "4");
        let run = run
            .env("GPUPOOL_RESERVE", "16MiB")
            .env("GPUPOOL_RECALL_WAIT", "30s")
            .env("GPUPOOL_HOST_LIMIT", "4GiB")
            .report()
            .log()
            .shim();
        run.env("GPUPOOL_PRIORITY", priority.to_string())
    }

    /// One without gpupool on this GPU.
    pub(super) fn bare(&self, gpu: u32) -> Run {
        let run = Run::program("neighbour").arg(gpu.to_string()).sim(self.gpus).nvml();
        run.env("SIMCUDA_MACHINE", self.folder.path().join("machine")).env("SIMCUDA_CONTEXT_MIB", "4")
    }

    /// One that runs and has so many MiB.
    pub(super) fn holder(&self, run: Run, mib: u64) -> Running {
        let mut program = self.start(run);
        // Each block on a chunk of its own.
        for _ in 0..mib / 20 {
            takes(&mut program, 20);
        }
        if !mib.is_multiple_of(20) {
            takes(&mut program, mib % 20);
        }
        self.until(&program, "a page", |page| page.levels.live_bytes >= mib * MIB);
        program
    }

    /// One on GPU 0 that has borrowed so many MiB of GPU 1.
    pub(super) fn debtor(&self, mib: u64) -> Running {
        let program =
            self.holder(self.neighbour(0, 50).env("GPUPOOL_DEVICES", "0,1").env("GPUPOOL_LIMIT", "0:2MiB"), mib);
        self.until(&program, "a loan", |page| held(page, 1) >= mib * MIB - 4 * MIB);
        program
    }

    pub(super) fn files(&self) -> Vec<String> {
        let files = std::fs::read_dir(self.folder.path().join("gpupool")).unwrap();
        files.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }
}

/// What a program has on a GPU; nothing where its page does not say yet.
pub(super) fn held(page: &Snapshot, gpu: u32) -> u64 {
    let places = page.levels.places.rows.iter();
    places.filter(|place| place.is_gpu() && place.number == gpu).map(|place| place.held + place.own).sum()
}

#[track_caller]
pub(super) fn takes(program: &mut Running, mib: u64) -> u64 {
    let answer = program.ask(&format!("take {mib}"));
    answer.parse().unwrap_or_else(|_| panic!("take {mib}: {answer}"))
}

/// All of its memory is as it was, it ends, and no rule of the driver was broken; its log.
#[track_caller]
pub(super) fn is_whole(mut program: Running) -> Vec<Event> {
    assert_eq!(program.ask("check"), "0");
    let log = program.log();
    let file = std::fs::File::open(&log).ok();
    let (status, folder) = program.end();
    assert!(status.success(), "{status}");
    let report = std::fs::read_to_string(folder.path().join("report")).unwrap_or_default();
    let report: Value = serde_json::from_str(&report).unwrap_or_default();
    assert_eq!(report["violations"], serde_json::json!([]), "{report}");
    let lines = file.map(|file| Reader::new(BufReader::new(file)).map_while(Result::ok).map(|record| record.event));
    lines.into_iter().flatten().collect()
}

pub(super) fn asked(events: &[Event]) -> Vec<(u64, u64)> {
    let of = |event: &Event| match event {
        Event::RecallAsk(event) => Some((event.bytes, event.freed)),
        _ => None,
    };
    events.iter().filter_map(of).collect()
}

pub(super) fn gave(events: &[Event]) -> u64 {
    let of = |event: &Event| if let Event::RecallGive(event) = event { event.freed } else { 0 };
    events.iter().map(of).sum()
}

/// It has run for so long that it did not come after what is borrowed from now on.
#[track_caller]
pub(super) fn was_there_before(bare: &Running) {
    let ticks = gpupool_metrics::stat(bare.pid()).unwrap().started as f64;
    eventually("one that has been there for a while", || {
        let up: f64 = std::fs::read_to_string("/proc/uptime").unwrap().split(' ').next()?.parse().ok()?;
        (up - ticks / 100.0 > 4.0).then_some(())
    });
}

/// Ranks of a launcher that says how many there are.
pub(super) fn launched(machine: &Machine, number: u32, count: u32, priority: u32) -> Run {
    let run = machine.neighbour(number, priority).env("LOCAL_RANK", number.to_string());
    run.env("LOCAL_WORLD_SIZE", count.to_string())
}
