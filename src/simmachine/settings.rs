//! The machine to simulate, read from the environment once, in `cuInit`.

use crate::links::Links;
use crate::occupancy::{GRANULE, MAX_PLACE_BYTES, gpu_place, host_place};
use gpupool_config::parse_size;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub struct Settings {
    /// Bytes of every GPU of the machine, by physical index (`SIMCUDA_GPUS`).
    pub gpus: Vec<u64>,
    /// Physical index of each visible GPU, by ordinal (`CUDA_VISIBLE_DEVICES`).
    pub visible: Vec<usize>,
    /// How the GPUs reach each other, by physical index (`SIMCUDA_LINK`).
    pub links: Links,
    /// Bytes of host memory the driver may pin; `None` where the container forbids it (`SIMCUDA_HOST`).
    pub host: Option<u64>,
    pub host_nodes: u32,
    /// Whether pinned memory takes its pages when it is allocated and not when it is touched (`SIMCUDA_PINNED`).
    pub pinned_resident: bool,
    /// Bytes a context takes from its GPU (`SIMCUDA_CONTEXT_MIB`).
    pub context_bytes: u64,
    /// What `cuInit` takes from a GPU, by physical index, long before there is a context (`SIMCUDA_INIT_MIB`).
    pub init_bytes: Vec<(usize, u64)>,
    /// Milliseconds that NVML's list of processes takes at most while another process begins (`SIMCUDA_LIST_MS`).
    pub list_ms: u64,
    /// Bytes that a GPU takes for each 2 MiB mapped for it (`SIMCUDA_PAGE_TABLES`).
    pub page_tables: u64,
    /// The CUDA version answered, 1000 × major + 10 × minor (`SIMCUDA_DRIVER`).
    pub driver: i32,
    pub vmm: bool,
    /// Whether network cards can reach memory of the GPUs (`SIMCUDA_RDMA`).
    pub rdma: bool,
    /// Whether GPUs fault, so that managed memory can move while it is used (`SIMCUDA_CONCURRENT_MANAGED`).
    pub concurrent_managed: bool,
    /// Whether atomics of the GPUs on memory of the host are done there, whoever else works on it (`SIMCUDA_HOST_ATOMICS`).
    pub host_atomics: bool,
    /// Whether an MPS server shares the GPUs' contexts among processes, for the driver to tell (`SIMCUDA_MPS`).
    pub mps: bool,
    /// Whether confidential computing is on, for NVML to tell (`SIMCUDA_CONFIDENTIAL`).
    pub confidential: bool,
    pub faults: String,
    pub report: Option<String>,
    /// Whether memory that is taken from under unfinished work is looked for, and released memory poisoned
    /// (`SIMCUDA_STRICT`).
    pub strict: bool,
    /// Where violations are appended as they happen (`SIMCUDA_VIOLATIONS`).
    pub violations: Option<String>,
    /// The file that all processes of one machine name (`SIMCUDA_MACHINE`).
    pub machine: Option<PathBuf>,
    /// What happened to the GPUs, for NVML to tell (`SIMCUDA_EVENTS`).
    pub events: Option<PathBuf>,
    /// The number of the NVLink domain that the GPUs are in, and their clique, for NVML to tell (`SIMCUDA_FABRIC`).
    pub fabric: Option<([u8; 16], u32)>,
    /// What a control group may have of a GPU, for NVML to tell (`SIMCUDA_MEMORY_LIMITS`).
    pub memory_limits: Vec<MemoryLimit>,
}

/// What NVML says that a control group may have of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    pub gpu: usize,
    /// The folder of the group, as whoever asks names it.
    pub group: String,
    /// Bytes.
    pub soft: u64,
    pub hard: u64,
}

const LEAST_GPU: u64 = 64 << 20;
const MOST_GPUS: usize = 32;

