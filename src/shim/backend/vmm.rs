//! The pool's [`Backend`] over the driver's virtual memory management.

use super::sharing::Sharing;
use super::{fault, location, read_write};
use crate::driver::{CuResult, Driver};
use crate::fence::{self, Gpus};
use crate::memory::{Plan, place_name};
use crate::{pinned, process};
use cudarc::driver::sys::{CUmemAccessDesc, CUmemAllocationProp, CUmemAllocationType, CUmemGenericAllocationHandle};
use gpupool_pool::{Backend, Fault, Place};
use std::collections::BTreeMap;

/// The reservation, and the rights that each place's memory is mapped with.
pub struct Vmm {
    driver: &'static Driver,
    plan: &'static Plan,
    base: u64,
    bytes: u64,
    grants: BTreeMap<Place, Vec<CUmemAccessDesc>>,
    sharing: BTreeMap<Place, Sharing>,
}

impl Vmm {
    /// Reserves address space: 64 TiB, or the largest part of it that the driver gives, but at least `least` bytes.
    pub fn reserve(driver: &'static Driver, plan: &'static Plan, least: u64) -> Result<Self, CuResult> {
        let mut bytes: u64 = 64 << 40;
        let mut base = 0;
        loop {
            // SAFETY: the output is a local; no address is asked for.
            let result = unsafe { (driver.cuMemAddressReserve)(&raw mut base, bytes as usize, 0, 0, 0) };
            if result.is_ok() {
                break;
            }
            bytes /= 2;
            if bytes < least {
                return Err(result);
            }
        }
        let grants =
            plan.places.iter().map(|spec| (spec.place, plan.readers(spec.place).map(read_write).collect())).collect();
        let topology = &plan.topology;
        let gpus: Vec<_> = plan.members.keys().filter_map(|ordinal| topology.gpus.get(*ordinal as usize)).collect();
        let peer_rdma = process::settings().peer_rdma;
        let host_posix_fd = gpus.iter().any(|gpu| gpu.posix_fd);
        let of_gpus = gpus.iter().map(|gpu| (Place::Gpu(gpu.ordinal), Sharing::of_gpu(gpu, peer_rdma)));
        let hosts = plan.places.iter().map(|spec| spec.place).filter(|place| place.is_host());
        let of_hosts = hosts.map(|place| (place, Sharing::of_host(host_posix_fd)));
        let sharing = of_gpus.chain(of_hosts).collect();
        Ok(Self { driver, plan, base, bytes, grants, sharing })
    }

    pub fn base(&self) -> u64 {
        self.base
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn make(&self, place: Place, bytes: u64) -> Result<CUmemGenericAllocationHandle, Fault<CuResult>> {
        // SAFETY: all-zero is a valid value of this C struct: no handle types, no flags.
        let mut prop: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        prop.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.location = location(place);
        let mut handle = 0;
        let mut create = |prop: &CUmemAllocationProp| {
            // SAFETY: the output is a local and the properties outlive the call.
            unsafe { (self.driver.cuMemCreate)(&raw mut handle, bytes as usize, prop, 0) }
        };
        let mut make = || match self.sharing.get(&place) {
            Some(sharing) => sharing.create(place, prop, &mut create),
            None => create(&prop),
        };
        let mut result = make();
        if result == CuResult::OUT_OF_MEMORY && matches!(place, Place::Host(_)) && pinned::trim("cuMemCreate") > 0 {
            result = make();
        }
        result.ok().map_err(|result| fault_at(place, result))?;
        Ok(handle)
    }
}

impl Drop for Vmm {
    /// Runs only where two threads opened the pool at once: the second reservation goes back unused.
    fn drop(&mut self) {
        // SAFETY: reserved by `reserve` with these values, and nothing is mapped in it.
        let _ = unsafe { (self.driver.cuMemAddressFree)(self.base, self.bytes as usize) };
    }
}

/// For calls about one place: what a container without the right to host memory answers.
fn fault_at(place: Place, result: CuResult) -> Fault<CuResult> {
    match (place, result) {
        (
            Place::Host(_),
            CuResult::NOT_PERMITTED | CuResult::NOT_SUPPORTED | CuResult::INVALID_VALUE | CuResult::INVALID_DEVICE,
        ) => {
            tracing::warn!(
                target: "gpupool::memory", event = "pool.unavailable", place = place_name(place), error = %result,
                "no host memory for the pool: the driver answered {result} (in a container, allow set_mempolicy, for \
                 example with --cap-add SYS_NICE); the pool goes on without it"
            );
            Fault::Unavailable(result)
        }
        (_, result) => fault(result),
    }
}

impl Backend for Vmm {
    type Handle = CUmemGenericAllocationHandle;
    type Error = CuResult;

    fn headroom(&self, place: Place) -> Option<u64> {
        self.plan.free_at(self.driver, place)
    }

    fn create(&self, place: Place, bytes: u64) -> Result<Self::Handle, Fault<CuResult>> {
        self.make(place, bytes)
    }

    fn release(&self, handle: Self::Handle, _: Place, _: u64) -> Result<(), Fault<CuResult>> {
        // SAFETY: the pool releases a handle once, after unmapping it.
        unsafe { (self.driver.cuMemRelease)(handle) }.ok().map_err(fault)
    }

    fn map(&self, address: u64, bytes: u64, handle: Self::Handle) -> Result<(), Fault<CuResult>> {
        // SAFETY: the range lies in the reservation and is unmapped; the handle has this size.
        unsafe { (self.driver.cuMemMap)(address, bytes as usize, 0, handle, 0) }.ok().map_err(fault)
    }

    fn unmap(&self, address: u64, bytes: u64) -> Result<(), Fault<CuResult>> {
        // SAFETY: the range is of whole mappings, and the pool made sure that no work touches it any more.
        unsafe { (self.driver.cuMemUnmap)(address, bytes as usize) }.ok().map_err(fault)
    }

    fn grant(&self, address: u64, bytes: u64, place: Place) -> Result<(), Fault<CuResult>> {
        let grants = self.grants.get(&place).map_or(&[][..], Vec::as_slice);
        // SAFETY: the range is mapped, and the list outlives the call.
        unsafe { (self.driver.cuMemSetAccess)(address, bytes as usize, grants.as_ptr(), grants.len()) }
            .ok()
            .map_err(|result| fault_at(place, result))
    }

    fn quiesce(&self, gpus: &[u32]) -> Result<(), Fault<CuResult>> {
        fence::quiesce(self.driver, Gpus::Of(gpus)).map_err(fault)
    }

    fn quiesce_owner(&self, owner: u64, gpu: u32) -> Result<bool, Fault<CuResult>> {
        fence::quiesce_owner(self.driver, owner, Gpus::Of(&[gpu])).map_err(fault)
    }

    fn has_finished(&self, gpu: u32) -> bool {
        fence::has_finished(self.driver, Gpus::Of(&[gpu]))
    }
}
