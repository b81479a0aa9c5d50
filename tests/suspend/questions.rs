//! What only asks is answered while a program is suspended.

use super::{MIB, ends_well, page, suspended, told};
use harness::{Running, eventually};

/// What it is told about what is kept.
fn answers(program: &mut Running) -> String {
    assert_eq!(program.ask("ask"), "it does");
    eventually("the answers", || Some(program.ask("asked")).filter(|told| told != "it waits"))
}

#[test]
fn what_is_known_of_memory_is_answered_while_it_is_elsewhere_and_as_before() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = suspended("1x1GiB").start(None);
    program.ask("keep 64");
    let before = answers(&mut program);
    assert!(before.ends_with(&format!(" {} of {}", 64 * MIB, 1 << 30)), "{before}");
    for to in ["host", "any", folder.path().to_str().unwrap()] {
        let left = told(&program, &format!("suspend --to {to}"));
        assert_eq!((left["bytes"].as_u64(), &left["stayed_bytes"]), (Some(64 * MIB), &0.into()), "{left}");
        for _ in 0..2 {
            assert_eq!(answers(&mut program), before, "{to}");
        }
        // Nobody was asked to resume it.
        assert!(page(&program).is_some_and(|page| page.levels.suspended > 0), "{to}");
        told(&program, "resume");
        assert_eq!(answers(&mut program), before, "{to}");
    }
    program.ask("check");
    eventually("a look at it", || (program.ask("checked") == "0").then_some(()));
    ends_well(program);
}