impl Settings {
    /// Reads the environment through `get`. The error is one line for a person: variable, value, what is allowed.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let named = |name: &'static str, default: &str| (name, get(name).unwrap_or_else(|| default.to_owned()));
        let (variable, link) = named("SIMCUDA_LINK", "nvlink");
        let matrix = Links::from_file(&link)?;
        // A matrix says how many GPUs there are.
        let default = matrix.as_ref().map_or_else(|| "2x16GiB".to_owned(), |links| format!("{}x16GiB", links.len()));
        let gpus = understood(named("SIMCUDA_GPUS", &default), gpus)?;
        let links = match matrix {
            Some(links) if links.len() == gpus.len() => links,
            Some(links) => {
                let (rows, count) = (links.len(), gpus.len());
                return Err(format!("{variable}={link}: expected {count} GPUs, as in SIMCUDA_GPUS, found {rows}"));
            }
            None => {
                parse((variable, link), "nvlink, pcie, none or matrix:FILE", |text| Links::uniform(text, gpus.len()))?
            }
        };
        let path = |name| get(name).filter(|text| !text.is_empty()).map(PathBuf::from);
        let machine = path("SIMCUDA_MACHINE");
        let visible = get("CUDA_VISIBLE_DEVICES")
            .map_or_else(|| (0..gpus.len()).collect(), |list| visible(&list, gpus.len(), machine.as_deref()));
        Ok(Self {
            visible,
            links,
            host: understood(named("SIMCUDA_HOST", "64GiB"), host)?,
            host_nodes: parse(named("SIMCUDA_HOST_NODES", "1"), "1 to 16", |text| {
                text.parse().ok().filter(|nodes| (1..=16).contains(nodes))
            })?,
            pinned_resident: parse(named("SIMCUDA_PINNED", "sparse"), "sparse or resident", |text| match text {
                "sparse" => Some(false),
                "resident" => Some(true),
                _ => None,
            })?,
            context_bytes: parse(named("SIMCUDA_CONTEXT_MIB", "523"), "a number of MiB", |text| {
                text.parse::<u64>().ok()?.checked_mul(1 << 20)
            })?,
            init_bytes: parse(named("SIMCUDA_INIT_MIB", ""), "GPU=MIB, several with commas", init_bytes)?,
            list_ms: parse(named("SIMCUDA_LIST_MS", "0"), "a number of milliseconds", |text| text.parse().ok())?,
            page_tables: parse(named("SIMCUDA_PAGE_TABLES", "0"), "a number of bytes up to 2097152", |text| {
                text.parse().ok().filter(|bytes| *bytes <= GRANULE)
            })?,
            driver: parse(named("SIMCUDA_DRIVER", "13000"), "1000 × major + 10 × minor, 11000 to 13990", |text| {
                text.parse().ok().filter(|version| (11_000..=13_990).contains(version))
            })?,
            vmm: parse(named("SIMCUDA_VMM", "on"), "on or off", switch)?,
            rdma: parse(named("SIMCUDA_RDMA", "on"), "on or off", switch)?,
            concurrent_managed: parse(named("SIMCUDA_CONCURRENT_MANAGED", "on"), "on or off", switch)?,
            host_atomics: parse(named("SIMCUDA_HOST_ATOMICS", "on"), "on or off", switch)?,
            mps: parse(named("SIMCUDA_MPS", "off"), "on or off", switch)?,
            confidential: parse(named("SIMCUDA_CONFIDENTIAL", "off"), "on or off", switch)?,
            faults: get("SIMCUDA_FAULT").unwrap_or_default(),
            report: get("SIMCUDA_REPORT"),
            strict: parse(named("SIMCUDA_STRICT", "off"), "on or off", switch)?,
            violations: get("SIMCUDA_VIOLATIONS"),
            machine,
            events: path("SIMCUDA_EVENTS"),
            fabric: parse(named("SIMCUDA_FABRIC", ""), "CLUSTER:CLIQUE, 32 hexadecimal digits and a number", fabric)?,
            memory_limits: parse(
                named("SIMCUDA_MEMORY_LIMITS", ""),
                "GPU=FOLDER:SOFT:HARD, sizes in bytes, several with commas",
                memory_limits,
            )?,
            gpus,
        })
    }

    /// Bytes of each host node.
    pub fn node_bytes(&self) -> u64 {
        (self.host.unwrap_or(0) / u64::from(self.host_nodes)) & !(GRANULE - 1)
    }

    /// Bytes of every place of the machine.
    pub fn capacities(&self) -> Vec<u64> {
        let mut places = vec![0; host_place(16)];
        for (index, bytes) in self.gpus.iter().enumerate() {
            places[gpu_place(index)] = *bytes;
        }
        places[host_place(0)..host_place(self.host_nodes as usize)].fill(self.node_bytes());
        places
    }
}

