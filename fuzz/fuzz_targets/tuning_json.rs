//! A tuning file's text, or with a first byte other than "{" the entries of its products, or of its attention, alone: what is
//! taken prints as a file that gives the same choices.
#![no_main]

use nvbackend::device::DeviceKind;
use nvbackend::registry::choices::Found;
use nvbackend::tuning::file::{parse, print, MARK};
use nvbackend::tuning::header::Header;
use std::collections::HashMap;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let header = Header { fields: vec![("format", "1".into()), ("device", "a GPU".into())] };
    let whole = if text.starts_with('{') {
        text.to_string()
    } else {
        let (linear, attention) = if text.contains("\"attention_") { ("", text) } else { (text, "") };
        format!(
            "{MARK}  \"format\": \"1\",\n  \"device\": \"a GPU\",\n  \"linear\": {{\n{linear}\n  }},\n  \"attention\": {{\n{attention}\n  }}\n}}\n"
        )
    };
    for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
        if let Ok(table) = parse(&whole, &header, device) {
            let printed = String::from_utf8(print(&header, &table).expect("memory")).expect("text");
            let again = parse(&printed, &header, device).expect("what is printed is taken");
            // Times may differ in the last bit.
            let choices = |found: &Found| {
                let products = found.products.iter().map(|(key, entry)| (*key, entry.choice));
                let attention = found.attention.iter().map(|(key, entry)| (*key, entry.choice));
                (products.collect::<HashMap<_, _>>(), attention.collect::<HashMap<_, _>>())
            };
            assert_eq!(choices(&again), choices(&table), "other choices after a round trip");
        }
    }
});
