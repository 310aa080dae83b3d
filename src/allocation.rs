//! Host memory of a size that a caller, a file or a model decides. Rust's collections end the process when they get none, so
//! what may be large asks here, and the want of it is an error like any other.
//!
//! What is no longer than [`SMALL`] needs no care: [`crate::reserve`] stands behind it.

use crate::error::{Error, Result, Status};
use std::collections::TryReserveError;
use std::fmt::Display;

/// An allocation of more bytes must be able to fail. The tables of a slab have as many.
pub const SMALL: usize = 64 << 10;

/// No `bytes` of host memory for `what`.
#[cold]
pub fn no_memory(bytes: usize, what: impl Display) -> Error {
    Error::new(Status::OutOfMemory, format!("{bytes} bytes of host memory for {what} are not to be had"))
        .with_limit(bytes as u64, 0)
}

fn refused<T>(count: usize, what: impl Display) -> impl FnOnce(TryReserveError) -> Error {
    move |_| no_memory(count.saturating_mul(size_of::<T>()), what)
}

/// Empty, with room for `count` elements.
pub fn with_room<T>(count: usize, what: impl Display) -> Result<Vec<T>> {
    let mut items = Vec::new();
    items.try_reserve_exact(count).map_err(refused::<T>(count, what))?;
    Ok(items)
}

/// `count` times the value.
pub fn filled<T: Clone>(value: T, count: usize, what: impl Display) -> Result<Vec<T>> {
    let mut items = with_room(count, what)?;
    items.resize(count, value);
    Ok(items)
}

/// The items, whose number their iterator knows.
pub fn collected<T>(
    items: impl IntoIterator<Item = T, IntoIter: ExactSizeIterator>,
    what: impl Display,
) -> Result<Vec<T>> {
    let items = items.into_iter();
    let mut collected = with_room(items.len(), what)?;
    collected.extend(items);
    Ok(collected)
}

/// The items, of which nobody knows how many there are, up to the first error.
pub fn gathered<T>(items: impl IntoIterator<Item = Result<T>>, what: impl Display) -> Result<Vec<T>> {
    let mut gathered = Vec::new();
    for item in items {
        push(&mut gathered, item?, &what)?;
    }
    Ok(gathered)
}

/// Appends; room for more is made as `Vec::push` makes it, by doubling.
pub fn push<T>(items: &mut Vec<T>, item: T, what: impl Display) -> Result<()> {
    make_room(items, what)?;
    items.push(item);
    Ok(())
}

/// Room for one item more.
pub fn make_room<T>(items: &mut Vec<T>, what: impl Display) -> Result<()> {
    match has_room(items) {
        true => Ok(()),
        false => Err(no_memory((items.len() + 1).saturating_mul(size_of::<T>()), what)),
    }
}

/// Whether there is room for one item more, or room could be made.
pub fn has_room<T>(items: &mut Vec<T>) -> bool {
    items.len() < items.capacity() || items.try_reserve(1).is_ok()
}

/// Appends the item if there is room for it, for lists that may lack some.
pub fn push_if_room<T>(items: &mut Vec<T>, item: T) -> bool {
    let room = has_room(items);
    if room {
        items.push(item);
    }
    room
}

/// Bytes that are written one behind the other, as long as there is memory for them.
#[derive(Default)]
pub struct Text {
    pub bytes: Vec<u8>,
}

impl std::io::Write for Text {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.bytes.try_reserve(bytes.len()).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
