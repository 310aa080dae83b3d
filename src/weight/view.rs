//! A weight as descriptors carry it: addresses in device memory and their meaning.

use super::blocks::MOST_ELEMENTS;
use super::encoding::{Encoding, Scales, BLOCK};
use super::format::Granularity;
use super::pack::Geometry;
use super::BlockFormat;
use super::{fp8, sfp};
use crate::tensor::{DType, Element};
use half::{bf16, f16};
use std::ffi::c_void;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightView {
    pub data: *mut c_void,
    pub encoding: Encoding,
    pub rows: usize,
    pub columns: usize,
    /// Elements from one row to the next, where rows are what the layout consists of.
    pub row_stride: usize,
    pub gated: bool,
    pub scales: Scales,
    /// The zero points of Int4, one beside each scale: the value that q = 0 stands for; NULL without them.
    pub zero_points: *const f16,
    /// i32 [K]: column j multiplies element order[j] of an input row (GPTQ's activation order); NULL: element j.
    pub order: *const i32,
    /// No work that is queued writes it, so kernels may read it before those in front of them have finished: memory of the library's,
    /// whose making was waited for.
    pub settled: bool,
}

// SAFETY: addresses and their description, dereferenced only by executors.
unsafe impl Send for WeightView {}
// SAFETY: as above.
unsafe impl Sync for WeightView {}

impl WeightView {
    /// A float weight.
    pub fn float(
        data: *mut c_void,
        dtype: DType,
        rows: usize,
        columns: usize,
        row_stride: usize,
        gated: bool,
    ) -> WeightView {
        WeightView {
            data,
            encoding: Encoding::Float(dtype),
            rows,
            columns,
            row_stride,
            gated,
            scales: Scales::None,
            zero_points: std::ptr::null(),
            order: std::ptr::null(),
            settled: false,
        }
    }

    /// The weight that an executor reads where one of this geometry begins at `base`.
    pub fn at(geometry: &Geometry, gated: bool, base: *mut u8, ordered: bool) -> WeightView {
        let at = |offset: usize| base.wrapping_add(offset);
        let (data, scales, zero_points, order) = geometry.sections();
        let format = geometry.format;
        WeightView {
            data: at(data.start).cast(),
            encoding: format.encoding,
            rows: geometry.rows,
            columns: geometry.columns,
            row_stride: geometry.row_stride(),
            gated,
            scales: match (format.encoding, format.granularity) {
                (Encoding::Float(_) | Encoding::Blocks(_), _) => Scales::None,
                (_, Granularity::Blocks) => Scales::Blocks(at(scales.start).cast()),
                _ if format.has_f16_scales() => {
                    Scales::Groups { size: format.stored_group(), data: at(scales.start).cast() }
                }
                _ => Scales::Rows(at(scales.start).cast()),
            },
            zero_points: if format.zero_points { at(zero_points.start).cast() } else { std::ptr::null() },
            order: if ordered { at(order).cast() } else { std::ptr::null() },
            settled: false,
        }
    }

    /// The weight where data, scales and zero points of this geometry lie one behind the other without a gap.
    pub fn packed_at(geometry: &Geometry, base: *mut u8) -> WeightView {
        let mut view = WeightView::at(geometry, false, base, false);
        let scales = base.wrapping_add(geometry.data_bytes(geometry.rows));
        if let Scales::Groups { data, .. } = &mut view.scales {
            *data = scales.cast();
        }
        if !view.zero_points.is_null() {
            view.zero_points = scales.wrapping_add(geometry.scale_bytes(geometry.rows)).cast();
        }
        view
    }

    /// `rows` rows from `first` on, where a unit of the layout begins. `geometry` is that of all.
    pub fn rows_from(&self, geometry: &Geometry, first: usize, rows: usize) -> WeightView {
        let scale_bytes = geometry.scale_bytes(first);
        WeightView {
            data: self.data.wrapping_byte_add(self.encoding.bytes(first * self.row_stride)),
            rows,
            scales: match self.scales {
                Scales::None => Scales::None,
                Scales::Rows(data) => Scales::Rows(data.wrapping_byte_add(scale_bytes)),
                Scales::Groups { size, data } => Scales::Groups { size, data: data.wrapping_byte_add(scale_bytes) },
                Scales::Blocks(data) => Scales::Blocks(data.wrapping_byte_add(scale_bytes)),
            },
            zero_points: match self.zero_points.is_null() {
                true => self.zero_points,
                false => self.zero_points.wrapping_byte_add(geometry.zero_point_bytes(first)),
            },
            ..*self
        }
    }

