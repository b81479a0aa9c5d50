//! A way there and back, in processes of their own on the simulated driver.

use super::*;
use crate::gate::tests::{ends_in, ok, start};
use crate::hook::trampoline as hooked;
use gpupool_store::{About, Meta, Options, Which};
use std::path::{Path, PathBuf};

fn alone(name: &str, body: impl FnOnce()) {
    ends_in("image::tests", name, &[], 0, body);
}

/// Longer than all buffers together, and no multiple of anything.
const BYTES: usize = 20 * PART + 12_345;

fn pattern(seed: u32) -> Vec<u8> {
    (0..BYTES as u32).map(|at| (at.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13) as u8).collect()
}

/// Memory with a pattern in it.
fn block(seed: u32) -> u64 {
    let (mut address, bytes) = (0, pattern(seed));
    ok!(cuMemAlloc_v2(&raw mut address, BYTES));
    ok!(cuMemcpyHtoD_v2(address, bytes.as_ptr().cast(), BYTES));
    address
}

fn contents(address: u64) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    ok!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), address, BYTES));
    bytes
}

fn shuttle(driver: &'static Driver) -> Shuttle {
    Shuttle::new(driver, context::all()[0].id, 0).unwrap()
}

fn about(id: u64, address: u64) -> About {
    About { id, address, bytes: BYTES as u64, ..About::default() }
}

/// Both blocks, in one generation.
fn save(driver: &'static Driver, folder: &Path, blocks: [u64; 2]) -> Result<(), Failed> {
    let writer = Writer::create(folder, Meta::default(), Options { threads: 3, ..Options::default() })?;
    let mut shuttle = shuttle(driver);
    for (id, address) in (0..).zip(blocks) {
        let key = writer.block(about(id, address))?;
        // In two, the second one not from the beginning of a page on.
        shuttle.save(&writer, key, 0, address, PART as u64 + 77)?;
        shuttle.save(&writer, key, PART as u64 + 77, address + PART as u64 + 77, (BYTES - PART) as u64 - 77)?;
    }
    shuttle.saved(&writer)?;
    // It may change from here on.
    for address in blocks {
        ok!(cuMemsetD8_v2(address, 0xee, BYTES));
    }
    writer.finish()?;
    Ok(())
}

/// Two blocks with patterns of their own, which a store has and whose memory has changed since; the folder lives as long as the one around it.
fn two_that_are_stored() -> (&'static Driver, tempfile::TempDir, PathBuf, [u64; 2]) {
    let (driver, _) = start();
    let around = tempfile::tempdir().unwrap();
    let folder = around.path().join("store");
    let blocks = [block(1), block(2)];
    save(driver, &folder, blocks).unwrap();
    (driver, around, folder, blocks)
}

#[test]
fn what_is_saved_comes_back_to_the_last_byte() {
    alone("what_is_saved_comes_back_to_the_last_byte", || {
        let (driver, _around, folder, blocks) = two_that_are_stored();
        let reader = Reader::open(&folder, Which::Newest, 2).unwrap();
        let shuttle = shuttle(driver);
        for (id, address) in (0..).zip(blocks) {
            assert!(contents(address).iter().all(|byte| *byte == 0xee));
            shuttle.load(&reader, id, 0, address, BYTES as u64).unwrap();
        }
        assert!(contents(blocks[0]) == pattern(1) && contents(blocks[1]) == pattern(2));
        // From the middle of a part to the middle of a later one, elsewhere.
        let (from, bytes) = (PART as u64 / 2 + 3, 3 * PART as u64);
        shuttle.load(&reader, 1, from, blocks[0], bytes).unwrap();
        let (from, bytes) = (from as usize, bytes as usize);
        let back = contents(blocks[0]);
        assert!(back[..bytes] == pattern(2)[from..from + bytes] && back[bytes..] == pattern(1)[bytes..]);
        drop(shuttle);
        assert!(driver.synchronize().is_ok());
    });
}

