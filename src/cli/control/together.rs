//! Several processes that do something at the same moment, or none of them: programs that work on something together wait for each other on their GPUs.

use std::time::{Duration, Instant};

use gpupool_wire::control::{Reply, Request, Target};

use super::asking::{Connected, TO_GO_ON, connect, hear, next, say, side_by_side};
use super::telling::{OTHER_ANSWER, Progress, Told, told_by};
use crate::pages::Listed;

/// Who speaks to programs of other hosts, which do the same at the same moment.
pub trait Company {
    /// Says what keeps those of this host from this step, if anything does, and hears what keeps any from it.
    ///
    /// # Errors
    /// Somebody takes part no more; who and why.
    fn agree(&mut self, step: Step, why_not: Option<String>) -> Result<Option<String>, String>;
}

/// What all of them come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// They run, and may be stopped.
    Ready,
    /// They have stopped.
    Rest,
    /// Their memory is copied.
    Copied,
}

/// There are no others.
pub struct Nobody;

impl Company for Nobody {
    fn agree(&mut self, _: Step, why_not: Option<String>) -> Result<Option<String>, String> {
        Ok(why_not)
    }
}

/// Why all of them run on: what kept each of these from it, and what those of other hosts.
#[derive(Default)]
struct Refusal {
    own: Vec<Option<String>>,
    elsewhere: Option<String>,
}

impl From<Vec<Option<String>>> for Refusal {
    fn from(own: Vec<Option<String>>) -> Self {
        Self { own, elsewhere: None }
    }
}

/// Why none of them writes an image.
pub struct NoImage {
    /// In one text, with the numbers of those that it is about.
    pub why: String,
    /// What is told of each.
    pub each: Vec<String>,
}

/// Where others keep them from it.
fn elsewhere(why: String) -> Refusal {
    Refusal { own: Vec::new(), elsewhere: Some(why) }
}

/// What keeps these from a step, in one text.
fn in_one(rows: &[Listed], why: &[Option<String>]) -> Option<String> {
    let of_one = |(row, why): (&Listed, &Option<String>)| {
        Some(format!("process {}: {}", row.told.process.identity.pid, why.as_ref()?))
    };
    let all: Vec<String> = rows.iter().zip(why).filter_map(of_one).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

/// How long all programs that are suspended together have to stop at the same moment, before those that have are let go on: somebody may wait
/// for work of theirs. They give up before that, unless a call of the driver keeps them from it.
const MOMENT: Duration = Duration::from_secs(4);
/// How long they are left alone then, at least, and how much longer by chance.
const PAUSE: Duration = Duration::from_millis(20);
const CHANCE: Duration = Duration::from_millis(60);

/// Suspends all of these at the same moment, or none of them: programs that work on something together wait for each other on their GPUs. They
/// have `patience` to come to rest all at once.
pub fn suspend_together(rows: &[Listed], target: &Target, patience: Duration) -> Vec<Told> {
    let milliseconds = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
    let request = Request::Suspend { target: target.clone(), patience: milliseconds, together: true };
    let sockets = match connect_all(rows, |_| &request) {
        Ok(sockets) => sockets,
        Err(why) => return told_none(rows, why.into()),
    };
    if let Err(why) = all_at_rest(rows, &sockets, Instant::now() + patience, &mut Nobody) {
        // The end of the connection lets them go on.
        return told_none(rows, why);
    }
    let progress = Progress::new(rows.len());
    let told = side_by_side(rows, |at, row| {
        let say = |done, total| progress.say(at, done, total);
        told_by(row, hear(row, &sockets[at], &request, TO_GO_ON, None, &say))
    });
    progress.end();
    told
}

/// A connection to each of these, or why there is none to one of them. One after the other, in the order of their numbers, whatever order they were named in: a process
/// is asked by one command at a time, so that two commands which got to the same processes in different orders would wait for each other.
fn connect_all<'a>(
    rows: &[Listed],
    request: impl Fn(usize) -> &'a Request,
) -> Result<Vec<Connected>, Vec<Option<String>>> {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by_key(|at| (rows[*at].told.process.identity.pid, rows[*at].told.process.identity.started));
    let mut connected: Vec<Option<Connected>> = rows.iter().map(|_| None).collect();
    for at in order {
        match connect(&rows[at], request(at), None) {
            Ok(socket) => connected[at] = Some(socket),
            Err(why) => return Err((0..rows.len()).map(|other| (other == at).then(|| why.clone())).collect()),
        }
    }
    Ok(connected.into_iter().flatten().collect())
}

