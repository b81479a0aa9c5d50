//! Limits on memory: the control groups of this process, of either version, and all groups around them.
//!
//! Which groups these are stands in `/proc/self/cgroup`, where they can be read in `/proc/self/mountinfo`. A container's
//! engine, a scheduler or systemd sets the limit on whichever level it likes: Slurm on the job and the step, Kubernetes on the
//! pod, systemd on a slice. The kernel applies all of them, so all are read.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

/// A limit on memory, and what is used of it, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Where it was read.
    pub folder: PathBuf,
    /// The most that the group may use. `memory.high` counts: what goes beyond it is slowed down to a crawl.
    pub limit: u64,
    /// What the group uses, less the part of the page cache that the kernel drops before it refuses anything.
    pub used: u64,
}

impl Group {
    /// What is left of the limit.
    pub fn left(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

/// Names of the files in which a group's numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A place where groups with the memory controller can be read.
#[derive(Debug)]
pub struct Mount {
    version: Version,
    /// The group that is seen there, by its path in the hierarchy.
    group: PathBuf,
    point: PathBuf,
}

/// Where the groups are mounted. Without `/proc`, where they are by convention, as a container sees them.
pub fn mounts(root: &Path) -> Vec<Mount> {
    match fs::read(root.join("proc/self/mountinfo")) {
        Ok(text) => {
            let mut mounts: Vec<Mount> = Vec::new();
            for mount in text.split(|byte| *byte == b'\n').filter_map(mount) {
                // What is mounted later on the same folder hides what was there.
                mounts.retain(|hidden| hidden.point != mount.point);
                mounts.push(mount);
            }
            mounts
        }
        Err(_) => [(Version::Two, "/sys/fs/cgroup"), (Version::One, "/sys/fs/cgroup/memory")]
            .map(|(version, point)| Mount { version, group: "/".into(), point: point.into() })
            .into(),
    }
}

/// `31 23 0:28 /docker/4f /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory`
fn mount(line: &[u8]) -> Option<Mount> {
    let mut words = line.split(|byte| *byte == b' ').skip(3);
    let (group, point) = (unescaped(words.next()?), unescaped(words.next()?));
    let mut described = words.skip_while(|word| *word != b"-").skip(1);
    let version = match described.next()? {
        b"cgroup2" => Version::Two,
        b"cgroup" if described.nth(1)?.split(|byte| *byte == b',').any(|option| option == b"memory") => Version::One,
        _ => return None,
    };
    Some(Mount { version, group, point })
}

/// The kernel writes blanks, tabs, line ends and backslashes in a path as three octal digits.
fn unescaped(word: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((first, after)) = rest.split_first() {
        let digits =
            after.get(..3).filter(|digits| *first == b'\\' && digits.iter().all(|digit| (b'0'..=b'7').contains(digit)));
        match digits {
            Some(digits) => {
                path.push(digits.iter().fold(0u8, |value, digit| (value << 3) | (digit - b'0')));
                rest = &after[3..];
            }
            None => {
                path.push(*first);
                rest = after;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(path))
}

/// The limits that hold for this process, the innermost group's first. Groups without a limit are left out.
pub fn limits(root: &Path, mounts: &[Mount]) -> Vec<Group> {
    let text = fs::read(root.join("proc/self/cgroup")).ok();
    // Without it: the root, which is a container's own group where it has a view of its own.
    let text = text.as_deref().unwrap_or(b"0::/\n1:memory:/\n");
    let mut groups = Vec::new();
    for (version, path) in text.split(|byte| *byte == b'\n').filter_map(own_group) {
        let folders = folders_of(root, mounts, version, &path).into_iter().enumerate();
        groups.extend(folders.filter_map(|(outwards, folder)| read(root, version, folder, outwards == 0)));
    }
    groups
}

/// `0::/user.slice` and `4:cpu,memory:/docker/4f`, but not `3:cpuset:/`.
fn own_group(line: &[u8]) -> Option<(Version, PathBuf)> {
    let mut parts = line.splitn(3, |byte| *byte == b':').skip(1);
    let (controllers, path) = (parts.next()?, parts.next()?);
    let version = match controllers {
        b"" => Version::Two,
        list if list.split(|byte| *byte == b',').any(|name| name == b"memory") => Version::One,
        _ => return None,
    };
    Some((version, PathBuf::from(OsStr::from_bytes(path))))
}

/// The folders of the group at `path` and of the groups around it that limit it, as far as they can be seen.
fn folders_of(root: &Path, mounts: &[Mount], version: Version, path: &Path) -> Vec<PathBuf> {
    // `/../other`: the group lies outside of what this process may know about. What is mounted here is not around it.
    if path.components().any(|component| component == Component::ParentDir) {
        return Vec::new();
    }
    let of_version = || mounts.iter().filter(move |mount| mount.version == version);
    let mut folders = Vec::new();
    for mount in of_version() {
        if let Ok(inside) = path.strip_prefix(&mount.group) {
            let mut outwards = inside.ancestors().map(|part| mount.point.join(part));
            folders.extend(outwards.next());
            folders.extend(outwards.take_while(|folder| limits_those_inside(root, version, folder)));
        }
    }
    // An engine that hides the way down to the container mounts its group alone, by a name that this process does not know.
    if folders.is_empty() {
        folders.extend(of_version().next().map(|mount| mount.point.clone()));
    }
    folders
}

/// Whether what the groups inside this one use counts against its limit, and so against those around it. Before Linux 5.11 a
/// group of version 1 had to ask for that (`memory.use_hierarchy`); the kernel then charges no group further out either.
fn limits_those_inside(root: &Path, version: Version, folder: &Path) -> bool {
    let asks = root.join(folder.strip_prefix("/").unwrap_or(folder)).join("memory.use_hierarchy");
    version == Version::Two || !fs::read_to_string(asks).is_ok_and(|text| text.trim() == "0")
}

/// The limit of the group in this folder, if it has one.
fn read(root: &Path, version: Version, folder: PathBuf, is_innermost: bool) -> Option<Group> {
    /// Version 1 writes no limit as the largest number of pages.
    const NONE: u64 = 1 << 60;
    let here = root.join(folder.strip_prefix("/").unwrap_or(&folder));
    let text = |name: &str| fs::read_to_string(here.join(name)).ok();
    let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
    let (limits, used, cache) = match version {
        Version::Two => ([number("memory.max"), number("memory.high")], "memory.current", "inactive_file "),
        Version::One => {
            // The least of this group's and of those around it, also of those that a container cannot see. The kernel sums
            // this file up over all processors when it is read, so it is read once.
            let stat = if is_innermost { text("memory.stat") } else { None };
            let around = stat.and_then(|stat| stated(&stat, "hierarchical_memory_limit "));
            ([number("memory.limit_in_bytes"), around], "memory.usage_in_bytes", "total_inactive_file ")
        }
    };
    let limit = limits.into_iter().flatten().filter(|limit| *limit < NONE).min()?;
    let cached = text("memory.stat").and_then(|stat| stated(&stat, cache)).unwrap_or(0);
    Some(Group { folder, limit, used: number(used).unwrap_or(0).saturating_sub(cached) })
}

/// A limit on the memory of a device (the `dmem` controller), in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceGroup {
    /// Where it was read: the file.
    pub file: PathBuf,
    /// The kernel's name of that memory, `drm/0000:03:00.0/vram0`.
    pub region: String,
    /// The most that the group may use of it.
    pub limit: u64,
}

impl DeviceGroup {
    /// Whether that memory is that of the device with this address (`0000:03:00.0`).
    pub fn is_of(&self, pci: &str) -> bool {
        !pci.is_empty() && self.region.split('/').any(|part| part.eq_ignore_ascii_case(pci))
    }
}

/// The limits on memory of devices that hold for this process, the innermost group's first. What is not limited is left out.
pub fn device_limits(root: &Path, mounts: &[Mount]) -> Vec<DeviceGroup> {
    let files = own_folders(root, mounts).into_iter().map(|folder| folder.join("dmem.max"));
    files.flat_map(|file| limits_in(&fs::read_to_string(inside(root, &file)).unwrap_or_default(), &file)).collect()
}

/// The folders of this process's group of version 2 and of those around it, the innermost first.
pub fn own_folders(root: &Path, mounts: &[Mount]) -> Vec<PathBuf> {
    let text = fs::read(root.join("proc/self/cgroup")).ok();
    let text = text.as_deref().unwrap_or(b"0::/\n");
    let own = text.split(|byte| *byte == b'\n').filter_map(own_group).filter(|(version, _)| *version == Version::Two);
    own.flat_map(|(version, path)| folders_of(root, mounts, version, &path)).collect()
}

/// `drm/0000:03:00.0/vram0 1073741824`, or `max` in place of the number.
fn limits_in(text: &str, file: &Path) -> Vec<DeviceGroup> {
    let limit = |line: &str| {
        let (region, limit) = line.trim().rsplit_once(' ')?;
        Some(DeviceGroup { file: file.to_owned(), region: region.to_owned(), limit: limit.parse().ok()? })
    };
    text.lines().filter_map(limit).collect()
}

fn inside(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn stated(stat: &str, name: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_of_one_version_or_of_no_use() {
        let of = |line: &str| mount(line.as_bytes()).map(|mount| (mount.version, mount.group, mount.point));
        let two = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
        assert_eq!(of(two), Some((Version::Two, "/".into(), "/sys/fs/cgroup".into())));
        let one = "36 31 0:32 /docker/4f /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory";
        assert_eq!(of(one), Some((Version::One, "/docker/4f".into(), "/sys/fs/cgroup/memory".into())));
        for line in [
            "",
            "31",
            "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755",
            "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu",
            "36 31 0:32 / /sys/fs/cgroup/memory ro - cgroup",
        ] {
            assert_eq!(of(line), None, "{line}");
        }
    }

    #[test]
    fn paths_are_unescaped() {
        assert_eq!(unescaped(br"/a\040b\134c"), Path::new(r"/a b\c"));
        assert_eq!(unescaped(br"/a\9\04"), Path::new(r"/a\9\04"));
    }

    #[test]
    fn lines_that_are_no_groups_are_passed_over() {
        for line in ["", "nonsense", "4:cpu:/x", "4:memory"] {
            assert_eq!(own_group(line.as_bytes()), None, "{line}");
        }
        assert_eq!(own_group(b"4:cpu,memory:/a:b"), Some((Version::One, "/a:b".into())));
    }
}