#[test]
fn what_lies_in_one_part_is_read_once_wherever_it_goes() {
    let part = PART as u64;
    let stretch = |block, offset, address, bytes| Stretch { block, offset, address, bytes };
    let cell = |block, offset, to: &[(u64, usize)]| Cell {
        block,
        offset,
        bytes: to.iter().map(|(_, bytes)| bytes).sum(),
        to: to.to_vec(),
    };
    let quarter = PART / 4;
    // Four chunks in one part, in any order, and a fifth in the next one.
    let order = [3, 0, 4, 2, 1];
    let chunks = order.map(|chunk| stretch(7, chunk * part / 4, 1000 * chunk, part / 4));
    let whole = cell(7, 0, &[(0, quarter), (1000, quarter), (2000, quarter), (3000, quarter)]);
    assert_eq!(cells(&chunks), [whole, cell(7, part, &[(4000, quarter)])]);
    // One that begins and ends within parts, one of another block, and a gap within a part.
    let apart = [stretch(2, 0, 0, 10), stretch(1, part - 10, 500, part + 20), stretch(2, 20, 90, 10)];
    let first =
        [cell(1, part - 10, &[(500, 10)]), cell(1, part, &[(510, PART)]), cell(1, 2 * part, &[(510 + part, 10)])];
    let [a, b, c] = first;
    assert_eq!(cells(&apart), [a, b, c, cell(2, 0, &[(0, 10)]), cell(2, 20, &[(90, 10)])]);
    assert_eq!(cells(&[]), []);
}

#[test]
fn chunks_in_any_order_come_back_together_and_a_lost_part_ends_all_of_it() {
    alone("chunks_in_any_order_come_back_together_and_a_lost_part_ends_all_of_it", || {
        let (driver, _around, folder, blocks) = two_that_are_stored();
        let reader = Reader::open(&folder, Which::Newest, 2).unwrap();
        let shuttle = shuttle(driver);
        // Pieces of a length that no part is a multiple of, the last ones first.
        let step = 1_234_568;
        let piece = |(id, address): (u64, u64), at: u64| Stretch {
            block: id,
            offset: at,
            address: address + at,
            bytes: step.min(BYTES as u64 - at),
        };
        let of = |block: (u64, u64)| (0..BYTES as u64).step_by(step as usize).map(move |at| piece(block, at));
        let mut pieces: Vec<Stretch> = (0..).zip(blocks).flat_map(of).collect();
        pieces.reverse();
        shuttle.load_all(&reader, &pieces).unwrap();
        assert!(contents(blocks[0]) == pattern(1) && contents(blocks[1]) == pattern(2));
        pieces.push(Stretch { block: 1, offset: BYTES as u64, address: blocks[1], bytes: 1 });
        let failed = shuttle.load_all(&reader, &pieces).unwrap_err();
        assert!(matches!(failed, Failed::Store(gpupool_store::Error::Misuse { .. })), "{failed}");
        // Every buffer is back.
        pieces.pop();
        shuttle.load_all(&reader, &pieces).unwrap();
    });
}

#[test]
fn a_disk_that_takes_no_more_is_an_error_and_every_buffer_comes_back() {
    alone("a_disk_that_takes_no_more_is_an_error_and_every_buffer_comes_back", || {
        let (driver, _) = start();
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("store");
        let blocks = [block(1), block(2)];
        let most = libc::rlimit { rlim_cur: 4096, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: the pointer is to a local.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const most) }, 0);
        let failed = save(driver, &folder, blocks).unwrap_err();
        assert!(matches!(failed, Failed::Store(gpupool_store::Error::Io { .. })), "{failed}");
        assert!(matches!(Reader::open(&folder, Which::Newest, 1), Err(gpupool_store::Error::Absent { .. })));
        assert!(contents(blocks[0]) == pattern(1) || contents(blocks[0]).iter().all(|byte| *byte == 0xee));
    });
}

#[test]
fn bytes_that_are_not_what_was_stored_are_told_of() {
    alone("bytes_that_are_not_what_was_stored_are_told_of", || {
        let (driver, _around, folder, blocks) = two_that_are_stored();
        let data = folder.join("gen-000001/data-00");
        let mut bytes = std::fs::read(&data).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&data, bytes).unwrap();
        let reader = Reader::open(&folder, Which::Newest, 2).unwrap();
        let shuttle = shuttle(driver);
        let loaded =
            blocks.map(|address| shuttle.load(&reader, u64::from(address == blocks[1]), 0, address, BYTES as u64));
        assert_eq!(loaded.iter().filter(|loaded| loaded.is_err()).count(), 1, "{loaded:?}");
        // And it goes on.
        assert!(shuttle.load(&reader, u64::from(loaded[0].is_err()), 0, blocks[0], BYTES as u64).is_ok());
    });
}
