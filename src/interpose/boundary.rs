//! The one place where Rust ends and C begins: no panic crosses it, and what the driver answered is never lost to one.

use crate::Api;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The real driver call with the arguments the program gave, answering an `R`. It remembers its answer, so that a panic
/// after the call does not make the library repeat it.
pub struct Real<'a, R> {
    /// The function that the program called.
    pub api: Api,
    call: &'a mut dyn FnMut() -> R,
    answer: Option<R>,
}

impl<R: Copy> Real<'_, R> {
    /// Calls the driver.
    #[inline]
    pub fn call(&mut self) -> R {
        let answer = (self.call)();
        self.answer = Some(answer);
        answer
    }
}

/// Runs a body. On a panic `broken` is told, and the program gets the driver's answer: the one already given, or else the
/// real call's.
#[inline]
pub fn run<R: Copy>(
    api: Api,
    call: &mut dyn FnMut() -> R,
    body: impl FnOnce(&mut Real<R>) -> R,
    broken: impl FnOnce(Api),
) -> R {
    let mut real = Real { api, call, answer: None };
    // AssertUnwindSafe: `broken` closes what may be half changed, and `real` is read only for whether it was called.
    match catch_unwind(AssertUnwindSafe(|| body(&mut real))) {
        Ok(result) => result,
        Err(_) => {
            let answered = real.answer;
            broken(api);
            match answered {
                Some(answer) => answer,
                None => real.call(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const API: Api = Api("cuInit");

    /// The answer, how often the driver was called, and how often `broken` was told.
    fn outcome(body: impl FnOnce(&mut Real<i32>) -> i32) -> (i32, u32, u32) {
        let (calls, told) = (Cell::new(0), Cell::new(0));
        let mut call = || {
            calls.set(calls.get() + 1);
            700
        };
        let answer = run(API, &mut call, body, |_| told.set(told.get() + 1));
        (answer, calls.get(), told.get())
    }

    #[test]
    fn a_panic_before_the_real_call_becomes_the_real_call() {
        assert_eq!(outcome(|_| panic!("planted")), (700, 1, 1));
    }

    #[test]
    fn a_panic_after_the_real_call_keeps_its_answer_and_does_not_repeat_it() {
        let body = |real: &mut Real<i32>| {
            assert_eq!(real.call(), 700);
            panic!("planted")
        };
        assert_eq!(outcome(body), (700, 1, 1));
    }

    #[test]
    fn a_body_that_answers_makes_no_real_call() {
        assert_eq!(outcome(|_| 0), (0, 0, 0));
    }
}
