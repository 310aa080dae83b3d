//! What must hold after every call.

use super::arguments::{Call, Watched};
use super::interface::{self, Function, HANDLES};
use crate::crash::fail;

const INVALID_ARGUMENT: i32 = 100;
const INTERNAL: i32 = 1300;

pub fn after(function: &Function, call: &Call, answer: usize) {
    if !function.fallible {
        watched(call, true);
        return;
    }
    let status = answer as i32;
    // SAFETY: any number is taken; the answer is a text of the library's.
    let name = unsafe { std::ffi::CStr::from_ptr(interface::nvb_status_name(status).cast()) };
    if name == c"unknown status" {
        fail(&format!("the status {status}, which the header does not have,"));
    }
    if status == 0 {
        watched(call, true);
        texts(call);
        handles_lived(function, call);
        return;
    }
    let message = message();
    if status == INTERNAL && (function.name != "nvb_test_inject_panic" && !message.contains("in an earlier call")) {
        fail(&format!("an internal error: {message}"));
    }
    if !message.starts_with(&format!("{}: ", function.name)) || message.len() <= function.name.len() + 2 {
        fail(&format!("an error that does not name its function: {message:?}"));
    }
    detail(status);
    watched(call, false);
    // With nothing else wrong, a handle that is none is the caller's mistake.
    let wrong: Vec<_> = call.handles.iter().filter(|given| !given.alive && given.value != 0).collect();
    if let ([given], true) = (&wrong[..], call.is_wrong) {
        let poisoned = status == INTERNAL;
        if status != INVALID_ARGUMENT && !poisoned && call.handles.first().is_some_and(|it| std::ptr::eq(it, *given)) {
            fail(&format!(
                "the status {status} for {:#x}, which is no live {}: {message}",
                given.value, HANDLES[given.kind]
            ));
        }
    }
}

pub fn message() -> String {
    let mut text = vec![0u8; 8192];
    // SAFETY: a buffer of its size.
    let needed = unsafe { interface::nvb_last_error_message(text.as_mut_ptr().cast(), text.len()) };
    text.truncate(needed.saturating_sub(1).min(text.len() - 1));
    match String::from_utf8(text) {
        Ok(text) => text,
        Err(_) => fail("an error's text that is no UTF-8"),
    }
}

fn detail(status: i32) {
    // SAFETY: zero is a value of each field.
    let mut detail: interface::nvb_error_detail = unsafe { std::mem::zeroed() };
    detail.struct_size = size_of_val(&detail);
    // SAFETY: a struct with its size set.
    let asked = unsafe { interface::nvb_last_error_get((&raw const detail).cast()) };
    if asked != 0 || detail.status != status {
        fail(&format!("the status {status}, of which nvb_last_error_get says {}", detail.status));
    }
}

/// Inputs stay, and outputs of a failed call.
fn watched(call: &Call, succeeded: bool) {
    for Watched { address, before, what, output, head, end } in &call.watched {
        // SAFETY: memory that the call was given.
        let now = unsafe { std::slice::from_raw_parts(*address as *const u8, before.len()) };
        if !*output || !succeeded {
            if now != before {
                fail(&format!(
                    "{what} was changed by a call that {}",
                    if succeeded { "only reads it" } else { "failed" }
                ));
            }
        } else if now[..*head] != before[..*head] || now[*end..] != before[*end..] {
            fail(&format!("{what} was written outside the part that the library knows"));
        }
    }
}

fn texts(call: &Call) {
    for &(address, capacity) in &call.texts {
        // SAFETY: a buffer that the call was given.
        let text = unsafe { std::slice::from_raw_parts(address as *const u8, capacity) };
        if capacity > 0 {
            match text.iter().position(|&byte| byte == 0) {
                None => fail("a text without a closing NUL"),
                Some(end) if std::str::from_utf8(&text[..end]).is_err() => {
                    fail("a text that is cut inside a character")
                }
                Some(_) => {}
            }
        }
    }
}

/// No call succeeds with a handle that is none. NULL has a meaning in some.
fn handles_lived(function: &Function, call: &Call) {
    for given in &call.handles {
        if !given.alive && given.value != 0 {
            fail(&format!(
                "success of {} with {:#x}, which is no live {}",
                function.name, given.value, HANDLES[given.kind]
            ));
        }
    }
}
