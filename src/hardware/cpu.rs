//! The host's processor: cores, caches, instruction sets, NUMA nodes, memory and what a container allows of them.

use super::instruction_sets::InstructionSets;
use super::system::{find_bytes, parse_bytes, parse_list, System};
use crate::device::{features::Features, DeviceInfo, DeviceKind};
use std::collections::BTreeSet;

#[derive(Debug, Clone, PartialEq, Default)]
pub struct CpuProfile {
    /// The processor's own name, else the architecture's.
    pub name: String,
    pub vendor: String,
    /// "x86_64", "aarch64"
    pub architecture: &'static str,
    pub sockets: usize,
    /// Physical cores.
    pub cores: usize,
    /// Hardware threads that are online.
    pub threads: usize,
    /// Threads that this process may keep busy: affinity and the container's quota count.
    pub available_threads: usize,
    /// The highest frequency of core 0; 0 if the system does not say.
    pub maximum_mhz: u32,
    pub caches: Vec<Cache>,
    pub instruction_sets: InstructionSets,
    pub numa_nodes: Vec<NumaNode>,
    pub total_memory: u64,
    /// The container's limit; 0: none.
    pub memory_limit: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheKind {
    Data,
    Instruction,
    Unified,
}

/// One cache as core 0 sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cache {
    pub level: u32,
    pub kind: CacheKind,
    pub bytes: u64,
    pub line_bytes: u32,
    /// Hardware threads that share it.
    pub shared_by: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNode {
    pub id: usize,
    pub threads: Vec<usize>,
    pub total_memory: u64,
    /// When it was asked for.
    pub free_memory: u64,
}

impl CpuProfile {
    /// `available_threads` and what cpuid knows come from the process, everything else from `system`.
    pub fn detect(system: &System) -> CpuProfile {
        let cpuinfo = system.text("proc/cpuinfo").unwrap_or_default();
        let field = |key: &str| {
            cpuinfo.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                (name.trim() == key).then(|| value.trim().to_string())
            })
        };
        let online = online_threads(system, &cpuinfo);
        let mut cores = BTreeSet::new();
        let mut sockets = BTreeSet::new();
        for thread in &online {
            let place =
                |name: &str| system.number::<i64>(&format!("sys/devices/system/cpu/cpu{thread}/topology/{name}"));
            let socket = place("physical_package_id").unwrap_or(0);
            sockets.insert(socket);
            cores.insert((socket, place("core_id").unwrap_or(*thread as i64)));
        }
        let meminfo = system.text("proc/meminfo").unwrap_or_default();
        CpuProfile {
            name: field("model name").unwrap_or_else(|| std::env::consts::ARCH.to_string()),
            vendor: field("vendor_id").unwrap_or_default(),
            architecture: std::env::consts::ARCH,
            sockets: sockets.len(),
            cores: cores.len(),
            threads: online.len(),
            available_threads: std::thread::available_parallelism().map_or(1, usize::from),
            maximum_mhz: system
                .number::<u32>("sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
                .map_or(0, |khz| khz / 1000),
            caches: caches(system),
            instruction_sets: InstructionSets::parse(&cpuinfo),
            numa_nodes: numa_nodes(system),
            total_memory: find_bytes(&meminfo, "MemTotal").unwrap_or(0),
            memory_limit: memory_limit(system),
        }
    }

    /// Describes the processor as a device.
    pub fn device(&self) -> DeviceInfo {
        let sets = self.instruction_sets;
        let features = Features::default()
            .with(Features::F16, sets.has("avx512_fp16"))
            .with(Features::BF16, ["avx512_bf16", "amx_bf16", "bf16"].iter().any(|set| sets.has(set)))
            .with(Features::UNIFIED_ADDRESSING, true);
        DeviceInfo {
            name: self.name.clone(),
            architecture: self.architecture.to_string(),
            multiprocessors: self.available_threads as i32,
            total_memory: self.usable_memory(),
            l2_bytes: self.cache_bytes(2),
            features,
            clock_mhz: self.maximum_mhz as i32,
            ..DeviceInfo::new(DeviceKind::Cpu, 0)
        }
    }

