//! A quantity over time, in a bounded number of steps.

/// Steps kept at most. More than a line of text shows, so that drawing it loses little, and enough for a page to zoom into.
const STEPS: usize = 2048;

/// The highest and the last value in each step of time in which something was told. The steps start at a millisecond and double whenever
/// the time outgrows them, so a log of a second and one of a month take the same memory.
#[derive(Clone, Debug)]
pub struct Timeline {
    step: f64,
    /// By the number of the step, in order.
    steps: Vec<(u32, Step)>,
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
    /// What holds of a time that begins with this and goes on with `after`.
    fn join(self, after: Step) -> Step {
        Step { highest: self.highest.max(after.highest), last: after.last }
    }
}

impl Timeline {
    /// Notes `value` at `seconds` from the start. Times that make no sense count as the start.
    pub fn add(&mut self, seconds: f64, value: u64) {
        let seconds = if seconds.is_finite() && seconds > 0.0 { seconds } else { 0.0 };
        while seconds >= self.step * STEPS as f64 {
            self.step *= 2.0;
            let halved = self.steps.iter().map(|(at, step)| (at / 2, *step));
            self.steps = halved.fold(Vec::new(), |mut steps: Vec<(u32, Step)>, (at, step)| {
                match steps.last_mut() {
                    Some((before, known)) if *before == at => *known = known.join(step),
                    _ => steps.push((at, step)),
                }
                steps
            });
        }
        let at = (seconds / self.step) as u32;
        let step = Step { highest: value, last: value };
        // Nearly always the last one or the next: threads tell of things in other orders than they happened, but not by much.
        match self.steps.last_mut() {
            Some((known, before)) if *known == at => *before = before.join(step),
            Some((known, _)) if *known > at => match self.steps.binary_search_by_key(&at, |(known, _)| *known) {
                Ok(index) => self.steps[index].1 = self.steps[index].1.join(step),
                Err(index) => self.steps.insert(index, (at, step)),
            },
            _ => self.steps.push((at, step)),
        }
        self.peak = self.peak.max(value);
    }

    /// There was so much at a time that is not known.
    pub fn was_at_least(&mut self, value: u64) {
        self.peak = self.peak.max(value);
    }

    /// The most there was.
    pub fn peak(&self) -> u64 {
        self.peak
    }

    /// What was told of the latest time.
    pub fn last(&self) -> u64 {
        self.steps.last().map_or(0, |(_, step)| step.last)
    }

    /// The highest value in each of `count` equal parts of the time from the start to `end` seconds. A part in which
    /// nothing changed has what was there before it.
    pub fn parts(&self, count: usize, end: f64) -> Vec<u64> {
        self.joined(count, 0.0, end, |step| step.highest)
    }

    /// As [`Timeline::parts`] of a longer time, in which this one starts after `offset` seconds.
    pub fn parts_of(&self, count: usize, offset: f64, end: f64) -> Vec<u64> {
        self.joined(count, offset, end, |step| step.highest)
    }

    /// The value at the end of each of these parts.
    pub fn lasts_of(&self, count: usize, offset: f64, end: f64) -> Vec<u64> {
        self.joined(count, offset, end, |step| step.last)
    }

    fn joined(&self, count: usize, offset: f64, end: f64, shown: impl Fn(Step) -> u64) -> Vec<u64> {
        let end = end.max(self.step);
        let mut parts: Vec<Option<Step>> = vec![None; count];
        for (at, step) in &self.steps {
            let at = ((offset + f64::from(*at) * self.step) / end * count as f64) as usize;
            let part = &mut parts[at.min(count - 1)];
            *part = Some(part.map_or(*step, |before| before.join(*step)));
        }
        let mut before = 0;
        let shown = parts.into_iter().map(|part| {
            let value = part.map_or(before, &shown);
            before = part.map_or(before, |part| part.last);
            value
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
        timeline.add(3.0e6, 2);
        assert_eq!((timeline.parts(10, 3.0e6)[9], timeline.last()), (5, 2));
    }

    #[test]
    fn what_does_not_change_stays() {
        let mut timeline = Timeline::default();
        timeline.add(1.5, 7);
        timeline.add(9.5, 2);
        assert_eq!(timeline.parts(10, 10.0), [0, 7, 7, 7, 7, 7, 7, 7, 7, 2]);
    }

    #[test]
    fn one_that_starts_later_stands_later() {
        let mut timeline = Timeline::default();
        timeline.add(0.0, 7);
        timeline.add(1.2, 9);
        timeline.add(1.4, 2);
        assert_eq!(timeline.parts_of(5, 2.0, 5.0), [0, 0, 7, 9, 2]);
        assert_eq!(timeline.lasts_of(5, 2.0, 5.0), [0, 0, 7, 2, 2]);
    }

    #[test]
    fn times_out_of_order_are_put_in_order() {
        let mut timeline = Timeline::default();
        for (seconds, value) in [(0.0, 1), (8.0, 5), (4.0, 3)] {
            timeline.add(seconds, value);
        }
        assert_eq!(timeline.parts(3, 9.0), [1, 3, 5]);
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
