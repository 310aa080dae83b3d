//! Finds gate and up products that one gated product could be, which only the weight's owner can bring about: `linear` reads rows of
//! both in turns (`NVB_ARRANGEMENT_GATED`), and here they are weights apart from each other.

use super::{epilogue, List, Pass};
use crate::error::Result;
use crate::graph::report::Exactness;
use crate::operation::gated_activation::GatedActivation;
use crate::operation::Operation;

pub const PASS: Pass = Pass {
    name: "gate_up",
    summary: "Names gate and up products of two weights that one gated weight would make one product of; it rewrites nothing.",
    exactness: Exactness::Exact,
    run,
};

fn run(list: &mut List) -> Result<()> {
    for place in list.places() {
        let Some(Operation::GatedActivation(GatedActivation { gate, up, .. })) = list.op(place) else { continue };
        let (Some((gate, one)), Some((up, other))) =
            (epilogue::product(list, place, gate), epilogue::product(list, place, up))
        else {
            continue;
        };
        if one.input == other.input && one.weight.encoding == other.weight.encoding {
            list.note(format!(
                "nodes {gate}, {up} and {place} stay three: their weights are apart; create one gated weight of both parts, \
                 and nvb_linear does all of it"
            ))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::Case;

    #[test]
    fn products_of_one_input_are_named() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        let (gate, up) = (case.weight(), case.weight());
        case.linear(x, &gate, y).linear(x, &up, z).gated(y, z, y).internal(y).internal(z);
        let report = case.optimised("gate_up").report;
        assert!(report.rewrites.is_empty() && report.notes[0].text.contains("nodes 0, 1 and 2"), "{report:?}");
        let mut case = Case::new();
        case.linear(x, &gate, y).linear(y, &up, z).gated(y, z, y).internal(y).internal(z);
        assert!(case.optimised("gate_up").report.notes.is_empty());
    }
}
