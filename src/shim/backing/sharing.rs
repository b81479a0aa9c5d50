//! What memory is created with so that others can be given it: other processes (a file descriptor) and network adapters
//! (GPUDirect RDMA). Neither costs bandwidth (`tests/bench/RESULTS.md`), so all memory of the pool has what its place allows.

use crate::backing::topology::Gpu;
use crate::log;
use gpupool_config::Switch;
use gpupool_cuda::{CuResult, Physical, Properties};
use gpupool_pool::Place;
use std::sync::atomic::{AtomicU32, Ordering};

/// How often in a row a property must be what a refusal is about before it is not asked for again. A single refusal may have
/// passed by the next call; what follows from this is for the life of the process.
const REFUSALS: u32 = 2;

/// What memory of one place can be made with, until its driver keeps refusing that.
#[derive(Debug)]
pub struct Sharing {
    posix_fd: Ability,
    rdma: Ability,
}

/// A property that memory may have.
#[derive(Debug)]
struct Ability {
    /// Refusals in a row that were about it.
    refused: AtomicU32,
    /// The condition, as the log tells it once.
    about: &'static str,
    /// What is lost with it.
    lost: &'static str,
    /// Takes it out of what is asked for.
    strip: fn(&mut Properties),
}

impl Ability {
    fn new(there: bool, about: &'static str, lost: &'static str, strip: fn(&mut Properties)) -> Self {
        Self { refused: AtomicU32::new(if there { 0 } else { REFUSALS }), about, lost, strip }
    }

    fn is_there(&self) -> bool {
        self.refused.load(Ordering::Relaxed) < REFUSALS
    }

    /// Memory was made with it.
    fn was_granted(&self) {
        // Mostly 0 already, and a store is dearer than a look.
        if self.refused.load(Ordering::Relaxed) != 0 && self.is_there() {
            self.refused.store(0, Ordering::Relaxed);
        }
    }

    /// Memory was made once this was left out, and not before.
    fn was_refused(&self, place: Place, refusal: CuResult) {
        if self.refused.fetch_add(1, Ordering::Relaxed) + 1 == REFUSALS {
            log::warn_once(
                self.about,
                format_args!("cuMemCreate on {} refused a property {REFUSALS} times ({refusal}): {}", place, self.lost),
            );
        }
    }
}

impl Sharing {
    fn new(posix_fd: bool, rdma: bool) -> Self {
        Self {
            posix_fd: Ability::new(posix_fd, "posix_fd", "it cannot be shared with other processes", |properties| {
                properties.handle_types = 0
            }),
            rdma: Ability::new(
                rdma,
                "rdma",
                "no network adapter can be given this memory (GPUPOOL_PEER_RDMA)",
                |properties| properties.rdma = 0,
            ),
        }
    }

    /// What this GPU's memory can be made with; `peer_rdma` can overrule what its driver says about network adapters.
    pub fn of_gpu(gpu: &Gpu, peer_rdma: Switch) -> Self {
        let rdma = match peer_rdma {
            Switch::Auto => gpu.rdma,
            Switch::On => true,
            Switch::Off => false,
        };
        Self::new(gpu.posix_fd, rdma)
    }

    /// What the host's memory can be made with. The driver can export it as well, and adapters reach the host without help.
    pub fn of_host(posix_fd: bool) -> Self {
        Self::new(posix_fd, false)
    }

    /// Calls `create` (`cuMemCreate`) with these abilities, and where the driver refuses them once more with one less each
    /// time. The one without which it succeeded is what was refused; where nothing helped, or memory was short, none was.
    pub fn create(
        &self,
        place: Place,
        mut create: impl FnMut(&Properties) -> Result<Physical, CuResult>,
    ) -> Result<Physical, CuResult> {
        let mut properties = Properties::of(place);
        let mut asked: Vec<&Ability> = [&self.rdma, &self.posix_fd].into_iter().filter(|it| it.is_there()).collect();
        if self.posix_fd.is_there() {
            properties.handle_types = Properties::POSIX_FD;
        }
        properties.rdma = self.rdma.is_there().into();
        let mut result = create(&properties);
        let mut left_out = None;
        while let Err(refusal) = result
            && is_refusal(refusal)
            && !asked.is_empty()
        {
            let ability = asked.remove(0);
            (ability.strip)(&mut properties);
            left_out = Some((ability, refusal));
            result = create(&properties);
        }
        if result.is_ok() {
            asked.into_iter().for_each(Ability::was_granted);
            if let Some((ability, refusal)) = left_out {
                ability.was_refused(place, refusal);
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A driver that refuses these properties (descriptor, RDMA) with 801, after `first` answers of another kind. What each
    /// call was asked for, and the result.
    fn ask(sharing: &Sharing, first: &[i32], refuses: (bool, bool)) -> (Vec<(bool, bool)>, i32) {
        let mut calls = Vec::new();
        let result = sharing.create(Place::Gpu(0), |properties| {
            let asked = (properties.handle_types != 0, properties.rdma != 0);
            calls.push(asked);
            match first.get(calls.len() - 1) {
                Some(answer) => Err(CuResult(*answer)),
                None if asked.0 && refuses.0 || asked.1 && refuses.1 => Err(CuResult::NOT_SUPPORTED),
                None => Ok(Physical::from_raw(1)),
            }
        });
        (calls, result.err().map_or(0, |answer| answer.0))
    }

    const BOTH: (bool, bool) = (true, true);
    const FD: (bool, bool) = (true, false);
    const RDMA: (bool, bool) = (false, true);
    const NONE: (bool, bool) = (false, false);

    #[test]
    fn a_refusal_for_lack_of_memory_or_of_another_kind_loses_nothing() {
        for answers in [&[2][..], &[999], &[801, 2], &[801, 801, 2], &[1, 1, 1], &[801, 801, 801]] {
            let sharing = Sharing::new(true, true);
            for _ in 0..3 {
                assert_eq!(ask(&sharing, answers, NONE).1, *answers.last().unwrap());
            }
            assert_eq!(ask(&sharing, &[], NONE), (vec![BOTH], 0), "{answers:?}");
        }
    }

    #[test]
    fn one_refusal_that_passes_loses_nothing() {
        for code in [1, 101, 800, 801] {
            let sharing = Sharing::new(true, true);
            for _ in 0..3 {
                assert_eq!(ask(&sharing, &[code], NONE), (vec![BOTH, FD], 0));
                assert_eq!(ask(&sharing, &[], NONE), (vec![BOTH], 0), "{code}");
            }
        }
    }

    #[test]
    fn what_is_refused_again_and_again_is_not_asked_for_any_more_and_the_rest_is() {
        for (refuses, left) in [(FD, RDMA), (RDMA, FD), (BOTH, NONE)] {
            let sharing = Sharing::new(true, true);
            for _ in 0..4 {
                assert_eq!(ask(&sharing, &[], refuses).1, 0);
            }
            assert_eq!(ask(&sharing, &[], refuses), (vec![left], 0), "{refuses:?}");
        }
        assert_eq!(ask(&Sharing::new(false, false), &[], NONE), (vec![NONE], 0));
    }
}
