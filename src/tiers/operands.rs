//! How often each operand of a launch crosses the link, told apart by times that were measured with this and that of them far.
//!
//! A matrix product reads a narrow operand thirty times and a wide one eight times, and writes its result once, which hardly costs
//! anything: one number for all three would bring in results and let operands leave. Launches of one function whose large operands are
//! of the same sizes are taken to be alike. What such a launch takes is its own time and, for each operand, so and so many passes over
//! the link: recursive least squares find these numbers from the launches that are timed.

/// Operands that are told apart; launches with more are reckoned as a whole.
pub const MOST: usize = 8;
/// What is smaller is no operand by itself.
pub const LARGE: u64 = 4 << 20;

/// A number for each operand.
pub type Passes = [f32; MOST];

/// How often each operand crosses the link, if some is known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Weights {
    passes: Passes,
    is_known: [bool; MOST],
    /// The mean of those that are known.
    mean: f32,
    /// How often each can cross it in the time that launches took ([`Operands::bound`]).
    bound: Passes,
}

impl Weights {
    /// How often an operand crosses the link, where reading it once is worth `once`. One that was far each time looks like the launch's
    /// own time, so that nobody knows what its being near brings: for memory that `was_far` no more than one pass is counted on. Memory that
    /// never was is taken for the mean of the others.
    pub fn of(&self, operand: u8, was_far: bool, once: f32) -> f32 {
        let passes = match self.is_known.get(usize::from(operand)) {
            Some(true) => self.passes.get(usize::from(operand)).copied().unwrap_or(self.mean),
            Some(false) if was_far => once,
            Some(false) | None => self.mean,
        };
        passes.min(self.bound.get(usize::from(operand)).copied().unwrap_or(f32::INFINITY))
    }

    /// How often an operand crosses the link is known.
    pub fn knows(&self, operand: u8) -> bool {
        self.is_known.get(usize::from(operand)) == Some(&true)
    }

    /// How often the operand crosses it that does most often.
    pub fn most(&self) -> f32 {
        self.passes.iter().fold(0.0, |most, passes| most.max(*passes))
    }
}

/// The launch's own time, and each operand.
const TERMS: usize = MOST + 1;
/// What is known counts less by so much with each new measurement: about the last two hundred count.
const KEEP: f64 = 0.995;
/// By which part single times differ.
const NOISE: f64 = 0.04;
/// How much longer the shortest time may be after each new one.
const FORGETS: f64 = 1.002;
/// What is taken for an operand that was never far, before others are known, and how far from that it may be.
const FIRST: f64 = 4.0;
const SPREAD: f64 = 20.0;
/// An operand is known if the spread that is left is less than this part of that and of what it is.
const KNOWN: f64 = 0.2;
/// By which part of the longer one a time and what was expected differ if something else was expected.
const ODD: f64 = 0.5;
/// What so much of what was odd lately comes to shows that what was told is wrong: two times in a row.
const WRONG: f32 = 1.5;
/// The same of launches that had nothing far and took longer: three in a row. Where a little of an operand lies beyond what it is thought to reach, one or two
/// launches of each round read that from afar, and what was known of all of them would be forgotten each time.
const WRONG_NEAR: f32 = 2.0;
/// What is known is told anew if it is something else by more than this part.
pub const TOLD: f32 = 0.05;
/// Measurements before anything is believed, and those after which nothing is new.
const FEW: u32 = 4;
const MANY: u32 = 48;
/// Launches after which it is known how far operands reach.
const STEADY: u32 = 8;
/// One that is this part of what others were, or shorter, has to be seen twice.
const MUCH: u64 = 4;
/// What was measured of an operand holds for it until it is shorter by more than this part.
const LITTLE_LESS: u64 = 4;
/// What was far of an operand at least has to be less than this part of what was at most, if it is to be told from the launch's own time.
const APART: f32 = 0.5;
/// How often it is tried what an operand's being near brings.
const TRIES: u8 = 3;
/// More than this no operand is believed to be read.
const TOO_MANY: f64 = 128.0;

