//! Processes as their pages tell of them, for tests of what is made of pages.

use std::path::PathBuf;

use gpupool_metrics::{
    Context, Counter, Finding, Gpu, Identity, Label, Levels, Life, Loan, Pinned, Place, Process, Residence, Site,
    Snapshot, Took,
};

use crate::pages::{Listed, Look};

pub const GIB: u64 = 1 << 30;

/// A process on two GPUs and the host, which has something of everything.
pub fn listed(pid: u32, name: &str) -> Listed {
    let identity = Identity { boot: [3; 16], started: 77, namespace: 1, image: 140_736, pid };
    let process = Process {
        identity,
        rank: Some(1),
        world: Some(4),
        job_rank: None,
        job_world: None,
        created: 1_700_000_000_500_000,
        library: "0.2.0".to_owned(),
        name: name.to_owned(),
        command: format!("{name} --lr 1e-4"),
    };
    let gpu =
        |ordinal: u32| Gpu { ordinal, uuid: [ordinal as u8 + 1; 16], name: "NVIDIA H200".to_owned(), total: 140 * GIB };
    let place = |on_host, number, limit: u64, held: u64, used: u64| Place {
        on_host,
        on_disk: false,
        number,
        limit: limit * GIB,
        held: held * GIB,
        used: used * GIB,
        peak_used: (used + 1) * GIB,
        anchored: GIB / 2,
        own: GIB,
        reserve: if on_host { 0 } else { GIB },
        drained: false,
    };
    let levels = Levels {
        updated: 1_700_000_009_000_000,
        mode: "pool".to_owned(),
        live_blocks: 12,
        live_bytes: 150 * GIB,
        peak_live_bytes: 160 * GIB,
        suspended: 0,
        priority: 50,
        pinned: Pinned {
            limit: 64 * GIB,
            pinned: 8 * GIB,
            requested: 6 * GIB,
            registered: GIB,
            peak_pinned: 9 * GIB,
            peak_requested: 7 * GIB,
        },
        residence: Residence {
            near: 120 * GIB,
            on_peers: 20 * GIB,
            on_host: 10 * GIB,
            lost_microseconds: 1_500_000,
            saved_microseconds: -250_000,
        },
        gpus: vec![gpu(0), gpu(1)].into(),
        places: vec![place(false, 0, 139, 130, 120), place(false, 1, 139, 25, 20), place(true, 0, 256, 12, 10)].into(),
        loans: vec![
            Loan { borrower: 0, on_host: false, number: 1, bytes: 20 * GIB },
            Loan { borrower: 0, on_host: true, number: 0, bytes: 10 * GIB },
        ]
        .into(),
    };
    let context = |id, device, launches, cost| Context {
        id,
        device,
        kind: "primary".to_owned(),
        cost,
        call: "cuDevicePrimaryCtxRetain".to_owned(),
        site: "/home/ada/train.py:88 in step".to_owned(),
        launches,
        copies: 0,
        allocations: 0,
    };
    let mut counters = [0; Counter::ALL.len()];
    for counter in Counter::ALL {
        counters[counter as usize] = 1_000_000 * (counter as u64 + 1);
    }
    let found = |at: u64, code: &str| Finding {
        at: 1_700_000_000_000_000 + at,
        code: code.to_owned(),
        device: Some(1),
        text: "a context on GPU 1 was made by cudaSetDevice and nothing ran in it".to_owned(),
    };
    let site = Site {
        memory: "pinned".to_owned(),
        text: "/home/ada/data.py:7 in load".to_owned(),
        live: 6 * GIB,
        blocks: 3,
        total: 9 * GIB,
    };
    let device = Site {
        memory: "device".to_owned(),
        text: "/home/ada/train.py:12 in weights".to_owned(),
        live: 5 * GIB,
        blocks: 5,
        total: 5 * GIB,
    };
    let label = Label {
        name: "kv".to_owned(),
        blocks: 3,
        bytes: 30 * GIB,
        near: 10 * GIB,
        on_peers: 20 * GIB,
        on_host: 0,
        budget: Some(10 * GIB),
    };
    let told = Snapshot {
        process,
        ended: false,
        took: Took::default(),
        moves: false,
        counters,
        levels,
        contexts: vec![context(1, 0, 500, Some(GIB / 2)), context(2, 1, 0, None)].into(),
        sites: vec![site, device].into(),
        findings: vec![found(1, "GP001"), found(2, "GP016"), found(3, "GP001")].into(),
        labels: vec![label].into(),
    };
    Listed { state: Life::Running, owner: 1000, page: PathBuf::from("/run/gpupool/1-77.page"), told }
}

/// A look that found these.
pub fn look(rows: Vec<Listed>) -> Look {
    Look { rows, skipped: Vec::new() }
}
