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

#[test]
fn what_is_called_as_a_generation_and_is_none_stays_as_it_is_and_does_not_count() {
    let around = tempfile::tempdir().unwrap();
    let (folder, elsewhere) = (around.path().join("store"), around.path().join("elsewhere"));
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("precious"), "1").unwrap();
    let next = |keep| {
        let options = Options { keep, reuse: true, ..Options::default() };
        let written = store(&folder, options, &[memory(Kind::Random, 50_000, 1)]).unwrap();
        (written.generation, written.not_removed.clone())
    };
    assert_eq!(next(None), (1, None));
    fs::write(folder.join("gen-000010"), "x").unwrap();
    symlink(&elsewhere, folder.join("gen-000003")).unwrap();
    fs::create_dir_all(folder.join("gen-000005/sub")).unwrap();
    fs::write(folder.join("gen-000005/mine"), "x").unwrap();
    let numbers: Vec<_> = (0..5).map(|_| next(Some(2))).collect();
    assert_eq!(numbers, [2, 4, 6, 7, 8].map(|number| (number, None)), "no name is given twice");
    let mut names: Vec<_> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["gen-000003", "gen-000005", "gen-000007", "gen-000008", "gen-000010", "lock"]);
    assert!(folder.join("gen-000005/mine").is_file() && elsewhere.join("precious").is_file());
    // Whoever reads is told of them still.
    assert_eq!(list(&folder).unwrap().iter().filter(|listed| listed.told.is_err()).count(), 3);
}

#[test]
fn what_cannot_be_removed_is_told_and_the_rest_goes_and_new_generations_come() {
    let around = tempfile::tempdir().unwrap();
    let folder = around.path().join("store");
    let next = |keep| {
        let options = Options { keep, ..Options::default() };
        let written = store(&folder, options, &[memory(Kind::Random, 50_000, 1)]).unwrap();
        (written.generation, written.not_removed.as_ref().map(Error::to_string).unwrap_or_default())
    };
    (1..=3).for_each(|number| assert_eq!(next(None), (number, String::new())));
    // Somebody's, in an image; and what a removal has left that did not get to its end.
    fs::create_dir(folder.join("gen-000002/mine")).unwrap();
    let (number, why) = next(Some(1));
    assert!(number == 4 && why.contains("gen-000002/mine"), "{number}: {why}");
    let left: Vec<u64> = list(&folder).unwrap().into_iter().map(|listed| listed.generation).collect();
    assert_eq!(left, [4, 2]);
    assert_eq!(load(&folder, Which::Number(2)).unwrap(), [memory(Kind::Random, 50_000, 1)], "all of it or nothing");
    fs::remove_dir(folder.join("gen-000002/mine")).unwrap();
    fs::create_dir_all(folder.join(".gen-000001.gone/sub")).unwrap();
    fs::write(folder.join(".gen-000001.gone/data-00"), "x").unwrap();
    fs::create_dir_all(folder.join(".gen-000005.new/sub")).unwrap();
    for (number, keep) in [(6, None), (7, Some(1))] {
        let (written, why) = next(keep);
        assert!(written == number && why.contains(".gen-0000"), "{written}: {why}");
    }
    assert!(!folder.join(".gen-000001.gone/data-00").exists());
    let why = gpupool_store::keep(&folder, 1).unwrap_err().to_string();
    assert!(why.contains("cannot remove"), "{why}");
    for name in [".gen-000001.gone/sub", ".gen-000005.new/sub"] {
        fs::remove_dir(folder.join(name)).unwrap();
    }
    assert_eq!(next(Some(1)), (8, String::new()));
    let mut names: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort_unstable();
    assert_eq!(names, ["gen-000008", "lock"]);
}
