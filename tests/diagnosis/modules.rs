//! Modules and limits: GP007 to GP010, the log of loads, and the settings that come before the first module.

use crate::case::{Case, Told};
use gpupool_events::{Event, LimitSet, ModuleLoad};

#[track_caller]
fn c(case: &str) -> Told {
    Case::program("modules", case).go()
}

fn loads(told: &Told) -> Vec<&ModuleLoad> {
    let events = told.records.iter().map(|record| &record.event);
    events.filter_map(|event| if let Event::ModuleLoad(load) = event { Some(load) } else { None }).collect()
}

fn limits(told: &Told) -> Vec<&LimitSet> {
    let events = told.records.iter().map(|record| &record.event);
    events.filter_map(|event| if let Event::LimitSet(limit) = event { Some(limit) } else { None }).collect()
}

#[test]
fn a_module_on_a_gpu_that_runs_nothing_is_found() {
    c("elsewhere").finds(&["GP001", "GP007"]).reads("elsewhere");
    c("there").finds_nothing();
}

#[test]
fn a_load_is_known_by_image_kernels_caller_and_device_malloc() {
    let told = c("malloc");
    let [load] = loads(&told)[..] else { told.fail("expected one load") };
    assert_eq!((load.call.as_str(), load.kind.as_str(), load.device), ("cuModuleLoadData", "ptx", Some(0)));
    assert_eq!((load.bytes, load.kernels, load.uses_malloc), (Some(250), Some(2), true));
    assert_eq!((load.caller.as_deref(), load.path.as_deref(), load.lazy), (Some("modules"), None, false));
    assert_eq!(load.memory, Some(0));
    let first = load.site.as_ref().and_then(|site| site.native.first());
    assert_eq!(first.and_then(|frame| frame.symbol.as_deref()), Some("load_tree"));
    let told = c("no_malloc");
    assert_eq!(loads(&told).iter().map(|load| load.uses_malloc).collect::<Vec<_>>(), [false]);
}

#[test]
fn files_libraries_and_unloads_are_logged() {
    let told = c("file");
    let [file, library] = loads(&told)[..] else { told.fail("expected two loads") };
    assert_eq!((file.call.as_str(), file.path.as_deref()), ("cuModuleLoad", Some("tree.ptx")));
    assert_eq!((file.bytes, file.kernels, file.uses_malloc), (Some(250), Some(2), true));
    assert_eq!((library.call.as_str(), library.kernels, library.uses_malloc), ("cuLibraryLoadData", Some(1), false));
    let unloads = told.records.iter().filter_map(|record| match &record.event {
        Event::ModuleUnload(gone) => Some(gone.call.as_str()),
        _ => None,
    });
    assert_eq!(unloads.collect::<Vec<_>>(), ["cuModuleUnload", "cuLibraryUnload"]);
}

/// What a process on the same GPU takes meanwhile is no price of a module.
#[test]
fn memory_that_others_take_during_a_load_is_not_counted() {
    let told = Case::program("modules", "beside").nvml().go();
    told.finds_nothing();
    assert!(loads(&told)[0].memory > Some(100 << 20), "the case is none: {:?}", loads(&told));
}

#[test]
fn memory_that_another_thread_takes_during_a_load_is_not_counted() {
    let told = Case::program("modules", "beside_thread").nvml().go();
    told.finds_nothing();
    assert!(loads(&told)[0].memory > Some(60 << 20), "the case is none: {:?}", loads(&told));
}

#[test]
fn a_module_that_is_loaded_again_and_again_took_its_memory_once() {
    Case::program("modules", "large_in_turn").nvml().go().finds(&["GP008"]).reads("large_in_turn");
}

#[test]
fn eager_loading_that_takes_much_is_found() {
    let told = Case::program("modules", "large").nvml().go();
    told.finds(&["GP008"]).reads("eager");
    assert_eq!(loads(&told)[0].memory, Some(48 << 20));
    // Every load on this driver is eager; a small one is nobody's problem.
    c("no_malloc").finds_nothing();
}

#[test]
fn device_malloc_with_the_default_heap_is_found() {
    let told = c("malloc");
    told.finds(&["GP009"]).reads("malloc").says("heap: 8192 KiB");
    assert_eq!(told.place(), "load_tree in modules");
}

