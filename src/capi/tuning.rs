//! The auto-tuner.

use super::operations::activation;
use super::prelude::*;
use super::weight::{
    format_of, nvb_weight, nvb_weight_desc, weight_of, WeightObject, NVB_WEIGHT_FORMAT_AS_IS, NVB_WEIGHT_GATED,
    NVB_WEIGHT_STACKED,
};
use crate::allocation::{collected, push};
use crate::memory::expect_awake;
use crate::tensor::DType;
use crate::tuning::case::{Case, CaseWeight};
use crate::tuning::tuner::{Options, Outcome, Progress, Report};
use crate::tuning::Clock;
use crate::weight::Arrangement;
use std::ops::ControlFlow;

/// A product for `nvb_tune_linear` and `nvb_kernel_explain`: [M, K] · [N, K]ᵀ with a weight that exists, or one that is
/// described.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_linear_case {
    pub struct_size: usize,
    /// Optional: gives N, K and all that is said about the weight below, which is then 0. It is read, not changed.
    pub weight: *const nvb_weight,
    /// M. Choices hold for all M up to it and above half the next power of two.
    pub rows: u64,
    /// N; even for a gated weight.
    pub columns: u64,
    /// K, the terms of each sum: columns of the input and of the weight.
    pub depth: u64,
    /// `NVB_DTYPE_…`; 0: the backend's default, BF16 on a GPU and F32 on the CPU.
    pub input_dtype: u32,
    /// `NVB_DTYPE_…`; 0: the input's.
    pub output_dtype: u32,
    /// `NVB_ACTIVATION_…`
    pub activation: u32,
    /// 1: with a bias.
    pub bias: u32,
    /// What the weight is kept in, `NVB_WEIGHT_FORMAT_…` as in `nvb_weight_info.encoding`; 0 with `weight` alone.
    pub format: u32,
    /// Means what it means in `nvb_weight_desc`, and so do the two fields behind it.
    pub granularity: u32,
    pub group_size: u32,
    pub zero_points: u32,
    /// `NVB_WEIGHT_STACKED` or `NVB_WEIGHT_GATED`.
    pub arrangement: u32,
    /// 1: with a residual.
    pub residual: u32,
}

/// `nvb_tune_options.clock`: events of the device.
pub const NVB_TUNE_CLOCK_EVENTS: u32 = 0;
/// `nvb_tune_options.clock`: the host's clock around the launches.
pub const NVB_TUNE_CLOCK_HOST: u32 = 1;

/// Options of `nvb_tune_linear` and `nvb_tune_attention`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_tune_options {
    pub struct_size: usize,
    /// Timed rounds a candidate, whose median counts; 0: 7.
    pub rounds: u32,
    /// `NVB_TUNE_CLOCK_…`
    pub clock: u32,
}

/// `nvb_tune_progress.outcome`: `seconds` is its median.
pub const NVB_TUNE_MEASURED: u32 = 0;
/// `nvb_tune_progress.outcome`: its output is not the reference's, so it cannot be chosen; `reason` names an element.
pub const NVB_TUNE_WRONG: u32 = 1;
/// `nvb_tune_progress.outcome`: it does not run; `reason` says why.
pub const NVB_TUNE_FAILED: u32 = 2;
/// `nvb_tune_progress.outcome`: so slow in a first round (`seconds`) that it was not measured further; of variations all but
/// the fastest.
pub const NVB_TUNE_SLOW: u32 = 3;
/// `nvb_tune_progress.outcome`: the case is done, and this is its choice.
pub const NVB_TUNE_CHOSEN: u32 = 4;

