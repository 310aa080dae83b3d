//! What most launchers use.

pub(super) use super::executor::CudaExecutor;
pub(super) use super::launch::{data_of, dtype_of, mirror, stride_of, vector_dtype_of, vector_of, Launch};
pub(super) use super::scratch::{ScratchGuard, WorkspaceUse};
pub(super) use super::workspace::Workspace;
pub(super) use crate::device::RawHandle;
pub(super) use crate::error::{Error, Result, Status};
pub(super) use crate::operation::linear_product::LinearProduct;
pub(super) use crate::operation::quantized_rows::QuantizedRows;
pub(super) use crate::tensor::{DType, Matrix};
pub(super) use std::ffi::c_void;
