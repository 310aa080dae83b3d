//! A file of a graph's decisions, or with a first byte other than "{" its fields behind the header alone, with a checksum that fits:
//! what is taken prints as a file with the same decisions.
#![no_main]

use nvbackend::graph::decisions_file::{parse, print, sum, FORMAT, MARK};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let header = vec![("device", "a GPU".to_string())];
    let whole = if text.starts_with('{') {
        text.to_string()
    } else {
        sum(&format!("{MARK}  \"format\": \"{FORMAT}\",\n  \"device\": \"a GPU\",\n  {text}"))
    };
    if let Ok(decisions) = parse(&whole, &header) {
        let printed = String::from_utf8(print(&header, &decisions).expect("memory")).expect("text");
        let again = parse(&printed, &header).expect("what is printed is taken");
        assert_eq!(again, decisions, "other decisions after a round trip");
    }
});
