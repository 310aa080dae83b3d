//! The Rust source of `interface::FUNCTIONS` and `interface::STRUCTURES`.

use crate::classify::role;
use crate::parse::{Declared, Header};
use std::fmt::Write as _;

pub fn interface(header: &Header) -> String {
    let mut text = String::from("// Written by fuzz/build.\n");
    for structure in &header.structures {
        writeln!(text, "#[repr(C)]\npub struct {} {{", structure.name).unwrap();
        for field in &structure.fields {
            writeln!(text, "    pub {}: {},", rust_name(&field.name), rust_type(header, field)).unwrap();
        }
        text += "}\n";
    }
    text += "extern \"C\" {\n";
    for function in &header.functions {
        let parameters: Vec<String> = function
            .parameters
            .iter()
            .map(|it| format!("{}: {}", rust_name(&it.name), rust_type(header, it)))
            .collect();
        let result =
            Declared { name: String::new(), kind: function.result.clone(), array: None, comment: String::new() };
        writeln!(text, "    pub fn {}({}) -> {};", function.name, parameters.join(", "), rust_type(header, &result))
            .unwrap();
    }
    text += "}\n";
    writeln!(text, "pub static HANDLES: &[&str] = &{:?};", header.handles).unwrap();
    text += "pub static STRUCTURES: &[Structure] = &[\n";
    for structure in &header.structures {
        let name = &structure.name;
        writeln!(text, "    Structure {{ name: {name:?}, size: size_of::<{name}>(), fields: &[").unwrap();
        for (at, field) in structure.fields.iter().enumerate() {
            writeln!(
                text,
                "        Field {{ name: {:?}, offset: std::mem::offset_of!({name}, {}), role: {}, comment: {:?} }},",
                field.name,
                rust_name(&field.name),
                role(header, name, &structure.fields, at, true),
                field.comment
            )
            .unwrap();
        }
        text += "    ] },\n";
    }
    text += "];\npub static FUNCTIONS: &[Function] = &[\n";
    for function in &header.functions {
        let name = &function.name;
        let arguments: Vec<String> = (0..function.parameters.len()).map(|at| format!("a[{at}] as _")).collect();
        // Its answer is a status that stands for itself.
        let fallible = function.result == "nvb_status" && name != "nvb_status_parent";
        writeln!(
            text,
            "    Function {{ name: {name:?}, fallible: {fallible}, call: |a| unsafe {{ let _ = a; {name}({}) as usize }}, \
             parameters: &[",
            arguments.join(", ")
        )
        .unwrap();
        for (at, parameter) in function.parameters.iter().enumerate() {
            let role = role(header, name, &function.parameters, at, false);
            writeln!(text, "        Parameter {{ name: {:?}, role: {role} }},", parameter.name).unwrap();
        }
        text += "    ] },\n";
    }
    text += "];\n";
    text
}

fn rust_name(name: &str) -> String {
    format!("r#{name}")
}

fn rust_type(header: &Header, declared: &Declared) -> String {
    let kind = declared.kind.as_str();
    let element = match kind {
        "char" => "u8",
        "uint32_t" => "u32",
        "int32_t" | "nvb_status" => "i32",
        "uint64_t" => "u64",
        "int64_t" => "i64",
        "size_t" => "usize",
        "float" => "f32",
        "double" => "f64",
        _ if kind.ends_with('*') || header.callbacks.iter().any(|callback| callback == kind) => "*const c_void",
        _ if header.structures.iter().any(|structure| structure.name == kind) => kind,
        _ => panic!("{}: the type `{kind}` is new to fuzz/build/emit.rs", declared.name),
    };
    match declared.array {
        Some(length) => format!("[{element}; {length}]"),
        None => element.to_string(),
    }
}
