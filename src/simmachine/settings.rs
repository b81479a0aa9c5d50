//! The machine to simulate, read from the environment once, in `cuInit`.

use crate::links::Links;
use crate::occupancy::{GRANULE, MAX_PLACE_BYTES, gpu_place, host_place};
use std::collections::HashSet;
use std::path::PathBuf;

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
}

const GIB: u64 = 1 << 30;

impl Settings {
    /// Reads the environment through `get`. The error is one line for a person: variable, value, what is allowed.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let named = |name: &'static str, default: &str| (name, get(name).unwrap_or_else(|| default.to_owned()));
        let (variable, link) = named("SIMCUDA_LINK", "nvlink");
        let matrix = Links::from_file(&link)?;
        // A matrix says how many GPUs there are.
        let default = matrix.as_ref().map_or_else(|| "2x16GiB".to_owned(), |links| format!("{}x16GiB", links.len()));
        let allowed = "COUNTxSIZE, comma separated, as in 2x16GiB,1x80GiB";
        let gpus = parse(named("SIMCUDA_GPUS", &default), allowed, gpu_list)?;
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
        let visible =
            get("CUDA_VISIBLE_DEVICES").map_or_else(|| (0..gpus.len()).collect(), |list| visible(&list, gpus.len()));
        Ok(Self {
            visible,
            links,
            host: parse(named("SIMCUDA_HOST", "64GiB"), "a size up to 4TiB as in 64GiB, or none", |text| {
                let fits = |bytes: &u64| *bytes <= MAX_PLACE_BYTES;
                if text == "none" { Some(None) } else { size(text).filter(fits).map(Some) }
            })?,
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
            faults: get("SIMCUDA_FAULT").unwrap_or_default(),
            report: get("SIMCUDA_REPORT"),
            strict: parse(named("SIMCUDA_STRICT", "off"), "on or off", switch)?,
            violations: get("SIMCUDA_VIOLATIONS"),
            machine: path("SIMCUDA_MACHINE"),
            events: path("SIMCUDA_EVENTS"),
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

fn parse<T>(
    (name, text): (&'static str, String),
    allowed: &str,
    parser: impl Fn(&str) -> Option<T>,
) -> Result<T, String> {
    parser(&text).ok_or_else(|| format!("{name}={text}: expected {allowed}"))
}

fn switch(text: &str) -> Option<bool> {
    match text {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
}

/// `16GiB`, `512MiB`, `64KiB` or plain bytes; whole numbers only.
fn size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => GIB,
        "TiB" => 1 << 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

fn gpu_list(text: &str) -> Option<Vec<u64>> {
    let mut gpus = Vec::new();
    for group in text.split(',') {
        let (count, bytes) = group.trim().split_once('x')?;
        let (count, bytes) = (count.parse::<usize>().ok()?, size(bytes)?);
        // Less than 64 MiB could not hold a context's first slab; more than 4 TiB would not fit beside a 64 TiB reservation.
        if !(64 << 20..=MAX_PLACE_BYTES).contains(&bytes) || gpus.len() + count > 32 {
            return None;
        }
        gpus.extend(std::iter::repeat_n(bytes & !(GRANULE - 1), count));
    }
    Some(gpus)
}

/// As the driver reads it: ordinals or GPU-… names, cut at the first one that does not exist or comes twice.
fn visible(list: &str, count: usize) -> Vec<usize> {
    let mut seen = HashSet::new();
    list.split(',')
        .map_while(|entry| {
            let entry = entry.trim();
            let index = match entry.strip_prefix("GPU-") {
                Some(_) => (0..count).find(|&index| crate::identity::uuid_text(index).starts_with(entry))?,
                None => entry.parse::<usize>().ok().filter(|&index| index < count)?,
            };
            seen.insert(index).then_some(index)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
            ("SIMCUDA_GPUS", "4x32GB"),
            ("SIMCUDA_GPUS", "1x9999999TiB"),
            ("SIMCUDA_LINK", "ethernet"),
            ("SIMCUDA_HOST", "lots"),
            ("SIMCUDA_HOST_NODES", "0"),
            ("SIMCUDA_PINNED", "locked"),
            ("SIMCUDA_CONTEXT_MIB", "-1"),
            ("SIMCUDA_PAGE_TABLES", "4KiB"),
            ("SIMCUDA_DRIVER", "12"),
            ("SIMCUDA_VMM", "yes"),
            ("SIMCUDA_CONCURRENT_MANAGED", "1"),
            ("SIMCUDA_HOST_ATOMICS", "1"),
            ("SIMCUDA_RDMA", "maybe"),
            ("SIMCUDA_STRICT", "very"),
        ] {
            let message = read(&[(name, value)]).unwrap_err();
            assert!(message.starts_with(&format!("{name}={value}: expected ")), "{message}");
        }
    }
}
