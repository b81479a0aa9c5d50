//! Every row of the hook table, on every route by which programs reach the driver: the pointer a program gets is ours
//! exactly where the driver has the function and we hook it, and every other answer is the driver's own.

use harness::{Driver, Route, Run, hooks, library};
use std::collections::BTreeSet;

/// Driver functions that are not hooked, and names that no driver has: asked beside the hooks.
const OTHERS: &[&str] = &[
    "cuMemAlloc",
    "cuMemFree",
    "cuMemGetInfo",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDriverGetVersion",
    "cuCtxGetCurrent",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoDAsync_v2_ptsz",
    "cuLaunchKernel",
    "cuLaunchKernel_ptsz",
    "cuStreamSynchronize",
    "cuNoSuchFunction",
    "cuMemAlloc_v9",
    "cuda",
    "cu",
    "culprit",
];

fn every_name() -> Route {
    let names = hooks().into_iter().chain(OTHERS.iter().map(|name| (*name).to_owned())).collect();
    Route::new(names, Driver::Simulated)
}

/// Hooks that the simulated driver exports: what each other route is measured against.
fn exported_hooks(route: &Route) -> BTreeSet<String> {
    route.ask("dlsym", "", &[])
}

#[test]
fn dlsym_on_the_driver_handle_gives_every_hook() {
    let reached = exported_hooks(&every_name());
    // A driver may be older than a row, so rows may be absent, but never those that every CUDA program needs.
    for name in
        ["cuMemAlloc_v2", "cuMemFree_v2", "cuMemAllocPitch_v2", "cuMemGetInfo_v2", "cuGetProcAddress_v2", "cuInit"]
    {
        assert!(reached.contains(name), "{name} is not reached by dlsym");
    }
}

#[test]
fn linking_the_driver_gives_every_hook() {
    let route = every_name().of_this_driver();
    assert_eq!(route.linked(), exported_hooks(&route));
}

#[test]
fn the_default_scope_gives_every_hook() {
    let route = every_name().of_this_driver();
    assert_eq!(route.ask("default", "", &[]), exported_hooks(&route));
}

/// Both kinds of default stream. Which version of a function the driver answers with depends on the version asked for;
/// `resolve` asks for all that matter, so each hook that the driver exports must come up.
fn by_proc_address(form: &str) {
    let route = every_name();
    let (legacy, per_thread) = (route.ask(form, "0", &[]), route.ask(form, "2", &[]));
    let suffixed = |name: &&String| name.ends_with("_ptsz") || name.ends_with("_ptds");
    let wrong: Vec<_> = legacy.iter().filter(suffixed).collect();
    assert!(wrong.is_empty(), "per-thread functions for flags 0: {wrong:?}");
    let exported = exported_hooks(&route);
    let missing: Vec<_> =
        exported.iter().filter(|name| !legacy.contains(*name) && !per_thread.contains(*name)).collect();
    assert!(missing.is_empty(), "{form} never leads to {missing:?}, which the driver exports");
}

#[test]
fn proc_address_gives_every_hook() {
    by_proc_address("gpa1");
}

#[test]
fn proc_address_v2_gives_every_hook() {
    by_proc_address("gpa2");
}

#[test]
fn proc_address_answers_like_the_driver_in_every_corner() {
    let shim = Run::program("resolver_answers").same_under_shim(&[]);
    shim.succeeds().is_quiet().says("an unknown symbol by dlsym: null");
}

#[test]
fn routing_is_the_same_in_every_mode_that_is_not_off() {
    let route = every_name();
    for mode in ["trace", "spill"] {
        route.ask("gpa2", "0", &[("GPUPOOL_MODE", mode)]);
        route.ask("dlsym", "", &[("GPUPOOL_MODE", mode)]);
    }
}

