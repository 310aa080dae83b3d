//! A configuration as JSON: objects within objects, one entry a field, and "preset" to start from.

use super::field::{check_folder, find, wrong, Value, FIELDS};
use super::{Configuration, Preset};
use crate::error::Result;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::fmt;

impl Configuration {
    /// Changes the fields that the text names; "preset" sets all others first. Nothing changes on an error, which names
    /// the field, the value and what is allowed, or the line and column of what is not JSON.
    pub fn apply_json(&mut self, text: &str) -> Result<()> {
        let mut entries = Vec::new();
        let mut deserializer = serde_json::Deserializer::from_str(text);
        Entries { path: None, entries: &mut entries }
            .deserialize(&mut deserializer)
            .and_then(|()| deserializer.end())
            .map_err(|error| wrong(format!("the configuration's JSON: {error}")))?;
        let mut changed = self.clone();
        if let Some((_, value)) = entries.iter().find(|(path, _)| path == "preset") {
            let preset = match value {
                Value::Text(name) => Preset::from_name(name),
                _ => None,
            };
            let preset = preset.ok_or_else(|| {
                wrong(format!("preset is {value}; one of \"{}\" is needed", Preset::NAMES.join("\", \"")))
            })?;
            changed = preset.configuration();
        }
        for (path, value) in entries.into_iter().filter(|(path, _)| path != "preset") {
            find(&path)?.set(&mut changed, value)?;
        }
        changed.validate()?;
        *self = changed;
        Ok(())
    }

    /// Every field, so that reading it back gives the same configuration whatever the presets become.
    pub fn to_json(&self) -> String {
        let mut root = serde_json::Map::new();
        for field in FIELDS {
            let value = match field.get(self) {
                Value::Text(text) => text.into(),
                Value::Integer(number) => number.into(),
                Value::Number(number) => number.into(),
                Value::Boolean(truth) => truth.into(),
            };
            let mut object = &mut root;
            let (folder, name) = field.path.rsplit_once('.').unwrap_or(("", field.path));
            if !folder.is_empty() {
                let entry = object.entry(folder).or_insert_with(|| serde_json::Map::new().into());
                object = entry.as_object_mut().expect("a folder of fields is no field");
            }
            object.insert(name.to_string(), value);
        }
        format!("{:#}", serde_json::Value::from(root))
    }
}

/// Reads objects into (path, value) entries, and refuses what a configuration cannot hold. serde_json's own objects
/// would keep the last of two entries of one name.
struct Entries<'a> {
    /// The path of the object or value that is read; `None`: the whole text.
    path: Option<String>,
    entries: &'a mut Vec<(String, Value)>,
}

impl<'de> DeserializeSeed<'de> for Entries<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Entries<'_> {
    fn name(&self) -> &str {
        self.path.as_deref().unwrap_or_default()
    }

    fn take<E: serde::de::Error>(self, value: Value) -> std::result::Result<(), E> {
        let path = self.path.ok_or_else(|| E::custom(format!("{value} is no object")))?;
        // By a nested and by a dotted name.
        if self.entries.iter().any(|(known, _)| *known == path) {
            return Err(E::custom(format!("{path} is given twice")));
        }
        self.entries.push((path, value));
        Ok(())
    }
}