#[derive(Clone, Debug)]
pub struct Operands {
    count: usize,
    is_of_any_shape: bool,
    /// The launch's own time, nanoseconds, and passes of each operand.
    terms: [f64; TERMS],
    /// How sure that is: the covariance of the terms.
    spread: [[f64; TERMS]; TERMS],
    /// Times that were measured, and the shortest, nanoseconds, which is forgotten little by little.
    times: u32,
    least: f64,
    /// What was told last.
    told: Option<Weights>,
    /// Times were quite other than that.
    is_contradicted: bool,
    /// How far each goes from where its pointer leads, bytes: the least of what was seen, which is forgotten little by little.
    reach: [u64; MOST],
    /// Where an operand began that was shorter than the others, and how long it was.
    shorter: [(u64, u64); MOST],
    /// Launches since one of them became less than was thought.
    steady: u32,
    /// How many of the last times were quite other than what was told says.
    odd: f32,
    /// How often memory came near to find out how often it is read.
    tries: [u8; MOST],
    /// The least and the most of each that was far, in nanoseconds of a pass.
    seen: [(f32, f32); MOST],
    /// How often each can cross the link at all: a launch that took so long with it far cannot have read it more often in that time.
    bound: Passes,
}

impl Operands {
    /// Nothing is known of launches with so many large operands, of one shape or of any.
    pub fn new(count: usize, is_of_any_shape: bool) -> Self {
        Self {
            count: count.min(MOST),
            is_of_any_shape,
            terms: [FIRST; TERMS],
            spread: [[0.0; TERMS]; TERMS],
            times: 0,
            least: f64::INFINITY,
            told: None,
            is_contradicted: false,
            reach: [u64::MAX; MOST],
            shorter: [(0, 0); MOST],
            steady: 0,
            odd: 0.0,
            tries: [0; MOST],
            seen: [(f32::INFINITY, 0.0); MOST],
            bound: [f32::INFINITY; MOST],
        }
    }

    /// An operand seems to go on for so many bytes; answers how many of them it does, as far as is known. To the next pointer or the
    /// end of the block it is as far or farther, whatever lies there.
    ///
    /// `word`: where it begins. Once it is known how far operands reach, one that is shorter says nothing of the others before one at another address is as short: a
    /// number among the parameters that passes for a pointer, as two flags behind a length of zero, is a border in one tensor, and of a language model's 32 layers each read
    /// its weights from afar for that, 14 ms for each.
    pub fn reaches(&mut self, operand: usize, word: u64, bytes: u64) -> u64 {
        let Some(reach) = self.reach.get_mut(operand) else { return bytes };
        if bytes < *reach - *reach / 32 {
            let is_shorter = *reach < u64::MAX;
            if is_shorter
                && bytes < *reach / MUCH
                && self.steady >= STEADY
                && let Some((other, shorter)) = self.shorter.get_mut(operand)
                && !(*other != word && bytes.abs_diff(*shorter) <= bytes.max(*shorter) / 4)
            {
                (*other, *shorter) = (word, bytes);
                return bytes;
            }
            self.steady = 0;
            // What was measured of a little more holds for the rest about as well.
            if is_shorter && bytes < *reach - *reach / LITTLE_LESS {
                self.forget(operand);
            }
        }
        let Some(reach) = self.reach.get_mut(operand) else { return bytes };
        *reach = bytes.min(reach.saturating_add(*reach / 64));
        *reach
    }

    /// What was measured of an operand was of another one, or of more than it is. The others are what they were: an allocator that gives the
    /// same addresses to tensors of other sizes cuts one short now and then, and all would be forgotten again and again.
    fn forget(&mut self, operand: usize) {
        let at = operand + 1;
        if self.times == 0 || at > self.count {
            return;
        }
        for other in 0..TERMS {
            self.spread[at][other] = 0.0;
            self.spread[other][at] = 0.0;
        }
        self.spread[at][at] = SPREAD * SPREAD;
        self.terms[at] = FIRST;
        let now = self.weights_now();
        self.told = self.with_what_was_told(now);
    }

