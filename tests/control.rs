//! The C interface, `include/gpupool.h`: in a preloaded process, and where a program only opens the library.

use gpupool_events::Event;
use harness::{Output, Run, driver_folder, library, repository};
use std::process::Command;

fn control(mode: &str) -> Output {
    Run::program("control").sim("2x128MiB").env("GPUPOOL_MODE", mode).env("GPUPOOL_RESERVE", "16MiB").shim().go()
}

#[test]
fn says_what_the_pool_is_and_holds() {
    let told = control("pool");
    told.succeeds().prints(
        "\
at first: idle, mode off, no function of the CUDA driver was called yet
at first: -1, 0 blocks, 0 MiB live, 0 MiB at most, 0 allocations, 0 reused, spilled no
with two blocks: active, mode pool
with two blocks: 0, 2 blocks, 192 MiB live, 192 MiB at most, 2 allocations, 0 reused, spilled yes
older program: size as asked, 2 blocks, 0 bytes beyond
a size of 3: -2, no statistics: -2
small block: 0, 32 MiB on 0 anchors 0
large block: 0, 64 MiB on 0 anchors 0, 96 MiB on 1 anchors 0
its last 4 MiB: 0, 4 MiB on 1 anchors 0
a stack address: -3
no room: 0, 2 pieces; no count: -2
anchor: 0, beyond the block: -3, nothing: -2
anchored block: 0, 32 MiB on 0 anchors 8
released: 0, again: -3
released block: 0, 32 MiB on 0 anchors 0
child: passing, mode off, this process was forked from one that used CUDA, which does not survive a fork
child: -1, 0 blocks, 0 MiB live, 0 MiB at most, 0 allocations, 0 reused, spilled no
child: -1
child: free 3
child: malloc 3, trim 0
child later: passing, mode off, this process was forked from one that used CUDA, which does not survive a fork
child ended with 0
advice on managed memory: 0, 0, prefers GPU 1, was sent to the host
advice on the pool's: mostly read -4, accessed by GPU 1 0, by the host -4, not any more 0, by no GPU -2, not by none -2, preferred on GPU 1 0, nowhere 0
the pool's: 0, 32 MiB on 1 anchors 0
on a freed block: -3 -3; unknown advice: -2
no memory: -3 -3 -3 -3 -3 -3 -3 -3 -3 -3 -3 -3; beyond the block: -3 -3 -3 -3 -3 -3 -3
no bytes: -2 -2 -2 -2 -2 -2 -2 -2 -2 -2 -2 -2
the driver's: sent -3, advised -3; pinned: -3, -3
after the frees: 0, 0 blocks, 0 MiB live, 192 MiB at most, 2 allocations, 0 reused, spilled yes
odd block: 0, 0 of its bytes left out; at its end: -3
its bytes anchored: 0, one more: -3, at its end: -3
with SYNC_MEMOPS: 0, 32 MiB on 0 anchors 8
another block: 0, 32 MiB on 0 anchors 0
malloc on device -2: -2
malloc on device -77: -2
malloc on device 99: 101
malloc of no bytes: -2, to nowhere: -2, the pointer as it was
trim: some
",
    );
    // By the call that the child made, and not by what that asks of the driver.
    told.warns("GP006: this process was forked from one that had initialised CUDA, and calls gpupool_malloc: ");
}

/// Two GPUs of which 240 MiB can be had, and as much of the host.
fn placing(what: &str) -> Run {
    let run = Run::program("placing").args(what).sim("2x256MiB").env("SIMCUDA_CONTEXT_MIB", "0");
    // What is counted here is not the program's own words, and what is held stays, however long a busy machine takes.
    let run = run.env("GPUPOOL_SMALL", "driver").env("GPUPOOL_IDLE", "off");
    run.env("GPUPOOL_RESERVE", "16MiB").env("GPUPOOL_HOST_LIMIT", "256MiB").shim()
}

/// What moves leave for the next one is held and not used: no more than an eighth of 240 MiB at a place.
const ROUND: &str = "  0 holds 42, uses 42; 1 holds 0, uses 0; -1 holds 0, uses 0
to 1: 0, 0
one chunk: 34 at 1
many: 8 at 1
  wrong words: 0, 0
  0 holds 0, uses 0; 1 holds 42, uses 42; -1 holds 0, uses 0
