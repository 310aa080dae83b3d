//! cuBLASLt, opened at run time where it is present: large products of float, FP8 and INT8 matrices.
//!
//! Row-major y = x·Wᵀ is column-major yᵀ = W·xᵀ: cuBLASLt's first operand is W, transposed, its second x as it stands.
//! Without a tuned algorithm the heuristic's first choice is kept for each shape, so that it never changes within a process.

mod batched;
mod descriptors;
mod library;
mod variations;

use super::prelude::*;
use crate::driver::exit;
use descriptors::Descriptors;
use library::{functions, Functions};
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError, Weak};

type Handle = *mut c_void;
type Code = c_int;

/// What NVIDIA recommends for Hopper (and what PyTorch gives it); older GPUs need less.
pub static WORKSPACE_BYTES: usize = 32 << 20;

// Numbers of cublasLt.h and library_types.h.
const COMPUTE_32F: c_int = 68;
const DESC_TRANSA: c_int = 3;
const PREFERENCE_MAX_WORKSPACE: c_int = 1;
/// A, B, C and D in this order from here on.
const PREFERENCE_MIN_ALIGNMENT_A: c_int = 5;

fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 2,
        DType::Bf16 => 14,
        DType::I32 => 10,
        DType::F8E4m3 => 28,
        DType::F8E5m2 => 29,
        // Bytes of a cache, which no product reads.
        DType::KvInt8 | DType::KvQ8_0 | DType::KvQ4_0 => 8,
    }
}

/// What an operand's elements are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operand {
    Float(DType),
    Fp8E4m3,
    Fp8E5m2,
    Int8,
}

impl Operand {
    fn data_type(self) -> c_int {
        match self {
            Operand::Float(dtype) => data_type(dtype),
            Operand::Int8 => 3,
            Operand::Fp8E4m3 => 28,
            Operand::Fp8E5m2 => 29,
        }
    }
}

/// f32 scales of an FP8 product: one for each row of x and of W.
#[derive(Debug, Clone, Copy)]
pub struct OuterScales {
    pub input: *const f32,
    pub weight: *const f32,
}

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
#[derive(Clone, Copy)]
struct HeuristicResult {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}
const _: () = assert!(size_of::<HeuristicResult>() == 96);

impl HeuristicResult {
    const EMPTY: HeuristicResult =
        HeuristicResult { algorithm: [0; 8], workspace_bytes: 0, state: 0, waves: 0.0, reserved: [0; 4] };
}

/// `cublasLtMatmulAlgo_t`
pub type AlgorithmBytes = [u64; 8];

/// How many of the heuristic's algorithms tuning tries.
pub const RANKS: u8 = 8;

/// How many algorithms tuning tries for a product with a bias or GELU: behind its own list comes that of the product
/// without them, whose fastest algorithms may do the epilogue too, although the heuristic does not name them for it.
pub const RANKS_WITH_EPILOGUE: u8 = 2 * RANKS;

/// What a tuned algorithm asks of every address and row, in bytes: tuning measures with no more than that.
const TUNED_ALIGNMENT: u32 = 16;

/// Which algorithm a product takes.
#[derive(Clone, Copy)]
pub enum LibraryAlgorithm<'a> {
    /// The heuristic's first.
    First,
    /// The heuristic's choice at this place, which is then written down; no product if there are fewer. From [`RANKS`] on the
    /// places are those of the list of the product without bias and GELU.
    Rank(u8, &'a Cell<Option<AlgorithmBytes>>),
    /// One that tuning found for a shape like this, or tries; where it does not fit, the heuristic's first.
    Cached(AlgorithmBytes),
}

pub struct CublasLt {
    handle: Handle,
    functions: &'static Functions,
    chosen: Mutex<HashMap<(Key, Wanted), Option<HeuristicResult>>>,
    chosen_batched: Mutex<HashMap<batched::BatchedKey, Option<HeuristicResult>>>,
}

/// [`LibraryAlgorithm`] as a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Wanted {
    First,
    Rank(u8),
    Cached(AlgorithmBytes),
}

// SAFETY: a cublasLt handle may be used by several threads at once (cuBLAS documentation, thread safety).
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

