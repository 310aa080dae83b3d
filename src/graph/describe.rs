//! A recorded list in words: as lines for people, as JSON, and as Graphviz's DOT for a picture.

use super::{Node, Recorded};
use crate::operation::access::{Effect, Extent, Region, Visit};
use crate::operation::quantized_rows::QuantizedRows;
use crate::registry::key::encoding_name;
use crate::weight::WeightView;
use std::fmt::Write as _;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Text,
    Json,
    Graphviz,
}

/// What a node reads or writes, with its dtype and extents.
struct Operand {
    name: &'static str,
    form: String,
    region: Region,
    written: bool,
}

struct Operands(Vec<Operand>);

impl Operands {
    fn of(node: &Node) -> Vec<Operand> {
        let mut operands = Operands(Vec::new());
        node.op.accesses(&mut operands);
        operands.0.retain(|operand| !operand.region.is_empty());
        operands.0
    }

    fn push(&mut self, name: &'static str, form: String, region: Region, effect: Effect) {
        self.0.push(Operand { name, form, region, written: effect == Effect::Write });
    }

    fn push_quantized(&mut self, name: &'static str, rows: &QuantizedRows, effect: Effect) {
        let form = format!("{}[{}, {}]", encoding_name(rows.encoding), rows.rows, rows.columns);
        self.push(name, form, rows.region(), effect);
    }
}

impl Visit for Operands {
    fn add(&mut self, name: &'static str, of: &impl Extent, effect: Effect) {
        self.push(name, of.form(), of.region(), effect);
    }

    fn read_quantized(&mut self, name: &'static str, rows: Option<&QuantizedRows>) {
        rows.into_iter().for_each(|rows| self.push_quantized(name, rows, Effect::Read));
    }

    fn write_quantized(&mut self, name: &'static str, rows: Option<&QuantizedRows>) {
        rows.into_iter().for_each(|rows| self.push_quantized(name, rows, Effect::Write));
    }

    fn read_weight(&mut self, name: &'static str, weight: &WeightView) {
        let form = format!("{}[{}, {}]", encoding_name(weight.encoding), weight.rows, weight.columns);
        self.push(name, form, Region::of_weight(weight), Effect::Read);
    }
}

impl Recorded {
    pub fn describe(&self, format: Format) -> String {
        match format {
            Format::Text => self.text(),
            Format::Json => self.json(),
            Format::Graphviz => self.graphviz(),
        }
    }

    fn text(&self) -> String {
        let cost = self.cost();
        let mut text = format!("{} nodes: {} operations, {} bytes\n", self.nodes.len(), cost.operations, cost.bytes);
        for (index, node) in self.nodes.iter().enumerate() {
            let cost = node.op.cost();
            let _ =
                write!(text, "{index} {}: {} operations, {} bytes", node.op.kind().name(), cost.operations, cost.bytes);
            if !node.dependencies.is_empty() {
                let _ = write!(text, ", after {}", listed(&node.dependencies));
            }
            text.push('\n');
            for Operand { name, form, region, written } in Operands::of(node) {
                let does = if written { "writes" } else { "reads" };
                let _ = writeln!(text, "  {does} {name}: {form} at {:#x}", region.start);
            }
        }
        text
    }

    fn json(&self) -> String {
        let node = |(index, node): (usize, &Node)| {
            let (cost, operands) = (node.op.cost(), Operands::of(node));
            let those = |written: bool| {
                let that = |operand: &&Operand| operand.written == written;
                let object = |Operand { name, form, region, .. }: &Operand| {
                    format!(
                        r#"{{"name":"{name}","form":"{form}","address":"{:#x}","span":{}}}"#,
                        region.start,
                        region.end() - region.start
                    )
                };
                operands.iter().filter(that).map(object).collect::<Vec<_>>().join(",")
            };
            format!(
                r#"{{"index":{index},"operation":"{}","operations":{},"bytes":{},"dependencies":[{}],"reads":[{}],"writes":[{}]}}"#,
                node.op.kind().name(),
                cost.operations,
                cost.bytes,
                listed(&node.dependencies),
                those(false),
                those(true)
            )
        };
        let nodes: Vec<String> = self.nodes.iter().enumerate().map(node).collect();
        format!("{{\"nodes\":[\n{}\n]}}\n", nodes.join(",\n"))
    }

    fn graphviz(&self) -> String {
        let mut text = String::from("digraph nvbackend {\n  node [shape=box];\n");
        for (index, node) in self.nodes.iter().enumerate() {
            let written = |operand: &Operand| operand.written.then(|| format!("\\n{}: {}", operand.name, operand.form));
            let written: String = Operands::of(node).iter().filter_map(written).collect();
            let _ = writeln!(text, "  n{index} [label=\"{index} {}{written}\"];", node.op.kind().name());
            for earlier in &node.dependencies {
                let _ = writeln!(text, "  n{earlier} -> n{index};");
            }
        }
        text + "}\n"
    }
}

fn listed(indices: &[u32]) -> String {
    indices.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}