to -1: 0, 0
one chunk: 34 at -1
many: 8 at -1
  wrong words: 0, 0
  0 holds 0, uses 0; 1 holds 10, uses 0; -1 holds 42, uses 42
to 1: 0, 0
one chunk: 34 at 1
many: 8 at 1
  wrong words: 0, 0
  0 holds 0, uses 0; 1 holds 42, uses 42; -1 holds 32, uses 0
to 0: 0, 0
one chunk: 34 at 0
many: 8 at 0
  wrong words: 0, 0
  0 holds 42, uses 42; 1 holds 10, uses 0; -1 holds 32, uses 0
to 0: 0, 0
one chunk: 34 at 0
many: 8 at 0
  wrong words: 0, 0
  0 holds 42, uses 42; 1 holds 10, uses 0; -1 holds 32, uses 0
written on the other GPU: 0 wrong
  0 holds 0, uses 0; 1 holds 0, uses 0; -1 holds 0, uses 0
left: 0 handles, 0 mapped
";

#[test]
fn blocks_go_to_another_gpu_and_the_host_and_back_with_what_is_in_them() {
    let told = placing("round").log().go();
    told.succeeds().prints(ROUND);
    let moves = told.picked(|event| match event {
        Event::BlockMove(moved) => Some((moved.bytes >> 20, moved.home, moved.place.clone(), moved.stayed)),
        _ => None,
    });
    let whole = |place: &str| [(34, 0, place.to_owned(), 0), (8, 0, place.to_owned(), 0)];
    assert_eq!(moves[..4], [whole("gpu1"), whole("host0")].concat());
    // What is said changes nothing, and how a free waits only how much is held: memory is made rather than waited for.
    placing("round").env("GPUPOOL_LOG", "trace").go().succeeds().prints(ROUND);
    let lazily = placing("round").env("GPUPOOL_FREE", "lazy").go();
    lazily.succeeds();
    let without_levels =
        |said: &str| said.lines().filter(|line| !line.contains("holds")).collect::<Vec<_>>().join("\n");
    assert_eq!(without_levels(&lazily.stdout), without_levels(ROUND));
    let nothing = "  0 holds 0, uses 0; 1 holds 0, uses 0; -1 holds 0, uses 0";
    assert!(lazily.stdout.ends_with(&format!("{nothing}\nleft: 0 handles, 0 mapped\n")), "{}", lazily.stdout);
}

#[test]
fn a_part_of_a_block_goes_and_the_rest_stays_at_its_place() {
    let told = placing("parts").env("GPUPOOL_LOG", "debug").log().go();
    told.succeeds().prints(
        "\
8 MiB from 3 MiB on: 0
block: 4 at 0 6 at 1 30 at 0
  0 holds 34, uses 34; 1 holds 6, uses 6; -1 holds 0, uses 0
its last 5 MiB: 0
block: 4 at 0 6 at 1 26 at 0 4 at -1
  0 holds 30, uses 30; 1 holds 6, uses 6; -1 holds 4, uses 4
wrong words: 0
a byte at the start: -6, 2 MiB with no whole page: -6, all but a byte: 0
block: 38 at 1 2 at -1
where it lies already: 0, and all of it: 0
block: 40 at 0
wrong words: 0
odd block: 0, its last byte: -6
odd block: 5 at 1
its last 2 MiB and more: 0
odd block: 4 at 1 1 at 0
wrong words: 0
",
    );
    let placed = told.picked(|event| match event {
        Event::BlockPlaced(placed) => {
            Some(placed.places.iter().map(|part| (part.place.clone(), part.bytes >> 20)).collect::<Vec<_>>())
        }
        _ => None,
    });
    let lies =
        |parts: &[(&str, u64)]| parts.iter().map(|(place, size)| ((*place).to_owned(), *size)).collect::<Vec<_>>();
    let second = lies(&[("gpu0", 30), ("gpu1", 6), ("host0", 4)]);
    assert_eq!(placed[..2], [lies(&[("gpu0", 34), ("gpu1", 6)]), second], "{placed:?}");
    assert!(placed.contains(&lies(&[("gpu0", 40)])), "{placed:?}");
    assert_eq!(placed.last(), Some(&lies(&[("gpu1", 4), ("gpu0", 1)])));
}

