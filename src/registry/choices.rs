//! What an executor was told to take: overrides, and the table that tuning filled. Products ask it on their way to the
//! device, so reading takes no lock and no call of a driver: safe while a stream is captured.

use super::attention_key::AttentionKey;
use super::key::ProductKey;
use super::{find, KernelId};
use crate::allocation::has_room;
use crate::device::DeviceKind;
use crate::error::{Error, Result, Status};
use crate::operation::linear_product::LinearProduct;
use crate::operation::OperationKind;
use crate::weight::Encoding;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A kernel, and which of a vendor library's algorithms it is to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    pub kernel: KernelId,
    pub algorithm: Algorithm,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// The library's own first choice, or none to choose.
    Default,
    /// This place in the library's list for the product at hand.
    Rank(u8),
    /// `cublasLtMatmulAlgo_t`, which means the same as long as the library's version does.
    Cached([u64; 8]),
}

impl Choice {
    pub fn of(kernel: KernelId) -> Choice {
        Choice { kernel, algorithm: Algorithm::Default }
    }

    /// For progress and texts: `linear_cublaslt, algorithm 3`. What is tried by an algorithm of its own is a variation.
    pub fn label(&self) -> String {
        let name = self.kernel.kernel().name;
        match self.algorithm {
            Algorithm::Rank(rank) => format!("{name}, algorithm {rank}"),
            Algorithm::Cached(_) => format!("{name}, varied algorithm"),
            Algorithm::Default => name.to_string(),
        }
    }
}

/// What tuning found for a key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Entry {
    pub choice: Choice,
    /// The time of one call.
    pub seconds: f64,
    /// The time of what would have run without tuning.
    pub default_seconds: f64,
    /// The smallest that was measured, which is less than `seconds` where a default that is hardly slower was kept.
    pub fastest_seconds: f64,
    /// How many were measured.
    pub candidates: u32,
}

/// Of products.
pub type Table = HashMap<ProductKey, Entry>;

/// All that tuning found, or that a file has of it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Found {
    pub products: Table,
    pub attention: HashMap<AttentionKey, Entry>,
}

impl From<Table> for Found {
    fn from(products: Table) -> Found {
        Found { products, ..Found::default() }
    }
}

impl Found {
    pub fn len(&self) -> usize {
        self.products.len() + self.attention.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A table that calls read without a lock while another takes its place.
struct Published<K> {
    /// The last of `all`.
    last: AtomicPtr<HashMap<K, Entry>>,
    /// All tables so far: a call may still read an old one. One is added a tuned shape.
    all: Mutex<Vec<Arc<HashMap<K, Entry>>>>,
}

impl<K: Copy + Eq + Hash> Published<K> {
    fn new() -> Published<K> {
        let empty = Arc::new(HashMap::new());
        Published { last: AtomicPtr::new(Arc::as_ptr(&empty).cast_mut()), all: Mutex::new(vec![empty]) }
    }

    fn table(&self) -> &HashMap<K, Entry> {
        // SAFETY: every table that was ever published lives in `all` for as long as `self`, unchanged.
        unsafe { &*self.last.load(Ordering::Acquire) }
    }

    /// Adds entries, which replace those of the same keys. Where there is no memory for them, calls go on with what they have.
    fn extend(&self, entries: HashMap<K, Entry>) {
        if entries.is_empty() {
            return;
        }
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut table, present) = (HashMap::new(), self.table());
        if table.try_reserve(present.len() + entries.len()).is_err() || !has_room(&mut all) {
            log::warn!(target: "nvbackend::tuning", "no memory for {} tuned choices", entries.len());
            return;
        }
        table.extend(present.iter().map(|(key, entry)| (*key, *entry)));
        table.extend(entries);
        let table = Arc::new(table);
        self.last.store(Arc::as_ptr(&table).cast_mut(), Ordering::Release);
        all.push(table);
    }
}

/// Which inputs of products may be rounded to 8 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    Never,
    /// The inputs of weights that FP8 values do not multiply.
    NotToFp8,
    Any,
}

impl Rounding {
    pub fn allows(self, weight: Encoding) -> bool {
        match self {
            Rounding::Never => false,
            Rounding::NotToFp8 => !matches!(weight, Encoding::Fp8E4m3 | Encoding::Fp8E5m2),
            Rounding::Any => true,
        }
    }
}

/// No override.
const NOTHING: usize = usize::MAX;

pub struct Choices {
    device: DeviceKind,
    rounding: Rounding,
    /// Whether the executor decides alone.
    fixed: bool,
    /// The override of each operation: a `KernelId`'s index, or `NOTHING`.
    overrides: [AtomicUsize; OperationKind::ALL.len()],
    products: Published<ProductKey>,
    attention: Published<AttentionKey>,
}

