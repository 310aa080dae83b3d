//! cuBLASLt, opened at run time where it is present: large products of float, FP8 and INT8 matrices.
//!
//! Row-major y = x·Wᵀ is column-major yᵀ = W·xᵀ: cuBLASLt's first operand is W, transposed, its second x as it stands.
//! Without a tuned algorithm the heuristic's first choice is kept for each shape, so that it never changes within a process.

mod batched;

use super::scratch::{Purpose, ScratchGuard};
use crate::error::{Error, Result, Status};
use crate::stream::RawHandle;
use crate::tensor::DType;
use libloading::os::unix::{Library, Symbol, RTLD_LOCAL, RTLD_NOW};
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

type Handle = *mut c_void;
type Code = c_int;

/// Newest first; the one that matches the statically linked runtime is preferred.
const FILES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];

/// What NVIDIA recommends for Hopper (and what PyTorch gives it); older GPUs need less.
pub static WORKSPACE_BYTES: usize = 32 << 20;

// Numbers of cublasLt.h and library_types.h.
const COMPUTE_32F: c_int = 68;
const COMPUTE_32I: c_int = 72;
static OPERATION_T: c_int = 1;
const DESC_TRANSA: c_int = 3;
const DESC_EPILOGUE: c_int = 7;
const DESC_BIAS_POINTER: c_int = 8;
const DESC_A_SCALE_POINTER: c_int = 17;
const DESC_B_SCALE_POINTER: c_int = 18;
const DESC_BIAS_DATA_TYPE: c_int = 26;
/// Libraries before CUDA 12.8 do not know these two.
const DESC_A_SCALE_MODE: c_int = 31;
const DESC_B_SCALE_MODE: c_int = 32;
/// A scale for each row of the first operand and each column of the second.
static SCALE_OUTER_VECTOR: c_int = 3;
/// 8-bit sums are kept as exactly as the tensor cores do, which is faster and costs some 1e-3, a thirtieth of what the codes
/// have lost.
const DESC_FAST_ACCUMULATION: c_int = 25;
static FAST_ACCUMULATION: i8 = 1;
static EPILOGUE_BIAS: u32 = 4;
/// The tanh form.
static EPILOGUE_GELU: u32 = 32;
static EPILOGUE_GELU_BIAS: u32 = 36;
const PREFERENCE_MAX_WORKSPACE: c_int = 1;
/// A, B, C and D in this order from here on.
const PREFERENCE_MIN_ALIGNMENT_A: c_int = 5;

fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 2,
        DType::Bf16 => 14,
        DType::I32 => 10,
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

/// What a tuned algorithm asks of every address and row, in bytes: tuning measures with no more than that.
const TUNED_ALIGNMENT: u32 = 16;

/// Which algorithm a product takes.
#[derive(Clone, Copy)]
pub enum Pick<'a> {
    /// The heuristic's first.
    First,
    /// The heuristic's choice at this place, which is then written down; no product if there are fewer.
    Rank(u8, &'a Cell<Option<AlgorithmBytes>>),
    /// One that tuning found for a shape like this; where it does not fit, the heuristic's first.
    Kept(AlgorithmBytes),
}

struct Functions {
    create: Symbol<unsafe extern "C" fn(*mut Handle) -> Code>,
    matmul_desc_create: Symbol<unsafe extern "C" fn(*mut Handle, c_int, c_int) -> Code>,
    matmul_desc_destroy: Symbol<unsafe extern "C" fn(Handle) -> Code>,
    matmul_desc_set: Symbol<unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Code>,
    layout_create: Symbol<unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> Code>,
    layout_destroy: Symbol<unsafe extern "C" fn(Handle) -> Code>,
    layout_set: Symbol<unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Code>,
    preference_create: Symbol<unsafe extern "C" fn(*mut Handle) -> Code>,
    preference_destroy: Symbol<unsafe extern "C" fn(Handle) -> Code>,
    preference_set: Symbol<unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Code>,
    #[allow(clippy::type_complexity)]
    heuristic: Symbol<
        unsafe extern "C" fn(
            Handle,
            Handle,
            Handle,
            Handle,
            Handle,
            Handle,
            Handle,
            c_int,
            *mut HeuristicResult,
            *mut c_int,
        ) -> Code,
    >,
    #[allow(clippy::type_complexity)]
    algorithm_check: Symbol<
        unsafe extern "C" fn(Handle, Handle, Handle, Handle, Handle, Handle, *const u64, *mut HeuristicResult) -> Code,
    >,
    #[allow(clippy::type_complexity)]
    matmul: Symbol<
        unsafe extern "C" fn(
            Handle,
            Handle,
            *const c_void,
            *const c_void,
            Handle,
            *const c_void,
            Handle,
            *const c_void,
            *const c_void,
            Handle,
            *mut c_void,
            Handle,
            *const u64,
            *mut c_void,
            usize,
            *mut c_void,
        ) -> Code,
    >,
    destroy: Symbol<unsafe extern "C" fn(Handle) -> Code>,
    // Last: the functions point into it.
    _library: Library,
}

