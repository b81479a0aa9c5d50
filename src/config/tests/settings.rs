//! Every setting well formed and malformed, through the one door that programs use.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

use proptest::prelude::*;

use gpupool_config::{
    Contexts, Devices, FarLimit, Free, Limits, MemInfo, Mode, Move, Pinned, Placement, Prefetch, SETTINGS, Settings,
    Small, Switch, Toggle, VERDICTS,
};

fn read(vars: &[(&str, &str)]) -> Result<Settings, Vec<String>> {
    Settings::read(vars.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))))
        .map_err(|problems| problems.iter().map(ToString::to_string).collect())
}

#[track_caller]
fn refused(name: &str, value: &str, message: &str) {
    assert_eq!(read(&[(name, value)]), Err(vec![format!("{name}={value}: {message}")]));
}

#[test]
fn nothing_set_is_the_default() {
    assert_eq!(read(&[]), Ok(Settings::default()));
    assert_eq!(read(&[("PATH", "/bin"), ("GPUPOOLING", "x")]), Ok(Settings::default()));
}

#[test]
fn the_folder_of_verdicts_is_no_setting_and_no_mistake() {
    assert_eq!(read(&[(VERDICTS, "/tmp/gpupool-verdicts")]), Ok(Settings::default()));
}

#[test]
fn an_empty_value_is_unset() {
    for row in SETTINGS {
        assert_eq!(read(&[(row.name, "")]), Ok(Settings::default()), "{}", row.name);
    }
    assert_eq!(read(&[("GPUPOOL_NO_SUCH", "")]), Ok(Settings::default()));
}

#[test]
fn every_default_that_is_a_value_reads_as_the_default() {
    let in_words = [
        "GPUPOOL_RESERVE",
        "GPUPOOL_LIMIT",
        "GPUPOOL_GUARANTEE",
        "GPUPOOL_HOST_LIMIT",
        "GPUPOOL_PINNED_LIMIT",
        "GPUPOOL_RESTORE",
        "GPUPOOL_RESTORE_GENERATION",
        "GPUPOOL_CONTEXT_DEVICES",
        "GPUPOOL_MALLOC_HEAP_SIZE",
        "GPUPOOL_STACK_SIZE",
        "GPUPOOL_PRINTF_FIFO_SIZE",
        "GPUPOOL_LOG",
        "GPUPOOL_LOG_FILE",
    ];
    for row in SETTINGS.iter().filter(|row| !in_words.contains(&row.name)) {
        let read = read(&[(row.name, row.default)]).map(|read| Settings { said: Default::default(), ..read });
        assert_eq!(read, Ok(Settings::default()), "{}", row.name);
    }
}

#[test]
fn every_word_in_the_table_is_understood() {
    for row in SETTINGS.iter().filter(|row| !row.values.contains(' ') && row.values.contains('|')) {
        for word in row.values.split('|') {
            // What GPUPOOL_CONTEXTS=deny asks for; no other word minds it.
            let read = read(&[(row.name, word), ("GPUPOOL_CONTEXT_DEVICES", "0")]);
            assert!(read.is_ok() || row.name == "GPUPOOL_CONTEXT_DEVICES", "{}={word}", row.name);
        }
    }
}

