//! What is chosen, and what the choice then does.

use super::fixture::*;
use nvbackend::backend::Backend;
use nvbackend::error::Status;
use nvbackend::operation::OperationKind;
use nvbackend::registry::choices::Table;
use nvbackend::stream::Stream;
use nvbackend::tuning::explain::explain;
use nvbackend::tuning::timer::{EventTimer, HostTimer, Timer};
use nvbackend::tuning::tuner::Outcome;
use nvbackend::tuning::Clock;
use nvbackend::weight::Format;
use std::ops::ControlFlow;

fn outcome<'a>(outcomes: &'a [(String, Outcome)], name: &str) -> &'a Outcome {
    &outcomes.iter().find(|(known, _)| known == name).unwrap_or_else(|| panic!("{name} is not among {outcomes:?}")).1
}

#[test]
fn the_fastest_wins_and_products_follow() {
    let backend = backend(None);
    let case = case(&backend, 3);
    let script = Script::new([("linear_cpu_64", 0.5), ("linear_cpu_128", 0.6), ("linear_cpu_16", 9.0)]);
    let (report, outcomes, found) = tune(&backend, &Spoiled::new(&backend), script, &[case]);
    let entry = found[&key(&backend, &case)];
    assert_eq!(entry.choice.kernel.kernel().name, "linear_cpu_64");
    assert_eq!((entry.seconds, entry.default_seconds, entry.candidates), (0.5, 1.0, report.measured as u32));
    assert_eq!((report.tuned, report.changed, report.wrong, report.failed), (1, 1, 0, 0));
    assert_eq!((report.default_seconds, report.chosen_seconds), (1.0, 0.5));
    assert_eq!(outcome(&outcomes, "linear_cpu_128"), &Outcome::Measured(0.6));
    assert_eq!(outcome(&outcomes, "linear_cpu_16"), &Outcome::Slow(9.0));
    assert_eq!(outcomes.last().unwrap(), &("linear_cpu_64".to_string(), Outcome::Chosen(0.5)));
    // Rows are bucketed by powers of two: 4 shares it, 5 does not.
    let choices = backend.executor().choices();
    for (rows, tuned) in [(2, false), (3, true), (4, true), (5, false)] {
        let op = super::fixture::case(&backend, rows).shape().unwrap();
        assert_eq!(choices.tuned(&op).is_some(), tuned, "{rows} rows");
        assert_eq!(choices.of(&op).count(), usize::from(tuned));
    }
}

#[test]
fn a_default_that_is_as_fast_stays() {
    let backend = backend(None);
    let case = case(&backend, 3);
    let script = Script::new([("linear_cpu", 1.0), ("linear_cpu_64", 0.99)]);
    let (report, _, found) = tune(&backend, &Spoiled::new(&backend), script, &[case]);
    assert_eq!(found[&key(&backend, &case)].choice.kernel.kernel().name, "linear_cpu");
    assert_eq!((report.tuned, report.changed), (1, 0));
    let entry = found[&key(&backend, &case)];
    assert_eq!((entry.seconds, entry.fastest_seconds), (1.0, 0.99));
    let text = explain(&**backend.executor(), &case.shape().unwrap());
    assert!(text.contains("runs linear_cpu: the tuned entry"), "{text}");
    assert!(
        text.contains("which is kept because no other of ") && text.contains(" is 2 % faster; one took 990000.00 us")
    );
    assert!(!text.contains("fastest"), "{text}");
    // One that is as fast to the bit is the fastest.
    let script = Script::new([("linear_cpu", 1.0)]);
    tune(&backend, &Spoiled::new(&backend), script, &[case]);
    let text = explain(&**backend.executor(), &case.shape().unwrap());
    assert!(text.contains("1000000.00 us by default, the fastest of "), "{text}");
}

#[test]
fn a_wrong_candidate_never_wins() {
    let backend = backend(None);
    let case = case(&backend, 3);
    let script = [("linear_cpu_16", 0.1), ("linear_cpu_32", 0.2), ("linear_cpu_64", 0.3), ("linear_cpu_128", 0.4)];
    let mut spoiled = Spoiled::new(&backend);
    spoiled.wrong = vec!["linear_cpu_16"];
    spoiled.lazy = vec!["linear_cpu_32"];
    spoiled.failing = vec!["linear_cpu_64"];
    let (report, outcomes, found) = tune(&backend, &spoiled, Script::new(script), &[case]);
    assert_eq!(found[&key(&backend, &case)].choice.kernel.kernel().name, "linear_cpu_128");
    assert_eq!((report.wrong, report.failed), (2, 1));
    let Outcome::Wrong(why) = outcome(&outcomes, "linear_cpu_16") else { panic!("{outcomes:?}") };
    assert!(why.starts_with("row 2, column 255 is"), "{why}");
    assert!(
        matches!(outcome(&outcomes, "linear_cpu_32"), Outcome::Wrong(why) if why.starts_with("row 0, column 0 is NaN"))
    );
    assert_eq!(outcome(&outcomes, "linear_cpu_64"), &Outcome::Failed("it never works".into()));
}

