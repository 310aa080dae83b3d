//! The declarations of a C header in the one form that cbindgen gives them.

/// A type and a name; `array` is what stands in brackets behind a field.
pub struct Declared {
    pub name: String,
    /// Words and stars, each parted by a space: "const nvb_backend *".
    pub kind: String,
    pub array: Option<usize>,
    /// The comment above a field, in one line.
    pub comment: String,
}

pub struct Function {
    pub name: String,
    pub result: String,
    pub parameters: Vec<Declared>,
}

pub struct Structure {
    pub name: String,
    pub fields: Vec<Declared>,
}

#[derive(Default)]
pub struct Header {
    /// Opaque types.
    pub handles: Vec<String>,
    /// Types of functions that the caller brings.
    pub callbacks: Vec<String>,
    pub structures: Vec<Structure>,
    pub functions: Vec<Function>,
}

pub fn header(text: &str) -> Header {
    let mut header = Header::default();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if line.starts_with("static inline") {
            for body in lines.by_ref() {
                if body == "}" {
                    break;
                }
            }
        } else if line == "typedef struct {" {
            let mut body = Vec::new();
            let name = loop {
                let line = lines.next().expect("a struct ends");
                match line.strip_prefix("} ").and_then(|rest| rest.strip_suffix(';')) {
                    Some(name) => break name,
                    None => body.push(line.trim()),
                }
            };
            header.structures.push(Structure { name: name.to_string(), fields: fields(&body) });
        } else if let Some(rest) = line.strip_prefix("typedef struct ") {
            let name = rest.split_whitespace().next().expect("a name");
            header.handles.push(name.to_string());
        } else if line.starts_with("typedef ") {
            if let Some((_, rest)) = line.split_once("(*") {
                header.callbacks.push(rest.split_once(')').expect("a name in parentheses").0.to_string());
            }
        } else if !line.starts_with(['#', '/', '}', ' ']) && line.contains('(') {
            let mut declaration = line.to_string();
            while !declaration.ends_with(';') {
                declaration += " ";
                declaration += lines.next().expect("a declaration ends").trim();
            }
            header.functions.push(function(&declaration));
        }
    }
    header
}

fn fields(lines: &[&str]) -> Vec<Declared> {
    let mut fields = Vec::new();
    let mut comment = String::new();
    for line in lines {
        if let Some(text) = line.strip_prefix("//") {
            comment += text;
            continue;
        }
        let text = line.strip_suffix(';').unwrap_or_else(|| panic!("`{line}` is no field of one line"));
        let (text, array) = match text.split_once('[') {
            Some((text, length)) => {
                let length = length.trim_end_matches(']').parse().expect("a length that is a number");
                (text, Some(length))
            }
            None => (text, None),
        };
        fields.push(Declared { array, comment: comment.trim().to_string(), ..declared(text) });
        comment.clear();
    }
    fields
}

fn function(text: &str) -> Function {
    let text = text.trim_start_matches("NVB_MUST_USE ");
    let (front, rest) = text.split_once('(').expect("parameters");
    let Declared { name, kind: result, .. } = declared(front);
    let inside = rest.strip_suffix(");").unwrap_or_else(|| panic!("`{text}` does not end with its parameters"));
    let parameters = match inside {
        "void" | "" => Vec::new(),
        list => list.split(',').map(declared).collect(),
    };
    Function { name, result, parameters }
}

/// "const nvb_backend *backend" in two.
fn declared(text: &str) -> Declared {
    let spaced = text.replace('*', " * ");
    let mut words: Vec<&str> = spaced.split_whitespace().collect();
    let name = words.pop().unwrap_or_else(|| panic!("`{text}` declares nothing")).to_string();
    Declared { name, kind: words.join(" "), array: None, comment: String::new() }
}
