//! What a device can do, as bits, and the names of NVIDIA's architectures.

/// One bit each; the numbers are the C ABI's `NVB_FEATURE_…`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features(pub u64);

macro_rules! features {
    ($($name:ident = $bit:literal, $text:literal;)+) => {
        impl Features {
            $(pub const $name: Features = Features(1 << $bit);)+
            const NAMES: &'static [(Features, &'static str)] = &[$((Features::$name, $text)),+];
        }
    };
}

features! {
    F16 = 0, "F16";
    BF16 = 1, "BF16";
    FP8 = 2, "FP8";
    FP4 = 3, "FP4";
    TENSOR_CORES = 4, "Tensor Cores";
    ASYNC_COPY = 5, "asynchronous copy";
    TMA = 6, "TMA";
    WGMMA = 7, "wgmma";
    CLUSTERS = 8, "thread block clusters";
    PROGRAMMATIC_LAUNCH = 9, "programmatic dependent launch";
    COOPERATIVE_LAUNCH = 10, "cooperative launch";
    MANAGED_MEMORY = 11, "managed memory";
    CONCURRENT_MANAGED_ACCESS = 12, "concurrent managed access";
    PAGEABLE_MEMORY_ACCESS = 13, "pageable memory access";
    MEMORY_POOLS = 14, "memory pools";
    VIRTUAL_MEMORY = 15, "virtual memory management";
    UNIFIED_ADDRESSING = 16, "unified addressing";
    HOST_NATIVE_ATOMICS = 17, "native host atomics";
    ECC = 18, "ECC";
    INTEGRATED = 19, "integrated";
    GPU_DIRECT_RDMA = 20, "GPUDirect RDMA";
    STREAM_PRIORITIES = 21, "stream priorities";
}

impl Features {
    pub fn has(self, feature: Features) -> bool {
        self.0 & feature.0 == feature.0
    }

    pub fn with(self, feature: Features, present: bool) -> Features {
        Features(if present { self.0 | feature.0 } else { self.0 })
    }

    pub fn names(self) -> impl Iterator<Item = &'static str> {
        Features::NAMES.iter().filter(move |(feature, _)| self.has(*feature)).map(|(_, name)| *name)
    }

    /// What follows from the compute capability (10 · major + minor); sources: CUDA C++ Programming Guide, "Compute
    /// Capabilities", and the PTX ISA's target notes.
    pub fn of_capability(capability: i32) -> Features {
        Features::default()
            .with(Features::F16, capability >= 53)
            .with(Features::TENSOR_CORES, capability >= 70)
            .with(Features::BF16, capability >= 80)
            .with(Features::ASYNC_COPY, capability >= 80)
            .with(Features::FP8, capability >= 89)
            .with(Features::TMA, capability >= 90)
            .with(Features::CLUSTERS, capability >= 90)
            .with(Features::PROGRAMMATIC_LAUNCH, capability >= 90)
            .with(Features::WGMMA, capability == 90)
            .with(Features::FP4, capability >= 100)
    }
}

/// NVIDIA's name of the architecture behind a compute capability; "unknown" for one older than Maxwell or newer than
/// this library.
pub fn architecture_name(capability: i32) -> &'static str {
    match capability {
        50..=53 => "Maxwell",
        60..=62 => "Pascal",
        70..=72 => "Volta",
        75 => "Turing",
        80..=88 => "Ampere",
        89 => "Ada Lovelace",
        90 => "Hopper",
        100..=121 => "Blackwell",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_bring_their_features() {
        let (turing, ampere, ada) =
            (Features::of_capability(75), Features::of_capability(80), Features::of_capability(89));
        assert!(turing.has(Features::TENSOR_CORES) && !turing.has(Features::BF16));
        assert!(ampere.has(Features::BF16) && ampere.has(Features::ASYNC_COPY) && !ampere.has(Features::FP8));
        assert!(ada.has(Features::FP8) && !ada.has(Features::TMA));
        let (hopper, blackwell) = (Features::of_capability(90), Features::of_capability(100));
        assert!(hopper.has(Features::WGMMA) && hopper.has(Features::TMA) && !hopper.has(Features::FP4));
        assert!(!blackwell.has(Features::WGMMA) && blackwell.has(Features::FP4));
        assert_eq!(Features::BF16.with(Features::FP8, true).names().collect::<Vec<_>>(), ["BF16", "FP8"]);
    }

    #[test]
    fn architectures_have_their_names() {
        let names = [70, 75, 86, 89, 90, 100, 120].map(architecture_name);
        assert_eq!(names, ["Volta", "Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell", "Blackwell"]);
        assert_eq!(architecture_name(35), "unknown");
    }
}