    /// A weight of blocks as a file has them.
    pub fn blocks(
        data: *mut c_void,
        format: BlockFormat,
        rows: usize,
        columns: usize,
        row_stride: usize,
    ) -> WeightView {
        let floats = WeightView::float(data, DType::F32, rows, columns, row_stride, false);
        WeightView { encoding: Encoding::Blocks(format), ..floats }
    }

    /// The dtype of a float weight.
    pub fn dtype(&self) -> Option<DType> {
        match self.encoding {
            Encoding::Float(dtype) => Some(dtype),
            _ => None,
        }
    }

    /// From one row to the next as kernels receive it: bytes of blocks, elements of all others.
    pub fn kernel_stride(&self) -> usize {
        match self.encoding {
            Encoding::Blocks(format) => format.bytes(self.row_stride),
            _ => self.row_stride,
        }
    }

    /// Columns of a product with this weight.
    pub fn output_columns(&self) -> usize {
        if self.gated {
            self.rows / 2
        } else {
            self.rows
        }
    }

    /// Bytes that a product reads of it, scales and zero points counted.
    pub fn read_bytes(&self) -> usize {
        let groups = |size: usize| self.rows * self.columns.div_ceil(size) * size_of::<f16>();
        let scales = match self.scales {
            Scales::None => 0,
            Scales::Rows(_) => self.rows * size_of::<f32>(),
            Scales::Groups { size, .. } if self.zero_points.is_null() => groups(size),
            Scales::Groups { size, .. } => 2 * groups(size),
            Scales::Blocks(_) => self.rows.div_ceil(BLOCK) * self.columns.div_ceil(BLOCK) * size_of::<f32>(),
        };
        self.encoding.bytes(self.rows * self.columns) + scales
    }

    /// The input element that column `k` multiplies.
    ///
    /// # Safety
    /// The weight lies in host memory, and `k` is one of its columns.
    pub unsafe fn input_column(&self, k: usize) -> usize {
        if self.order.is_null() {
            k
        } else {
            self.order.add(k).read() as usize
        }
    }

    /// The value of element (n, k): the definition of every encoding, in `WeightLayout::Rows`. Exact in f64.
    ///
    /// # Safety
    /// The weight lies in host memory in that layout, and (n, k) is one of its elements.
    pub unsafe fn value(&self, n: usize, k: usize) -> f64 {
        let at = n * self.row_stride + k;
        let q = || self.data.cast::<u8>().add(at).read();
        let group =
            |data: *const f16, size: usize| data.add(n * self.columns.div_ceil(size) + k / size).read().to_f64();
        let scale = match self.scales {
            Scales::None => 1.0,
            Scales::Rows(scales) => f64::from(scales.add(n).read()),
            Scales::Groups { size, data } => group(data, size),
            Scales::Blocks(scales) => {
                f64::from(scales.add(n / BLOCK * self.columns.div_ceil(BLOCK) + k / BLOCK).read())
            }
        };
        match self.encoding {
            Encoding::Float(DType::F32) => f64::from(self.data.cast::<f32>().add(at).read()),
            Encoding::Float(DType::F16) => self.data.cast::<f16>().add(at).read().to_f64(),
            Encoding::Float(_) => f64::from(Element::to_f32(self.data.cast::<bf16>().add(at).read())),
            Encoding::Fp8E4m3 => scale * f64::from(fp8::e4m3_to_f32(q())),
            Encoding::Fp8E5m2 => scale * f64::from(fp8::e5m2_to_f32(q())),
            Encoding::Sfp => scale * f64::from(sfp::to_f32(q())),
            Encoding::Int8 => scale * f64::from(q() as i8),
            Encoding::Int4 => {
                let byte = self.data.cast::<u8>().add(n * self.row_stride / 2 + k / 32 * 16 + k % 16).read();
                let q = f64::from(byte >> (k % 32 / 16 * 4) & 15);
                match (self.zero_points.is_null(), self.scales) {
                    (false, Scales::Groups { size, .. }) => scale * q + group(self.zero_points, size),
                    _ => scale * (q - 8.0),
                }
            }
            Encoding::Blocks(format) => {
                let mut values = [0.0; MOST_ELEMENTS];
                let block = self.data.cast::<u8>().add(format.bytes(at / format.elements() * format.elements()));
                let block = std::slice::from_raw_parts(block, format.block_bytes());
                format.decode(block, &mut values);
                f64::from(values[at % format.elements()])
            }
        }
    }
}
