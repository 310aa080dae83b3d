//! The operations of the CPU at every instruction set that it has, and not only at the widest. All kernels of a process run
//! at one level, so each other level has a process of its own, to which `NVB_TEST_LEVEL` names it.

use nvbackend::simd::Level;
use std::process::Command;

const VARIABLE: &str = "NVB_TEST_LEVEL";

macro_rules! modules {
    ($($kind:ident $name:ident;)+) => {
        [$(concat!(stringify!($name), "::"),)+ "argmax::", "rope::", "sample::"]
    };
}

/// The modules whose cases run at every level. Products, embeddings and attention have unit tests that do so.
const OPERATIONS: &[&str] = &nvbackend::plain_operations!(modules);

/// Called before the first backend is made.
pub fn force() {
    let Ok(wanted) = std::env::var(VARIABLE) else { return };
    let level = Level::supported().find(|level| format!("{level:?}") == wanted);
    level.unwrap_or_else(|| panic!("{VARIABLE} is {wanted:?}, which this CPU does not have")).force();
}

#[test]
fn every_level_of_the_cpu_passes() {
    if std::env::var("NVB_TEST_DEVICE").is_ok_and(|name| !name.is_empty() && name != "cpu") {
        println!("skipped: NVB_TEST_DEVICE names another device than the CPU");
        return;
    }
    for level in Level::supported().filter(|&level| level != Level::best()) {
        let program = std::env::current_exe().expect("a test has a program");
        let mut command = Command::new(program);
        command.args(OPERATIONS).env("NVB_TEST_DEVICE", "cpu").env(VARIABLE, format!("{level:?}"));
        let output = command.output().expect("the program starts again");
        let text = String::from_utf8_lossy(&output.stdout);
        let of = |name: &&str| text.contains(&format!("test {name}"));
        assert!(output.status.success() && OPERATIONS.iter().all(of), "{level:?}: {}\n{text}", output.status);
    }
}
