use super::*;
use crate::cpu::CpuExecutor;
use crate::executor::Executor;
use crate::graph::passes::ALL;
use crate::graph::Graph;
use crate::operation::elementwise::{Elementwise, ElementwiseKind};
use crate::operation::Operation;
use crate::tensor::Tensor;

struct World {
    stream: Arc<Stream>,
    graph: Graph,
}

/// A graph that makes twice `x` of it, and then `y` of that by a factor of 3.
fn world(x: &mut [f32; 8], y: &mut [f32; 8]) -> World {
    let executor: Arc<dyn Executor> = Arc::new(CpuExecutor::new(1).unwrap());
    let (stream, graph) = (Arc::new(Stream::new(&executor, 0).unwrap()), Graph::on(&executor));
    graph.begin(&stream).unwrap();
    let (x, y) = (Tensor::of(x, &[1, 8]), Tensor::of(y, &[1, 8]));
    for (kind, second, output) in [(ElementwiseKind::Add, Some(x), x), (ElementwiseKind::Scale(3.0), None, y)] {
        let op = Elementwise::new(kind, x, second, output).unwrap();
        stream.sink().unwrap().take(op.into(), None).unwrap();
    }
    graph.end(&stream).unwrap();
    World { stream, graph }
}

/// Makes 3 into `factor`, and says that this is exact.
fn wrong(list: &mut List, factor: f32, exactness: Exactness) -> Result<()> {
    for place in list.places() {
        let Some(Operation::Elementwise(op)) = list.op(place) else { continue };
        if op.kind == ElementwiseKind::Scale(3.0) {
            let op = Elementwise { kind: ElementwiseKind::Scale(factor), ..*op };
            list.replace(place, op.into(), exactness)?;
        }
    }
    Ok(())
}

const fn pass(name: &'static str, run: fn(&mut List) -> Result<()>) -> Pass {
    Pass { name, summary: "A test's.", exactness: Exactness::Exact, run }
}

const WRONG: &[Pass] = &[
    pass("a_little_wrong", |list| wrong(list, 3.0003, Exactness::Rounding)),
    pass("wrong", |list| wrong(list, 5.0, Exactness::Exact)),
];

#[test]
fn a_wrong_pass_is_taken_back_where_its_error_exceeds_the_bound() {
    let (mut x, mut y) = ([1f32; 8], [7f32; 8]);
    let World { stream, graph } = world(&mut x, &mut y);
    let both = [("a_little_wrong", true), ("wrong", true)];
    // The second pass finds no factor of 3 any more where the first one stays.
    for (bound, expected, taken_back) in [(1e-6, 6.0, &both[..]), (1e-3, 6.0006, &[]), (1.0, 6.0006, &[])] {
        let options = Options { maximum_error: bound, ..Options::of(Level::O3) };
        graph.optimize_by(&options, &stream, WRONG).unwrap();
        let report = graph.report().unwrap();
        let names: Vec<_> = report.taken_back.iter().map(|back| (back.pass, back.error > bound)).collect();
        assert_eq!(names, taken_back, "{report:?}");
        assert!(report.errors.as_ref().unwrap().relative <= bound);
        assert_eq!((x, y), ([1.0; 8], [7.0; 8]), "what was measured is put back");
        graph.launch(&stream).unwrap();
        assert_eq!((x[0], y[0]), (2.0, expected));
        (x, y) = ([1.0; 8], [7.0; 8]);
    }
    // Without a bound nobody measures, and a pass that lies about itself stays.
    graph.optimize_by(&Options::of(Level::O1), &stream, &WRONG[1..]).unwrap();
    graph.launch(&stream).unwrap();
    assert_eq!(y[0], 10.0);
}

#[test]
fn every_optimisation_begins_with_the_recorded_list() {
    let (mut x, mut y) = ([1f32; 8], [7f32; 8]);
    let World { stream, graph } = world(&mut x, &mut y);
    assert!(graph.report().unwrap_err().message.contains("not optimised"));
    graph.optimize_by(&Options::of(Level::O1), &stream, &WRONG[1..]).unwrap();
    graph.optimize(&Options::of(Level::O0), &stream).unwrap();
    assert_eq!(graph.report().unwrap().rewrites, []);
    graph.launch(&stream).unwrap();
    assert_eq!(y[0], 6.0);
}

#[test]
fn measured_times_and_errors_are_in_the_report_and_memory_is_as_before() {
    let (mut x, mut y) = ([1f32; 8], [7f32; 8]);
    let World { stream, graph } = world(&mut x, &mut y);
    let options = Options { measure_times: true, measure_errors: true, launches: 3, ..Options::of(Level::O1) };
    graph.optimize_by(&options, &stream, &WRONG[1..]).unwrap();
    let report = graph.report().unwrap();
    let (times, errors) = (report.times.unwrap(), report.errors.clone().unwrap());
    assert!(times.launches == 3 && times.before > 0.0 && times.after > 0.0);
    assert_eq!((errors.outputs, errors.different, errors.worst), (2, 1, Some((1, "output"))));
    assert!((errors.relative - 2.0 / 3.0).abs() < 1e-9 && errors.absolute == 4.0);
    assert_eq!((x, y), ([1.0; 8], [7.0; 8]));
}

#[test]
fn unknown_levels_and_passes() {
    assert_eq!(Level::of(9, false).unwrap(), Level::O2);
    assert!(Level::of(9, true).unwrap_err().message.contains("level is 9"));
    let (mut x, mut y) = ([1f32; 8], [7f32; 8]);
    let World { stream, graph } = world(&mut x, &mut y);
    let options = Options { disabled: vec!["nothing".to_string()], ..Options::of(Level::O2) };
    let error = graph.optimize(&options, &stream).unwrap_err();
    assert!(error.message.contains("`nothing` is no pass") && error.message.contains("dead_work"), "{error}");
    assert!(graph.report().is_err());
}

#[test]
fn a_switch_takes_a_pass_out_or_leaves_others_out() {
    let (mut x, mut y) = ([1f32; 8], [7f32; 8]);
    let World { stream, graph } = world(&mut x, &mut y);
    let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
    for (enabled, disabled, factor) in
        [(&[][..], &["wrong"][..], 3.0), (&["wrong"], &[], 5.0), (&["wrong"], &["wrong"], 3.0)]
    {
        let options = Options { enabled: names(enabled), disabled: names(disabled), ..Options::of(Level::O1) };
        graph.optimize_by(&options, &stream, WRONG).unwrap();
        x = [1.0; 8];
        graph.launch(&stream).unwrap();
        assert_eq!((x[0], y[0]), (2.0, 2.0 * factor));
    }
}

/// Prints how long a list of 48 layers takes, of some 400 operations; nothing about a time is asserted.
#[test]
fn forty_eight_layers() {
    use crate::graph::passes::testing::Case;
    let mut case = Case::new();
    let [x, y, z] = case.matrices();
    let w = case.weight();
    for _ in 0..48 {
        case.norm(x, y).linear(y, &w, z).activation(z, crate::operation::Activation::Silu, z).linear(z, &w, y);
        case.norm(y, y).add(x, y, x).norm(x, z).linear(z, &w, y).add(x, y, x);
    }
    case.internal(y).internal(z);
    let names: Vec<_> = ALL.iter().map(|pass| pass.name).collect();
    let optimized = case.optimised(&names.join(","));
    assert!(
        optimized.nodes.len() < 48 * 6,
        "{}",
        optimized.report.describe(crate::graph::describe::Format::Text).unwrap()
    );
}
