//! Versioned structs: `struct_size` first, read by the smaller of the two sides' sizes.

use crate::error::{Error, Result, Status};
use std::mem::MaybeUninit;

/// A `repr(C)` struct whose first field is `struct_size: usize` and for which all-zero bytes are the defaults.
///
/// # Safety
/// Implementors are `repr(C)`, start with `struct_size: usize`, and any bit pattern of a C caller is a valid value.
pub unsafe trait Versioned: Copy {
    const NAME: &'static str;
    /// Where the fields lie that are followed, which a caller has whole or not at all.
    const POINTERS: &'static [usize];
}

/// `versioned!(name { fields that are followed })`: pointers to memory and callbacks, not handles, which are looked up.
macro_rules! versioned {
    ($($name:ident $({ $($pointer:ident),+ })?),+ $(,)?) => {$(
        // SAFETY: integers, floats, raw pointers and structs of them only, with `struct_size` first (asserted).
        unsafe impl $crate::capi::structs::Versioned for $name {
            const NAME: &'static str = stringify!($name);
            const POINTERS: &'static [usize] = &[$($(std::mem::offset_of!($name, $pointer)),+)?];
        }
        const _: () = assert!(std::mem::offset_of!($name, struct_size) == 0);
    )+};
}
pub(crate) use versioned;

/// A zeroed struct with its size set, as the header's `_init` functions make it: they are inline in C, so Rust has this one.
pub fn init<T: Versioned>() -> T {
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: all-zero bytes are a value of every versioned struct, whose first field is its size.
    unsafe {
        value.as_mut_ptr().cast::<usize>().write(size_of::<T>());
        value.assume_init()
    }
}

/// Copies what the caller has as `read_into` does.
///
/// # Safety
/// The conditions of [`read_into`] hold.
pub unsafe fn read<T: Versioned>(from: *const T) -> Result<T> {
    let mut value = MaybeUninit::uninit();
    // SAFETY: the caller's contract.
    unsafe { read_into(from, &mut value).copied() }
}

/// Copies what the caller has to `to`; fields beyond it are zero, and bytes beyond ours must be zero. Eager calls read their
/// arguments by it, which are hundreds of bytes, because a returned struct is copied once more.
///
/// # Safety
/// `from` is NULL or points at `struct_size` readable bytes, `struct_size` being the value of its first field.
#[inline]
pub unsafe fn read_into<T: Versioned>(from: *const T, to: &mut MaybeUninit<T>) -> Result<&T> {
    if from.is_null() {
        return Err(Error::invalid(format!("{} is NULL", T::NAME)));
    }
    let ours = size_of::<T>();
    // SAFETY: every versioned struct starts with struct_size, and the caller's has at least that field.
    let theirs = unsafe { from.cast::<usize>().read_unaligned() };
    if theirs < size_of::<usize>() || theirs > 1 << 16 {
        return Err(Error::new(
            Status::AbiMismatch,
            format!("{}.struct_size is {theirs}; {ours} is this library's", T::NAME),
        )
        .with_advice(format!("fill the struct with {}_init first", T::NAME))
        .with_limit(theirs as u64, ours as u64));
    }
    let cut = |&&at: &&usize| at < theirs && theirs < at + size_of::<usize>();
    if let Some(at) = T::POINTERS.iter().find(cut) {
        return Err(Error::new(
            Status::AbiMismatch,
            format!("{}.struct_size is {theirs}, which ends inside the pointer at byte {at}", T::NAME),
        )
        .with_advice(format!("fill the struct with {}_init first", T::NAME))
        .with_limit(theirs as u64, ours as u64));
    }
    let bytes = from.cast::<u8>();
    // SAFETY: `theirs` bytes are readable by the caller's word.
    if theirs > ours && unsafe { std::slice::from_raw_parts(bytes.add(ours), theirs - ours) }.iter().any(|&b| b != 0) {
        return Err(Error::new(
            Status::AbiMismatch,
            format!("{} has {theirs} bytes and uses fields beyond the {ours} that this library knows", T::NAME),
        )
        .with_limit(theirs as u64, ours as u64));
    }
    let known = theirs.min(ours);
    let value = to.as_mut_ptr().cast::<u8>();
    // SAFETY: both ranges hold `known` bytes, and zero bytes are valid for the rest, which ends with the struct.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes, value, known);
        if known < ours {
            value.add(known).write_bytes(0, ours - known);
        }
        Ok(to.assume_init_ref())
    }
}

/// Writes as much of `value` as the caller's struct holds, keeping its `struct_size`.
///
/// # Safety
/// The conditions of [`read`] hold, and the bytes are writable.
pub unsafe fn write<T: Versioned>(to: *mut T, value: &T) -> Result<()> {
    // SAFETY: the caller's contract is `read`'s.
    unsafe { read(to.cast_const())? };
    // SAFETY: `read` accepted the pointer and the size.
    unsafe {
        let theirs = to.cast::<usize>().read_unaligned();
        let skip = size_of::<usize>();
        let count = theirs.min(size_of::<T>()) - skip;
        std::ptr::copy_nonoverlapping((value as *const T).cast::<u8>().add(skip), to.cast::<u8>().add(skip), count);
    }
    Ok(())
}

