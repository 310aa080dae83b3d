//! What a tuning file may be, and what becomes of it.

use super::fixture::*;
use nvbackend::backend::Backend;
use nvbackend::registry::choices::Table;
use nvbackend::tuning::file::MARK;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// A file with one entry, by a backend of its own.
fn write(file: &Path, rows: usize) {
    let backend = backend(Some(file));
    let (key, entry) = entry(&backend, rows, "linear_cpu_64");
    backend.tuning().keep(&Table::from([(key, entry)]).into()).unwrap();
}

fn entries(file: &Path) -> usize {
    backend(Some(file)).executor().choices().entries().len()
}

#[test]
fn choices_outlive_their_backend_and_are_merged() {
    let folder = Folder::new();
    let file = folder.file();
    assert_eq!(entries(&file), 0, "no file is no error");
    write(&file, 3);
    // This backend opened the file when it had nothing in it.
    let first = backend(Some(&file));
    write(&file, 9);
    let (key, entry) = entry(&first, 100, "linear_cpu_128");
    first.tuning().keep(&Table::from([(key, entry)]).into()).unwrap();
    let second = backend(Some(&file));
    assert_eq!(second.executor().choices().entries().len(), 3);
    assert_eq!(second.executor().choices().entries().products[&key], entry);
    assert_eq!(folder.names(), ["tuning.json"], "nothing is left beside it");
    assert_eq!(warnings(&file), [""; 0]);
}

/// The text changed in one way: the file is not used, one warning says why, and the next tuning replaces it.
fn refused(change: impl FnOnce(String) -> Vec<u8>, why: &str) {
    let folder = Folder::new();
    let file = folder.file();
    warnings(&file);
    write(&file, 3);
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, change(text)).unwrap();
    assert_eq!(entries(&file), 0, "{why}");
    let said = warnings(&file);
    assert!(said.len() == 1 && said[0].contains("is not used") && said[0].contains(why), "{said:?}");
    write(&file, 9);
    assert_eq!(entries(&file), 1, "{why}");
}

#[test]
fn damaged_files_are_replaced() {
    refused(|text| text[..text.len() / 2].into(), "EOF");
    refused(|text| text[..20].into(), "EOF");
    refused(|_| Vec::new(), "EOF");
    refused(|text| text.replace("\"candidates\":3", "\"candidates\":-3").into(), "is damaged");
    refused(|text| text.replace("linear_cpu_64", "linear_cpu_65").into(), "is damaged");
    refused(|text| text.replace("m4 n256", "m5 n256").into(), "is damaged");
    refused(|text| format!("{text}x").into(), "trailing characters");
    refused(
        |text| {
            let mut bytes = text.into_bytes();
            let last = bytes.len() - 3;
            bytes[last] = 0xff;
            bytes
        },
        "UTF-8",
    );
}

#[test]
fn files_of_elsewhere_and_of_other_versions_are_not_used() {
    let changed = |name: &'static str| {
        move |text: String| {
            let line = text.lines().find(|line| line.contains(&format!("\"{name}\": "))).unwrap().to_string();
            text.replace(&line, &format!("  \"{name}\": \"another\",")).into_bytes()
        }
    };
    for name in ["format", "device", "architecture", "multiprocessors", "driver", "cublaslt", "build"] {
        refused(changed(name), &format!("its {name} is \"another\""));
    }
    refused(|text| text.replace("  \"driver\": \"\",\n", "").into(), "it names no driver");
    refused(|text| text.replace("\n  \"linear\"", "\n  \"news\": 1,\n  \"linear\"").into(), "does not know");
}

#[test]
fn a_file_of_something_else_stays_as_it_is() {
    let folder = Folder::new();
    let file = folder.file();
    for text in ["{\"weights\": 7}\n", "hello", "\u{0}\u{1}\u{2}"] {
        std::fs::write(&file, text).unwrap();
        let backend = backend(Some(&file));
        let error = backend.tuning().keep(&Table::from([entry(&backend, 3, "linear_cpu_64")]).into()).unwrap_err();
        assert!(error.message.contains("something else"), "{error}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
        assert_eq!(folder.names(), ["tuning.json"]);
    }
    // A part of our own beginning is ours.
    std::fs::write(&file, &MARK[..10]).unwrap();
    write(&file, 3);
    assert_eq!(entries(&file), 1);
}

#[test]
fn a_read_only_file_is_read_and_not_replaced() {
    let folder = Folder::new();
    let file = folder.file();
    write(&file, 3);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o444)).unwrap();
    let before = std::fs::read_to_string(&file).unwrap();
    let backend = backend(Some(&file));
    assert_eq!(backend.executor().choices().entries().len(), 1);
    let error = backend.tuning().keep(&Table::from([entry(&backend, 9, "linear_cpu_64")]).into()).unwrap_err();
    assert!(error.message.contains("read-only"), "{error}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), before);
}

#[test]
fn a_file_that_vanished_is_written_anew() {
    let folder = Folder::new();
    let file = folder.file();
    write(&file, 3);
    let backend = backend(Some(&file));
    std::fs::remove_file(&file).unwrap();
    backend.tuning().keep(&Table::from([entry(&backend, 9, "linear_cpu_64")]).into()).unwrap();
    assert_eq!(entries(&file), 1);
    // With its folder there is no place for it, and the choices hold all the same.
    std::fs::remove_dir_all(file.parent().unwrap()).unwrap();
    let table = Table::from([entry(&backend, 3, "linear_cpu_64")]);
    assert!(backend.tuning().keep(&table.clone().into()).unwrap_err().message.contains("No such file"));
}

#[test]
fn a_folder_or_a_device_is_no_file() {
    let folder = Folder::new();
    let file = folder.file();
    warnings(&file);
    std::fs::create_dir(&file).unwrap();
    assert_eq!(entries(&file), 0);
    assert_eq!(warnings(&file).len(), 1);
    for path in ["/dev/zero", "/dev/full"] {
        let backend = backend(Some(Path::new(path)));
        assert!(backend.tuning().keep(&Table::from([entry(&backend, 3, "linear_cpu_64")]).into()).is_err(), "{path}");
    }
}

#[test]
fn a_link_stays_a_link() {
    let folder = Folder::new();
    let (file, link) = (folder.file(), folder.file().with_file_name("link.json"));
    write(&file, 3);
    std::os::unix::fs::symlink(&file, &link).unwrap();
    write(&link, 9);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!((entries(&file), entries(&link)), (2, 2));
}

#[test]
fn products_run_by_what_the_file_says() {
    let folder = Folder::new();
    let file = folder.file();
    let first = backend(Some(&file));
    let case = case(&first, 3);
    let script = || Script::new([("linear_cpu_32", 0.5)]);
    let (_, _, found) = tune(&first, &Spoiled::new(&first), script(), &[case]);
    let second: Backend = backend(Some(&file));
    let op = case.shape().unwrap();
    assert_eq!(second.executor().choices().of(&op).next(), Some(found[&key(&first, &case)].choice));
}