/// What became of one candidate.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_tune_progress {
    pub struct_size: usize,
    /// The case's place in `cases`.
    pub case_index: u64,
    pub case_count: u64,
    /// The place among the case's candidates, whose count grows when variations of the fastest join.
    pub candidate: u32,
    pub candidate_count: u32,
    /// `NVB_TUNE_…`
    pub outcome: u32,
    /// 0
    pub reserved: u32,
    /// The time of one product; 0 with `NVB_TUNE_WRONG` and `NVB_TUNE_FAILED`.
    pub seconds: f64,
    /// The kernel, and which of a vendor library's algorithms.
    pub name: [c_char; 96],
    pub reason: [c_char; 256],
}

/// Hears of each candidate, from within `nvb_tune_linear`. 0: go on. Anything else ends the tuning: cases that are done
/// keep their choices.
pub type nvb_tune_callback =
    Option<unsafe extern "C" fn(progress: *const nvb_tune_progress, user_data: *mut c_void) -> u32>;

/// What `nvb_tune_linear` did.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_tune_report {
    pub struct_size: usize,
    /// Cases that have a choice now.
    pub tuned: u64,
    /// Cases whose choice is now another than the default.
    pub changed: u64,
    /// Candidates that ran and were right.
    pub measured: u64,
    /// Candidates with a wrong output.
    pub wrong: u64,
    /// Candidates that did not run.
    pub failed: u64,
    /// 1 if the callback ended it.
    pub stopped: u32,
    /// 1 if the choices are in the file; 0 without a file, or with `file_error`.
    pub saved: u32,
    /// Seconds of one product of each tuned case together, by default.
    pub default_seconds: f64,
    /// Seconds of one product of each tuned case together, as chosen.
    pub chosen_seconds: f64,
    /// Why the file could not be written; the choices hold for this backend all the same.
    pub file_error: [c_char; 256],
}
versioned!(nvb_linear_case, nvb_tune_options, nvb_tune_progress, nvb_tune_report);

/// The case, and the weight that it needs alive.
///
/// # Safety
/// `case` is NULL or a struct with its size set.
pub(super) unsafe fn case_of(
    backend: &Backend,
    case: *const nvb_linear_case,
) -> Result<(Option<Arc<WeightObject>>, Case)> {
    // SAFETY: the caller's contract.
    let case = unsafe { read(case)? };
    let dtype = |name: &str, code: u32, default: DType| match code {
        0 => Ok(default),
        _ => DType::from_code(code)
            .filter(|dtype| dtype.is_float())
            .ok_or_else(|| Error::invalid(format!("{name} is {code}; NVB_DTYPE_F32, F16 or BF16 is needed"))),
    };
    let input = dtype("input_dtype", case.input_dtype, backend.default_dtype())?;
    let output = dtype("output_dtype", case.output_dtype, input)?;
    let (object, weight) = match case.weight.is_null() {
        true => (None, described(backend, &case)?),
        false => {
            let described = [case.columns, case.depth].iter().any(|&extent| extent != 0)
                || [case.format, case.granularity, case.group_size, case.zero_points, case.arrangement]
                    .iter()
                    .any(|&field| field != 0);
            if described {
                return Err(Error::invalid(
                    "`weight` is given, so columns, depth, format, granularity, group_size, zero_points and arrangement must be 0",
                ));
            }
            let (object, view) = weight_of(backend, case.weight)?;
            let span = object.weight.span();
            (Some(object), CaseWeight::Given { view, span })
        }
    };
    for (name, flag) in [("bias", case.bias), ("residual", case.residual)] {
        if flag > 1 {
            return Err(Error::invalid(format!("{name} is {flag}; 0 or 1 is needed")));
        }
    }
    let case = Case {
        rows: extent("rows", case.rows)?,
        input,
        output,
        activation: activation(case.activation)?,
        bias: case.bias == 1,
        residual: case.residual == 1,
        weight,
    };
    // What no product can be is refused here, before anything is measured.
    case.shape()?;
    Ok((object, case))
}

fn extent(name: &str, value: u64) -> Result<usize> {
    usize::try_from(value)
        .ok()
        .filter(|&value| value <= i32::MAX as usize)
        .ok_or_else(|| Error::invalid(format!("{name} is {value}; up to {} is supported", i32::MAX)))
}

