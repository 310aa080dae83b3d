//! TPUs: chips on the PCI bus or as device files, their generation, and the library that would drive them.
//!
//! Nothing is opened but the device files, and no metadata server is asked: libtpu itself may wait for one for minutes.
//! Generations by PCI device number: the table of JAX (jax/_src/hardware_utils.py). Memory, bandwidth and
//! arithmetic of a chip: the Cloud TPU documentation (cloud.google.com/tpu/docs/system-architecture-tpu-vm).

use super::system::System;
use crate::device::{features::Features, DeviceInfo, DeviceKind};
use std::path::PathBuf;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Generation {
    Unknown,
    V2,
    V3,
    V4,
    V5e,
    V5p,
    V6e,
    V7x,
}

struct Published {
    generation: Generation,
    name: &'static str,
    /// How TPU_ACCELERATOR_TYPE starts on it.
    accelerator_type: &'static str,
    memory: u64,
    bandwidth: u64,
    /// BF16 operations per second.
    operations: u64,
}

const GB: u64 = 1_000_000_000;
const TERA: u64 = 1_000_000_000_000;

const PUBLISHED: [Published; 7] = [
    row(Generation::V7x, "TPU7x", "tpu7x", 192 << 30, 7380 * GB, 2307 * TERA),
    row(Generation::V6e, "TPU v6e", "v6e", 32 << 30, 1640 * GB, 918 * TERA),
    row(Generation::V5p, "TPU v5p", "v5p", 95 << 30, 2765 * GB, 459 * TERA),
    row(Generation::V5e, "TPU v5e", "v5litepod", 16 << 30, 819 * GB, 197 * TERA),
    row(Generation::V4, "TPU v4", "v4", 32 << 30, 1228 * GB, 275 * TERA),
    row(Generation::V3, "TPU v3", "v3", 32 << 30, 900 * GB, 123 * TERA),
    row(Generation::V2, "TPU v2", "v2", 16 << 30, 700 * GB, 46 * TERA),
];

const fn row(
    generation: Generation,
    name: &'static str,
    accelerator_type: &'static str,
    memory: u64,
    bandwidth: u64,
    operations: u64,
) -> Published {
    Published { generation, name, accelerator_type, memory, bandwidth, operations }
}

