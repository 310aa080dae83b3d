//! A folder that stands in for a machine's / in tests, removed when dropped.

use super::system::System;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

pub struct Fixture(PathBuf);

impl Fixture {
    pub fn new() -> Fixture {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("nvbackend-fixture-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Fixture(folder)
    }

    pub fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub fn system(&self) -> System {
        System::at(&self.0)
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
