//! The one place where Rust ends and C begins: no panic crosses it, and what the driver answered is never lost to one.

use super::{Row, guard};
use crate::driver::CuResult;
use crate::process;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The real driver call with the arguments the program gave. It remembers its answer, so that a panic after the call
/// does not make the shim repeat it.
pub struct Real<'a> {
    /// The function that the program called.
    pub row: Row,
    call: &'a mut dyn FnMut() -> CuResult,
    answer: Option<CuResult>,
}

impl Real<'_> {
    /// Calls the driver.
    #[inline]
    pub fn call(&mut self) -> CuResult {
        let answer = (self.call)();
        self.answer = Some(answer);
        answer
    }
}

/// Runs a body. On a panic the pool takes no new allocations, and the program gets the driver's answer: the one already
/// given, or else the real call's.
#[inline]
pub fn run(row: Row, call: &mut dyn FnMut() -> CuResult, body: impl FnOnce(&mut Real) -> CuResult) -> CuResult {
    let mut real = Real { row, call, answer: None };
    // AssertUnwindSafe: after a panic the pool is closed for allocations, which is what may be half changed, and `real`
    // is read only for whether it was called.
    let result = match catch_unwind(AssertUnwindSafe(|| body(&mut real))) {
        Ok(result) => result,
        Err(_) => {
            let answered = real.answer;
            process::broken(row);
            match answered {
                Some(answer) => answer,
                None => real.call(),
            }
        }
    };
    trace(row, result);
    result
}

/// Logs a hooked call, at level trace. Rows without a boundary come here, too.
#[inline]
pub fn trace(row: Row, result: CuResult) {
    if tracing::enabled!(target: "gpupool::call", tracing::Level::TRACE) {
        contained(row, || {
            let api = row.name();
            tracing::trace!(target: "gpupool::call", event = "call", api, result = result.0, "{api} -> {result}");
        });
    }
}

/// For what rows without a boundary do now and then: inside a hook, without being cancelled, and no panic passes.
#[cold]
pub fn contained(row: Row, act: impl FnOnce()) {
    let _inside = guard::enter_sheltered();
    // AssertUnwindSafe: as in `run`.
    if catch_unwind(AssertUnwindSafe(act)).is_err() {
        process::broken(row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(calls: &mut u32) -> impl FnMut() -> CuResult {
        || {
            *calls += 1;
            CuResult(700)
        }
    }

    #[test]
    fn a_panic_before_the_real_call_becomes_the_real_call() {
        let mut calls = 0;
        assert_eq!(run(Row::cuInit, &mut count(&mut calls), |_| panic!("planted")), CuResult(700));
        assert_eq!(calls, 1);
    }

    #[test]
    fn a_panic_after_the_real_call_keeps_its_answer_and_does_not_repeat_it() {
        let mut calls = 0;
        let body = |real: &mut Real| {
            assert_eq!(real.call(), CuResult(700));
            panic!("planted")
        };
        assert_eq!(run(Row::cuInit, &mut count(&mut calls), body), CuResult(700));
        assert_eq!(calls, 1);
    }

    #[test]
    fn what_rows_without_a_boundary_do_is_inside_a_hook_and_keeps_its_panics() {
        contained(Row::cuLaunchKernel, || {
            assert!(!guard::is_outside());
            panic!("planted");
        });
        assert!(guard::is_outside());
    }

    #[test]
    fn a_body_that_answers_makes_no_real_call() {
        let mut calls = 0;
        assert_eq!(run(Row::cuInit, &mut count(&mut calls), |_| CuResult::SUCCESS), CuResult::SUCCESS);
        assert_eq!(calls, 0);
    }
}