#[test]
fn device_malloc_with_a_heap_of_its_own_is_no_finding() {
    let told = c("malloc_in_time");
    told.finds_nothing();
    let [limit] = limits(&told)[..] else { told.fail("expected one limit") };
    assert_eq!((limit.limit.as_str(), limit.value, limit.result), ("malloc_heap_size", 64 << 20, 0));
    assert_eq!((limit.by.as_str(), limit.device), ("program", 0));
    let first = limit.site.as_ref().and_then(|site| site.native.first());
    assert_eq!(first.and_then(|frame| frame.symbol.as_deref()), Some("ask_for_heap"));
}

#[test]
fn a_library_loaded_before_any_context_is_judged_by_the_heap_that_comes() {
    let told = c("library");
    told.finds(&["GP009"]);
    assert_eq!(loads(&told).iter().map(|load| load.device).collect::<Vec<_>>(), [None, Some(3)]);
    // Without a context the driver refused the limit, which is its answer and no limit set too late.
    told.says("cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, bytes): 201 CUDA_ERROR_INVALID_CONTEXT");
    assert!(limits(&told).is_empty());
    c("library_in_time").finds_nothing();
    Case::program("modules", "library").env("GPUPOOL_MALLOC_HEAP_SIZE", "64MiB").go().finds_nothing();
}

#[test]
fn the_heap_of_the_environment_is_set_before_the_first_module() {
    // It prints another heap than bare.
    let told = Case::program("modules", "malloc").env("GPUPOOL_MALLOC_HEAP_SIZE", "64MiB").differs().go();
    told.finds_nothing().says("heap: 65536 KiB");
    let [limit] = limits(&told)[..] else { told.fail("expected one limit") };
    assert_eq!((limit.limit.as_str(), limit.value, limit.result), ("malloc_heap_size", 64 << 20, 0));
    assert_eq!((limit.by.as_str(), limit.site.is_none()), ("gpupool", true));
    let at = |name: &str| told.records.iter().position(|record| record.event.name() == name);
    assert!(at("limit.set") < at("module.load"));
}

#[test]
fn stack_and_printf_buffer_of_the_environment_are_set_in_every_context() {
    let settings = Case::program("contexts", "stray").env("GPUPOOL_STACK_SIZE", "16KiB");
    let told = settings.env("GPUPOOL_PRINTF_FIFO_SIZE", "8MiB").go();
    let set = limits(&told).into_iter().map(|limit| (limit.device, limit.limit.clone(), limit.value, limit.result));
    let expected = [0, 3]
        .map(|gpu| [(gpu, "stack_size".to_owned(), 16 << 10, 0), (gpu, "printf_fifo_size".to_owned(), 8 << 20, 0)]);
    assert_eq!(set.collect::<Vec<_>>(), expected.concat());
}

#[test]
fn a_context_that_nobody_saw_being_made_gets_its_limits_too() {
    let told = Case::program("contexts", "unseen_current").env("GPUPOOL_STACK_SIZE", "16KiB").go();
    let set = limits(&told).into_iter().map(|limit| (limit.device, limit.value, limit.result, limit.by.as_str()));
    assert_eq!(set.collect::<Vec<_>>(), [(3, 16 << 10, 0, "gpupool")]);
}

/// Who asks for what there is by default knows of the heap.
#[test]
fn a_heap_of_the_default_size_that_somebody_chose_is_no_finding() {
    c("malloc_default_chosen").finds_nothing();
    Case::program("modules", "malloc").env("GPUPOOL_MALLOC_HEAP_SIZE", "8MiB").go().finds_nothing();
}

#[test]
fn a_limit_that_is_refused_and_was_so_already_is_no_finding() {
    Case::program("modules", "limit_as_it_is").fault("cuCtxSetLimit:1=1").go().finds_nothing();
}

#[test]
fn a_limit_that_the_driver_refuses_is_found() {
    let told = Case::program("modules", "limit").fault("cuCtxSetLimit:1=1").go();
    told.finds(&["GP010"]).reads("limit_refused").says("heap: 8192 KiB");
    assert_eq!(told.place(), "ask_for_heap in modules");
    assert_eq!(limits(&told).iter().map(|limit| limit.result).collect::<Vec<_>>(), [1]);
    c("limit").finds_nothing();
}

#[test]
fn a_limit_of_the_environment_that_the_driver_refuses_is_a_warning_that_names_the_variable() {
    let case = Case::program("modules", "no_malloc").env("GPUPOOL_MALLOC_HEAP_SIZE", "64MiB");
    let told = case.fault("cuCtxSetLimit:1=1").go();
    told.finds(&[])
        .warns("GPUPOOL_MALLOC_HEAP_SIZE=64.0 MiB: the driver answered CUDA_ERROR_INVALID_VALUE (1) on GPU 0");
}
