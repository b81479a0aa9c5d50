//! The sequence lock under the model checker: every order of steps between a writer and a reader.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p gpupool-metrics --release loom`

use crate::seqlock;
use crate::sync::AtomicU64;
use loom::sync::Arc;
use loom::thread;
use std::array::from_fn;

const WORDS: usize = 2;

fn bytes(word: u64) -> Vec<u8> {
    [word; WORDS].iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Every read is of one write, whole, or says that it is none.
#[test]
fn loom_a_group_is_read_whole_or_not_at_all() {
    loom::model(|| {
        let group: Arc<[AtomicU64; WORDS + 1]> = Arc::new(from_fn(|_| AtomicU64::new(0)));
        let writer = {
            let group = group.clone();
            thread::spawn(move || {
                let mut count = 0;
                assert!((1..=2).all(|value| seqlock::write(&group[..], 0, &mut count, &bytes(value))));
            })
        };
        let mut value = [0; WORDS * 8];
        if seqlock::read(&group[..], 0, &mut value).is_ok_and(|whole| whole) {
            assert!((0..=2).any(|word| value[..] == bytes(word)), "{value:?}");
        }
        assert!(writer.join().is_ok());
        assert!(seqlock::read(&group[..], 0, &mut value).is_ok_and(|whole| whole), "nobody writes any more");
        assert_eq!(value[..], bytes(2));
    });
}