impl Choices {
    /// `fixed`: nothing may be chosen, because the executor's own kernels alone keep what was promised of every product
    /// (`batch_invariant`).
    pub fn new(device: DeviceKind, rounding: Rounding, fixed: bool) -> Choices {
        Choices {
            device,
            rounding,
            fixed,
            overrides: [const { AtomicUsize::new(NOTHING) }; OperationKind::ALL.len()],
            products: Published::new(),
            attention: Published::new(),
        }
    }

    pub fn rounding(&self) -> Rounding {
        self.rounding
    }

    /// Whether tuned entries are left aside and overrides refused.
    pub fn are_fixed(&self) -> bool {
        self.fixed
    }

    pub fn key(&self, op: &LinearProduct) -> ProductKey {
        ProductKey::of(op, self.may_round_input(op))
    }

    /// Whether the product may round its input to 8 bits, a scale a row: as the backend's options say, or the product itself.
    pub fn may_round_input(&self, op: &LinearProduct) -> bool {
        self.rounding.allows(op.weight.encoding) || (op.rounds_input && !self.fixed)
    }

    /// What to try for the product before the executor's own choice, in this order.
    #[inline]
    pub fn of(&self, op: &LinearProduct) -> impl Iterator<Item = Choice> {
        let tuned = self.tuned(op).map(|entry| entry.choice);
        self.overridden(OperationKind::Linear).map(Choice::of).into_iter().chain(tuned)
    }

    pub fn tuned(&self, op: &LinearProduct) -> Option<&Entry> {
        let table = self.products.table();
        if table.is_empty() || self.fixed {
            return None;
        }
        table.get(&self.key(op))
    }

    /// What was tuned for an attention, whose key is asked for only where there is something to find.
    #[inline]
    pub fn tuned_attention(&self, key: impl FnOnce() -> AttentionKey) -> Option<&Entry> {
        let table = self.attention.table();
        if table.is_empty() || self.fixed {
            return None;
        }
        table.get(&key())
    }

    #[inline]
    pub fn overridden(&self, operation: OperationKind) -> Option<KernelId> {
        KernelId::from_index(self.overrides[operation as usize].load(Ordering::Relaxed))
    }

    /// From now on the operation's calls take the kernel of this name where it can do them; "" ends that.
    pub fn set_override(&self, operation: OperationKind, name: &str) -> Result<()> {
        let index = match name {
            "" => NOTHING,
            _ => find(self.device, operation, name)?.index(),
        };
        if self.fixed && operation == OperationKind::Linear && index != NOTHING {
            return Err(Error::new(
                Status::Configuration,
                format!("{name} may not be chosen: batch_invariant is set, under which products have one kernel each"),
            ));
        }
        self.overrides[operation as usize].store(index, Ordering::Relaxed);
        Ok(())
    }

    /// Adds entries, which replace those of the same keys.
    pub fn extend(&self, found: Found) {
        self.products.extend(found.products);
        self.attention.extend(found.attention);
    }

    /// All that is tuned.
    pub fn entries(&self) -> Found {
        Found { products: self.products.table().clone(), attention: self.attention.table().clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::Activation;
    use crate::tensor::{DType, Tensor};
    use crate::weight::WeightView;

    #[test]
    fn fixed_choices_take_no_override() {
        let choices = Choices::new(DeviceKind::Cuda, Rounding::Never, true);
        let error = choices.set_override(OperationKind::Linear, "linear_simt").unwrap_err();
        assert_eq!(error.status, Status::Configuration);
        assert!(error.message.contains("linear_simt") && error.message.contains("batch_invariant"), "{error}");
        assert_eq!(choices.overridden(OperationKind::Linear), None);
        choices.set_override(OperationKind::Linear, "").unwrap();
        assert!(choices.set_override(OperationKind::Linear, "linear_fast").unwrap_err().message.contains("no kernel"));
    }

    #[test]
    fn inputs_are_rounded_as_their_weights_allow_and_tuned_as_they_run() {
        let at = 4096 as *mut std::ffi::c_void;
        let tensor = Tensor::new(at, DType::Bf16, &[64, 64]);
        let float = WeightView::float(at, DType::Bf16, 64, 64, 64, false);
        let cases = [
            (Rounding::Never, [false, false, false]),
            (Rounding::NotToFp8, [false, false, true]),
            (Rounding::Any, [true, true, true]),
        ];
        for (rounding, expected) in cases {
            let choices = Choices::new(DeviceKind::Cuda, rounding, false);
            let weights = [Encoding::Fp8E4m3, Encoding::Fp8E5m2, Encoding::Int8];
            for (encoding, expected) in weights.into_iter().zip(expected) {
                let weight = WeightView { encoding, ..float };
                let op = LinearProduct::new(tensor, weight, None, Activation::None, tensor).unwrap();
                assert_eq!(choices.may_round_input(&op), expected, "{rounding:?}, {encoding:?}");
                assert_eq!(choices.key(&op).rounded_input, expected, "{rounding:?}, {encoding:?}");
            }
        }
    }
}