/// The library is looked for once and stays open: opening it, or looking in vain, costs more than all else that a backend's
/// creation does. The log says what was found.
fn functions() -> Option<&'static Functions> {
    static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();
    FUNCTIONS.get_or_init(open).as_ref()
}

fn open() -> Option<Functions> {
    for file in FILES {
        // SAFETY: NVIDIA's library; its initialisers do nothing but set up the library.
        match unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => match Functions::load(library) {
                Ok(functions) => {
                    log::info!(target: "nvbackend::cuda", "{file} found: large products use it");
                    return Some(functions);
                }
                Err(error) => log::warn!(target: "nvbackend::cuda", "{file} is not usable: {error}"),
            },
            Err(error) => log::debug!(target: "nvbackend::cuda", "{file}: {error}"),
        }
    }
    log::info!(target: "nvbackend::cuda", "cuBLASLt was not found ({}): own kernels do all products", FILES.join(", "));
    None
}

impl Functions {
    fn load(library: Library) -> Result<Functions> {
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the field's type is the function's type in cublasLt.h.
                unsafe { library.get($name) }
                    .map_err(|error| Error::unsupported(format!("{}: {error}", String::from_utf8_lossy($name))))?
            };
        }
        Ok(Functions {
            create: function!(b"cublasLtCreate"),
            matmul_desc_create: function!(b"cublasLtMatmulDescCreate"),
            matmul_desc_destroy: function!(b"cublasLtMatmulDescDestroy"),
            matmul_desc_set: function!(b"cublasLtMatmulDescSetAttribute"),
            layout_create: function!(b"cublasLtMatrixLayoutCreate"),
            layout_destroy: function!(b"cublasLtMatrixLayoutDestroy"),
            layout_set: function!(b"cublasLtMatrixLayoutSetAttribute"),
            preference_create: function!(b"cublasLtMatmulPreferenceCreate"),
            preference_destroy: function!(b"cublasLtMatmulPreferenceDestroy"),
            preference_set: function!(b"cublasLtMatmulPreferenceSetAttribute"),
            heuristic: function!(b"cublasLtMatmulAlgoGetHeuristic"),
            algorithm_check: function!(b"cublasLtMatmulAlgoCheck"),
            matmul: function!(b"cublasLtMatmul"),
            destroy: function!(b"cublasLtDestroy"),
            _library: library,
        })
    }
}

pub struct CublasLt {
    handle: Handle,
    functions: &'static Functions,
    chosen: Mutex<HashMap<(Key, Wanted), Option<HeuristicResult>>>,
    chosen_batched: Mutex<HashMap<batched::BatchedKey, Option<HeuristicResult>>>,
}

/// [`Pick`] as a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Wanted {
    First,
    Rank(u8),
    Kept(AlgorithmBytes),
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

/// Of the weight, the input, the residual (without one the output) and the output.
type Alignments = [u32; 4];

/// y [m, n] = x [m, k] · W [n, k]ᵀ (+ bias [n]) (+ residual [m, n]), row-major, strides in elements. x and W have one float dtype, or are both
/// FP8 or both INT8; the sums of the latter are i32, and so is y.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    pub input: *const c_void,
    pub weight: *const c_void,
    /// Of the output's dtype.
    pub bias: Option<*const c_void>,
    /// y = gelu_tanh of all that; not with a residual.
    pub gelu: bool,
    /// Of the output's dtype, and the output itself or apart from it; not with INT8.
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
    /// Of FP8; without them the codes' values are multiplied as they are.
    pub scales: Option<OuterScales>,
    pub pick: Pick<'a>,
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
        if let Pick::Rank(_, taken) = product.pick {
            taken.set(taken.get().or(Some(choice.algorithm)));
        }
        let workspace = scratch.get(Purpose::Workspace, choice.workspace_bytes)?;
        // As wide as the sums: f32, or i32 for INT8.
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
        check(code, "cublasLtMatmul").map(|()| true)
    }

    fn choose(&self, product: &Product, descriptors: &Descriptors<'_>) -> Result<Option<HeuristicResult>> {
        let output = product.output.cast_const();
        let added = product.residual.map_or(output, |residual| residual.data);
        let pointers = [product.weight, product.input, added, output];
        let alignments = pointers.map(alignment);
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
        let wanted = match product.pick {
            Pick::First => Wanted::First,
            Pick::Rank(rank, _) => Wanted::Rank(rank),
            Pick::Kept(algorithm) => Wanted::Kept(algorithm),
        };
        let mut chosen = self.chosen.lock().unwrap_or_else(|poison| poison.into_inner());
        if let Some(choice) = chosen.get(&(key, wanted)) {
            return Ok(*choice);
        }
        let kept = match wanted {
            Wanted::Kept(algorithm) => self.check(algorithm, alignments, descriptors),
            _ => None,
        };
        let choice = match (kept, wanted) {
            (Some(kept), _) => Some(kept),
            (None, Wanted::Rank(rank)) => {
                let alignments = alignments.map(|bytes| bytes.min(TUNED_ALIGNMENT));
                self.ask(descriptors, alignments, RANKS.into())?.get(usize::from(rank)).copied()
            }
            (None, _) => self.ask(descriptors, alignments, 1)?.first().copied(),
        };
        if choice.is_none() {
            log::debug!(target: "nvbackend::cuda", "cuBLASLt has no algorithm for {key:?}, {wanted:?}");
        }
        chosen.insert((key, wanted), choice);
        Ok(choice)
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

/// The largest power of two up to 256 that divides the address.
fn alignment(pointer: *const c_void) -> u32 {
    (1u32 << (pointer as usize).trailing_zeros().min(8)).max(1)
}

struct Descriptors<'a> {
    functions: &'a Functions,
    matmul: Handle,
    weight: Handle,
    input: Handle,
    residual: Handle,
    output: Handle,
}

