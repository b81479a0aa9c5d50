//! Random sequences of calls, bare and under the shim; see `sequences/main.rs`.

use harness::{Output, Run};

fn sequences(arguments: &str) -> Output {
    Run::command(env!("CARGO_BIN_EXE_sequences")).args(arguments).go()
}

/// Eight seeds play every variant once, and some more play the one in which memory moves before every launch. Few a test, so that none meets the time limit of a run on a busy machine; more of them
/// take long and are for whoever changed something: `sequences --seeds=100..200`.
macro_rules! seeds {
    ($($name:ident: $seeds:literal, $count:literal;)*) => {
        $(
            #[test]
            fn $name() {
                sequences(concat!("--seeds=", $seeds)).succeeds().says(concat!($count, " sequences, 0 with a difference"));
            }
        )*
    };
}

seeds! {
    calls_answer_the_same_bare_and_under_the_shim_in_seeds_0_to_3: "0..4", 4;
    calls_answer_the_same_bare_and_under_the_shim_in_seeds_4_to_7: "4..8", 4;
    calls_answer_the_same_while_memory_moves_in_seeds_100_to_103: "100..104 --variant=stress", 4;
    calls_answer_the_same_while_memory_moves_in_seeds_104_to_107: "104..108 --variant=stress", 4;
}

#[test]
fn a_difference_is_found_and_the_shortest_case_of_it_printed() {
    let told = sequences("--seeds=0..1 --variant=planted");
    told.exits(1).says("1 sequences, 1 with a difference");
    // A copy to the host fails once, the fortieth. Each of two rounds makes up to six calls in four threads.
    let again = told.stdout.lines().find_map(|line| line.strip_prefix("again: ")).unwrap_or_default();
    let rounds: Option<u64> =
        again.split(' ').find_map(|word| word.strip_prefix("--rounds=")).and_then(|rounds| rounds.parse().ok());
    assert!(rounds.is_some_and(|rounds| rounds < 30), "not shrunk from 60 rounds: {again}");
}
