//! `order` and `spread`, which know no pool.

use super::checks::{GPU0, GPU1, GPU2, HOST, MIB, all_linked};
use gpupool_pool::{FRAME, Links, Place, Policy, Room, STRIPE, order, spread};
use proptest::prelude::*;

fn rooms(list: &[(Place, u64)]) -> Vec<Room> {
    list.iter().map(|&(place, bytes)| Room { place, bytes }).collect()
}

#[test]
fn the_order_is_home_then_peers_by_rank_then_hosts() {
    let places: Vec<Place> = (0..4).map(Place::Gpu).chain([Place::Host(0), Place::Host(1)]).collect();
    let near_and_far =
        [(Place::Gpu(0), 2), (Place::Gpu(1), 1), (Place::Gpu(3), 2), (Place::Host(0), 9), (Place::Host(1), 5)];
    let links = Links { ranks: near_and_far.into_iter().map(|(place, rank)| ((2, place), rank)).collect() };
    let best_first = [2, 1, 3, 0].map(Place::Gpu).into_iter().chain([Place::Host(1), Place::Host(0)]);
    assert_eq!(order(2, &places, &links), best_first.collect::<Vec<_>>());
    assert_eq!(order(7, &places, &links), []);
    assert_eq!(order(3, &places, &links), [Place::Gpu(3)], "nothing else is reachable from GPU 3");
}

#[test]
fn equal_peers_come_in_ordinal_order_after_home() {
    let places: Vec<Place> = (0..4).map(Place::Gpu).collect();
    assert_eq!(order(2, &places, &all_linked(&places)), [2, 3, 0, 1].map(Place::Gpu));
}

#[test]
fn local_first_fills_home_before_it_overflows() {
    let rooms = rooms(&[(GPU0, 10 * FRAME + 1), (GPU1, 4 * FRAME), (HOST, 100 * FRAME)]);
    let pieces = |frames: u64| spread(frames * FRAME, &rooms, Policy::LocalFirst, 0);
    assert_eq!(pieces(10), Ok(vec![(GPU0, 10 * FRAME)]));
    assert_eq!(pieces(12), Ok(vec![(GPU0, 10 * FRAME), (GPU1, 2 * FRAME)]));
    assert_eq!(pieces(20), Ok(vec![(GPU0, 10 * FRAME), (GPU1, 4 * FRAME), (HOST, 6 * FRAME)]));
    assert_eq!(pieces(120), Err(6 * FRAME));
}

#[test]
fn interleave_deals_chunks_out_in_turn() {
    let rooms = rooms(&[(GPU0, 1 << 30), (GPU1, 40 * MIB), (GPU2, 1 << 30), (HOST, 1 << 30)]);
    let pieces = spread(6 * STRIPE + 1, &rooms, Policy::Interleave, 1).unwrap();
    let chunk = STRIPE;
    let expected =
        [(GPU1, chunk), (GPU2, chunk), (GPU0, chunk), (GPU1, 8 * MIB), (GPU2, chunk), (GPU0, chunk), (GPU2, 26 * MIB)];
    assert_eq!(pieces, expected, "GPU 1 drops out when it is full");
    let small: Vec<Place> = (0..4).map(|turn| spread(FRAME, &rooms, Policy::Interleave, turn).unwrap()[0].0).collect();
    assert_eq!(small, [GPU0, GPU1, GPU2, GPU0]);
}

#[test]
fn most_free_takes_the_emptiest_gpu_and_the_host_last() {
    let rooms = rooms(&[(GPU0, 64 * MIB), (GPU1, 128 * MIB), (GPU2, 64 * MIB), (HOST, 1 << 40)]);
    let pieces = |bytes| spread(bytes, &rooms, Policy::MostFree, 0).unwrap();
    assert_eq!(pieces(100 * MIB), [(GPU1, 100 * MIB)]);
    assert_eq!(pieces(200 * MIB), [(GPU1, 128 * MIB), (GPU0, 64 * MIB), (GPU2, 8 * MIB)]);
    assert_eq!(pieces(300 * MIB).last(), Some(&(HOST, 44 * MIB)));
}

#[test]
fn a_request_beyond_all_bounds_is_answered_at_once() {
    let rooms = rooms(&[(GPU0, u64::MAX), (GPU1, 1 << 40)]);
    assert!(spread(u64::MAX, &rooms[1..], Policy::Interleave, 0).is_err());
    assert_eq!(spread(1 << 60, &rooms, Policy::LocalFirst, 0), Ok(vec![(GPU0, 1 << 60)]));
    assert_eq!(spread(FRAME, &[], Policy::Interleave, 3), Err(FRAME));
}

fn any_policy() -> impl Strategy<Value = Policy> {
    prop_oneof![Just(Policy::LocalFirst), Just(Policy::Interleave), Just(Policy::MostFree)]
}

proptest! {
    #[test]
    fn it_covers_the_size_or_reports_what_is_missing(
        bytes in 1..2_000 * MIB,
        gpus in proptest::collection::vec(0..600 * MIB, 0..5),
        hosts in proptest::collection::vec(0..600 * MIB, 0..3),
        policy in any_policy(),
        turn: u64,
    ) {
        let places = (0..gpus.len() as u32).map(Place::Gpu).chain((0..hosts.len() as u32).map(Place::Host));
        let list: Vec<(Place, u64)> = places.zip(gpus.iter().chain(&hosts).copied()).collect();
        let usable = |of: &dyn Fn(Place) -> bool| -> u64 {
            list.iter().filter(|entry| of(entry.0)).map(|entry| entry.1 / FRAME * FRAME).sum()
        };
        let wanted = bytes.next_multiple_of(FRAME);
        match spread(bytes, &rooms(&list), policy, turn) {
            Err(missing) => prop_assert_eq!(missing, wanted - usable(&|_| true)),
            Ok(pieces) => {
                prop_assert_eq!(pieces.iter().map(|piece| piece.1).sum::<u64>(), wanted);
                for &(place, room) in &list {
                    let there: u64 = pieces.iter().filter(|piece| piece.0 == place).map(|piece| piece.1).sum();
                    prop_assert!(there <= room);
                }
                prop_assert!(pieces.iter().all(|piece| piece.1 > 0 && piece.1.is_multiple_of(FRAME)));
                prop_assert!(pieces.windows(2).all(|pair| pair[0].0 != pair[1].0), "neighbours are merged");
                let on_host: u64 = pieces.iter().filter(|piece| piece.0.is_host()).map(|piece| piece.1).sum();
                let gpus = usable(&|place| !place.is_host());
                prop_assert_eq!(on_host, wanted.saturating_sub(gpus), "the host comes last under every policy");
            }
        }
    }
}
