//! `gpupool drain` and `gpupool undrain`: everybody's memory leaves a GPU, none goes there, and it may come back.
//!
//! That a GPU is drained is said by files (`gpupool_metrics::drains`), which hold also for processes that start later or that cannot be asked
//! now. Then each process is asked what has become of it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use gpupool_config::{format_size, parse_duration};
use gpupool_machine::{Nvml, Uuid, dashed, from_text};
use gpupool_metrics::drains::Said;
use gpupool_metrics::folder::Roots;
use gpupool_metrics::{Context, Life, drains};
use gpupool_wire::control::{Reply, Request, Stayed};
use rustix::process::geteuid;
use serde::Serialize;

use crate::control::{self, NoAnswer, OTHER_ANSWER};
use crate::failure::{Failure, complain};
use crate::lenders::{is_helper_called, name_of};
use crate::pages::{Listed, Numbers, Pages, Skipped};
use crate::stdout;
use crate::terminal;
use crate::words::UNSEEN;

/// Have the memory of all programs leave a GPU, and none go there
#[derive(clap::Args)]
#[command(
    after_help = "Of all programs of this user that run under gpupool; for root, of all users. Memory goes to other GPUs of each \
program's pool, then to the host; programs go on with the same bytes, and those that start later heed it, too. \
What cannot leave is listed: contexts of programs that compute there, memory that others know by its pages.

Exit status: 0 where nothing is left on the GPU; 1 where something is, or a program could not be asked: the GPU is drained all the same; 1 also where nobody can be told, for want of a folder (gpupool doctor): \
nothing is drained then; 2 where there is no such GPU.

Examples:
  gpupool drain 2
  gpupool drain --deadline 5min GPU-5f3a1c9e-0d6b-4a7e-9c41-2b8d7e6f1a05
  gpupool drain --json 2 | jq '.[].stayed'"
)]
pub struct Args {
    /// Its number as nvidia-smi -L lists it, or its UUID
    gpu: String,
    /// How long the programs have for it
    #[arg(long, value_parser = time, default_value = "60s", value_name = "TIME")]
    deadline: Duration,
    /// One JSON array
    #[arg(long)]
    json: bool,
}

/// Let programs have memory on a drained GPU again; what left it comes back where there is room
#[derive(clap::Args)]
#[command(
    after_help = "What has not come back is listed with the reason. It stays where it is, programs go on with it there, and the GPU is drained no more \
all the same.

Exit status: 0 where the GPU is drained no more, also where memory has not come back; 1 where root drains it still, nobody can be told for want of a folder, or a program could not be asked; 2 where \
there is no such GPU.

Examples:
  gpupool undrain 2
  gpupool undrain --deadline 5s GPU-5f3a1c9e-0d6b-4a7e-9c41-2b8d7e6f1a05"
)]
pub struct UndrainArgs {
    /// Its number as nvidia-smi -L lists it, or its UUID
    gpu: String,
    /// How long the GPUs of each program have to come to rest for that
    #[arg(long, value_parser = time, default_value = "60s", value_name = "TIME")]
    deadline: Duration,
    /// One JSON array
    #[arg(long)]
    json: bool,
}

fn time(text: &str) -> Result<Duration, String> {
    parse_duration(text).map_err(|error| error.to_string())
}

/// How much longer than the deadline an answer may take: a batch that was begun before it is ended.
const GRACE: Duration = Duration::from_secs(3);
/// How long those who are asked behind others have in any case.
const LEAST: Duration = Duration::from_secs(1);

/// What became of one process.
#[derive(Serialize)]
struct Told {
    pid: u32,
    name: String,
    /// What the program calls this GPU (`gpu0`), where that is another number than the machine's.
    #[serde(skip_serializing_if = "Option::is_none")]
    calls_it: Option<String>,
    /// Why it is not known what it has there.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Bytes that left, or came back.
    bytes: u64,
    microseconds: u64,
    stayed: Vec<Left>,
}

/// What is still there.
#[derive(Serialize)]
struct Left {
    /// 0 where that is not known.
    bytes: u64,
    what: String,
}

