//! What graphs keep, and which recording they end.

use super::*;
use crate::cpu::CpuExecutor;
use crate::memory::MemoryOptions;
use crate::operation::softmax::Softmax;
use crate::stream::Purpose;
use crate::tensor::Tensor;

impl Graph {
    /// With memory of its own.
    pub fn on(executor: &Arc<dyn Executor>) -> Graph {
        let memory = MemoryManager::new(executor.clone(), MemoryOptions::default()).unwrap();
        Graph::new(executor, &Arc::new(memory))
    }
}

fn executor() -> Arc<dyn Executor> {
    Arc::new(CpuExecutor::new(1).unwrap())
}

fn softmax(values: &mut [f32; 16]) -> Operation {
    let tensor = Tensor::of(values, &[2, 8]);
    Softmax::new(tensor, tensor, 1.0).unwrap().into()
}

#[test]
fn owners_live_as_long_as_the_graph() {
    let executor = executor();
    let stream = Arc::new(Stream::new(&executor, 0).unwrap());
    let graph = Graph::on(&executor);
    let (owner, mut values) = (Arc::new(7), [1f32; 16]);
    graph.begin(&stream).unwrap();
    stream.sink().unwrap().take(softmax(&mut values), Some(owner.clone())).unwrap();
    graph.end(&stream).unwrap();
    assert_eq!((Arc::strong_count(&owner), values[0]), (2, 1.0));
    graph.launch(&stream).unwrap();
    assert_eq!(values, [0.125; 16]);
    drop(graph);
    assert_eq!(Arc::strong_count(&owner), 1);
}

#[test]
fn a_graph_that_goes_ends_its_recording() {
    let executor = executor();
    let stream = Arc::new(Stream::new(&executor, 0).unwrap());
    let graph = Graph::on(&executor);
    graph.begin(&stream).unwrap();
    let sink = stream.sink().unwrap();
    assert_eq!(sink.purpose(), Purpose::Recording);
    drop(graph);
    assert!(stream.sink().is_none());
    let again = Graph::on(&executor);
    again.begin(&stream).unwrap();
    again.end(&stream).unwrap();
    assert!(again.recorded().unwrap().nodes.is_empty() && again.launch(&stream).is_ok());
}

#[test]
fn a_launch_on_a_recorded_stream_is_recorded_node_by_node() {
    let executor = executor();
    let stream = Arc::new(Stream::new(&executor, 0).unwrap());
    let (inner, outer, mut values) = (Graph::on(&executor), Graph::on(&executor), [1f32; 16]);
    inner.begin(&stream).unwrap();
    stream.sink().unwrap().take(softmax(&mut values), None).unwrap();
    assert!(inner.launch(&stream).unwrap_err().message.contains("is being recorded"));
    inner.end(&stream).unwrap();
    outer.begin(&stream).unwrap();
    inner.launch(&stream).unwrap();
    inner.launch(&stream).unwrap();
    outer.end(&stream).unwrap();
    let recorded = outer.recorded().unwrap();
    assert_eq!(recorded.nodes.iter().map(|node| node.dependencies.clone()).collect::<Vec<_>>(), [vec![], vec![0]]);
    assert_eq!(values, [1.0; 16]);
}
