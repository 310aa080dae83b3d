//! The plan of a product on CUDA: the kernels that may do it, in order, of which the first that can do it runs. Whoever runs a
//! product, names its kernel, sizes its workspace or tunes it reads this list.
//!
//! Before the defaults stand the override and the tuned entry. cuBLASLt may have no algorithm for the addresses at hand, and
//! then the next step runs; kernels of the library's own do what `supports` says they do.

use super::cublaslt::LibraryAlgorithm;
use super::kernel_table::row;
use super::linear::{self, own, prefers_vendor, prefers_wgmma, vendor};
use super::linear_choice::{kernel_of_table, launch_float, launch_quantized, supports, with_algorithm};
use super::linear_quantized::{self, in_order, ordered_stride, prefers_own_kernel, with_dequantized_slices};
use super::linear_rounded::{rounds_with_own, with_quantized_activations, By};
use super::prelude::*;
use super::{linear_choice, linear_invariant, linear_wgmma, linear_workspace};
use crate::device::DeviceKind;
use crate::executor::Executor;
use crate::operation::OperationKind;
use crate::registry::choices::Choice;
use crate::registry::{find, kernels_of, Family};
use crate::weight::WeightView;
use std::borrow::Cow;

/// One kernel that may do a product.
#[derive(Clone, Copy)]
pub(super) enum Step {
    /// What has a name in the registry.
    Named(Choice),
    /// The kernel that the launcher's table has for the shape, which the launcher finds as it launches. It takes every product.
    Own,
}

type Rule = fn(&CudaExecutor, &LinearProduct) -> Option<Step>;

/// The default steps of a product with a float weight. The wgmma kernel is asked before cuBLASLt where that would need a second
/// kernel for the epilogue, and else where cuBLASLt is not there.
const FLOAT: &[Rule] = &[
    |_, op| prefers_wgmma(op).then(|| of_family(Family::Wgmma)),
    |_, op| prefers_vendor(op, op.weight.dtype()?).then(|| of_family(Family::Vendor)),
    |_, op| linear_wgmma::has_many_rows(op).then(|| of_family(Family::Wgmma)),
    |_, _| Some(Step::Own),
];

/// The same with a weight in 8 or 4 bits: own kernels for few rows, for many an input in 8 bits where the options allow it,
/// or float products with slices of the dequantised weight.
const QUANTIZED: &[Rule] = &[
    |executor, op| prefers_own_kernel(executor, op).then_some(Step::Own),
    |executor, op| rounds_with_own(executor, op).then(|| of_family(Family::RoundedWgmma)),
    |_, _| Some(of_family(Family::RoundedInput)),
    |_, _| Some(of_family(Family::Dequantized)),
];

fn of_family(family: Family) -> Step {
    let (id, _) =
        kernels_of(DeviceKind::Cuda).find(|(_, kernel)| kernel.family == family).expect("the registry has each family");
    Step::Named(Choice::of(id))
}

/// The default steps that can be taken, for a product whose input is in the weight's order.
fn defaults<'a>(executor: &'a CudaExecutor, op: &'a LinearProduct) -> impl Iterator<Item = Step> + 'a {
    let rules = if op.weight.encoding.is_float() { FLOAT } else { QUANTIZED };
    rules.iter().filter_map(move |rule| rule(executor, op)).filter(move |step| step.supports(executor, op))
}

/// All steps that can be taken. `seen` is the product as its kernels see it; what was chosen is kept by the product as it came.
fn steps<'a>(
    executor: &'a CudaExecutor,
    op: &LinearProduct,
    seen: &'a LinearProduct,
) -> impl Iterator<Item = Step> + 'a {
    let chosen = executor.choices().of(op).map(Step::Named).filter(move |step| step.supports(executor, seen));
    chosen.chain(defaults(executor, seen))
}

/// The product with its input in the order of the weight's columns, in rows of scratch that have no address yet.
pub(super) fn seen(op: &LinearProduct) -> Cow<'_, LinearProduct> {
    if op.weight.order.is_null() {
        return Cow::Borrowed(op);
    }
    let input = Matrix { data: std::ptr::null_mut(), row_stride: ordered_stride(&op.input), ..op.input };
    Cow::Owned(LinearProduct { input, weight: WeightView { order: std::ptr::null(), ..op.weight }, ..*op })
}

fn is_empty(op: &LinearProduct) -> bool {
    op.input.rows == 0 || op.weight.rows == 0
}

impl Step {
    fn supports(&self, executor: &CudaExecutor, op: &LinearProduct) -> bool {
        match self {
            Step::Named(choice) => supports(executor, op, choice.kernel),
            Step::Own => true,
        }
    }