#[test]
fn what_others_stand_on_stays_and_what_is_free_beside_it_goes_home() {
    placing("shared").go().succeeds().prints(
        "\
on one chunk: yes
one of two: -6
left: 16 at 0
  0 holds 40, uses 32; 1 holds 0, uses 0; -1 holds 0, uses 0
alone: 0
left: 16 at 1
  wrong words: 0
  0 holds 0, uses 0; 1 holds 16, uses 16; -1 holds 0, uses 0
next block: 0 wrong; first: 0
  0 holds 16, uses 16; 1 holds 16, uses 16; -1 holds 0, uses 0
",
    );
}

#[test]
fn what_must_keep_its_pages_stays() {
    placing("stays").go().succeeds().prints(
        "\
asked: -6, then: 0
exported: -6
retained: -6
asked: 40 at 1
exported: 40 at 0 anchored
retained: 40 at 0 anchored
wrong words: 0, 0, 0
",
    );
}

#[test]
fn what_cannot_move_and_lies_there_already_is_there() {
    placing("there").env("GPUPOOL_SMALL", "pool").go().succeeds().prints(
        "\
a byte: 0, -6; no whole page: 0, -6
on two places: -6, -6
a small block: 0, -6, advised 0; beyond it: -3
on one chunk: 0, -6
exported: 0, -6
no such place: -2, -2
",
    );
}

#[test]
fn a_move_that_cannot_be_made_leaves_everything_as_it_was() {
    placing("refused").go().succeeds().prints(
        "\
GPU 7: -2, host node 5: -2, beyond the block: -3, nothing: -2
freed: -3, managed memory still moves: 0
a large one: 0, one more: 2
block: 40 at 0
  0 holds 40, uses 40; 1 holds 208, uses 208; -1 holds 0, uses 0
after the free: 0
  0 holds 0, uses 0; 1 holds 120, uses 40; -1 holds 0, uses 0
while a stream is captured: 900, capture goes on, ends with 0
after it: 0
wrong words: 0
",
    );
}

#[test]
fn other_gpus_and_threads_find_what_moved() {
    placing("both").go().succeeds().prints(
        "\
GPU 1, which came later: 0 wrong, on the host 0, back 0
GPU 0: 0 wrong, neighbour 0
  0 holds 80, uses 80; 1 holds 8, uses 0; -1 holds 32, uses 0
",
    );
    placing("ends").go().succeeds().prints(
        "\
threads that move, allocate and free: 0 wrong
  0 holds 0, uses 0; 1 holds 0, uses 0; -1 holds 0, uses 0
of a context that ended: -3
  0 holds 0, uses 0; 1 holds 0, uses 0; -1 holds 0, uses 0
left: 0 handles, 0 mapped
",
    );
}