    /// What is known now, and of operands of which nothing is, what was told of them before: it was measured, if of more than there is.
    /// Without it a launch that reads an operand thirty times would be taken to read it once from then on, and nothing would come near for it that could show more.
    /// Not where times have contradicted it: with that a cache of keys that grows stayed far in the simulation.
    fn with_what_was_told(&self, now: Option<Weights>) -> Option<Weights> {
        let Some(told) = self.told else { return now };
        let mut both = now.unwrap_or(Weights { is_known: [false; MOST], ..told });
        for at in 0..MOST {
            if !both.is_known[at] && told.is_known[at] {
                (both.passes[at], both.is_known[at]) = (told.passes[at], true);
            }
        }
        let known = both.passes.iter().zip(both.is_known).filter(|(_, is_known)| *is_known).map(|(passes, _)| *passes);
        let (sum, count) = known.fold((0.0, 0.0), |(sum, count), passes| (sum + passes, count + 1.0));
        both.mean = sum / f32::max(count, 1.0);
        both.bound = self.bound.map(|bound| bound * (1.0 + TOLD));
        Some(both)
    }

    /// A launch was looked at.
    pub fn is_seen(&mut self) {
        self.steady = self.steady.saturating_add(1);
    }

    /// Launches enough were seen to know how far operands reach.
    pub fn reaches_are_known(&self) -> bool {
        self.steady >= STEADY
    }

    /// A launch took so long while one pass over each operand's far bytes takes so and so many nanoseconds. Answers whether what is
    /// told has become something else.
    pub fn add(&mut self, far: &Passes, ns: f32) -> bool {
        let ns = f64::from(ns).max(1.0);
        if self.times == 0 {
            self.terms[0] = ns;
            self.spread[0][0] = ns * ns;
            (1..=self.count).for_each(|at| self.spread[at][at] = SPREAD * SPREAD);
        }
        self.times = self.times.saturating_add(1);
        self.bind(far, ns as f32);
        for ((least, most), far) in self.seen.iter_mut().zip(far) {
            (*least, *most) = (least.min(*far), most.max(*far));
        }
        let mut given = [0.0; TERMS];
        given[0] = 1.0;
        for (given, far) in given.iter_mut().skip(1).zip(far).take(self.count) {
            *given = f64::from(*far);
        }
        if self.is_wrong(&given, ns) {
            // So sure was what was known that it would be long before it gives way: as where a launch reads the first part of what it
            // seems to read, and only the rest of that was far until now.
            let mut forgets =
                Self { reach: self.reach, steady: self.steady, ..Self::new(self.count, self.is_of_any_shape) };
            if self.is_longer(&given, ns) {
                // It reads more from afar than it was thought to reach.
                (forgets.reach, forgets.steady) = ([u64::MAX; MOST], 0);
            }
            // What was told stands until there is something better, after a few more times.
            (forgets.told, forgets.is_contradicted) = (self.told, true);
            *self = forgets;
            return self.add(far, ns as f32);
        }
        self.fit(&given, ns, NOISE * ns);
        // An operand that is far each time looks like the launch's own time, which is never more than the shortest that was seen.
        self.least = (self.least * FORGETS).min(ns);
        // And never less than nothing: an operand that is far nearly each time would seem to cost more than there is.
        let most = (1.0 + NOISE) * self.least;
        if !(0.0..=most).contains(&self.terms[0]) {
            let mut own = [0.0; TERMS];
            own[0] = 1.0;
            self.fit(&own, if self.terms[0] > most { self.least } else { 0.0 }, NOISE * self.least);
        }
        let now = self.weights_now();
        let differs = |a: f32, b: f32| (a - b).abs() > TOLD * a.abs().max(b).max(0.5);
        let is_news = self.times >= FEW
            && match (&self.told, &now) {
                (Some(told), Some(now)) => {
                    let mut pairs = told.passes.iter().zip(&now.passes);
                    told.is_known != now.is_known || differs(told.mean, now.mean) || pairs.any(|(a, b)| differs(*a, *b))
                }
                (told, now) => told.is_some() != now.is_some(),
            };
        if is_news {
            self.told = if self.is_contradicted { now } else { self.with_what_was_told(now) };
            self.is_contradicted = false;
        }
        is_news
    }

