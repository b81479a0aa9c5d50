//! The policy on a simulated machine, beside others and a bound that none can go below.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

mod bound;
mod machine;
mod policies;
mod traces;

use policies::{BestStatic, Lru, Never, Ours, run};

#[test]
fn table() {
    println!("| trace | never moved | best static | LRU | ours | bound, s | moved, GiB | settled |");
    let only = std::env::var("TRACE").ok();
    for trace in traces::all().into_iter().filter(|trace| only.as_ref().is_none_or(|only| trace.name.contains(only))) {
        let never = run(&trace, &mut Never);
        let fixed = run(&trace, &mut BestStatic::of(&trace));
        let lru = run(&trace, &mut Lru::default());
        let t = std::time::Instant::now();
        let mut ours = Ours::new(&trace);
        let mine = run(&trace, &mut ours);
        let t = t.elapsed();
        let t2 = std::time::Instant::now();
        let bound = bound::lower(&trace, never.settled.min(fixed.settled).min(lru.settled).min(mine.settled));
        println!(
            "| {} | {:.3} | {:.3} | {:.3} | {:.3} | {:.3} s| {:.1} | {:.1} | total/static {:.3} {t:?} bound {:?} {} launches",
            trace.name,
            never.settled / bound,
            fixed.settled / bound,
            lru.settled / bound,
            mine.settled / bound,
            bound / 1e9,
            mine.moved as f64 / (1u64 << 30) as f64,
            mine.moved_settled as f64 / (1u64 << 30) as f64,
            mine.total / never.total,
            t2.elapsed(),
            trace.ops.len()
        );
        if only.is_some() {
            let mut machine = machine::Machine::new(trace.near, trace.links.clone());
            let mut o = Ours::new(&trace);
            let mut last = (0.0, 0u64);
            for op in &trace.ops {
                policies::apply(&mut machine, &mut o, op);
                if *op == machine::Op::Idle {
                    let told = o.tiers.told(1, &machine);
                    println!(
                        "{:.2} ms, moved {:.2} GiB, cycles {} len {:?} saved {:.1} spent {:.1} extents {} stopped {:?}",
                        (machine.now - last.0) / 1e6,
                        (machine.moved_in - last.1) as f64 / (1u64 << 30) as f64,
                        told.cycles,
                        told.cycle,
                        told.saved_ns / 1e6,
                        told.spent_ns / 1e6,
                        told.extents,
                        told.stopped
                    );
                    last = (machine.now, machine.moved_in);
                }
            }
            println!("{:#?}", o.tiers.told(5, &machine));
        }
    }
}
