//! `gpupool store`: what a folder has, and what is wrong with it.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use gpupool_store::{About, JobWriter, Meta, Options, Process, Writer, rank_folder};

use crate::common::{gpupool, output, stderr, stdout};

/// A folder with two generations of two blocks.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let process = Process { pid: 4711, started: 1, command: "python \u{1b}[31mtrain.py".to_owned() };
        let gpus = vec!["GPU-0a".to_owned(), "GPU-0b".to_owned()];
        let meta = Meta { process, host: "node-3".to_owned(), gpus, gpupool: "0.2.0".to_owned(), ..Meta::default() };
        let writer = Writer::create(folder.path(), meta, Options { threads: 1, ..Options::default() }).unwrap();
        for (id, name) in [(1, "weights"), (2, "")] {
            let bytes: Vec<u8> = (0..40_000_u32).map(|at| if id == 1 { ((at * at) >> 7) as u8 } else { 0 }).collect();
            let (label, site) = (name.to_owned(), "train.py:12 (main)".to_owned());
            let about = About {
                id,
                address: 0x7f00_0000_0000 + id,
                bytes: bytes.len() as u64,
                home: Some(1),
                label,
                site,
                ..About::default()
            };
            writer.write(writer.block(about).unwrap(), 0, &bytes).unwrap();
        }
        drop(writer.finish().unwrap());
    }
    folder
}

fn store(action: &str, folder: &std::path::Path, more: &[&str]) -> std::process::Output {
    output(gpupool().args(["store", action]).arg(folder).args(more))
}

#[test]
fn a_folder_is_listed_shown_and_verified() {
    let folder = folder();
    let listed = store("list", folder.path(), &[]);
    assert_eq!(listed.status.code(), Some(0), "{}", stderr(&listed));
    let rows = stdout(&listed);
    let numbers: Vec<&str> = rows.lines().skip(1).filter_map(|row| row.split_whitespace().next()).collect();
    assert_eq!(numbers, ["2", "1"], "{rows}");
    assert!(rows.contains("node-3") && rows.contains("train.py") && !rows.contains('\u{1b}'), "{rows}");
    let listed: serde_json::Value = serde_json::from_str(&stdout(&store("list", folder.path(), &["--json"]))).unwrap();
    assert_eq!((&listed[1]["generation"], &listed[1]["bytes"]), (&1.into(), &80_000.into()), "{listed}");

    let shown = stdout(&store("show", folder.path(), &[]));
    let has = |line: &str, words: &[&str]| words.iter().all(|word| line.contains(word));
    assert!(shown.starts_with("generation 2, written "), "{shown}");
    assert!(shown.lines().any(|line| has(line, &["0x7f0000000001", "GPU 1", "weights"])), "{shown}");
    assert!(shown.lines().any(|line| has(line, &["0x7f0000000002", "fill", "train.py:12"])), "{shown}");
    let shown = stdout(&store("show", folder.path(), &["--generation", "1", "--json"]));
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!((&shown["generation"], &shown["blocks"][0]["label"]), (&1.into(), &"weights".into()));

    let verified = store("verify", folder.path(), &[]);
    assert_eq!(verified.status.code(), Some(0), "{}", stderr(&verified));
    assert!(stdout(&verified).starts_with("generation 2: whole, "), "{}", stdout(&verified));
}

#[test]
fn what_is_wrong_is_named_and_verify_fails() {
    let folder = folder();
    let data = folder.path().join("gen-000002/data-00");
    let mut bytes = std::fs::read(&data).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&data, bytes).unwrap();
    let verified = store("verify", folder.path(), &[]);
    assert_eq!(verified.status.code(), Some(1));
    let said = stdout(&verified);
    assert!(said.starts_with("generation 2: 1 wrong\n") && said.contains("\ngeneration 1: whole"), "{said}");
    let words = said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("gen-000002/data-00: block 1 at 0x7f0000000001, offset 0: expected "), "{said}");
    let alone = store("verify", folder.path(), &["--generation", "1"]);
    assert_eq!(alone.status.code(), Some(0), "{}", stdout(&alone));

    let absent = store("verify", folder.path(), &["--generation", "9"]);
    assert_eq!((absent.status.code(), stdout(&absent)), (Some(1), String::new()));
    let path = folder.path().display();
    let expected =
        format!("gpupool: store: {path}: it has no generation 9; gpupool store list {path} tells which there are\n");
    assert_eq!(stderr(&absent), expected);
    assert_eq!(stderr(&store("show", folder.path(), &["--generation", "9"])), expected);

    let manifest = folder.path().join("gen-000001/manifest");
    std::fs::write(&manifest, "gpupool-store 9\n").unwrap();
    let listed = stdout(&store("list", folder.path(), &[])).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(listed.contains("9, and this gpupool reads up to 2"), "{listed}");
    let nothing = store("list", &folder.path().join("nowhere"), &[]);
    assert_eq!(nothing.status.code(), Some(1));
    let expected = format!("gpupool: store: {}/nowhere: there is no such folder\n", folder.path().display());
    assert_eq!(stderr(&nothing), expected);
}