    /// So long a launch took, while one pass over each operand takes no less than `least` nanoseconds: it cannot have read any of them more often than that.
    /// Answers whether that is less than was known. Says nothing where launches of all shapes are taken together.
    pub fn bind(&mut self, least: &Passes, ns: f32) -> bool {
        let mut is_news = false;
        if self.is_of_any_shape {
            return false;
        }
        for (bound, least) in self.bound.iter_mut().zip(least).filter(|(_, least)| **least > 0.0) {
            is_news |= ns / least < *bound * (1.0 - TOLD);
            *bound = bound.min(ns / least);
        }
        is_news
    }

    /// Whether times like this one contradict what was told, one after the other or one of three; a single one may have waited for
    /// something else.
    fn is_wrong(&mut self, given: &[f64; TERMS], ns: f64) -> bool {
        let expected = self.expected(given);
        let is_odd = self.told.is_some() && (ns - expected).abs() > ODD * ns.max(expected);
        self.odd = self.odd * 0.75 + f32::from(u8::from(is_odd));
        let is_near = given[1..].iter().all(|far| *far == 0.0);
        is_odd && self.odd > if is_near && ns > expected { WRONG_NEAR } else { WRONG }
    }

    fn expected(&self, given: &[f64; TERMS]) -> f64 {
        given.iter().zip(&self.terms).map(|(given, term)| given * term.max(0.0)).sum()
    }

    fn is_longer(&self, given: &[f64; TERMS], ns: f64) -> bool {
        ns > self.expected(given)
    }

    /// Takes a measurement in: with so much of each term given it took so long, give or take.
    fn fit(&mut self, given: &[f64; TERMS], ns: f64, noise_ns: f64) {
        // Those of operands that there are not stay what they are.
        let terms = self.count + 1;
        let mut spread_given = [0.0; TERMS];
        for (sum, row) in spread_given.iter_mut().zip(&self.spread).take(terms) {
            *sum = row.iter().zip(given).take(terms).map(|(spread, given)| spread * given).sum();
        }
        let noise = noise_ns.powi(2);
        let all: f64 = noise + given.iter().zip(&spread_given).map(|(given, spread)| given * spread).sum::<f64>();
        let off = ns - given.iter().zip(&self.terms).map(|(given, term)| given * term).sum::<f64>();
        for (term, spread) in self.terms.iter_mut().zip(&spread_given) {
            *term += spread / all * off;
        }
        for (row, one) in self.spread.iter_mut().zip(spread_given).take(terms) {
            for (spread, other) in row.iter_mut().zip(spread_given).take(terms) {
                *spread = (*spread - one * (other / all)) * (1.0 / KEEP);
            }
        }
        // What is never far would become ever less sure.
        let most = [self.terms[0] * self.terms[0], SPREAD * SPREAD];
        for at in 0..=self.count {
            let most = most[at.min(1)];
            if self.spread[at][at] > most {
                let less = (most / self.spread[at][at]).sqrt();
                (0..terms).for_each(|other| {
                    self.spread[at][other] *= less;
                    self.spread[other][at] *= less;
                });
            }
        }
    }

    /// How often an operand can cross the link at most, by the times that were measured with it far.
    pub fn bound(&self, operand: u8) -> f32 {
        self.bound.get(usize::from(operand)).copied().unwrap_or(f32::INFINITY)
    }

