//! The log of contexts: every one with its maker, cost, use and end.

use crate::case::{Case, Told};
use gpupool_events::{ContextCreate, ContextUse, Event};

fn created(told: &Told) -> Vec<&ContextCreate> {
    let events = told.records.iter().map(|record| &record.event);
    events.filter_map(|event| if let Event::ContextCreate(made) = event { Some(made) } else { None }).collect()
}

#[track_caller]
fn used(told: &Told, device: u32) -> ContextUse {
    told.event("the use of a context", |event| match event {
        Event::ContextUse(used) if used.device == device => Some(used.clone()),
        _ => None,
    })
}

#[test]
fn a_context_is_known_by_gpu_call_caller_and_cost() {
    let told = Case::program("contexts", "one").go();
    let [made] = created(&told)[..] else { told.fail("expected one context") };
    assert_eq!((made.id, made.device, made.kind.as_str()), (1, 3, "primary"));
    assert_eq!((made.call.as_str(), made.caller.as_deref()), ("cuDevicePrimaryCtxRetain", Some("contexts")));
    assert_eq!((made.thread.as_str(), made.runtime_call.as_deref()), ("contexts", None));
    assert_eq!((made.cost, made.approximate), (Some(523 << 20), true));
    assert!(made.uuid.as_deref().is_some_and(|uuid| uuid.starts_with("GPU-")), "{made:?}");
    assert!(made.pci.as_deref().is_some_and(|pci| pci.starts_with("0000:")), "{made:?}");
    assert!(made.seconds > 0.0 && made.seconds < 60.0, "{made:?}");
    let symbols: Vec<_> = made.site.iter().flat_map(|site| &site.native).filter_map(|f| f.symbol.as_deref()).collect();
    assert_eq!(symbols[..2], ["compute_on", "main"]);
}

#[test]
fn what_a_context_costs_is_what_the_driver_took() {
    for mib in [16, 300] {
        let told = Case::program("contexts", "stray").env("SIMCUDA_CONTEXT_MIB", &mib.to_string()).go();
        let costs: Vec<_> = created(&told).iter().map(|made| made.cost).collect();
        assert_eq!(costs, [Some(mib << 20); 2]);
    }
}

#[test]
fn with_nvml_the_cost_of_a_context_is_exact() {
    let told = Case::program("contexts", "stray").env("SIMCUDA_CONTEXT_MIB", "300").nvml().go();
    told.finds(&["GP001"]).warns("nothing ran in it, 300.0 MiB;");
    let costs: Vec<_> = created(&told).iter().map(|made| (made.cost, made.approximate)).collect();
    assert_eq!(costs, [(Some(300 << 20), false); 2]);
}

#[test]
fn a_second_context_of_a_gpu_costs_what_it_adds() {
    for case in ["two", "destroyed"] {
        let told = Case::program("contexts", case).env("SIMCUDA_CONTEXT_MIB", "16").go();
        for made in created(&told) {
            assert_eq!(made.cost, Some(16 << 20), "{case}: {made:?}");
        }
    }
}

#[test]
fn use_is_counted_exactly() {
    let told = Case::program("contexts", "used").go();
    let used = used(&told, 3);
    assert_eq!((used.launches, used.copies, used.allocations, used.modules), (7, 3, 5, 1));
    assert_eq!(used.bytes_peak, (3 << 20) + (4 << 10), "the two that live at once, a small one among them");
    assert!(used.last_use.is_some_and(|at| at > 0.0 && at < 60.0), "{used:?}");
}

#[test]
fn threads_that_meet_at_a_gpu_share_one_record() {
    for _ in 0..10 {
        let told = Case::program("contexts", "threads").go();
        assert_eq!(created(&told).len(), 1, "{:?}", told.records);
        let used = used(&told, 3);
        assert_eq!((used.copies, used.allocations), (800, 8));
        told.finds_nothing();
    }
}

#[test]
fn two_threads_that_see_one_context_appear_write_it_down_once() {
    let told = Case::program("contexts", "appeared_twice").go();
    let of_first: Vec<_> = created(&told).into_iter().filter(|made| made.device == 0).collect();
    assert_eq!(of_first.len(), 1, "{of_first:?}");
}

#[test]
fn each_of_hundreds_of_contexts_is_told_with_its_use() {
    let told = Case::program("contexts", "many").env("SIMCUDA_CONTEXT_MIB", "16").go();
    let events = told.records.iter().map(|record| &record.event);
    let used: Vec<&ContextUse> =
        events.filter_map(|event| if let Event::ContextUse(used) = event { Some(used) } else { None }).collect();
    assert_eq!((created(&told).len(), used.len()), (601, 601));
    let last = used.iter().find(|used| used.id == 601).unwrap_or_else(|| told.fail("no use of the last context"));
    assert_eq!((last.allocations, last.bytes_peak), (5, 4 << 20));
}

