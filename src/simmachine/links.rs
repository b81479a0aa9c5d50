//! How the GPUs of the machine reach each other: all alike, or as a matrix says that `nvidia-smi topo -m` could have printed.

/// The way from one GPU to another, by nvidia-smi's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Link {
    /// `X`: it is the same GPU.
    Same,
    /// `NV#`: so many NVLinks.
    Nvlink(u8),
    /// `PIX`: one PCIe switch at most.
    Pix,
    /// `PXB`: several PCIe switches, not the host bridge.
    Pxb,
    /// `PHB`: the host bridge.
    Phb,
    /// `NODE`: several host bridges of one NUMA node.
    Node,
    /// `SYS`: the connection between NUMA nodes.
    Sys,
}

/// NVLinks of a GPU where every one has as many as an H200.
const H200_NVLINKS: u8 = 18;
/// NVML counts up to this many NVLinks of a GPU.
const MOST_NVLINKS: u8 = 18;

impl std::fmt::Display for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Same => f.write_str("X"),
            Self::Nvlink(count) => write!(f, "NV{count}"),
            Self::Pix => f.write_str("PIX"),
            Self::Pxb => f.write_str("PXB"),
            Self::Phb => f.write_str("PHB"),
            Self::Node => f.write_str("NODE"),
            Self::Sys => f.write_str("SYS"),
        }
    }
}

impl Link {
    fn read(text: &str) -> Option<Self> {
        Some(match text {
            "X" => Self::Same,
            "PIX" => Self::Pix,
            "PXB" => Self::Pxb,
            "PHB" => Self::Phb,
            "NODE" => Self::Node,
            "SYS" => Self::Sys,
            _ => {
                let count = text.strip_prefix("NV")?.parse().ok()?;
                Self::Nvlink(Some(count).filter(|count| (1..=MOST_NVLINKS).contains(count))?)
            }
        })
    }

    pub fn is_nvlink(self) -> bool {
        matches!(self, Self::Nvlink(_))
    }

    /// Whether the two may use each other's memory: below one host bridge, as on most machines.
    pub fn is_peer(self) -> bool {
        !matches!(self, Self::Node | Self::Sys)
    }
}

/// The links of a machine, by the GPUs' numbers in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Links(Vec<Vec<Link>>);

impl Links {
    /// `nvlink`, `pcie` or `none` between all of `count` GPUs.
    pub fn uniform(text: &str, count: usize) -> Option<Self> {
        let link = match text {
            "nvlink" => Link::Nvlink(H200_NVLINKS),
            "pcie" => Link::Pix,
            "none" => Link::Sys,
            _ => return None,
        };
        let row = |from| (0..count).map(|to| if from == to { Link::Same } else { link }).collect();
        Some(Self((0..count).map(row).collect()))
    }

    /// The matrix of a setting `matrix:FILE`, `None` for any other setting.
    pub(crate) fn from_file(setting: &str) -> Result<Option<Self>, String> {
        let Some(path) = setting.strip_prefix("matrix:") else { return Ok(None) };
        let text = std::fs::read_to_string(path)
            .map_err(|error| format!("SIMCUDA_LINK={setting}: expected a file with a matrix of links: {error}"))?;
        Self::read(&text).map(Some).map_err(|message| format!("SIMCUDA_LINK={setting}: {message}"))
    }

    /// A matrix as `nvidia-smi topo -m` prints it. Columns and rows of other devices and the affinities behind them are
    /// passed over, and so is everything after the rows of the GPUs. The error names the line and what was expected.
    pub fn read(text: &str) -> Result<Self, String> {
        let plain = without_escapes(text);
        let mut lines = plain.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
        let mut lines = lines.by_ref().filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let Some((first, header)) = lines.next() else {
            return Err("expected a line GPU0 GPU1 …, found no line".to_owned());
        };
        let names = header.split_whitespace().enumerate();
        let count = names.take_while(|(index, name)| *name == format!("GPU{index}")).count();
        if count == 0 {
            return Err(format!("line {first}: expected the names of the GPUs, GPU0 GPU1 …, found {header:?}"));
        }
        let mut rows: Vec<Vec<Link>> = Vec::new();
        while rows.len() < count {
            let name = format!("GPU{}", rows.len());
            let Some((number, line)) = lines.next() else {
                return Err(format!("expected a line for {name}, found the end of the file"));
            };
            let mut words = line.split_whitespace();
            if words.next() != Some(&name) {
                return Err(format!("line {number}: expected the line of {name}, found {line:?}"));
            }
            let from = rows.len();
            let mut row = Vec::new();
            for to in 0..count {
                let pair = format!("line {number}: expected");
                let word = words.next().ok_or_else(|| format!("{pair} {count} links of {name}, found {to}"))?;
                let link = Link::read(word).ok_or_else(|| {
                    format!("{pair} NV1 to NV{MOST_NVLINKS}, PIX, PXB, PHB, NODE or SYS from {name} to GPU{to}, found {word}")
                })?;
                if (link == Link::Same) != (from == to) {
                    return Err(match link {
                        Link::Same => {
                            format!("{pair} a link from {name} to GPU{to}, found X, which is for {name} itself")
                        }
                        _ => format!("{pair} X from {name} to itself, found {word}"),
                    });
                }
                if let Some(back) = rows.get(to).map(|row| row[from])
                    && back != link
                {
                    return Err(format!("{pair} the link that GPU{to} has to {name}, {back}, found {word}"));
                }
                row.push(link);
            }
            rows.push(row);
        }
        Ok(Self(rows))
    }

