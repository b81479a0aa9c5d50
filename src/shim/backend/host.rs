//! How much memory the host could give.

use std::fs;

/// Bytes kept back from what the kernel calls available, so that the host itself does not come under pressure.
const KEEP: u64 = 2 << 30;

/// Bytes that the host could give to this process now: the kernel's `MemAvailable`, or what a container's limit leaves
/// where that is less, less 2 GiB. 0 where nothing can be read.
pub fn available() -> u64 {
    let kernel = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo(&text, "MemAvailable:")).unwrap_or(0);
    container().map_or(kernel, |(limit, used)| limit.saturating_sub(used).min(kernel)).saturating_sub(KEEP)
}

/// Bytes of memory that this process may use at most: the machine's, or a container's limit where that is less. 0 where
/// nothing can be read.
pub fn total() -> u64 {
    let kernel = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo(&text, "MemTotal:")).unwrap_or(0);
    container().map_or(kernel, |(limit, _)| limit.min(kernel))
}

/// A line of `/proc/meminfo`, in bytes.
fn meminfo(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib.saturating_mul(1024))
}

/// Limit and use of the memory cgroup, version 2 and then 1. A container sees its own group at the root.
fn container() -> Option<(u64, u64)> {
    let pairs = [
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ];
    pairs.iter().find_map(|(limit, usage)| {
        let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        Some((number(limit)?, number(usage)?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_says() {
        let text = "MemTotal:       24589672 kB\nMemFree:         123 kB\nMemAvailable:   20000000 kB\n";
        assert_eq!(meminfo(text, "MemAvailable:"), Some(20_000_000 * 1024));
        assert_eq!(meminfo(text, "MemTotal:"), Some(24_589_672 * 1024));
        assert_eq!(meminfo("MemTotal: 1 kB\n", "MemAvailable:"), None);
        assert_eq!(meminfo("MemAvailable: many kB\n", "MemAvailable:"), None);
    }
}