#[test]
fn well_formed_settings_are_typed() {
    let settings = read(&[
        ("GPUPOOL_MODE", "spill"),
        ("GPUPOOL_MIN_SIZE", "2MiB"),
        ("GPUPOOL_SMALL", "driver"),
        ("GPUPOOL_DEVICES", "2, 0"),
        ("GPUPOOL_RESERVE", "512M"),
        ("GPUPOOL_LIMIT", "0:70GiB, 3:1.5GiB"),
        ("GPUPOOL_HOST_LIMIT", "0"),
        ("GPUPOOL_PLACEMENT", "most-free"),
        ("GPUPOOL_FREE", "lazy"),
        ("GPUPOOL_LENDERS", "awake"),
        ("GPUPOOL_MOVE", "stress"),
        ("GPUPOOL_MOVE_SHARE", "12.5 %"),
        ("GPUPOOL_PRIORITY", "80"),
        ("GPUPOOL_GUARANTEE", "0:20GiB"),
        ("GPUPOOL_RECALL_WAIT", "500ms"),
        ("GPUPOOL_PINNED", "off"),
        ("GPUPOOL_PINNED_LIMIT", "8GiB"),
        ("GPUPOOL_PINNED_IDLE", "5min"),
        ("GPUPOOL_IDLE", "2min"),
        ("GPUPOOL_SOFT_OOM", "off"),
        ("GPUPOOL_MEMINFO", "device"),
        ("GPUPOOL_PREFETCH", "launch"),
        ("GPUPOOL_MANAGED_ADVICE", "on"),
        ("GPUPOOL_CONTEXTS", "deny"),
        ("GPUPOOL_CONTEXT_DEVICES", "3, 1"),
        ("GPUPOOL_MALLOC_HEAP_SIZE", "256MiB"),
        ("GPUPOOL_STACK_SIZE", "16k"),
        ("GPUPOOL_PRINTF_FIFO_SIZE", "0"),
        ("GPUPOOL_LOG", "gpupool::memory=debug"),
        ("GPUPOOL_LOG_FILE", "/tmp/%e.%p"),
        ("GPUPOOL_SUMMARY", "on"),
    ])
    .unwrap();
    assert_eq!(settings.mode, Mode::Spill);
    assert_eq!((settings.guarantee.of(0), settings.guarantee.of(1)), (Some(20 << 30), None));
    assert_eq!(settings.recall_wait, Some(Duration::from_millis(500)));
    assert_eq!(read(&[("GPUPOOL_RECALL_WAIT", "off")]).unwrap().recall_wait, None);
    assert_eq!(settings.min_size, 2 << 20);
    assert_eq!(settings.small, Small::Driver);
    assert_eq!(settings.devices, Devices::List(vec![2, 0]));
    assert_eq!(settings.reserve, Some(512 << 20));
    assert_eq!(settings.limit, Limits::PerGpu(BTreeMap::from([(0, 70 << 30), (3, 3 << 29)])));
    assert_eq!((settings.limit.of(3), settings.limit.of(1)), (Some(3 << 29), None));
    assert_eq!(settings.host_limit, Some(0));
    assert_eq!(settings.placement, Placement::MostFree);
    assert_eq!(settings.free, Free::Lazy);
    assert_eq!((settings.moving, settings.move_share), (Move::Stress, 125));
    assert_eq!((settings.pinned, settings.pinned_limit), (Pinned::Off, Some(8 << 30)));
    assert_eq!(settings.pinned_idle, Duration::from_secs(300));
    assert_eq!(settings.idle, Some(Duration::from_secs(120)));
    assert_eq!(settings.soft_oom, Switch::Off);
    assert_eq!(settings.meminfo, MemInfo::Device);
    assert_eq!(settings.prefetch, Prefetch::Launch);
    assert_eq!(settings.managed_advice, Toggle::On);
    assert_eq!(settings.contexts, Contexts::Deny);
    assert_eq!(settings.context_devices, Some(vec![3, 1]));
    assert_eq!(settings.malloc_heap_size, Some(256 << 20));
    assert_eq!((settings.stack_size, settings.printf_fifo_size), (Some(16 << 10), Some(0)));
    assert_eq!(settings.log.as_deref(), Some("gpupool::memory=debug"));
    assert_eq!(settings.log_file.unwrap().template(), OsStr::new("/tmp/%e.%p"));
    assert_eq!(settings.summary, Switch::On);
}

#[test]
fn one_limit_holds_for_every_gpu() {
    let limit = read(&[("GPUPOOL_LIMIT", "40GiB")]).unwrap().limit;
    assert_eq!((limit.of(0), limit.of(7)), (Some(40 << 30), Some(40 << 30)));
}

#[test]
fn a_limit_for_far_memory_warns_or_refuses() {
    assert_eq!(read(&[("GPUPOOL_FAR_LIMIT", "off")]).unwrap().far_limit, None);
    for (written, refuses) in [("12.5%", false), ("12.5%:refuse", true)] {
        let limit = read(&[("GPUPOOL_FAR_LIMIT", written)]).unwrap().far_limit.unwrap();
        assert_eq!((limit, limit.to_string().as_str()), (FarLimit { share: 125, refuses }, written));
    }
}

