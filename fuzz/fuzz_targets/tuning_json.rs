//! A tuning file's text, or with a first byte other than "{" its entries alone: what is taken prints as a file that gives the
//! same choices.
#![no_main]

use nvbackend::device::DeviceKind;
use nvbackend::registry::choices::Table;
use nvbackend::tuning::file::{parse, print, MARK};
use nvbackend::tuning::header::Header;
use std::collections::HashMap;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let header = Header { fields: vec![("format", "1".into()), ("device", "a GPU".into())] };
    let whole = if text.starts_with('{') {
        text.to_string()
    } else {
        format!("{MARK}  \"format\": \"1\",\n  \"device\": \"a GPU\",\n  \"linear\": {{\n{text}\n  }}\n}}\n")
    };
    for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
        if let Ok(table) = parse(&whole, &header, device) {
            let printed = String::from_utf8(print(&header, &table).expect("memory")).expect("text");
            let again = parse(&printed, &header, device).expect("what is printed is taken");
            // Times may differ in the last bit.
            let choices =
                |table: &Table| table.iter().map(|(key, entry)| (*key, entry.choice)).collect::<HashMap<_, _>>();
            assert_eq!(choices(&again), choices(&table), "other choices after a round trip");
        }
    }
});
