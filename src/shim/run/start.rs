//! The start: at the first call of the driver that a hook sees.

use super::{fork, observers};
use crate::agent;
use crate::backing::reclaim;
use crate::guard;
use crate::log::{self, verdict};
use crate::process::{self, Event, Phase};
use crate::serve::{handles, memory};
use crate::tiers;
use crate::watch::{context, submitted};
use gpupool_config::{Mode, Settings};
use gpupool_events::{Panic, ProcessStart};
use gpupool_interpose::Api;
use gpupool_interpose::errno::Errno;

/// Whether hooks do anything in this process; starts the shim at the first call.
#[inline]
pub fn takes_part(api: Api) -> bool {
    process::is_active() || takes_part_later(api)
}

#[cold]
fn takes_part_later(api: Api) -> bool {
    let _errno = Errno::keep();
    match process::phase() {
        Phase::Active | Phase::Closed => true,
        Phase::Idle => start() || resolves(api),
        Phase::Starting => resolves(api),
        Phase::Forked => fork::used_in_child(api),
        Phase::Passing => false,
    }
}

/// Whether this call hands out functions that the program keeps, while another thread starts the shim: a pointer to the
/// driver's own would bypass the hooks for good. A hook that is called too early passes through by itself.
#[cold]
fn resolves(api: Api) -> bool {
    matches!(api.name(), "cuGetProcAddress" | "cuGetProcAddress_v2" | "cuGetExportTable")
        && matches!(process::phase(), Phase::Starting | Phase::Active | Phase::Closed)
}

#[cold]
fn start() -> bool {
    let Some(_inside) = guard::enter_sheltered() else { return false };
    // Called by trampolines outside of their boundary.
    std::panic::catch_unwind(start_inside).unwrap_or_else(|_| {
        process::happened(Event::Declined);
        false
    })
}

fn start_inside() -> bool {
    if !process::happened(Event::Called) {
        return false;
    }
    if process::has_rights_of_its_file() {
        process::explain("the program's file gives it rights that who set its environment does not have (setuid)");
        process::happened(Event::Declined);
        return false;
    }
    // Before the settings: where these are wrong, nothing is looked at in this process, and `run --fail-on` must know.
    verdict::prepare();
    let settings = match Settings::read(std::env::vars_os()) {
        Ok(settings) => settings,
        Err(problems) => {
            verdict::began();
            process::refuse(&problems);
            return false;
        }
    };
    if settings.mode == Mode::Off {
        const OFF: &str = "GPUPOOL_MODE=off";
        verdict::began();
        verdict::apart(OFF);
        process::explain(OFF);
        process::happened(Event::Declined);
        return false;
    }
    log::start(&settings);
    verdict::began();
    let without_effect = settings.without_effect();
    if !without_effect.is_empty() {
        log::warn_once("without_effect", without_effect.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "));
    }
    let without_unit = gpupool_config::without_unit(std::env::vars_os());
    if !without_unit.is_empty() {
        log::warn_once("without_unit", without_unit.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "));
    }
    let mode = settings.mode;
    process::remember(settings, gpupool_config::rank(std::env::vars_os()));
    install_panic_report();
    submitted::look_at_environment();
    context::observe(observers::OF_CONTEXTS);
    reclaim::may_be_asked(observers::OF_HOST_MEMORY);
    memory::oom::ask_about_handles(handles::uncharged_at);
    let exe = std::env::current_exe().unwrap_or_default();
    let rank = process::rank();
    let host = rank.map(|_| log::host_name().to_string_lossy().into_owned());
    log::emit(|| {
        let event = ProcessStart {
            version: gpupool_config::VERSION.to_owned(),
            mode: mode.word().to_owned(),
            exe: exe.display().to_string(),
            local_rank: rank.map(|rank| rank.number),
            job_ranks: rank.and_then(|rank| rank.ranks),
            job: rank.and_then(|rank| rank.job.clone()),
            host,
        };
        (event, format!("gpupool {} in {}, mode {}", gpupool_config::VERSION, exe.display(), mode.word()))
    });
    agent::prepare();
    tiers::start();
    process::happened(Event::Started);
    true
}

/// Reports panics of this library through its own log; the standard library linked into it is its own copy, so a Rust
/// program's panic hook is not touched.
fn install_panic_report() {
    std::panic::set_hook(Box::new(|info| {
        // Also beside a call that is not guarded otherwise: to write a line may be where a thread is cancelled.
        let (_errno, _inside) = (Errno::keep(), guard::enter_sheltered());
        let place = info.location().map_or_else(|| "unknown".to_owned(), ToString::to_string);
        log::emit(|| (Panic { place: Some(place), api: None }, format!("internal error: {info}")));
    }));
}