#[test]
fn freed_memory_may_stay_for_good_or_not_at_all() {
    assert_eq!(Settings::default().idle, Some(Duration::from_secs(10)));
    assert_eq!(Settings::default().idle_suspend, None);
    assert_eq!(read(&[("GPUPOOL_IDLE_SUSPEND", "5min")]).unwrap().idle_suspend, Some(Duration::from_secs(300)));
    assert_eq!(read(&[("GPUPOOL_IDLE_SUSPEND", "off")]).unwrap().idle_suspend, None);
    for wrong in ["10ms", "10ms:/x", "5min:", "5min:x", "off:/x", ":/x"] {
        assert!(read(&[("GPUPOOL_IDLE_SUSPEND", wrong)]).is_err(), "{wrong}");
    }
    let to = read(&[("GPUPOOL_IDLE_SUSPEND", "5min:/scratch/a:b")]).unwrap();
    assert_eq!((to.idle_suspend, to.idle_suspend_to), (Some(Duration::from_secs(300)), Some("/scratch/a:b".into())));
    assert_eq!(read(&[("GPUPOOL_IDLE", "off")]).unwrap().idle, None);
    assert_eq!(read(&[("GPUPOOL_IDLE", "0")]).unwrap().idle, Some(Duration::ZERO));
}