    /// How often an operand may cross the link that was far each time, and so looks like the launch's own time: half of what its times leave room
    /// for. `None` where that is known, or where it was tried [`TRIES`] times.
    pub fn promises(&self, operand: u8) -> Option<f32> {
        let at = usize::from(operand);
        let is_open = self.told.is_some_and(|told| !told.knows(operand)) && *self.tries.get(at)? < TRIES;
        let bound = *self.bound.get(at)?;
        (is_open && bound.is_finite()).then_some(bound / 2.0)
    }

    /// Memory comes near to find out how often this operand is read.
    pub fn is_tried(&mut self, operand: u8) {
        if let Some(tries) = self.tries.get_mut(usize::from(operand)) {
            *tries = tries.saturating_add(1);
        }
    }

    /// It did not.
    pub fn is_not_tried(&mut self, operand: u8) {
        if let Some(tries) = self.tries.get_mut(usize::from(operand)) {
            *tries = tries.saturating_sub(1);
        }
    }

    /// Passes of each operand; nothing while too little was measured.
    pub fn weights(&self) -> Option<Weights> {
        self.told
    }

    fn weights_now(&self) -> Option<Weights> {
        let mut weights = Weights { bound: self.bound.map(|bound| bound * (1.0 + TOLD)), ..Weights::default() };
        let (mut sum, mut count) = (0.0, 0.0);
        for at in 1..=self.count {
            let Some(passes) = self.known(at) else { continue };
            weights.passes[at - 1] = passes as f32;
            weights.is_known[at - 1] = true;
            (sum, count) = (sum + passes, count + 1.0);
        }
        weights.mean = (sum / f64::max(count, 1.0)) as f32;
        (self.times >= FEW && count > 0.0).then_some(weights)
    }

    fn known(&self, at: usize) -> Option<f64> {
        // Where about as much of it was far each time, what its pass differs by is how far it was thought to reach.
        let (least, most) = *self.seen.get(at.checked_sub(1)?)?;
        let (passes, off) = (self.terms[at].clamp(0.0, TOO_MANY), self.spread[at][at].max(0.0).sqrt());
        (least < APART * most && off < KNOWN * SPREAD.min(passes.max(2.0) * 2.0)).then_some(passes)
    }

    /// Some launch was timed with something of it far, or any at all.
    pub fn was_timed(&self) -> bool {
        self.times > 0 || self.bound.iter().any(|bound| bound.is_finite())
    }

    /// Hardly anything was measured.
    #[inline]
    pub fn is_new(&self) -> bool {
        self.times < 2 * FEW
    }