    /// Whether it may turn out, as it is launched, that it cannot do the product.
    fn may_fail(&self) -> bool {
        match self {
            Step::Named(choice) => {
                matches!(choice.kernel.kernel().family, Family::Vendor | Family::RoundedInput | Family::Dequantized)
            }
            Step::Own => false,
        }
    }

    fn choice(&self, executor: &CudaExecutor, op: &LinearProduct) -> Option<Choice> {
        match self {
            Step::Named(choice) => Some(*choice),
            Step::Own => kernel_of_table(executor, op).map(Choice::of),
        }
    }

    fn workspace(&self, executor: &CudaExecutor, op: &LinearProduct) -> Workspace {
        match (self, op.weight.dtype()) {
            (Step::Named(choice), _) => linear_workspace::by_choice(executor, op, choice),
            (Step::Own, Some(_)) => Workspace::none(),
            (Step::Own, None) => {
                let params = linear_quantized::Params::of(op);
                let bytes = linear_quantized::workspace_bytes(executor, &params, RawHandle::NULL);
                Workspace::none().with(WorkspaceUse::Kernel, bytes)
            }
        }
    }

    /// Queues the product: the step with the algorithm that ran, or `None` and nothing queued that changes the output. With a
    /// scratch unless it needs nothing of it. The context is current.
    fn launch(
        &self,
        executor: &CudaExecutor,
        op: &LinearProduct,
        scratch: Option<&mut ScratchGuard<'_>>,
        stream: RawHandle,
    ) -> Result<Option<Step>> {
        let Step::Named(choice) = self else {
            return launch_own(executor, op, scratch, stream).map(|()| Some(*self));
        };
        let ran = |ran: bool| ran.then_some(*self);
        let by_library = |run: &mut dyn FnMut(LibraryAlgorithm<'_>) -> Result<bool>| {
            Ok(with_algorithm(choice, run)?.map(Step::Named))
        };
        if let Some(row) = row(choice.kernel) {
            match op.weight.dtype() {
                Some(dtype) => launch_float(executor, &linear::Params::of(op, dtype), row, stream)?,
                None => {
                    let mut params = linear_quantized::Params::of(op);
                    let bytes = linear_choice::workspace_bytes(row, &params);
                    params.workspace = kernel_workspace(scratch, bytes)?;
                    launch_quantized(executor, &params, row, stream)?;
                }
            }
            return Ok(ran(true));
        }
        let family = choice.kernel.kernel().family;
        if let (Family::Wgmma, Some(dtype)) = (family, op.weight.dtype()) {
            return linear_wgmma::run(executor, linear_wgmma::Params::of_floats(op, dtype), stream).map(ran);
        }
        let scratch = scratch.ok_or_else(without_scratch)?;
        match (family, op.weight.dtype()) {
            (_, Some(dtype)) => by_library(&mut |algorithm| vendor(executor, op, dtype, algorithm, scratch, stream)),
            (Family::RoundedInput, None) => by_library(&mut |algorithm| {
                with_quantized_activations(executor, op, By::Vendor(algorithm), scratch, stream)
            }),
            (Family::RoundedWgmma, None) => with_quantized_activations(executor, op, By::Own, scratch, stream).map(ran),
            _ => by_library(&mut |algorithm| with_dequantized_slices(executor, op, algorithm, scratch, stream)),
        }
    }
}

/// Queues the kernel of the launcher's table; without a scratch it takes the stream's where it needs some of it.
fn launch_own(
    executor: &CudaExecutor,
    op: &LinearProduct,
    scratch: Option<&mut ScratchGuard<'_>>,
    stream: RawHandle,
) -> Result<()> {
    if let Some(dtype) = op.weight.dtype() {
        return own(executor, op, dtype, stream);
    }
    let mut params = linear_quantized::Params::of(op);
    let bytes = linear_quantized::workspace_bytes(executor, &params, stream);
    if scratch.is_some() || bytes == 0 {
        params.workspace = kernel_workspace(scratch, bytes)?;
        return linear_quantized::launch(executor, &params, stream);
    }
    let scratch = executor.scratch(stream);
    let mut scratch = scratch.lock(executor, stream, || Workspace::none().with(WorkspaceUse::Kernel, bytes))?;
    params.workspace = scratch.get(WorkspaceUse::Kernel, bytes)?;
    linear_quantized::launch(executor, &params, stream)
}

fn kernel_workspace(scratch: Option<&mut ScratchGuard<'_>>, bytes: usize) -> Result<*mut c_void> {
    match bytes {
        0 => Ok(std::ptr::null_mut()),
        _ => scratch.ok_or_else(without_scratch)?.get(WorkspaceUse::Kernel, bytes),
    }
}

