//! The pool's [`Backend`] over the driver's virtual memory management: reserves the pool's addresses, makes and maps memory,
//! grants access to the GPUs that have a context, and waits for GPUs.

use super::fault;
use super::mover::{Work, timed};
use super::reclaim;
use super::sharing::Sharing;
use crate::backing::plan::Plan;
use crate::fence;
use crate::watch::context::{self, Gpus};
use crate::{log, process};
use gpupool_cuda::{Access, CuResult, Device, Driver, Physical, Properties};
use gpupool_events::PoolUnavailable;
use gpupool_pool::{Backend, FRAME, Fault, Place};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where the pool's addresses begin, if they are free there. Left to itself the driver begins at 1 TiB, and the upper halves of addresses are numbers from 256 on: two small numbers
/// beside each other among a kernel's parameters (a flag and a size, two dimensions) pass for a pointer there then, and what launches use is told by such words
/// (`tiers/launch.rs`). A language model had its 86 MiB weights cut at the number 0x101_0000_0000, and read them from afar for that. As sizes and dimensions, 0x6a00 to 0x6d00 are rare; below
/// lie programs and their heaps (0x55..), above libraries and stacks (0x7f..).
const BASE: u64 = 0x6a00 << 32;

/// The reservation, and who may reach what is mapped there: the GPUs of the pool that have a context in this process. A grant
/// to another one costs twenty times the growth itself (512 MiB of GPU 0: 1.06 ms for GPU 0, 20 for GPU 1 too; RESULTS.md), and
/// most processes work on one GPU.
pub struct Vmm {
    driver: &'static Driver,
    plan: &'static Plan,
    base: u64,
    bytes: u64,
    /// By place, the GPUs of the pool that can reach it.
    readers: BTreeMap<Place, Vec<u32>>,
    sharing: BTreeMap<Place, Sharing>,
    /// For each GPU of the machine, the arrival of its contexts ([`context::arrivals`]) since which it reaches all memory.
    since: Vec<AtomicU64>,
}

impl Vmm {
    /// Reserves address space: `wanted` bytes, or half as much again and again until the driver has a range of that size, but
    /// at least `least` bytes.
    pub fn reserve(driver: &'static Driver, plan: &'static Plan, wanted: u64, least: u64) -> Result<Self, CuResult> {
        let mut bytes = wanted;
        let base = loop {
            match driver.reserve_from(BASE, bytes).or_else(|_| driver.reserve(bytes)) {
                Ok(base) => break base,
                Err(result) => {
                    bytes = (bytes / 2).next_multiple_of(FRAME);
                    if bytes < least {
                        return Err(result);
                    }
                }
            }
        };
        let readers = plan.places.iter().map(|spec| (spec.place, plan.readers(spec.place).collect())).collect();
        let topology = &plan.topology;
        // Who has a context already is named in every grant from the first one on.
        let since =
            topology.gpus.iter().map(|gpu| AtomicU64::new(context::arrivals(Device::of(gpu.ordinal)))).collect();
        let gpus: Vec<_> = plan.members.keys().filter_map(|ordinal| topology.gpus.get(*ordinal as usize)).collect();
        let peer_rdma = process::settings().peer_rdma;
        let host_posix_fd = gpus.iter().any(|gpu| gpu.posix_fd);
        let of_gpus = gpus.iter().map(|gpu| (Place::Gpu(gpu.ordinal), Sharing::of_gpu(gpu, peer_rdma)));
        let hosts = plan.places.iter().map(|spec| spec.place).filter(|place| place.is_host());
        let of_hosts = hosts.map(|place| (place, Sharing::of_host(host_posix_fd)));
        let sharing = of_gpus.chain(of_hosts).collect();
        Ok(Self { driver, plan, base, bytes, readers, sharing, since })
    }

    pub(super) fn driver(&self) -> &'static Driver {
        self.driver
    }

    pub fn base(&self) -> u64 {
        self.base
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether all memory of the pool was granted to this GPU since it has a context.
    pub fn is_granted_to(&self, gpu: u32, arrival: u64) -> bool {
        self.since.get(gpu as usize).is_none_or(|since| since.load(Ordering::Acquire) == arrival)
    }

    /// All memory of the pool was granted to this GPU after that arrival of its contexts.
    pub fn granted_to(&self, gpu: u32, arrival: u64) {
        if let Some(since) = self.since.get(gpu as usize) {
            since.store(arrival, Ordering::Release);
        }
    }

    fn make(&self, place: Place, bytes: u64) -> Result<Physical, Fault<CuResult>> {
        let _taking = reclaim::make_room_at(place);
        let mut create = |properties: &Properties| self.driver.create(bytes, properties);
        let mut make = || match self.sharing.get(&place) {
            Some(sharing) => sharing.create(place, &mut create),
            None => create(&Properties::of(place)),
        };
        let mut made = make();
        if made == Err(CuResult::OUT_OF_MEMORY)
            && matches!(place, Place::Host(_))
            && reclaim::reclaim("cuMemCreate") > 0
        {
            made = make();
        }
        made.map_err(|result| fault_at(place, result))
    }
}

