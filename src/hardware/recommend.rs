//! Which device suits a workload: the devices present, ranked, with a reason for each place.
//!
//! The default order is by class: Hopper and Blackwell, TPU v5p and later, A100, TPU v4 and v5e, other NVIDIA GPUs, the
//! rest, the CPU. Inside a class the figure that bounds the workload decides. Test work turns the order round: it wants
//! a device that is always there and that others do not wait for.

use super::tpu::Generation;
use crate::device::{features::Features, DeviceInfo, DeviceKind};
use crate::error::numbered;
use std::cmp::Reverse;

numbered! {
    pub enum Workload: u32 {
        /// Long prompts, short answers: bounded by arithmetic.
        Prefill = 0,
        /// Short prompts, long answers: bounded by memory bandwidth.
        Decode = 1,
        /// Bounded by arithmetic and by memory size.
        Training = 2,
        /// Bounded by patience.
        Test = 3,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    Cpu,
    OlderTpu,
    OtherNvidia,
    TpuV4,
    A100,
    TpuV5p,
    Hopper,
}

fn class(device: &DeviceInfo) -> Class {
    match device.kind {
        DeviceKind::Cpu => Class::Cpu,
        DeviceKind::Cuda if device.compute_capability >= 90 => Class::Hopper,
        DeviceKind::Cuda if device.compute_capability == 80 => Class::A100,
        DeviceKind::Cuda => Class::OtherNvidia,
        DeviceKind::Tpu => match generation(device) {
            Generation::V5p | Generation::V6e | Generation::V7x => Class::TpuV5p,
            Generation::V4 | Generation::V5e => Class::TpuV4,
            Generation::V2 | Generation::V3 | Generation::Unknown => Class::OlderTpu,
        },
    }
}

fn generation(device: &DeviceInfo) -> Generation {
    use Generation::{V5e, V5p, V6e, V7x, V2, V3, V4};
    let known = [V2, V3, V4, V5e, V5p, V6e, V7x].into_iter();
    known.into_iter().find(|generation| generation.name() == device.architecture).unwrap_or(Generation::Unknown)
}

/// Dense 16-bit multiply-adds of one multiprocessor in one clock, the figure that arithmetic-bound work scales with;
/// source: the architecture white papers (V100, Turing, A100, GA102, AD102, H100, Blackwell).
fn multiply_adds_per_clock(capability: i32) -> u64 {
    match capability {
        100..=103 => 4096,
        90 => 2048,
        80 => 1024,
        70..=121 => 512,
        _ => 128,
    }
}

/// 16-bit multiply-adds per microsecond: comparable between GPUs only or TPUs only, as is all that ranks inside a class.
fn arithmetic(device: &DeviceInfo) -> u64 {
    if device.kind == DeviceKind::Tpu {
        return generation(device).operations() / 2_000_000;
    }
    let per_clock = multiply_adds_per_clock(device.compute_capability);
    device.multiprocessors.max(0) as u64 * device.clock_mhz.max(0) as u64 * per_clock
}

#[derive(Debug, Clone, PartialEq)]
pub struct Recommendation {
    /// Index in the devices that were ranked.
    pub index: usize,
    pub reason: String,
}

/// Every device, the best first. Devices that cannot run now keep their place and say what stands in the way.
pub fn recommend(devices: &[DeviceInfo], workload: Workload) -> Vec<Recommendation> {
    let mut order: Vec<usize> = (0..devices.len()).collect();
    let figure = |device: &DeviceInfo| match workload {
        Workload::Prefill => (arithmetic(device), device.peak_bandwidth),
        Workload::Decode => (device.peak_bandwidth, arithmetic(device)),
        Workload::Training => (arithmetic(device), device.total_memory),
        Workload::Test => (device.total_memory, arithmetic(device)),
    };
    // The sort is stable, so equal devices keep the machine's order.
    order.sort_by_key(|&index| Reverse((class(&devices[index]), figure(&devices[index]))));
    if workload == Workload::Test {
        order.sort_by_key(|&index| (class(&devices[index]), figure(&devices[index])));
    }
    order.into_iter().map(|index| Recommendation { index, reason: reason(&devices[index], workload) }).collect()
}

fn reason(device: &DeviceInfo, workload: Workload) -> String {
    let standing = match class(device) {
        Class::Hopper => format!("{} is of the fastest class here", device.architecture),
        Class::TpuV5p => format!("{} comes next to Hopper and Blackwell", device.name),
        Class::A100 => "the A100 class comes after Hopper, Blackwell and TPU v5p".to_string(),
        Class::TpuV4 => format!("{} comes after the A100 class", device.name),
        Class::OtherNvidia => format!("an NVIDIA GPU of the {} generation", device.architecture),
        Class::OlderTpu => "a TPU older than v4 or of an unknown generation".to_string(),
        Class::Cpu => "the CPU is always there".to_string(),
    };
    let gigabytes = device.total_memory as f64 / (1u64 << 30) as f64;
    let bandwidth = match device.peak_bandwidth {
        0 => "an unknown bandwidth".to_string(),
        rate => format!("{:.0} GB/s", rate as f64 / 1e9),
    };
    let fit = match (workload, device.kind) {
        (Workload::Decode, DeviceKind::Cpu) => "decoding runs at the speed of main memory".to_string(),
        (Workload::Decode, _) => format!("decoding is bounded by memory bandwidth: {bandwidth}"),
        (Workload::Prefill, DeviceKind::Cpu) => {
            format!("prefill is bounded by arithmetic: {} threads", device.multiprocessors)
        }
        (Workload::Prefill, DeviceKind::Cuda) => format!(
            "prefill is bounded by arithmetic: {} multiprocessors at {} MHz",
            device.multiprocessors, device.clock_mhz
        ),
        (Workload::Prefill, DeviceKind::Tpu) => match generation(device).operations() {
            0 => "prefill is bounded by arithmetic, which is not known of it".to_string(),
            rate => format!("prefill is bounded by arithmetic: {} TFLOP/s in BF16", rate / 1_000_000_000_000),
        },
        (Workload::Training, _) => format!(
            "training needs arithmetic and memory: {gigabytes:.0} GiB, {} BF16",
            if device.features.has(Features::BF16) { "with" } else { "without" }
        ),
        (Workload::Test, DeviceKind::Cpu) => {
            "its executor is the reference and leaves the accelerators free".to_string()
        }
        (Workload::Test, _) => format!("tests take the smallest accelerator first: {gigabytes:.0} GiB"),
    };
    match device.obstacle.as_str() {
        "" => format!("{standing}; {fit}"),
        obstacle => format!("{standing}; {fit}; cannot run now: {obstacle}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(
        ordinal: i32,
        name: &str,
        capability: i32,
        multiprocessors: i32,
        gigabytes: u64,
        bandwidth: u64,
    ) -> DeviceInfo {
        DeviceInfo {
            name: name.to_string(),
            architecture: crate::device::features::architecture_name(capability).to_string(),
            compute_capability: capability,
            multiprocessors,
            clock_mhz: 1700,
            total_memory: gigabytes << 30,
            peak_bandwidth: bandwidth * 1_000_000_000,
            features: Features::of_capability(capability),
            ..DeviceInfo::new(DeviceKind::Cuda, ordinal)
        }
    }

    fn tpu(ordinal: i32, generation: Generation) -> DeviceInfo {
        DeviceInfo {
            name: generation.name().to_string(),
            architecture: generation.name().to_string(),
            total_memory: generation.memory(),
            peak_bandwidth: generation.bandwidth(),
            obstacle: "this build has no executor for TPUs".to_string(),
            ..DeviceInfo::new(DeviceKind::Tpu, ordinal)
        }
    }

    fn zoo() -> Vec<DeviceInfo> {
        vec![
            gpu(0, "L4", 89, 58, 24, 300),
            gpu(1, "A100", 80, 108, 80, 2039),
            gpu(2, "H100", 90, 132, 80, 3352),
            gpu(3, "H200", 90, 132, 141, 4800),
            gpu(4, "B200", 100, 148, 180, 8000),
            tpu(0, Generation::V5p),
            tpu(1, Generation::V5e),
            tpu(2, Generation::V3),
            DeviceInfo { name: "CPU".into(), multiprocessors: 64, ..DeviceInfo::new(DeviceKind::Cpu, 0) },
        ]
    }

    fn names(workload: Workload) -> Vec<String> {
        let devices = zoo();
        recommend(&devices, workload).iter().map(|place| devices[place.index].name.clone()).collect()
    }

    #[test]
    fn the_default_order_is_kept() {
        let order = ["B200", "H200", "H100", "TPU v5p", "A100", "TPU v5e", "L4", "TPU v3", "CPU"];
        assert_eq!(names(Workload::Decode), order);
        assert_eq!(names(Workload::Training), order);
    }

    #[test]
    fn prefill_prefers_arithmetic_inside_a_class() {
        let mut devices = zoo();
        devices[2].clock_mhz = 1980; // an H100 that clocks higher than the H200
        let order = recommend(&devices, Workload::Prefill);
        assert_eq!(devices[order[1].index].name, "H100");
        assert_eq!(recommend(&devices, Workload::Decode)[1].index, 3, "decode still takes the H200's bandwidth");
    }

    #[test]
    fn tpus_of_a_class_are_ranked_by_what_bounds_the_workload() {
        let devices = [
            tpu(0, Generation::V5e),
            tpu(1, Generation::V4),
            tpu(2, Generation::V5p),
            tpu(3, Generation::V6e),
            tpu(4, Generation::V7x),
            tpu(5, Generation::Unknown),
            tpu(6, Generation::V2),
            tpu(7, Generation::V3),
        ];
        let order =
            |workload| -> Vec<usize> { recommend(&devices, workload).iter().map(|place| place.index).collect() };
        assert_eq!(order(Workload::Prefill), [4, 3, 2, 1, 0, 7, 6, 5]);
        assert_eq!(order(Workload::Decode), [4, 2, 3, 1, 0, 7, 6, 5]);
        let places = recommend(&devices, Workload::Prefill);
        assert!(places[1].reason.contains("arithmetic: 918 TFLOP/s"), "{}", places[1].reason);
        assert!(places[7].reason.contains("not known"), "{}", places[7].reason);
    }

    #[test]
    fn tests_take_the_cpu_first() {
        let order = names(Workload::Test);
        assert_eq!(order[0], "CPU");
        assert_eq!(order.last().unwrap(), "B200");
    }

    #[test]
    fn equal_devices_keep_their_order_and_every_place_has_a_reason() {
        let devices = vec![gpu(0, "H200", 90, 132, 141, 4800), gpu(1, "H200", 90, 132, 141, 4800)];
        for code in 0..4 {
            let order = recommend(&devices, Workload::from_code(code).unwrap());
            assert_eq!(order.iter().map(|place| place.index).collect::<Vec<_>>(), [0, 1]);
        }
        for place in recommend(&zoo(), Workload::Decode) {
            assert!(place.reason.len() > 20, "{}", place.reason);
        }
        let places = recommend(&zoo(), Workload::Decode);
        assert!(places[0].reason.contains("8000 GB/s") && places[3].reason.contains("cannot run now"));
        assert!(recommend(&[], Workload::Test).is_empty());
        assert_eq!(Workload::from_code(4), None);
    }
}
