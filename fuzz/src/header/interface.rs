//! What include/nvbackend.h declares, as fuzz/build read it.

// The generated structs exist for their layout.
#![allow(dead_code, non_camel_case_types, clippy::missing_safety_doc)]

use std::ffi::c_void;
use std::sync::LazyLock;

/// What a parameter or field takes. Numbers are places in `HANDLES`, `STRUCTURES`, or among the siblings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Role {
    StructSize,
    Number {
        bytes: usize,
    },
    Real {
        bytes: usize,
    },
    Handle(usize),
    HandleOut(usize),
    StructIn(usize),
    /// Versioned, or a plain one such as a tensor.
    StructOut(usize),
    /// An array whose elements are counted by a sibling.
    Structs {
        structure: usize,
        count: usize,
    },
    Tensor,
    TensorPointer,
    QuantizedRows,
    Text,
    Path {
        written: bool,
    },
    /// The next one is its capacity.
    TextBuffer,
    NumberOut {
        bytes: usize,
    },
    PointerOut,
    BlockOut,
    HostBlockOut,
    Block,
    HostBlock,
    Blocks {
        count: usize,
    },
    /// As many as a sibling named `rank` says.
    Extents,
    /// 32-bit numbers of a call's sequences, and one more.
    Numbers {
        count: usize,
    },
    /// As many bytes as a sibling says.
    Memory {
        bytes: usize,
    },
    /// Handed through, never followed.
    Opaque,
    Callback(&'static str),
    /// Only ever written by the library.
    Plain {
        bytes: usize,
    },
}

pub struct Field {
    pub name: &'static str,
    pub offset: usize,
    pub role: Role,
    pub comment: &'static str,
}

pub struct Structure {
    pub name: &'static str,
    pub size: usize,
    pub fields: &'static [Field],
}

impl Structure {
    pub fn is_versioned(&self) -> bool {
        self.fields.first().is_some_and(|field| field.role == Role::StructSize)
    }

    pub fn offset(&self, name: &str) -> Option<usize> {
        self.fields.iter().find(|field| field.name == name).map(|field| field.offset)
    }
}

pub struct Parameter {
    pub name: &'static str,
    pub role: Role,
}

pub struct Function {
    pub name: &'static str,
    /// Whether it returns a status that says if it failed.
    pub fallible: bool,
    pub call: fn(&[usize]) -> usize,
    pub parameters: &'static [Parameter],
}

include!(concat!(env!("OUT_DIR"), "/interface.rs"));

// The functions that are called are those of the rlib, which nothing else here may name.
extern crate nvbackend;

pub fn handle_kind(name: &str) -> usize {
    HANDLES.iter().position(|known| *known == name).unwrap_or_else(|| panic!("{name} is no handle of the header"))
}

/// How many values of a function's arguments can be replaced by a wrong one, fields of structs included.
pub fn leaves(function: usize) -> usize {
    static LEAVES: LazyLock<Vec<usize>> = LazyLock::new(|| {
        let of = |function: &Function| function.parameters.iter().map(|it| leaves_of(it.role)).sum();
        FUNCTIONS.iter().map(of).collect()
    });
    LEAVES[function]
}

fn leaves_of(role: Role) -> usize {
    match role {
        Role::StructIn(structure) | Role::StructOut(structure) | Role::Structs { structure, .. }
            if STRUCTURES[structure].is_versioned() || role != Role::StructOut(structure) =>
        {
            1 + STRUCTURES[structure].fields.iter().map(|field| leaves_of(field.role)).sum::<usize>()
        }
        Role::Tensor | Role::TensorPointer => 5,
        Role::QuantizedRows => 5,
        Role::StructSize | Role::Plain { .. } => 0,
        _ => 1,
    }
}
