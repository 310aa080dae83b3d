//! The FP8 copy of a weight, which all graphs share that convert the same weight.

use crate::error::Result;
use crate::loading::{Source, Weight};
use crate::memory::MemoryManager;
use crate::stream::{Owner, Stream};
use crate::tensor::{DType, Tensor};
use crate::weight::{Arrangement, Encoding, Format, Granularity, WeightView};
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A weight's owner, where the weight lies, and its copy. Neither is kept alive by this.
struct Known {
    owner: Weak<dyn Any + Send + Sync>,
    data: usize,
    twin: Weak<Weight>,
}

static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());

/// The weight in FP8 E4M3 with a scale a row, made now or by another graph that has it still. Waits for the stream.
pub fn of(
    weight: &WeightView,
    owner: Option<&Owner>,
    memory: &Arc<MemoryManager>,
    stream: &Stream,
) -> Result<Arc<Weight>> {
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.retain(|entry| entry.owner.strong_count() > 0 && entry.twin.strong_count() > 0);
    let same = |entry: &&Known| {
        let is_owner = |owner: &Owner| std::ptr::addr_eq(entry.owner.as_ptr(), Arc::as_ptr(owner));
        entry.data == weight.data as usize && owner.is_some_and(is_owner)
    };
    if let Some(twin) = known.iter().find(same).and_then(|entry| entry.twin.upgrade()) {
        return Ok(twin);
    }
    let format = Format::new(Encoding::Fp8E4m3, Granularity::Rows, false, false)?;
    let dtype = weight.dtype().unwrap_or(DType::Bf16);
    let source = Tensor::new(weight.data, dtype, &[weight.rows, weight.columns]).with_strides(&[weight.row_stride, 1]);
    let twin = Weight::new(memory, &[source], Arrangement::Stacked, Source::Device, Some(format), stream)?;
    let twin = Arc::new(twin);
    if let Some(owner) = owner {
        known.push(Known { owner: Arc::downgrade(owner), data: weight.data as usize, twin: Arc::downgrade(&twin) });
    }
    Ok(twin)
}
