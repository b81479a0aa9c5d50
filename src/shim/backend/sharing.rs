//! What memory is created with so that others can be given it: other processes (a file descriptor) and network adapters
//! (GPUDirect RDMA). Neither costs bandwidth (`tests/bench/RESULTS.md`), so all memory of the pool has what its place allows.

use crate::log;
use crate::memory::{place_name, topology::Gpu};
use gpupool_config::Switch;
use gpupool_cuda::{CuResult, Properties};
use gpupool_pool::Place;
use std::sync::atomic::{AtomicBool, Ordering};

/// One place's abilities, until its driver refuses one.
#[derive(Debug)]
pub struct Sharing {
    posix_fd: AtomicBool,
    rdma: AtomicBool,
}

struct Ability<'a> {
    flag: &'a AtomicBool,
    /// The condition, as the log tells it once.
    about: &'static str,
    /// What is lost with it.
    lost: &'static str,
    /// Takes it out of what is asked for.
    strip: fn(&mut Properties),
}

impl Sharing {
    /// Of a GPU's memory.
    pub fn of_gpu(gpu: &Gpu, peer_rdma: Switch) -> Self {
        let rdma = match peer_rdma {
            Switch::Auto => gpu.rdma,
            Switch::On => true,
            Switch::Off => false,
        };
        Self { posix_fd: AtomicBool::new(gpu.posix_fd), rdma: AtomicBool::new(rdma) }
    }

    /// Of the host's memory: it is exported by the same driver, and adapters reach the host without help.
    pub fn of_host(posix_fd: bool) -> Self {
        Self { posix_fd: AtomicBool::new(posix_fd), rdma: AtomicBool::new(false) }
    }

    /// Calls `create` (`cuMemCreate`) with these abilities, and once more with one less where the driver refuses them:
    /// what it refused is not asked for again.
    pub fn create(
        &self,
        place: Place,
        mut create: impl FnMut(&Properties) -> Result<u64, CuResult>,
    ) -> Result<u64, CuResult> {
        let mut properties = Properties::of(place);
        let abilities: [Ability; 2] = [
            Ability {
                flag: &self.rdma,
                about: "rdma",
                lost: "no network adapter can be given this memory (GPUPOOL_PEER_RDMA)",
                strip: |properties| properties.rdma = 0,
            },
            Ability {
                flag: &self.posix_fd,
                about: "posix_fd",
                lost: "it can not be shared with other processes",
                strip: |properties| properties.handle_types = 0,
            },
        ];
        if self.posix_fd.load(Ordering::Relaxed) {
            properties.handle_types = Properties::POSIX_FD;
        }
        properties.rdma = self.rdma.load(Ordering::Relaxed).into();
        let mut result = create(&properties);
        let mut dropped = Vec::new();
        for ability in abilities.iter().filter(|ability| ability.flag.load(Ordering::Relaxed)) {
            let Err(refusal) = result else { break };
            if !is_refusal(refusal) {
                break;
            }
            (ability.strip)(&mut properties);
            dropped.push((ability, refusal));
            result = create(&properties);
        }
        // Refused to the last, it was not for the abilities.
        for (Ability { flag, about, lost, .. }, refusal) in dropped.into_iter().filter(|_| result.is_ok()) {
            flag.store(false, Ordering::Relaxed);
            log::warn_once(
                about,
                format_args!("cuMemCreate on {} refused a property ({refusal}): {lost}", place_name(place)),
            );
        }
        result
    }
}

/// Answers that may be about a property, and are not about the amount.
fn is_refusal(result: CuResult) -> bool {
    matches!(
        result,
        CuResult::INVALID_VALUE | CuResult::INVALID_DEVICE | CuResult::NOT_PERMITTED | CuResult::NOT_SUPPORTED
    )
}
