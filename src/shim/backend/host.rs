//! What the host has: how much memory it could give, and whether network adapters may want the GPUs'.

use std::fs;

/// Bytes kept back from what the kernel calls available, so that the host itself does not come under pressure.
const KEEP: u64 = 2 << 30;

/// Bytes that the host could give to this process now: the kernel's `MemAvailable`, or what a container's limit leaves
/// where that is less, less 2 GiB. 0 where nothing can be read.
pub fn available() -> u64 {
    let kernel = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_available(&text)).unwrap_or(0);
    container_room().map_or(kernel, |room| room.min(kernel)).saturating_sub(KEEP)
}

fn meminfo_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib.saturating_mul(1024))
}

/// Limit less use of the memory cgroup, version 2 and then 1. A container sees its own group at the root.
fn container_room() -> Option<u64> {
    let pairs = [
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ];
    pairs.iter().find_map(|(limit, usage)| {
        let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        Some(number(limit)?.saturating_sub(number(usage)?))
    })
}

/// Whether there is a network adapter that reads other devices' memory (InfiniBand, RoCE).
pub fn has_rdma_adapter() -> bool {
    fs::read_dir("/sys/class/infiniband").is_ok_and(|mut adapters| adapters.next().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_available_memory_of_the_kernel() {
        let text = "MemTotal:       24589672 kB\nMemFree:         123 kB\nMemAvailable:   20000000 kB\n";
        assert_eq!(meminfo_available(text), Some(20_000_000 * 1024));
        assert_eq!(meminfo_available("MemTotal: 1 kB\n"), None);
        assert_eq!(meminfo_available("MemAvailable: many kB\n"), None);
    }
}
