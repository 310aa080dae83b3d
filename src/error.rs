//! The library's one error type: a status of the C ABI with the text, numbers and advice that belong to it.

use std::fmt;

/// `numbered! { enum X: u32 { A = 0, … } }`: an enum whose numbers the C ABI or files have, all of it in order, and the way
/// back from a number.
macro_rules! numbered {
    ($(#[$meta:meta])* $vis:vis enum $name:ident: $number:ident { $($(#[$doc:meta])* $variant:ident = $value:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr($number)]
        $vis enum $name {
            $($(#[$doc])* $variant = $value,)+
        }

        impl $name {
            pub const ALL: [$name; [$($value),+].len()] = [$($name::$variant),+];

            pub const fn from_code(code: $number) -> Option<$name> {
                match code {
                    $($value => Some($name::$variant),)+
                    _ => None,
                }
            }
        }
    };
}
pub(crate) use numbered;

numbered! {
    /// Status codes of the C ABI. Numbers are never reused; hundreds are families, see [`Status::parent`].
    pub enum Status: i32 {
        Ok = 0,
        Error = 1,
        InvalidArgument = 100,
        Configuration = 200,
        Unsupported = 300,
        Device = 400,
        CudaNotAvailable = 401,
        DeviceLost = 402,
        InvalidComputeCapability = 403,
        InvalidArchitecture = 404,
        MemoryAllocation = 500,
        OutOfMemory = 501,
        KernelLaunch = 600,
        KernelBuild = 601,
        Attention = 700,
        Fp8 = 800,
        Optimization = 900,
        Communication = 1000,
        AbiMismatch = 1100,
        Io = 1200,
        Internal = 1300,
    }
}

impl Status {
    /// The next more general status; `Error` is the root of all failures and `Ok` its own parent.
    pub fn parent(self) -> Status {
        match self {
            Status::Ok => Status::Ok,
            Status::CudaNotAvailable
            | Status::DeviceLost
            | Status::InvalidComputeCapability
            | Status::InvalidArchitecture => Status::Device,
            Status::OutOfMemory => Status::MemoryAllocation,
            Status::KernelBuild => Status::KernelLaunch,
            Status::AbiMismatch => Status::InvalidArgument,
            _ => Status::Error,
        }
    }

    /// The constant's name in `nvbackend.h`, NUL-terminated for C.
    pub fn c_name(self) -> &'static std::ffi::CStr {
        match self {
            Status::Ok => c"NVB_OK",
            Status::Error => c"NVB_ERROR",
            Status::InvalidArgument => c"NVB_ERROR_INVALID_ARGUMENT",
            Status::Configuration => c"NVB_ERROR_CONFIGURATION",
            Status::Unsupported => c"NVB_ERROR_UNSUPPORTED",
            Status::Device => c"NVB_ERROR_DEVICE",
            Status::CudaNotAvailable => c"NVB_ERROR_CUDA_NOT_AVAILABLE",
            Status::DeviceLost => c"NVB_ERROR_DEVICE_LOST",
            Status::InvalidComputeCapability => c"NVB_ERROR_INVALID_COMPUTE_CAPABILITY",
            Status::InvalidArchitecture => c"NVB_ERROR_INVALID_ARCHITECTURE",
            Status::MemoryAllocation => c"NVB_ERROR_MEMORY_ALLOCATION",
            Status::OutOfMemory => c"NVB_ERROR_OUT_OF_MEMORY",
            Status::KernelLaunch => c"NVB_ERROR_KERNEL_LAUNCH",
            Status::KernelBuild => c"NVB_ERROR_KERNEL_BUILD",
            Status::Attention => c"NVB_ERROR_ATTENTION",
            Status::Fp8 => c"NVB_ERROR_FP8",
            Status::Optimization => c"NVB_ERROR_OPTIMIZATION",
            Status::Communication => c"NVB_ERROR_COMMUNICATION",
            Status::AbiMismatch => c"NVB_ERROR_ABI_MISMATCH",
            Status::Io => c"NVB_ERROR_IO",
            Status::Internal => c"NVB_ERROR_INTERNAL",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.c_name().to_str().expect("status names are ASCII"))
    }
}

/// A failure: what happened, with the numbers behind it. `requested` and `limit` are 0 where they mean nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    pub status: Status,
    pub message: String,
    /// What the caller can do about it; empty when the message says all.
    pub advice: String,
    /// The driver's or runtime's code, 0 when CUDA had no part in it.
    pub cuda_code: i32,
    pub requested: u64,
    pub limit: u64,
    /// What led to it, itself with its cause.
    #[source]
    pub cause: Option<Box<Error>>,
    /// The state of the memory manager that had no memory left.
    pub memory: Option<Box<MemoryFailure>>,
}

/// What a memory manager held when an allocation failed. All in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryFailure {
    pub requested: u64,
    /// 0: none
    pub limit: u64,
    /// In live blocks.
    pub allocated: u64,
    /// Held of the device.
    pub reserved: u64,
    /// Held, and in no live block.
    pub cached: u64,
    pub largest_free: u64,
    pub device_free: u64,
    pub device_total: u64,
    /// Bit k: recovery step k of the ladder was tried.
    pub recovery_steps_tried: u32,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn new(status: Status, message: impl Into<String>) -> Error {
        Error {
            status,
            message: message.into(),
            advice: String::new(),
            cuda_code: 0,
            requested: 0,
            limit: 0,
            memory: None,
            cause: None,
        }
    }

    pub fn invalid(message: impl Into<String>) -> Error {
        Error::new(Status::InvalidArgument, message)
    }

    pub fn unsupported(message: impl Into<String>) -> Error {
        Error::new(Status::Unsupported, message)
    }

    pub fn with_advice(mut self, advice: impl Into<String>) -> Error {
        self.advice = advice.into();
        self
    }

    pub fn with_cuda_code(mut self, code: i32) -> Error {
        self.cuda_code = code;
        self
    }

    pub fn with_limit(mut self, requested: u64, limit: u64) -> Error {
        self.requested = requested;
        self.limit = limit;
        self
    }

    /// The error at the end of the chain of causes becomes `cause`: what failed first comes last.
    pub fn caused_by(mut self, cause: Error) -> Error {
        self.cause = Some(Box::new(match self.cause.take() {
            Some(nearer) => nearer.caused_by(cause),
            None => cause,
        }));
        self
    }

    /// Prefixes the message with what was being done, keeping the numbers, and keeps the error as it was as the cause.
    pub fn context(self, doing: impl fmt::Display) -> Error {
        let message = format!("{doing}: {}", self.message);
        Error { message, cause: Some(Box::new(self.clone())), ..self }
    }

    /// This error, then its cause, and so on to the first.
    pub fn chain(&self) -> impl Iterator<Item = &Error> {
        std::iter::successors(Some(self), |error| error.cause.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_reaches_the_root() {
        for status in Status::ALL {
            let mut at = status;
            let mut steps = 0;
            while at != Status::Ok && at != Status::Error {
                at = at.parent();
                steps += 1;
                assert!(steps < 4, "{status} has no root");
            }
            assert_eq!(Status::from_code(status as i32), Some(status));
        }
        assert_eq!(Status::from_code(7), None);
    }

    #[test]
    fn causes_are_chained_from_the_last_to_the_first() {
        let first = Error::new(Status::DeviceLost, "the GPU is gone").with_cuda_code(700).with_limit(2, 1);
        let error = first.context("copying").caused_by(Error::new(Status::Io, "a loose cable"));
        let messages: Vec<&str> = error.chain().map(|error| error.message.as_str()).collect();
        assert_eq!(messages, ["copying: the GPU is gone", "the GPU is gone", "a loose cable"]);
        assert_eq!((error.status, error.cuda_code, error.requested), (Status::DeviceLost, 700, 2));
        assert_eq!(std::error::Error::source(&error).unwrap().to_string(), "the GPU is gone");
    }
}
