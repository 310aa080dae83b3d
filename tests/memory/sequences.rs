//! Operation sequences against the model: random ones, and those that once found something.

use super::sequence;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, max_shrink_iters: 4000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn random_sequences_agree_with_the_model(bytes in prop::collection::vec(any::<u8>(), 1..900)) {
        sequence::run(&bytes);
    }
}

#[test]
fn the_kept_corpus_agrees_with_the_model() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/memory/corpus");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).expect("the corpus is kept") {
        sequence::run(&std::fs::read(entry.expect("readable").path()).expect("readable"));
        count += 1;
    }
    assert!(count > 0, "an empty corpus proves nothing");
}