impl<'a> Descriptors<'a> {
    fn new(functions: &'a Functions, product: &Product) -> Result<Descriptors<'a>> {
        let null = std::ptr::null_mut();
        let mut this = Descriptors { functions, matmul: null, weight: null, input: null, residual: null, output: null };
        let Product { m, n, k, .. } = *product;
        let integers = product.input_operand == Operand::Int8;
        let (compute, scale_type) =
            if integers { (COMPUTE_32I, data_type(DType::I32)) } else { (COMPUTE_32F, data_type(DType::F32)) };
        let output_dtype = data_type(product.output_dtype);
        // SAFETY: valid pointers and sizes; each attribute gets a value of its documented type; what was created before a
        // failure is destroyed with `this`.
        unsafe {
            check((functions.matmul_desc_create)(&mut this.matmul, compute, scale_type), "cublasLtMatmulDescCreate")?;
            let set = |attribute: c_int, value: *const c_void, bytes: usize| {
                check(
                    (functions.matmul_desc_set)(this.matmul, attribute, value, bytes),
                    "cublasLtMatmulDescSetAttribute",
                )
            };
            set(DESC_TRANSA, (&raw const OPERATION_T).cast(), size_of::<c_int>())?;
            let epilogue = match (product.bias.is_some(), product.gelu) {
                (false, false) => None,
                (true, false) => Some(&raw const EPILOGUE_BIAS),
                (false, true) => Some(&raw const EPILOGUE_GELU),
                (true, true) => Some(&raw const EPILOGUE_GELU_BIAS),
            };
            if let Some(epilogue) = epilogue {
                set(DESC_EPILOGUE, epilogue.cast(), size_of::<u32>())?;
            }
            if matches!(product.input_operand, Operand::Fp8E4m3 | Operand::Fp8E5m2) {
                set(DESC_FAST_ACCUMULATION, (&raw const FAST_ACCUMULATION).cast(), size_of::<i8>())?;
            }
            if let Some(bias) = product.bias {
                set(DESC_BIAS_POINTER, (&raw const bias).cast(), size_of::<*const c_void>())?;
                set(DESC_BIAS_DATA_TYPE, (&raw const output_dtype).cast(), size_of::<c_int>())?;
            }
            if let Some(scales) = product.scales {
                for (attribute, scales) in
                    [(DESC_A_SCALE_POINTER, &raw const scales.weight), (DESC_B_SCALE_POINTER, &raw const scales.input)]
                {
                    set(attribute, scales.cast(), size_of::<*const f32>())?;
                }
                for attribute in [DESC_A_SCALE_MODE, DESC_B_SCALE_MODE] {
                    set(attribute, (&raw const SCALE_OUTER_VECTOR).cast(), size_of::<c_int>())?;
                }
            }
            let layout = |layout: &mut Handle, dtype, rows: usize, columns: usize, stride: usize| {
                check(
                    (functions.layout_create)(layout, dtype, rows as u64, columns as u64, stride as i64),
                    "cublasLtMatrixLayoutCreate",
                )
            };
            layout(&mut this.weight, product.weight_operand.data_type(), k, n, product.weight_stride)?;
            layout(&mut this.input, product.input_operand.data_type(), k, m, product.input_stride)?;
            let residual_stride = product.residual.map_or(product.output_stride, |residual| residual.stride);
            layout(&mut this.residual, output_dtype, n, m, residual_stride)?;
            layout(&mut this.output, output_dtype, n, m, product.output_stride)?;
        }
        Ok(this)
    }
}

impl Drop for Descriptors<'_> {
    fn drop(&mut self) {
        // SAFETY: each was created by its function or is NULL.
        unsafe {
            for layout in [self.weight, self.input, self.residual, self.output] {
                if !layout.is_null() {
                    (self.functions.layout_destroy)(layout);
                }
            }
            if !self.matmul.is_null() {
                (self.functions.matmul_desc_destroy)(self.matmul);
            }
        }
    }
}

fn check(code: Code, doing: &str) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    Err(Error::new(Status::KernelLaunch, format!("{doing}: cuBLAS status {code}")))
}
