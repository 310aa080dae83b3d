//! What a device lacks for a list, before anything runs there. Of the list's own device each operation is planned; of others
//! it is told what follows from compute capability, memory and libraries.

use super::finding::{Finding, Severity, Target, Topic, Validation};
use super::{region::Ranges, Node, Recorded};
use crate::device::features::Features;
use crate::device::{CopyKind, DeviceInfo, DeviceKind};
use crate::error::Result;
use crate::executor::Executor;
use crate::operation::access::{Effect, Extent, Visit};
use crate::operation::quantized_rows::QuantizedRows;
use crate::operation::{Operation, OperationKind};
use crate::registry::kernels_of;
use crate::registry::key::encoding_name;
use crate::tensor::{CacheLayer, DType};
use crate::weight::{Encoding, WeightView};

/// The oldest compute capability that kernels are built for.
const OLDEST_CAPABILITY: i32 = 70;

/// Findings, of which those with the same text become one.
#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, severity: Severity, topic: Topic, node: Option<usize>, text: String) {
        let same = |finding: &&mut Finding| finding.text == text && finding.severity == severity;
        match self.0.iter_mut().find(same) {
            Some(finding) => finding.nodes += u32::from(node.is_some()),
            None => {
                let nodes = u32::from(node.is_some());
                self.0.push(Finding { severity, topic, text, node: node.map(|node| node as u32), nodes });
            }
        }
    }
}

impl Recorded {
    /// Nothing is queued. `executor` is that of the list.
    pub fn validate(&self, target: &Target, executor: &dyn Executor) -> Result<Validation> {
        let mut findings = Findings::default();
        let mut workspace = 0;
        of_device(&mut findings, target, executor.info());
        for (index, node) in self.nodes.iter().enumerate() {
            if target.own {
                match executor.plan(&node.op) {
                    Ok(plan) => workspace = workspace.max(plan.workspace),
                    Err(error) => {
                        let text = format!("{}: {}", node.op.kind().name(), error.message);
                        findings.add(Severity::Error, Topic::Capability, Some(index), text);
                    }
                }
            }
            if target.info.kind == DeviceKind::Cuda {
                of_dtypes(&mut findings, target, index, node);
                of_kernels(&mut findings, target, index, node);
                of_host_copy(&mut findings, target, index, node);
            }
        }
        let memory_needed = self.named_bytes() + workspace as u64;
        of_memory(&mut findings, target, memory_needed);
        if target.own {
            if let Err(error) = self.replay.expect_awake() {
                findings.add(Severity::Error, Topic::Memory, None, error.message);
            }
        }
        findings.0.sort_by_key(|finding| std::cmp::Reverse(finding.severity as u32));
        Ok(Validation { target: target.info.clone(), memory_needed, findings: findings.0 })
    }

    /// Bytes of the device's memory that the nodes name, each counted once.
    fn named_bytes(&self) -> u64 {
        let mut spans = Vec::new();
        for node in &self.nodes {
            for access in node.accesses.iter().filter(|access| !access.region.is_empty()) {
                let on_host = match &node.op {
                    Operation::MemoryCopy(copy) => match copy.kind {
                        CopyKind::HostToDevice => access.effect != Effect::Write,
                        CopyKind::DeviceToHost => access.effect == Effect::Write,
                        CopyKind::DeviceToDevice => false,
                    },
                    _ => false,
                };
                if !on_host {
                    spans.push(access.region.span());
                }
            }
        }
        Ranges::of(spans).iter().map(|range| range.len() as u64).sum()
    }
}

fn version(capability: i32) -> String {
    format!("{}.{}", capability / 10, capability % 10)
}

/// Whether one of the architectures has code that a device of this capability runs; an `a` target runs on exactly its own.
fn kernels_run(architectures: &str, capability: i32) -> bool {
    architectures.split(';').any(|name| match name.strip_suffix('a') {
        Some(exact) => exact.parse() == Ok(capability),
        None => name.parse().is_ok_and(|built: i32| built <= capability),
    })
}