impl Generation {
    fn published(self) -> Option<&'static Published> {
        PUBLISHED.iter().find(|row| row.generation == self)
    }

    pub fn name(self) -> &'static str {
        self.published().map_or("TPU", |row| row.name)
    }

    /// Bytes of a chip's memory; 0 if the generation is not known.
    pub fn memory(self) -> u64 {
        self.published().map_or(0, |row| row.memory)
    }

    /// Bytes per second of a chip's memory; 0 likewise.
    pub fn bandwidth(self) -> u64 {
        self.published().map_or(0, |row| row.bandwidth)
    }

    /// BF16 operations of a chip per second; 0 likewise.
    pub fn operations(self) -> u64 {
        self.published().map_or(0, |row| row.operations)
    }

    fn of_pci(device: &str, subsystem: &str) -> Option<Generation> {
        Some(match (device, subsystem) {
            ("0x0027", "0x004e") => Generation::V2,
            ("0x0027", _) => Generation::V3,
            ("0x005e", _) => Generation::V4,
            ("0x0062", _) => Generation::V5p,
            ("0x0063", _) => Generation::V5e,
            ("0x006f", _) => Generation::V6e,
            ("0x0076", _) => Generation::V7x,
            _ => return None,
        })
    }

    /// From a slice's name such as "v5litepod-8".
    fn of_accelerator_type(name: &str) -> Generation {
        let row = PUBLISHED.iter().find(|row| name.starts_with(row.accelerator_type));
        row.map_or(Generation::Unknown, |row| row.generation)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chip {
    pub generation: Generation,
    /// "0000:00:05.0"; empty if only its device file is visible.
    pub pci_bus_id: String,
    /// −1 if the system does not say.
    pub numa_node: i32,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tpus {
    pub chips: Vec<Chip>,
    /// Where libtpu lies: TPU_LIBRARY_PATH, else a system folder.
    pub library: Option<PathBuf>,
    /// Why the chips cannot be opened; empty if they can be, or if there are none.
    pub refusal: String,
}

const GOOGLE: &str = "0x1ae0";

impl Tpus {
    /// `variable` looks an environment variable up.
    pub fn detect(system: &System, variable: impl Fn(&str) -> Option<String>) -> Tpus {
        let mut chips = chips_on_pci(system);
        let files = device_files(system);
        if chips.is_empty() {
            // A container may show the device files and hide the bus.
            let type_name = variable("TPU_ACCELERATOR_TYPE").unwrap_or_default();
            let generation = Generation::of_accelerator_type(&type_name);
            // Groups of VFIO may be of any device, but that a known TPU is there says so of these.
            let is_chip = |file: &&String| file.starts_with("dev/accel") || generation != Generation::Unknown;
            chips.extend(files.iter().filter(is_chip).map(|_| Chip {
                generation,
                pci_bus_id: String::new(),
                numa_node: -1,
            }));
        }
        if chips.is_empty() {
            return Tpus { library: library(system, &variable), ..Tpus::default() };
        }
        let refusal = match files.first() {
            None => "no device file: neither /dev/accel0 nor /dev/vfio/0 is there".to_string(),
            Some(file) => {
                system.refusal(file).map(|reason| format!("/{file} cannot be opened: {reason}")).unwrap_or_default()
            }
        };
        Tpus { chips, library: library(system, &variable), refusal }
    }

    /// The chips as devices.
    pub fn devices(&self) -> impl Iterator<Item = DeviceInfo> + '_ {
        let obstacle = match self.refusal.as_str() {
            "" => "this build has no executor for TPUs".to_string(),
            refusal => format!("this build has no executor for TPUs; besides, {refusal}"),
        };
        self.chips.iter().enumerate().map(move |(ordinal, chip)| DeviceInfo {
            name: chip.generation.name().to_string(),
            architecture: chip.generation.name().to_string(),
            pci_bus_id: chip.pci_bus_id.clone(),
            numa_node: chip.numa_node,
            total_memory: chip.generation.memory(),
            peak_bandwidth: chip.generation.bandwidth(),
            features: Features::BF16,
            obstacle: obstacle.clone(),
            ..DeviceInfo::new(DeviceKind::Tpu, ordinal as i32)
        })
    }
}

fn chips_on_pci(system: &System) -> Vec<Chip> {
    let folder = "sys/bus/pci/devices";
    let names = system.names(folder);
    let read = |name: &String| {
        let text = |file: &str| system.text(&format!("{folder}/{name}/{file}")).unwrap_or_default();
        if text("vendor") != GOOGLE {
            return None;
        }
        Some(Chip {
            generation: Generation::of_pci(&text("device"), &text("subsystem_device"))?,
            pci_bus_id: name.clone(),
            numa_node: text("numa_node").parse().unwrap_or(-1),
        })
    };
    names.iter().filter_map(read).collect()
}

/// /dev/accel0, … of Google's driver, or the numbered groups of VFIO that v5 and later use.
fn device_files(system: &System) -> Vec<String> {
    let numbered = |name: &str, prefix: &str| {
        name.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let mut files = Vec::new();
    files.extend(system.names("dev").iter().filter(|name| numbered(name, "accel")).map(|name| format!("dev/{name}")));
    files.extend(
        system.names("dev/vfio").iter().filter(|name| numbered(name, "")).map(|name| format!("dev/vfio/{name}")),
    );
    files
}

fn library(system: &System, variable: &impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    if let Some(path) = variable("TPU_LIBRARY_PATH") {
        let path = PathBuf::from(path);
        return path.is_file().then_some(path);
    }
    let folders = ["usr/lib", "usr/local/lib", "lib"];
    folders.iter().map(|folder| system.path(&format!("{folder}/libtpu.so"))).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::fixture::Fixture;

    fn pci(fixture: &Fixture, slot: &str, vendor: &str, device: &str) {
        let folder = format!("sys/bus/pci/devices/{slot}");
        fixture.write(&format!("{folder}/vendor"), vendor);
        fixture.write(&format!("{folder}/device"), device);
        fixture.write(&format!("{folder}/numa_node"), "1");
    }

    #[test]
    fn chips_are_found_on_the_bus() {
        let fixture = Fixture::new();
        pci(&fixture, "0000:00:05.0", "0x1ae0\n", "0x0062\n");
        pci(&fixture, "0000:00:04.0", "0x1ae0\n", "0x0062\n");
        pci(&fixture, "0000:00:06.0", "0x1ae0\n", "0x0042\n"); // Google's network adapter
        pci(&fixture, "0000:00:07.0", "0x10de\n", "0x0062\n");
        fixture.write("dev/vfio/vfio", "");
        fixture.write("dev/vfio/0", "");
        fixture.write("usr/lib/libtpu.so", "");
        let tpus = Tpus::detect(&fixture.system(), |_| None);
        assert_eq!(tpus.chips.len(), 2);
        assert_eq!(tpus.chips[0].pci_bus_id, "0000:00:04.0");
        assert_eq!((tpus.chips[0].generation, tpus.chips[0].numa_node), (Generation::V5p, 1));
        assert_eq!(tpus.library, Some(fixture.system().path("usr/lib/libtpu.so")));
        assert_eq!(tpus.refusal, "");
    }

    #[test]
    fn a_container_without_the_bus_is_told_by_its_device_files() {
        let fixture = Fixture::new();
        for file in ["dev/accel0", "dev/accel1", "dev/accel_foreign"] {
            fixture.write(file, "");
        }
        let variable = |name: &str| (name == "TPU_ACCELERATOR_TYPE").then(|| "v5litepod-8".to_string());
        let tpus = Tpus::detect(&fixture.system(), variable);
        assert_eq!(tpus.chips.len(), 2);
        assert_eq!(tpus.chips[1].generation, Generation::V5e);
        let unnamed = Tpus::detect(&fixture.system(), |_| None);
        assert_eq!((unnamed.chips[0].generation.name(), unnamed.chips[0].generation.memory()), ("TPU", 0));
    }

    #[test]
    fn a_container_with_groups_of_vfio_alone_needs_the_accelerator_type() {
        let fixture = Fixture::new();
        for file in ["dev/vfio/0", "dev/vfio/1", "dev/vfio/vfio"] {
            fixture.write(file, "");
        }
        let of_type = |accelerator: &'static str| {
            Tpus::detect(&fixture.system(), move |name| {
                (name == "TPU_ACCELERATOR_TYPE").then(|| accelerator.to_string())
            })
        };
        let tpus = of_type("v6e-8");
        let generations: Vec<_> = tpus.chips.iter().map(|chip| chip.generation).collect();
        assert_eq!((generations, tpus.refusal.as_str()), (vec![Generation::V6e; 2], ""));
        assert!(of_type("").chips.is_empty() && of_type("h100").chips.is_empty(), "any device may be behind them");
    }

    #[test]
    fn a_chip_without_a_device_file_says_so() {
        let fixture = Fixture::new();
        pci(&fixture, "0000:00:04.0", "0x1ae0", "0x005e");
        let tpus = Tpus::detect(&fixture.system(), |_| None);
        assert!(tpus.refusal.contains("/dev/accel0"), "{}", tpus.refusal);
    }

    #[test]
    fn nothing_is_found_where_nothing_is() {
        assert_eq!(Tpus::detect(&Fixture::new().system(), |_| None), Tpus::default());
        let named = Tpus::detect(&Fixture::new().system(), |name| {
            (name == "TPU_LIBRARY_PATH").then(|| "/no/such/libtpu.so".to_string())
        });
        assert_eq!(named.library, None);
    }

    #[test]
    fn generations_are_ordered_by_age_and_named() {
        assert!(
            Generation::V5p > Generation::V5e && Generation::V6e > Generation::V5p && Generation::V4 < Generation::V5e
        );
        assert_eq!(Generation::of_accelerator_type("v5p-128"), Generation::V5p);
        assert_eq!(Generation::of_accelerator_type("h100"), Generation::Unknown);
        assert_eq!(Generation::of_pci("0x0027", "0x004e"), Some(Generation::V2));
        assert_eq!(Generation::of_pci("0x0027", "0x004f"), Some(Generation::V3));
    }
}