impl Drop for Vmm {
    /// Runs only where two threads opened the pool at once: the second reservation goes back unused.
    fn drop(&mut self) {
        let _ = self.driver.free_reservation(self.base, self.bytes);
    }
}

/// What stands for memory that is on a disk.
const NOTHING: Physical = Physical::from_raw(0);

/// For calls about one place: what a container without the right to host memory answers.
fn fault_at(place: Place, result: CuResult) -> Fault<CuResult> {
    match (place, result) {
        (
            Place::Host(_),
            CuResult::NOT_PERMITTED | CuResult::NOT_SUPPORTED | CuResult::INVALID_VALUE | CuResult::INVALID_DEVICE,
        ) => {
            log::emit(|| {
                let text = format!(
                    "no host memory for the pool: the driver answered {result} (in a container, allow set_mempolicy, for \
                     example with --cap-add SYS_NICE); the pool goes on without it"
                );
                (PoolUnavailable { place: place.to_string(), error: result.to_string() }, text)
            });
            Fault::Unavailable(result)
        }
        (_, result) => fault(result),
    }
}

/// For a grant of memory of a place: where another thread has just unmapped a part of the range, the answer says nothing of that place.
fn refused_grant(place: Place, result: CuResult) -> Fault<CuResult> {
    if result == CuResult::INVALID_VALUE { fault(result) } else { fault_at(place, result) }
}

impl Backend for Vmm {
    type Handle = Physical;
    type Error = CuResult;

    fn headroom(&self, place: Place) -> Option<u64> {
        self.plan.free_at(self.driver, place)
    }

    fn create(&self, place: Place, bytes: u64) -> Result<Self::Handle, Fault<CuResult>> {
        if place.is_stored() {
            return Ok(NOTHING);
        }
        timed(Work::Make, || self.make(place, bytes))
    }

    fn release(&self, handle: Self::Handle, place: Place, _: u64) -> Result<(), Fault<CuResult>> {
        if place.is_stored() {
            return Ok(());
        }
        self.driver.release(handle).ok().map_err(fault)
    }

    fn map(&self, address: u64, bytes: u64, handle: Self::Handle) -> Result<(), Fault<CuResult>> {
        timed(Work::Map, || self.driver.map(address, bytes, handle, 0)).ok().map_err(fault)
    }

    fn unmap(&self, address: u64, bytes: u64) -> Result<(), Fault<CuResult>> {
        timed(Work::Unmap, || self.driver.unmap(address, bytes)).ok().map_err(fault)
    }

    fn grant(&self, address: u64, bytes: u64, place: Place) -> Result<(), Fault<CuResult>> {
        let all = self.readers.get(&place).map_or(&[][..], Vec::as_slice);
        // Where hooks see nothing, contexts may come without anybody noticing.
        let is_meant = |gpu: &u32| !process::is_preloaded() || context::is_on(Device::of(*gpu));
        let mut grants: Vec<Access> = all.iter().copied().filter(is_meant).map(Access::read_write).collect();
        if grants.is_empty() {
            // The only contexts ended a moment ago. Memory that nobody may reach is not what was asked for.
            grants = all.iter().copied().map(Access::read_write).collect();
        }
        let granted = timed(Work::Grant, || self.driver.set_access(address, bytes, &grants));
        granted.ok().map_err(|result| refused_grant(place, result))
    }

    fn readers(&self) -> u64 {
        context::all_arrivals()
    }

    fn quiesce(&self, gpus: &[u32]) -> Result<(), Fault<CuResult>> {
        fence::wait(self.driver, Gpus::Of(gpus)).map_err(fault)
    }

    fn quiesce_owner(&self, owner: u64, gpu: u32) -> Result<bool, Fault<CuResult>> {
        fence::quiesce_owner(self.driver, owner, Gpus::Of(&[gpu])).map_err(fault)
    }

    fn is_at_rest(&self, owner: u64) -> bool {
        fence::is_at_rest(owner)
    }

    fn has_finished(&self, gpu: u32) -> bool {
        fence::has_finished(self.driver, Gpus::Of(&[gpu]))
    }

    fn drop_alias(&self, address: u64, bytes: u64) -> Result<(), Fault<CuResult>> {
        self.driver.unmap(address, bytes).ok().map_err(fault)?;
        // Addresses that the driver keeps are no loss.
        let _ = self.driver.free_reservation(address, bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It is tried again in its parts, and one that is not mapped any more needs no access. The log had hundreds of warnings that there is no host memory.
    #[test]
    fn what_another_thread_has_unmapped_meanwhile_is_no_word_of_its_place() {
        let host = Place::Host(0);
        assert!(!matches!(refused_grant(host, CuResult::INVALID_VALUE), Fault::Unavailable(_)));
        assert!(matches!(refused_grant(host, CuResult::NOT_PERMITTED), Fault::Unavailable(_)));
        assert!(matches!(fault_at(host, CuResult::INVALID_VALUE), Fault::Unavailable(_)));
        assert!(!matches!(fault_at(Place::Gpu(0), CuResult::NOT_PERMITTED), Fault::Unavailable(_)));
    }
}
