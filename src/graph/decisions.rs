//! What was decided about a list, apart from the list: which passes run, which products are in FP8, and what was measured.
//!
//! Decisions that took measurements are kept (`decisions_file`) and apply to the same list when it is recorded again, in another
//! process and on other memory: its fingerprint says whether it is the same. The passes and the conversion run again and check what
//! they always check; what is saved is the measuring. So nothing that a file says becomes an address, a shape or an operation.

use super::fp8::{Conversion, Mark, Marks};
use super::optimize::{Choice, Level};
use super::passes::ALL;
use super::report::{Errors, Exactness, Note, Report, TakenBack, Times};
use super::{fingerprint, fp8, Graph, Lists, Optimization};
use crate::allocation::with_room;
use crate::error::{Error, Result};
use crate::stream::Stream;
use std::sync::Arc;

const WHAT: &str = "a graph's decisions";

#[derive(Debug, Clone, PartialEq)]
pub struct Decisions {
    /// What the caller calls the values of weights and inputs by.
    pub key: String,
    /// Of the recorded list.
    pub fingerprint: u64,
    pub nodes: u32,
    pub optimization: Option<Passes>,
    pub conversion: Option<Products>,
}

/// Of an optimisation.
#[derive(Debug, Clone, PartialEq)]
pub struct Passes {
    pub level: Level,
    /// Of the passes that run, in their order.
    pub exactness: Vec<(&'static str, Exactness)>,
    pub taken_back: Vec<TakenBack>,
    pub errors: Option<Errors>,
    pub times: Option<Times>,
}

/// Of a conversion to FP8.
#[derive(Debug, Clone, PartialEq)]
pub struct Products {
    pub weights_alone: bool,
    pub storage_only: bool,
    pub products: Vec<Product>,
    pub errors: Option<Errors>,
    pub times: Option<Times>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Product {
    pub node: u32,
    pub mark: Mark,
    pub converted: bool,
    pub error: Option<f64>,
}

/// The name of a pass, as the table has it.
pub fn pass_of(name: &str) -> Option<&'static str> {
    ALL.iter().map(|pass| pass.name).find(|pass| *pass == name)
}

impl Passes {
    fn of(optimization: &Optimization) -> Passes {
        let Optimization { level, choice, report } = optimization;
        let named = ALL.iter().zip(choice).filter_map(|(pass, choice)| choice.map(|exactness| (pass.name, exactness)));
        Passes {
            level: *level,
            exactness: named.collect(),
            taken_back: report.taken_back.clone(),
            errors: report.errors.clone(),
            times: report.times,
        }
    }

    fn choice(&self) -> Choice {
        let exactness = |name| self.exactness.iter().find(|(pass, _)| *pass == name).map(|(_, exactness)| *exactness);
        ALL.iter().map(|pass| exactness(pass.name)).collect()
    }

    /// What the report says that was not found out now.
    fn complete(&self, report: &mut Report) {
        report.taken_back = self.taken_back.clone();
        (report.errors, report.times) = (self.errors.clone(), self.times);
        let text = "the choice of passes, errors and times are those of saved decisions and were not measured again";
        report.notes.push(Note { pass: "decisions", text: text.to_string() });
    }
}

impl Products {
    fn of(conversion: &Conversion) -> Result<Products> {
        let mut products = with_room(conversion.products.len(), WHAT)?;
        products.extend(conversion.products.iter().map(|product| Product {
            node: product.node,
            mark: product.mark,
            converted: product.converted,
            error: product.error,
        }));
        let fp8::Options { weights_alone, storage_only, .. } = conversion.options;
        let (errors, times) = (conversion.errors.clone(), conversion.times);
        Ok(Products { weights_alone, storage_only, products, errors, times })
    }

    /// Marks that make the same conversion without a measurement.
    fn marks(&self) -> Marks {
        let mark = |product: &Product| if product.converted { Mark::Convert } else { Mark::Keep };
        self.products.iter().map(|product| (product.node, mark(product))).collect()
    }

    fn options(&self) -> fp8::Options {
        fp8::Options { weights_alone: self.weights_alone, storage_only: self.storage_only, ..fp8::Options::default() }
    }

    /// Puts what was measured beside what was converted now.
    fn complete(&self, conversion: &mut Conversion) -> Result<()> {
        for product in &mut conversion.products {
            let Some(saved) = self.products.iter().find(|saved| saved.node == product.node) else { continue };
            if saved.converted != product.converted {
                let text = format!("node {} was converted to FP8, and now: {}", saved.node, product.reason);
                return Err(Error::invalid(text).with_advice("convert the graph anew, and save that"));
            }
            (product.mark, product.error) = (saved.mark, saved.error);
            if saved.mark == Mark::Auto {
                product.reason = "saved decisions say so".to_string();
            }
        }
        (conversion.errors, conversion.times) = (self.errors.clone(), self.times);
        Ok(())
    }
}

impl Graph {
    /// What the last optimisation and the last conversion decided. `key` is the caller's name for the values of weights.
    pub fn decisions(&self, key: &str) -> Result<Decisions> {
        let lists = self.expect_lists()?;
        if lists.optimization.is_none() && lists.conversion.is_none() {
            return Err(Error::invalid("the graph was neither optimised nor converted to FP8")
                .with_advice("nvb_graph_optimize and nvb_graph_convert_fp8 make what is saved"));
        }
        Ok(Decisions {
            key: key.to_string(),
            fingerprint: fingerprint::of(&lists.recorded.nodes, &self.internal())?,
            nodes: lists.recorded.nodes.len() as u32,
            optimization: lists.optimization.as_ref().map(Passes::of),
            conversion: lists.conversion.as_deref().map(Products::of).transpose()?,
        })
    }

    /// Optimises and converts the recorded list as was decided, without a measurement; after an error the graph is as before.
    /// `allowed` as for `convert_fp8`, which converts weights on `stream` here too.
    pub fn decide(&self, decisions: &Decisions, key: &str, allowed: bool, stream: &Stream) -> Result<()> {
        let lists = self.expect_lists()?;
        if decisions.key != key {
            return Err(Error::invalid(format!("the decisions are for {:?}, not for {key:?}", decisions.key)));
        }
        let (internal, workspace) = (self.internal(), self.workspace());
        let nodes = lists.recorded.nodes.len();
        if decisions.nodes as usize != nodes
            || decisions.fingerprint != fingerprint::of(&lists.recorded.nodes, &internal)?
        {
            let text = format!(
                "the decisions are for another list, of {} nodes; this one has {nodes}, or other shapes, numbers or marks",
                decisions.nodes
            );
            return Err(Error::invalid(text));
        }
        let mut lists = Lists::of(lists.recorded);
        if let Some(products) = &decisions.conversion {
            let (recorded, memory) = (&lists.recorded, &self.memory);
            let subject = fp8::Subject { recorded, internal: &internal, workspace: &workspace, memory, allowed };
            let mut conversion = subject.convert(&products.marks(), &products.options(), stream)?;
            products.complete(&mut conversion)?;
            lists.launched = conversion.list.clone();
            lists.conversion = Some(Arc::new(conversion));
        }
        if let Some(passes) = &decisions.optimization {
            let subject = self.subject(&lists, &internal, ALL, &workspace);
            let mut optimized = subject.by_choice(passes.level, passes.choice())?;
            passes.complete(&mut optimized.report);
            lists = lists.optimized(passes.level, optimized)?;
        }
        self.set(lists);
        Ok(())
    }
}
