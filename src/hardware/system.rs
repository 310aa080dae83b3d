//! /sys, /proc and /dev below a root: `/` in life, a folder of fixtures in tests.

use std::path::{Path, PathBuf};
use std::str::FromStr;

pub struct System {
    root: PathBuf,
}

impl System {
    pub fn live() -> System {
        System::at("/")
    }

    pub fn at(root: impl AsRef<Path>) -> System {
        System { root: root.as_ref().to_path_buf() }
    }

    /// Where `path` (without a leading slash) lies.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    pub fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// A file's text without the white space around it; `None` if it cannot be read.
    pub fn text(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.path(path)).ok().map(|text| text.trim().to_string())
    }

    pub fn number<T: FromStr>(&self, path: &str) -> Option<T> {
        self.text(path)?.parse().ok()
    }

    /// The names in a folder, sorted, those ending in a number by that number; none if it cannot be read.
    pub fn names(&self, folder: &str) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path(folder)) else { return Vec::new() };
        let mut names: Vec<String> = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
        names.sort_by_cached_key(|name| {
            let prefix = name.trim_end_matches(|digit: char| digit.is_ascii_digit());
            (prefix.to_string(), name[prefix.len()..].parse::<u64>().unwrap_or(0), name.clone())
        });
        names
    }

    /// Why this process cannot open `path` for reading and writing, as the system words it; `None` if it can.
    pub fn refusal(&self, path: &str) -> Option<String> {
        let opened = std::fs::OpenOptions::new().read(true).write(true).open(self.path(path));
        opened.err().map(|error| error.to_string())
    }
}

/// The numbers of a kernel list such as "0-3,8,10-11"; what is not a number or a range is left out.
pub fn parse_list(text: &str) -> Vec<usize> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<usize>(), last.trim().parse::<usize>()) {
            // More processors than any kernel is built for would be a file that is not a list.
            if last < 1 << 16 {
                numbers.extend(first..=last);
            }
        }
    }
    numbers
}

/// Bytes of "48K", "2048K", "32M" or "512 kB"; `None` for anything else.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic() || letter == ' ');
    let unit: u64 = match text[digits.len()..].trim() {
        "" => 1,
        "K" | "kB" => 1 << 10,
        "M" | "MB" => 1 << 20,
        "G" | "GB" => 1 << 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

/// Bytes of the line "name:   123 kB" in the manner of /proc/meminfo.
pub fn find_bytes(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.trim_start().strip_prefix(name)?.strip_prefix(':'))?;
    parse_bytes(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_sizes_are_read_as_the_kernel_writes_them() {
        assert_eq!(parse_list("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert!(parse_list("").is_empty());
        assert_eq!(parse_list("x,2-y,5,3-1"), [5]);
        assert!(parse_list("0-99999999999").is_empty());
        assert_eq!(parse_bytes("48K"), Some(49152));
        assert_eq!(parse_bytes("32M"), Some(32 << 20));
        assert_eq!(parse_bytes(" 7 kB "), Some(7 << 10));
        assert_eq!(parse_bytes("12"), Some(12));
        assert_eq!(parse_bytes("12 stones"), None);
        assert_eq!(parse_bytes("99999999999999999999G"), None);
        assert_eq!(find_bytes("MemTotal:  10 kB\nMemFree: 4 kB\n", "MemFree"), Some(4096));
        assert_eq!(find_bytes("MemTotal:  10 kB\n", "Mem"), None);
    }

    #[test]
    fn names_are_sorted_by_their_number() {
        let folder = crate::hardware::fixture::Fixture::new();
        for name in ["cpu10", "cpu2", "cpufreq", "cpu0"] {
            folder.write(&format!("sys/{name}/x"), "1");
        }
        assert_eq!(folder.system().names("sys"), ["cpu0", "cpu2", "cpu10", "cpufreq"]);
        assert!(folder.system().names("none").is_empty());
        assert!(folder.system().refusal("dev/none").is_some());
        assert_eq!(folder.system().refusal("sys/cpu0/x"), None);
    }
}
