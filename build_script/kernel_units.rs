//! The units that nvcc compiles: every .cu file below csrc/ and what the table csrc/instances.rs generates.
//!
//! Minutes of nvcc go into a unit, so its object is kept by what was compiled: [`Sources::tokens`] is the unit with the headers
//! of csrc/ in their places and without comments, layout and the names of files. A comment, a line break, a header that is
//! renamed or moved and a file that becomes a row of the table therefore compile nothing. What comes from outside (the
//! toolkit's headers, flags) is not in it: build.rs keeps a folder of objects for each of those.

#[path = "../csrc/instances.rs"]
mod instances;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

pub struct Unit {
    /// `linear_gemv_bf16`
    pub name: String,
    /// The file of csrc/; none for a unit of the table.
    pub file: Option<PathBuf>,
    pub text: String,
}

/// All units of `csrc`, by name.
pub fn units(csrc: &Path) -> Result<Vec<Unit>, String> {
    let mut units: Vec<Unit> = instances::instances().map(|(name, text)| Unit { name, file: None, text }).collect();
    let mut folders = vec![csrc.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))? {
            let path = entry.map_err(|error| format!("{}: {error}", folder.display()))?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "cu") {
                let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                units.push(Unit { name, text: read(&path)?, file: Some(path) });
            }
        }
    }
    units.sort_by(|one, other| one.name.cmp(&other.name));
    match units.windows(2).find(|pair| pair[0].name == pair[1].name) {
        Some(pair) => Err(format!("two kernel files are called {}", pair[0].name)),
        None => Ok(units),
    }
}

/// The files of `csrc` as units include them, each read once.
pub struct Sources {
    csrc: PathBuf,
    files: BTreeMap<PathBuf, Rc<File>>,
}

struct File {
    pieces: Vec<Piece>,
    is_included_once: bool,
}

enum Piece {
    Code(String),
    /// Without its `#`.
    Directive(String),
    Include(String),
}

impl Sources {
    pub fn new(csrc: &Path) -> Sources {
        Sources { csrc: csrc.to_owned(), files: BTreeMap::new() }
    }

    /// What nvcc makes of a unit depends on this text and on what lies outside of `csrc`.
    pub fn tokens(&mut self, unit: &Unit) -> Result<String, String> {
        let folder = unit.file.as_deref().and_then(Path::parent).unwrap_or(&self.csrc).to_owned();
        let mut tokens = String::new();
        self.add(&mut tokens, &mut BTreeSet::new(), &parse(&unit.text)?, &folder)?;
        Ok(tokens)
    }

