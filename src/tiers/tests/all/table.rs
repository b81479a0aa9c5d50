//! All policies on all traces.

use crate::bound;
use crate::knowing::{ByOdds, Known};
use crate::machine::{Op, Trace};
use crate::policies::{BestStatic, Cost, Lru, Never, Ours, run};
use crate::tournament::Tournament;
use crate::traces;

/// What a trace may cost once settled, as a ratio to the best that somebody could do who knows as much: the odds where a trace is
/// drawn (or not moving, where that is better still); a schedule that knows the future where the program does something else each 60
/// cycles, since nobody can know it before; the bound in all other cases. Against an adversary nothing can be done but not to lose.
const ALLOWED: f64 = 1.15;

struct Row {
    name: String,
    never: Cost,
    fixed: Cost,
    lru: Cost,
    tournament: Cost,
    ours: Cost,
    /// What a schedule that knows the future reaches, and one that knows the odds, if there are any.
    known: f64,
    by_odds: Option<f64>,
    bound: f64,
}

fn row(trace: &Trace) -> Row {
    let never = run(trace, &mut Never);
    let fixed = run(trace, &mut BestStatic::of(trace));
    let lru = run(trace, &mut Lru::default());
    let tournament = run(trace, &mut Tournament::new());
    let ours = run(trace, &mut Ours::new(trace));
    let knows = |margin| run(trace, &mut Known::of(trace, margin)).settled;
    let known = [1.0, 1.5].map(knows).into_iter().fold(f64::INFINITY, f64::min);
    let rounds = trace.ops.iter().filter(|op| **op == Op::Idle).count();
    let by_odds = traces::others(trace).map(|others| run(trace, &mut ByOdds::of(&others, rounds)).settled);
    let least = [never, fixed, lru, tournament, ours].iter().map(|cost| cost.settled).fold(known, f64::min);
    let bound = bound::lower(trace, least);
    Row { name: trace.name.clone(), never, fixed, lru, tournament, ours, known, by_odds, bound }
}

#[test]
fn table_of_all_policies_on_all_traces() {
    let traces = traces::all();
    let half = traces.len() / 2;
    let rows = |part: &[Trace]| part.iter().map(row).collect::<Vec<Row>>();
    let (mut first, second) = std::thread::scope(|scope| {
        let second = scope.spawn(|| rows(&traces[half..]));
        (rows(&traces[..half]), second.join().unwrap())
    });
    first.extend(second);
    let gib = |bytes: u64| bytes as f64 / traces::GIB as f64;
    println!(
        "| trace | bound, ms | knows the future | knows the odds | never moved | best static | LRU | tournament | ours | moved, GiB: in all / settled | all of it, to never moved |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for row in &first {
        println!(
            "| {} | {:.0} | {:.2} | {} | {:.2} | {:.2} | {:.2} | {:.2} | **{:.3}** | {:.1} / {:.1} | {:.3} |",
            row.name,
            row.bound / 1e6,
            row.known / row.bound,
            row.by_odds.map_or("".to_owned(), |odds| format!("{:.2}", odds / row.bound)),
            row.never.settled / row.bound,
            row.fixed.settled / row.bound,
            row.lru.settled / row.bound,
            row.tournament.settled / row.bound,
            row.ours.settled / row.bound,
            gib(row.ours.moved),
            gib(row.ours.moved_settled),
            row.ours.total / row.never.total,
        );
    }
    for row in &first {
        let (ours, name) = (row.ours.settled, &row.name);
        assert!(row.bound <= ours * 1.0001, "{name}: below the bound: {} and {ours}", row.bound);
        let best = match row.by_odds {
            Some(odds) => odds.min(row.never.settled),
            None if name.starts_with("phases") => row.known,
            None if name.starts_with("adversary") => f64::INFINITY,
            None => row.bound,
        };
        // How far an operand reaches into memory of which nobody has named a part yet is guessed, and with each page of the cache anew.
        let allowed = match name.as_str() {
            "training, 1.2 ×, host" => 1.16,
            // Out and in take longer together than either, and nothing is known of the first two rounds.
            "GEMM rotation, host" => 1.26,
            "growing KV cache" => 1.26,
            "phases of 60 cycles" => 1.22,
            _ => ALLOWED,
        };
        assert!(ours <= allowed * best, "{name}: {:.3} of what can be known", ours / best);
        assert!(
            row.ours.total <= 1.02 * row.never.total,
            "{name}: {:.4} of not moving",
            row.ours.total / row.never.total
        );
    }
    let all_near = 192.0 * (11_500_000.0 + 1024.0 * traces::MIB as f64 / 4480.0);
    let rotation = first.iter().find(|row| row.name.contains("out by a kernel")).unwrap();
    assert!(rotation.ours.settled <= 1.08 * all_near, "{:.3} of all near", rotation.ours.settled / all_near);
}

#[test]
fn wrong_measurements_now_and_then_do_no_harm() {
    let trace = traces::training(1.2, traces::peer(), "training");
    let mut ours = Ours::new(&trace);
    ours.noise = Some((3, 1.6));
    let (noisy, fixed) = (run(&trace, &mut ours), run(&trace, &mut BestStatic::of(&trace)));
    assert!(noisy.settled <= 1.15 * fixed.settled, "{:.3}", noisy.settled / fixed.settled);
}

/// The relaxation is below the exact optimum, and the policy not far above it once it knows the cycle.
#[test]
fn small_traces_come_near_the_exact_optimum() {
    for (seed, reuse) in [(1, 1.0), (2, 1.0), (3, 4.0), (4, 12.0), (5, 30.0), (6, 30.0)] {
        let (long, short) = (3000, 2820);
        let trace = |launches| traces::small(seed, 7, 4, launches, 12, reuse);
        let exact = bound::exact(&trace(long));
        let lower = bound::lower(&trace(long), exact);
        assert!(lower <= exact * 1.0001, "seed {seed}: the bound {lower} is above the optimum {exact}");
        let end = |policy: &mut dyn crate::policies::Policy, launches| run(&trace(launches), policy).total;
        let ours = end(&mut Ours::new(&trace(long)), long) - end(&mut Ours::new(&trace(short)), short);
        let best = exact - bound::exact(&trace(short));
        assert!(ours <= 1.15 * best, "seed {seed}, reuse {reuse}: {:.3} of the optimum", ours / best);
    }
}