/// What the choice of an algorithm depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    m: usize,
    n: usize,
    k: usize,
    strides: [usize; 3],
    operands: [Operand; 2],
    output_dtype: DType,
    bias: bool,
    gelu: bool,
    residual_stride: Option<usize>,
    scales: bool,
    alignments: Alignments,
}

/// Alignments of the weight, the input, the residual (without one the output) and the output.
type Alignments = [u32; 4];

/// y [m, n] = x [m, k] · W [n, k]ᵀ (+ bias [n]) (+ residual [m, n]), row-major, strides in elements. x and W have one float dtype, or are both
/// FP8 or both INT8; the sums of the latter are i32, and so is y.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    pub input: *const c_void,
    pub weight: *const c_void,
    /// The bias has the output's dtype.
    pub bias: Option<*const c_void>,
    /// y = gelu_tanh of all that; not with a residual.
    pub gelu: bool,
    /// The residual has the output's dtype, and is the output itself or apart from it; not with INT8.
    pub residual: Option<Residual>,
    pub output: *mut c_void,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub input_stride: usize,
    pub weight_stride: usize,
    pub output_stride: usize,
    pub input_operand: Operand,
    pub weight_operand: Operand,
    pub output_dtype: DType,
    /// The scales of FP8 operands; without them the FP8 values are multiplied as they are.
    pub scales: Option<OuterScales>,
    pub algorithm: LibraryAlgorithm<'a>,
}

/// Rows `stride` elements apart, at least a row's.
#[derive(Clone, Copy)]
pub struct Residual {
    pub data: *const c_void,
    pub stride: usize,
}

impl CublasLt {
    /// Looks for the library, which takes its time once a process.
    pub fn find() {
        functions();
    }

    /// The device's handle, which its backends share; `None` without the library. The device's context is current.
    pub fn of_device(ordinal: i32) -> Option<Arc<CublasLt>> {
        // Weak, because a handle does not outlive the primary context, which goes with the last backend.
        static HANDLES: Mutex<BTreeMap<i32, Weak<CublasLt>>> = Mutex::new(BTreeMap::new());
        let functions = functions()?;
        let mut handles = HANDLES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = handles.get(&ordinal).and_then(Weak::upgrade) {
            return Some(known);
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: a valid pointer.
        match check(unsafe { (functions.create)(&mut handle) }, "cublasLtCreate") {
            Ok(()) => {
                exit::CUBLASLT.have_begun();
                let made = Arc::new(CublasLt {
                    handle,
                    functions,
                    chosen: Mutex::default(),
                    chosen_batched: Mutex::default(),
                });
                handles.insert(ordinal, Arc::downgrade(&made));
                Some(made)
            }
            Err(error) => {
                log::warn!(target: "nvbackend::cuda", "own kernels do all products: {error}");
                None
            }
        }
    }

    /// Whether `product` would queue it.
    pub fn has_algorithm(&self, product: &Product) -> Result<bool> {
        let _inside = exit::enter()?;
        Ok(match self.describe(product)? {
            Some(descriptors) => self.choose(product, &descriptors)?.is_some(),
            None => false,
        })
    }

    /// `None` for a library that does not know the scales' attributes.
    fn describe(&self, product: &Product) -> Result<Option<Descriptors<'_>>> {
        match Descriptors::new(self.functions, product) {
            Err(_) if product.scales.is_some() => Ok(None),
            descriptors => descriptors.map(Some),
        }
    }

    /// Queues the product; `Ok(false)` if cuBLASLt has no algorithm for it.
    pub fn product(&self, product: &Product, scratch: &mut ScratchGuard<'_>, stream: RawHandle) -> Result<bool> {
        let Some(descriptors) = self.describe(product)? else { return Ok(false) };
        let Some(choice) = self.choose(product, &descriptors)? else { return Ok(false) };
        if let LibraryAlgorithm::Rank(_, taken) = product.algorithm {
            taken.set(taken.get().or(Some(choice.algorithm)));
        }
        let workspace = scratch.get(WorkspaceUse::Kernel, choice.workspace_bytes)?;
        // The factor is as wide as the sums: f32, or i32 for INT8.
        let alpha = if product.input_operand == Operand::Int8 { 1u32 } else { 1f32.to_bits() };
        let beta = product.residual.map_or(0, |_| 1f32.to_bits());
        let added = product.residual.map_or(product.output.cast_const(), |residual| residual.data);
        let Descriptors { matmul, weight, input, residual, output, .. } = descriptors;
        // SAFETY: operands of the descriptors' sizes, an algorithm that the heuristic gave for exactly these, and a
        // workspace of the size that it asked for.
        let code = unsafe {
            (self.functions.matmul)(
                self.handle,
                matmul,
                (&raw const alpha).cast(),
                product.weight,
                weight,
                product.input,
                input,
                (&raw const beta).cast(),
                added,
                residual,
                product.output,
                output,
                choice.algorithm.as_ptr(),
                workspace,
                choice.workspace_bytes,
                stream.0,
            )
        };
        exit::cublaslt_was_called();
        check(code, "cublasLtMatmul").map(|()| true)
    }

