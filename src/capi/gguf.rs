//! GGUF files: their tensors, in place, and their metadata.

use super::prelude::*;
use super::tensor::{NVB_DTYPE_BF16, NVB_DTYPE_F16, NVB_DTYPE_F32, NVB_DTYPE_I32};
use super::weight_blocks::source_format_of;
use crate::allocation::collected;
use crate::weight::gguf_file::{Content, GgufFile, TensorEntry, Value};
use crate::weight::mapping::Mapping;
use crate::weight::BlockFormat;
use std::ffi::CString;

/// A GGUF file (version 2 or 3) whose header has been read and checked. Its tensors are read in place.
///
/// Threads: calls that take `const nvb_gguf *` may run at once from many threads. What they point at lives until
/// `nvb_gguf_destroy`.
pub struct nvb_gguf {
    _private: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_gguf_info {
    pub struct_size: usize,
    pub tensor_count: u64,
    /// Metadata values.
    pub value_count: u64,
    /// The size of the file.
    pub bytes: u64,
    /// The version of the file's format.
    pub version: u32,
    /// Tensors begin at multiples of it, counted from the first.
    pub alignment: u32,
}
versioned!(nvb_gguf_info);

/// One tensor of a file.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_gguf_tensor {
    pub struct_size: usize,
    pub name: *const c_char,
    /// Host memory, in the file.
    pub data: *const c_void,
    /// 0 for a type that this library does not know.
    pub bytes: u64,
    /// Outermost first; entries past `rank` are 1.
    pub shape: [i64; 4],
    pub rank: u32,
    /// The number of its ggml type.
    pub kind: u32,
    /// `NVB_DTYPE_…` of what `nvb_tensor` can describe, else 0.
    pub dtype: u32,
    /// `NVB_SOURCE_FORMAT_…` of what `nvb_weight_blocks` can describe, else 0.
    pub source_format: u32,
}
versioned!(nvb_gguf_tensor);

/// `nvb_gguf_value.content`: an integer or a boolean, in `integer`.
pub const NVB_GGUF_INTEGER: u32 = 1;
/// `nvb_gguf_value.content`: a float, in `real`.
pub const NVB_GGUF_REAL: u32 = 2;
/// `nvb_gguf_value.content`: `count` bytes at `data`, UTF-8 by convention, without a closing NUL.
pub const NVB_GGUF_TEXT: u32 = 3;
/// `nvb_gguf_value.content`: `count` numbers at `data`, little-endian and of any alignment, of the type `element_kind`.
pub const NVB_GGUF_ARRAY: u32 = 4;
/// `nvb_gguf_value.content`: `count` texts; see `nvb_gguf_get_text`.
pub const NVB_GGUF_TEXTS: u32 = 5;
/// `nvb_gguf_value.content`: `count` arrays, which this library passes over.
pub const NVB_GGUF_NESTED: u32 = 6;

/// One metadata value of a file.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_gguf_value {
    pub struct_size: usize,
    pub key: *const c_char,
    pub data: *const c_void,
    pub count: u64,
    /// An unsigned one past the range wraps.
    pub integer: i64,
    /// The value of a float, and of an integer, too.
    pub real: f64,
    /// `NVB_GGUF_…`
    pub content: u32,
    /// The number of the elements' type in the file.
    pub element_kind: u32,
}
versioned!(nvb_gguf_value);

enum Bytes {
    Mapped(Mapping),
    /// The caller's, who keeps them.
    Borrowed(&'static [u8]),
}

impl Bytes {
    fn get(&self) -> &[u8] {
        match self {
            Bytes::Mapped(mapping) => mapping.bytes(),
            Bytes::Borrowed(bytes) => bytes,
        }
    }
}

struct GgufObject {
    bytes: Bytes,
    file: GgufFile,
    names: Vec<CString>,
    keys: Vec<CString>,
}

static GGUF_FILES: Table<GgufObject> = Table::new("GGUF file", 12);

impl GgufObject {
    fn new(bytes: Bytes) -> Result<GgufObject> {
        let file = GgufFile::parse(bytes.get())?;
        // The parser lets no NUL pass.
        let c_string = |text: &String| CString::new(text.as_str()).unwrap_or_default();
        let names = collected(file.tensors.iter().map(|tensor| c_string(&tensor.name)), "the names of a GGUF file")?;
        let keys = collected(file.values.iter().map(|value| c_string(&value.key)), "the keys of a GGUF file")?;
        Ok(GgufObject { bytes, file, names, keys })
    }

    fn at(&self, offset: usize) -> *const c_void {
        self.bytes.get().as_ptr().wrapping_add(offset).cast()
    }