#[test]
fn a_candidate_that_goes_wrong_while_it_is_timed_does_not_win_either() {
    let backend = backend(None);
    let case = case(&backend, 3);
    let mut spoiled = Spoiled::new(&backend);
    spoiled.wrong_later = vec!["linear_cpu_16"];
    let script = Script::new([("linear_cpu_16", 0.4), ("linear_cpu_32", 0.5)]);
    let (report, outcomes, found) = tune(&backend, &spoiled, script, &[case]);
    assert_eq!(found[&key(&backend, &case)].choice.kernel.kernel().name, "linear_cpu_32");
    assert_eq!((report.tuned, report.wrong), (1, 1));
    assert_eq!(outcomes.last().unwrap(), &("linear_cpu_32".to_string(), Outcome::Chosen(0.5)));
}

#[test]
fn variations_of_the_fastest_join() {
    let backend = backend(None);
    let case = case(&backend, 3);
    let mut spoiled = Spoiled::new(&backend);
    spoiled.listed = Some(vec!["linear_cpu", "linear_cpu_64"]);
    spoiled.varied = [vec!["linear_cpu_16", "linear_cpu_32"], vec!["linear_cpu_64", "linear_cpu_128"]];
    spoiled.wrong = vec!["linear_cpu_32"];
    let times = [("linear_cpu_16", 0.3), ("linear_cpu_32", 0.2), ("linear_cpu_64", 0.5), ("linear_cpu_128", 0.25)];
    let (report, outcomes, found) = tune(&backend, &spoiled, Script::new(times), &[case]);
    let entry = found[&key(&backend, &case)];
    assert_eq!(entry.choice.kernel.kernel().name, "linear_cpu_128");
    assert_eq!((entry.seconds, entry.default_seconds, entry.candidates), (0.25, 1.0, 4));
    assert_eq!((report.measured, report.wrong, report.failed), (4, 1, 0));
    assert!(matches!(outcome(&outcomes, "linear_cpu_32"), Outcome::Wrong(_)));
    assert_eq!(*spoiled.fastest.lock().unwrap(), ["linear_cpu_32", "linear_cpu_16", "linear_cpu_64", "linear_cpu"]);
    assert_eq!(outcomes.iter().filter(|(name, _)| name == "linear_cpu_64").count(), 1, "{outcomes:?}");
}

#[test]
fn of_many_variations_the_fastest_are_checked() {
    let backend = backend(None);
    let case = case(&backend, 3);
    let mut spoiled = Spoiled::new(&backend);
    spoiled.listed = Some(vec!["linear_cpu"]);
    spoiled.varied[0] = vec!["linear_cpu_16", "linear_cpu_32", "linear_cpu_64", "linear_cpu_128", "linear_cpu_256"];
    spoiled.failing = vec!["linear_cpu_32"];
    spoiled.lazy = vec!["linear_cpu_64"];
    let script = Script::new([("linear_cpu_64", 0.9), ("linear_cpu_256", 0.8)]);
    let (report, outcomes, found) = tune(&backend, &spoiled, script, &[case]);
    assert_eq!(found[&key(&backend, &case)].choice.kernel.kernel().name, "linear_cpu_256");
    assert_eq!((report.wrong, report.failed), (1, 1));
    assert_eq!(outcome(&outcomes, "linear_cpu_32"), &Outcome::Failed("it never works".into()));
    // The fifth is left out by its time, before anybody looks at its output.
    spoiled.failing.clear();
    spoiled.lazy = vec!["linear_cpu_16"];
    let script = Script::new([("linear_cpu_16", 1.1)]);
    let (report, outcomes, _) = tune(&backend, &spoiled, script, &[case]);
    assert_eq!((report.measured, report.wrong, report.failed), (5, 0, 0));
    assert_eq!(outcome(&outcomes, "linear_cpu_16"), &Outcome::Slow(1.1));
}

#[test]
fn without_a_right_candidate_there_is_no_choice() {
    let backend = backend(None);
    let mut spoiled = Spoiled::new(&backend);
    spoiled.lazy = nvbackend::registry::kernels().map(|(_, kernel)| kernel.name).collect();
    let (report, _, found) = tune(&backend, &spoiled, Script::new([]), &[case(&backend, 3)]);
    assert_eq!((report.tuned, report.measured, found.len()), (0, 0, 0));
}

