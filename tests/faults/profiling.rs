//! Profiling that the driver refuses.

use crate::child::Outcome;
use crate::driver::works;
use crate::engine::{call, tensor, versioned, Engine};
use crate::fake::{Fake, Mode};
use crate::sweep::{each_fault, expect_clean};
use nvbackend::capi::metrics::*;
use nvbackend::capi::operations::*;
use nvbackend::capi::sampling::*;
use nvbackend::capi::tensor::*;
use std::path::Path;

/// Whichever call of profiling fails, the operation runs and is counted.
pub fn unmeasured(file: &Path) -> Result<String, String> {
    each_fault(&[(Mode::Once, 304)], |n, status, mode| {
        let fake = Fake::open(file);
        let engine = Engine::new().map_err(|failure| failure.to_string())?;
        let stream = engine.stream().map_err(|failure| failure.to_string())?;
        let block = engine.block(4096, stream.raw).map_err(|failure| failure.to_string())?;
        let tensor = tensor(block.pointer, NVB_DTYPE_F32, &[4, 16]);
        let mut args: nvb_elementwise_args = versioned();
        (args.input, args.second, args.output) = (tensor, tensor, tensor);
        works(call!(nvb_backend_set_profiling(engine.backend.raw, 1)))?;
        let before = fake.books();
        fake.fail(n, status, mode);
        let outcome = call!(nvb_add(engine.backend.raw, &args, stream.raw));
        fake.fail(0, 0, Mode::Once);
        let after = fake.books();
        let failed = fake.fault_function();
        let is_measuring = failed.starts_with("cuEvent") || failed == "cuStreamIsCapturing";
        if after.faults == 0 || is_measuring {
            outcome.map_err(|failure| format!("{failed} failed, and with it {failure}"))?;
            if after.launches != before.launches + 1 {
                return Err(format!("{failed} failed, and nothing was launched"));
            }
            let mut metrics: nvb_operation_metrics = versioned();
            works(call!(nvb_backend_get_metrics(engine.backend.raw, NVB_OPERATION_ELEMENTWISE, &mut metrics)))?;
            if (metrics.calls, metrics.timed_calls) != (1, u64::from(after.faults == 0)) {
                return Err(format!("{failed} failed: {} calls, {} timed", metrics.calls, metrics.timed_calls));
            }
        }
        drop((block, stream));
        drop(engine);
        expect_clean(fake, 0)?;
        Ok(if after.faults == 0 { Outcome::NoFault } else { Outcome::Passed })
    })
}
