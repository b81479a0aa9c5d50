//! Settings that are understood and change nothing, because of what others say.

use crate::choice::{Contexts, Mode, Move, Pinned, Prefetch, Switch, Toggle};
use crate::problem::Problem;
use crate::settings::{Limits, Settings};
use crate::size::format_size;

/// When a setting has no effect. A setting may have several rules; the first that holds is told.
struct Rule {
    name: &'static str,
    /// Whether it says something that would be done otherwise: to be off says the same everywhere.
    says: fn(&Settings) -> bool,
    /// What keeps it from that.
    why: fn(&Settings) -> Option<String>,
}

const MOVES: &str = "what moves is the pool's memory";
const GIVES_WAY: &str = "what gives way is the pool's memory";
const IS_FOUND: &str = "programs find each other by the pages that this turns off";

const RULES: &[Rule] = &[
    Rule {
        name: "GPUPOOL_CONTEXT_DEVICES",
        says: |_| true,
        why: |settings| {
            (settings.contexts != Contexts::Deny).then(|| "says nothing without GPUPOOL_CONTEXTS=deny".to_owned())
        },
    },
    Rule {
        name: "GPUPOOL_MOVE",
        says: |settings| settings.moving != Move::Off,
        why: |settings| {
            let managed = "; managed memory stays where it was placed, since the driver brings it nowhere without a context there";
            let more = if settings.mode == Mode::Managed { managed } else { "" };
            unless_pooled(settings, MOVES).map(|why| format!("{why}{more}"))
        },
    },
    Rule {
        name: "GPUPOOL_MOVE_SHARE",
        says: |_| true,
        why: |settings| {
            let is_off = || {
                (settings.moving == Move::Off)
                    .then(|| "says nothing without GPUPOOL_MOVE=auto: nothing moves".to_owned())
            };
            unless_pooled(settings, MOVES).or_else(is_off)
        },
    },
    Rule {
        name: "GPUPOOL_FAR_LIMIT",
        says: |settings| settings.far_limit.is_some(),
        why: |settings| unless_pooled(settings, "what is reckoned with is the pool's memory"),
    },
    Rule {
        name: "GPUPOOL_IDLE_SUSPEND",
        says: |settings| settings.idle_suspend.is_some(),
        why: |settings| unless_pooled(settings, "what leaves its GPUs is the pool's memory"),
    },
    Rule {
        name: "GPUPOOL_RESTORE",
        says: |_| true,
        why: |settings| unless_pooled(settings, "what comes back is the pool's memory"),
    },
    Rule { name: "GPUPOOL_RESTORE_GENERATION", says: |_| true, why: unless_restored },
    Rule {
        name: "GPUPOOL_RESTORE_BY_ORDER",
        says: |settings| settings.restore_by_order == Toggle::On,
        why: unless_restored,
    },
    Rule {
        name: "GPUPOOL_PRIORITY",
        says: |_| true,
        why: |settings| unless_pooled(settings, GIVES_WAY).or_else(|| unless_found(settings)),
    },
    Rule {
        name: "GPUPOOL_GUARANTEE",
        says: |settings| settings.guarantee.is_set(),
        why: |settings| {
            unless_pooled(settings, GIVES_WAY).or_else(|| unless_found(settings)).or_else(|| beyond_the_limit(settings))
        },
    },
    Rule {
        name: "GPUPOOL_RECALL_WAIT",
        // To be off keeps GPUs from being lent as well.
        says: |settings| settings.recall_wait.is_some(),
        why: |settings| unless_pooled(settings, GIVES_WAY).or_else(|| unless_found(settings)),
    },
    Rule { name: "GPUPOOL_PINNED_LIMIT", says: |settings| settings.pinned_limit != Some(0), why: unless_pinned },
    Rule { name: "GPUPOOL_PINNED_IDLE", says: |_| true, why: unless_pinned },
    Rule {
        name: "GPUPOOL_PREFETCH",
        says: |settings| settings.prefetch != Prefetch::default(),
        why: |settings| {
            let is_managed = settings.mode == Mode::Managed || settings.managed_advice == Toggle::On;
            (!is_managed).then(|| {
                let mode = settings.mode.word();
                format!("says nothing with GPUPOOL_MODE={mode}: what is prefetched is memory of GPUPOOL_MODE=managed, and the program's own with GPUPOOL_MANAGED_ADVICE=on")
            })
        },
    },
    Rule {
        name: "GPUPOOL_SUMMARY",
        says: |settings| settings.summary == Switch::On,
        why: |settings| when_off(settings, "there is no summary"),
    },
    Rule { name: "GPUPOOL_LOG_FILE", says: |_| true, why: |settings| when_off(settings, "no log is written") },
];