#[test]
fn real_clocks_measure_every_format() {
    let backend = backend(None);
    let formats = [
        Format::float(nvbackend::tensor::DType::Bf16),
        Format::new(nvbackend::weight::Encoding::Int4, nvbackend::weight::Granularity::Groups(32), true, false)
            .unwrap(),
    ];
    for clock in [Clock::Events, Clock::Host] {
        let cases: Vec<_> = formats.iter().map(|&format| case_of(&backend, 40, format)).collect();
        let options = nvbackend::tuning::tuner::Options { rounds: 2 };
        let (report, unkept) = backend.tune(&cases, options, clock, &mut |_| ControlFlow::Continue(())).unwrap();
        assert!(unkept.is_none());
        assert_eq!((report.tuned, report.wrong, report.failed, report.stopped), (2, 0, 0, false));
        assert!(report.chosen_seconds > 0.0 && report.chosen_seconds <= report.default_seconds);
    }
    let stream = Stream::new(backend.executor(), 0).unwrap();
    let timers: [Box<dyn Timer>; 2] = [Box::new(HostTimer), Box::new(EventTimer::new(&stream, None).unwrap())];
    for mut timer in timers {
        let choice = backend.executor().linear_default(&cases_shape(&backend)).unwrap();
        let mut calls = Vec::new();
        let seconds = timer.time(&choice, &stream, 3, &mut |launch| {
            calls.push(launch);
            std::thread::sleep(std::time::Duration::from_millis(2));
            Ok(())
        });
        assert!((0.002..1.0).contains(&seconds.unwrap()));
        assert_eq!(calls, [0, 1, 2]);
    }
}

fn cases_shape(backend: &Backend) -> nvbackend::operation::linear_product::LinearProduct {
    case(backend, 3).shape().unwrap()
}

#[test]
fn a_caller_that_has_enough_keeps_what_is_done() {
    let backend = backend(None);
    let cases = [case(&backend, 1), case(&backend, 2), case(&backend, 4)];
    let options = nvbackend::tuning::tuner::Options { rounds: 1 };
    let mut stop = |progress: &nvbackend::tuning::tuner::Progress| match progress.case {
        0 => ControlFlow::Continue(()),
        _ => ControlFlow::Break(()),
    };
    let (report, _) = backend.tune(&cases, options, Clock::Host, &mut stop).unwrap();
    assert_eq!((report.tuned, report.stopped), (1, true));
    let tuned = |rows| backend.executor().choices().tuned(&case(&backend, rows).shape().unwrap()).is_some();
    assert!(tuned(1) && !tuned(2) && !tuned(4));
}

#[test]
fn explanations_name_the_kernel_and_the_reason() {
    let backend = backend(None);
    let text = |rows| explain(&**backend.executor(), &case(&backend, rows).shape().unwrap());
    let key = "m4 n256 k96 f32 int8 rows f32";
    let default = text(3);
    assert!(
        default.starts_with("linear m=3 n=256 k=96, f32 x int8 -> f32\nruns linear_cpu: the default for this shape")
    );
    assert!(default.contains(&format!("; nothing is tuned for \"{key}\"")), "{default}");
    assert!(default.contains("\nothers that can do it: linear_cpu_16, linear_cpu_32, linear_cpu_64"), "{default}");
    let refused = "\nthose that cannot: linear_cpu_512 (shape: the product is cut into tasks of at most 256 columns)";
    assert!(default.contains(refused), "{default}");

    backend.executor().choices().extend(Table::from([entry(&backend, 3, "linear_cpu_64")]).into());
    let tuned = format!("runs linear_cpu_64: the tuned entry \"{key}\": 1.00 us, 2.00 us by default, the fastest of 3");
    assert!(text(3).contains(&tuned), "{}", text(3));

    backend.executor().choices().set_override(OperationKind::Linear, "linear_cpu_128").unwrap();
    assert!(text(3).contains("runs linear_cpu_128: it is the override\n"), "{}", text(3));
    // 512 columns are more than the weight has: the next best reason holds, and the text says both.
    backend.executor().choices().set_override(OperationKind::Linear, "linear_cpu_512").unwrap();
    assert!(text(3).contains("runs linear_cpu_64: the tuned entry"), "{}", text(3));
    assert!(text(3).contains("; the override linear_cpu_512 does not take it: "), "{}", text(3));
    backend.executor().choices().set_override(OperationKind::Linear, "").unwrap();
    assert!(text(0).ends_with("runs nothing: the product is empty"), "{}", text(0));
}

#[test]
fn an_override_that_is_not_there_is_answered_with_what_is() {
    let backend = backend(None);
    let error = backend.executor().choices().set_override(OperationKind::Linear, "linear_fast").unwrap_err();
    assert_eq!(error.status, Status::Configuration);
    assert!(error.message.contains("\"linear_fast\"") && error.message.contains("linear_cpu_64"), "{error}");
    let mut wrong = options(None);
    wrong.linear_kernel = "linear_simt".into();
    assert_eq!(Backend::new(wrong.clone()).err().unwrap().status, Status::Configuration);
    wrong.linear_kernel = "linear_cpu_32".into();
    let overridden = Backend::new(wrong).unwrap().executor().choices().overridden(OperationKind::Linear).unwrap();
    assert_eq!(overridden.kernel().name, "linear_cpu_32");
}
