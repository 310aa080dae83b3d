//! Tensors whose shapes the header's comments give: "[T, query_heads, head_dim], F32 or the keys' dtype".

use super::limits::ELEMENTS;
use super::memory::{self, LARGEST};
use super::palette::{extent, Random};
use std::collections::HashMap;

/// `nvb_tensor`, which the generated struct has the layout of.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Tensor {
    pub data: usize,
    pub dtype: u32,
    pub rank: u32,
    pub shape: [i64; 4],
    pub strides: [i64; 4],
}

/// `nvb_quantized_rows`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Rows {
    pub data: usize,
    pub scales: usize,
    pub rows: i64,
    pub columns: i64,
    pub row_stride: i64,
    pub format: u32,
    pub given_scales: u32,
}

pub const F32: u32 = 1;
pub const I32: u32 = 4;

/// What the names in comments stand for in one call.
#[derive(Default)]
pub struct Extents {
    pub values: HashMap<&'static str, i64>,
    /// The dtype of the call's floats, and of its weight.
    pub dtype: u32,
    pub weight_dtype: u32,
    pub function: &'static str,
    /// Tensors of the struct so far, which later ones are like.
    pub tensors: HashMap<&'static str, Tensor>,
}

impl Extents {
    fn value(&self, text: &str) -> i64 {
        let text = text.trim();
        if let Some((left, right)) = text.split_once('+') {
            return self.value(left) + self.value(right);
        }
        if let Some((left, right)) = text.split_once('/') {
            return self.value(left) / self.value(right).max(1);
        }
        if let Some((left, right)) = text.split_once('·') {
            return self.value(left) * self.value(right);
        }
        text.parse().unwrap_or_else(|_| self.values.get(text).copied().unwrap_or(self.values["width"]))
    }

    /// Extents and dtype as the comment has them; `None` where it gives no shape.
    fn described(&self, field: &str, comment: &str, random: &mut Random) -> Option<Tensor> {
        let mut tensor = Tensor { dtype: self.dtype, ..Tensor::default() };
        let quoted = comment.split('`').nth(1);
        let like = ["As `", "as `", "of the shape of `"].iter().any(|words| comment.contains(words));
        match comment.split_once('[').and_then(|(_, rest)| rest.split_once(']')) {
            Some((inside, _)) => {
                for word in inside.split(',') {
                    if word.trim() == ".." {
                        if self.values["batch"] > 0 {
                            tensor.push(self.values["batch"]);
                        }
                        continue;
                    }
                    // A gated weight's bias is of both its halves.
                    tensor.push(self.value(if field == "bias" && word.contains('N') {
                        "rows of the weight"
                    } else {
                        word
                    }));
                }
            }
            None if like => {
                let like = self.tensors.get(quoted?)?;
                tensor = Tensor { dtype: like.dtype, rank: like.rank.min(4), shape: like.shape, ..tensor };
            }
            None => return None,
        }
        let same = |&(name, _): &(&&str, &Tensor)| {
            let words =
                [format!("the {name}'s dtype"), format!("dtype of `{name}`"), format!("one dtype with `{name}`")];
            words.iter().any(|words| comment.contains(words.as_str()))
        };
        if let Some((_, other)) = self.tensors.iter().find(same) {
            tensor.dtype = other.dtype;
        } else if comment.contains("I32") {
            tensor.dtype = I32;
        } else if comment.contains("F32 [") {
            tensor.dtype = F32;
        } else if comment.contains("F32 or") {
            tensor.dtype = random.of(&[F32, self.weight_dtype]);
        } else if comment.contains("any float") && random.one_in(4) {
            tensor.dtype = 1 + random.below(3) as u32;
        }
        Some(tensor)
    }
}

impl Tensor {
    fn push(&mut self, extent: i64) {
        if self.rank < 4 {
            self.shape[self.rank as usize] = extent;
            self.rank += 1;
        }
    }

