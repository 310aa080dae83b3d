//! Compares what crosses from src/ to csrc/ field by field, so that a stride at another stride's place fails the build.
//!
//! The headers of csrc/ are the definition. Three kinds of items of src/ mirror one of their names, which the doc comment
//! begins with, as in "`nvb_rope_params` of csrc/rope/rope.h":
//! - a `repr(C)` struct: the same field names at the same offsets, of the same types and without gaps. A struct of C++ that
//!   has a base is mirrored by one whose first field is called `base`;
//! - a `repr(u32)` enum: `GeluTanh` is the enumerator whose name ends in `GELU_TANH`, and none is left out;
//! - a constant: the same number.
//!
//! Besides, every function `nvb_…` that src/cuda declares has the signature of its header, and is `noexcept` there where it belongs to a kernel.
//! The items are written as C++ beside assertions, which the host's compiler judges: the Rust side is read as text, the
//! other side is what the compiler makes of it. build.rs and tests/arguments.rs call [`check`].

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// An item of src/ that mirrors `name` of csrc/.
struct Mirror {
    file: PathBuf,
    rust: String,
    name: String,
    kind: Kind,
}

enum Kind {
    /// Names and types of the fields.
    Struct(Vec<(String, String)>),
    /// Names and numbers of the variants.
    Enum(Vec<(String, String)>),
    Constant(String),
}

struct Function {
    file: PathBuf,
    name: String,
    parameters: Vec<String>,
    result: String,
}

/// What src/ says about csrc/.
#[derive(Default)]
struct Source {
    mirrors: Vec<Mirror>,
    functions: Vec<Function>,
    /// The text of each file, for constants and renamed imports.
    texts: BTreeMap<PathBuf, String>,
}

/// Compares src/ and csrc/ below `root`; `compiler` is a C++ compiler without arguments, and `work` a folder for what it
/// compiles. Returns the files of src/ that were compared, or what differs.
pub fn check(root: &Path, mut compiler: Command, work: &Path) -> Result<Vec<PathBuf>, String> {
    let source = Source::read(root)?;
    let headers = read(&files(&root.join("csrc"), "h")?)?;
    let text = source.assertions(root, &headers)?;
    let (path, prelude) = (work.join("arguments.cpp"), work.join("arguments.h"));
    let written = fs::write(&path, text).and_then(|()| fs::write(&prelude, include_str!("arguments.h")));
    // The headers find the stand-in where they look for the CUDA runtime.
    let written = written.and_then(|()| fs::write(work.join("cuda_runtime_api.h"), "#include \"arguments.h\"\n"));
    written.map_err(|error| format!("{}: {error}", work.display()))?;
    compiler.args(["-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof"]).arg("-I").arg(work).arg(&path);
    let output = compiler.output().map_err(|error| format!("{compiler:?}: {error}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let errors: Vec<&str> = text.lines().filter_map(|line| Some(line.split_once("error: ")?.1)).collect();
        let errors = if errors.is_empty() { text.into_owned() } else { errors.join("\n") };
        return Err(format!("src/ and csrc/ differ in what crosses between them:\n{errors}"));
    }
    let mut compared: Vec<PathBuf> = source.mirrors.into_iter().map(|mirror| mirror.file).collect();
    compared.extend(source.functions.into_iter().map(|function| function.file));
    compared.sort();
    compared.dedup();
    Ok(compared)
}

/// The files below a folder with this extension, in order.
fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))? {
            let path = entry.map_err(|error| format!("{}: {error}", folder.display()))?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

fn read(paths: &[PathBuf]) -> Result<BTreeMap<PathBuf, String>, String> {
    let text = |path: &PathBuf| fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()));
    paths.iter().map(|path| Ok((path.clone(), text(path)?))).collect()
}

impl Source {
    fn read(root: &Path) -> Result<Source, String> {
        let mut source = Source::default();
        for (path, text) in read(&files(&root.join("src"), "rs")?)? {
            let file = path.strip_prefix(root).unwrap_or(&path).to_owned();
            // What crosses to C has its own rules.
            if !file.starts_with("src/capi") {
                source.add_file(&file, &text)?;
                source.texts.insert(file, text);
            }
        }
        Ok(source)
    }

