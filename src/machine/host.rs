//! How much memory the host could give to this process.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cgroup::{self, DeviceGroup, Group, Mount};

/// Bytes kept back from what is available, so that the host itself does not come under pressure.
pub const KEPT_BACK: u64 = 2 << 30;

/// Where to ask. What does not change while a process runs is read once.
#[derive(Debug)]
pub struct Host {
    root: PathBuf,
    mounts: Vec<Mount>,
}

/// The host's memory at one moment, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// The machine's memory. `None`: nobody tells.
    pub installed: Option<u64>,
    /// What the kernel could hand out without swapping, whoever asks. `None`: nobody tells.
    pub free: Option<u64>,
    /// The limits that hold for this process, its own group's first and then those around it.
    pub groups: Vec<Group>,
}

impl Host {
    /// The host of this process, or one that is described by the `proc` and `sys` folders under `root`.
    pub fn at(root: &Path) -> Self {
        Self { root: root.to_owned(), mounts: cgroup::mounts(root) }
    }

    /// The limits on memory of devices that hold for this process now (the `dmem` controller of control groups).
    pub fn device_limits(&self) -> Vec<DeviceGroup> {
        cgroup::device_limits(&self.root, &self.mounts)
    }

    /// The folders of this process's control group of version 2 and of those around it, the innermost first.
    pub fn groups(&self) -> Vec<PathBuf> {
        cgroup::own_folders(&self.root, &self.mounts)
    }

    /// What it has now. A process may be moved to another group, and limits change, so all of that is read anew.
    pub fn memory(&self) -> Memory {
        let meminfo = fs::read_to_string(self.root.join("proc/meminfo")).unwrap_or_default();
        let installed = field(&meminfo, "MemTotal");
        // Kernels before 3.14 and some sandboxes leave the estimate out; what is wholly free is less than it.
        let free = field(&meminfo, "MemAvailable").or_else(|| field(&meminfo, "MemFree"));
        let asked = if installed.is_none() || free.is_none() { sysinfo() } else { None };
        Memory {
            installed: installed.or(asked.map(|(total, _)| total)),
            free: free.or(asked.map(|(_, free)| free)),
            groups: cgroup::limits(&self.root, &self.mounts),
        }
    }
}

impl Memory {
    /// The most that this process may ever use: the machine's memory, or the tightest limit where that is less.
    pub fn total(&self) -> Option<u64> {
        self.groups.iter().map(|group| group.limit).chain(self.installed).min()
    }

    /// What this process could take now: the kernel's estimate, or what a limit leaves where that is less.
    pub fn available(&self) -> Option<u64> {
        self.groups.iter().map(Group::left).chain(self.free).min()
    }

    /// [`Memory::available`] less [`KEPT_BACK`].
    pub fn spare(&self) -> Option<u64> {
        self.available().map(|bytes| bytes.saturating_sub(KEPT_BACK))
    }

    /// The most that the pool lends of the host, given what the user set: no more than this process may ever use. Addresses are
    /// reserved for all of it. Where nobody tells how much that is, the user knows.
    pub fn lent(&self, set: Option<u64>, ranks: u32) -> Option<u64> {
        match set {
            Some(bytes) => Some(bytes.min(self.total().unwrap_or(u64::MAX))),
            None => self.host_limit(ranks),
        }
    }

    /// What the pool lends of the host where no setting says: half of what this process could take, shared with the other
    /// ranks of its job on this host, each of which will come to the same number.
    pub fn host_limit(&self, ranks: u32) -> Option<u64> {
        self.available().map(|bytes| bytes.saturating_sub(KEPT_BACK) / 2 / u64::from(ranks.max(1)))
    }

    /// What the pool pins where no setting says: a quarter of the memory, divided by the ranks of the job on this
    /// host.
    pub fn pinned_limit(&self, ranks: u32) -> Option<u64> {
        self.total().map(|bytes| bytes / 4 / u64::from(ranks.max(1)))
    }

    /// The group that leaves the least.
    pub fn tightest(&self) -> Option<&Group> {
        self.groups.iter().min_by_key(|group| group.left())
    }
}

/// A line of `/proc/meminfo`, in bytes.
fn field(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Total and free bytes by the system call, for where `/proc` is missing. It knows nothing of the page cache, so what it
/// calls free is less than what could be had.
fn sysinfo() -> Option<(u64, u64)> {
    // SAFETY: all-zero is a valid value of this C struct of integers.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: the output is a local of the type that the call fills.
    if unsafe { libc::sysinfo(&raw mut info) } != 0 {
        return None;
    }
    let bytes = |units: u64| units.saturating_mul(u64::from(info.mem_unit));
    Some((bytes(info.totalram), bytes(info.freeram.saturating_add(info.bufferram))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_numbers_are_kib() {
        let text = "MemTotal:       24589672 kB\nMemAvailable:   20000000 kB\nHugePages_Total: 3\n";
        assert_eq!(field(text, "MemTotal"), Some(24_589_672 << 10));
        assert_eq!(field(text, "MemAvailable"), Some(20_000_000 << 10));
        assert_eq!(field(text, "MemFree"), None);
        assert_eq!(field(text, "HugePages_Total"), None);
        assert_eq!(field("MemTotal: many kB\n", "MemTotal"), None);
        assert_eq!(field("MemTotal: 18446744073709551615 kB\n", "MemTotal"), None);
    }

    #[test]
    fn no_more_is_lent_than_the_machine_or_a_limit_leaves_to_this_process() {
        const GIB: u64 = 1 << 30;
        let group = Group { folder: "/sys/fs/cgroup/job".into(), limit: 11 * GIB, used: GIB };
        let machine = Memory { installed: Some(64 * GIB), free: Some(48 * GIB), groups: Vec::new() };
        let limited = Memory { groups: vec![group], ..machine.clone() };
        for (memory, set, lent) in [
            (&machine, Some(40 << 40), Some(64 * GIB)),
            (&machine, Some(60 * GIB), Some(60 * GIB)),
            (&machine, Some(0), Some(0)),
            (&machine, None, Some(23 * GIB)),
            (&limited, Some(40 << 40), Some(11 * GIB)),
            (&Memory::default(), Some(40 << 40), Some(40 << 40)),
            (&Memory::default(), None, None),
        ] {
            assert_eq!(memory.lent(set, 1), lent, "{set:?} of {memory:?}");
        }
    }

    #[test]
    fn the_system_call_knows_the_machines_memory_too() {
        let (total, free) = sysinfo().unwrap_or_default();
        assert!(total > 0 && free <= total, "{total} {free}");
        if let Some(told) = fs::read_to_string("/proc/meminfo").ok().and_then(|text| field(&text, "MemTotal")) {
            assert!(total.abs_diff(told) < 1 << 20, "{total} {told}");
        }
    }
}
