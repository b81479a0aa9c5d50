//! What has left GPUs that are drained, or found no room when the program was resumed, in the order in which it left: the GPU that a byte left first is
//! where it belongs, and the others that it left since were only on its way.

use super::parted::{Parted, beyond, living};
use crate::backing::open;
use crate::tiers::far;
use gpupool_pool::Place;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeSet;

static AWAY: Mutex<Vec<Parted>> = Mutex::new(Vec::new());

/// The list, without what blocks had that have been freed: their addresses are another one's by now, which has left nothing.
fn lock() -> MutexGuard<'static, Vec<Parted>> {
    let mut away = AWAY.lock();
    if !away.is_empty()
        && let Some(opened) = open::opened()
    {
        *away = living(opened, std::mem::take(&mut *away));
    }
    away
}

/// This left its GPU now. What left no GPU but a host or a disk is not noted.
pub fn add(parted: impl IntoIterator<Item = Parted>) {
    lock().extend(parted.into_iter().filter(|parted| matches!(parted.from(), Place::Gpu(_))));
    far::has_left(gpus(), bytes_in);
}

/// How much of a range is among what left this GPU.
fn bytes_in(gpu: u32, address: u64, bytes: u64) -> u64 {
    let end = address.saturating_add(bytes);
    let meets =
        |parted: &Parted| (parted.address() + parted.bytes()).min(end).saturating_sub(parted.address().max(address));
    AWAY.lock().iter().filter(|parted| parted.from() == Place::Gpu(gpu)).map(meets).sum()
}

/// All of it, in that order.
pub fn all() -> Vec<Parted> {
    lock().clone()
}

/// What left this GPU.
pub fn of(gpu: u32) -> Vec<Parted> {
    lock().iter().filter(|parted| parted.from() == Place::Gpu(gpu)).copied().collect()
}

/// The GPUs that something has left.
pub fn gpus() -> Vec<u32> {
    let gpus: BTreeSet<u32> = AWAY
        .lock()
        .iter()
        .filter_map(|parted| if let Place::Gpu(gpu) = parted.from() { Some(gpu) } else { None })
        .collect();
    gpus.into_iter().collect()
}

/// Takes out what left these GPUs, for whoever has it come back.
pub fn take(gpus: &[u32]) -> Vec<Parted> {
    let is_theirs = |parted: &mut Parted| gpus.iter().any(|gpu| parted.from() == Place::Gpu(*gpu));
    lock().extract_if(.., is_theirs).collect()
}

/// Of what left this GPU `tried` was to come back, and is back except for what is `left`.
pub fn came(gpu: u32, tried: &[Parted], left: &[Parted]) {
    let mut away = lock();
    let before = std::mem::take(&mut *away);
    *away = without(before, gpu, tried, left);
}

/// What is away behind that: the bytes that are back have not left this GPU any more, nor any that they left after it.
fn without(away: Vec<Parted>, gpu: u32, tried: &[Parted], left: &[Parted]) -> Vec<Parted> {
    let back = beyond(tried.to_vec(), left);
    let mut rest = Vec::new();
    // Of what is back, what left this GPU as far as the list was looked through.
    let mut came: Vec<Parted> = Vec::new();
    for parted in away {
        let is_here = parted.from() == Place::Gpu(gpu);
        let stays = beyond(vec![parted], if is_here { &back } else { &came });
        if is_here {
            came.extend(beyond(vec![parted], &stays));
        }
        rest.extend(stays);
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pooled(address: u64, bytes: u64, from: u32) -> Parted {
        Parted::Pooled { block: 1, start: 0, address, bytes, from: Place::Gpu(from) }
    }

    fn own(address: u64, from: u32) -> Parted {
        Parted::Own { address, bytes: 10, asked: 0, from: Place::Gpu(from) }
    }

    #[test]
    fn what_is_back_where_it_was_first_has_left_no_other_gpu() {
        let away = vec![pooled(0, 100, 1), own(1000, 1), pooled(0, 60, 2), own(1000, 2), pooled(200, 10, 2)];
        let back = [pooled(0, 100, 1), own(1000, 1)];
        assert_eq!(
            without(away, 1, &back, &[pooled(0, 20, 1)]),
            [pooled(0, 20, 1), pooled(0, 20, 2), pooled(200, 10, 2)]
        );
    }

    #[test]
    fn what_is_back_on_its_way_has_still_left_the_gpu_before() {
        let away = vec![pooled(0, 100, 1), own(1000, 1), pooled(0, 60, 2), own(1000, 2)];
        let back = [pooled(0, 60, 2), own(1000, 2)];
        assert_eq!(without(away, 2, &back, &[]), [pooled(0, 100, 1), own(1000, 1)]);
    }

    proptest! {
        /// Beside a model that knows of each byte which GPUs it left, one after the other.
        #[test]
        fn each_byte_knows_the_gpus_that_it_left(
            parts in prop::collection::vec((0..20_u64, 1..8_u64, 0..3_u32), 0..12),
            tried in prop::collection::vec((0..20_u64, 1..8_u64), 0..4),
            left in prop::collection::vec((0..20_u64, 1..8_u64), 0..3),
            gpu in 0..3_u32,
        ) {
            let away: Vec<Parted> = parts.iter().map(|(address, bytes, from)| pooled(*address, *bytes, *from)).collect();
            let range = |(address, bytes): &(u64, u64)| pooled(*address, *bytes, gpu);
            let (tried, left): (Vec<_>, Vec<_>) = (tried.iter().map(range).collect(), left.iter().map(range).collect());
            let holds = |parted: &Parted, byte: u64| (parted.address()..parted.address() + parted.bytes()).contains(&byte);
            let route = |away: &[Parted], byte: u64| -> Vec<Place> {
                away.iter().filter(|parted| holds(parted, byte)).map(Parted::from).collect()
            };
            let after = without(away.clone(), gpu, &tried, &left);
            for byte in 0..30 {
                let mut expected = route(&away, byte);
                let any = |list: &[Parted]| list.iter().any(|parted| holds(parted, byte));
                if any(&tried) && !any(&left)
                    && let Some(at) = expected.iter().position(|from| *from == Place::Gpu(gpu))
                {
                    expected.truncate(at);
                }
                prop_assert_eq!(route(&after, byte), expected, "byte {}", byte);
            }
        }
    }
}