    fn tensor(&self, index: usize) -> nvb_gguf_tensor {
        let TensorEntry { kind, shape, data, .. } = &self.file.tensors[index];
        let mut extents = [1; 4];
        for (to, &extent) in extents.iter_mut().zip(shape) {
            *to = extent as i64;
        }
        let (dtype, source_format) = match kind {
            0 => (NVB_DTYPE_F32, 0),
            1 => (NVB_DTYPE_F16, 0),
            30 => (NVB_DTYPE_BF16, 0),
            26 => (NVB_DTYPE_I32, 0),
            _ => (0, BlockFormat::from_file_type(*kind).map_or(0, source_format_of)),
        };
        nvb_gguf_tensor {
            struct_size: 0,
            name: self.names[index].as_ptr(),
            data: self.at(data.start),
            bytes: data.len() as u64,
            shape: extents,
            rank: shape.len() as u32,
            kind: *kind,
            dtype,
            source_format,
        }
    }

    fn value(&self, index: usize) -> nvb_gguf_value {
        let Value { kind, content, .. } = &self.file.values[index];
        let empty = nvb_gguf_value {
            struct_size: 0,
            key: self.keys[index].as_ptr(),
            data: std::ptr::null(),
            count: 0,
            integer: 0,
            real: 0.0,
            content: 0,
            element_kind: *kind,
        };
        match content {
            &Content::Integer(integer) => {
                nvb_gguf_value { content: NVB_GGUF_INTEGER, integer, real: integer as f64, count: 1, ..empty }
            }
            &Content::Real(real) => nvb_gguf_value { content: NVB_GGUF_REAL, real, count: 1, ..empty },
            Content::Text(range) => nvb_gguf_value {
                content: NVB_GGUF_TEXT,
                data: self.at(range.start),
                count: range.len() as u64,
                ..empty
            },
            Content::Array { kind, count, data } => nvb_gguf_value {
                content: NVB_GGUF_ARRAY,
                data: self.at(data.start),
                count: *count as u64,
                element_kind: *kind,
                ..empty
            },
            Content::Texts(texts) => nvb_gguf_value {
                content: NVB_GGUF_TEXTS,
                count: texts.len() as u64,
                element_kind: crate::weight::gguf_file::TYPE_STRING,
                ..empty
            },
            &Content::Nested { count } => nvb_gguf_value {
                content: NVB_GGUF_NESTED,
                count: count as u64,
                element_kind: crate::weight::gguf_file::TYPE_ARRAY,
                ..empty
            },
        }
    }
}

fn expect_index(what: &str, index: usize, count: usize) -> Result<()> {
    if index < count {
        return Ok(());
    }
    Err(Error::invalid(format!("{what} is {index}; there are {count}")).with_limit(index as u64, count as u64))
}

/// # Safety
/// `file` is valid for writing.
unsafe fn give(bytes: Bytes, file: *mut *mut nvb_gguf) -> Result<()> {
    let handle = GGUF_FILES.insert(Arc::new(GgufObject::new(bytes)?))?;
    // SAFETY: the caller's contract.
    unsafe { write_out("file", file, handle) }
}

/// Maps the file at `path` and reads its header. The file must not be shortened while it is open.
/// Errors: `NVB_ERROR_IO`, also for what is no regular file; `NVB_ERROR_INVALID_ARGUMENT` for bytes that are no GGUF file of
/// version 2 or 3, are cut off or contradict themselves (what and where).
#[no_mangle]
pub unsafe extern "C" fn nvb_gguf_open(path: *const c_char, file: *mut *mut nvb_gguf) -> nvb_status {
    guard!(nvb_gguf_open, {
        expect_out("file", file)?;
        // SAFETY: NULL or a string, by the header's contract.
        let path = unsafe { text("path", path)? };
        let mapping = Mapping::open(std::path::Path::new(&path))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { give(Bytes::Mapped(mapping), file) }.map_err(|error| error.context(path))
    })
}

/// Reads the header of a file that is in host memory already; the bytes outlive the handle.
/// Errors: as of `nvb_gguf_open`.
#[no_mangle]
pub unsafe extern "C" fn nvb_gguf_open_memory(
    data: *const c_void,
    bytes: usize,
    file: *mut *mut nvb_gguf,
) -> nvb_status {
    guard!(nvb_gguf_open_memory, {
        expect_out("file", file)?;
        // SAFETY: readable until the handle is destroyed, by the header's contract.
        unsafe { give(Bytes::Borrowed(slice("data", data.cast::<u8>(), bytes)?), file) }
    })
}

/// Closes the file; NULL is fine. Weights made from it need it no longer.
#[no_mangle]
pub unsafe extern "C" fn nvb_gguf_destroy(file: *mut nvb_gguf) -> nvb_status {
    guard!(nvb_gguf_destroy, { GGUF_FILES.remove(file) })
}

/// Fills `info`; set its `struct_size` first.
#[no_mangle]
pub unsafe extern "C" fn nvb_gguf_get_info(file: *const nvb_gguf, info: *mut nvb_gguf_info) -> nvb_status {
    guard!(nvb_gguf_get_info, {
        let object = GGUF_FILES.get(file)?;
        let value = nvb_gguf_info {
            struct_size: 0,
            tensor_count: object.file.tensors.len() as u64,
            value_count: object.file.values.len() as u64,
            bytes: object.bytes.get().len() as u64,
            version: object.file.version,
            alignment: object.file.alignment as u32,
        };
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(info, &value) }
    })
}