/// Asks each of these something that all of them do at the same moment or none does, those of other hosts too, for which they have `patience` to come to rest
/// all at once: to write an image of themselves. What they have copied is of that moment, since none goes on before the last one has.
///
/// # Errors
/// None of them writes an image.
pub fn images_together(
    rows: &[Listed],
    requests: &[Request],
    patience: Duration,
    company: &mut dyn Company,
) -> Result<Vec<Result<Reply, String>>, NoImage> {
    let none = |refusal: Refusal| {
        let why = in_one(rows, &refusal.own).or_else(|| refusal.elsewhere.clone());
        let why = why.unwrap_or_else(|| "they did not all come to rest at the same moment".to_owned());
        NoImage { why, each: none_of(rows, refusal, "an image is of all of them or of none") }
    };
    let sockets = connect_all(rows, |at| &requests[at]).map_err(|why| none(why.into()))?;
    all_at_rest(rows, &sockets, Instant::now() + patience, company).map_err(none)?;
    let progress = Progress::new(rows.len());
    let heard = |at: usize, row: &Listed| {
        hear(row, &sockets[at], &requests[at], TO_GO_ON, None, &|done, total| progress.say(at, done, total))
    };
    let why = |answer: Result<Reply, String>| match answer {
        Ok(Reply::Quiet) => None,
        Ok(Reply::Refused { why }) | Err(why) => Some(why),
        Ok(_) => Some(OTHER_ANSWER.to_owned()),
    };
    let own: Vec<Option<String>> = side_by_side(rows, heard).into_iter().map(why).collect();
    let agreed = company.agree(Step::Copied, in_one(rows, &own));
    if let Some(why) = agreed.unwrap_or_else(Some) {
        progress.end();
        return Err(none(Refusal { elsewhere: own.iter().all(Option::is_none).then_some(why), own }));
    }
    // Who does not hear it has ended, which its answer says.
    let _ = side_by_side(rows, |at, _| say(&sockets[at], &Request::Go));
    let told = side_by_side(rows, heard);
    progress.end();
    Ok(told)
}

/// Has them stop at the same moment, again and again, and stay so once all have.
fn all_at_rest(
    rows: &[Listed],
    sockets: &[Connected],
    until: Instant,
    company: &mut dyn Company,
) -> Result<(), Refusal> {
    loop {
        if let Some(why) = company.agree(Step::Ready, None).map_err(elsewhere)? {
            return Err(elsewhere(why));
        }
        let why = match one_try(rows, sockets, until, company)? {
            None => return Ok(()),
            Some(why) => why,
        };
        if Instant::now() >= until {
            let own = why.own.into_iter();
            return Err(Refusal {
                own: own.map(|why| why.map(|why| format!("it did not come to rest in time: {why}"))).collect(),
                ..why
            });
        }
        // Whatever they do again and again, it is not always the same moment of it.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        std::thread::sleep(PAUSE + CHANCE.mul_f64(f64::from(now.subsec_micros() % 1000) / 1000.0));
    }
}