#[test]
fn the_most_detailed_log_is_read_too() {
    let told = Case::program("contexts", "stray").env("GPUPOOL_LOG", "trace").go();
    told.finds(&["GP001"]);
    let calls = told.records.iter().filter(|record| matches!(record.event, Event::Call(_))).count();
    assert!(calls > 10, "{calls} calls");
}

#[test]
fn a_stray_context_was_never_used() {
    let told = Case::program("contexts", "pinned").go();
    let stray = used(&told, 0);
    assert_eq!((stray.launches, stray.copies, stray.allocations, stray.modules), (0, 0, 0, 0));
    assert_eq!((stray.bytes_peak, stray.last_use), (0, None));
    let working = used(&told, 3);
    assert_eq!((working.launches, working.copies, working.allocations, working.modules), (2, 2, 2, 1));
}

#[test]
fn the_end_of_a_context_is_noted_with_its_call() {
    let told = Case::program("contexts", "destroyed").go();
    let gone = told.records.iter().filter_map(|record| match &record.event {
        Event::ContextDestroy(gone) => Some((gone.device, gone.kind.as_str(), gone.call.as_str())),
        _ => None,
    });
    let expected = [
        (1, "created", "cuCtxDestroy_v2"),
        (1, "primary", "cuDevicePrimaryCtxRelease_v2"),
        (2, "primary", "cuDevicePrimaryCtxReset_v2"),
    ];
    assert_eq!(gone.collect::<Vec<_>>(), expected);
    // What is gone is no context at exit.
    if told.stderr.contains("contexts: ") {
        told.warns("gpupool: contexts: GPU 3 primary\n");
    }
}

#[test]
fn a_context_made_past_every_hook_is_found_by_its_state() {
    let told = Case::program("contexts", "unseen").go();
    let made = created(&told);
    let (appeared, seen) = (made[0], made[1]);
    assert_eq!((appeared.device, appeared.kind.as_str(), seen.device), (0, "appeared", 3));
    assert!(appeared.call.starts_with("appeared between ") && appeared.call.ends_with("cuDevicePrimaryCtxRetain"));
    told.finds(&["GP001"]);
}

#[test]
fn a_context_made_past_every_hook_is_found_where_it_becomes_current() {
    let told = Case::program("contexts", "unseen_current").go();
    let [found] = created(&told)[..] else { told.fail("expected one context") };
    assert_eq!((found.device, found.kind.as_str()), (3, "appeared"));
    let used = used(&told, 3);
    assert_eq!((used.launches, used.copies, used.allocations), (2, 2, 2));
    told.finds_nothing();
}

#[test]
fn the_start_of_cuda_is_in_the_log() {
    let told = Case::program("variables", "early").env("CUDA_DEVICE_ORDER", "PCI_BUS_ID").go();
    let init =
        told.event("cuda.init", |event| if let Event::CudaInit(init) = event { Some(init.clone()) } else { None });
    assert_eq!((init.visible_devices.as_deref(), init.device_order.as_deref()), (Some("3"), Some("PCI_BUS_ID")));
    assert_eq!((init.call.as_str(), init.caller.as_deref()), ("cuInit", Some("variables")));
}

#[test]
fn a_context_that_the_driver_refuses_is_none() {
    let told = Case::program("contexts", "idle").fault("cuDevicePrimaryCtxRetain:1=2").fails_alike(1).go();
    assert!(created(&told).is_empty() && told.events("context.use").is_empty());
    told.finds_nothing();
}

#[test]
fn memory_that_the_pool_takes_from_other_gpus_makes_no_context_there() {
    // More than the 8 GiB of a GPU: bare, this fails.
    let told = Case::program("steps", "a:9000 c:0").differs().go();
    told.finds(&[]).says("allocate 9000: 0");
    assert!(!told.events("pool.spill").is_empty());
    assert_eq!(created(&told).iter().map(|made| made.device).collect::<Vec<_>>(), [0]);
}

#[test]
fn the_pool_is_no_cost_of_a_context() {
    let told = Case::program("steps", "a:300 a:300 c:0").go();
    assert_eq!(created(&told).iter().map(|made| made.cost).collect::<Vec<_>>(), [Some(523 << 20)]);
    told.finds_nothing();
}

#[test]
fn contexts_are_watched_where_nothing_is_pooled_too() {
    let told = Case::program("contexts", "stray").env("GPUPOOL_MODE", "trace").go();
    told.finds(&["GP001"]);
    let used = used(&told, 3);
    assert_eq!((used.launches, used.copies, used.allocations, used.modules, used.bytes_peak), (2, 2, 2, 1, 0));
}
