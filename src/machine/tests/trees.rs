//! The reader on made `proc` and `sys` folders, as engines, schedulers and systemd lay them out.

use std::fs;
use std::path::Path;

use gpupool_machine::{Host, Memory};
use tempfile::TempDir;

const GIB: u64 = 1 << 30;
/// 64 GiB in all, 48 GiB available.
const MEMINFO: &str = "MemTotal:       67108864 kB\nMemFree:        8388608 kB\nMemAvailable:   50331648 kB\n";
const TWO: &str = "29 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
const ONE: &str = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
                   32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                   36 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";

/// A machine in a folder.
struct Tree(TempDir);

impl Tree {
    fn new(mountinfo: &str, cgroup: &str) -> Self {
        let tree = Self(tempfile::tempdir().unwrap_or_else(|error| panic!("no temporary folder: {error}")));
        tree.file("proc/meminfo", MEMINFO).file("proc/self/mountinfo", mountinfo).file("proc/self/cgroup", cgroup)
    }

    fn file(self, path: &str, text: &str) -> Self {
        let path = self.0.path().join(path);
        let made = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(&path, text));
        made.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        self
    }

    /// A group of version 2 with what these files say.
    fn two(self, group: &str, files: &[(&str, u64)]) -> Self {
        let text = |value: u64| if value == u64::MAX { "max\n".to_owned() } else { format!("{value}\n") };
        files
            .iter()
            .fold(self, |tree, (name, value)| tree.file(&format!("sys/fs/cgroup{group}/memory.{name}"), &text(*value)))
    }

    /// A group of version 1: its limit, the least around it, its use and the idle part of its page cache.
    fn one(self, group: &str, limit: u64, around: u64, used: u64, cache: u64) -> Self {
        let folder = format!("sys/fs/cgroup/memory{group}");
        let stat = format!("cache 1\nhierarchical_memory_limit {around}\ntotal_inactive_file {cache}\n");
        self.file(&format!("{folder}/memory.limit_in_bytes"), &format!("{limit}\n"))
            .file(&format!("{folder}/memory.usage_in_bytes"), &format!("{used}\n"))
            .file(&format!("{folder}/memory.stat"), &stat)
    }

    fn memory(&self) -> Memory {
        Host::at(self.0.path()).memory()
    }

    /// Total and available in GiB.
    #[track_caller]
    fn gives(&self, total: u64, available: u64) -> Memory {
        let memory = self.memory();
        assert_eq!((memory.total(), memory.available()), (Some(total * GIB), Some(available * GIB)), "{memory:?}");
        memory
    }
}

/// No limit, as version 1 writes it.
const NONE: u64 = 0x7fff_ffff_ffff_f000;

#[test]
fn a_machine_without_limits_has_what_the_kernel_says() {
    let tree = Tree::new(TWO, "0::/user.slice/user-1000.slice/session-2.scope\n");
    let tree = tree.two("/user.slice/user-1000.slice", &[("max", u64::MAX), ("high", u64::MAX), ("current", 3 * GIB)]);
    assert!(tree.gives(64, 48).groups.is_empty());
    assert_eq!(tree.memory().spare(), Some(46 * GIB));
}

#[test]
fn systemd_limits_a_slice_above_the_service() {
    let tree = Tree::new(TWO, "0::/batch.slice/train.service\n")
        .two("/batch.slice/train.service", &[("max", u64::MAX), ("high", u64::MAX), ("current", GIB)])
        .two("/batch.slice", &[("max", 32 * GIB), ("high", u64::MAX), ("current", 20 * GIB)]);
    assert!(tree.gives(32, 12).tightest().expect("a group").folder.ends_with("batch.slice"));
}

#[test]
fn what_is_slowed_down_is_limited_too() {
    let tree = Tree::new(TWO, "0::/train.service\n")
        .two("/train.service", &[("max", 32 * GIB), ("high", 16 * GIB), ("current", 4 * GIB)]);
    tree.gives(16, 12);
}

#[test]
fn the_least_of_nested_limits_holds_and_the_least_of_what_is_left() {
    // The inner limit is lower, the outer one is nearly used up by others.
    let tree = Tree::new(TWO, "0::/outer/middle/inner\n")
        .two("/outer", &[("max", 40 * GIB), ("current", 38 * GIB)])
        .two("/outer/middle", &[("max", u64::MAX), ("current", 9 * GIB)])
        .two("/outer/middle/inner", &[("max", 16 * GIB), ("current", 6 * GIB)]);
    let memory = tree.gives(16, 2);
    assert_eq!(memory.groups.len(), 2);
    assert!(memory.tightest().expect("a group").folder.ends_with("outer"));
}

#[test]
fn slurm_limits_the_job_and_the_step_in_version_2() {
    let job = "/system.slice/slurmstepd.scope/job_7";
    let tree = Tree::new(TWO, &format!("0::{job}/step_0/user/task_0\n"))
        .two(&format!("{job}/step_0/user/task_0"), &[("max", u64::MAX), ("current", GIB)])
        .two(&format!("{job}/step_0/user"), &[("max", 24 * GIB), ("high", 24 * GIB), ("current", 2 * GIB)])
        .two(job, &[("max", 24 * GIB), ("high", 24 * GIB), ("current", 10 * GIB)]);
    tree.gives(24, 14);
}

