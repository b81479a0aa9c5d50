//! Whose folder it is, who may write there, and how much room it has.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

mod common;

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use common::{Kind, load, memory, meta, store};
use gpupool_store::{Error, JobWriter, Options, Reader, Which, Writer, is_image, list, may_be_own, own_folder};

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn nobody_else_can_look_into_what_is_stored() {
    let around = tempfile::tempdir().unwrap();
    let folder = around.path().join("store");
    drop(store(&folder, Options::default(), &[memory(Kind::Random, 50_000, 1)]).unwrap());
    assert_eq!(mode(&folder), 0o700);
    assert_eq!(mode(&folder.join("gen-000001")), 0o700);
    for name in ["lock", "gen-000001/manifest", "gen-000001/data-00"] {
        // A thread that had nothing to do has no file.
        if folder.join(name).exists() || name != "gen-000001/data-00" {
            assert_eq!(mode(&folder.join(name)), 0o600, "{name}");
        }
    }
}

#[test]
fn a_folder_of_a_number_that_nobody_reaches_is_passed_over() {
    let around = tempfile::tempdir().unwrap();
    let folder = around.path().join("store");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, Permissions::from_mode(0o700)).unwrap();
    for name in ["gen-18446744073709551615", "gen-18446744073709551614"] {
        fs::create_dir(folder.join(name)).unwrap();
    }
    for generation in 1..=2 {
        drop(store(&folder, Options::default(), &[memory(Kind::Random, 50_000, 1)]).unwrap());
        assert!(folder.join(format!("gen-{generation:06}")).join("manifest").exists(), "{generation}");
    }
}

/// It would go with the one that it is in, which nobody could remove with what was not written for it.
#[test]
fn nothing_is_written_into_an_image() {
    let around = tempfile::tempdir().unwrap();
    let folder = around.path().join("store");
    drop(store(&folder, Options::default(), &[memory(Kind::Random, 50_000, 1)]).unwrap());
    let image = folder.join("gen-000001");
    let copy = around.path().join("saved");
    fs::create_dir(&copy).unwrap();
    fs::set_permissions(&copy, Permissions::from_mode(0o700)).unwrap();
    fs::copy(image.join("manifest"), copy.join("manifest")).unwrap();
    for (into, image) in [(image.clone(), &image), (image.join("sub"), &image), (copy.clone(), &copy)] {
        let expected = format!(
            "{}: {} is an image itself, and would have others inside it; name the folder around it, or another one",
            into.display(),
            image.display()
        );
        let names = |folder: &Path| fs::read_dir(folder).unwrap().count();
        let before = names(image);
        assert_eq!(Writer::create(&into, meta(), Options::default()).err().unwrap().to_string(), expected);
        assert_eq!(JobWriter::create(&into).err().unwrap().to_string(), expected);
        assert_eq!(own_folder(&into).unwrap_err().to_string(), expected);
        assert_eq!(may_be_own(&into).unwrap_err().to_string(), expected);
        assert_eq!(names(image), before);
    }
    assert!(is_image(&image) && is_image(&copy) && !is_image(&folder) && !is_image(&around.path().join("none")));
    drop(Reader::open(&folder, Which::Newest, 1).unwrap());
}

#[test]
fn whether_a_folder_could_be_had_is_told_without_making_it() {
    let around = tempfile::tempdir().unwrap();
    let new = around.path().join("new");
    may_be_own(&new).unwrap();
    assert!(!new.exists());
    let deeper = new.join("deeper");
    let why = may_be_own(&deeper).unwrap_err().to_string();
    assert_eq!(why, own_folder(&deeper).unwrap_err().to_string());
    assert!(
        why.ends_with(&format!("the folder around it, {}, has to be there and is not; make it first", new.display()))
    );
    own_folder(&new).unwrap();
    may_be_own(&new).unwrap();
    fs::set_permissions(&new, Permissions::from_mode(0o770)).unwrap();
    assert_eq!(may_be_own(&new).unwrap_err(), own_folder(&new).unwrap_err());
}

/// A slip in a number is no damage.
#[test]
fn a_generation_that_is_not_there_is_told_apart_from_one_that_is_damaged() {
    let around = tempfile::tempdir().unwrap();
    let folder = around.path().join("store");
    drop(store(&folder, Options::default(), &[memory(Kind::Random, 50_000, 1)]).unwrap());
    let absent = gpupool_store::verify(&folder, Some(9), 1).unwrap_err();
    assert_eq!(absent, Error::Absent { path: folder.join("gen-000009") });
    fs::write(folder.join("gen-000001/manifest"), "").unwrap();
    assert_eq!(gpupool_store::verify(&folder, Some(1), 1).unwrap()[0].wrong.len(), 1);
}

#[test]
fn a_folder_that_others_may_change_is_refused() {
    let around = tempfile::tempdir().unwrap();
    let folder = around.path().join("store");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, Permissions::from_mode(0o770)).unwrap();
    let error = Writer::create(&folder, meta(), Options::default()).err().unwrap();
    assert_eq!(error.to_string(), format!("{}: others may write to it (mode 770); chmod 700 it", folder.display()));
    fs::set_permissions(&folder, Permissions::from_mode(0o1777)).unwrap();
    let error = Writer::create(&folder, meta(), Options::default()).err().unwrap();
    let expected = format!("{}: others may write to it (mode 1777); name a folder of your own in it", folder.display());
    assert_eq!(error.to_string(), expected, "as /tmp, which must stay so");
    fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
    drop(Writer::create(&folder, meta(), Options::default()).unwrap());
    fs::set_permissions(around.path(), Permissions::from_mode(0o777)).unwrap();
    let error = Writer::create(&folder, meta(), Options::default()).err().unwrap();
    let expected = format!(
        "{}: {} lets others replace it; choose a folder inside one that its owner alone may write to (mode 700)",
        folder.display(),
        around.path().display()
    );
    assert_eq!(error.to_string(), expected);
}

