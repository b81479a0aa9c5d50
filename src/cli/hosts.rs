//! Which of several hosts this command runs on, where an image is of ranks on all of them (`gpupool checkpoint --node`); how their commands meet is in
//! `src/store/meeting.rs`.

use std::time::Duration;

use gpupool_store::{Meeting, Pace, Who};

use crate::control::{Company, Step};

/// Which of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// From 0.
    pub number: u32,
    pub count: u32,
}

/// More hosts than anybody has.
const MOST: u32 = 1 << 16;

/// What launchers tell each process that they start: which node it is on and how many there are, the first that is set; and, where these are numbers of processes, how
/// many are on its host. The innermost first: `mpirun` within a job of Slurm knows better than Slurm.
const LAUNCHERS: [([&str; 3], Option<&str>); 4] = [
    (["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ""], Some("OMPI_COMM_WORLD_LOCAL_SIZE")),
    (["GROUP_RANK", "GROUP_WORLD_SIZE", ""], None),
    (["SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_NNODES"], None),
    (["PMI_RANK", "PMI_SIZE", ""], Some("MPI_LOCALNRANKS")),
];

impl Node {
    /// `K/N`, or `auto`: as the launcher says that started this command on each host.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Self::told(|name| std::env::var(name).ok());
        }
        let parts = text.split_once('/').and_then(|(number, count)| Some((number.parse().ok()?, count.parse().ok()?)));
        let Some((number, count)) = parts else {
            return Err("write K/N, the number of this host from 0 and how many there are, as 0/4, or auto".to_owned());
        };
        Self::of(number, count)
    }

    fn of(number: u32, count: u32) -> Result<Self, String> {
        if number < count && count <= MOST {
            return Ok(Self { number, count });
        }
        Err(format!(
            "{number}/{count}: hosts have numbers from 0 to one less than there are, and there are {MOST} at most"
        ))
    }

    fn told(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let number = |name: &str| variable(name)?.trim().parse::<u32>().ok();
        for ([own, counts @ ..], on_host) in LAUNCHERS {
            let Some((own_number, count)) = number(own).zip(counts.into_iter().find_map(number)) else { continue };
            if let Some((name, many)) =
                on_host.and_then(|name| Some((name, number(name)?))).filter(|(_, many)| *many > 1)
            {
                return Err(format!("{name}={many}: start this command once on each host, or give --node K/N"));
            }
            return Self::of(own_number, count);
        }
        let names = LAUNCHERS.map(|([own, ..], _)| own).join(", ");
        Err(format!("no launcher says which host this is ({names}); give --node K/N"))
    }

    /// Of this process.
    pub fn who(self) -> Who {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Who { node: self.number, host, pid: std::process::id() }
    }
}

/// How often it is looked whether the others have come to rest, or have copied: programs are held up meanwhile.
const SOON: Duration = Duration::from_millis(10);
/// Until all of them have said whether they have come to rest, behind what each one's own programs may take. Programs wait for longer than both
/// (`TO_AGREE_APART` in `src/shim/agent/control.rs`).
const TO_REST: Duration = Duration::from_secs(5);
/// How often it is looked whether all is written.
pub const WRITTEN: Pace = Pace { within: None, look: Duration::from_millis(100) };

impl Company for Meeting {
    fn agree(&mut self, step: Step, why_not: Option<String>) -> Result<Option<String>, String> {
        let (name, within) = match step {
            Step::Ready => ("ready", None),
            Step::Rest => ("rest", Some(TO_REST)),
            Step::Copied => ("copied", None),
        };
        Self::agree(self, name, why_not, Pace { within, look: SOON }, all_of)
    }
}

/// What keeps any of them from it.
pub fn all_of(words: Vec<(Who, Option<String>)>) -> Option<String> {
    let why: Vec<String> = words.into_iter().filter_map(|(who, why)| Some(format!("{who}: {}", why?))).collect();
    (!why.is_empty()).then(|| why.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(variables: &[(&str, &str)]) -> Result<(u32, u32), String> {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name)?;
            Some(found.1.to_owned())
        };
        Node::told(variable).map(|node| (node.number, node.count))
    }

    #[test]
    fn a_host_is_told_by_its_launcher() {
        let slurm = [("SLURM_NODEID", "2"), ("SLURM_NNODES", "8"), ("SLURM_STEP_NUM_NODES", "4")];
        assert_eq!(told(&slurm), Ok((2, 4)));
        assert_eq!(told(&slurm[..2]), Ok((2, 8)));
        let mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "3"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "1")];
        assert_eq!(told(&[&slurm[..], &mpi].concat()), Ok((1, 3)));
        let several = [("PMI_RANK", "1"), ("PMI_SIZE", "3"), ("MPI_LOCALNRANKS", "2")];
        assert!(
            told(&several).is_err_and(|why| why.contains("MPI_LOCALNRANKS=2: start this command once on each host"))
        );
        assert_eq!(told(&several[..2]), Ok((1, 3)));
        assert!(told(&[("SLURM_NODEID", "2")]).is_err_and(|why| why.contains("give --node K/N")));
        assert!(told(&[("SLURM_NODEID", "8"), ("SLURM_NNODES", "8")]).is_err());
    }

    #[test]
    fn a_host_has_a_number_of_as_many_as_there_are() {
        assert_eq!(Node::parse("3/4"), Ok(Node { number: 3, count: 4 }));
        for wrong in ["4/4", "0/0", "1", "-1/2", "a/b", "0/70000", ""] {
            assert!(Node::parse(wrong).is_err(), "{wrong}");
        }
    }
}
