//! Which parts of a program's memory leave a GPU, where each goes as a whole or not at all.
//!
//! One by one, from the first on, is the cheapest that serves who asked, as long as the program may give all that it has. Where it keeps something, what goes first may be in the way of what
//! would have been enough: of 100 and 190 MiB of which 2 are to stay, 150 are served by the 190 alone. So these are looked at together.

/// How finely they are looked at together: what places charge and moves carry is whole pages of 2 MiB.
const PAGE: u64 = 2 << 20;
/// How many steps that may take, some 20 ms; beyond that they are looked at less finely.
const STEPS: u64 = 1 << 24;

/// A part of what a program has on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Bytes.
    pub bytes: u64,
    /// It is there for that GPU, and not for another one: those for others go first.
    pub is_home: bool,
}

/// Which of these leave, so that `most` bytes do, if any choice of them has so many, and no more than `cap` in any case: those for others before those for the GPU itself and each from
/// the first one on where that is enough; otherwise those that have the least beyond what is asked for, or, if none has so much, as much as may leave.
pub fn choose(all: &[Part], most: u64, cap: u64) -> Vec<bool> {
    let (mut chosen, mut sum) = (vec![false; all.len()], 0);
    for home in [false, true] {
        for (chosen, part) in chosen.iter_mut().zip(all).filter(|(_, part)| part.is_home == home) {
            if sum < most && part.bytes <= cap - sum {
                (*chosen, sum) = (true, sum + part.bytes);
            }
        }
    }
    if sum >= most || chosen.iter().all(|goes| *goes) {
        return chosen;
    }
    // What is there for others stays among those that go, if enough can go together with it.
    let lent: u64 =
        all.iter().zip(&chosen).filter(|(part, goes)| **goes && !part.is_home).map(|(part, _)| part.bytes).sum();
    let is_home: Vec<usize> = (0..all.len()).filter(|at| all[*at].is_home).collect();
    let of_home: Vec<u64> = is_home.iter().map(|at| all[*at].bytes).collect();
    let (which, beside) = together(&of_home, most.saturating_sub(lent), cap - lent);
    if lent + beside >= most || lent + beside > sum {
        is_home.iter().for_each(|at| chosen[*at] = false);
        which.iter().for_each(|at| chosen[is_home[*at]] = true);
        sum = lent + beside;
    }
    if sum < most {
        let (which, others) = together(&all.iter().map(|part| part.bytes).collect::<Vec<_>>(), most, cap);
        if others >= most {
            chosen.fill(false);
            which.iter().for_each(|at| chosen[*at] = true);
        }
    }
    chosen
}