/// Only the last folder of a path is made.
#[test]
fn a_folder_in_one_that_is_not_there_is_told_so() {
    let around = tempfile::tempdir().unwrap();
    let above = around.path().join("none/x");
    let folder = above.join("y");
    let error = Writer::create(&folder, meta(), Options::default()).err().unwrap();
    let expected = format!(
        "{}: the folder around it, {}, has to be there and is not; make it first",
        folder.display(),
        above.display()
    );
    assert_eq!(error.to_string(), expected);
    assert!(!around.path().join("none").exists());
}

#[test]
fn a_folder_that_is_named_by_one_in_it_is_that_folder() {
    let around = tempfile::tempdir().unwrap();
    let folder = around.path().join("store");
    fs::create_dir_all(folder.join("inner")).unwrap();
    fs::set_permissions(&folder, Permissions::from_mode(0o700)).unwrap();
    drop(store(&folder.join("inner/.."), Options::default(), &[memory(Kind::Random, 50_000, 1)]).unwrap());
    assert!(folder.join("gen-000001").is_dir());
    assert_eq!(list(&folder.join("inner/..")).unwrap().len(), 1);
    let gone = folder.join("gone/..");
    let error = Writer::create(&gone, meta(), Options::default()).err().unwrap();
    assert_eq!(error.to_string(), format!("{}: it ends in .., and there is no such folder", gone.display()));
}

#[test]
fn another_users_folder_is_refused() {
    let around = tempfile::tempdir().unwrap();
    let folder = around.path().join("store");
    fs::create_dir(&folder).unwrap();
    // Only root may give a folder away; everybody else finds root's.
    let folder = match std::os::unix::fs::chown(&folder, Some(65534), None) {
        Ok(()) => folder,
        Err(_) => "/usr/lib".into(),
    };
    let error = Writer::create(&folder, meta(), Options::default()).err().unwrap();
    assert!(matches!(&error, Error::Refused { why, .. } if why.contains("it is of user ")), "{error}");
}

#[test]
fn links_are_not_followed() {
    let around = tempfile::tempdir().unwrap();
    let (folder, elsewhere) = (around.path().join("store"), around.path().join("elsewhere"));
    let blocks = [memory(Kind::Random, 50_000, 1)];
    drop(store(&elsewhere, Options { threads: 1, ..Options::default() }, &blocks).unwrap());
    symlink(&elsewhere, &folder).unwrap();
    let error = store(&folder, Options::default(), &blocks).unwrap_err();
    assert_eq!(error.to_string(), format!("{}: it is a link or no folder", folder.display()));
    let data = elsewhere.join("gen-000001/data-00");
    fs::rename(&data, around.path().join("data")).unwrap();
    symlink(around.path().join("data"), &data).unwrap();
    let error = Reader::open(&elsewhere, Which::Newest, 1).unwrap_err();
    assert_eq!(error.to_string(), format!("{}: it is a link", data.display()));
}

#[test]
fn a_second_writer_is_told_who_the_first_one_is() {
    let folder = tempfile::tempdir().unwrap();
    let blocks = [memory(Kind::Text, 10_000, 1)];
    let first = Writer::create(folder.path(), meta(), Options::default()).unwrap();
    let refused =
        format!("{}: process {} uses this folder; choose another one", folder.path().display(), std::process::id());
    assert_eq!(store(folder.path(), Options::default(), &blocks).unwrap_err().to_string(), refused);
    // What is whole stays in the hands of who wrote it.
    let written = first.finish().unwrap();
    assert_eq!(gpupool_store::remove(folder.path(), 1).unwrap_err().to_string(), refused);
    written.remove().unwrap();
    assert!(list(folder.path()).unwrap().is_empty());
    drop(store(folder.path(), Options::default(), &blocks).unwrap());
    assert_eq!(load(folder.path(), Which::Newest).unwrap(), blocks);
}

#[test]
fn too_little_room_is_seen_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let error =
        Writer::create(folder.path(), meta(), Options { expected: 1 << 60, ..Options::default() }).err().unwrap();
    assert!(error.is_full());
    let Error::NoRoom { path, needed, free } = &error else { panic!("{error}") };
    assert!(path == folder.path() && *needed > 1 << 60 && *free > 0, "{error}");
    let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["lock"]);
}

#[test]
fn a_folder_that_vanishes_or_is_replaced_is_an_error_that_names_it() {
    let around = tempfile::tempdir().unwrap();
    let folder = around.path().join("store");
    let begin = || {
        let writer = Writer::create(&folder, meta(), Options::default()).unwrap();
        let block = writer.block(common::about(1, 100_000)).unwrap();
        writer.write(block, 0, &memory(Kind::Random, 100_000, 1)).unwrap();
        writer
    };
    let writer = begin();
    // A thread of the writer may make a file in the middle of that.
    while folder.exists() {
        let _ = fs::remove_dir_all(&folder);
    }
    let said = writer.finish().unwrap_err().to_string();
    assert!(said.starts_with(folder.to_str().unwrap()) && said.contains("No such file"), "{said}");
    let writer = begin();
    fs::rename(&folder, around.path().join("old")).unwrap();
    fs::create_dir(&folder).unwrap();
    let said = writer.finish().unwrap_err().to_string();
    assert_eq!(said, format!("{}: another folder took its place meanwhile", folder.display()));
}