/// Fills `tensor` with the one at `index`, in the file's order; set its `struct_size` first.
#[no_mangle]
pub unsafe extern "C" fn nvb_gguf_get_tensor(
    file: *const nvb_gguf,
    index: usize,
    tensor: *mut nvb_gguf_tensor,
) -> nvb_status {
    guard!(nvb_gguf_get_tensor, {
        let object = GGUF_FILES.get(file)?;
        expect_index("index", index, object.file.tensors.len())?;
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(tensor, &object.tensor(index)) }
    })
}

/// Fills `tensor` with the one of this name; set its `struct_size` first.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` if the file has none.
#[no_mangle]
pub unsafe extern "C" fn nvb_gguf_find_tensor(
    file: *const nvb_gguf,
    name: *const c_char,
    tensor: *mut nvb_gguf_tensor,
) -> nvb_status {
    guard!(nvb_gguf_find_tensor, {
        let object = GGUF_FILES.get(file)?;
        // SAFETY: NULL or a string, by the header's contract.
        let name = unsafe { text("name", name)? };
        let index = object.file.tensor_index(&name);
        let index = index.ok_or_else(|| Error::invalid(format!("the file has no tensor `{name}`")))?;
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(tensor, &object.tensor(index)) }
    })
}

/// Fills `value` with the metadata value at `index`, in the file's order; set its `struct_size` first.
#[no_mangle]
pub unsafe extern "C" fn nvb_gguf_get_value(
    file: *const nvb_gguf,
    index: usize,
    value: *mut nvb_gguf_value,
) -> nvb_status {
    guard!(nvb_gguf_get_value, {
        let object = GGUF_FILES.get(file)?;
        expect_index("index", index, object.file.values.len())?;
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(value, &object.value(index)) }
    })
}

/// Fills `value` with the metadata value of this key; set its `struct_size` first.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` if the file has none.
#[no_mangle]
pub unsafe extern "C" fn nvb_gguf_find_value(
    file: *const nvb_gguf,
    key: *const c_char,
    value: *mut nvb_gguf_value,
) -> nvb_status {
    guard!(nvb_gguf_find_value, {
        let object = GGUF_FILES.get(file)?;
        // SAFETY: NULL or a string, by the header's contract.
        let key = unsafe { text("key", key)? };
        let index = object.file.value_index(&key);
        let index = index.ok_or_else(|| Error::invalid(format!("the file has no metadata `{key}`")))?;
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(value, &object.value(index)) }
    })
}

/// Writes where text `index` of an `NVB_GGUF_TEXTS` value begins to `data` and its bytes to `bytes`: in the file, without a
/// closing NUL.
#[no_mangle]
pub unsafe extern "C" fn nvb_gguf_get_text(
    file: *const nvb_gguf,
    key: *const c_char,
    index: usize,
    data: *mut *const c_char,
    bytes: *mut usize,
) -> nvb_status {
    guard!(nvb_gguf_get_text, {
        let object = GGUF_FILES.get(file)?;
        expect_out("data", data)?;
        expect_out("bytes", bytes)?;
        // SAFETY: NULL or a string, by the header's contract.
        let key = unsafe { text("key", key)? };
        let at = object.file.value_index(&key);
        let at = at.ok_or_else(|| Error::invalid(format!("the file has no metadata `{key}`")))?;
        let Content::Texts(texts) = &object.file.values[at].content else {
            return Err(Error::invalid(format!("the metadata `{key}` is no array of texts")));
        };
        expect_index("index", index, texts.len())?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe {
            data.write(object.at(texts[index].start).cast());
            bytes.write(texts[index].len());
        }
        Ok(())
    })
}