#[test]
fn malformed_values_say_what_to_write() {
    refused("GPUPOOL_MODE", "fast", "not a mode; write one of pool|spill|managed|trace|off");
    refused("GPUPOOL_IDLE", "10", "a duration needs a unit: ms, s, min or h; write for example 10s or off");
    for share in ["5", "101%", "-1%", "half", "%", "NaN%"] {
        refused("GPUPOOL_MOVE_SHARE", share, "not a percentage from 0% to 100%; write for example 5%");
    }
    for limit in ["20", "on", "20:refuse", "120%"] {
        refused(
            "GPUPOOL_FAR_LIMIT",
            limit,
            "not a percentage from 0% to 100%; write for example 20%, 20%:refuse or off",
        );
    }
    refused("GPUPOOL_FAR_LIMIT", "20%:fail", "\"fail\" is not refuse; write for example 20%:refuse");
    refused("GPUPOOL_PREFETCH", "on", "not a time; write one of off|alloc|launch");
    refused("GPUPOOL_MANAGED_ADVICE", "auto", "not on or off; write one of off|on");
    refused("GPUPOOL_MIN_SIZE", "0", "must be at least 1; write 1 to pool every request");
    refused("GPUPOOL_MIN_SIZE", "-1", "a size cannot be negative; write for example 1MiB");
    refused("GPUPOOL_DEVICES", "0,,1", "\"\" is not a GPU's number; write auto or for example 0,2,3");
    refused("GPUPOOL_DEVICES", "0,2,0", "GPU 0 is named twice; write every GPU once");
    refused("GPUPOOL_DEVICES", "+1", "\"+1\" is not a GPU's number; write auto or for example 0,2,3");
    refused(
        "GPUPOOL_RESERVE",
        "lots",
        "not a size in bytes or with a unit (K, M, G, T, P, E, alone or with iB or B); write for example 1GiB",
    );
    refused(
        "GPUPOOL_LIMIT",
        "0:70XB",
        "not a size in bytes or with a unit (K, M, G, T, P, E, alone or with iB or B); write for example 0:70GiB,1:40GiB",
    );
    refused(
        "GPUPOOL_LIMIT",
        "70XB",
        "not a size in bytes or with a unit (K, M, G, T, P, E, alone or with iB or B); write for example 0:70GiB,1:40GiB, or 40GiB for every GPU",
    );
    refused("GPUPOOL_LIMIT", "0:1GiB,0:2GiB", "GPU 0 is named twice; write every GPU once");
    refused("GPUPOOL_LIMIT", "a:1GiB", "\"a\" is not a GPU's number; write for example 0:70GiB,1:40GiB");
    refused("GPUPOOL_LIMIT", "1GiB,2GiB", "\"1GiB\" names no GPU; write for example 0:70GiB,1:40GiB");
    refused("GPUPOOL_HOST_LIMIT", "99999999TiB", "larger than 16 EiB; write for example 64GiB");
    refused("GPUPOOL_HOST_LIMIT", "16EiB", "larger than 16 EiB; write for example 64GiB");
    refused("GPUPOOL_PINNED_IDLE", "10m", "not a duration in ms, s, min or h; write for example 30s");
    refused("GPUPOOL_PLACEMENT", "nearest", "not a placement; write one of local-first|interleave|most-free");
    refused("GPUPOOL_FREE", "never", "not a way to free; write one of strict|lazy");
    refused("GPUPOOL_LENDERS", "on", "not a state; write one of asleep|awake");
    refused("GPUPOOL_SMALL", "off", "not an answer; write one of pool|driver");
    refused("GPUPOOL_PINNED", "on", "not an answer; write one of pool|off");
    refused(
        "GPUPOOL_PINNED_LIMIT",
        "25%",
        "not a size in bytes or with a unit (K, M, G, T, P, E, alone or with iB or B); write for example 16GiB",
    );
    refused("GPUPOOL_PINNED_IDLE", "30", "a duration needs a unit: ms, s, min or h; write for example 30s");
    refused("GPUPOOL_SOFT_OOM", "yes", "not a switch; write one of auto|on|off");
    refused("GPUPOOL_MEMINFO", "gpu", "not an answer; write one of pool|device");
    refused("GPUPOOL_CONTEXTS", "forbid", "not a policy; write one of warn|deny");
    refused("GPUPOOL_CONTEXT_DEVICES", "all", "\"all\" is not a GPU's number; write for example 0,2,3");
    refused("GPUPOOL_CONTEXT_DEVICES", "1,1", "GPU 1 is named twice; write every GPU once");
    refused(
        "GPUPOOL_MALLOC_HEAP_SIZE",
        "big",
        "not a size in bytes or with a unit (K, M, G, T, P, E, alone or with iB or B); write for example 256MiB",
    );
    refused("GPUPOOL_STACK_SIZE", "1.5", "a fraction needs a unit; write for example 16KiB");
    refused("GPUPOOL_PRINTF_FIFO_SIZE", "-1", "a size cannot be negative; write for example 8MiB");
    refused("GPUPOOL_LOG_FILE", "%q", "%q means nothing here; use %p (process), %e (executable), %h (host) or %%");
    for value in ["0", "newest", "-1", "1.5"] {
        let expected = "not the number of an image; gpupool store list FOLDER has them, write for example 7";
        refused("GPUPOOL_RESTORE_GENERATION", value, expected);
    }
    refused("GPUPOOL_RESTORE", "images", "no path from the root on; write for example /scratch/train");
    refused("GPUPOOL_SUMMARY", "1", "not a switch; write one of auto|on|off");
    refused("GPUPOOL_LIMITS", "1GiB", "no such setting; did you mean GPUPOOL_LIMIT?");
}

#[test]
fn a_folder_of_images_is_named_from_the_root_on() {
    let folder = read(&[("GPUPOOL_RESTORE", "/scratch/train")]).map(|settings| settings.restore);
    assert_eq!(folder, Ok(Some("/scratch/train".into())));
}

#[test]
fn bytes_that_are_no_text_are_refused_except_in_a_path() {
    let read = |name: &str| Settings::read([(OsString::from(name), OsString::from_vec(vec![0xff, b'1']))].into_iter());
    // The beginning of one says that it is a path.
    for row in SETTINGS.iter().filter(|row| row.name != "GPUPOOL_RESTORE") {
        match read(row.name) {
            Ok(_) => assert_eq!(row.name, "GPUPOOL_LOG_FILE"),
            Err(problems) => assert_eq!(problems[0].to_string(), format!("{}=\u{fffd}1: not UTF-8", row.name)),
        }
    }
}