    /// Elements and bytes that it reaches; `None` where the library must refuse it whatever its memory is.
    pub fn span(&self) -> Option<(u64, u64)> {
        let size = match self.dtype {
            1 | 4 => 4,
            2 | 3 => 2,
            5..=9 => 1,
            _ => return None,
        };
        let rank = (1..=4).contains(&self.rank).then_some(self.rank as usize)?;
        let (mut elements, mut reach) = (1u128, 1u128);
        let explicit = self.strides[..rank].iter().any(|&stride| stride != 0);
        let mut contiguous = 1u128;
        for axis in (0..rank).rev() {
            let extent = u128::try_from(self.shape[axis]).ok()?;
            let stride = if explicit { u128::try_from(self.strides[axis]).ok()? } else { contiguous };
            elements = elements.checked_mul(extent)?;
            reach = reach.checked_add(extent.saturating_sub(1).checked_mul(stride)?)?;
            contiguous = contiguous.checked_mul(extent.max(1))?;
        }
        if contiguous.max(reach).checked_mul(size)? > isize::MAX as u128 {
            return None;
        }
        let bytes = if elements == 0 { 0 } else { reach * size };
        Some((u64::try_from(elements).ok()?, u64::try_from(bytes).ok()?))
    }
}

/// Bytes that are small numbers, large ones, zeros and what is no number in each of the float dtypes.
pub fn filling(random: &mut Random) -> u8 {
    random.of(&[0x3c, 0x3c, 0x3f, 0x2c, 0xbd, 0x00, 0x7b, 0x7f, 0x80, 0xff])
}

/// Where a tensor lies: a live block of the library's, or NULL to take a guarded piece.
pub type Place<'a> = &'a mut dyn FnMut(&mut Random, u64) -> Option<usize>;

/// The tensor of a field. `wrong` says for each of data, dtype, rank, extents and strides what to get wrong in it.
pub fn make(
    extents: &mut Extents,
    field: &'static str,
    comment: &str,
    wrong: [Option<u8>; 5],
    random: &mut Random,
    place: Place,
) -> Tensor {
    let untouched = wrong.iter().all(Option::is_none);
    let optional =
        comment.contains("Optional") || comment.contains("when there is no") || comment.contains("with a cache only");
    // A page table belongs to few caches.
    if untouched
        && optional
        && (random.one_in(2) || ["page_table", "key_scales", "value_scales"].contains(&field) && !random.one_in(8))
    {
        return Tensor::default();
    }
    if let Some((functions, _)) = comment.strip_prefix("Of ").and_then(|rest| rest.split_once(" only")) {
        if untouched && !functions.split(" and ").any(|name| extents.function.ends_with(name)) {
            return Tensor::default();
        }
    }
    let Some(mut tensor) = extents.described(field, comment, random) else { return Tensor::default() };
    let rank = tensor.rank as usize;
    if random.one_in(4) {
        // Rows that are further apart than they are long.
        let mut stride = 1;
        for axis in (0..rank).rev() {
            tensor.strides[axis] = stride;
            stride *= tensor.shape[axis].clamp(0, 1 << 16);
            if axis + 1 == rank {
                stride += random.of(&[0, 1, 8]);
            }
        }
    }
    if let Some(value) = wrong[1] {
        tensor.dtype = random.of(&[0, 1, 2, 3, 4, 5, u32::MAX]).wrapping_add(u32::from(value) / 128);
    }
    if let Some(value) = wrong[2] {
        tensor.rank = [0, 1, 2, 3, 4, 5, 1 << 31, u32::MAX][usize::from(value) % 8];
    }
    if let Some(value) = wrong[3] {
        tensor.shape[random.below(rank.max(1))] = extent(value);
    }
    if let Some(value) = wrong[4] {
        tensor.strides[random.below(rank.max(1))] = extent(value);
    }
    lay(&mut tensor, extents, wrong[0], random, place);
    extents.tensors.insert(field, tensor);
    tensor
}