    /// So much was measured that the next time is no news: all operands are known, or it was tried
    /// often in vain.
    #[inline]
    pub fn is_settled(&self) -> bool {
        self.times >= 16 * MANY || self.times >= MANY && (1..=self.count).all(|at| self.known(at).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nanoseconds of a launch with these bytes of each operand far, in passes.
    fn took(far: &Passes, passes: &[f64], own: f64) -> f32 {
        (own + far.iter().zip(passes).map(|(far, passes)| f64::from(*far) * passes).sum::<f64>()) as f32
    }

    fn learn(patterns: &[[f32; 3]], passes: &[f64], rounds: usize) -> Operands {
        let mut operands = Operands::new(3, false);
        for round in 0..rounds {
            let [a, b, c] = patterns[round % patterns.len()];
            let far = [a * 1e5, b * 4e5, c * 1e5, 0.0, 0.0, 0.0, 0.0, 0.0];
            let noise = 1.0 + 0.03 * ((round * 7 % 5) as f32 - 2.0) / 2.0;
            operands.add(&far, took(&far, passes, 600_000.0) * noise);
        }
        operands
    }

    #[test]
    fn operands_that_are_read_often_and_seldom_are_told_apart() {
        let patterns =
            [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.0, 1.0]];
        let [a, b, c] = passes(&learn(&patterns, &[31.0, 7.5, 0.0], 60));
        assert!((29.0..33.0).contains(&a) && (7.0..8.0).contains(&b) && c < 1.0, "{a} {b} {c}");
    }

    #[test]
    fn what_was_never_far_is_taken_for_the_mean_of_the_others_and_nothing_is_told_before_anything_was_far() {
        let [a, b, c] = passes(&learn(&[[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], &[31.0, 7.5, 0.0], 30));
        assert!((29.0..33.0).contains(&a) && b == a && c == a, "{a} {b} {c}");
        assert!(learn(&[[0.0, 0.0, 0.0]], &[31.0, 7.5, 0.0], 30).weights().is_none());
    }

    #[test]
    fn an_operand_that_is_far_each_time_is_not_taken_for_the_launch_s_own_time() {
        let mut operands = Operands::new(2, false);
        let far = |a: f32, b: f32| [a * 1e6, b * 1e6, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let mut add = |far: Passes| _ = operands.add(&far, took(&far, &[30.0, 30.0], 12e6));
        (0..4).for_each(|_| add(far(1.0, 1.0)));
        add(far(0.0, 0.0));
        (0..60).for_each(|_| add(far(0.0, 1.0)));
        let [a, b, _] = passes(&operands);
        assert!((25.0..35.0).contains(&a) && (25.0..35.0).contains(&b), "{a} {b}");
    }

    #[test]
    fn what_changes_is_learnt_anew() {
        let mut operands = learn(&[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], &[31.0, 7.5, 0.0], 60);
        for round in 0..600 {
            let far = [[1e5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0; MOST]][round % 2];
            operands.add(&far, took(&far, &[3.0, 7.5, 0.0], 600_000.0));
        }
        let [a, ..] = passes(&operands);
        assert!(a < 6.0, "{a}");
    }

    #[test]
    fn an_operand_that_was_always_far_promises_no_more_than_one_pass() {
        let operands = learn(&[[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 1.0, 1.0]], &[92.0, 38.0, 0.1], 40);
        let weights = operands.weights().unwrap();
        assert!(weights.of(0, true, 0.92) > 80.0 && weights.of(1, true, 0.92) > 30.0, "{weights:?}");
        assert!(weights.of(2, true, 0.92) <= 0.92, "{weights:?}");
    }

    #[test]
    fn one_operand_that_seems_to_be_much_shorter_says_nothing_of_the_others_and_two_that_are_as_short_do() {
        const MIB: u64 = 1 << 20;
        let mut operands = Operands::new(1, false);
        let mut reaches = |word: u64, bytes: u64| {
            operands.is_seen();
            operands.reaches(0, word, bytes * MIB) / MIB
        };
        (0..10).for_each(|word| assert_eq!(reaches(word, 86), 86));
        assert_eq!(reaches(10, 6), 6, "it is no longer than what it lies in");
        assert_eq!(reaches(11, 86), 86);
        assert_eq!(reaches(10, 6), 6, "the same one again");
        assert_eq!(reaches(12, 86), 86);
        assert_eq!(reaches(13, 6), 6);
        assert_eq!(reaches(14, 86), 6);
    }

    #[test]
    fn what_was_timed_with_all_of_it_near_is_read_no_more_often_than_its_time_leaves_room_for() {
        let mut operands = Operands::new(2, false);
        assert!(!operands.was_timed());
        let once = [20_000.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        assert!(operands.bind(&once, 50_000.0), "news");
        assert!(operands.was_timed());
        assert_eq!((operands.bound(0), operands.bound(1)), (2.5, f32::INFINITY));
        assert!(!operands.bind(&once, 90_000.0), "a longer time says nothing new");
    }

    /// Of operands that are near.
    fn passes(operands: &Operands) -> [f32; 3] {
        let weights = operands.weights().unwrap();
        [0, 1, 2].map(|at| weights.of(at, false, 1.0))
    }
}