#[test]
fn slurm_limits_the_job_in_version_1() {
    let tree = Tree::new(ONE, "5:cpuset:/x\n4:memory:/slurm/uid_1000/job_7/step_0/task_0\n0::/\n")
        .one("", NONE, NONE, 30 * GIB, 0)
        .one("/slurm/uid_1000/job_7", 20 * GIB, 20 * GIB, 12 * GIB, 0)
        .one("/slurm/uid_1000/job_7/step_0/task_0", NONE, 20 * GIB, GIB, 0);
    tree.gives(20, 8);
}

/// Before Linux 5.11 a group of version 1 is charged for what those inside it use only where it says so. One that does not say
/// so, and all around it, limits nobody but itself.
#[test]
fn a_group_of_version_1_without_hierarchy_does_not_limit_those_inside_it() {
    let nested = |hierarchies: [&str; 3]| {
        let tree = Tree::new(ONE, "4:memory:/slice/job/task\n")
            .one("/slice", 10 * GIB, 10 * GIB, 9 * GIB, 0)
            .one("/slice/job", 20 * GIB, 20 * GIB, 12 * GIB, 0)
            .one("/slice/job/task", 30 * GIB, 30 * GIB, 4 * GIB, 0);
        let groups = ["/slice", "/slice/job", "/slice/job/task"].into_iter().zip(hierarchies);
        groups.filter(|(_, says)| !says.is_empty()).fold(tree, |tree, (group, says)| {
            tree.file(&format!("sys/fs/cgroup/memory{group}/memory.use_hierarchy"), &format!("{says}\n"))
        })
    };
    nested(["0", "0", "0"]).gives(30, 26);
    // What a group says of those inside it says nothing of those around it.
    nested(["0", "0", "1"]).gives(30, 26);
    nested(["0", "1", "1"]).gives(20, 8);
    nested(["1", "1", "1"]).gives(10, 1);
    // Later kernels may have no such file.
    nested(["", "", ""]).gives(10, 1);
}

#[test]
fn docker_with_a_view_of_its_own_has_its_group_at_the_root() {
    let tree = Tree::new(TWO, "0::/\n").two("", &[("max", 8 * GIB), ("current", GIB)]);
    tree.gives(8, 7);
    let tree = Tree::new(ONE, "4:memory:/\n").one("", 8 * GIB, 8 * GIB, GIB, 0);
    tree.gives(8, 7);
}

/// The file names the group as the host does, and the mount says which part of the hierarchy is seen.
#[test]
fn docker_with_the_hosts_view_is_found_by_what_is_mounted() {
    let mounts = "36 31 0:32 /docker/4f /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
    let tree = Tree::new(mounts, "4:memory:/docker/4f/worker\n").one("/worker", 6 * GIB, 6 * GIB, GIB, 0).one(
        "",
        8 * GIB,
        8 * GIB,
        4 * GIB,
        0,
    );
    tree.gives(6, 4);
}

/// A container sees nothing of the pod around it but the number that the kernel tells of it.
#[test]
fn version_1_tells_of_limits_around_that_cannot_be_seen() {
    let tree = Tree::new(ONE, "4:memory:/\n").one("", NONE, 12 * GIB, 2 * GIB, 0);
    tree.gives(12, 10);
}

#[test]
fn a_group_that_cannot_be_named_is_the_one_that_is_mounted() {
    let mounts = "29 23 0:26 /docker/4f /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n";
    let tree = Tree::new(mounts, "0::/user.slice/elsewhere\n").two("", &[("max", 8 * GIB), ("current", GIB)]);
    tree.gives(8, 7);
}

/// A process that entered a container's view from outside: the limits there are not its own.
#[test]
fn a_group_outside_of_the_view_has_no_limits_here() {
    let tree = Tree::new(TWO, "0::/../../session-2.scope\n").two("", &[("max", 8 * GIB), ("current", GIB)]);
    tree.gives(64, 48);
}

/// A job in an image without cgroups of its own: some groups on the way are not there.
#[test]
fn groups_that_are_gone_or_hidden_are_passed_over() {
    let tree = Tree::new(TWO, "0::/jobs/7/gone (deleted)\n").two("/jobs", &[("max", 10 * GIB), ("current", GIB)]);
    tree.gives(10, 9);
}