/// Drains it, and says what left and what did not.
///
/// # Errors
/// There is no such GPU, nobody can be told, or nothing can be printed.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let gpu = find(&args.gpu)?;
    match is_there(&gpu, &args.gpu) {
        There::Yes => {}
        There::No(why) => return Err(Failure::usage(why)),
        There::Unknown(why) => complain(&format!("whether this machine has such a GPU is not known: {why}")),
    }
    let Said { folders, .. } = say(&gpu, true)?;
    let (mut told, skipped) = ask(&gpu, &folders, false, args.deadline);
    told.extend(strangers(&gpu, &told));
    print(&told, args.json, "moved away", "did not leave")?;
    let is_empty = told.iter().all(|told| told.error.is_none() && told.stayed.is_empty()) && !skipped;
    if !args.json {
        let end = match (is_empty, told.len()) {
            (true, 0) => format!("no program uses it that is seen to run under gpupool (with {UNSEEN} none is)"),
            (true, _) => "nothing is left there".to_owned(),
            (false, _) => "not all has left".to_owned(),
        };
        stdout::print(&format!("GPU-{} is drained: {end}; {}\n", dashed(&gpu), what_ends_it(&gpu, &args.gpu)))?;
    }
    Ok(if is_empty { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Ends that, and says what came back.
///
/// # Errors
/// There is no such GPU, it cannot be unsaid, or nothing can be printed.
pub fn run_undrain(args: &UndrainArgs) -> Result<ExitCode, Failure> {
    let gpu = find(&args.gpu)?;
    let Said { folders, is_news, .. } = say(&gpu, false)?;
    // One that was drained may have been taken out of the machine since.
    if !is_news && let There::No(why) = is_there(&gpu, &args.gpu) {
        return Err(Failure::usage(why));
    }
    if let Some(path) = drains::still_said(&gpu, &Roots::new(std::env::var_os("XDG_RUNTIME_DIR"))) {
        let (path, command) = (path.display(), format!("gpupool undrain {}", args.gpu));
        return Err(Failure::broken(format!(
            "the GPU is drained by root for the whole machine ({path}); {command} by root ends that"
        )));
    }
    let (told, _) = ask(&gpu, &folders, true, args.deadline);
    print(&told, args.json, "came back", "did not come back")?;
    if !args.json {
        let what = if is_news { "is drained no more" } else { "was not drained" };
        stdout::print(&format!("GPU-{} {what}\n", dashed(&gpu)))?;
    }
    Ok(if told.iter().all(|told| told.error.is_none()) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

const EXAMPLE: &str = "GPU-5f3a1c9e-0d6b-4a7e-9c41-2b8d7e6f1a05";

fn find(text: &str) -> Result<Uuid, Failure> {
    let Ok(number) = text.trim().parse::<u32>() else {
        return from_text(text).ok_or_else(|| {
            let is_a_programs = text.strip_prefix("gpu").is_some_and(|rest| rest.parse::<u32>().is_ok());
            let more = if is_a_programs { " (gpu0 and so on, as gpupool ps has them, are a program's own numbers)" } else { "" };
            Failure::usage(format!(
                "{text:?} is neither the number of a GPU nor a UUID{more}; nvidia-smi -L lists both, write for example 2 or \
                 {EXAMPLE}"
            ))
        });
    };
    let nvml = Nvml::get().map_err(|why| {
        Failure::usage(format!(
            "GPU {number} cannot be found by its number, which is NVML's to know: {why}; give its UUID instead, for example {EXAMPLE}"
        ))
    })?;
    nvml.uuid_of(number)
        .ok_or_else(|| Failure::usage(format!("there is no GPU {number} on this machine; nvidia-smi -L lists them")))
}

/// Whether this machine has a GPU.
enum There {
    Yes,
    /// What there is instead.
    No(String),
    /// Why nobody tells.
    Unknown(String),
}

/// As NVML says it, or the page of a program that runs: in a container NVML may be without those of other containers. `text`: what was given for it; who has a number has
/// it of NVML.
fn is_there(gpu: &Uuid, text: &str) -> There {
    if text.trim().parse::<u32>().is_ok() {
        return There::Yes;
    }
    let nvml = match Nvml::get() {
        Ok(nvml) => nvml,
        Err(why) => return There::Unknown(format!("only NVML tells that, and {why}")),
    };
    match nvml.has(gpu) {
        Some(true) => return There::Yes,
        None => return There::Unknown("NVML does not tell".to_owned()),
        Some(false) => {}
    }
    let is_seen = |row: &Listed| row.told.levels.gpus.rows.iter().any(|known| known.uuid == *gpu);
    if Pages::new().look().rows.iter().any(is_seen) {
        return There::Yes;
    }
    let one = |number: u32| Some(format!("{number} is GPU-{}", dashed(&nvml.uuid_of(number)?)));
    let all: Vec<String> = (0..).map_while(one).collect();
    let all = if all.is_empty() { "there is none at all".to_owned() } else { all.join(", ") };
    There::No(format!("there is no GPU-{} on this machine: {all}", dashed(gpu)))
}

/// The GPUs of this machine that are drained, by number and UUID, whether or not any program runs: nothing else would tell whoever forgot to end it. None where NVML
/// tells no numbers.
pub fn drained() -> Vec<(u32, Uuid)> {
    let roots = Roots::new(std::env::var_os("XDG_RUNTIME_DIR"));
    // NVML wakes every GPU that sleeps, which takes seconds where nothing keeps them awake; mostly none is drained.
    let Some(nvml) = drains::any(&roots).then(Nvml::get).and_then(Result::ok) else { return Vec::new() };
    let gpus: Vec<(u32, Uuid)> = (0..).map_while(|number| Some((number, nvml.uuid_of(number)?))).collect();
    let uuids: Vec<Uuid> = gpus.iter().map(|(_, uuid)| *uuid).collect();
    let drained = drains::among(&uuids, &roots, None);
    gpus.into_iter().filter(|(_, uuid)| drained.contains(uuid)).collect()
}

/// What ends that: of a GPU that root has drained for the whole machine, only root can. `number`: as the command takes it.
pub fn what_ends_it(gpu: &Uuid, number: &str) -> String {
    let roots = Roots::new(std::env::var_os("XDG_RUNTIME_DIR"));
    let command = format!("gpupool undrain {number}");
    match drains::still_said(gpu, &roots) {
        Some(_) if !geteuid().is_root() => {
            format!("root has drained it for the whole machine, and {command} by root ends that")
        }
        _ => format!("{command} ends that"),
    }
}

/// Writes or removes the files, for all whom that concerns.
fn say(gpu: &Uuid, drained: bool) -> Result<Said, Failure> {
    let roots = Roots::new(std::env::var_os("XDG_RUNTIME_DIR"));
    let said = drains::say(gpu, drained, &roots);
    if said.refused.is_empty() {
        return Ok(said);
    }
    let what = if drained { "it cannot be said to programs that" } else { "programs may still be told that" };
    let all: Vec<String> = said.refused.iter().map(|refused| format!("{what} the GPU is drained: {refused}")).collect();
    Err(Failure::broken(all.join("\n")))
}

/// What each process says that sees this GPU; and whether there are any that nobody could ask.
fn ask(gpu: &Uuid, folders: &[PathBuf], is_undrain: bool, deadline: Duration) -> (Vec<Told>, bool) {
    let mut pages = Pages::new();
    let look = pages.look();
    let mut numbers = Numbers::default();
    numbers.learn(&look.rows);
    let is_here =
        |skipped: &&Skipped| folders.iter().any(|folder| skipped.why.starts_with(&format!("{}/", folder.display())));
    let others: Vec<_> = look.skipped.iter().filter(|skipped| skipped.reason == "version").filter(is_here).collect();
    // What was not done, and what becomes of it without this command: the files tell a program, too.
    let in_time = if is_undrain {
        "what left the GPU has not come back, and does once it goes on, as the GPU is drained no more"
    } else {
        "what it has on the GPU is there still, and leaves once it goes on, as the GPU is drained"
    };
    let all = if is_undrain {
        "what left the GPU may not have come back"
    } else {
        "what it has on the GPU may be there still"
    };
    others.iter().for_each(|skipped| {
        let pid = skipped.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string());
        complain(&format!("process {pid} was not asked, and {all}: {}", skipped.why));
    });
    // A program's first page tells of no GPU yet, and it may have had memory since.
    let sees = |row: &&Listed| {
        let is_concerned = row.page.parent().is_some_and(|folder| folders.iter().any(|known| known == folder));
        let gpus = &row.told.levels.gpus;
        is_concerned && (gpus.more > 0 || gpus.rows.is_empty() || gpus.rows.iter().any(|known| known.uuid == *gpu))
    };
    let (asked, not): (Vec<Listed>, Vec<Listed>) =
        look.rows.iter().filter(sees).cloned().partition(|row| row.state == Life::Running);
    // Who works there is asked first: a loan that came back before would take the room of what that one has there for itself.
    let works = |row: &Listed| {
        let is_on = |context: &Context| row.told.levels.gpu(context.device).is_some_and(|known| known.uuid == *gpu);
        is_undrain && row.told.contexts.rows.iter().any(is_on)
    };
    let (first, then): (Vec<Listed>, Vec<Listed>) = asked.into_iter().partition(works);
    let begun = Instant::now();
    let replies_of = |rows: &[Listed]| {
        let left = deadline.saturating_sub(begun.elapsed()).max(LEAST);
        let (gpu, patience) = (*gpu, u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
        let request = if is_undrain { Request::Undrain { gpu, patience } } else { Request::Drain { gpu, patience } };
        control::replies(rows, &request, Instant::now().checked_add(left + GRACE))
    };
    let mut replies = replies_of(&first);
    replies.extend(replies_of(&then));
    let asked = [first, then].concat();
    let number = numbers.of(gpu);
    let calls_it_of = |row: &Listed| {
        let own = row.told.levels.gpus.rows.iter().find(|known| known.uuid == *gpu).map(|known| known.ordinal);
        own.filter(|own| number != Some(*own)).map(|own| format!("gpu{own}"))
    };
    let told_of = |row: &Listed| (row.told.process.identity.pid, row.told.process.name.clone());
    let mut told: Vec<Told> = asked
        .iter()
        .zip(replies)
        .map(|(row, reply)| {
            let (pid, name) = told_of(row);
            let calls_it = calls_it_of(row);
            let failed = |why| Told {
                pid,
                name: name.clone(),
                calls_it: calls_it.clone(),
                error: Some(why),
                bytes: 0,
                microseconds: 0,
                stayed: Vec::new(),
            };
            match reply {
                Ok(Reply::Left { moved, microseconds, stayed }) => {
                    let stayed = stayed.into_iter().map(|Stayed { bytes, what }| Left { bytes, what }).collect();
                    Told { pid, name, calls_it, error: None, bytes: moved, microseconds, stayed }
                }
                Ok(Reply::Refused { why }) => failed(why),
                Ok(_) => failed(OTHER_ANSWER.to_owned()),
                Err(NoAnswer { why, .. }) if row.told.process.identity.life().is_over() => failed(why),
                Err(NoAnswer { why, was_asked: false }) => failed(format!("{in_time}: {why}")),
                Err(NoAnswer { why, was_asked: true }) => failed(format!("{all}: {why}")),
            }
        })
        .collect();
    told.extend(not.iter().map(|row| {
        let (pid, name) = told_of(row);
        let why = match row.state {
            Life::Stopped => {
                format!("{in_time}: it is stopped (SIGSTOP) and answers nobody; kill -CONT {pid} lets it go on")
            }
            Life::Frozen => format!(
                "{in_time}: its control group is frozen, as of a container that is paused; docker unpause or systemctl thaw lets it go on"
            ),
            Life::Elsewhere => {
                format!("{all}: it is in another PID namespace (a container), and only a command there can ask it")
            }
            _ => format!("{all}: the system does not let this user look at it; ask as its user or as root"),
        };
        Told { pid, name, calls_it: calls_it_of(row), error: Some(why), bytes: 0, microseconds: 0, stayed: Vec::new() }
    }));
    (told, !others.is_empty())
}

/// Processes with a context on the GPU that nobody asked, where NVML tells of them.
fn strangers(gpu: &Uuid, told: &[Told]) -> Vec<Told> {
    let all = Nvml::get().ok().and_then(|nvml| nvml.processes(gpu)).unwrap_or_default();
    let unknown = all.into_iter().filter(|(pid, _)| told.iter().all(|told| told.pid != *pid));
    let stranger = |(pid, bytes): (u32, Option<u64>)| {
        let name = name_of(pid);
        let what = if is_helper_called(&name) {
            "it is the helper of gpupool that keeps this GPU awake (GPUPOOL_LENDERS=awake): its context goes some ten seconds after the last memory has left the GPU".to_owned()
        } else {
            format!(
                "it has a context there, and does not run under gpupool, or with {UNSEEN}, or is none of this user's"
            )
        };
        let stayed = vec![Left { bytes: bytes.unwrap_or(0), what }];
        Told { pid, name, calls_it: None, error: None, bytes: 0, microseconds: 0, stayed }
    };
    unknown.map(stranger).collect()
}

fn print(all: &[Told], json: bool, did: &str, did_not: &str) -> Result<(), Failure> {
    if json {
        let text = serde_json::to_string_pretty(all).map_err(|error| Failure::broken(error.to_string()))?;
        stdout::print(&format!("{}\n", terminal::clean_json(&text)))?;
    }
    for Told { pid, name, calls_it, error, bytes, microseconds, stayed } in all {
        let name =
            calls_it.as_ref().map_or_else(|| format!("({name})"), |own| format!("({name}, which calls it {own})"));
        if let Some(error) = error {
            complain(&format!("process {pid} {name}: {error}"));
            continue;
        }
        // Of one that had nothing there is nothing to tell.
        if json || *bytes == 0 && stayed.is_empty() {
            continue;
        }
        let seconds = *microseconds as f64 * 1e-6;
        let mut lines = vec![format!("process {pid} {name}: {} {did} in {seconds:.2} s", format_size(*bytes))];
        lines.extend(stayed.iter().map(|Left { bytes, what }| {
            let size = if *bytes > 0 { format!("{}: ", format_size(*bytes)) } else { String::new() };
            format!("  {did_not}: {size}{what}")
        }));
        let lines: String = lines.iter().map(|line| format!("{}\n", terminal::clean(line))).collect();
        stdout::print(&lines)?;
    }
    Ok(())
}