fn lay(tensor: &mut Tensor, extents: &Extents, wrong: Option<u8>, random: &mut Random, place: Place) {
    let front = random.one_in(3);
    let filling = filling(random);
    let bytes = match tensor.span() {
        None => {
            tensor.data = memory::piece(16, front, filling) as usize;
            return;
        }
        Some((elements, bytes)) if elements > ELEMENTS || bytes >= LARGEST as u64 => {
            tensor.data = 0;
            return;
        }
        Some((_, bytes)) => bytes,
    };
    let wrong = wrong.map(|value| value % 6);
    // The same memory as another tensor of the call, as the header allows for some.
    let shared = extents.tensors.values().filter(|other| other.span().is_some_and(|(_, other)| other >= bytes));
    let shared = shared.map(|other| other.data).filter(|&data| data != 0).min();
    tensor.data = match (wrong, shared) {
        (Some(0), _) => 0,
        (Some(1), _) => memory::piece(bytes as usize + 1, true, filling) as usize + 1,
        (Some(2), Some(data)) => data,
        (None, Some(data)) if tensor.dtype != I32 && random.one_in(12) => data,
        _ => match place(random, bytes) {
            Some(block) => block,
            None => memory::piece(bytes as usize, front, filling) as usize,
        },
    };
    if tensor.dtype == I32 && tensor.data != 0 && wrong != Some(1) {
        let mode = wrong.map_or(random.below(6), |value| 4 + usize::from(value));
        for at in 0..bytes as usize / 4 {
            let value = match mode {
                0..=3 => at as i32,
                4 => 0,
                5 => at as i32 / 2,
                6 => -1,
                7 => i32::MAX,
                8 => i32::MIN,
                _ => 3 - at as i32,
            };
            // SAFETY: within the bytes that were taken, on a multiple of 4.
            unsafe { (tensor.data as *mut i32).add(at).write_unaligned(value) };
        }
    }
}

/// Rows in 8 bits, of the extents that the comment gives.
pub fn make_rows(extents: &Extents, field: &str, comment: &str, wrong: [Option<u8>; 5], random: &mut Random) -> Rows {
    let untouched = wrong.iter().all(Option::is_none);
    if untouched && !random.one_in(if comment.contains("in the place of") { 4 } else { 3 }) {
        return Rows::default();
    }
    let Some(like) = extents.described(field, comment, random) else { return Rows::default() };
    let leading = like.shape[..like.rank.max(1) as usize - 1].iter().product();
    let mut rows = Rows {
        rows: leading,
        columns: like.shape[like.rank.max(1) as usize - 1],
        format: random.of(&[3, 5]),
        given_scales: u32::from(random.one_in(4)),
        ..Rows::default()
    };
    if random.one_in(4) {
        rows.row_stride = rows.columns + random.of(&[0, 1, 16]);
    }
    if let Some(value) = wrong[1] {
        rows.format = u32::from(value) % 12;
    }
    if let Some(value) = wrong[2] {
        rows.rows = extent(value);
    }
    if let Some(value) = wrong[3] {
        rows.columns = extent(value);
    }
    if let Some(value) = wrong[4] {
        rows.row_stride = extent(value);
        rows.given_scales = u32::from(value) / 64;
    }
    let stride = if rows.row_stride == 0 { rows.columns } else { rows.row_stride };
    let bytes = |count: i64, each: i64| {
        let bytes = u128::try_from(count).ok()?.checked_mul(u128::try_from(each).ok()?)?;
        (bytes <= LARGEST as u128).then_some(bytes as usize)
    };
    let small =
        u128::try_from(rows.rows).unwrap_or(0) * u128::try_from(rows.columns).unwrap_or(0) <= u128::from(ELEMENTS);
    match (bytes(rows.rows.max(1), stride.max(rows.columns)), bytes(rows.rows, 4)) {
        (Some(codes), Some(scales)) if small => {
            rows.data = memory::piece(codes, random.one_in(3), filling(random)) as usize;
            rows.scales = memory::piece(scales, false, random.of(&[0x3c, 0x3c, 0x3c, 0x00, 0xff])) as usize;
        }
        // Refused for what they are, or for want of memory.
        _ => {}
    }
    match wrong[0].map(|value| value % 4) {
        Some(0) => rows.data = 0,
        Some(1) => rows.scales = 0,
        Some(2) if rows.scales != 0 && rows.rows > 0 => {
            rows.scales = memory::piece(rows.rows as usize * 4 + 1, true, 0x3c) as usize + 1;
        }
        _ => {}
    }
    rows
}
