//! The units that nvcc compiles: every .cu file below csrc/ and what the table csrc/instances.rs generates.
//!
//! Minutes of nvcc go into a unit, so its object is kept by what was compiled: [`Unit::tokens`] is the unit with the headers
//! of csrc/ in their places and without comments, layout and the names of files. A comment, a line break, a header that is
//! renamed or moved and a file that becomes a row of the table therefore compile nothing. What comes from outside (the
//! toolkit's headers, flags) is not in it: build.rs keeps a folder of objects for each of those.

#[path = "../csrc/instances.rs"]
mod instances;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

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

impl Unit {
    /// What nvcc makes of the unit depends on this text and on what lies outside of `csrc`.
    pub fn tokens(&self, csrc: &Path) -> Result<String, String> {
        let mut tokens = Tokens { csrc, text: String::new(), included: BTreeSet::new() };
        let folder = self.file.as_deref().and_then(Path::parent).unwrap_or(csrc);
        tokens.add(&self.text, folder)?;
        Ok(tokens.text)
    }
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

struct Tokens<'a> {
    csrc: &'a Path,
    text: String,
    included: BTreeSet<PathBuf>,
}

impl Tokens<'_> {
    /// Adds a file that lies in `folder`, and what it includes from csrc/.
    fn add(&mut self, text: &str, folder: &Path) -> Result<(), String> {
        // Whether a header is included must not depend on the preprocessor, which is not asked.
        let mut conditions = 0;
        for line in without_comments(text).lines() {
            let Some(directive) = line.trim().strip_prefix('#') else {
                squeeze(&mut self.text, line, "(),;{}[]");
                squeeze(&mut self.text, " ", "");
                continue;
            };
            let directive = directive.trim_start();
            conditions += i32::from(directive.starts_with("if")) - i32::from(directive.starts_with("endif"));
            let named = directive.strip_prefix("include").and_then(|rest| rest.trim().strip_prefix('"'));
            if directive == "pragma once" {
                continue;
            }
            let Some(name) = named.and_then(|name| name.strip_suffix('"')) else {
                self.text.truncate(self.text.trim_end().len());
                self.text.push_str("\n#");
                squeeze(&mut self.text, directive, "");
                self.text.push('\n');
                continue;
            };
            let found = [folder.join(name), self.csrc.join(name)].into_iter().find(|path| path.is_file());
            let path = found.ok_or_else(|| format!("{}: there is no {name}", folder.display()))?;
            if conditions != 0 {
                return Err(format!("{}: {name} is included under a condition", folder.display()));
            }
            let text = read(&path)?;
            let whole = path.canonicalize().map_err(|error| format!("{}: {error}", path.display()))?;
            if self.included.insert(whole) || !text.contains("#pragma once") {
                self.add(&text, path.parent().unwrap_or(folder))?;
            }
        }
        Ok(())
    }
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