/// What is written there is inside an image, and goes with it.
#[test]
fn an_image_is_no_folder_for_further_ones() {
    let folder = folder();
    let image = folder.path().join("gen-000001");
    let pid = std::process::id().to_string();
    let asked = output(gpupool().args(["checkpoint", &pid]).arg(&image));
    let expected = format!(
        "gpupool: {} is one image itself, and no folder of images: name the folder around it for a further one, or another folder\n",
        image.display()
    );
    assert_eq!((asked.status.code(), stderr(&asked)), (Some(2), expected));
    // The process is there and none of ours: it is looked for where the folder is one.
    let asked = output(gpupool().args(["checkpoint", &pid]).arg(folder.path()));
    assert!(stderr(&asked).contains("is not known to run under gpupool"), "{}", stderr(&asked));
}

/// What is written to a rank's folder takes the place of a part of the job's image, whichever way it is named.
#[test]
fn a_ranks_folder_of_a_jobs_images_is_no_folder_for_others() {
    let around = job();
    let pid = std::process::id().to_string();
    for how in ["--alone", "--job", "--full"] {
        let folder = around.path().join("rank-0/../rank-1");
        let asked = output(gpupool().args(["checkpoint", how, &pid]).arg(&folder));
        let said = stderr(&asked);
        assert_eq!((asked.status.code(), said.lines().count()), (Some(2), 1), "{how}: {said}");
        assert!(
            said.contains("is a rank's folder in ") && said.contains("gpupool checkpoint --job PID"),
            "{how}: {said}"
        );
    }
    let other = tempfile::tempdir().unwrap();
    let folder = other.path().join("rank-0");
    let asked = output(gpupool().args(["checkpoint", "--alone", &pid]).arg(&folder));
    assert!(stderr(&asked).contains("is not known to run under gpupool"), "{}", stderr(&asked));
}

/// An image of a job of two ranks.
fn job() -> tempfile::TempDir {
    let around = tempfile::tempdir().unwrap();
    let writer = JobWriter::create(around.path()).unwrap();
    let rank = |rank: u32| {
        let process = Process { pid: 4711 + rank, started: 1, command: "python train.py".to_owned() };
        let meta = Meta { process, host: "node-3".to_owned(), gpupool: "0.2.0".to_owned(), ..Meta::default() };
        let options = Options { threads: 1, ..Options::default() };
        let writer = Writer::create(&rank_folder(around.path(), rank), meta, options).unwrap();
        let about = About { id: 1, address: 0x7f00_0000_0000, bytes: 40_000, home: Some(rank), ..About::default() };
        writer.write(writer.block(about).unwrap(), 0, &[7; 40_000]).unwrap();
        (rank, writer.finish().unwrap().generation)
    };
    let ranks = [rank(0), rank(1)];
    writer.finish(&ranks, Vec::new(), None).unwrap();
    around
}

#[test]
fn a_jobs_image_is_shown_by_its_ranks() {
    let folder = job();
    let shown = store("show", folder.path(), &[]);
    assert_eq!((shown.status.code(), stderr(&shown)), (Some(0), String::new()));
    let text = stdout(&shown);
    assert!(text.starts_with("generation 1 of a job, written ") && text.contains("of 2 ranks"), "{text}");
    let has = |words: &[&str]| text.lines().any(|line| words.iter().all(|word| line.contains(word)));
    assert!(has(&["0", "1", "4711", "node-3", "python train.py"]) && has(&["1", "4712", "node-3"]), "{text}");
    let shown = stdout(&store("show", folder.path(), &["--json", "--generation", "1"]));
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!((&shown["generation"], &shown["ranks"][1]["rank"]), (&1.into(), &1.into()), "{shown}");
    for action in ["show", "verify"] {
        let absent = store(action, folder.path(), &["--generation", "7"]);
        assert_eq!(absent.status.code(), Some(1));
        assert!(stderr(&absent).contains("the job has no generation 7; "), "{}", stderr(&absent));
    }
}

#[test]
fn where_nothing_is_stored_folders_in_it_that_have_something_are_named() {
    let around = tempfile::tempdir().unwrap();
    let path = around.path().display();
    for action in ["list", "show", "verify"] {
        let nothing = store(action, around.path(), &[]);
        assert_eq!((nothing.status.code(), stdout(&nothing)), (Some(1), String::new()), "{action}");
        let expected = format!("gpupool: store: {path}: no generation is stored there\n");
        assert_eq!(stderr(&nothing), expected, "{action}");
    }
    assert_eq!(stdout(&store("list", around.path(), &["--json"])), "[]\n");

    let image = folder();
    std::fs::rename(image.path(), around.path().join("suspended-1")).unwrap();
    std::fs::create_dir(around.path().join("other")).unwrap();
    for action in ["list", "show", "verify"] {
        let nothing = store(action, around.path(), &[]);
        assert_eq!((nothing.status.code(), stdout(&nothing)), (Some(1), String::new()), "{action}");
        let expected = format!(
            "gpupool: store: {path}: no generation is stored there; name the folder in it that has some: {path}/suspended-1\n"
        );
        assert_eq!(stderr(&nothing), expected, "{action}");
        let nowhere = store(action, std::path::Path::new("/no/such/folder"), &[]);
        assert_eq!(nowhere.status.code(), Some(1), "{action}");
        assert_eq!(stderr(&nowhere), "gpupool: store: /no/such/folder: there is no such folder\n", "{action}");
    }
}