    /// The size of one core's data or unified cache of this level; 0 if there is none or the system does not say.
    pub fn cache_bytes(&self, level: u32) -> u64 {
        let of_data = |cache: &&Cache| cache.level == level && cache.kind != CacheKind::Instruction;
        self.caches.iter().find(of_data).map_or(0, |cache| cache.bytes)
    }

    /// Bytes that this process can count on at most: the machine's memory or the container's limit.
    pub fn usable_memory(&self) -> u64 {
        match self.memory_limit {
            0 => self.total_memory,
            limit => limit.min(self.total_memory),
        }
    }
}

/// /sys's list, else the processors of /proc/cpuinfo, else one.
fn online_threads(system: &System, cpuinfo: &str) -> Vec<usize> {
    let listed = system.text("sys/devices/system/cpu/online").map(|text| parse_list(&text)).unwrap_or_default();
    if !listed.is_empty() {
        return listed;
    }
    let processors = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
    (0..processors.max(1)).collect()
}

fn caches(system: &System) -> Vec<Cache> {
    let folder = "sys/devices/system/cpu/cpu0/cache";
    let names = system.names(folder);
    let indices = names.iter().filter(|name| name.starts_with("index"));
    let read = |name: &String| {
        let text = |file: &str| system.text(&format!("{folder}/{name}/{file}"));
        Some(Cache {
            level: text("level")?.parse().ok()?,
            kind: match text("type")?.as_str() {
                "Data" => CacheKind::Data,
                "Instruction" => CacheKind::Instruction,
                _ => CacheKind::Unified,
            },
            bytes: parse_bytes(&text("size")?)?,
            line_bytes: text("coherency_line_size").and_then(|text| text.parse().ok()).unwrap_or(0),
            shared_by: text("shared_cpu_list").map_or(1, |text| parse_list(&text).len().max(1)),
        })
    };
    indices.filter_map(read).collect()
}

/// A machine without NUMA support has no nodes here.
pub fn numa_nodes(system: &System) -> Vec<NumaNode> {
    let folder = "sys/devices/system/node";
    let names = system.names(folder);
    let read = |name: &String| {
        let id = name.strip_prefix("node")?.parse().ok()?;
        let text = |file: &str| system.text(&format!("{folder}/{name}/{file}")).unwrap_or_default();
        let memory = text("meminfo");
        // Its lines start with "Node 0".
        let bytes = |field: &str| {
            memory.lines().find_map(|line| find_bytes(line.trim_start().strip_prefix(&format!("Node {id} "))?, field))
        };
        Some(NumaNode {
            id,
            threads: parse_list(&text("cpulist")),
            total_memory: bytes("MemTotal").unwrap_or(0),
            free_memory: bytes("MemFree").unwrap_or(0),
        })
    };
    names.iter().filter_map(read).collect()
}