/// A domain and a clique; of an empty text none.
fn fabric(text: &str) -> Option<Option<([u8; 16], u32)>> {
    if text.is_empty() {
        return Some(None);
    }
    let (cluster, clique) = text.split_once(':')?;
    let number = u128::from_str_radix(cluster, 16).ok().filter(|_| cluster.len() == 32)?;
    Some(Some((number.to_be_bytes(), clique.parse().ok()?)))
}

/// `0=4,1=4`.
fn init_bytes(text: &str) -> Option<Vec<(usize, u64)>> {
    let one = |text: &str| {
        let (gpu, mib) = text.split_once('=')?;
        Some((gpu.parse().ok()?, mib.parse::<u64>().ok()?.checked_mul(1 << 20)?))
    };
    text.split(',').filter(|part| !part.is_empty()).map(one).collect()
}

/// `0=/sys/fs/cgroup/job:1048576:104857600`, several with commas.
fn memory_limits(text: &str) -> Option<Vec<MemoryLimit>> {
    let one = |text: &str| {
        let (gpu, rest) = text.split_once('=')?;
        let (rest, hard) = rest.rsplit_once(':')?;
        let (group, soft) = rest.rsplit_once(':')?;
        Some(MemoryLimit {
            gpu: gpu.parse().ok()?,
            group: group.to_owned(),
            soft: soft.parse().ok()?,
            hard: hard.parse().ok()?,
        })
    };
    text.split(',').filter(|part| !part.is_empty()).map(one).collect()
}