/// Those of these that have the least that is `most` bytes or more, and no more than `cap`; if none has so much, those that have most. With what they have together.
fn together(all: &[u64], most: u64, cap: u64) -> (Vec<usize>, u64) {
    let cap = cap.min(all.iter().sum());
    let steps = (cap / PAGE + 1).saturating_mul(all.len() as u64);
    let grain = PAGE * steps.div_ceil(STEPS).max(1);
    // Rounded up, none has more than it is taken to have: what stays is not less than is to.
    let pages = |bytes: u64| usize::try_from(bytes.div_ceil(grain)).unwrap_or(usize::MAX);
    let room = usize::try_from(cap / grain).unwrap_or(usize::MAX);
    // By sum, the bytes of those that have it, and which of them came last. Of two that have the same sum the first is as good.
    let mut reached: Vec<Option<(u64, u32)>> = vec![None; room.saturating_add(1)];
    reached[0] = Some((0, u32::MAX));
    for (at, bytes) in (0_u32..).zip(all) {
        let pages = pages(*bytes).max(1);
        for sum in (pages..=room).rev() {
            if reached[sum].is_none()
                && let Some((before, _)) = reached[sum - pages]
            {
                reached[sum] = Some((before + bytes, at));
            }
        }
    }
    let sums = || reached.iter().enumerate().filter_map(|(sum, known)| known.map(|(bytes, _)| (sum, bytes)));
    let enough = sums().filter(|(_, bytes)| *bytes >= most).min_by_key(|(_, bytes)| *bytes);
    let Some((mut sum, bytes)) = enough.or_else(|| sums().max_by_key(|(_, bytes)| *bytes)) else {
        return (Vec::new(), 0);
    };
    let mut which = Vec::new();
    while let Some((_, at)) = reached[sum].filter(|(_, at)| *at != u32::MAX) {
        let at = at as usize;
        which.push(at);
        sum -= pages(all[at]).max(1);
    }
    (which, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn parts(home: &[u64]) -> Vec<Part> {
        home.iter().map(|mib| Part { bytes: mib * MIB, is_home: true }).collect()
    }

    fn chosen(all: &[Part], most: u64, cap: u64) -> Vec<u64> {
        let which = choose(all, most * MIB, cap * MIB);
        all.iter().zip(which).filter(|(_, goes)| *goes).map(|(part, _)| part.bytes / MIB).collect()
    }

    #[test]
    fn what_goes_first_is_not_in_the_way_of_what_is_enough() {
        for all in [[100, 190], [190, 100]] {
            assert_eq!(chosen(&parts(&all), 150, 288), [190], "{all:?}");
        }
        // Nothing is to stay: one after the other.
        assert_eq!(chosen(&parts(&[100, 190]), 150, u64::MAX / MIB), [100, 190]);
        // The least that is enough.
        assert_eq!(chosen(&parts(&[34, 100, 166, 34]), 200, 304), [34, 100, 166]);
        assert_eq!(chosen(&parts(&[34, 100, 166, 34]), 200, 299), [34, 166]);
        // Nothing is: as much as may go.
        assert_eq!(chosen(&parts(&[60, 100, 50]), 200, 170), [60, 100]);
        assert_eq!(chosen(&parts(&[60]), 10, 58), []);
        assert_eq!(chosen(&[], 10, 58), []);
    }

    #[test]
    fn what_is_there_for_others_goes_first_unless_only_other_parts_are_enough() {
        let mut all = parts(&[100, 190]);
        all.push(Part { bytes: 20 * MIB, is_home: false });
        assert_eq!(chosen(&all, 20, 300), [20]);
        assert_eq!(chosen(&all, 150, 288), [190, 20]);
        assert_eq!(chosen(&all, 180, 200), [190]);
    }

    /// SplitMix64: the same numbers on every machine.
    fn numbers() -> impl FnMut(u64) -> u64 {
        let mut state = 7_u64;
        move |below| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut word = state;
            word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (word ^ (word >> 31)) % below
        }
    }

    /// Beside a model that tries all choices there are.
    #[test]
    fn what_any_choice_would_serve_is_served_and_what_is_to_stay_stays() {
        let mut random = numbers();
        let mut was_in_the_way = 0;
        for _ in 0..4000 {
            let count = random(8) as usize;
            let all: Vec<Part> =
                (0..count).map(|_| Part { bytes: (1 + random(40)) * PAGE, is_home: random(3) > 0 }).collect();
            let total: u64 = all.iter().map(|part| part.bytes).sum();
            let (most, cap) = (random(total / PAGE + 2) * PAGE, random(total / PAGE + 2) * PAGE);
            let of = |which: u32| -> u64 { (0..count).filter(|at| which >> at & 1 == 1).map(|at| all[at].bytes).sum() };
            let sums: Vec<u64> = (0..1 << count).map(of).filter(|sum| *sum <= cap).collect();
            let gives: u64 =
                all.iter().zip(choose(&all, most, cap)).filter(|(_, goes)| *goes).map(|(part, _)| part.bytes).sum();
            assert!(gives <= cap, "{all:?} {most} {cap}: {gives}");
            let can = sums.iter().any(|sum| *sum >= most);
            assert_eq!(gives >= most, can, "{all:?} {most} {cap}: {gives}");
            let first = all.iter().filter(|part| !part.is_home).chain(all.iter().filter(|part| part.is_home));
            let one_by_one =
                first.fold(0, |sum, part| if sum < most && sum + part.bytes <= cap { sum + part.bytes } else { sum });
            was_in_the_way += u32::from(can && one_by_one < most);
            assert!(gives.min(most) >= one_by_one.min(most), "{all:?} {most} {cap}: {gives}, {one_by_one}");
        }
        assert!(was_in_the_way > 50, "{was_in_the_way}");
    }

    /// Of small parts there are thousands on a large GPU, and whoever asked waits.
    #[test]
    fn of_very_many_the_choice_is_less_fine_and_keeps_what_is_to_stay() {
        let all: Vec<Part> = (0..30_000).map(|at| Part { bytes: (1 + at % 5) * PAGE - at, is_home: true }).collect();
        let total: u64 = all.iter().map(|part| part.bytes).sum();
        let gives: u64 =
            all.iter().zip(choose(&all, total, total - 1)).filter(|(_, goes)| *goes).map(|(part, _)| part.bytes).sum();
        assert!(gives < total && gives >= total / 2, "{gives} of {total}");
    }
}
