//! What others say in the environment that a process may use of a GPU's memory: NVIDIA's MPS and HAMi. Each is an upper bound, as `GPUPOOL_LIMIT` is.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};

/// `0=1G,1=512MB`, by the program's own numbering.
const MPS: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
/// `4g` or `4096m` for each GPU, or with `_0` behind the name for one.
const HAMI: &str = "CUDA_DEVICE_MEMORY_LIMIT";

/// The limits that one of these sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outside {
    /// The variable's name, without the number of a GPU.
    pub variable: &'static str,
    /// Bytes of each GPU that is not named.
    every: Option<u64>,
    /// Bytes of those that are.
    named: BTreeMap<u32, u64>,
}

impl Outside {
    /// Whether this is the name of such a variable.
    pub(crate) fn is_variable(name: &OsStr) -> bool {
        name.to_str().is_some_and(|name| name == MPS || name.starts_with(HAMI))
    }

    /// Reads what such variables among `vars` say. What none of them means is passed over: these are others' settings.
    pub fn read(vars: impl Iterator<Item = (OsString, OsString)>) -> Vec<Self> {
        let (mut mps, mut every, mut named) = (BTreeMap::new(), None, BTreeMap::new());
        for (name, value) in vars {
            let (name, value) = (name.to_string_lossy(), value.to_string_lossy());
            if name == MPS {
                for (gpu, bytes) in value.split(',').filter_map(of_one) {
                    let bound: &mut u64 = mps.entry(gpu).or_insert(bytes);
                    *bound = bytes.min(*bound);
                }
            } else if name == HAMI {
                every = size(&value);
            } else if let Some(gpu) = name.strip_prefix(HAMI).and_then(|rest| rest.strip_prefix('_')?.parse().ok())
                && let Some(bytes) = size(&value)
            {
                named.insert(gpu, bytes);
            }
        }
        let mps = Self { variable: MPS, every: None, named: mps };
        let hami = Self { variable: HAMI, every, named };
        [mps, hami].into_iter().filter(|one| one.every.is_some() || !one.named.is_empty()).collect()
    }

    /// What such variables among `vars` say that means nothing here, as `NAME=VALUE`; where they say nothing, or 0, there is no limit.
    pub fn unread(vars: impl Iterator<Item = (OsString, OsString)>) -> Vec<String> {
        let means_nothing = |name: &str, value: &str| {
            let says_none = |text: &str| matches!(text.trim(), "" | "0");
            if name == MPS {
                let limits =
                    |item: &str| item.split_once('=').is_some_and(|(gpu, _)| gpu.trim().parse::<u32>().is_ok());
                let is_read = |item| of_one(item).is_some() || limits(item) && item.ends_with("=0");
                return !value.trim().is_empty() && !value.split(',').all(is_read);
            }
            let gpu = name.strip_prefix(HAMI).and_then(|rest| rest.strip_prefix('_'));
            let is_one = name == HAMI || gpu.is_some_and(|gpu| gpu.parse::<u32>().is_ok());
            is_one && !says_none(value) && size(value).is_none()
        };
        let vars =
            vars.map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
        vars.filter(|(name, value)| means_nothing(name, value)).map(|(name, value)| format!("{name}={value}")).collect()
    }

    /// What is said of this GPU, in bytes.
    pub fn of(&self, gpu: u32) -> Option<u64> {
        self.named.get(&gpu).copied().or(self.every)
    }
}

fn of_one(item: &str) -> Option<(u32, u64)> {
    let (gpu, bytes) = item.split_once('=')?;
    Some((gpu.trim().parse().ok()?, size(bytes)?))
}

/// Units are powers of 1024 there, also `MB`; 0 is no limit.
fn size(text: &str) -> Option<u64> {
    let text = text.trim().to_ascii_lowercase();
    let digits = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = match unit.trim() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << unit).filter(|bytes| *bytes > 0)
}

/// An upper bound of what a process may use of one GPU, and who sets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    pub bytes: u64,
    /// A variable or a file.
    pub source: String,
}

/// The smallest of what the environment says of a GPU and of `others`.
pub fn tightest(all: &[Outside], gpu: u32, others: impl IntoIterator<Item = Budget>) -> Option<Budget> {
    let said = all.iter().filter_map(|one| Some(Budget { bytes: one.of(gpu)?, source: one.variable.to_owned() }));
    said.chain(others).min_by_key(|budget| budget.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn of(vars: &[(&str, &str)], gpu: u32) -> Option<(u64, String)> {
        let vars = vars.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
        tightest(&Outside::read(vars), gpu, []).map(|budget| (budget.bytes, budget.source))
    }

    #[test]
    fn the_smallest_of_what_others_say_binds() {
        let vars = [(MPS, "0=1G,1=512MB"), (HAMI, "4g"), ("CUDA_DEVICE_MEMORY_LIMIT_0", "768m")];
        assert_eq!(of(&vars, 0), Some((768 * MIB, HAMI.to_owned())));
        assert_eq!(of(&vars, 1), Some((512 * MIB, MPS.to_owned())));
        assert_eq!(of(&vars, 2), Some((4096 * MIB, HAMI.to_owned())));
        assert_eq!(of(&vars[..1], 2), None);
        let file = Budget { bytes: MIB, source: "/sys/fs/cgroup/dmem.max".to_owned() };
        assert_eq!(tightest(&[], 0, [file.clone()]), Some(file));
    }

    #[test]
    fn of_two_limits_of_one_gpu_the_smaller_binds() {
        assert_eq!(of(&[(MPS, "0=1G,0=2G")], 0), Some((1024 * MIB, MPS.to_owned())));
        assert_eq!(of(&[(MPS, "0=2G,0=1G")], 0), Some((1024 * MIB, MPS.to_owned())));
    }

    #[test]
    fn what_cannot_be_read_is_told() {
        let unread = |name: &str, value: &str| {
            !Outside::unread([(OsString::from(name), OsString::from(value))].into_iter()).is_empty()
        };
        for value in ["x", "0=", "0=1.5G", "0:1G", "default=1G", "0=-1", "0=1G,1"] {
            assert!(unread(MPS, value), "{value}");
        }
        for value in ["", "0=1G", "0=0", "0=1G,1=512MB"] {
            assert!(!unread(MPS, value), "{value}");
        }
        assert!(unread(HAMI, "1.5g") && unread("CUDA_DEVICE_MEMORY_LIMIT_0", "-1"));
        assert!(!unread(HAMI, "0") && !unread(HAMI, "4g") && !unread("CUDA_DEVICE_MEMORY_LIMIT_SHARED", "x"));
    }

    #[test]
    fn what_means_nothing_limits_nothing() {
        for vars in [
            [(MPS, ""), (HAMI, "")],
            [(MPS, "all=1G"), (HAMI, "0")],
            [(MPS, "0:1G"), (HAMI, "4x")],
            [(MPS, "0=99999999999999999G"), ("CUDA_DEVICE_MEMORY_LIMIT_x", "1g")],
        ] {
            assert_eq!(of(&vars, 0), None, "{vars:?}");
        }
    }
}