fn unless_pooled(settings: &Settings, what: &str) -> Option<String> {
    let mode = settings.mode;
    let is_pooled = matches!(mode, Mode::Pool | Mode::Spill);
    (!is_pooled).then(|| format!("says nothing with GPUPOOL_MODE={}: {what}, in the modes pool and spill", mode.word()))
}

fn unless_found(settings: &Settings) -> Option<String> {
    (settings.metrics == Toggle::Off).then(|| format!("says nothing with GPUPOOL_METRICS=off: {IS_FOUND}"))
}

fn unless_restored(settings: &Settings) -> Option<String> {
    let is_none = settings.restore.is_none();
    is_none.then(|| "says nothing without GPUPOOL_RESTORE=FOLDER, which names the images".to_owned())
}

fn unless_pinned(settings: &Settings) -> Option<String> {
    (settings.pinned == Pinned::Off)
        .then(|| "says nothing with GPUPOOL_PINNED=off: the driver serves pinned memory".to_owned())
}

fn when_off(settings: &Settings, what: &str) -> Option<String> {
    (settings.mode == Mode::Off)
        .then(|| format!("says nothing with GPUPOOL_MODE=off: gpupool has no part in the program, and {what}"))
}

/// What is guaranteed of a GPU beyond what the pool may take of it, nobody keeps: it never has so much there.
fn beyond_the_limit(settings: &Settings) -> Option<String> {
    let gpus: Vec<Option<u32>> = match (&settings.guarantee, &settings.limit) {
        (Limits::PerGpu(of), _) | (_, Limits::PerGpu(of)) => of.keys().map(|gpu| Some(*gpu)).collect(),
        _ => vec![None],
    };
    gpus.into_iter().find_map(|gpu| {
        // One size for every GPU is that of any.
        let of = |limits: &Limits| limits.of(gpu.unwrap_or(0));
        let (guaranteed, limit) = (of(&settings.guarantee)?, of(&settings.limit)?);
        let each = gpu.map_or_else(|| "each GPU".to_owned(), |gpu| format!("GPU {gpu}"));
        (guaranteed > limit).then(|| {
            let limit = format_size(limit);
            format!("more than GPUPOOL_LIMIT lets the pool take of {each}, which is {limit}: no more than that is guaranteed")
        })
    })
}

impl Settings {
    /// Settings that somebody gave and that change nothing, of which a program should not fail.
    pub fn without_effect(&self) -> Vec<Problem> {
        // Where the driver alone serves all, nothing else is to be said of each.
        let told =
            |rule: &&Rule| self.mode != Mode::Off || ["GPUPOOL_SUMMARY", "GPUPOOL_LOG_FILE"].contains(&rule.name);
        let problem = |rule: &Rule| {
            let value = self.said.get(rule.name)?.clone();
            let reason = Some(rule).filter(|rule| (rule.says)(self)).and_then(|rule| (rule.why)(self))?;
            Some(Problem { name: rule.name.to_owned(), value, reason })
        };
        RULES.iter().filter(told).filter_map(problem).collect()
    }

    /// Why this setting would have no effect whatever it says, beside what the others say; nothing where it has one.
    pub fn why_without_effect(&self, name: &str) -> Option<String> {
        RULES.iter().filter(|rule| rule.name == name).find_map(|rule| (rule.why)(self))
    }
}
