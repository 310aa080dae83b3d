//! The host's processor and the software around the devices.

use super::prelude::*;
use crate::hardware::{self, cpu::CacheKind, system::System};

/// The host's processor. A number that the system does not tell is 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_cpu_profile {
    pub struct_size: usize,
    pub name: [c_char; 128],
    pub vendor: [c_char; 32],
    /// "x86_64" or "aarch64".
    pub architecture: [c_char; 16],
    /// Separated by spaces, with the names of Linux's /proc/cpuinfo: "avx2 avx512f amx_tile".
    pub instruction_sets: [c_char; 256],
    pub sockets: u32,
    /// Physical cores.
    pub cores: u32,
    /// Hardware threads that are online.
    pub threads: u32,
    /// Threads that this process may keep busy: affinity and a container's quota count.
    pub available_threads: u32,
    pub maximum_mhz: u32,
    /// For `nvb_hardware_get_numa_node`; 0 on a machine without NUMA support.
    pub numa_nodes: u32,
    /// Bytes of core 0's caches.
    pub l1_data_bytes: u64,
    pub l1_instruction_bytes: u64,
    pub l2_bytes: u64,
    pub l3_bytes: u64,
    /// Hardware threads that share core 0's third level.
    pub l3_shared_by: u32,
    pub cache_line_bytes: u32,
    /// Bytes of main memory.
    pub total_memory: u64,
    /// The container's limit in bytes; 0: none.
    pub memory_limit: u64,
}

/// A part of the machine whose processors and memory are near each other.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_numa_node {
    pub struct_size: usize,
    /// The system's number of the node.
    pub id: u32,
    /// Hardware threads in it.
    pub threads: u32,
    pub total_memory: u64,
    /// Bytes free at the time of the call.
    pub free_memory: u64,
    /// The first 64 numbers of its hardware threads; the rest of the array is −1.
    pub thread_numbers: [i32; 64],
}

/// Driver, runtime and build. Versions are 1000 · major + 10 · minor of CUDA.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_environment {
    pub struct_size: usize,
    /// What the driver supports; 0 without a driver.
    pub driver_version: i32,
    /// The version of the CUDA runtime in this library; 0 in a build without CUDA.
    pub runtime_version: i32,
    /// For `nvb_hardware_get_library`.
    pub libraries: u32,
    /// Must be 0.
    pub reserved: u32,
    /// NVIDIA's kernel module, such as "580.95.05"; empty if none is loaded.
    pub kernel_module: [c_char; 32],
    /// The running Linux kernel.
    pub kernel: [c_char; 64],
    /// Architectures with kernels in this build, such as "80;90a".
    pub architectures: [c_char; 96],
    /// The reason, in a sentence or two, why no CUDA device can be used, and what to do about it; empty if one can.
    pub obstacle: [c_char; 512],
}

/// A library of the machine's: the CUDA driver, NVML and cuBLASLt, which are used where they are found, and NCCL and libtpu,
/// which nothing uses yet and which are listed for the reader.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_library {
    pub struct_size: usize,
    /// 1 if it was found.
    pub found: u32,
    /// The number that the library gives; 0 if it gives none.
    pub version: i32,
    pub name: [c_char; 32],
    /// Where it was found.
    pub path: [c_char; 256],
    /// Why it was not: the dynamic loader's words.
    pub reason: [c_char; 256],
}
versioned!(nvb_cpu_profile, nvb_numa_node, nvb_environment, nvb_library);

/// `list[index]`, or an error that names the index.
pub(super) fn element<'a, T>(name: &str, list: &'a [T], index: u32) -> Result<&'a T> {
    list.get(index as usize).ok_or_else(|| {
        Error::invalid(format!("{name} index {index}; there are {}", list.len()))
            .with_limit(index.into(), list.len() as u64)
    })
}

/// Describes the host's processor; set `profile->struct_size` first. Detected once a process; touches no GPU driver.
#[no_mangle]
pub unsafe extern "C" fn nvb_hardware_get_cpu_profile(profile: *mut nvb_cpu_profile) -> nvb_status {
    guard!(nvb_hardware_get_cpu_profile, {
        let cpu = hardware::cpu();
        let instruction_cache = cpu.caches.iter().find(|cache| cache.kind == CacheKind::Instruction);
        let third = cpu.caches.iter().find(|cache| cache.level == 3);
        let sets: Vec<&str> = cpu.instruction_sets.names().collect();
        let value = copied!(nvb_cpu_profile from cpu {
            maximum_mhz, total_memory, memory_limit;
            name: fixed_text(&cpu.name),
            vendor: fixed_text(&cpu.vendor),
            architecture: fixed_text(cpu.architecture),
            instruction_sets: fixed_text(&sets.join(" ")),
            sockets: cpu.sockets as u32,
            cores: cpu.cores as u32,
            threads: cpu.threads as u32,
            available_threads: cpu.available_threads as u32,
            numa_nodes: cpu.numa_nodes.len() as u32,
            l1_data_bytes: cpu.cache_bytes(1),
            l1_instruction_bytes: instruction_cache.map_or(0, |cache| cache.bytes),
            l2_bytes: cpu.cache_bytes(2),
            l3_bytes: cpu.cache_bytes(3),
            l3_shared_by: third.map_or(0, |cache| cache.shared_by as u32),
            cache_line_bytes: cpu.caches.first().map_or(0, |cache| cache.line_bytes),
        });
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(profile, &value) }
    })
}

/// Describes the NUMA node at `index` (below `nvb_cpu_profile.numa_nodes`); set `node->struct_size` first. Reads /sys.
#[no_mangle]
pub unsafe extern "C" fn nvb_hardware_get_numa_node(index: u32, node: *mut nvb_numa_node) -> nvb_status {
    guard!(nvb_hardware_get_numa_node, {
        let nodes = hardware::cpu::numa_nodes(&System::live());
        let found = element("NUMA node", &nodes, index)?;
        let mut value = copied!(nvb_numa_node from found {
            total_memory, free_memory;
            id: found.id as u32,
            threads: found.threads.len() as u32,
            thread_numbers: [-1; 64],
        });
        for (place, thread) in value.thread_numbers.iter_mut().zip(&found.threads) {
            *place = *thread as i32;
        }
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(node, &value) }
    })
}

/// Describes driver, runtime and build; set `environment->struct_size` first. The first call opens each optional library
/// for a moment, which may take tens of milliseconds; later ones read what it found.
#[no_mangle]
pub unsafe extern "C" fn nvb_hardware_get_environment(environment: *mut nvb_environment) -> nvb_status {
    guard!(nvb_hardware_get_environment, {
        let found = hardware::environment();
        let value = copied!(nvb_environment from found {
            driver_version, runtime_version;
            libraries: found.libraries.len() as u32,
            reserved: 0,
            kernel_module: fixed_text(&found.kernel_module),
            kernel: fixed_text(&found.kernel),
            architectures: fixed_text(found.architectures),
            obstacle: fixed_text(&found.obstacle),
        });
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(environment, &value) }
    })
}

/// Describes the optional library at `index` (below `nvb_environment.libraries`); set `library->struct_size` first.
#[no_mangle]
pub unsafe extern "C" fn nvb_hardware_get_library(index: u32, library: *mut nvb_library) -> nvb_status {
    guard!(nvb_hardware_get_library, {
        let found = element("library", &hardware::environment().libraries, index)?;
        let value = nvb_library {
            struct_size: 0,
            found: (!found.path.is_empty()).into(),
            version: found.version,
            name: fixed_text(&found.name),
            path: fixed_text(&found.path),
            reason: fixed_text(&found.reason),
        };
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(library, &value) }
    })
}
