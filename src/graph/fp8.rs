//! Conversion of a recorded list to FP8: products with float weights become products with copies of these weights in FP8 E4M3, a
//! scale a row, and large ones may round their input to E4M3 as well.
//!
//! What is converted depends on the caller's marks and, where there is a bound of the error, on what each product alone does to the
//! outputs: the products with the smallest errors are converted first, as many as stay within the bound together. The recorded list
//! stays; optimisations begin with the converted one.

mod twin;

use super::measure::Measured;
use super::region::Ranges;
use super::report::{Errors, Times};
use super::workspace::Workspace;
use super::{Node, Recorded};
use crate::allocation::{filled, with_room};
use crate::device::features::Features;
use crate::device::DeviceKind;
use crate::error::{numbered, Error, Result, Status};
use crate::loading::Weight;
use crate::memory::MemoryManager;
use crate::operation::linear::{Linear, LinearInput};
use crate::operation::Operation;
use crate::stream::{Owner, Stream};
use crate::weight::WeightView;
use std::collections::BTreeMap;
use std::sync::Arc;

const WHAT: &str = "a graph's conversion to FP8";

numbered! {
    /// What the caller says of a product; the numbers are `NVB_FP8_MARK_*` of the C ABI.
    #[derive(PartialOrd, Ord)]
    pub enum Mark: u32 {
        /// The bound decides.
        Auto = 0,
        /// It stays as it was recorded.
        Keep = 1,
        /// It is converted whatever the error.
        Convert = 2,
    }
}

/// Marks by place in the recorded list; places without one are `Auto`.
pub type Marks = BTreeMap<u32, Mark>;

/// What the caller asks for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// The largest relative error of an output; 0: no bound.
    pub maximum_error: f64,
    /// Inputs stay as they are.
    pub weights_alone: bool,
    /// Also where the device does not multiply FP8 values.
    pub storage_only: bool,
    pub measure_errors: bool,
    pub measure_times: bool,
    pub launches: usize,
}

impl Options {
    fn measures(&self) -> bool {
        self.maximum_error > 0.0 || self.measure_errors || self.measure_times
    }
}

/// A product of the recorded list.
#[derive(Debug, Clone)]
pub struct Product {
    pub node: u32,
    pub mark: Mark,
    pub converted: bool,
    /// Of the input.
    pub rows: usize,
    pub weight: WeightView,
    /// ‖FP8 weight − weight‖ / ‖weight‖; 0 where none was made.
    pub weight_error: f64,
    /// The worst output's error with this product, and those that are converted in any case, in FP8; `None`: not measured.
    pub error: Option<f64>,
    /// Floating-point operations.
    pub operations: f64,
    /// Bytes of the weight that it reads, in the recorded and in the launched list.
    pub weight_bytes: [usize; 2],
    /// Why it is as it is.
    pub reason: String,
}

/// A list that was converted.
#[derive(Clone)]
pub struct Conversion {
    pub list: Arc<Recorded>,
    pub options: Options,
    pub products: Vec<Product>,
    pub errors: Option<Errors>,
    pub times: Option<Times>,
}

/// What is converted, and with what.
pub struct Subject<'a> {
    pub recorded: &'a Arc<Recorded>,
    pub internal: &'a Ranges,
    pub workspace: &'a Workspace,
    pub memory: &'a Arc<MemoryManager>,
    /// Whether the backend's options let products round their input to FP8.
    pub allowed: bool,
}

/// A product in FP8.
struct Candidate {
    /// In `Conversion::products`.
    place: usize,
    node: Node,
}