/// The smallest limit of control groups version 2 and 1 that a container sees at its root; 0: none.
fn memory_limit(system: &System) -> u64 {
    let files = ["sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limits = files.iter().filter_map(|file| system.number::<u64>(file));
    // Version 1 writes "no limit" as the largest number of pages.
    limits.filter(|limit| *limit < 1 << 60).min().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::fixture::Fixture;

    /// Two sockets of two cores with two threads each; one thread is offline.
    fn two_sockets() -> Fixture {
        let fixture = Fixture::new();
        fixture.write(
            "proc/cpuinfo",
            "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon 8480\nflags\t\t: avx2 amx_tile\n",
        );
        fixture.write("proc/meminfo", "MemTotal:       1024 kB\nMemAvailable:    512 kB\n");
        fixture.write("sys/devices/system/cpu/online", "0-6\n");
        for thread in 0..7 {
            let folder = format!("sys/devices/system/cpu/cpu{thread}/topology");
            fixture.write(&format!("{folder}/physical_package_id"), &format!("{}\n", thread / 4));
            fixture.write(&format!("{folder}/core_id"), &format!("{}\n", thread / 2 % 2));
        }
        fixture.write("sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "3800000\n");
        for (index, level, kind, size, shared) in [
            (0, 1, "Data", "48K", "0-1"),
            (1, 1, "Instruction", "32K", "0-1"),
            (2, 2, "Unified", "2048K", "0-1"),
            (3, 3, "Unified", "105M", "0-3"),
        ] {
            let folder = format!("sys/devices/system/cpu/cpu0/cache/index{index}");
            fixture.write(&format!("{folder}/level"), &format!("{level}\n"));
            fixture.write(&format!("{folder}/type"), kind);
            fixture.write(&format!("{folder}/size"), size);
            fixture.write(&format!("{folder}/coherency_line_size"), "64");
            fixture.write(&format!("{folder}/shared_cpu_list"), shared);
        }
        for (node, list) in [(0, "0-3"), (1, "4-6")] {
            let folder = format!("sys/devices/system/node/node{node}");
            fixture.write(&format!("{folder}/cpulist"), list);
            fixture.write(
                &format!("{folder}/meminfo"),
                &format!("Node {node} MemTotal:        600 kB\nNode {node} MemFree:          {} kB\n", 100 + node),
            );
        }
        fixture
    }

    #[test]
    fn a_server_is_read_in_full() {
        let fixture = two_sockets();
        let profile = CpuProfile::detect(&fixture.system());
        assert_eq!((profile.name.as_str(), profile.vendor.as_str()), ("Xeon 8480", "GenuineIntel"));
        assert_eq!((profile.sockets, profile.cores, profile.threads, profile.maximum_mhz), (2, 4, 7, 3800));
        assert_eq!(
            (profile.cache_bytes(1), profile.cache_bytes(2), profile.cache_bytes(3)),
            (48 << 10, 2 << 20, 105 << 20)
        );
        assert_eq!(profile.cache_bytes(4), 0);
        assert_eq!((profile.caches[3].shared_by, profile.caches[3].line_bytes), (4, 64));
        assert!(profile.instruction_sets.has("amx_tile"));
        assert_eq!(profile.numa_nodes.len(), 2);
        assert_eq!(profile.numa_nodes[1].threads, [4, 5, 6]);
        assert_eq!((profile.numa_nodes[1].total_memory, profile.numa_nodes[1].free_memory), (600 << 10, 101 << 10));
        assert_eq!((profile.total_memory, profile.usable_memory()), (1 << 20, 1 << 20));
    }

    #[test]
    fn a_container_s_limit_counts_and_no_limit_does_not() {
        let fixture = two_sockets();
        fixture.write("sys/fs/cgroup/memory.max", "max\n");
        assert_eq!(CpuProfile::detect(&fixture.system()).memory_limit, 0);
        fixture.write("sys/fs/cgroup/memory.max", "524288\n");
        assert_eq!(CpuProfile::detect(&fixture.system()).usable_memory(), 524288);
        fixture.write("sys/fs/cgroup/memory.max", "max\n");
        fixture.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(CpuProfile::detect(&fixture.system()).memory_limit, 0);
    }

    #[test]
    fn an_empty_system_is_one_nameless_core() {
        let profile = CpuProfile::detect(&Fixture::new().system());
        assert_eq!(profile.name, std::env::consts::ARCH);
        assert_eq!((profile.sockets, profile.cores, profile.threads, profile.total_memory), (1, 1, 1, 0));
        assert!(profile.caches.is_empty() && profile.numa_nodes.is_empty());
    }

    #[test]
    fn this_machine_has_cores_and_memory() {
        let profile = CpuProfile::detect(&System::live());
        assert!(profile.cores >= 1 && profile.threads >= profile.cores && profile.available_threads >= 1);
        assert!(profile.total_memory > 0);
    }
}