/// Has them stop at this moment. `None`: all have, and stay so; else what kept each one from it, for those that it did. Fails where one of them
/// never will.
fn one_try(
    rows: &[Listed],
    sockets: &[Connected],
    until: Instant,
    company: &mut dyn Company,
) -> Result<Option<Refusal>, Refusal> {
    let said = |request: &Request| -> Result<(), Vec<Option<String>>> {
        let say = |at: usize, row: &Listed| {
            let error = say(&sockets[at], request).err()?;
            // Who does not listen any more has said why.
            let mut said = (0..2).map(|_| next(row, &sockets[at], MOMENT));
            let said = said.find_map(|said| said.ok().and_then(Reply::refusal));
            let has_ended = || row.told.process.identity.life().is_over();
            Some(said.unwrap_or_else(|| if has_ended() { "it ended before it had answered".to_owned() } else { error }))
        };
        let failed = side_by_side(rows, say);
        if failed.iter().all(Option::is_none) { Ok(()) } else { Err(failed) }
    };
    said(&Request::Close)?;
    let answers = side_by_side(rows, |at, row| next(row, &sockets[at], MOMENT));
    let why = |answer: Result<Reply, String>| match answer {
        Ok(Reply::Busy { why } | Reply::Refused { why }) | Err(why) => Some(why),
        Ok(Reply::Quiet) => None,
        Ok(_) => Some("it answered nothing that was asked".to_owned()),
    };
    let own: Vec<Option<String>> = answers.iter().cloned().map(why).collect();
    let Some(others) = company.agree(Step::Rest, in_one(rows, &own)).map_err(elsewhere)? else {
        said(&Request::Go)?;
        return Ok(None);
    };
    // Who has refused listens no more, and the end of their connections lets the others go on.
    if answers.iter().any(|answer| matches!(answer, Ok(Reply::Refused { .. }))) {
        let refusal = |answer: Result<Reply, String>| answer.ok().and_then(Reply::refusal);
        return Err(answers.into_iter().map(refusal).collect::<Vec<_>>().into());
    }
    said(&Request::Open)?;
    // Who could not answer, since it waited for one that had stopped, can now.
    let answers = side_by_side(rows, |at, row| match &answers[at] {
        Err(_) => next(row, &sockets[at], until.saturating_duration_since(Instant::now()) + TO_GO_ON),
        answer => answer.clone(),
    });
    let has_failed = |answer: &Result<Reply, String>| !matches!(answer, Ok(Reply::Quiet | Reply::Busy { .. }));
    if answers.iter().any(has_failed) {
        let only = |answer| if has_failed(&answer) { why(answer) } else { None };
        return Err(answers.into_iter().map(only).collect::<Vec<_>>().into());
    }
    // All of them may have stopped, the last one too late.
    let elsewhere = own.iter().all(Option::is_none).then_some(others);
    Ok(Some(Refusal { own: answers.into_iter().map(why).collect(), elsewhere }))
}

fn told_none(rows: &[Listed], why: Refusal) -> Vec<Told> {
    let all = none_of(rows, why, "all are suspended together or none");
    rows.iter().zip(all).map(|(row, why)| told_by(row, Err(why))).collect()
}

/// What is told where these are the reasons of some why nothing was done with any; `rule` says why it is all or none.
fn none_of(rows: &[Listed], Refusal { mut own, elsewhere }: Refusal, rule: &str) -> Vec<String> {
    own.resize(rows.len(), None);
    let others: Vec<String> = rows
        .iter()
        .zip(&own)
        .filter(|(_, why)| why.is_some())
        .map(|(row, _)| row.told.process.identity.pid.to_string())
        .collect();
    let because = match (others.as_slice(), elsewhere) {
        ([], None) => "it is left as it was, since they did not all come to rest at the same moment".to_owned(),
        ([], Some(why)) => format!("it is left as it was, since {rule}: {why}"),
        (others, _) => format!("it is left as it was, since {rule}, and process {} was not ready", others.join(", ")),
    };
    own.into_iter().map(|why| why.unwrap_or_else(|| because.clone())).collect()
}