#[test]
fn blocks_have_names_and_names_have_budgets() {
    let told = placing("labels").log().go();
    told.succeeds().prints(
        "\
label: 0, inside: 0, weights: 0, again: 0
  kv: 2 blocks, 16 MiB; 16 at home, 0 on peers, 0 on the host
  w: 0 blocks, 0 MiB; 0 at home, 0 on peers, 0 on the host
  weights: 1 blocks, 8 MiB; 8 at home, 0 on peers, 0 on the host
nobody's: -3, empty: -2, too long: -2, no name for a budget: -2
budget: 0
  kv: 2 blocks, 16 MiB; 16 at home, 0 on peers, 0 on the host of 16
  w: 0 blocks, 0 MiB; 0 at home, 0 on peers, 0 on the host
  weights: 1 blocks, 8 MiB; 8 at home, 0 on peers, 0 on the host
third: 0
third: 8 at 1
  kv: 3 blocks, 24 MiB; 16 at home, 8 on peers, 0 on the host of 16
  w: 0 blocks, 0 MiB; 0 at home, 0 on peers, 0 on the host
  weights: 1 blocks, 8 MiB; 8 at home, 0 on peers, 0 on the host
home again: -7, half of it: -7, after a free: 0
third: 8 at 0
anchored: -7
  kv: 3 blocks, 24 MiB; 24 at home, 0 on peers, 0 on the host of 16
  w: 0 blocks, 0 MiB; 0 at home, 0 on peers, 0 on the host
  weights: 1 blocks, 8 MiB; 8 at home, 0 on peers, 0 on the host
no budget: 0, no label: 0, 0, 0, 0 wrong
  kv: 2 blocks, 16 MiB; 16 at home, 0 on peers, 0 on the host
  w: 0 blocks, 0 MiB; 0 at home, 0 on peers, 0 on the host
  weights: 1 blocks, 8 MiB; 8 at home, 0 on peers, 0 on the host
  kv: 0 blocks, 0 MiB; 0 at home, 0 on peers, 0 on the host
  w: 0 blocks, 0 MiB; 0 at home, 0 on peers, 0 on the host
  weights: 0 blocks, 0 MiB; 0 at home, 0 on peers, 0 on the host
",
    );
    // The log tells which block was which, and how much there was of each name.
    let freed = told.picked(|event| match event {
        Event::BlockFree(free) => free.label.clone(),
        _ => None,
    });
    assert_eq!(freed, ["kv", "kv", "kv", "weights"]);
    let most = told.picked(|event| match event {
        Event::LabelLevel(level) if level.label == "kv" => Some(level.bytes >> 20),
        _ => None,
    });
    assert_eq!(most.iter().max(), Some(&24));
    assert_eq!(most.last(), Some(&0));
}

#[test]
fn what_a_thread_allocates_has_the_name_and_the_place_of_its_scope() {
    for moving in ["off", "stress"] {
        let told = placing("scopes").env("GPUPOOL_MOVE", moving).go();
        told.succeeds().prints(
            "\
far: 0, again: 1
far: 8 at 1
another thread's: 8 at 0
near: 1
near: 8 at 0
used: 8 at 1
kv: 0, before ''; inner: 0, before 'kv'; too long: -2; back: 0; none: 0
beyond the budget: 8 at 1
  kv: 3 blocks, 24 MiB; 16 at home, 8 on peers, 0 on the host of 16
  inner: 1 blocks, 8 MiB; 8 at home, 0 on peers, 0 on the host
larger than the other GPU: 224 at 1 176 at -1
no room elsewhere: 100 at 0
  0 holds 0, uses 0; 1 holds 0, uses 0; -1 holds 0, uses 0
",
        );
        // The program wants it there.
        assert!(!told.stderr.contains("warning"), "{}", told.stderr);
    }
    // Where the driver is asked first, it would place them at home.
    let spilling = placing("scopes").env("GPUPOOL_MODE", "spill").go();
    assert!(spilling.stdout.starts_with("far: 0, again: 1\nfar: 8 at 1\n"), "{}", spilling.stdout);
    let passing = placing("scopes").env("GPUPOOL_MODE", "off").go();
    assert!(passing.stdout.starts_with("far: -1, again: -1\n"), "{}", passing.stdout);
}

#[test]
fn a_fault_at_any_call_of_a_move_loses_nothing() {
    for code in [2, 999, 600, 1] {
        let told = placing(&format!("faults {code}")).go();
        told.succeeds();
        let answered = [format!(": answer {code}"), ": answer 2".to_owned(), ": answer 600".to_owned()];
        let said: Vec<&str> = told.stdout.lines().collect();
        let [before, answers @ .., after, left] = &said[..] else { told.fail("too little was said") };
        assert_eq!(*before, "  0 holds 10, uses 10; 1 holds 0, uses 0; -1 holds 0, uses 0");
        assert!(answers.len() >= 4, "{answers:?}");
        assert!(answers.iter().all(|line| answered.iter().any(|answer| line.ends_with(answer))), "{answers:?}");
        assert_eq!(*after, "  0 holds 0, uses 0; 1 holds 0, uses 0; -1 holds 0, uses 0");
        assert_eq!(*left, "left: 0 handles, 0 mapped");
    }
}

/// Two GPUs of 128 MiB, and 64 MiB of the host.
fn own_placing(what: &str) -> Run {
    let run = Run::program("own_placing").args(what).sim("2x128MiB").env("SIMCUDA_CONTEXT_MIB", "0");
    run.env("GPUPOOL_RESERVE", "16MiB").env("GPUPOOL_HOST_LIMIT", "64MiB").shim()
}

