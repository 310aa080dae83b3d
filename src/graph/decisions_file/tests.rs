use super::*;
use proptest::prelude::*;

fn header() -> Header {
    vec![("device", "a \"GPU\"".to_string()), ("build", "0.1".to_string())]
}

fn decisions() -> Decisions {
    let errors = Errors { relative: 1.5e-3, absolute: f64::INFINITY, outputs: 3, different: 1, worst: None };
    Decisions {
        key: "model \"7\"\n".to_string(),
        fingerprint: 0x0123_4567_89AB_CDEF,
        nodes: 277,
        optimization: Some(Passes {
            level: Level::O3,
            exactness: vec![("dead_work", Exactness::Exact), ("scale", Exactness::Approximate)],
            taken_back: vec![TakenBack { pass: "linear_bias", rewrites: 4, error: f64::INFINITY }],
            errors: Some(errors.clone()),
            times: Some(Times { launches: 10, before: 2.5e-3, after: 2.25e-3 }),
        }),
        conversion: Some(Products {
            weights_alone: true,
            storage_only: false,
            products: vec![
                Product { node: 1, mark: Mark::Auto, converted: true, error: Some(0.01) },
                Product { node: 4, mark: Mark::Keep, converted: false, error: None },
                Product { node: 6, mark: Mark::Auto, converted: false, error: Some(f64::INFINITY) },
            ],
            errors: Some(errors),
            times: None,
        }),
    }
}

fn printed(decisions: &Decisions) -> String {
    String::from_utf8(print(&header(), decisions).unwrap()).unwrap()
}

/// The text with a checksum that fits it.
fn summed(text: &str) -> String {
    sum(text.rsplit_once(CHECKSUM).unwrap().0)
}

#[test]
fn decisions_go_through_text() {
    let all = decisions();
    let alone = [Decisions { conversion: None, ..all.clone() }, Decisions { optimization: None, ..all.clone() }];
    for decisions in alone.into_iter().chain([all]) {
        let text = printed(&decisions);
        assert_eq!(parse(&text, &header()).unwrap(), decisions, "{text}");
        assert_eq!(summed(&text), text);
    }
}

#[test]
fn another_device_build_or_version_is_named() {
    let text = printed(&decisions());
    let mut other = header();
    other[1].1 = "0.2".to_string();
    assert_eq!(parse(&text, &other).unwrap_err(), "its build is \"0.1\", here it is \"0.2\"");
    other.push(("driver", "580".to_string()));
    other[1].1 = "0.1".to_string();
    assert_eq!(parse(&text, &other).unwrap_err(), "the file names no driver");
    assert!(parse(&text, &header()[..1].to_vec()).unwrap_err().contains("does not know"));
    let other = summed(&text.replace("\"format\": \"1\"", "\"format\": \"2\""));
    assert_eq!(parse(&other, &header()).unwrap_err(), "its format is \"2\", here it is \"1\"");
}

#[test]
fn every_truncation_and_what_is_no_such_file_is_refused() {
    let text = printed(&decisions());
    for length in 0..text.len() {
        assert!(parse(&text[..length], &header()).is_err(), "{length}");
    }
    assert!(parse(&format!("{text} "), &header()).unwrap_err().contains("damaged"));
    for other in ["", "{}", "[]", "{\n  \"file\": \"nvbackend tuning\",\n"] {
        assert_eq!(parse(other, &header()).unwrap_err(), "it is no file of a graph's decisions");
    }
}

#[test]
fn wrong_values_are_refused_whatever_the_checksum() {
    let text = printed(&decisions());
    let wrong = [
        ("\"level\":3", "\"level\":2", "may not be"),
        ("\"level\":3", "\"level\":0", "may not be"),
        ("\"level\":3", "\"level\":4", "level is 4"),
        ("\"level\":3", "\"level\":-3", "damaged"),
        ("\"dead_work\":\"exact\"", "\"dead_work\":\"perfect\"", "may not be"),
        ("\"dead_work\":\"exact\"", "\"dead\":\"exact\"", "which is none"),
        ("\"pass\":\"linear_bias\"", "\"pass\":\"linear\"", "a pass that is none"),
        ("\"mark\":1", "\"mark\":9", "a mark is 9"),
        ("\"node\":4", "\"node\":4294967296", "damaged"),
        ("\"node\":4", "\"node\":-4", "damaged"),
        ("\"converted\":true", "\"converted\":1", "damaged"),
        ("\"relative\":0.0015", "\"relative\":-1", "damaged"),
        ("\"relative\":0.0015", "\"relative\":\"NaN\"", "damaged"),
        ("\"weights_alone\":true", "\"weights_alone\":true,\"more\":1", "does not know"),
        ("\"list\": \"01", "\"list\": \"1", "no number"),
        ("\"list\": \"01", "\"list\": \"x1", "no number"),
        ("\"nodes\": 277", "\"nodes\": 1e3", "damaged"),
        ("\"key\": \"", "\"ke\": \"", "names no key"),
    ];
    for (from, to, why) in wrong {
        let changed = summed(&text.replacen(from, to, 1));
        assert_ne!(changed, text, "{from}");
        let error = parse(&changed, &header()).unwrap_err();
        assert!(error.contains(why), "{to}: {error}");
    }
    let nothing = Decisions { optimization: None, conversion: None, ..decisions() };
    assert_eq!(parse(&printed(&nothing), &header()).unwrap_err(), "it decides nothing");
    let long = Decisions { key: "k".repeat(MOST_KEY_BYTES + 1), ..decisions() };
    assert_eq!(parse(&printed(&long), &header()).unwrap_err(), "its key is too long");
}

#[test]
fn files_are_replaced_and_those_of_others_stay() {
    let folder = std::env::temp_dir().join(format!("nvb_decisions_{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("graph.json");
    let again = Decisions { nodes: 1, ..decisions() };
    for decisions in [decisions(), again] {
        write(&path, &header(), &decisions).unwrap();
        assert_eq!(read(&path, &header()).unwrap(), decisions);
    }
    std::fs::write(&path, "somebody else's").unwrap();
    for error in [write(&path, &header(), &decisions()).unwrap_err(), read(&path, &header()).unwrap_err()] {
        assert_eq!(error.status, Status::Io, "{error}");
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "somebody else's");
    std::fs::write(&path, [0xFF; 64]).unwrap();
    assert!(read(&path, &header()).is_err() && write(&path, &header(), &decisions()).is_err());
    std::fs::File::create(&path).unwrap().set_len(MOST_BYTES + 1).unwrap();
    assert!(read(&path, &header()).unwrap_err().message.contains("longer than"));
    for path in [folder.clone(), folder.join("none"), "/dev/zero".into()] {
        assert_eq!(read(&path, &header()).unwrap_err().status, Status::Io, "{}", path.display());
    }
    assert!(write(&folder, &header(), &decisions()).is_err());
    std::fs::remove_dir_all(&folder).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// With a checksum that fits, so that what stands behind it is reached.
    #[test]
    fn no_changed_byte_panics(place in any::<prop::sample::Index>(), byte in 0x20..0x7fu8, fits in any::<bool>()) {
        let mut text = printed(&decisions()).into_bytes();
        let end = text.len() - 30;
        text[place.index(end)] = byte;
        let text = String::from_utf8(text).unwrap();
        let text = if fits && text.contains(CHECKSUM) { summed(&text) } else { text };
        let _ = parse(&text, &header());
    }
}
