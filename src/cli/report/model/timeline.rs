//! A quantity over time, in a fixed number of steps.

/// Steps kept. More than a line of text shows, so that drawing it loses little.
const STEPS: usize = 256;

/// The highest and the last value in each step of time. The steps start at a millisecond and double whenever the time
/// outgrows them, so a log of a second and one of a month take the same memory.
#[derive(Clone, Debug)]
pub struct Timeline {
    step: f64,
    steps: Vec<Option<Step>>,
    peak: u64,
}

#[derive(Clone, Copy, Debug)]
struct Step {
    highest: u64,
    last: u64,
}

impl Default for Timeline {
    fn default() -> Self {
        Timeline { step: 0.001, steps: Vec::new(), peak: 0 }
    }
}

impl Step {
    /// What holds of a time that begins with `before` and ends with `after`.
    fn join(before: Option<Step>, after: Option<Step>) -> Option<Step> {
        match (before, after) {
            (Some(before), Some(after)) => Some(Step { highest: before.highest.max(after.highest), last: after.last }),
            (one, other) => one.or(other),
        }
    }
}

impl Timeline {
    /// Notes `value` at `seconds` from the start. Times that make no sense count as the start.
    pub fn add(&mut self, seconds: f64, value: u64) {
        let seconds = if seconds.is_finite() && seconds > 0.0 { seconds } else { 0.0 };
        while seconds >= self.step * STEPS as f64 {
            self.step *= 2.0;
            let join = |pair: &[Option<Step>]| Step::join(pair[0], pair.get(1).copied().flatten());
            self.steps = self.steps.chunks(2).map(join).collect();
        }
        let at = (seconds / self.step) as usize;
        if self.steps.len() <= at {
            self.steps.resize(at + 1, None);
        }
        self.steps[at] = Step::join(self.steps[at], Some(Step { highest: value, last: value }));
        self.peak = self.peak.max(value);
    }

    /// The most there was.
    pub fn peak(&self) -> u64 {
        self.peak
    }

    /// The highest value in each of `count` equal parts of the time from the start to `end` seconds. A part in which
    /// nothing changed has what was there before it.
    pub fn parts(&self, count: usize, end: f64) -> Vec<u64> {
        let end = end.max(self.step);
        let mut parts = vec![None; count];
        for (index, step) in self.steps.iter().enumerate() {
            let at = (index as f64 * self.step / end * count as f64) as usize;
            let part = &mut parts[at.min(count - 1)];
            *part = Step::join(*part, *step);
        }
        let mut before = 0;
        let shown = parts.into_iter().map(|part| {
            let highest = part.map_or(before, |part| part.highest);
            before = part.map_or(before, |part| part.last);
            highest
        });
        shown.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_survive_however_long_it_takes() {
        let mut timeline = Timeline::default();
        timeline.add(0.0, 3);
        timeline.add(0.5, 900);
        timeline.add(0.5001, 4);
        timeline.add(3.0e6, 5);
        assert_eq!(timeline.peak(), 900);
        assert!(timeline.steps.len() <= STEPS);
        let parts = timeline.parts(10, 3.0e6);
        assert_eq!((parts[0], parts[1], parts[9]), (900, 4, 5));
    }

    #[test]
    fn what_does_not_change_stays() {
        let mut timeline = Timeline::default();
        timeline.add(1.5, 7);
        timeline.add(9.5, 2);
        assert_eq!(timeline.parts(10, 10.0), [0, 7, 7, 7, 7, 7, 7, 7, 7, 2]);
    }

    #[test]
    fn times_that_make_no_sense_are_the_start() {
        let mut timeline = Timeline::default();
        for seconds in [-5.0, f64::NAN, f64::INFINITY] {
            timeline.add(seconds, 1);
        }
        assert_eq!(timeline.parts(2, 0.0), [1, 1]);
    }
}