impl Subject<'_> {
    pub fn convert(&self, marks: &Marks, options: &Options, stream: &Stream) -> Result<Conversion> {
        super::optimize::expect_measurable(stream)?;
        self.recorded.replay.expect_awake()?;
        let rounds = self.expect_fp8(options)? && !options.weights_alone;
        self.expect_marks(marks)?;
        let mut products = self.products(marks)?;
        let candidates = self.candidates(&mut products, rounds, stream)?;
        let mut chosen = filled(true, candidates.len(), WHAT)?;
        let measured = match options.measures() {
            true => Some(Measured::begin(self.recorded, self.internal, self.workspace, stream)?),
            false => None,
        };
        if let Some(measured) = measured.as_ref().filter(|_| options.maximum_error > 0.0) {
            self.choose(&mut products, &candidates, &mut chosen, measured, options.maximum_error)?;
        }
        let nodes = self.with(&candidates, &chosen)?;
        for (candidate, chosen) in candidates.iter().zip(&chosen) {
            let product = &mut products[candidate.place];
            product.converted = *chosen;
            if let (true, Operation::Linear(op)) = (*chosen, &candidate.node.op) {
                product.weight_bytes[1] = op.weight.read_bytes();
                product.reason = match (op.rounds_input, product.mark) {
                    (_, Mark::Convert) => "it is marked to be converted".to_string(),
                    (true, _) => "the weight is in FP8, and the input where the product is large".to_string(),
                    (false, _) => "the weight alone is in FP8".to_string(),
                };
            }
        }
        let (list, options) = (Arc::new(Recorded::of(nodes)?), *options);
        let mut conversion = Conversion { list, options, products, errors: None, times: None };
        if let Some(measured) = measured {
            conversion.errors = Some(measured.errors_of(&conversion.list.nodes)?);
            if options.measure_times {
                conversion.times = Some(measured.times_of(&conversion.list.nodes, options.launches.max(1))?);
            }
            measured.end()?;
        }
        Ok(conversion)
    }

    /// Whether the device multiplies FP8 values; an error where it does not and the caller did not ask for FP8 as a format alone.
    fn expect_fp8(&self, options: &Options) -> Result<bool> {
        let info = self.workspace.executor().info();
        let multiplies = info.kind == DeviceKind::Cuda && info.features.has(Features::FP8);
        let advice = "storage_only keeps weights in FP8 for their bytes alone";
        match (multiplies && self.allowed, options.storage_only) {
            (true, storage_only) => Ok(!storage_only),
            (false, true) => Ok(false),
            (false, false) if multiplies => {
                Err(Error::new(Status::Fp8, "the backend's option fp8 is \"off\"").with_advice(advice))
            }
            (false, false) => {
                let text = format!("{} has no FP8 arithmetic; compute capability 8.9 is needed", info.name);
                Err(Error::new(Status::Fp8, text).with_advice(advice))
            }
        }
    }

    fn expect_marks(&self, marks: &Marks) -> Result<()> {
        match marks.keys().find(|&&node| !matches!(self.op(node), Some(Operation::Linear(_)))) {
            None => Ok(()),
            Some(node) => Err(Error::invalid(format!("node {node} has a mark and is no product"))),
        }
    }

    fn op(&self, node: u32) -> Option<&Operation> {
        self.recorded.nodes.get(node as usize).map(|node| &node.op)
    }

    fn products(&self, marks: &Marks) -> Result<Vec<Product>> {
        let mut products = with_room(self.recorded.nodes.len(), WHAT)?;
        for (index, node) in self.recorded.nodes.iter().enumerate() {
            let Operation::Linear(op) = &node.op else { continue };
            let index = index as u32;
            products.push(Product {
                node: index,
                mark: marks.get(&index).copied().unwrap_or(Mark::Auto),
                converted: false,
                rows: op.input.size().0,
                weight: op.weight,
                weight_error: 0.0,
                error: None,
                operations: op.cost().operations,
                weight_bytes: [op.weight.read_bytes(); 2],
                reason: String::new(),
            });
        }
        Ok(products)
    }

    /// The products that can be converted, each with its weight in FP8.
    fn candidates(&self, products: &mut [Product], rounds: bool, stream: &Stream) -> Result<Vec<Candidate>> {
        let mut candidates: Vec<Candidate> = with_room(products.len(), WHAT)?;
        for (place, product) in products.iter_mut().enumerate() {
            let recorded = &self.recorded.nodes[product.node as usize];
            let Operation::Linear(op) = &recorded.op else { continue };
            let obstacle = match op.input {
                _ if product.mark == Mark::Keep => Some("it is marked to be kept".to_string()),
                _ if !op.weight.encoding.is_float() => Some(format!("the weight is {} already", op.weight.encoding)),
                LinearInput::Quantized(_) => Some("the input is in 8 bits already".to_string()),
                _ if op.weight.rows == 0 || op.weight.columns == 0 => Some("the weight is empty".to_string()),
                _ => None,
            };
            if let Some(obstacle) = obstacle {
                product.reason = obstacle;
                continue;
            }
            let named = |error: Error| error.context(format_args!("the weight of node {} in FP8", product.node));
            let twin = twin::of(&op.weight, recorded.owner.as_ref(), self.memory, stream).map_err(named)?;
            product.weight_error = twin.relative_error();
            let op: Operation = in_fp8(op, &twin, rounds).into();
            match self.workspace.executor().plan(&op) {
                Err(error) => product.reason = error.message,
                Ok(_) => {
                    let owner: Owner = twin;
                    let node = Node::of(op, Some(owner), recorded.recorded.clone());
                    candidates.push(Candidate { place, node });
                }
            }
        }
        Ok(candidates)
    }

    /// The recorded list with the chosen products in FP8.
    fn with(&self, candidates: &[Candidate], chosen: &[bool]) -> Result<Vec<Node>> {
        let mut nodes = with_room(self.recorded.nodes.len(), WHAT)?;
        nodes.extend(self.recorded.nodes.iter().cloned());
        for (candidate, _) in candidates.iter().zip(chosen).filter(|(_, chosen)| **chosen) {
            if let Some(place) = candidate.node.recorded.first() {
                nodes[*place as usize] = candidate.node.clone();
            }
        }
        Ok(nodes)
    }

    /// Chooses those with the smallest errors, as many as stay within the bound together.
    fn choose(
        &self,
        products: &mut [Product],
        candidates: &[Candidate],
        chosen: &mut [bool],
        measured: &Measured,
        bound: f64,
    ) -> Result<()> {
        let is_forced = |candidate: &Candidate, products: &[Product]| products[candidate.place].mark == Mark::Convert;
        let mut order = with_room(candidates.len(), WHAT)?;
        for (index, candidate) in candidates.iter().enumerate() {
            chosen[index] = is_forced(candidate, products);
            if !chosen[index] {
                order.push(index);
            }
        }
        let forced = chosen.to_vec();
        for &index in &order {
            chosen[index] = true;
            let error = measured.errors_of(&self.with(candidates, chosen)?)?.relative;
            chosen[index] = false;
            products[candidates[index].place].error = Some(error);
        }
        let error_of = |index: usize| products[candidates[index].place].error.unwrap_or(f64::INFINITY);
        order.sort_by(|&one, &other| error_of(one).total_cmp(&error_of(other)));
        // What alone is beyond the bound is so with others.
        let alone = order.partition_point(|&index| error_of(index) <= bound);
        let first = |count: usize| {
            let mut some = forced.clone();
            order[..count].iter().for_each(|&index| some[index] = true);
            some
        };
        let (mut fits, mut beyond) = (0, alone + 1);
        // The most that fit: tried all at once first, since that is the usual end.
        let mut tried = alone;
        while fits + 1 < beyond {
            match measured.errors_of(&self.with(candidates, &first(tried))?)?.relative <= bound {
                true => fits = tried,
                false => beyond = tried,
            }
            tried = fits.midpoint(beyond);
        }
        chosen.copy_from_slice(&first(fits));
        for (at, &index) in order.iter().enumerate().skip(fits) {
            let product = &mut products[candidates[index].place];
            product.reason = match at < alone {
                true => "the error of all that are converted would be above the bound".to_string(),
                false => "its error is above the bound".to_string(),
            };
        }
        Ok(())
    }
}

fn in_fp8(op: &Linear, twin: &Arc<Weight>, rounds: bool) -> Linear {
    let weight = WeightView { gated: op.weight.gated, ..twin.view() };
    Linear { weight, rounds_input: rounds, ..*op }
}