    /// Notes the mirrors and the functions of one file, which rustfmt has laid out.
    fn add_file(&mut self, file: &Path, text: &str) -> Result<(), String> {
        let mut first_doc: Option<&str> = None;
        let mut is_c = false;
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            let line = line.trim_start();
            if let Some(doc) = line.strip_prefix("/// ") {
                first_doc = first_doc.or(Some(doc));
                continue;
            }
            if line.starts_with("#[") || line.starts_with("//") {
                is_c |= line == "#[repr(C)]";
                continue;
            }
            let name = first_doc.take().and_then(mirrored);
            let is_c = std::mem::take(&mut is_c);
            let item = line.trim_start_matches("pub(super) ").trim_start_matches("pub(crate) ");
            let item = item.trim_start_matches("pub ");
            let (keyword, rest) = item.split_once(' ').unwrap_or((item, ""));
            let rust: String = rest.chars().take_while(|c| is_word(*c)).collect();
            let place = || format!("{}: {rust}", file.display());
            if keyword == "struct" && is_c && file.starts_with("src/cuda") && name.is_none() {
                return Err(format!("{}: a repr(C) struct begins its comment with the name that it mirrors", place()));
            }
            if item.trim_start_matches("unsafe ").starts_with("extern \"C\" {") {
                let block: Vec<&str> = lines.by_ref().take_while(|line| line.trim() != "}").collect();
                self.add_functions(file, &block)?;
                continue;
            }
            let Some(name) = name.filter(|name| name.to_ascii_lowercase().starts_with("nvb_")) else { continue };
            let mut body = || -> Vec<&str> {
                let body = lines.by_ref().take_while(|line| line.trim() != "}").map(str::trim);
                body.filter(|line| !line.is_empty() && !line.starts_with("//") && !line.starts_with("#[")).collect()
            };
            let kind = match keyword {
                "struct" if is_c => {
                    // `mirror!` of src/cuda/launch.rs has a field's value behind its type.
                    let fields = body().into_iter().map(|line| line.split_once(" = ").map_or(line, |(field, _)| field));
                    Kind::Struct(pairs(fields.collect(), ": ").ok_or_else(|| format!("{} is unread", place()))?)
                }
                "enum" => Kind::Enum(pairs(body(), " = ").ok_or_else(|| format!("{} leaves out numbers", place()))?),
                "const" => match rest.split_once(" = ") {
                    Some((_, value)) => Kind::Constant(value.trim_end_matches(';').to_owned()),
                    None => return Err(format!("{} has no number", place())),
                },
                _ => continue,
            };
            self.mirrors.push(Mirror { file: file.to_owned(), rust, name, kind });
        }
        Ok(())
    }

    /// Notes the functions that a block declares.
    fn add_functions(&mut self, file: &Path, block: &[&str]) -> Result<(), String> {
        let code: Vec<&str> = block.iter().map(|line| line.trim()).filter(|line| !line.starts_with("//")).collect();
        for declaration in code.join(" ").split(';') {
            let Some((_, declaration)) = declaration.split_once("fn nvb_") else { continue };
            let unread = || format!("{}: `nvb_{declaration}` is unread", file.display());
            let (name, rest) = declaration.split_once('(').ok_or_else(unread)?;
            let (parameters, result) = rest.split_once(')').ok_or_else(unread)?;
            let parameters = parameters.split(", ").map(|parameter| parameter.trim().trim_end_matches(','));
            let parameters = parameters.filter(|parameter| !parameter.is_empty());
            let types = parameters.map(|parameter| parameter.split_once(": ").map(|(_, kind)| kind.to_owned()));
            self.functions.push(Function {
                file: file.to_owned(),
                name: format!("nvb_{name}"),
                parameters: types.collect::<Option<Vec<_>>>().ok_or_else(unread)?,
                result: result.trim().trim_start_matches("-> ").to_owned(),
            });
        }
        Ok(())
    }

    /// C++ that compiles where both sides agree.
    fn assertions(&self, root: &Path, headers: &BTreeMap<PathBuf, String>) -> Result<String, String> {
        let mut text = String::from("#include \"arguments.h\"\n");
        for (path, header) in headers {
            if header.contains("extern \"C\"") {
                writeln!(text, "#include \"{}\"", absolute(path)?.display()).unwrap();
            }
        }
        let mut seen: BTreeMap<&str, &Mirror> = BTreeMap::new();
        for (index, mirror) in self.mirrors.iter().enumerate() {
            let Mirror { file, rust, name, kind } = mirror;
            if let Some(other) = seen.insert(name, mirror) {
                let (file, other) = (file.display(), other.file.display());
                return Err(format!("{name} is mirrored twice, in {other} and {file}"));
            }
            let place = format!("{name} is not {rust} of {}", file.display());
            match kind {
                Kind::Struct(fields) => self.write_struct(&mut text, mirror, index, fields)?,
                Kind::Constant(value) => {
                    let value = value.replace('_', "");
                    writeln!(text, "static_assert({name} == {value}, \"{place}, which is {value}\");").unwrap();
                }
                Kind::Enum(variants) => {
                    let known = enumerators(headers, name).ok_or_else(|| format!("{place}: no header has it"))?;
                    let prefix = common_prefix(&known);
                    for (variant, value) in variants {
                        let constant = format!("{prefix}{}", upper_snake(variant));
                        writeln!(text, "static_assert({constant} == {value}, \"{place}: {variant} differs\");")
                            .unwrap();
                    }
                    for constant in &known {
                        if !variants.iter().any(|(variant, _)| *constant == format!("{prefix}{}", upper_snake(variant)))
                        {
                            return Err(format!("{place}: {constant} has no variant"));
                        }
                    }
                }
            }
        }
        for function in &self.functions {
            let Function { file, name, parameters, result } = function;
            let types = std::iter::once(result).chain(parameters);
            let types: Result<Vec<_>, String> = types.map(|kind| self.header_type(file, kind)).collect();
            let declared = format!("mirror::Function<decltype({name})>::is_declared<{}>()", types?.join(", "));
            let says = format!("{name} has another signature than in {}", file.display());
            writeln!(text, "static_assert({declared}, \"{says}\");").unwrap();
            // Nothing may unwind into Rust. The functions of csrc/driver are C.
            if name.starts_with("nvb_cuda_") {
                let says = format!("{name} is not noexcept");
                writeln!(text, "static_assert(!mirror::Function<decltype({name})>::kMayThrow, \"{says}\");").unwrap();
            }
        }
        match self.mirrors.is_empty() || self.functions.is_empty() {
            true => Err(format!("{} has nothing that crosses to csrc/", root.join("src").display())),
            false => Ok(text),
        }
    }

    fn write_struct(
        &self,
        text: &mut String,
        mirror: &Mirror,
        index: usize,
        fields: &[(String, String)],
    ) -> Result<(), String> {
        let Mirror { file, name, .. } = mirror;
        let file_name = file.display();
        let twin = format!("mirror_{index}");
        writeln!(text, "struct {twin} {{").unwrap();
        for (field, kind) in fields {
            match self.array(file, kind)? {
                Some((element, length)) => writeln!(text, "  {element} {field}[{length}];").unwrap(),
                None => writeln!(text, "  {} {field};", self.header_type(file, kind)?).unwrap(),
            }
        }
        writeln!(text, "}};").unwrap();
        let mut sizes = Vec::new();
        for (field, kind) in fields {
            if field == "base" && self.mirrors.iter().any(|mirror| mirror.rust == *kind) {
                let base = self.header_type(file, kind)?;
                let says = format!("{name}: {base} is not the base that {file_name} has");
                writeln!(text, "static_assert(std::is_base_of_v<{base}, {name}>, \"{says}\");").unwrap();
                sizes.push(format!("sizeof({base})"));
                continue;
            }
            let says = format!("{name}.{field} lies elsewhere than in {file_name}");
            let at = |of: &str| format!("offsetof({of}, {field})");
            writeln!(text, "static_assert({} == {}, \"{says}\");", at(&twin), at(name)).unwrap();
            let says = format!("{name}.{field} is of another type in {file_name}");
            let same = format!("mirror::is_same<decltype({twin}::{field}), decltype({name}::{field})>()");
            writeln!(text, "static_assert({same}, \"{says}\");").unwrap();
            sizes.push(format!("sizeof({twin}::{field})"));
        }
        let says = format!("{name} has a field or a gap that {file_name} has not");
        writeln!(text, "static_assert(sizeof({name}) == {}, \"{says}\");", sizes.join(" + ")).unwrap();
        Ok(())
    }

    /// Element and length of `[u32; MAX_PARTS]`.
    fn array(&self, file: &Path, kind: &str) -> Result<Option<(String, String)>, String> {
        let Some(inner) = kind.strip_prefix('[').and_then(|kind| kind.strip_suffix(']')) else { return Ok(None) };
        let unread = || format!("{}: the length of `{kind}` is unread", file.display());
        let (element, length) = inner.split_once("; ").ok_or_else(unread)?;
        let number = match length.parse::<u32>() {
            Ok(number) => number.to_string(),
            Err(_) => {
                let start = format!("const {length}: usize = ");
                // The constant is one of this file, or else of the one that it is imported from.
                let own = self.texts.get(file).into_iter();
                let value = own.chain(self.texts.values()).find_map(|text| Some(text.split_once(&start)?.1));
                value.and_then(|value| Some(value.split_once(';')?.0.to_owned())).ok_or_else(unread)?
            }
        };
        Ok(Some((self.header_type(file, element)?, number)))
    }

    /// The C++ type that a Rust type stands for.
    fn header_type(&self, file: &Path, kind: &str) -> Result<String, String> {
        if let Some(pointee) = kind.strip_prefix("*const ") {
            return Ok(format!("const {}*", self.header_type(file, pointee)?));
        }
        if let Some(pointee) = kind.strip_prefix("*mut ") {
            return Ok(format!("{}*", self.header_type(file, pointee)?));
        }
        let plain = match kind {
            "c_void" | "" => "void",
            "c_char" => "char",
            "c_int" => "int",
            "i32" => "int32_t",
            "i64" => "int64_t",
            "u32" => "uint32_t",
            "u64" => "uint64_t",
            "usize" => "size_t",
            "f32" => "float",
            "f64" => "double",
            _ => return self.struct_named(file, kind),
        };
        Ok(plain.to_owned())
    }

    /// The C++ struct that `Params`, `linear::Params` or an import by another name mirrors, seen from `file`.
    fn struct_named(&self, file: &Path, path: &str) -> Result<String, String> {
        let mut modules: Vec<&str> = path.split("::").collect();
        let mut rust = modules.pop().unwrap_or(path);
        let text = self.texts.get(file).map_or("", String::as_str);
        let own = self.mirrors.iter().find(|mirror| mirror.rust == rust && mirror.file == file && modules.is_empty());
        if own.is_none() && modules.is_empty() {
            for import in text.split(';').filter_map(|statement| Some(statement.rsplit_once("use ")?.1)) {
                let words: Vec<&str> = import.split(|c: char| !is_word(c)).filter(|word| !word.is_empty()).collect();
                if let Some(at) = words.iter().position(|word| *word == rust) {
                    let renamed = at >= 2 && words[at - 1] == "as";
                    rust = if renamed { words[at - 2] } else { rust };
                    modules = words[..at].to_vec();
                    break;
                }
            }
        }
        let named: Vec<&Mirror> = self.mirrors.iter().filter(|mirror| mirror.rust == rust).collect();
        let in_module = |module: &&str| {
            let is_part = |mirror: &&&Mirror| mirror.file.with_extension("").iter().any(|part| part == *module);
            let mut inside = named.iter().filter(is_part);
            inside.next().filter(|_| inside.next().is_none())
        };
        let only = named.first().filter(|_| named.len() == 1);
        match own.or(only.or(modules.iter().rev().find_map(in_module)).copied()) {
            Some(mirror) => Ok(mirror.name.clone()),
            None => Err(format!("{}: `{path}` mirrors no struct of csrc/", file.display())),
        }
    }
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

