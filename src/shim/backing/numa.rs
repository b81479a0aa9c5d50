//! Host memory near a GPU: a copy to a GPU on the other socket has to cross the link between them.

use gpupool_cuda::Driver;
use std::ffi::{c_int, c_ulong};
use std::fs;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// `CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID`.
pub const HOST_NUMA_ID: c_int = 134;

/// Nodes that a mask of one word can name; there is no machine with more.
const NODES: u32 = c_ulong::BITS;

/// This thread prefers a node until dropped.
pub struct Preferred(());

/// Has the pages that this thread allocates come from the node next to the current GPU. `None` where that changes nothing:
/// one node, a driver that does not say, a program that was given a policy of its own (`numactl`), a container that
/// forbids it.
pub fn prefer_near(driver: &Driver) -> Option<Preferred> {
    if !several_nodes() || policy()? != libc::MPOL_DEFAULT {
        return None;
    }
    let device = driver.current_device().ok()?;
    let node = u32::try_from(driver.device_attribute(HOST_NUMA_ID, device).ok()?).ok()?;
    if node >= NODES {
        return None;
    }
    match set_policy(libc::MPOL_PREFERRED, 1 << node) {
        Ok(()) => Some(Preferred(())),
        Err(error) => {
            refused(&error);
            None
        }
    }
}

impl Drop for Preferred {
    fn drop(&mut self) {
        if let Err(error) = set_policy(libc::MPOL_DEFAULT, 0) {
            refused(&error);
        }
    }
}

/// Containers forbid these calls by default. It costs speed on a machine of several sockets, and nothing else.
fn refused(error: &std::io::Error) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        tracing::info!(
            target: "gpupool::pinned", about = "numa",
            "pinned memory is not placed near its GPU: set_mempolicy: {error} (in a container, allow it with --cap-add SYS_NICE)"
        );
    }
}

/// Whether more than one node of this machine has memory.
fn several_nodes() -> bool {
    static SEVERAL: OnceLock<bool> = OnceLock::new();
    *SEVERAL.get_or_init(|| {
        let nodes = fs::read_to_string("/sys/devices/system/node/has_memory").unwrap_or_default();
        is_list_of_several(&nodes)
    })
}

/// `0-1` or `0,8`, but not `0`.
fn is_list_of_several(nodes: &str) -> bool {
    nodes.contains(['-', ','])
}

fn policy() -> Option<c_int> {
    let mut mode: c_int = 0;
    let none = std::ptr::null_mut::<c_ulong>();
    // SAFETY: the mode is a local; no mask and no address are asked about.
    let result =
        unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, none, 0 as c_ulong, none, 0 as c_ulong) };
    if result != 0 {
        refused(&std::io::Error::last_os_error());
        return None;
    }
    Some(mode)
}

fn set_policy(mode: c_int, mask: c_ulong) -> std::io::Result<()> {
    // The default policy takes no mask.
    let mask = if mask == 0 { std::ptr::null() } else { &raw const mask };
    // SAFETY: NULL, or one word, of which the kernel reads all bits (it takes one off the number it is given).
    match unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask, c_ulong::from(NODES) + 1) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_node_is_not_several() {
        assert!(!is_list_of_several("0\n") && !is_list_of_several(""));
        assert!(is_list_of_several("0-1\n") && is_list_of_several("0,8\n"));
    }

    /// The policy of this thread, as the kernel has it, before, during and after. Where a sandbox forbids the calls there
    /// is nothing to set, and the program goes on.
    #[test]
    fn a_thread_prefers_a_node_for_as_long_as_it_is_told_to() {
        let Some(before) = policy() else { return };
        assert_eq!(before, libc::MPOL_DEFAULT);
        if set_policy(libc::MPOL_PREFERRED, 1).is_ok() {
            let preferred = Preferred(());
            assert_eq!(policy(), Some(libc::MPOL_PREFERRED));
            drop(preferred);
        }
        assert_eq!(policy(), Some(libc::MPOL_DEFAULT));
    }
}