impl<'de> Visitor<'de> for Entries<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object of the configuration's fields")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        if let Some(path) = &self.path {
            check_folder(path).map_err(|error| A::Error::custom(error.message))?;
        }
        let mut names = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            let path = self.path.as_ref().map_or_else(|| name.clone(), |folder| format!("{folder}.{name}"));
            if names.contains(&name) {
                return Err(A::Error::custom(format!("{path} is given twice")));
            }
            names.push(name);
            map.next_value_seed(Entries { path: Some(path), entries: &mut *self.entries })?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, _list: A) -> std::result::Result<(), A::Error> {
        Err(A::Error::custom(format!("\"{}\" is a list; a single value is needed", self.name())))
    }

    fn visit_unit<E: serde::de::Error>(self) -> std::result::Result<(), E> {
        Err(E::custom(format!("\"{}\" is null; leave it out for its default", self.name())))
    }

    fn visit_bool<E: serde::de::Error>(self, truth: bool) -> std::result::Result<(), E> {
        self.take(Value::Boolean(truth))
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> std::result::Result<(), E> {
        self.take(Value::Integer(number))
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> std::result::Result<(), E> {
        self.take(Value::Number(number as f64))
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> std::result::Result<(), E> {
        self.take(Value::Number(number))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<(), E> {
        self.take(Value::Text(text.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::configuration::{LogLevel, Requirement};

    fn refused(text: &str) -> String {
        let mut configuration = Configuration::default();
        let error = configuration.apply_json(text).unwrap_err();
        assert_eq!(configuration, Configuration::default(), "an error changes nothing: {text}");
        error.message
    }

    #[test]
    fn json_goes_round() {
        for preset in Preset::ALL {
            let configuration = preset.configuration();
            let mut copy = Configuration::default();
            copy.apply_json(&configuration.to_json()).unwrap();
            assert_eq!(copy, configuration);
        }
    }

    #[test]
    fn a_text_changes_what_it_names_on_top_of_its_preset() {
        let mut configuration = Configuration::default();
        let text = r#"{"memory": {"limit_fraction": 1, "margin": 5}, "preset": "development", "fp8": "off"}"#;
        configuration.apply_json(text).unwrap();
        assert_eq!((configuration.memory.limit_fraction, configuration.memory.margin), (1.0, 5));
        assert_eq!((configuration.logging.level, configuration.fp8), (LogLevel::Debug, Requirement::Off));
        configuration.apply_json(r#"{"memory": {"margin": 6}}"#).unwrap();
        assert_eq!((configuration.memory.margin, configuration.timing.profiling), (6, true));
        configuration.apply_json("{}").unwrap();
    }

    #[test]
    fn whole_numbers_may_be_written_as_floats() {
        let mut configuration = Configuration::default();
        configuration
            .apply_json(r#"{"threads": 1.0, "memory": {"limit": 8e9, "initial_bytes": 1e3, "margin": -0.0}}"#)
            .unwrap();
        assert_eq!((configuration.threads, configuration.memory.margin), (1, 0));
        assert_eq!((configuration.memory.limit, configuration.memory.initial_bytes), (8_000_000_000, 1000));
        configuration.apply_json(r#"{"memory.limit": 3000, "memory": {"initial_bytes": 2, "growth": true}}"#).unwrap();
        assert_eq!((configuration.memory.limit, configuration.memory.initial_bytes), (3000, 2));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let cases = [
            (r#"{"threads": "many"}"#, "threads is \"many\""),
            (r#"{"threads": -1}"#, "threads is -1"),
            (r#"{"threads": 1.5}"#, "threads is 1.5"),
            (r#"{"memory": {"limt": 1}}"#, "memory.limit"),
            (r#"{"memory": 7}"#, "\"memory\" is no field"),
            (r#"{"nope": {}}"#, "\"nope\" is no field of a configuration; there are device"),
            (r#"{"": {"threads": 3}}"#, "\"\" is no field"),
            (r#"{"": 3}"#, "\"\" is no field"),
            (r#"{"memory": {"": 3}}"#, "\"memory.\" is no field"),
            (r#"{"memory": {"limit": {}}}"#, "memory.limit is an object; a single value is needed"),
            (r#"{"threads": {"threads": 3}}"#, "threads is an object"),
            (r#"{"preset": {}}"#, "preset is an object"),
            (r#"{"memory": {"limit": 1}, "memory.limit": 2}"#, "memory.limit is given twice"),
            (r#"{"memory.limit": 1, "memory": {"limit": 2}}"#, "memory.limit is given twice"),
            (r#"{"memory.limit": 1, "memory.limit": 1}"#, "memory.limit is given twice"),
            (r#"{"memory": {"initial_bytes": 1}, "memory": {"limit": 2}}"#, "memory is given twice"),
            (r#"{"threads": 1e30}"#, "threads is 1000000000000000000000000000000;"),
            (r#"{"fp8": null}"#, "\"fp8\" is null"),
            (r#"{"device": ["cpu"]}"#, "\"device\" is a list"),
            (r#"{"threads": 1, "threads": 2}"#, "threads is given twice"),
            (r#"{"preset": "fast"}"#, "preset is \"fast\"; one of \"inference\", \"low_latency\""),
            (r#"{"preset": 3}"#, "preset is 3"),
            (r#"{"threads": 1} x"#, "line 1 column 16"),
            (r#"{"threads": 1"#, "line 1"),
            ("", "line 1"),
            ("7", "7 is no object"),
            (r#"{"memory": {"growth": false}}"#, "memory.growth is false and memory.initial_bytes 0"),
        ];
        for (text, message) in cases {
            let found = refused(text);
            assert!(found.contains(message), "{text}: {found}");
        }
    }
}