#[test]
fn all_mistakes_are_told_at_once() {
    let problems =
        read(&[("GPUPOOL_MODE", "x"), ("GPUPOOL_FREE", "strict"), ("GPUPOOL_LIMIT", "y"), ("GPUPOOL_Z", "1")]);
    assert_eq!(problems.unwrap_err().len(), 3);
}

#[test]
fn a_list_of_gpus_for_contexts_says_nothing_unless_others_are_denied() {
    assert_eq!(
        without_effect(&[("GPUPOOL_CONTEXT_DEVICES", "0,2")]),
        ["GPUPOOL_CONTEXT_DEVICES=0,2: says nothing without GPUPOOL_CONTEXTS=deny"]
    );
    assert!(without_effect(&[("GPUPOOL_CONTEXT_DEVICES", "0"), ("GPUPOOL_CONTEXTS", "deny")]).is_empty());
    assert!(without_effect(&[]).is_empty());
}

fn without_effect(pairs: &[(&str, &str)]) -> Vec<String> {
    // What is refused is no setting without effect, and no test expects its text here.
    read(pairs).map_or_else(|refused| refused, |read| read.without_effect().iter().map(ToString::to_string).collect())
}

#[test]
fn moves_are_of_the_pool_s_memory() {
    let told = without_effect(&[("GPUPOOL_MOVE", "auto"), ("GPUPOOL_MODE", "managed")]);
    let begins = "GPUPOOL_MOVE=auto: says nothing with GPUPOOL_MODE=managed: what moves is the pool's memory";
    assert!(told.len() == 1 && told[0].starts_with(begins) && told[0].contains("managed memory stays"), "{told:?}");
    let told = without_effect(&[("GPUPOOL_MOVE", "stress"), ("GPUPOOL_MODE", "trace")]);
    assert!(told.len() == 1 && !told[0].contains("managed memory"), "{told:?}");
    for mode in ["pool", "spill"] {
        assert!(without_effect(&[("GPUPOOL_MOVE", "auto"), ("GPUPOOL_MODE", mode)]).is_empty());
    }
    assert!(without_effect(&[("GPUPOOL_MODE", "managed")]).is_empty());
}

/// Who wrote it believes that it is so; a log that says nothing agrees.
#[test]
fn what_another_setting_makes_idle_is_told_by_both_names() {
    const MODES: [(&str, &str); 2] = [("GPUPOOL_MODE", "managed"), ("GPUPOOL_MODE", "trace")];
    const UNFOUND: [(&str, &str); 1] = [("GPUPOOL_METRICS", "off")];
    let idle = [
        ("GPUPOOL_IDLE_SUSPEND", "5min", &MODES[..]),
        ("GPUPOOL_FAR_LIMIT", "20%", &MODES),
        ("GPUPOOL_RESTORE", "/x", &MODES),
        ("GPUPOOL_PRIORITY", "80", &MODES),
        ("GPUPOOL_GUARANTEE", "0:1GiB", &MODES),
        ("GPUPOOL_RECALL_WAIT", "5s", &MODES),
        ("GPUPOOL_PRIORITY", "80", &UNFOUND),
        ("GPUPOOL_GUARANTEE", "1GiB", &UNFOUND),
        ("GPUPOOL_RECALL_WAIT", "5s", &UNFOUND),
        ("GPUPOOL_MOVE_SHARE", "7%", &[("GPUPOOL_MOVE", "off")]),
        ("GPUPOOL_PINNED_LIMIT", "1GiB", &[("GPUPOOL_PINNED", "off")]),
        ("GPUPOOL_PINNED_IDLE", "5s", &[("GPUPOOL_PINNED", "off")]),
        ("GPUPOOL_PREFETCH", "launch", &[("GPUPOOL_MODE", "pool"), ("GPUPOOL_MODE", "trace")]),
    ];
    for (name, value, others) in idle {
        for (other, says) in others {
            let told = without_effect(&[(name, value), (*other, *says)]);
            assert_eq!(told.len(), 1, "{name} {other}: {told:?}");
            let begins = format!("{name}={value}: says nothing ");
            assert!(told[0].starts_with(&begins) && told[0].contains(other), "{told:?}");
        }
    }
    let alone = without_effect(&[("GPUPOOL_RESTORE_BY_ORDER", "on")]);
    assert!(alone.len() == 1 && alone[0].contains("without GPUPOOL_RESTORE=FOLDER"), "{alone:?}");
    assert_eq!(without_effect(&[("GPUPOOL_RESTORE_GENERATION", "3")]).len(), 1);
    // Each of these changes something.
    for vars in [
        &[("GPUPOOL_RESTORE_BY_ORDER", "on"), ("GPUPOOL_RESTORE", "/x")][..],
        &[("GPUPOOL_MOVE_SHARE", "7%"), ("GPUPOOL_MOVE", "auto")],
        &[("GPUPOOL_PREFETCH", "launch"), ("GPUPOOL_MODE", "managed")],
        &[("GPUPOOL_PREFETCH", "off"), ("GPUPOOL_MANAGED_ADVICE", "on")],
        &[("GPUPOOL_IDLE_SUSPEND", "off"), ("GPUPOOL_MODE", "trace")],
        &[("GPUPOOL_RECALL_WAIT", "off"), ("GPUPOOL_METRICS", "off")],
        &[("GPUPOOL_PRIORITY", "80"), ("GPUPOOL_MODE", "spill")],
        &[("GPUPOOL_PRIORITY", "80"), ("GPUPOOL_MODE", "off"), ("GPUPOOL_MOVE", "auto")],
    ] {
        assert_eq!(without_effect(vars), [""; 0], "{vars:?}");
    }
}