/// `dlsym` is asked before there are settings to read, so its hooks stay and pass every call on.
#[test]
fn in_mode_off_proc_address_gives_the_drivers_own_functions() {
    let names = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(names.path(), hooks().into_iter().collect::<Vec<_>>().join("\n") + "\n").unwrap();
    for form in ["gpa1", "gpa2"] {
        let run = Run::program("resolve").arg(form).arg(names.path()).arg("0");
        let (bare, off) = (run.clone().go(), run.shim().env("GPUPOOL_MODE", "off").go());
        off.succeeds().is_quiet();
        assert!(bare.stdout.contains("libcuda.so.1:cuMemAlloc_v2"));
        // The functions that resolve are themselves found by dlsym.
        let but_resolvers = |text: &str| {
            text.lines().filter(|line| !line.contains("cuGetProcAddress")).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(but_resolvers(&off.stdout), but_resolvers(&bare.stdout));
    }
}

#[test]
fn functions_that_are_looked_up_while_another_thread_starts_are_ours_too() {
    for _ in 0..3 {
        let run = Run::program("resolve_early").sim("1x64MiB").log();
        run.shim().go().succeeds().prints("all got the same function\n");
    }
}

#[test]
fn no_level_of_the_log_changes_what_is_hooked() {
    let names = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(names.path(), hooks().into_iter().collect::<Vec<_>>().join("\n") + "\n").unwrap();
    let ask = |log: &str| {
        let run = Run::program("resolve").arg("gpa2").arg(names.path()).arg("0").shim().env("GPUPOOL_LOG", log).go();
        run.succeeds();
        run.stdout
    };
    let loud = ask("warn");
    assert!(loud.contains("libgpupool.so:cuLaunchKernel") && loud.contains("libgpupool.so:cuGraphLaunch"), "{loud}");
    for log in ["off", "error", "0", "1", "gpupool::memory=error"] {
        assert_eq!(ask(log), loud, "{log}");
    }
}

#[test]
fn the_shim_needs_no_cuda_library() {
    let dynamic = Run::command("readelf").arg("-d").arg(library("libgpupool.so")).go();
    dynamic.succeeds();
    let needed = dynamic.stdout.lines().filter(|line| line.contains("(NEEDED)"));
    // Parts of the C library have files of their own before glibc 2.34.
    let allowed = [
        "libc.so.6",
        "libgcc_s.so.1",
        "ld-linux-x86-64.so.2",
        "libm.so.6",
        "libdl.so.2",
        "libpthread.so.0",
        "librt.so.1",
    ];
    let strangers: Vec<_> =
        needed.filter(|line| !allowed.iter().any(|name| line.ends_with(&format!("[{name}]")))).collect();
    assert!(strangers.is_empty(), "{strangers:?}");
}

/// Text with one space between words.
fn in_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The types of CUDA's newest interface that `cudarc` has, which it declares whatever version it is built for.
fn driver_types() -> String {
    // Of this platform's packages alone: what others need is not on a machine that has only built this.
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let cargo = std::process::Command::new(env!("CARGO"))
        .args(["metadata", "--offline", "--format-version=1", "--filter-platform", &platform])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap_or_else(|error| panic!("cargo metadata: {error}"));
    let told: serde_json::Value =
        serde_json::from_slice(&cargo.stdout).unwrap_or_else(|error| panic!("cargo metadata: {error}: {cargo:?}"));
    let package = told["packages"].as_array().and_then(|all| all.iter().find(|package| package["name"] == "cudarc"));
    let manifest = package.and_then(|package| package["manifest_path"].as_str());
    let manifest = std::path::Path::new(manifest.unwrap_or_else(|| panic!("cargo metadata names no cudarc: {told}")));
    let types = manifest.with_file_name("src/driver/sys/mod.rs");
    std::fs::read_to_string(&types).unwrap_or_else(|error| panic!("{}: {error}", types.display()))
}

/// Names and types of the parameters in a declaration of Rust.
fn parameters(list: &str) -> Vec<(&str, &str)> {
    list.split(',').filter_map(|parameter| parameter.trim().split_once(": ")).collect()
}

/// What is wrong with how the table of hooks treats a function with these parameters, if any is a handle of memory.
fn mistreated(name: &str, takes: &[(&str, &str)], table: &str) -> Option<String> {
    // A multicast object is no memory: it is the driver's, and so is its handle.
    let is_handle = |(name, of): &&(&str, &str)| {
        of.ends_with("CUmemGenericAllocationHandle") && *name != "mcHandle" || of.ends_with("CUarrayMapInfo")
    };
    let at = takes.iter().position(|parameter| is_handle(&parameter))?;
    let row = table.split_once(&format!(" {name}(")).and_then(|(_, rest)| rest.split_once(';'));
    let Some((row, _)) = row else { return Some(format!("{name} has no row")) };
    let Some((own, body)) = row.split_once(") => ") else { return Some(format!("{name}: {row} is no row")) };
    let own = parameters(own);
    if own.len() != takes.len() {
        return Some(format!("{name} takes {} arguments and its row {}", takes.len(), own.len()));
    }
    let Some((body, given)) = body.trim_end_matches(')').split_once('(') else {
        return Some(format!("{name}: {body} is no body"));
    };
    let given: Vec<&str> = given.split(',').map(str::trim).collect();
    // A body about a handle that is given gets it first, and calls the driver with another in its place.
    let is_translated = match takes[at].1.starts_with("*mut") && !takes[at].1.ends_with("CUarrayMapInfo") {
        true => ["mapping::create", "mapping::retain", "mapping::import"].contains(&body) && given[0] == own[at].0,
        false => body.starts_with("handle::") && given[0] == own[at].0,
    };
    (!is_translated).then(|| format!("{name}: {} is left as it is by {body}", own[at].0))
}

#[test]
fn every_call_that_takes_or_gives_a_handle_of_memory_is_translated() {
    let types = driver_types();
    let table = concat!(env!("CARGO_MANIFEST_DIR"), "/../src/shim/hook/table.rs");
    let table = in_one_line(&std::fs::read_to_string(table).unwrap());
    let (mut found, mut wrong) = (BTreeSet::new(), Vec::new());
    for declaration in types.split("pub unsafe fn ").skip(1) {
        let Some((name, rest)) = declaration.split_once('(') else { continue };
        let Some((list, _)) = rest.split_once(") -> CUresult") else { continue };
        let list = in_one_line(list);
        let takes = parameters(&list);
        if !list.contains("CUmemGenericAllocationHandle") && !list.contains("CUarrayMapInfo") {
            continue;
        }
        found.insert(name);
        wrong.extend(mistreated(name, &takes, &table));
        if takes.iter().any(|parameter| parameter.1 == "CUstream") {
            wrong.extend(mistreated(&format!("{name}_ptsz"), &takes, &table));
        }
    }
    // From the first of them to those of CUDA 13.3.
    for name in ["cuMemMap", "cuMemMapArrayAsync", "cuMulticastBindMem_v2", "cuLogicalEndpointBindMem"] {
        assert!(found.contains(name), "{name} is not among {found:?}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