fn described(backend: &Backend, case: &nvb_linear_case) -> Result<CaseWeight> {
    if case.format == NVB_WEIGHT_FORMAT_AS_IS {
        return Err(Error::invalid("format is 0 and `weight` NULL; one of them must say what the weight is"));
    }
    let arrangement = match case.arrangement {
        NVB_WEIGHT_STACKED => Arrangement::Stacked,
        NVB_WEIGHT_GATED => Arrangement::Gated,
        other => return Err(Error::invalid(format!("arrangement is {other}; NVB_WEIGHT_… (0 or 1) is needed"))),
    };
    // SAFETY: integers and null pointers.
    let zeroed: nvb_weight_desc = unsafe { std::mem::zeroed() };
    let desc = nvb_weight_desc {
        format: case.format,
        granularity: case.granularity,
        group_size: case.group_size,
        zero_points: case.zero_points,
        ..zeroed
    };
    let format = format_of(&desc)?.ok_or_else(|| Error::new(Status::Internal, "a format that is as it is"))?;
    let (rows, columns) = (extent("columns", case.columns)?, extent("depth", case.depth)?);
    CaseWeight::described(&**backend.executor(), format, arrangement, rows, columns)
}

/// Measures, for each of `count` products, the kernels that can do it, with caches cold, and lets products like it run the
/// fastest from then on: of the same N, K, dtypes and weight format, and an M with the same next power of two. A candidate
/// whose output is not that of the plainest kernel is never chosen. Choices are added to the backend's tuning file, if it has
/// one, after each case. `cases` is an array of structs of the size that the first one says. `options` may be NULL for the
/// defaults, as may `callback` and `report`; set `report->struct_size` first.
///
/// Takes device memory for the product and for copies of the weight, twice the last cache level, and up to seconds a case. Runs
/// on a stream of its own: let the device be idle, or the times mean little. Not while a stream is captured.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (a case; nothing has been measured then), `NVB_ERROR_OUT_OF_MEMORY`,
/// `NVB_ERROR_CONFIGURATION` (on a GPU with `batch_invariant`, under which there is nothing to choose).
#[no_mangle]
pub unsafe extern "C" fn nvb_tune_linear(
    backend: *const nvb_backend,
    cases: *const nvb_linear_case,
    count: usize,
    options: *const nvb_tune_options,
    callback: nvb_tune_callback,
    user_data: *mut c_void,
    report: *mut nvb_tune_report,
) -> nvb_status {
    guard!(nvb_tune_linear, {
        let object = BACKENDS.get(backend)?;
        let backend = &object.backend;
        // SAFETY: a struct with its size set, or NULL, by the header's contract.
        let (options, clock) = unsafe { convert_options(options)? };
        // SAFETY: `count` structs, by the header's contract.
        let kept_alive = unsafe { convert_cases(backend, cases, count)? };
        for weight in kept_alive.iter().filter_map(|(weight, _)| weight.as_ref()) {
            expect_awake(weight.weight.view().data).map_err(|error| error.context("the weight"))?;
        }
        let cases: Vec<Case> = collected(kept_alive.iter().map(|(_, case)| *case), "the cases to tune")?;
        if !report.is_null() {
            // SAFETY: the header asks for a struct with its size set; a wrong one is found before the work.
            unsafe { read(report.cast_const())? };
        }
        // SAFETY: the engine's function and data, by the header's contract.
        let mut progress = unsafe { listener(callback, user_data) };
        let (found, unkept) = backend.tune(&cases, options, clock, &mut progress)?;
        if report.is_null() {
            return Ok(());
        }
        let value = convert_report(&found, unkept.as_ref(), backend.tuning().path().is_some());
        // SAFETY: checked above.
        unsafe { write(report, &value) }
    })
}