#[test]
fn no_more_is_guaranteed_than_a_limit_allows() {
    let of = |guarantee, limit| without_effect(&[("GPUPOOL_GUARANTEE", guarantee), ("GPUPOOL_LIMIT", limit)]);
    for (guarantee, limit, gpu) in [
        ("0:20GiB", "0:10GiB", "GPU 0"),
        ("20GiB", "1:10GiB", "GPU 1"),
        ("1:20GiB", "10GiB", "GPU 1"),
        ("20GiB", "10GiB", "each GPU"),
    ] {
        let begins = format!(
            "GPUPOOL_GUARANTEE={guarantee}: more than GPUPOOL_LIMIT lets the pool take of {gpu}, which is 10.0 GiB"
        );
        let told = of(guarantee, limit);
        assert!(told.len() == 1 && told[0].starts_with(&begins), "{told:?}");
    }
    for (guarantee, limit) in [("0:20GiB", "1:10GiB"), ("10GiB", "10GiB"), ("0:5GiB,1:10GiB", "0:5GiB")] {
        assert_eq!(of(guarantee, limit), [""; 0]);
    }
}

#[test]
fn with_mode_off_a_summary_and_a_log_that_nobody_writes_are_told() {
    let told = without_effect(&[("GPUPOOL_MODE", "off"), ("GPUPOOL_SUMMARY", "on"), ("GPUPOOL_LOG_FILE", "/tmp/x")]);
    assert!(told.len() == 2 && told.iter().all(|line| line.contains("says nothing with GPUPOOL_MODE=off")), "{told:?}");
    assert_eq!(without_effect(&[("GPUPOOL_MODE", "off"), ("GPUPOOL_SUMMARY", "auto")]), [""; 0]);
}

#[test]
fn deny_needs_to_know_where_contexts_are_meant_to_be() {
    refused(
        "GPUPOOL_CONTEXTS",
        "deny",
        "says nothing without GPUPOOL_CONTEXT_DEVICES; write there the GPUs that may have a context, for example 0",
    );
    assert!(read(&[("GPUPOOL_CONTEXT_DEVICES", "0"), ("GPUPOOL_CONTEXTS", "deny")]).is_ok());
    assert!(read(&[("GPUPOOL_CONTEXT_DEVICES", "0")]).is_ok());
    let both = read(&[("GPUPOOL_CONTEXTS", "deny"), ("GPUPOOL_CONTEXT_DEVICES", "x")]).unwrap_err();
    assert_eq!(both.len(), 1, "{both:?}");
    assert!(both[0].starts_with("GPUPOOL_CONTEXT_DEVICES=x"), "{both:?}");
}

