//! How much memory of the host this process may take.

use crate::nvml::{self, Uuid};
use crate::process;
use gpupool_config::Budget;
use gpupool_interpose::cancel;
use gpupool_machine::{Host, Memory};
use once_cell::race::OnceBox;
use std::path::Path;

/// `race`: two threads may both look where the groups are mounted, the second result is dropped.
static HOST: OnceBox<Host> = OnceBox::new();

fn host() -> &'static Host {
    HOST.get_or_init(|| Box::new(Host::at(Path::new("/"))))
}

/// What the host has at this moment, and what limits this process.
fn memory() -> Memory {
    // It reads files, in which a thread may be cancelled: that unwinding would end the program where it meets a hook's boundary.
    let _sheltered = cancel::shelter();
    host().memory()
}

/// The smallest bound that others set to what this process may use of a GPU: control groups (`dmem`, and NVML's limits of them), MPS and HAMi. `pci`: its address.
pub fn budget_of(gpu: u32, pci: &str, uuid: &Uuid) -> Option<Budget> {
    let _sheltered = cancel::shelter();
    let groups = host().device_limits().into_iter().filter(|group| group.is_of(pci));
    let groups = groups.map(|group| Budget { bytes: group.limit, source: group.file.display().to_string() });
    let nvml = nvml::get();
    let by_nvml = host().groups().into_iter().filter_map(|folder| {
        let limits = nvml.as_ref()?.memory_limits(uuid, &folder)?;
        Some(Budget { bytes: limits.hard, source: format!("NVML's limit of {}", folder.display()) })
    });
    gpupool_config::tightest(&process::settings().outside, gpu, groups.chain(by_nvml))
}

/// Bytes that could be taken now, less what is kept back for the host itself. `None` where nobody can tell.
pub fn available() -> Option<u64> {
    memory().spare()
}

/// Bytes of addresses that this process may map beside those that it has (`RLIMIT_AS`); `None`: as many as there are.
pub fn addresses_left() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the pointer is to a local of that type.
    let told = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) };
    let _sheltered = cancel::shelter();
    if told != 0 || limit.rlim_cur == libc::RLIM_INFINITY {
        return None;
    }
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mapped = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix("kB"))?;
    Some(limit.rlim_cur.saturating_sub(mapped.trim().parse::<u64>().ok()? << 10))
}

/// The most that the pool takes of the host's memory in this process. Where nobody can tell what there is, nothing.
pub fn limit() -> u64 {
    let settings = process::settings();
    if settings.host_limit == Some(0) {
        return 0;
    }
    memory().lent(settings.host_limit, settings.ranks()).unwrap_or(0)
}

/// The most that the pool pins in this process. Where nobody can tell what there is, the driver has the last word.
pub fn pinned_limit() -> u64 {
    let settings = process::settings();
    settings.pinned_limit.or_else(|| memory().pinned_limit(settings.ranks())).unwrap_or(u64::MAX)
}