#[test]
fn handles_of_the_program_go_to_another_gpu_and_the_host_and_back_behind_all_their_mappings() {
    let told = own_placing("round").log().go();
    told.succeeds().prints(
        "\
made: 0; wrong words 0, 0; access 3 0, 1 0; at 1 0, the same number yes; used: gpu0 8 gpu1 0 host 0
to GPU 1: 0; wrong words 0, 0; access 3 0, 1 0; at 1 0, the same number yes; used: gpu0 0 gpu1 8 host 0
to the host: 0; wrong words 0, 0; access 3 0, 1 0; at 1 0, the same number yes; used: gpu0 0 gpu1 0 host 8
written there, to GPU 0: 0; wrong words 0, 0; access 3 0, 1 0; at 1 0, the same number yes; used: gpu0 8 gpu1 0 host 0
network adapters may reach it: 1
where it is: 0; wrong words 0, 0; access 3 0, 1 0; at 1 0, the same number yes; used: gpu0 8 gpu1 0 host 0
advised to GPU 1: 0; wrong words 0, 0; access 3 0, 1 0; at 1 0, the same number yes; used: gpu0 0 gpu1 8 host 0
released: 0, 0; wrong words 0, 0; used: gpu0 0 gpu1 8 host 0
unmapped: 1, used: gpu0 0 gpu1 0 host 0
",
    );
    let moves = told.picked(|event| match event {
        Event::BlockMove(moved) => Some((moved.bytes >> 20, moved.home, moved.place.clone(), moved.stayed)),
        _ => None,
    });
    assert_eq!(moves[..2], [(8, 0, "gpu1".to_owned(), 0), (8, 0, "host0".to_owned(), 0)]);
}

#[test]
fn handles_that_must_keep_their_pages_or_have_no_room_elsewhere_stay() {
    own_placing("stays").go().succeeds().prints(
        "\
half of it: -6, where it is: 0; nothing: -2; no such place: -2, -2
while a stream is captured: 900
exported: -6
it stayed: 0; wrong words 0, 0; access 3 0, 1 0; at 1 0, the same number yes; used: gpu0 8 gpu1 0 host 0
no room: 2; wrong words 0, 0; access 3 0, 1 0; at 1 0, the same number yes; used: gpu0 8 gpu1 124 host 0
room: 0; wrong words 0, 0; access 3 0, 1 0; at 1 0, the same number yes; used: gpu0 0 gpu1 8 host 0
",
    );
}

#[test]
fn what_only_the_driver_can_place_stays_and_is_said_to() {
    own_placing("kind").go().succeeds().prints(
        "\
to GPU 1: -6, to the host: -6, where it is: 0; no such place: -2
advised to GPU 1: -6, to GPU 0: 0, anywhere: 0
both to GPU 1: -6; used: gpu0 8 gpu1 8 host 0
both to GPU 0: 0; used: gpu0 16 gpu1 0 host 0
unmapped: 0
",
    );
}

#[test]
fn a_fault_at_any_call_of_a_move_of_a_handle_loses_nothing() {
    let told = own_placing("faults").report().go();
    told.succeeds().prints("swept kept: many, refused many\nswept released: many, refused many\n");
    assert_eq!(told.reported("violations"), &serde_json::json!([]));
}

#[test]
fn says_why_a_process_has_no_pool() {
    let state = |name: &str, value: &str| Run::program("control_state").sim("2x128MiB").env(name, value).shim().go();
    state("GPUPOOL_MODE", "off").succeeds().prints("passing, mode off, GPUPOOL_MODE=off\n");
    state("GPUPOOL_MODE", "trace").succeeds().prints("active, mode trace\n");
    state("GPUPOOL_MODE", "spill").succeeds().prints("active, mode spill\n");
    state("SIMCUDA_LINK", "none").succeeds().prints("active, mode spill\n");
    state("SIMCUDA_VMM", "off").succeeds().prints("passing, mode off, no GPU here has virtual memory management\n");
    // Found out when the driver says what there is.
    for (name, value) in [("GPUPOOL_LIMIT", "9:1GiB"), ("GPUPOOL_DEVICES", "0,9"), ("GPUPOOL_LIMIT", "0:1GiB")] {
        let refused = state(name, value);
        refused.succeeds();
        assert!(refused.stdout.starts_with(&format!("passing, mode off, {name}=")), "{}", refused.stdout);
    }
    let refused = state("GPUPOOL_LIMIT", "0:12parsecs");
    refused.succeeds();
    assert!(refused.stdout.starts_with("passing, mode off, GPUPOOL_LIMIT"), "{}", refused.stdout);
}