#[test]
fn the_reserve_is_small_on_a_small_gpu() {
    let settings = Settings::default();
    assert_eq!(settings.reserve_of(80 << 30), 1 << 30);
    assert_eq!(settings.reserve_of(8 << 30), 512 << 20);
    assert_eq!(Settings { reserve: Some(3), ..settings }.reserve_of(8 << 30), 3);
}

#[test]
fn gpus_that_are_not_there_are_found_once_they_are_known() {
    let settings = read(&[
        ("GPUPOOL_DEVICES", "0,5"),
        ("GPUPOOL_CONTEXT_DEVICES", "3,1"),
        ("GPUPOOL_LIMIT", "0:90GiB,1:1GiB,7:1GiB"),
    ])
    .unwrap();
    let problems: Vec<_> = settings.check_gpus(&[80 << 30, 80 << 30]).iter().map(ToString::to_string).collect();
    assert_eq!(
        problems,
        [
            "GPUPOOL_DEVICES=0,5: there is no GPU 5; this process sees GPUs 0 to 1",
            "GPUPOOL_CONTEXT_DEVICES=3,1: there is no GPU 3; this process sees GPUs 0 to 1",
            "GPUPOOL_LIMIT=0:90.0GiB: GPU 0 has 80.0 GiB; write at most that",
            "GPUPOOL_LIMIT=7:1.0GiB: there is no GPU 7; this process sees GPUs 0 to 1",
        ]
    );
    let reserve = read(&[("GPUPOOL_RESERVE", "80GiB")]).unwrap();
    let problems: Vec<_> = reserve.check_gpus(&[80 << 30, 40 << 30]).iter().map(ToString::to_string).collect();
    assert_eq!(problems, ["GPUPOOL_RESERVE=80.0GiB: no GPU here has more than 80.0 GiB; write less than that"]);
    assert!(reserve.check_gpus(&[80 << 30, 81 << 30]).is_empty());
    assert!(Settings::default().check_gpus(&[]).is_empty());
    assert!(read(&[("GPUPOOL_LIMIT", "90GiB")]).unwrap().check_gpus(&[80 << 30]).is_empty());
}

#[test]
fn ranks_on_this_host_are_read_beside_the_settings() {
    let settings =
        read(&[("SLURM_NTASKS_PER_NODE", "8"), ("GPUPOOL_FREE", "lazy"), ("LOCAL_WORLD_SIZE", "4")]).unwrap();
    assert_eq!((settings.local_ranks, settings.ranks()), (Some(("LOCAL_WORLD_SIZE", 4)), 4));
    assert_eq!(read(&[("LOCAL_WORLD_SIZE", "1")]).unwrap().ranks(), 1);
}

/// What people paste, mistype or compute: none of it may pass for something else.
#[test]
fn odd_sizes_and_durations_are_refused_by_name() {
    let odd = [
        "50%", "1e3GiB", "1,5GiB", "٣GiB", "３GiB", "½GiB", "1 GiB 1", "1GiBs", "0x10", "1_000", "NaN", "inf", "--1",
        "+1", "  ",
    ];
    for row in SETTINGS.iter().filter(|row| matches!(row.values, "size" | "duration")) {
        for value in odd {
            let told = read(&[(row.name, value)]).expect_err(value).join("\n");
            assert!(
                told.starts_with(&format!("{}={value}: ", row.name)) && told.contains("write for example"),
                "{told}"
            );
        }
    }
}

proptest! {
    #[test]
    fn no_value_of_any_setting_makes_it_panic(row in 0..SETTINGS.len(), value in "[-+.,:%0-9a-zA-Z \\n٣]{0,24}|.{0,24}") {
        prop_assume!(!value.is_empty());
        let name = SETTINGS[row].name;
        if let Err(told) = read(&[(name, &value), ("GPUPOOL_CONTEXT_DEVICES", "0")]) {
            let all_named = told.iter().all(|line| line.starts_with(&format!("{name}={value}: ")));
            prop_assert!(all_named || name == "GPUPOOL_CONTEXT_DEVICES", "{told:?}");
        }
    }
}
