//! What the fuzzer gives for each parameter and each field. What this cannot tell ends the build: a fuzzer that passed over
//! it would say nothing about it.

use crate::parse::{Declared, Header};

/// The variant of `interface::Role` as source text.
pub type Role = String;

fn position(names: &[String], name: &str) -> Option<usize> {
    names.iter().position(|known| known == name)
}

fn structure(header: &Header, name: &str) -> Option<usize> {
    header.structures.iter().position(|structure| structure.name == name)
}

/// Numbers of C by value.
fn number(kind: &str) -> Option<&'static str> {
    Some(match kind {
        "uint32_t" => "Role::Number { bytes: 4 }",
        "int32_t" | "nvb_status" => "Role::Number { bytes: 4 }",
        "uint64_t" | "int64_t" | "size_t" => "Role::Number { bytes: 8 }",
        "float" => "Role::Real { bytes: 4 }",
        "double" => "Role::Real { bytes: 8 }",
        _ => return None,
    })
}

/// Bytes of a number that a pointer leads to.
fn pointee_bytes(kind: &str) -> Option<usize> {
    Some(match kind {
        "uint32_t *" | "int32_t *" | "float *" => 4,
        "uint64_t *" | "size_t *" | "int64_t *" => 8,
        _ => return None,
    })
}

/// The role of `all[at]` in the function or struct `owner`.
pub fn role(header: &Header, owner: &str, all: &[Declared], at: usize, is_field: bool) -> Role {
    let Declared { name, kind, array, .. } = &all[at];
    let kind = kind.as_str();
    let sibling = |name: &str| all.iter().position(|other| other.name == name);
    let next_is = |wanted: &dyn Fn(&Declared) -> bool| all.get(at + 1).is_some_and(wanted).then_some(at + 1);
    let counted = || next_is(&|next| next.kind == "size_t" && (next.name == "count" || next.name.ends_with("_count")));
    let measured = || next_is(&|next| next.kind == "size_t" && next.name.ends_with("bytes"));
    if let Some(length) = array {
        let element = match kind {
            "char" => 1,
            "int32_t" | "uint32_t" => 4,
            "int64_t" | "uint64_t" => 8,
            _ => panic!("{owner}.{name}: an array of `{kind}` is new to fuzz/build/classify.rs"),
        };
        return format!("Role::Plain {{ bytes: {} }}", element * length);
    }
    if name == "struct_size" {
        return "Role::StructSize".into();
    }
    if let Some(role) = number(kind) {
        return role.into();
    }
    if position(&header.callbacks, kind).is_some() {
        return format!("Role::Callback({kind:?})");
    }
    if is_field && (kind == "nvb_tensor" || kind == "nvb_quantized_rows") {
        return format!("Role::{}", if kind == "nvb_tensor" { "Tensor" } else { "QuantizedRows" });
    }
    if kind == "const nvb_tensor *" && counted().is_none() {
        return "Role::TensorPointer".into();
    }
    let bare = kind.trim_start_matches("const ");
    if let Some(target) = bare.strip_suffix(" *") {
        if let Some(handle) = position(&header.handles, target) {
            return format!("Role::Handle({handle})");
        }
        if let Some(structure) = structure(header, target) {
            let is_const = kind.starts_with("const ");
            // `blocks` and `parts` share one count.
            let count = counted().or_else(|| (name == "blocks").then(|| sibling("part_count")).flatten());
            return match count {
                Some(count) => format!("Role::Structs {{ structure: {structure}, count: {count} }}"),
                None if is_const => format!("Role::StructIn({structure})"),
                None => format!("Role::StructOut({structure})"),
            };
        }
        if let Some(handle) = target.strip_suffix(" *").and_then(|target| position(&header.handles, target)) {
            return format!("Role::HandleOut({handle})");
        }
    }
    match (kind, name.as_str()) {
        // Without data: what refuses it is driven, its rows are not.
        ("nvb_block_tensor", _) if is_field => "Role::Plain { bytes: 80 }".into(),
        ("void *", "user_data" | "log_user_data" | "cuda_stream") => "Role::Opaque".into(),
        ("const char *", "path" | "tuning_file") => {
            format!(
                "Role::Path {{ written: {} }}",
                name == "tuning_file" || ["write", "save"].iter().any(|verb| owner.contains(verb))
            )
        }
        ("const char *", _) => "Role::Text".into(),
        ("char *", _) if next_is(&|next| next.name == "capacity").is_some() => "Role::TextBuffer".into(),
        ("const char * *", _) => "Role::PointerOut".into(),
        ("void * *", "pointer") if owner == "nvb_host_allocate" => "Role::HostBlockOut".into(),
        ("void * *", "pointer") => "Role::BlockOut".into(),
        ("void * *", _) => "Role::PointerOut".into(),
        ("void *", "pointer") if owner == "nvb_host_free" => "Role::HostBlock".into(),
        ("void *", "pointer") => "Role::Block".into(),
        ("void * const *" | "void *const *", _) if counted().is_some() => {
            format!("Role::Blocks {{ count: {} }}", counted().expect("just asked"))
        }
        ("const int64_t *", "shape") => "Role::Extents".into(),
        ("const int32_t *", _) if is_field && sibling("sequence_count").is_some() => {
            format!("Role::Numbers {{ count: {} }}", sibling("sequence_count").expect("just asked"))
        }
        ("void *" | "const void *", _) => {
            match measured().or_else(|| sibling("bytes")) {
                Some(bytes) => format!("Role::Memory {{ bytes: {bytes} }}"),
                // Of structs that the library fills in.
                None if is_field => "Role::Plain { bytes: 8 }".into(),
                None => unknown(owner, name, kind),
            }
        }
        _ if pointee_bytes(kind).is_some() => {
            let bytes = pointee_bytes(kind).expect("just asked");
            if is_field {
                "Role::Plain { bytes: 8 }".into()
            } else {
                format!("Role::NumberOut {{ bytes: {bytes} }}")
            }
        }
        _ => unknown(owner, name, kind),
    }
}

fn unknown(owner: &str, name: &str, kind: &str) -> Role {
    panic!(
        "{owner}: `{kind} {name}` is of no kind that the fuzzer knows what to give for; teach fuzz/build/classify.rs, and \
         fuzz/src/header/interface.rs if the kind is new"
    )
}
