//! The GPUs of this process and how they reach one another. Asked once, after `cuInit`; needs no context.

use super::numa::HOST_NUMA_ID;
use gpupool_cuda::{CuResult, Device, Driver};
use gpupool_pool::{Links, Place};
use std::collections::BTreeMap;
use std::fmt::{Display, Formatter};

/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`.
const VMM_SUPPORTED: i32 = 102;
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED`.
const POSIX_FD_SUPPORTED: i32 = 103;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`.
const RDMA_WITH_VMM_SUPPORTED: i32 = 110;
/// `CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS`.
const CONCURRENT_MANAGED_ACCESS: i32 = 89;
/// `CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK` and `…_NATIVE_ATOMIC_SUPPORTED`.
const PERFORMANCE_RANK: i32 = 1;
const NATIVE_ATOMICS: i32 = 3;
/// `CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED`.
const HOST_NATIVE_ATOMICS: i32 = 86;
/// Added to the rank of links without native atomics (PCIe), so that NVLink always comes first.
const BEHIND_NVLINK: u32 = 1 << 16;
/// Host memory comes behind every GPU.
const BEHIND_GPUS: u32 = 1 << 24;

/// One GPU, by the ordinal that the program knows it by.
#[derive(Clone, Debug)]
pub struct Gpu {
    pub ordinal: u32,
    /// `cuDeviceGetName`; empty where the driver does not say.
    pub name: String,
    /// Bytes of memory (`cuDeviceTotalMem`).
    pub total: u64,
    /// Whether it has virtual memory management.
    pub vmm: bool,
    /// Whether its memory can go to another process as a file descriptor.
    pub posix_fd: bool,
    /// Whether its memory from `cuMemCreate` can be given to a network adapter (GPUDirect RDMA).
    pub rdma: bool,
    /// Whether it and the processor may use managed memory at the same time, and so advice has an effect.
    pub concurrent_managed: bool,
    /// Whether its atomics on memory of the host are done there, so that they are whole beside those of others.
    pub host_atomics: bool,
    /// The host NUMA node next to it; 0 where the driver does not say.
    pub host_node: u32,
    /// `cuDeviceGetUuid`.
    pub uuid: [u8; 16],
}

/// All GPUs that the process sees.
#[derive(Clone, Debug)]
pub struct Topology {
    pub gpus: Vec<Gpu>,
    /// `(from, to) -> rank`, lower is faster, absent where there is no peer access.
    peers: BTreeMap<(u32, u32), u32>,
}

/// A question about the GPUs that the driver did not answer.
#[derive(Clone, Debug)]
pub struct Unanswered {
    pub result: CuResult,
    question: String,
}

impl Unanswered {
    /// For errors of this question.
    fn of(question: impl Display) -> impl FnOnce(CuResult) -> Self {
        move |result| Self { result, question: question.to_string() }
    }
}

impl Display for Unanswered {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}: {}", self.question, self.result)
    }
}

impl Topology {
    /// Asks the driver. What decides who is in the pool must be answered: a passing error would leave a GPU out for ever.
    pub fn read(driver: &Driver) -> Result<Self, Unanswered> {
        let count = driver.ask_device_count().map_err(Unanswered::of("cuDeviceGetCount"))?;
        let devices = || (0..count).map(Device::from_raw);
        let gpus = devices().map(|device| read_gpu(driver, device)).collect::<Result<Vec<_>, _>>()?;
        let mut peers = BTreeMap::new();
        for from in devices() {
            for to in devices().filter(|to| *to != from) {
                let can = driver
                    .can_access_peer(from, to)
                    .map_err(Unanswered::of(format_args!("cuDeviceCanAccessPeer of GPU {from} to GPU {to}")))?;
                if can {
                    let rank = peer_attribute(driver, PERFORMANCE_RANK, from, to).unwrap_or(0);
                    let nvlink = peer_attribute(driver, NATIVE_ATOMICS, from, to).unwrap_or(0) != 0;
                    let rank = rank.min(BEHIND_NVLINK - 1) + if nvlink { 0 } else { BEHIND_NVLINK };
                    peers.insert((from.ordinal(), to.ordinal()), rank);
                }
            }
        }
        Ok(Self { gpus, peers })
    }

    /// Whether each of the two reaches the other's memory. One direction alone would let a program use memory that its
    /// other GPU cannot copy.
    pub fn reach(&self, a: u32, b: u32) -> bool {
        a == b || (self.peers.contains_key(&(a, b)) && self.peers.contains_key(&(b, a)))
    }

    /// Whether one GPU's atomics on the other's memory are done there, as over NVLink.
    pub fn has_native_atomics(&self, from: u32, to: u32) -> bool {
        self.peers.get(&(from, to)).is_some_and(|rank| *rank < BEHIND_NVLINK)
    }

    /// Whether atomics of these GPUs on memory at a place are whole beside each other's, as they are on memory of one of them where
    /// the other reaches that over NVLink.
    pub fn keeps_atomics(&self, gpus: &[u32], place: Place) -> bool {
        gpus.len() < 2
            || gpus.iter().all(|&gpu| match place {
                Place::Gpu(at) => at == gpu || self.has_native_atomics(gpu, at),
                Place::Host(_) => self.gpus.get(gpu as usize).is_some_and(|gpu| gpu.host_atomics),
                Place::Disk | Place::Pageable => false,
            })
    }

    /// The pool's view of the links among `members`, and from each to the host nodes.
    pub fn links(&self, members: &[u32], host_nodes: &[u32]) -> Links {
        let mut ranks = BTreeMap::new();
        for &home in members {
            for &other in members.iter().filter(|other| **other != home && self.reach(home, **other)) {
                ranks.insert((home, Place::Gpu(other)), self.peers.get(&(home, other)).copied().unwrap_or(0));
            }
            let near = self.gpus.get(home as usize).map_or(0, |gpu| gpu.host_node);
            for &node in host_nodes {
                ranks.insert((home, Place::Host(node)), BEHIND_GPUS + u32::from(node != near));
            }
        }
        Links { ranks }
    }
}

/// Keeps the links over which managed memory is used where it lies: NVLink, and those to the host. Over PCIe the driver moves
/// the pages instead, unless the program enabled peer access between contexts on both GPUs.
pub fn coherent(mut links: Links) -> Links {
    links.ranks.retain(|(_, place), rank| place.is_host() || *rank < BEHIND_NVLINK);
    links
}

fn read_gpu(driver: &Driver, device: Device) -> Result<Gpu, Unanswered> {
    let total =
        driver.total_memory(device).map_err(Unanswered::of(format_args!("cuDeviceTotalMem of GPU {device}")))?;
    let attribute = |attribute| {
        let question = format_args!("cuDeviceGetAttribute {attribute} of GPU {device}");
        driver.device_attribute(attribute, device).map_err(Unanswered::of(question))
    };
    Ok(Gpu {
        ordinal: device.ordinal(),
        name: driver.name(device),
        total,
        // A driver that has the functions knows the attribute, so a failure says nothing about the GPU, which must not be
        // lost to the pool for good.
        vmm: attribute(VMM_SUPPORTED)? != 0,
        // Without these there is less to share, and the pool serves as ever.
        posix_fd: driver.device_attribute(POSIX_FD_SUPPORTED, device).is_ok_and(|value| value != 0),
        rdma: driver.device_attribute(RDMA_WITH_VMM_SUPPORTED, device).is_ok_and(|value| value != 0),
        concurrent_managed: attribute(CONCURRENT_MANAGED_ACCESS)? != 0,
        host_atomics: driver.device_attribute(HOST_NATIVE_ATOMICS, device).is_ok_and(|value| value != 0),
        host_node: driver
            .device_attribute(HOST_NUMA_ID, device)
            .ok()
            .and_then(|node| u32::try_from(node).ok())
            .unwrap_or(0),
        uuid: driver.uuid_bytes(device),
    })
}

fn peer_attribute(driver: &Driver, attribute: i32, from: Device, to: Device) -> Option<u32> {
    driver.peer_attribute(attribute, from, to).ok().and_then(|value| u32::try_from(value).ok())
}