    /// How many GPUs there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn between(&self, from: usize, to: usize) -> Link {
        self.0[from][to]
    }

    /// The driver's performance rank of a pair, 0 for the fastest: more NVLinks come before fewer, and those before PCIe.
    pub fn rank(&self, from: usize, to: usize) -> i32 {
        let mut widths: Vec<Link> = self.0.iter().flatten().copied().filter(|link| link.is_nvlink()).collect();
        widths.sort_unstable_by(|a, b| b.cmp(a));
        widths.dedup();
        let behind = widths.len().max(1) as i32;
        match self.between(from, to) {
            Link::Same => 0,
            link @ Link::Nvlink(_) => widths.iter().position(|other| *other == link).unwrap_or(0) as i32,
            Link::Pix => behind,
            Link::Pxb => behind + 1,
            Link::Phb => behind + 2,
            Link::Node => behind + 3,
            Link::Sys => behind + 4,
        }
    }
}

/// Without the escape sequences by which nvidia-smi underlines its header on a terminal.
fn without_escapes(text: &str) -> String {
    let mut plain = String::new();
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        if letter == '\x1b' {
            // Up to the letter that ends the sequence.
            letters.by_ref().find(char::is_ascii_alphabetic);
        } else {
            plain.push(letter);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const DGX1: &str = include_str!("../simcuda/links/dgx1.txt");
    const ISLANDS: &str = include_str!("../simcuda/links/pcie-islands.txt");

    #[test]
    fn the_shipped_matrices_are_what_they_say() {
        let dgx1 = Links::read(DGX1).unwrap();
        assert_eq!(dgx1.len(), 8);
        for gpu in 0..8 {
            let links: u32 = (0..8)
                .map(|to| match dgx1.between(gpu, to) {
                    Link::Nvlink(count) => u32::from(count),
                    _ => 0,
                })
                .sum();
            assert_eq!(links, 6, "NVLinks of GPU {gpu}");
        }
        let reached = |gpu| (0..8).filter(|&to| dgx1.between(gpu, to).is_peer()).count();
        assert_eq!((0..8).map(reached).collect::<Vec<_>>(), [5; 8], "itself and four others");
        let islands = Links::read(ISLANDS).unwrap();
        let row: Vec<bool> = (0..4).map(|to| islands.between(0, to).is_peer()).collect();
        assert_eq!(row, [true, true, false, false]);
    }

    #[test]
    fn a_real_print_is_read_with_its_other_columns() {
        let text = "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \tNV18\tPIX\t0-47\t0\t\tN/A\n\
                    GPU1\tNV18\t X \tNODE\t0-47\t0\t\tN/A\nNIC0\tPIX\tNODE\t X \n\nLegend:\n\n  X    = Self\n";
        let links = Links::read(text).unwrap();
        assert_eq!((links.len(), links.between(0, 1), links.rank(0, 1)), (2, Link::Nvlink(18), 0));
    }

    #[test]
    fn ranks_follow_the_width_and_then_the_way_over_pcie() {
        let links = Links::read(
            "GPU0 GPU1 GPU2 GPU3\nGPU0 X NV1 NV2 PIX\nGPU1 NV1 X PHB SYS\nGPU2 NV2 PHB X NODE\nGPU3 PIX SYS NODE X",
        )
        .unwrap();
        assert_eq!([(0, 2), (0, 1), (0, 3), (1, 2)].map(|(from, to)| links.rank(from, to)), [0, 1, 2, 4]);
        assert!(!links.between(1, 3).is_peer() && !links.between(2, 3).is_peer() && links.between(1, 2).is_peer());
        let pcie = Links::uniform("pcie", 2).unwrap();
        assert_eq!(pcie.rank(0, 1), 1);
    }

    #[test]
    fn a_bad_matrix_is_named_with_its_line_and_what_was_expected() {
        for (text, expected) in [
            ("", "expected a line GPU0 GPU1 …, found no line"),
            ("# links\nNIC0 GPU0", "line 2: expected the names of the GPUs, GPU0 GPU1 …, found \"NIC0 GPU0\""),
            ("GPU0 GPU1\nGPU0 X PIX", "expected a line for GPU1, found the end of the file"),
            ("GPU0 GPU1\nGPU1 PIX X", "line 2: expected the line of GPU0, found \"GPU1 PIX X\""),
            ("GPU0 GPU1\nGPU0 X", "line 2: expected 2 links of GPU0, found 1"),
            (
                "GPU0 GPU1\nGPU0 X NV99",
                "line 2: expected NV1 to NV18, PIX, PXB, PHB, NODE or SYS from GPU0 to GPU1, found NV99",
            ),
            ("GPU0 GPU1\n\nGPU0 PIX PIX", "line 3: expected X from GPU0 to itself, found PIX"),
            ("GPU0 GPU1\nGPU0 X X", "line 2: expected a link from GPU0 to GPU1, found X, which is for GPU0 itself"),
            ("GPU0 GPU1\nGPU0 X NV4\nGPU1 PIX X", "line 3: expected the link that GPU0 has to GPU1, NV4, found PIX"),
        ] {
            assert_eq!(Links::read(text), Err(expected.to_owned()));
        }
    }
}