fn without_scratch() -> Error {
    Error::new(Status::Internal, "a step of a product needs scratch that its plan did not name")
}

/// Queues the first of these steps that can do the product; `workspace` is what they all need.
fn launch_first(
    executor: &CudaExecutor,
    op: &LinearProduct,
    steps: impl Iterator<Item = Step>,
    workspace: impl FnOnce() -> Workspace,
    stream: RawHandle,
) -> Result<Option<Step>> {
    if !op.weight.order.is_null() {
        let scratch = executor.scratch(stream);
        let mut scratch = scratch.lock(executor, stream, workspace)?;
        let ordered = in_order(executor, op, &mut scratch, stream)?;
        for step in steps {
            if let Some(ran) = step.launch(executor, &ordered, Some(&mut scratch), stream)? {
                return Ok(Some(ran));
            }
        }
        return Ok(None);
    }
    for step in steps {
        if let Step::Own = step {
            launch_own(executor, op, None, stream)?;
            return Ok(Some(step));
        }
        let workspace = step.workspace(executor, op);
        let ran = if workspace == Workspace::none() {
            step.launch(executor, op, None, stream)?
        } else {
            let scratch = executor.scratch(stream);
            let mut scratch = scratch.lock(executor, stream, || workspace)?;
            step.launch(executor, op, Some(&mut scratch), stream)?
        };
        if ran.is_some() {
            return Ok(ran);
        }
    }
    Ok(None)
}

pub(super) fn run(executor: &CudaExecutor, op: &LinearProduct, stream: RawHandle) -> Result<()> {
    if executor.batch_invariant {
        return linear_invariant::run(executor, op, stream);
    }
    let _guard = executor.enter()?;
    if is_empty(op) {
        return Ok(());
    }
    let seen = seen(op);
    let ran = launch_first(executor, op, steps(executor, op, &seen), || workspace(executor, op), stream)?;
    ran.map(drop).ok_or_else(|| Error::new(Status::Internal, "no kernel took the product"))
}

/// The product by this choice alone: what it came to, or `None` where it cannot do it.
pub(super) fn run_by(
    executor: &CudaExecutor,
    op: &LinearProduct,
    choice: &Choice,
    stream: RawHandle,
) -> Result<Option<Choice>> {
    let _guard = executor.enter()?;
    let (seen, step) = (seen(op), Step::Named(*choice));
    if !step.supports(executor, &seen) {
        return Ok(None);
    }
    if is_empty(op) {
        return Ok(Some(*choice));
    }
    let workspace = || workspace_of(executor, op, &seen, [step].into_iter());
    let ran = launch_first(executor, op, [step].into_iter(), workspace, stream)?;
    Ok(ran.and_then(|ran| ran.choice(executor, &seen)))
}

/// What the product asks of the stream's scratch. The context is current.
pub(super) fn workspace(executor: &CudaExecutor, op: &LinearProduct) -> Workspace {
    if is_empty(op) {
        return Workspace::none();
    }
    if executor.batch_invariant {
        return linear_invariant::workspace(executor, op);
    }
    let seen = seen(op);
    workspace_of(executor, op, &seen, steps(executor, op, &seen))
}

fn workspace_of(
    executor: &CudaExecutor,
    op: &LinearProduct,
    seen: &LinearProduct,
    steps: impl Iterator<Item = Step>,
) -> Workspace {
    let mut workspace = Workspace::none();
    if !op.weight.order.is_null() {
        workspace = workspace.with(WorkspaceUse::Input, linear_workspace::input_bytes(&op.input));
    }
    for step in steps {
        workspace = workspace.or(step.workspace(executor, seen));
        if !step.may_fail() {
            break;
        }
    }
    workspace
}

/// What runs where nothing was chosen, cuBLASLt taken to have an algorithm; `None` for an empty product.
pub(super) fn default(executor: &CudaExecutor, op: &LinearProduct) -> Option<Choice> {
    let _guard = executor.enter().ok()?;
    if is_empty(op) {
        return None;
    }
    if executor.batch_invariant {
        return linear_invariant::kernel(executor, op).map(Choice::of);
    }
    let seen = seen(op);
    let first = defaults(executor, &seen).next()?;
    first.choice(executor, &seen)
}

/// The plain kernels: f32 arithmetic without Tensor Cores.
pub(super) fn reference(executor: &CudaExecutor, op: &LinearProduct, stream: RawHandle) -> Result<()> {
    let name = if op.weight.encoding.is_float() { "linear_simt" } else { "linear_quantized_plain" };
    let plain = Choice::of(find(DeviceKind::Cuda, OperationKind::Linear, name)?);
    run_by(executor, op, &plain, stream).map(drop)
}