/// # Safety
/// `options` is NULL or a struct with its size set.
pub(super) unsafe fn convert_options(options: *const nvb_tune_options) -> Result<(Options, Clock)> {
    if options.is_null() {
        return Ok((Options::default(), Clock::default()));
    }
    // SAFETY: the caller's contract.
    let options = unsafe { read(options)? };
    let clock = match options.clock {
        NVB_TUNE_CLOCK_EVENTS => Clock::Events,
        NVB_TUNE_CLOCK_HOST => Clock::Host,
        other => return Err(Error::invalid(format!("clock is {other}; NVB_TUNE_CLOCK_… (0 or 1) is needed"))),
    };
    let rounds = if options.rounds == 0 { Options::default().rounds } else { options.rounds as usize };
    Ok((Options { rounds }, clock))
}

/// # Safety
/// `cases` points at `count` structs of the size that the first one says.
unsafe fn convert_cases(
    backend: &Backend,
    cases: *const nvb_linear_case,
    count: usize,
) -> Result<Vec<(Option<Arc<WeightObject>>, Case)>> {
    let mut converted = Vec::new();
    if count == 0 {
        return Ok(converted);
    }
    // SAFETY: the caller's contract; NULL is refused.
    unsafe { read(cases)? };
    // SAFETY: as above.
    let size = unsafe { cases.cast::<usize>().read_unaligned() };
    for index in 0..count {
        // SAFETY: one of the array's structs.
        let case = unsafe { case_of(backend, cases.byte_add(index * size)) };
        let case = case.map_err(|error| error.context(format_args!("cases[{index}]")))?;
        push(&mut converted, case, "the cases to tune")?;
    }
    Ok(converted)
}

/// What tells the engine of each candidate.
///
/// # Safety
/// The function may be called with the data as long as what is returned lives.
pub(super) unsafe fn listener(
    callback: nvb_tune_callback,
    user_data: *mut c_void,
) -> impl FnMut(&Progress) -> ControlFlow<()> {
    move |progress| {
        let Some(callback) = callback else { return ControlFlow::Continue(()) };
        let value = convert_progress(progress);
        // SAFETY: the caller's contract.
        match unsafe { callback(&value, user_data) } {
            0 => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        }
    }
}

fn convert_progress(progress: &Progress) -> nvb_tune_progress {
    let (outcome, seconds, reason) = match progress.outcome {
        Outcome::Measured(seconds) => (NVB_TUNE_MEASURED, *seconds, ""),
        Outcome::Wrong(why) => (NVB_TUNE_WRONG, 0.0, why.as_str()),
        Outcome::Failed(why) => (NVB_TUNE_FAILED, 0.0, why.as_str()),
        Outcome::Slow(seconds) => (NVB_TUNE_SLOW, *seconds, ""),
        Outcome::Chosen(seconds) => (NVB_TUNE_CHOSEN, *seconds, ""),
    };
    nvb_tune_progress {
        struct_size: size_of::<nvb_tune_progress>(),
        case_index: progress.case as u64,
        case_count: progress.cases as u64,
        candidate: progress.candidate as u32,
        candidate_count: progress.candidates as u32,
        outcome,
        reserved: 0,
        seconds,
        name: fixed_text(&progress.choice.label()),
        reason: fixed_text(reason),
    }
}

pub(super) fn convert_report(report: &Report, unkept: Option<&Error>, has_file: bool) -> nvb_tune_report {
    copied!(nvb_tune_report from report {
        default_seconds, chosen_seconds;
        tuned: report.tuned as u64,
        changed: report.changed as u64,
        measured: report.measured as u64,
        wrong: report.wrong as u64,
        failed: report.failed as u64,
        stopped: report.stopped.into(),
        saved: (has_file && unkept.is_none() && report.tuned > 0).into(),
        file_error: fixed_text(unkept.map_or("", |error| error.message.as_str())),
    })
}