fn of_device(findings: &mut Findings, target: &Target, of_list: &DeviceInfo) {
    let info = &target.info;
    if !info.obstacle.is_empty() {
        let text = format!("no backend can be created on {}: {}", info.name, info.obstacle);
        findings.add(Severity::Error, Topic::Device, None, text);
    }
    if !target.own {
        let text = format!(
            "the graph names memory of {}; for {} the calls are recorded again on a backend of that device",
            of_list.name, info.name
        );
        findings.add(Severity::Note, Topic::Device, None, text);
    }
    if info.kind != DeviceKind::Cuda {
        return;
    }
    let capability = info.compute_capability;
    if capability < OLDEST_CAPABILITY {
        let text = format!("compute capability {}; {} is the oldest", version(capability), version(OLDEST_CAPABILITY));
        findings.add(Severity::Error, Topic::Capability, None, text);
    } else if target.architectures.is_empty() {
        let text = "this build of the library has no kernels for CUDA; one that has is needed there".to_string();
        findings.add(Severity::Warning, Topic::Library, None, text);
    } else if !kernels_run(target.architectures, capability) {
        let text = format!(
            "this library has kernels for {}, none of which runs on compute capability {}",
            target.architectures,
            version(capability)
        );
        findings.add(Severity::Error, Topic::Library, None, text);
    }
    if !info.features.has(Features::PROGRAMMATIC_LAUNCH) {
        let text = "programmatic dependent launch needs compute capability 9.0: each kernel of a replay begins when the one before \
                    it has ended";
        findings.add(Severity::Note, Topic::Capability, None, text.to_string());
    }
}

/// The dtypes of what a node reads and writes.
#[derive(Default)]
struct Dtypes {
    bf16: bool,
    fp8: bool,
}

impl Dtypes {
    fn see(&mut self, dtype: Option<DType>) {
        self.bf16 |= dtype == Some(DType::Bf16);
        self.fp8 |= matches!(dtype, Some(DType::F8E4m3 | DType::F8E5m2));
    }

    fn see_encoding(&mut self, encoding: Encoding) {
        self.bf16 |= encoding == Encoding::Float(DType::Bf16);
        self.fp8 |= matches!(encoding, Encoding::Fp8E4m3 | Encoding::Fp8E5m2);
    }
}

impl Visit for Dtypes {
    fn add(&mut self, _name: &'static str, of: &impl Extent, _effect: Effect) {
        self.see(of.dtype());
    }

    fn cache(&mut self, layer: &CacheLayer, _effect: Effect) {
        self.see(Some(layer.dtype));
        self.see(Some(layer.value_dtype));
    }

    fn read_quantized(&mut self, _name: &'static str, rows: Option<&QuantizedRows>) {
        rows.into_iter().for_each(|rows| self.see_encoding(rows.encoding));
    }

    fn write_quantized(&mut self, _name: &'static str, rows: Option<&QuantizedRows>) {
        rows.into_iter().for_each(|rows| self.see_encoding(rows.encoding));
    }

    fn read_weight(&mut self, _name: &'static str, weight: &WeightView) {
        self.see_encoding(weight.encoding);
    }
}

fn of_dtypes(findings: &mut Findings, target: &Target, index: usize, node: &Node) {
    let mut dtypes = Dtypes::default();
    node.op.accesses(&mut dtypes);
    let features = target.info.features;
    let mut lacks = |is_used: bool, feature: Features, text: &str| {
        if is_used && !features.has(feature) {
            findings.add(Severity::Warning, Topic::Dtype, Some(index), text.to_string());
        }
    };
    lacks(
        dtypes.bf16,
        Features::BF16,
        "BF16 has no arithmetic before compute capability 8.0: values are converted to F32",
    );
    lacks(
        dtypes.fp8,
        Features::FP8,
        "FP8 has no tensor cores before compute capability 8.9: it saves memory, and values are converted before they are multiplied",
    );
}