fn parse<T>(
    (name, text): (&'static str, String),
    allowed: &str,
    parser: impl Fn(&str) -> Option<T>,
) -> Result<T, String> {
    parser(&text).ok_or_else(|| format!("{name}={text}: expected {allowed}"))
}

fn understood<T>(
    (name, text): (&'static str, String),
    parser: impl Fn(&str) -> Result<T, String>,
) -> Result<T, String> {
    parser(&text).map_err(|why| format!("{name}={text}: {why}"))
}

fn switch(text: &str) -> Option<bool> {
    match text {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
}

/// The memory of each GPU that a text like `2x16GiB,1x80GiB` stands for.
///
/// # Errors
/// What was expected, or why there is no such machine.
pub fn gpus(text: &str) -> Result<Vec<u64>, String> {
    let mut gpus = Vec::new();
    let mut total: usize = 0;
    for group in text.split(',') {
        let parts = group.trim().split_once('x').and_then(|(count, size)| Some((count.parse::<usize>().ok()?, size)));
        let Some((count, size)) = parts.filter(|(count, _)| *count > 0) else {
            return Err("expected COUNTxSIZE, comma separated, as in 2x16GiB,1x80GiB".to_owned());
        };
        let bytes = parse_size(size)
            .map_err(|error| format!("{size} is {error}; expected COUNTxSIZE, as in 2x16GiB,1x80GiB"))?;
        // Less could not hold a context's first slab; more would not fit beside a 64 TiB reservation.
        if !(LEAST_GPU..=MAX_PLACE_BYTES).contains(&bytes) {
            let is_without_unit = size.trim().bytes().all(|byte| byte.is_ascii_digit());
            return Err(match is_without_unit {
                true => format!(
                    "a GPU of {size} bytes, as there is no unit; write {count}x{}GiB if that is meant",
                    size.trim()
                ),
                false => format!("a GPU of {size}, where one has 64MiB to 4TiB"),
            });
        }
        total = total.saturating_add(count);
        if total <= MOST_GPUS {
            gpus.extend(std::iter::repeat_n(bytes & !(GRANULE - 1), count));
        }
    }
    if total > MOST_GPUS {
        Err(format!("{total} GPUs, where a simulated machine has {MOST_GPUS} at most"))
    } else {
        Ok(gpus)
    }
}

/// The host's memory that a text like `64GiB` stands for; nothing for `none`.
///
/// # Errors
/// What was expected, or why there is no such host.
pub fn host(text: &str) -> Result<Option<u64>, String> {
    if text == "none" {
        return Ok(None);
    }
    match parse_size(text) {
        Ok(bytes) if bytes <= MAX_PLACE_BYTES => Ok(Some(bytes)),
        Ok(_) => Err(format!("a host of {text}, where one has 4TiB at most")),
        Err(error) => Err(format!("{error}; expected a size up to 4TiB as in 64GiB, or none")),
    }
}

/// As the driver reads it: ordinals or GPU-… names, cut at the first one that does not exist or comes twice.
fn visible(list: &str, count: usize, machine: Option<&Path>) -> Vec<usize> {
    let mut seen = HashSet::new();
    list.split(',')
        .map_while(|entry| {
            let entry = entry.trim();
            let index = match entry.strip_prefix("GPU-") {
                Some(_) => (0..count).find(|&index| crate::identity::uuid_text(machine, index).starts_with(entry))?,
                None => entry.parse::<usize>().ok().filter(|&index| index < count)?,
            };
            seen.insert(index).then_some(index)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn read(pairs: &[(&str, &str)]) -> Result<Settings, String> {
        Settings::read(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn the_machine_is_what_the_environment_says() {
        let settings =
            read(&[("SIMCUDA_GPUS", "2x16GiB,1x80GiB"), ("SIMCUDA_HOST", "none"), ("SIMCUDA_LINK", "pcie")]).unwrap();
        assert_eq!(settings.gpus, [16 * GIB, 16 * GIB, 80 * GIB]);
        assert_eq!((settings.host, settings.links), (None, Links::uniform("pcie", 3).unwrap()));
        assert_eq!(settings.visible, [0, 1, 2]);
    }

    #[test]
    fn visible_devices_reorder_and_stop_at_the_first_stranger() {
        let order = |list| read(&[("SIMCUDA_GPUS", "4x1GiB"), ("CUDA_VISIBLE_DEVICES", list)]).unwrap().visible;
        assert_eq!(order("2,0"), [2, 0]);
        assert_eq!(order("1,9,0"), [1]);
        assert_eq!(order("1,1"), [1]);
        assert_eq!(order(""), [0_usize; 0]);
        assert_eq!(order("-1"), [0_usize; 0]);
    }

    #[test]
    fn a_bad_value_is_named_with_what_is_allowed() {
        for (name, value) in [
            ("SIMCUDA_GPUS", "4"),
            ("SIMCUDA_GPUS", "4x32XB"),
            ("SIMCUDA_LINK", "ethernet"),
            ("SIMCUDA_HOST", "lots"),
            ("SIMCUDA_HOST_NODES", "0"),
            ("SIMCUDA_PINNED", "locked"),
            ("SIMCUDA_CONTEXT_MIB", "-1"),
            ("SIMCUDA_INIT_MIB", "4"),
            ("SIMCUDA_PAGE_TABLES", "4KiB"),
            ("SIMCUDA_DRIVER", "12"),
            ("SIMCUDA_VMM", "yes"),
            ("SIMCUDA_CONCURRENT_MANAGED", "1"),
            ("SIMCUDA_HOST_ATOMICS", "1"),
            ("SIMCUDA_MPS", "1"),
            ("SIMCUDA_CONFIDENTIAL", "1"),
            ("SIMCUDA_RDMA", "maybe"),
            ("SIMCUDA_STRICT", "very"),
        ] {
            let message = read(&[(name, value)]).unwrap_err();
            assert!(message.starts_with(&format!("{name}={value}: ")) && message.contains("expected "), "{message}");
        }
        for (value, words) in [
            ("1x9999999TiB", "a GPU of 9999999TiB, where one has"),
            ("4x32", "a GPU of 32 bytes, as there is no unit; write 4x32GiB if that is meant"),
            ("9999999999x1GiB", "where a simulated machine has 32"),
        ] {
            let message = read(&[("SIMCUDA_GPUS", value)]).unwrap_err();
            assert!(message.contains(words), "{message}");
        }
    }
}