    fn choose(&self, product: &Product, descriptors: &Descriptors<'_>) -> Result<Option<HeuristicResult>> {
        let alignments = alignments(product);
        let key = Key {
            m: product.m,
            n: product.n,
            k: product.k,
            strides: [product.weight_stride, product.input_stride, product.output_stride],
            operands: [product.weight_operand, product.input_operand],
            output_dtype: product.output_dtype,
            bias: product.bias.is_some(),
            gelu: product.gelu,
            residual_stride: product.residual.map(|residual| residual.stride),
            scales: product.scales.is_some(),
            alignments,
        };
        let wanted = match product.algorithm {
            LibraryAlgorithm::First => Wanted::First,
            LibraryAlgorithm::Rank(rank, _) => Wanted::Rank(rank),
            LibraryAlgorithm::Cached(algorithm) => Wanted::Cached(algorithm),
        };
        let mut chosen = self.chosen.lock().unwrap_or_else(|poison| poison.into_inner());
        if let Some(choice) = chosen.get(&(key, wanted)) {
            return Ok(*choice);
        }
        let cached = match wanted {
            Wanted::Cached(algorithm) => self.check(algorithm, alignments, descriptors),
            _ => None,
        };
        let choice = match (cached, wanted) {
            (Some(cached), _) => Some(cached),
            (None, Wanted::Rank(rank)) => self.listed(rank, product, alignments, descriptors)?,
            (None, _) => self.ask(descriptors, alignments, 1)?.first().copied(),
        };
        if choice.is_none() {
            log::debug!(target: "nvbackend::cuda", "cuBLASLt has no algorithm for {key:?}, {wanted:?}");
        }
        chosen.insert((key, wanted), choice);
        Ok(choice)
    }

    /// The algorithm at a place of `lists`.
    fn listed(
        &self,
        rank: u8,
        product: &Product,
        alignments: Alignments,
        descriptors: &Descriptors<'_>,
    ) -> Result<Option<HeuristicResult>> {
        let [own, plain] = self.lists(product, alignments, descriptors)?;
        let Some(place) = rank.checked_sub(RANKS) else {
            return Ok(own.get(usize::from(rank)).copied());
        };
        Ok(borrowed(&own, &plain, place).and_then(|algorithm| self.check(algorithm, alignments, descriptors)))
    }

    /// The heuristic's lists that tuning goes through: the product's own, and that of the product without bias and GELU if it
    /// has one of these.
    fn lists(
        &self,
        product: &Product,
        alignments: Alignments,
        descriptors: &Descriptors<'_>,
    ) -> Result<[Vec<HeuristicResult>; 2]> {
        let alignments = alignments.map(|bytes| bytes.min(TUNED_ALIGNMENT));
        let own = self.ask(descriptors, alignments, RANKS.into())?;
        let plain = match product.bias.is_some() || product.gelu {
            true => self.describe(&Product { bias: None, gelu: false, ..*product })?,
            false => None,
        };
        let plain = plain.map(|plain| self.ask(&plain, alignments, RANKS.into())).transpose()?;
        Ok([own, plain.unwrap_or_default()])
    }

