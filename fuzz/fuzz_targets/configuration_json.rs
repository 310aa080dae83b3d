//! A configuration's JSON: what is taken prints as JSON that gives the same configuration, and what is refused changes nothing.
#![no_main]

use nvbackend::configuration::{Configuration, Preset};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let mut configuration = Preset::Inference.configuration();
    let before = configuration.to_json();
    match configuration.apply_json(text) {
        Ok(()) => {
            let printed = configuration.to_json();
            let mut again: Configuration = Preset::Throughput.configuration();
            again.apply_json(&printed).expect("what is printed is taken");
            assert_eq!(again.to_json(), printed);
        }
        Err(error) => {
            assert!(!error.message.is_empty());
            assert_eq!(configuration.to_json(), before, "a refused text changed the configuration");
        }
    }
});
