//! The instruction sets that the CPU has and the system has enabled.

/// What an executor may choose kernels by. The names are those of Linux's /proc/cpuinfo; the order is the bit's number.
pub const INSTRUCTION_SETS: [&str; 18] = [
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
];

/// A set of [`INSTRUCTION_SETS`], one bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InstructionSets(pub u64);

impl InstructionSets {
    /// Reads the sets that a "flags" (x86) or "Features" (aarch64) line of /proc/cpuinfo names.
    pub fn parse(cpuinfo: &str) -> InstructionSets {
        let line = cpuinfo.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            matches!(key.trim(), "flags" | "Features").then_some(value)
        });
        let mut sets = InstructionSets::default();
        for flag in line.unwrap_or_default().split_ascii_whitespace() {
            if let Some(bit) = INSTRUCTION_SETS.iter().position(|name| *name == flag) {
                sets.0 |= 1 << bit;
            }
        }
        sets
    }

    pub fn has(self, name: &str) -> bool {
        INSTRUCTION_SETS.iter().position(|set| *set == name).is_some_and(|bit| self.0 >> bit & 1 != 0)
    }

    pub fn names(self) -> impl Iterator<Item = &'static str> {
        INSTRUCTION_SETS.iter().enumerate().filter(move |(bit, _)| self.0 >> bit & 1 != 0).map(|(_, name)| *name)
    }

    /// What cpuid says (x86): the sets in /proc/cpuinfo are those that the kernel has enabled, of which a sandbox may
    /// show none.
    pub fn of_this_cpu() -> InstructionSets {
        let mut sets = InstructionSets::default();
        #[cfg(target_arch = "x86_64")]
        {
            let found = [
                ("sse4_2", std::is_x86_feature_detected!("sse4.2")),
                ("avx", std::is_x86_feature_detected!("avx")),
                ("avx2", std::is_x86_feature_detected!("avx2")),
                ("fma", std::is_x86_feature_detected!("fma")),
                ("f16c", std::is_x86_feature_detected!("f16c")),
                ("avx512f", std::is_x86_feature_detected!("avx512f")),
                ("avx512bw", std::is_x86_feature_detected!("avx512bw")),
                ("avx512_vnni", std::is_x86_feature_detected!("avx512vnni")),
                ("avx512_bf16", std::is_x86_feature_detected!("avx512bf16")),
                ("avx512_fp16", std::is_x86_feature_detected!("avx512fp16")),
                ("avx_vnni", std::is_x86_feature_detected!("avxvnni")),
            ];
            for (name, present) in found {
                sets.set(name, present);
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            sets.set("asimd", std::arch::is_aarch64_feature_detected!("neon"));
            sets.set("bf16", std::arch::is_aarch64_feature_detected!("bf16"));
            sets.set("i8mm", std::arch::is_aarch64_feature_detected!("i8mm"));
            sets.set("sve", std::arch::is_aarch64_feature_detected!("sve"));
        }
        sets
    }

    pub fn union(self, other: InstructionSets) -> InstructionSets {
        InstructionSets(self.0 | other.0)
    }

    fn set(&mut self, name: &str, present: bool) {
        if let Some(bit) = INSTRUCTION_SETS.iter().position(|set| *set == name) {
            self.0 |= u64::from(present) << bit;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_whole_words() {
        let sets = InstructionSets::parse("processor : 0\nflags\t\t: fpu sse4_2 avx2x avx512_bf16 amx_tile\n");
        assert_eq!(sets.names().collect::<Vec<_>>(), ["sse4_2", "avx512_bf16", "amx_tile"]);
        assert!(sets.has("amx_tile") && !sets.has("avx2") && !sets.has("nonsense"));
        let arm = InstructionSets::parse("Features : fp asimd bf16 sve2\n");
        assert_eq!(arm.names().collect::<Vec<_>>(), ["asimd", "bf16"]);
        assert_eq!(InstructionSets::parse(""), InstructionSets::default());
    }

    #[test]
    fn cpuid_and_the_kernel_agree() {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let kernel = InstructionSets::parse(&cpuinfo);
        // An emulator may show the file of its host.
        if kernel != InstructionSets::default() && kernel.has("asimd") == cfg!(target_arch = "aarch64") {
            let cpuid = InstructionSets::of_this_cpu();
            assert_eq!(cpuid.0 & !kernel.0, 0, "cpuid {cpuid:?}, kernel {kernel:?}");
        }
    }
}