    /// The algorithm with the workspace that it needs for this product, if it can do it.
    fn check(
        &self,
        algorithm: AlgorithmBytes,
        alignments: Alignments,
        descriptors: &Descriptors<'_>,
    ) -> Option<HeuristicResult> {
        let mut result = HeuristicResult { algorithm, ..HeuristicResult::EMPTY };
        let Descriptors { matmul, weight, input, residual, output, .. } = *descriptors;
        // SAFETY: live descriptors, an algorithm's bytes, and room for the result.
        let code = unsafe {
            (self.functions.algorithm_check)(
                self.handle,
                matmul,
                weight,
                input,
                residual,
                output,
                algorithm.as_ptr(),
                &mut result,
            )
        };
        let fits =
            alignments.iter().all(|&bytes| bytes >= TUNED_ALIGNMENT) && result.workspace_bytes <= WORKSPACE_BYTES;
        // The check fills in what it found out, not the algorithm itself.
        (code == 0 && result.state == 0 && fits).then_some(HeuristicResult { algorithm, ..result })
    }

    /// The heuristic's choices, best first, for addresses of these alignments.
    fn ask(&self, descriptors: &Descriptors<'_>, alignments: Alignments, count: usize) -> Result<Vec<HeuristicResult>> {
        let _inside = exit::enter()?;
        let functions = &self.functions;
        let mut preference = std::ptr::null_mut();
        // SAFETY: a valid pointer.
        check(unsafe { (functions.preference_create)(&mut preference) }, "cublasLtMatmulPreferenceCreate")?;
        let set = |attribute: c_int, value: *const c_void, bytes: usize| {
            // SAFETY: each attribute gets a value of its documented type.
            check(
                unsafe { (functions.preference_set)(preference, attribute, value, bytes) },
                "cublasLtMatmulPreferenceSet",
            )
        };
        let mut results = vec![HeuristicResult::EMPTY; count];
        let mut found = 0;
        let outcome = set(PREFERENCE_MAX_WORKSPACE, (&raw const WORKSPACE_BYTES).cast(), size_of::<usize>())
            .and_then(|()| {
                alignments
                    .iter()
                    .zip(PREFERENCE_MIN_ALIGNMENT_A..)
                    .try_for_each(|(bytes, attribute)| set(attribute, (bytes as *const u32).cast(), size_of::<u32>()))
            })
            .map(|()| {
                let Descriptors { matmul, weight, input, residual, output, .. } = *descriptors;
                // SAFETY: live descriptors and room for `count` results.
                unsafe {
                    (functions.heuristic)(
                        self.handle,
                        matmul,
                        weight,
                        input,
                        residual,
                        output,
                        preference,
                        count as c_int,
                        results.as_mut_ptr(),
                        &mut found,
                    )
                }
            });
        // SAFETY: created above.
        unsafe { (functions.preference_destroy)(preference) };
        exit::cublaslt_was_called();
        results.truncate(if outcome? == 0 { found.max(0) as usize } else { 0 });
        Ok(results)
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: created in `of_device`; no call runs any more.
        unsafe { (self.functions.destroy)(self.handle) };
    }
}

fn alignments(product: &Product) -> Alignments {
    let output = product.output.cast_const();
    let added = product.residual.map_or(output, |residual| residual.data);
    [product.weight, product.input, added, output].map(alignment)
}

/// The largest power of two up to 256 that divides the address.
fn alignment(pointer: *const c_void) -> u32 {
    (1u32 << (pointer as usize).trailing_zeros().min(8)).max(1)
}

/// The algorithm at this place of the plain product's list, unless the product's own list has it.
fn borrowed(own: &[HeuristicResult], plain: &[HeuristicResult], place: u8) -> Option<AlgorithmBytes> {
    let algorithm = plain.get(usize::from(place))?.algorithm;
    own.iter().all(|known| known.algorithm != algorithm).then_some(algorithm)
}

fn check(code: Code, doing: &str) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    Err(Error::new(Status::KernelLaunch, format!("{doing}: cuBLAS status {code}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_algorithm_is_borrowed_once_and_in_its_place() {
        let list = |numbers: &[u64]| -> Vec<HeuristicResult> {
            numbers.iter().map(|&number| HeuristicResult { algorithm: [number; 8], ..HeuristicResult::EMPTY }).collect()
        };
        let (own, plain) = (list(&[1, 2, 3]), list(&[4, 2, 5]));
        let places: Vec<_> = (0..4).map(|place| borrowed(&own, &plain, place)).collect();
        assert_eq!(places, [Some([4; 8]), None, Some([5; 8]), None]);
        assert_eq!(borrowed(&[], &plain, 1), Some([2; 8]));
        assert_eq!(borrowed(&own, &[], 0), None);
    }
}
