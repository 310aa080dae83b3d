//! Which device a configuration asks for.

use crate::error::{Error, Result, Status};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selector {
    /// The best GPU, else the CPU.
    Auto,
    Cpu,
    Cuda(i32),
    /// Which no executor is there for.
    Tpu(i32),
}

impl Selector {
    /// The texts "auto", "cpu", "cuda" (ordinal 0), "cuda:N" and "tpu:N".
    pub fn parse(text: &str) -> Result<Selector> {
        one_device(text).ok_or_else(|| {
            let wrong = |what: &str| Error::new(Status::Configuration, format!("device is \"{text}\"; {what}"));
            if is_list(text) {
                wrong("a backend runs on one device").with_advice(
                    "create one backend for each device, and let nvb_backend_enable_peer_access reach from one to the other",
                )
            } else {
                wrong("\"auto\", \"cpu\", \"cuda\" or \"cuda:N\" is needed")
            }
        })
    }
}

fn one_device(text: &str) -> Option<Selector> {
    match text {
        "auto" => return Some(Selector::Auto),
        "cpu" => return Some(Selector::Cpu),
        "cuda" => return Some(Selector::Cuda(0)),
        _ => {}
    }
    let (kind, digits) = text.split_once(':')?;
    // `parse` would take a sign.
    let digits = Some(digits).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
    let ordinal = digits.parse::<u16>().ok().map(i32::from)?;
    match kind {
        "cuda" => Some(Selector::Cuda(ordinal)),
        "tpu" => Some(Selector::Tpu(ordinal)),
        _ => None,
    }
}

/// Several devices as other libraries name them: "cuda:0,1", "cuda:0,cuda:1", "cpu,cuda".
fn is_list(text: &str) -> bool {
    let mut parts = text.split(',').map(str::trim);
    let is_ordinal = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    parts.next().and_then(one_device).is_some()
        && text.contains(',')
        && parts.all(|part| is_ordinal(part) || one_device(part).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_are_parsed_exactly() {
        assert_eq!(Selector::parse("auto").unwrap(), Selector::Auto);
        assert_eq!(Selector::parse("cuda").unwrap(), Selector::Cuda(0));
        assert_eq!(Selector::parse("cuda:3").unwrap(), Selector::Cuda(3));
        assert_eq!(Selector::parse("tpu:1").unwrap(), Selector::Tpu(1));
        for wrong in [
            "",
            "gpu",
            "cuda:",
            "cuda:-1",
            "cuda:+1",
            "cuda: 1",
            "cuda:x",
            "tpu",
            "tpu:",
            "tpu:+1",
            "CPU",
            "cuda:99999999",
            "cuda:0,",
            "cuda:0,x",
            ",0",
            "cpu:0",
        ] {
            let error = Selector::parse(wrong).unwrap_err();
            assert_eq!(error.status, Status::Configuration, "{wrong}");
            assert!(error.message.contains("\"cuda:N\" is needed"), "{error}");
        }
    }

    #[test]
    fn a_list_of_devices_is_answered_with_the_reason_and_the_advice() {
        for list in ["cuda:0,1", "cuda:0, cuda:1", "cuda,cpu", "tpu:0,1,2,3"] {
            let error = Selector::parse(list).unwrap_err();
            assert_eq!(error.status, Status::Configuration);
            assert_eq!(error.message, format!("device is \"{list}\"; a backend runs on one device"));
            assert!(error.advice.contains("one backend for each device"), "{}", error.advice);
        }
    }
}
