//! Writers that are killed, run out of disk, or write at once. Writers that must die are children: this test program again,
//! told by the environment what to do.

use super::fixture::*;
use nvbackend::operation::linear_product::LinearProduct;
use nvbackend::operation::Activation;
use nvbackend::registry::choices::Table;
use nvbackend::tensor::Tensor;
use nvbackend::weight::WeightView;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const TASK: &str = "NVB_TEST_TUNING_TASK";
const FILE: &str = "NVB_TEST_TUNING_FILE";

fn child(task: &str, file: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "processes::the_task_of_a_child", "--nocapture"]);
    command.env(TASK, task).env(FILE, file).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Does nothing unless this program was started by `child`.
#[test]
fn the_task_of_a_child() {
    let (Ok(task), Some(file)) = (std::env::var(TASK), std::env::var_os(FILE)) else { return };
    let file = Path::new(&file);
    let backend = backend(Some(file));
    match task.as_str() {
        "write for ever" => {
            for rows in (0..).map(|i| 1usize << (i % 30)) {
                backend.tuning().keep(&Table::from([entry(&backend, rows, "linear_cpu_64")]).into()).unwrap();
            }
        }
        "write on a full disk" => {
            // A limit on a file's size fails a write in the middle as a full disk does.
            // SAFETY: signals and limits of this process, whose only task this is.
            unsafe {
                libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
                let limit = libc::rlimit { rlim_cur: 300, rlim_max: 300 };
                assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &limit), 0);
            }
            let error = backend.tuning().keep(&Table::from([entry(&backend, 9, "linear_cpu_64")]).into()).unwrap_err();
            assert!(error.message.contains("File too large"), "{error}");
            std::process::exit(77);
        }
        other => panic!("{other}"),
    }
}

fn entries(file: &Path) -> usize {
    backend(Some(file)).executor().choices().entries().len()
}

#[test]
fn a_killed_writer_leaves_a_whole_file() {
    let folder = Folder::new();
    let file = folder.file();
    warnings(&file);
    let mut most = 0;
    for round in 0..12u64 {
        let mut writer = child("write for ever", &file);
        let start = Instant::now();
        while !file.exists() && start.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_micros(3000 + 1711 * round));
        writer.kill().unwrap();
        writer.wait().unwrap();
        let found = entries(&file);
        assert!(found >= most, "round {round}: {found} entries after {most}");
        most = found;
    }
    assert!(most > 0);
    assert_eq!(warnings(&file), [""; 0], "it was whole every time");
    // What the last one left beside the file is used again.
    let backend = backend(Some(&file));
    backend.tuning().keep(&Table::from([entry(&backend, 3, "linear_cpu_32")]).into()).unwrap();
    assert_eq!(folder.names(), ["tuning.json"]);
}

#[test]
fn a_full_disk_leaves_the_old_file() {
    let folder = Folder::new();
    let file = folder.file();
    let before = backend(Some(&file));
    before.tuning().keep(&Table::from([entry(&before, 3, "linear_cpu_64")]).into()).unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    let output = child("write on a full disk", &file).wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(77), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
    assert_eq!(folder.names(), ["tuning.json"]);
}

/// A file system that is full leaves the old file, where this process may mount one.
#[test]
fn a_full_file_system_leaves_the_old_file() {
    let folder = Folder::new();
    let place = folder.file().with_file_name("small");
    std::fs::create_dir(&place).unwrap();
    let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=16k", "none"]).arg(&place).output();
    if !mount.as_ref().is_ok_and(|output| output.status.success()) {
        println!("skipped: a tmpfs cannot be mounted here: {mount:?}");
        return;
    }
    let file = place.join("tuning.json");
    let before = backend(Some(&file));
    before.tuning().keep(&Table::from([entry(&before, 3, "linear_cpu_64")]).into()).unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    // Fills what is left.
    let _ = std::fs::write(place.join("ballast"), vec![1u8; 1 << 20]);
    let kept = before.tuning().keep(&Table::from([entry(&before, 9, "linear_cpu_64")]).into());
    let after = std::fs::read_to_string(&file);
    assert!(Command::new("umount").arg(&place).status().unwrap().success());
    assert!(kept.unwrap_err().message.contains("No space left"));
    assert_eq!(after.unwrap(), text);
}

#[test]
fn two_writers_lose_nothing() {
    let folder = Folder::new();
    let file = folder.file();
    warnings(&file);
    std::thread::scope(|scope| {
        for kernel in ["linear_cpu_32", "linear_cpu_64"] {
            let file = &file;
            scope.spawn(move || {
                let backend = backend(Some(file));
                let first = if kernel == "linear_cpu_32" { 0 } else { 10 };
                for bit in first..first + 10 {
                    backend.tuning().keep(&Table::from([entry(&backend, 1 << bit, kernel)]).into()).unwrap();
                }
            });
        }
    });
    assert_eq!(entries(&file), 20);
    assert_eq!(warnings(&file), [""; 0]);
}

#[test]
fn products_run_while_others_tune() {
    let folder = Folder::new();
    let backend = backend(Some(&folder.file()));
    let (rows, columns, k) = (3usize, 256usize, 96usize);
    let mut x: Vec<f32> = (0..rows * k).map(|i| (i % 13) as f32 - 6.0).collect();
    let mut w: Vec<f32> = (0..columns * k).map(|i| (i % 7) as f32 - 3.0).collect();
    let mut run = || {
        let mut y = vec![0.0f32; rows * columns];
        let weight = WeightView::float(w.as_mut_ptr().cast(), nvbackend::tensor::DType::F32, columns, k, k, false);
        let x = Tensor::of(&mut x, &[rows, k]);
        let op = LinearProduct::new(x, weight, None, Activation::None, Tensor::of(&mut y, &[rows, columns])).unwrap();
        backend.queue(op, backend.default_stream()).unwrap();
        y
    };
    let expected = run();
    std::thread::scope(|scope| {
        for turn in 0..2 {
            let backend = &backend;
            scope.spawn(move || {
                for rows in [1, 3, 9] {
                    let fast = ["linear_cpu_32", "linear_cpu_64"][turn];
                    let format = nvbackend::weight::Format::float(nvbackend::tensor::DType::F32);
                    let case = case_of(backend, rows, format);
                    tune(backend, &Spoiled::new(backend), Script::new([(fast, 0.5)]), &[case]);
                }
            });
        }
        for _ in 0..200 {
            assert!(run() == expected, "a choice changes no bit on the CPU");
        }
    });
    assert_eq!(backend.executor().choices().entries().len(), 3);
}
