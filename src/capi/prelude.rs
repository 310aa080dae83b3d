//! What most files of the C ABI use.

pub(super) use super::backend::{nvb_backend, stream_of, BACKENDS};
pub(super) use super::guard::guard;
pub(super) use super::handle::Table;
pub(super) use super::status::nvb_status;
pub(super) use super::stream::nvb_stream;
pub(super) use super::structs::{
    copied, expect_out, expect_reserved, fixed_text, flag, give_text, read, slice, text, versioned, write, write_out,
};
pub(super) use crate::backend::Backend;
pub(super) use crate::error::{Error, Result, Status};
pub(super) use std::ffi::{c_char, c_void};
pub(super) use std::sync::Arc;