const OPENED: &str = "\
before cuInit: 3
no context, no device: 201
the primary context was made: 1, and is current: 0
it stays: 1
wrong words: 0, 0 in a block larger than a GPU
pooled: 2 of 3
freed twice: 0, 1; inside a block: 1; nothing: 0
as PyTorch asks: allocated, nothing: refused
live: 0
work on the block after its free: 0
captured stream: capture ended with 0, 0 wrong words
thread's own capture: capture ended with 0, 0 wrong words
another stream: capture ended with 0, 0 wrong words
trimmed: capture ended with 0
after a context ended: served
after closing it: 0 wrong words
child: 3
";

fn opened() -> Run {
    Run::program("opened").arg(library("libgpupool.so")).sim("2x256MiB").report()
}

#[test]
fn serves_a_program_that_only_opens_the_library() {
    for free in ["strict", "lazy"] {
        let told = opened().env("GPUPOOL_FREE", free).go();
        // A lazy free returns while the kernel may still run.
        let is_told = |line: &&str| free == "strict" || !line.starts_with("work on the block");
        let lines = |text: &'static str| text.lines().filter(is_told).collect::<Vec<_>>();
        told.succeeds();
        assert_eq!(told.stdout.lines().filter(is_told).collect::<Vec<_>>(), lines(OPENED), "GPUPOOL_FREE={free}");
        assert_eq!(told.reported("violations"), &serde_json::json!([]), "GPUPOOL_FREE={free}");
        // Launches were not seen, so nothing can be said of unused contexts.
        assert!(!told.stderr.contains("GP001"), "{}", told.stderr);
    }
}

#[test]
fn serves_a_preloaded_program_the_same_way() {
    opened().shim().go().succeeds().prints(OPENED);
}

#[test]
fn a_program_that_opened_it_may_end_with_live_blocks() {
    let told = opened().arg("leave").go();
    told.succeeds().warns("gpu1   peak");
    assert_eq!(told.reported("violations"), &serde_json::json!([]));
}

#[test]
fn python_opens_it_by_ctypes() {
    let run = Run::client("opened_client.py").arg(library("libgpupool.so")).sim("2x256MiB");
    let expected = "block of 48 MiB: right\nblock of 300 MiB: right\nlive: 2\nrefused: 2\nlive: 0\n";
    run.clone().go().succeeds().prints(expected);
    run.shim().go().succeeds().prints(expected);
}

/// The header alone, in both languages, with every warning.
#[test]
fn the_header_compiles_as_c_and_as_cpp() {
    for (compiler, language, standard) in [("cc", "c", "-std=c99"), ("c++", "c++", "-std=c++11")] {
        let output = Command::new(compiler)
            .args(["-x", language, standard, "-fsyntax-only", "-Wall", "-Wextra", "-pedantic", "-Werror"])
            .arg(repository().join("include/gpupool.h"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn the_example_places_memory_with_the_library_and_runs_without() {
    let folder = tempfile::tempdir().unwrap();
    let (program, include) = (folder.path().join("placing"), repository().join("include"));
    let built = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(&include)
        .arg("-L")
        .arg(driver_folder())
        .arg("-o")
        .arg(&program)
        .arg(include.join("examples/placing.c"))
        .args(["-lcuda", "-ldl"])
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let run = Run::command(&program).sim("2x2GiB");
    run.clone().go().succeeds().prints("");
    run.shim().go().succeeds().prints(
        "named: 0\naway: 0\nweights: 0 MiB on its GPU, 64 elsewhere\nback: 0\nweights: 64 MiB on its GPU, 0 elsewhere\n",
    );
}