#[test]
fn a_machine_with_both_versions_is_limited_by_the_one_with_the_controller() {
    let mounts = format!("{ONE}38 31 0:37 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    let tree = Tree::new(&mounts, "9:name=systemd:/job\n4:memory:/job\n0::/job\n")
        .one("/job", 10 * GIB, 10 * GIB, 3 * GIB, 0)
        .file("sys/fs/cgroup/unified/job/cgroup.procs", "1\n");
    tree.gives(10, 7);
}

#[test]
fn without_a_memory_controller_there_is_no_limit() {
    let mounts = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
    let tree = Tree::new(mounts, "1:cpu:/job\n").file("sys/fs/cgroup/cpu/job/cpu.shares", "2\n");
    tree.gives(64, 48);
    Tree::new(TWO, "0::/job\n").file("sys/fs/cgroup/job/cpu.max", "max\n").gives(64, 48);
}

#[test]
fn cache_that_the_kernel_drops_first_is_not_in_use() {
    let tree = Tree::new(TWO, "0::/\n")
        .two("", &[("max", 16 * GIB), ("current", 15 * GIB)])
        .file("sys/fs/cgroup/memory.stat", &format!("anon 1\nactive_file 2\ninactive_file {}\n", 9 * GIB));
    tree.gives(16, 10);
    Tree::new(ONE, "4:memory:/\n").one("", 16 * GIB, NONE, 15 * GIB, 9 * GIB).gives(16, 10);
}

#[test]
fn a_limit_above_the_machine_or_below_what_is_used_leaves_what_there_is() {
    Tree::new(TWO, "0::/\n").two("", &[("max", 500 * GIB), ("current", GIB)]).gives(64, 48);
    Tree::new(TWO, "0::/\n").two("", &[("max", 4 * GIB), ("current", 5 * GIB)]).gives(4, 0);
    // What is used is not told: the limit stands.
    Tree::new(TWO, "0::/\n").two("", &[("max", 4 * GIB)]).gives(4, 4);
}

#[test]
fn names_with_blanks_and_colons_are_names() {
    let mounts = "29 23 0:26 / /sys/fs/c\\040group rw - cgroup2 cgroup2 rw\n";
    let tree = Tree::new(mounts, "0::/a:b c\n").file("sys/fs/c group/a:b c/memory.max", "4294967296\n");
    tree.gives(4, 4);
}

/// The groups are where a container has them; only how much memory there is must be asked of the kernel.
#[test]
fn without_proc_the_kernel_is_asked_and_the_usual_folders_are_read() {
    let real = Host::at(Path::new("/")).memory();
    let bare = Host::at(Path::new("/no/such/root")).memory();
    assert!(bare.groups.is_empty());
    let (total, free) = (bare.installed.expect("a total"), bare.free.expect("what is free"));
    assert!(free > 0 && free <= total);
    assert!(real.installed.is_some_and(|installed| installed.abs_diff(total) < 1 << 20), "{real:?} {bare:?}");
    for name in ["sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"] {
        let tree = Tree(tempfile::tempdir().expect("a temporary folder")).file(name, "1048576\n");
        assert_eq!(tree.memory().total(), Some(1 << 20), "{name}");
    }
}

#[test]
fn damaged_files_say_nothing_and_nothing_panics() {
    for text in [
        "",
        "\n\n",
        "max",
        "-1\n",
        "99999999999999999999999\n",
        "\u{ff}\0\n",
        "0::",
        "- - - - - - -",
        ":::::",
        "0::/\\",
    ] {
        let tree = Tree::new(text, text)
            .file("proc/meminfo", text)
            .file("sys/fs/cgroup/memory.max", text)
            .file("sys/fs/cgroup/memory.current", text);
        let memory = tree.memory();
        assert!(memory.groups.is_empty(), "{text:?}: {memory:?}");
        assert!(memory.total() > Some(0), "{text:?}: {memory:?}");
    }
}

#[test]
fn limits_that_change_and_processes_that_move_are_followed() {
    let tree = Tree::new(TWO, "0::/first\n")
        .two("/first", &[("max", 8 * GIB), ("current", GIB)])
        .two("/second", &[("max", 4 * GIB), ("current", GIB)]);
    let host = Host::at(tree.0.path());
    assert_eq!(host.memory().total(), Some(8 * GIB));
    let tree = tree.two("/first", &[("max", 6 * GIB)]);
    assert_eq!(host.memory().total(), Some(6 * GIB));
    let _tree = tree.file("proc/self/cgroup", "0::/second\n");
    assert_eq!(host.memory().total(), Some(4 * GIB));
}

#[test]
fn memory_of_devices_is_limited_by_each_group_around_the_process() {
    let tree = Tree::new(TWO, "0::/job/step\n")
        .file("sys/fs/cgroup/job/dmem.max", "drm/0000:03:00.0/vram0 1073741824\ndrm/0000:0a:00.0/vram0 max\n")
        .file("sys/fs/cgroup/job/step/dmem.max", "drm/0000:03:00.0/vram0 max\ndrm/0000:0a:00.0/vram0 4096\nnonsense\n")
        .file("sys/fs/cgroup/other/dmem.max", "drm/0000:03:00.0/vram0 1\n");
    let all = Host::at(tree.0.path()).device_limits();
    let of = |pci: &str| all.iter().filter(|group| group.is_of(pci)).map(|group| group.limit).collect::<Vec<_>>();
    assert_eq!(
        (of("0000:03:00.0"), of("0000:0A:00.0"), of("0000:04:00.0"), of("")),
        (vec![GIB], vec![4096], vec![], vec![])
    );
    assert_eq!(all[0].file, Path::new("/sys/fs/cgroup/job/step/dmem.max"));
}