fn absolute(path: &Path) -> Result<PathBuf, String> {
    path.canonicalize().map_err(|error| format!("{}: {error}", path.display()))
}

/// `nvb_rope_params` of a doc comment that begins with it in backticks.
fn mirrored(doc: &str) -> Option<String> {
    let (name, _) = doc.strip_prefix('`')?.split_once('`')?;
    Some(name.to_owned())
}

/// Both sides of `separator` in each line, without visibility and comma; `None` if a line has none.
fn pairs(lines: Vec<&str>, separator: &str) -> Option<Vec<(String, String)>> {
    let pair = |line: &str| {
        let (name, value) = line.trim_end_matches(',').split_once(separator)?;
        let name = name.rsplit(' ').next()?;
        Some((name.to_owned(), value.to_owned()))
    };
    lines.into_iter().map(pair).collect()
}

/// The names that `enum name : uint32_t { … }` of a header gives numbers to.
fn enumerators(headers: &BTreeMap<PathBuf, String>, name: &str) -> Option<Vec<String>> {
    let start = format!("enum {name} : uint32_t {{\n");
    let body = headers.values().find_map(|text| text.split_once(&start)?.1.split_once("};"))?.0;
    let constants = body.lines().filter_map(|line| line.trim().split_once(" = "));
    Some(constants.filter(|(name, _)| name.starts_with("NVB_")).map(|(name, _)| name.to_owned()).collect())
}

/// `NVB_SCALES_` for names that all begin with it.
fn common_prefix(names: &[String]) -> String {
    let first = names.first().map_or("", String::as_str);
    let length = (0..=first.len()).rev().find(|length| names.iter().all(|name| name.starts_with(&first[..*length])));
    let common = &first[..length.unwrap_or(0)];
    common[..common.rfind('_').map_or(0, |at| at + 1)].to_owned()
}

/// `GELU_TANH` for `GeluTanh`.
fn upper_snake(name: &str) -> String {
    let mut text = String::new();
    for (at, character) in name.char_indices() {
        if at > 0 && character.is_ascii_uppercase() {
            text.push('_');
        }
        text.push(character.to_ascii_uppercase());
    }
    text
}
