//! The file of a graph's decisions: a JSON object with the fields of a header (device, driver, build), the decisions, and a checksum
//! of all that stands before it. Whatever is not exactly that is no such file: half of the decisions are not better than none.

use super::decisions::{pass_of, Decisions, Passes, Product, Products};
use super::fingerprint::Hash;
use super::fp8::Mark;
use super::optimize::Level;
use super::report::{Errors, Exactness, TakenBack, Times};
use crate::allocation::Text;
use crate::error::{Error, Result as ResultOf, Status};
use serde_json::{json, Map, Value};
use std::io::{ErrorKind, Read, Write as _};
use std::path::Path;

/// What such a file belongs to: names and values in the order in which it has them.
pub type Header = Vec<(&'static str, String)>;

/// The version of the file's form.
pub const FORMAT: &str = "1";
/// How every such file begins.
pub const MARK: &str = "{\n  \"file\": \"nvbackend graph\",\n";
/// Larger than any that is written: a product takes some 80 bytes.
const MOST_BYTES: u64 = 16 << 20;
const CHECKSUM: &str = ",\n  \"checksum\": \"";
/// The longest key.
pub const MOST_KEY_BYTES: usize = 4096;

/// Writes the file, or replaces one of this kind, as a whole.
pub fn write(path: &Path, header: &Header, decisions: &Decisions) -> ResultOf<()> {
    let failed = |error: std::io::Error| Error::new(Status::Io, format!("writing {}: {error}", path.display()));
    match read_text(path) {
        Ok(text) if text.starts_with(MARK) || text.is_empty() => {}
        Ok(_) => return Err(failed(std::io::Error::other("it is a file of something else, and stays as it is"))),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let text = print(header, decisions).map_err(failed)?;
    crate::file::replace(path, |out| out.write_all(&text)).map_err(failed)
}

/// The decisions in the file, which was written for this header.
pub fn read(path: &Path, header: &Header) -> ResultOf<Decisions> {
    let text =
        read_text(path).map_err(|error| Error::new(Status::Io, format!("reading {}: {error}", path.display())))?;
    parse(&text, header).map_err(|why| Error::new(Status::Io, format!("{} is not used: {why}", path.display())))
}

fn read_text(path: &Path) -> std::io::Result<String> {
    let (file, metadata) = crate::file::open(path)?;
    if metadata.len() > MOST_BYTES {
        return Err(std::io::Error::other("it is longer than any file of a graph's decisions"));
    }
    let mut text = String::new();
    file.take(MOST_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

pub fn print(header: &Header, decisions: &Decisions) -> std::io::Result<Vec<u8>> {
    let mut text = Text::default();
    text.write_all(MARK.as_bytes())?;
    writeln!(text, "  \"format\": \"{FORMAT}\",")?;
    for (name, value) in header {
        writeln!(text, "  \"{name}\": {},", Value::from(value.as_str()))?;
    }
    writeln!(text, "  \"key\": {},", Value::from(decisions.key.as_str()))?;
    writeln!(text, "  \"list\": \"{:016x}\",\n  \"nodes\": {},", decisions.fingerprint, decisions.nodes)?;
    writeln!(text, "  \"optimization\": {},", decisions.optimization.as_ref().map_or(Value::Null, of_passes))?;
    write!(text, "  \"conversion\": {}", decisions.conversion.as_ref().map_or(Value::Null, of_products))?;
    let checksum = Hash::of(&text.bytes);
    writeln!(text, "{CHECKSUM}{checksum:016x}\"\n}}")?;
    Ok(text.bytes)
}

/// The text of a file from its beginning to its checksum, with that. For tests, whose files are wrong in other ways.
#[doc(hidden)]
pub fn sum(text: &str) -> String {
    format!("{text}{CHECKSUM}{:016x}\"\n}}\n", Hash::of(text.as_bytes()))
}

/// JSON has no infinity.
fn of_number(number: f64) -> Value {
    if number.is_finite() {
        number.into()
    } else {
        "infinite".into()
    }
}

fn of_measured(errors: Option<&Errors>, times: Option<&Times>) -> (Value, Value) {
    let errors = errors.map_or(Value::Null, |errors| {
        json!({
            "relative": of_number(errors.relative), "absolute": of_number(errors.absolute),
            "outputs": errors.outputs, "different": errors.different,
        })
    });
    let times = times.map_or(Value::Null, |times| {
        json!({ "launches": times.launches, "before": of_number(times.before), "after": of_number(times.after) })
    });
    (errors, times)
}

fn of_passes(passes: &Passes) -> Value {
    let exactness: Map<_, _> =
        passes.exactness.iter().map(|(name, exactness)| (name.to_string(), exactness.name().into())).collect();
    let taken_back: Vec<_> = passes
        .taken_back
        .iter()
        .map(|taken| json!({ "pass": taken.pass, "rewrites": taken.rewrites, "error": of_number(taken.error) }))
        .collect();
    let (errors, times) = of_measured(passes.errors.as_ref(), passes.times.as_ref());
    let level = passes.level as u32;
    json!({ "level": level, "passes": exactness, "taken_back": taken_back, "errors": errors, "times": times })
}

fn of_products(products: &Products) -> Value {
    let list: Vec<_> = products
        .products
        .iter()
        .map(|product| {
            let error = product.error.map_or(Value::Null, of_number);
            let (node, mark) = (product.node, product.mark as u32);
            json!({ "node": node, "mark": mark, "converted": product.converted, "error": error })
        })
        .collect();
    let (errors, times) = of_measured(products.errors.as_ref(), products.times.as_ref());
    let (weights_alone, storage_only) = (products.weights_alone, products.storage_only);
    json!({
        "weights_alone": weights_alone, "storage_only": storage_only, "products": list, "errors": errors, "times": times,
    })
}

/// The decisions, or why the text is no file of decisions for this header.
pub fn parse(text: &str, header: &Header) -> Result<Decisions, String> {
    if !text.starts_with(MARK) {
        return Err("it is no file of a graph's decisions".into());
    }
    let whole = || "it is damaged: its checksum is not that of its text".to_string();
    let (before, checksum) = text.rsplit_once(CHECKSUM).ok_or_else(whole)?;
    if checksum != format!("{:016x}\"\n}}\n", Hash::of(before.as_bytes())) {
        return Err(whole());
    }
    let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let mut root = Fields::of(&value, "the file")?;
    root.text("file")?;
    for (name, ours) in [("format", FORMAT)].into_iter().chain(header.iter().map(|(name, ours)| (*name, &**ours))) {
        let theirs = root.text(name)?;
        if theirs != ours {
            return Err(format!("its {name} is {theirs:?}, here it is {ours:?}"));
        }
    }
    let key = root.text("key")?.to_string();
    let list = root.text("list")?;
    let fingerprint = match list.len() {
        16 => u64::from_str_radix(list, 16).map_err(|_| "its list is no number".to_string())?,
        _ => return Err("its list is no number".into()),
    };
    let nodes = root.number("nodes")?;
    let optimization = root.optional("optimization", to_passes)?;
    let conversion = root.optional("conversion", to_products)?;
    root.text("checksum")?;
    root.end()?;
    match (key.len() <= MOST_KEY_BYTES, optimization.is_some() || conversion.is_some()) {
        (true, true) => Ok(Decisions { key, fingerprint, nodes, optimization, conversion }),
        (false, _) => Err("its key is too long".into()),
        (_, false) => Err("it decides nothing".into()),
    }
}

/// The fields of an object, each of which is read once.
struct Fields<'a> {
    object: &'a Map<String, Value>,
    what: &'static str,
    read: usize,
}

impl<'a> Fields<'a> {
    fn of(value: &'a Value, what: &'static str) -> Result<Fields<'a>, String> {
        let object = value.as_object().ok_or_else(|| format!("{what} is no object"))?;
        Ok(Fields { object, what, read: 0 })
    }

    fn get(&mut self, name: &str) -> Result<&'a Value, String> {
        self.read += 1;
        self.object.get(name).ok_or_else(|| format!("{} names no {name}", self.what))
    }

    fn expect<T>(&self, name: &str, value: Option<T>) -> Result<T, String> {
        value.ok_or_else(|| format!("{name} of {} is damaged", self.what))
    }

    fn text(&mut self, name: &str) -> Result<&'a str, String> {
        let value = self.get(name)?.as_str();
        self.expect(name, value)
    }

    fn flag(&mut self, name: &str) -> Result<bool, String> {
        let value = self.get(name)?.as_bool();
        self.expect(name, value)
    }

    fn number<N: TryFrom<u64>>(&mut self, name: &str) -> Result<N, String> {
        let value = self.get(name)?.as_u64().and_then(|number| number.try_into().ok());
        self.expect(name, value)
    }

    /// At least 0.
    fn amount(&mut self, name: &str) -> Result<f64, String> {
        let value = match self.get(name)? {
            Value::String(text) if text == "infinite" => Some(f64::INFINITY),
            value => value.as_f64().filter(|amount| amount.is_finite() && *amount >= 0.0),
        };
        self.expect(name, value)
    }

    fn list<T>(&mut self, name: &str, each: impl Fn(&'a Value) -> Result<T, String>) -> Result<Vec<T>, String> {
        let value = self.get(name)?.as_array();
        self.expect(name, value)?.iter().map(each).collect()
    }

    /// `None` for null.
    fn optional<T>(
        &mut self,
        name: &str,
        read: impl FnOnce(&'a Value) -> Result<T, String>,
    ) -> Result<Option<T>, String> {
        let value = self.get(name)?;
        if value.is_null() {
            Ok(None)
        } else {
            read(value).map(Some)
        }
    }

    /// All fields were read.
    fn end(self) -> Result<(), String> {
        match self.object.len() == self.read {
            true => Ok(()),
            false => Err(format!("{} has fields that this version does not know", self.what)),
        }
    }
}

fn to_errors(value: &Value) -> Result<Errors, String> {
    let mut fields = Fields::of(value, "errors")?;
    let (relative, absolute) = (fields.amount("relative")?, fields.amount("absolute")?);
    let (outputs, different) = (fields.number("outputs")?, fields.number("different")?);
    fields.end()?;
    Ok(Errors { relative, absolute, outputs, different, worst: None })
}

fn to_times(value: &Value) -> Result<Times, String> {
    let mut fields = Fields::of(value, "times")?;
    let launches = fields.number("launches")?;
    let (before, after) = (fields.amount("before")?, fields.amount("after")?);
    fields.end()?;
    Ok(Times { launches, before, after })
}

fn to_passes(value: &Value) -> Result<Passes, String> {
    let mut fields = Fields::of(value, "optimization")?;
    let level: u32 = fields.number("level")?;
    let level = Level::from_code(level).ok_or_else(|| format!("its level is {level}"))?;
    let named = fields.get("passes")?.as_object();
    let mut exactness = Vec::new();
    for (name, value) in fields.expect("passes", named)? {
        let pass = pass_of(name).ok_or_else(|| format!("it names the pass {name:?}, which is none"))?;
        let found = Exactness::ALL.iter().copied().find(|exactness| Some(exactness.name()) == value.as_str());
        match found {
            Some(found) if found <= level.allowed() && level != Level::O0 => exactness.push((pass, found)),
            _ => return Err(format!("the pass {name} may not be {value} at level {}", level as u32)),
        }
    }
    let taken_back = fields.list("taken_back", |value| {
        let mut fields = Fields::of(value, "a pass that was taken back")?;
        let pass = pass_of(fields.text("pass")?).ok_or("it names a pass that is none")?;
        let (rewrites, error) = (fields.number("rewrites")?, fields.amount("error")?);
        fields.end()?;
        Ok(TakenBack { pass, rewrites, error })
    })?;
    let (errors, times) = (fields.optional("errors", to_errors)?, fields.optional("times", to_times)?);
    fields.end()?;
    Ok(Passes { level, exactness, taken_back, errors, times })
}

fn to_products(value: &Value) -> Result<Products, String> {
    let mut fields = Fields::of(value, "conversion")?;
    let (weights_alone, storage_only) = (fields.flag("weights_alone")?, fields.flag("storage_only")?);
    let products = fields.list("products", |value| {
        let mut fields = Fields::of(value, "a product")?;
        let (node, mark) = (fields.number("node")?, fields.number::<u32>("mark")?);
        let mark = Mark::from_code(mark).ok_or_else(|| format!("a mark is {mark}"))?;
        let converted = fields.flag("converted")?;
        let error = match fields.object.get("error") {
            Some(Value::Null) => fields.get("error").map(|_| None)?,
            _ => Some(fields.amount("error")?),
        };
        fields.end()?;
        Ok(Product { node, mark, converted, error })
    })?;
    let (errors, times) = (fields.optional("errors", to_errors)?, fields.optional("times", to_times)?);
    fields.end()?;
    Ok(Products { weights_alone, storage_only, products, errors, times })
}

#[cfg(test)]
mod tests;