    /// Adds a file that lies in `folder`, and what it includes from csrc/.
    fn add(
        &mut self,
        tokens: &mut String,
        included: &mut BTreeSet<PathBuf>,
        file: &File,
        folder: &Path,
    ) -> Result<(), String> {
        for piece in &file.pieces {
            match piece {
                Piece::Code(code) => {
                    let closes =
                        |character: Option<char>| character.is_none_or(|one| one == '\n' || CLOSED.contains(one));
                    if !closes(tokens.chars().next_back()) && !closes(code.chars().next()) {
                        tokens.push(' ');
                    }
                    tokens.push_str(code);
                }
                Piece::Directive(directive) => {
                    let name = directive.strip_prefix("include <").and_then(|name| name.strip_suffix('>'));
                    if let Some(name) = name.filter(|name| self.csrc.join(name).is_file()) {
                        return Err(format!("{}: {name} of csrc/ is included in angle brackets", folder.display()));
                    }
                    let start = if tokens.is_empty() || tokens.ends_with('\n') { "#" } else { "\n#" };
                    tokens.extend([start, directive, "\n"]);
                }
                Piece::Include(name) => {
                    let found = [folder.join(name), self.csrc.join(name)].into_iter().find(|path| path.is_file());
                    let path = found.ok_or_else(|| format!("{}: there is no {name}", folder.display()))?;
                    let path = path.canonicalize().map_err(|error| format!("{}: {error}", path.display()))?;
                    let file = match self.files.get(&path) {
                        Some(file) => file.clone(),
                        None => Rc::new(parse(&read(&path)?).map_err(|error| format!("{}: {error}", path.display()))?),
                    };
                    self.files.insert(path.clone(), file.clone());
                    if included.insert(path.clone()) || !file.is_included_once {
                        self.add(tokens, included, &file, path.parent().unwrap_or(folder))?;
                    }
                }
            }
        }
        Ok(())
    }
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// Characters beside which a space means nothing outside of directives.
const CLOSED: &str = "(),;{}[]";

fn parse(text: &str) -> Result<File, String> {
    let mut file = File { pieces: Vec::new(), is_included_once: false };
    // Whether a header is included must not depend on the preprocessor, which is not asked.
    let mut conditions = 0;
    for line in without_comments(text).lines() {
        let Some(directive) = line.trim().strip_prefix('#') else {
            if let Some(Piece::Code(code)) = file.pieces.last_mut() {
                squeeze(code, " ", "");
                squeeze(code, line, CLOSED);
            } else if !line.trim().is_empty() {
                let mut code = String::new();
                squeeze(&mut code, line.trim_start(), CLOSED);
                file.pieces.push(Piece::Code(code));
            }
            continue;
        };
        if let Some(Piece::Code(code)) = file.pieces.last_mut() {
            code.truncate(code.trim_end().len());
        }
        let directive = directive.trim();
        conditions += i32::from(directive.starts_with("if")) - i32::from(directive.starts_with("endif"));
        let named = directive.strip_prefix("include").and_then(|rest| rest.trim().strip_prefix('"'));
        if directive == "pragma once" {
            file.is_included_once = true;
        } else if let Some(name) = named.and_then(|name| name.strip_suffix('"')) {
            if conditions != 0 {
                return Err(format!("{name} is included under a condition"));
            }
            file.pieces.push(Piece::Include(name.to_owned()));
        } else {
            let mut squeezed = String::new();
            squeeze(&mut squeezed, directive, "");
            file.pieces.push(Piece::Directive(squeezed));
        }
    }
    if let Some(Piece::Code(code)) = file.pieces.last_mut() {
        code.truncate(code.trim_end().len());
    }
    Ok(file)
}

/// The end of the string or character literal that starts at `start`, if one does.
fn literal_end(text: &[u8], start: usize) -> Option<usize> {
    let quote = text[start];
    // 1'000 is a number.
    let is_separator = quote == b'\'' && start > 0 && text[start - 1].is_ascii_alphanumeric();
    if !matches!(quote, b'"' | b'\'') || is_separator {
        return None;
    }
    let mut at = start + 1;
    while at < text.len() && text[at] != quote && text[at] != b'\n' {
        at += if text[at] == b'\\' { 2 } else { 1 };
    }
    Some((at + 1).min(text.len()))
}

/// Each comment a space, and logical lines.
fn without_comments(text: &str) -> String {
    let text = text.replace("\\\n", "");
    let bytes = text.as_bytes();
    let mut code = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let rest = &text.as_bytes()[at..];
        let end = if rest.starts_with(b"//") {
            code.push(b' ');
            at + rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len())
        } else if rest.starts_with(b"/*") {
            code.push(b' ');
            at + rest.windows(2).skip(2).position(|pair| pair == b"*/").map_or(rest.len(), |end| end + 4)
        } else {
            let end = literal_end(bytes, at).unwrap_or(at + 1);
            code.extend(&bytes[at..end]);
            end
        };
        at = end;
    }
    String::from_utf8(code).unwrap_or(text)
}

/// Appends a line with each space outside of literals once, and not beside the characters of `closed`.
fn squeeze(to: &mut String, line: &str, closed: &str) {
    let bytes = line.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let end = literal_end(bytes, at).unwrap_or(at + line[at..].chars().next().map_or(1, char::len_utf8));
        let token = &line[at..end];
        at = end;
        if token.trim().is_empty() {
            if !to.ends_with([' ', '\n']) {
                to.push(' ');
            }
            continue;
        }
        // A space that was kept before knows only now what follows it.
        if to.ends_with(' ') {
            let before = to[..to.len() - 1].chars().next_back().unwrap_or('\n');
            if closed.contains(token) || closed.contains(before) || before == '\n' {
                to.pop();
            }
        }
        to.push_str(token);
    }
}