/// Which kernels of a product or an attention are left, of those that the registry has for its dtypes.
fn of_kernels(findings: &mut Findings, target: &Target, index: usize, node: &Node) {
    let (input, encoding) = match &node.op {
        Operation::Linear(op) => match &op.input {
            crate::operation::linear::LinearInput::Floats(input) => (input.dtype, op.weight.encoding),
            crate::operation::linear::LinearInput::Quantized(_) => return,
        },
        Operation::AttentionDecode(op) => (op.query.dtype, of_cache(op.cache.dtype)),
        _ => return,
    };
    let operation = node.op.kind();
    let capability = target.info.compute_capability;
    let suits = |needed: i32, exact: bool| if exact { capability == needed } else { capability >= needed };
    let (mut runs, mut newest, mut exact) = (false, 0, 0);
    for (_, kernel) in kernels_of(DeviceKind::Cuda) {
        if kernel.operation != operation || !kernel.inputs.contains(&input) || !kernel.encodings.contains(&encoding) {
            continue;
        }
        match (suits(kernel.limits.capability, kernel.limits.exact), kernel.limits.exact) {
            (true, _) => {
                runs = true;
                newest = newest.max(kernel.limits.capability);
            }
            (false, true) => exact = exact.max(kernel.limits.capability),
            (false, false) => {}
        }
    }
    let what = format!("{} of {} with {}", operation.name(), input, encoding_name(encoding));
    if !runs {
        let text = format!("{what} has no kernel for compute capability {}", version(capability));
        findings.add(Severity::Error, Topic::Capability, Some(index), text);
    } else if capability < 80 && input != DType::F32 {
        let text = format!("{what} takes kernels without tensor cores before compute capability 8.0");
        findings.add(Severity::Warning, Topic::Capability, Some(index), text);
    } else if exact > newest && capability > exact {
        let text =
            format!("{what} has faster kernels for {} alone; those of {} run", version(exact), version(newest.max(80)));
        findings.add(Severity::Note, Topic::Capability, Some(index), text);
    }
    if operation == OperationKind::Linear && target.cublaslt == Some(false) && matches!(encoding, Encoding::Float(_)) {
        let text = "cuBLASLt is not found: products of many rows take the library's own kernels";
        findings.add(Severity::Warning, Topic::Library, Some(index), text.to_string());
    }
}

fn of_cache(dtype: DType) -> Encoding {
    match dtype {
        DType::F8E4m3 => Encoding::Fp8E4m3,
        DType::F8E5m2 => Encoding::Fp8E5m2,
        DType::KvInt8 | DType::KvQ8_0 => Encoding::Int8,
        DType::KvQ4_0 => Encoding::Int4,
        other => Encoding::Float(other),
    }
}

/// A graph that was recorded on the CPU may copy memory that a GPU's graph may not.
fn of_host_copy(findings: &mut Findings, target: &Target, index: usize, node: &Node) {
    let copies_host = matches!(&node.op, Operation::MemoryCopy(copy) if copy.kind != CopyKind::DeviceToDevice);
    if copies_host && !target.own {
        let text = "a copy between host and device is recorded on a GPU only if the host's memory is page-locked";
        findings.add(Severity::Warning, Topic::Memory, Some(index), text.to_string());
    }
}

fn of_memory(findings: &mut Findings, target: &Target, needed: u64) {
    let total = target.info.total_memory;
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    if total == 0 {
        let text = format!("{:.2} GiB are named by the graph; how much the device has is not known", gib(needed));
        findings.add(Severity::Note, Topic::Memory, None, text);
    } else if needed > total {
        let text = format!("{:.2} GiB are named by the graph; the device has {:.2}", gib(needed), gib(total));
        findings.add(Severity::Error, Topic::Memory, None, text);
    } else if needed as f64 > 0.9 * total as f64 {
        let text = format!(
            "{:.2} GiB are named by the graph, more than nine tenths of the device's {:.2}; context, workspace and other programs \
             need some too",
            gib(needed),
            gib(total)
        );
        findings.add(Severity::Warning, Topic::Memory, None, text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_runs_on_later_devices_and_that_of_an_exact_target_on_its_own() {
        for (architectures, capability, runs) in [
            ("80;90a", 80, true),
            ("80;90a", 89, true),
            ("90a", 90, true),
            ("90a", 100, false),
            ("80", 75, false),
            ("", 90, false),
        ] {
            assert_eq!(kernels_run(architectures, capability), runs, "{architectures} on {capability}");
            #[cfg(feature = "cuda")]
            assert_eq!(crate::driver::usable::kernels_run_on(architectures, capability), runs);
        }
        #[cfg(feature = "cuda")]
        assert_eq!(OLDEST_CAPABILITY, crate::driver::usable::OLDEST);
    }

    #[test]
    fn memory_is_judged_by_what_there_is() {
        let judged = |total: u64, needed: u64| {
            let info = DeviceInfo { total_memory: total, ..DeviceInfo::new(DeviceKind::Cuda, 0) };
            let target = Target { info, here: false, own: false, cublaslt: None, architectures: "" };
            let mut findings = Findings::default();
            of_memory(&mut findings, &target, needed);
            findings.0.first().map(|finding| finding.severity)
        };
        assert_eq!(judged(0, 1), Some(Severity::Note));
        assert_eq!(
            [90, 91, 100, 101].map(|needed| judged(100, needed)),
            [None, Some(Severity::Warning), Some(Severity::Warning), Some(Severity::Error)]
        );
    }
}