/// # Safety
/// `out` is NULL or valid for writing.
pub unsafe fn write_out<T>(name: &str, out: *mut T, value: T) -> Result<()> {
    expect_out(name, out)?;
    // SAFETY: not NULL, and valid by the caller's word.
    unsafe { out.write(value) };
    Ok(())
}

/// A field named `reserved`: what it will mean one day must not happen to be in it now.
pub fn expect_reserved(value: u32) -> Result<()> {
    if value == 0 {
        return Ok(());
    }
    Err(Error::invalid(format!("reserved is {value}; 0 is needed")))
}

pub fn expect_out<T>(name: &str, out: *mut T) -> Result<()> {
    if out.is_null() {
        return Err(Error::invalid(format!("the output pointer `{name}` is NULL")));
    }
    Ok(())
}

/// # Safety
/// `data` is NULL or points at `count` readable elements that stay as they are for `'a`.
pub unsafe fn slice<'a, T>(name: &str, data: *const T, count: usize) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if data.is_null() {
        return Err(Error::invalid(format!("`{name}` is NULL with a count of {count}")));
    }
    if count > isize::MAX as usize / size_of::<T>() {
        return Err(Error::invalid(format!("`{name}` has a count of {count}, which no memory holds")));
    }
    // SAFETY: by the caller's word.
    Ok(unsafe { std::slice::from_raw_parts(data, count) })
}

/// Bytes of a caller's text: names, paths and a configuration are far shorter, and messages repeat them.
const MOST_TEXT_BYTES: usize = 32 << 10;

/// # Safety
/// `text` is NULL or a NUL-terminated string.
pub unsafe fn text(name: &str, text: *const std::ffi::c_char) -> Result<String> {
    if text.is_null() {
        return Ok(String::new());
    }
    // SAFETY: by the caller's word.
    let text = unsafe { std::ffi::CStr::from_ptr(text) };
    let bytes = text.to_bytes().len();
    if bytes > MOST_TEXT_BYTES {
        return Err(Error::invalid(format!("`{name}` has {bytes} bytes; at most {MOST_TEXT_BYTES} are taken"))
            .with_limit(bytes as u64, MOST_TEXT_BYTES as u64));
    }
    text.to_str().map(str::to_owned).map_err(|_| Error::invalid(format!("`{name}` is not UTF-8")))
}

/// Copies `text` with a closing NUL, cut at a character boundary to fit; returns the bytes the whole text needs.
///
/// # Safety
/// `to` is NULL or valid for `capacity` bytes.
pub unsafe fn copy_text(text: &str, to: *mut std::ffi::c_char, capacity: usize) -> usize {
    // SAFETY: the caller's contract.
    unsafe { copy_texts(&[text], to, capacity) }
}

/// Copies the texts one after the other, as `copy_text` does with one.
///
/// # Safety
/// The conditions of [`copy_text`] hold.
pub unsafe fn copy_texts(texts: &[&str], to: *mut std::ffi::c_char, capacity: usize) -> usize {
    if !to.is_null() && capacity > 0 {
        let mut at = 0;
        for text in texts {
            let room = capacity - 1 - at;
            let mut length = text.len().min(room);
            while !text.is_char_boundary(length) {
                length -= 1;
            }
            // SAFETY: at + length + 1 ≤ capacity bytes are writable.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to.add(at).cast(), length) };
            at += length;
            if length < text.len() {
                break;
            }
        }
        // SAFETY: as above.
        unsafe { to.add(at).write(0) };
    }
    texts.iter().map(|text| text.len()).sum::<usize>() + 1
}

/// Copies as `copy_text` does, with the size in `needed`, which may be NULL.
///
/// # Safety
/// The conditions of [`copy_text`] hold, and `needed` is NULL or valid for writing.
pub unsafe fn give_text(text: &str, to: *mut std::ffi::c_char, capacity: usize, needed: *mut usize) -> Result<()> {
    // SAFETY: the caller's contract.
    unsafe {
        let bytes = copy_text(text, to, capacity);
        if !needed.is_null() {
            needed.write(bytes);
        }
    }
    Ok(())
}

/// `copied!(nvb_x from value { a, b; c: expression, … })`: a versioned struct that has `a` and `b` of `value`.
macro_rules! copied {
    ($name:ident from $value:ident { $($same:ident),* $(; $($field:ident: $expression:expr),* $(,)?)? }) => {
        $name { struct_size: 0, $($same: $value.$same,)* $($($field: $expression,)*)? }
    };
}
pub(crate) use copied;

/// A field that says yes or no.
pub fn flag(name: &str, value: u32) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::new(Status::Configuration, format!("{name} is {other}; 0 or 1 is needed"))),
    }
}

/// A fixed-size, NUL-terminated name field.
pub fn fixed_text<const N: usize>(text: &str) -> [std::ffi::c_char; N] {
    let mut field = [0; N];
    // SAFETY: the field has N bytes.
    unsafe { copy_text(text, field.as_mut_ptr(), N) };
    field
}
