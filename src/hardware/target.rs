//! Devices by name, those that are not here too: what a graph is validated for.

use super::{cpu_device, devices, environment, gpu_at};
use crate::configuration::selector::Selector;
use crate::device::features::{architecture_name, Features};
use crate::device::{DeviceInfo, DeviceKind};
use crate::error::{Error, Result};
use crate::graph::finding::Target;

const GIB: u64 = 1 << 30;

/// Products with their compute capability (NVIDIA's page "CUDA GPU Compute Capability") and the memory that their data sheets
/// name; their GB are taken as GiB.
const PRODUCTS: &[(&str, i32, u64)] = &[
    ("V100 16GB", 70, 16),
    ("V100 32GB", 70, 32),
    ("T4", 75, 16),
    ("RTX 2080 Ti", 75, 11),
    ("A100 40GB", 80, 40),
    ("A100 80GB", 80, 80),
    ("A30", 80, 24),
    ("A10", 86, 24),
    ("A40", 86, 48),
    ("RTX A6000", 86, 48),
    ("RTX 3060", 86, 12),
    ("RTX 3090", 86, 24),
    ("RTX 4080", 89, 16),
    ("RTX 4090", 89, 24),
    ("L4", 89, 24),
    ("L40", 89, 48),
    ("L40S", 89, 48),
    ("H100", 90, 80),
    ("H200", 90, 141),
    ("B200", 100, 180),
    ("RTX 5080", 120, 16),
    ("RTX 5090", 120, 32),
];

/// The device that `text` names: "cpu", "cuda", "cuda:N" and "auto" of this machine; a compute capability such as "9.0"; or a
/// product such as "H100" or "NVIDIA GeForce RTX 4090", of which case and the maker's words do not count.
pub fn target(text: &str) -> Result<Target> {
    if let Some(info) = of_capability(text)?.or_else(|| of_product(text)) {
        return Ok(Target {
            info,
            here: false,
            own: false,
            cublaslt: None,
            architectures: environment().architectures,
        });
    }
    let info = match Selector::parse(text) {
        Ok(Selector::Auto) => {
            devices().iter().find(|device| device.obstacle.is_empty()).unwrap_or(cpu_device()).clone()
        }
        Ok(Selector::Cpu) => cpu_device().clone(),
        Ok(Selector::Cuda(ordinal)) => gpu_at(ordinal)?.clone(),
        Ok(Selector::Tpu(ordinal)) => {
            let obstacle = "there is no executor for TPUs".to_string();
            DeviceInfo { name: format!("TPU {ordinal}"), obstacle, ..DeviceInfo::new(DeviceKind::Tpu, ordinal) }
        }
        Err(_) => return Err(unknown(text)),
    };
    Ok(here(info))
}

/// Of a device of this machine.
pub fn here(info: DeviceInfo) -> Target {
    let library = environment().libraries.iter().find(|library| library.name == "cuBLASLt");
    let cublaslt = library.map(|library| !library.path.is_empty());
    Target { info, here: true, own: false, cublaslt, architectures: environment().architectures }
}

fn unknown(text: &str) -> Error {
    let names: Vec<&str> = PRODUCTS.iter().map(|product| product.0).collect();
    Error::invalid(format!(
        "device is \"{text}\"; \"cpu\", \"cuda:N\", a compute capability such as \"9.0\", or one of {} is needed",
        names.join(", ")
    ))
}

fn of_gpu(name: &str, capability: i32, total_memory: u64) -> DeviceInfo {
    DeviceInfo {
        name: name.to_string(),
        architecture: architecture_name(capability).to_string(),
        compute_capability: capability,
        total_memory,
        features: Features::of_capability(capability),
        ..DeviceInfo::new(DeviceKind::Cuda, 0)
    }
}

/// "9.0"; an error for numbers that are no capability of any GPU that this library knows of.
fn of_capability(text: &str) -> Result<Option<DeviceInfo>> {
    let number = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse::<u8>().ok())?;
    let Some((major, minor)) = text.split_once('.') else { return Ok(None) };
    let (Some(major), Some(minor)) = (number(major), number(minor)) else { return Ok(None) };
    let capability = 10 * i32::from(major) + i32::from(minor);
    if minor > 9 || architecture_name(capability) == "unknown" {
        return Err(unknown(text));
    }
    Ok(Some(of_gpu(&format!("a GPU of compute capability {text}"), capability, 0)))
}

fn of_product(text: &str) -> Option<DeviceInfo> {
    let plain = |name: &str| -> String {
        let words = name.split([' ', '-']).map(str::to_lowercase);
        words.filter(|word| !["", "nvidia", "geforce", "tesla"].contains(&word.as_str())).collect()
    };
    let wanted = plain(text);
    let (name, capability, memory) = PRODUCTS.iter().find(|(name, ..)| plain(name) == wanted)?;
    Some(of_gpu(name, *capability, memory * GIB))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_known_by_capability_and_by_product() {
        let info = |text: &str| target(text).unwrap().info;
        assert_eq!((info("9.0").compute_capability, info("9.0").total_memory), (90, 0));
        assert_eq!(info("12.0").compute_capability, 120);
        for name in ["H200", "h200", "NVIDIA H200", "nvidia-h200"] {
            assert_eq!((info(name).compute_capability, info(name).total_memory), (90, 141 * GIB), "{name}");
        }
        assert!(
            info("NVIDIA GeForce RTX 4090").features.has(Features::FP8)
                && !info("A100-80GB").features.has(Features::FP8)
        );
        assert!(info("cpu").kind == DeviceKind::Cpu && target("cpu").unwrap().here && !target("T4").unwrap().here);
        assert_eq!(info("tpu:0").obstacle, "there is no executor for TPUs");
    }

    #[test]
    fn a_name_that_is_none_is_answered_with_those_that_are() {
        for wrong in
            ["", "H1000", "nvidia", "9", "9.", ".0", "9.0a", "+9.0", "9.10", "1.0", "255.9", "4090", "cuda:x", "é"]
        {
            let error = target(wrong).err().unwrap_or_else(|| panic!("{wrong:?} is taken"));
            assert!(error.message.contains("RTX 4090"), "{wrong:?}: {}", error.message);
        }
    }
}
