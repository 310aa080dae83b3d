//! tests/data/weights.gguf, which tests/tools/make_weight_data.py wrote with the public Python package `gguf`: this library
//! reads the same header and the same values.

use nvbackend::tensor::DType;
use nvbackend::weight::awq::awq;
use nvbackend::weight::gguf::GgufRows;
use nvbackend::weight::gguf_file::{Content, GgufFile, TensorEntry};
use nvbackend::weight::gptq::{gptq, GptqTensors, GptqVersion};
use nvbackend::weight::grouped::FloatBytes;
use nvbackend::weight::mapping::Mapping;
use nvbackend::weight::rows::RowSource;
use nvbackend::weight::BlockFormat;
use std::path::Path;

const ROWS: usize = 8;
const COLUMNS: usize = 512;

struct Data {
    mapping: Mapping,
    file: GgufFile,
}

impl Data {
    fn open() -> Data {
        let mapping = Mapping::open(Path::new("tests/data/weights.gguf")).unwrap();
        let file = GgufFile::parse(mapping.bytes()).unwrap();
        Data { mapping, file }
    }

    fn tensor(&self, name: &str) -> (&TensorEntry, &[u8]) {
        let tensor = self.file.tensor(name).unwrap_or_else(|| panic!("no tensor {name}"));
        (tensor, &self.mapping.bytes()[tensor.data.clone()])
    }

    fn bytes(&self, name: &str) -> &[u8] {
        self.tensor(name).1
    }

    /// Another program's values of a matrix.
    fn values(&self, name: &str) -> Vec<f32> {
        let (tensor, bytes) = self.tensor(&format!("{name}.values"));
        assert_eq!((tensor.kind, &tensor.shape[..]), (0, &[ROWS, COLUMNS][..]));
        bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    }
}

fn expect(name: &str, source: &dyn RowSource, wanted: &[f32]) {
    assert_eq!((source.rows(), source.columns()), (ROWS, COLUMNS));
    let mut values = vec![f32::NAN; COLUMNS];
    for (row, wanted) in wanted.chunks(COLUMNS).enumerate() {
        source.values(row, &mut values).unwrap();
        for (column, (value, wanted)) in values.iter().zip(wanted).enumerate() {
            assert_eq!(value, wanted, "{name}: row {row}, column {column}");
        }
    }
}

#[test]
fn metadata_is_what_was_written() {
    let Data { mapping, file } = Data::open();
    let content = |key: &str| file.value(key).unwrap_or_else(|| panic!("no {key}")).content.clone();
    let text = |range: std::ops::Range<usize>| std::str::from_utf8(&mapping.bytes()[range]).unwrap();
    assert_eq!(file.version, 3);
    assert_eq!(content("test.count"), Content::Integer(26));
    assert_eq!(content("test.negative"), Content::Integer(-7));
    assert_eq!(content("test.real"), Content::Real(f64::from(1e-6f32)));
    assert_eq!(content("test.double"), Content::Real(0.1));
    assert_eq!(content("test.yes"), Content::Integer(1));
    assert!(matches!(content("test.text"), Content::Text(range) if text(range.clone()) == "Grüße"));
    assert!(matches!(content("test.numbers"), Content::Array { count: 3, .. }));
    let Content::Texts(texts) = content("test.texts") else { panic!("texts") };
    assert_eq!(texts.into_iter().map(text).collect::<Vec<_>>(), ["<pad>", "", "▁the"]);
}

#[test]
fn blocks_have_the_values_that_the_python_package_reads() {
    let data = Data::open();
    let kinds = [
        ("q4_0", BlockFormat::Q4_0),
        ("q8_0", BlockFormat::Q8_0),
        ("q4_k", BlockFormat::Q4K),
        ("q6_k", BlockFormat::Q6K),
    ];
    for (name, kind) in kinds {
        let (tensor, bytes) = data.tensor(name);
        assert_eq!(
            (&tensor.shape[..], bytes.len()),
            (&[ROWS, COLUMNS][..], ROWS * COLUMNS / kind.elements() * kind.block_bytes())
        );
        expect(name, &GgufRows::new(kind, ROWS, COLUMNS, bytes).unwrap(), &data.values(name));
    }
    for (name, dtype, kind) in [("f16", DType::F16, 1), ("bf16", DType::Bf16, 30)] {
        let (tensor, bytes) = data.tensor(name);
        assert_eq!((tensor.kind, bytes.len()), (kind, ROWS * COLUMNS * 2));
        let floats = FloatBytes { bytes, dtype };
        let values: Vec<f32> = (0..ROWS * COLUMNS).map(|i| floats.get(i)).collect();
        assert_eq!(values, data.values(name));
    }
}

#[test]
fn awq_and_gptq_have_the_values_of_their_definitions() {
    let data = Data::open();
    let part = |name: &str, part: &str| data.bytes(&format!("{name}.{part}"));
    let scales = |name: &str| FloatBytes { bytes: part(name, "scales"), dtype: DType::F16 };
    for (name, group) in [("awq.symmetric", 128), ("awq.zeros", 64)] {
        let (weights, zeros) = (part(name, "qweight"), part(name, "qzeros"));
        let source = awq(ROWS, COLUMNS, group, weights, Some(zeros), scales(name)).unwrap();
        assert_eq!(source.format().zero_points, name == "awq.zeros");
        expect(name, &source, &data.values(name));
    }
    let layers = [
        ("gptq.v1", 128, GptqVersion::V1, false),
        ("gptq.v2", 32, GptqVersion::V2, false),
        // The label lies, the values do not.
        ("gptq.symmetric", 128, GptqVersion::V2, false),
        ("gptq.reordered", 64, GptqVersion::V2, true),
    ];
    for (name, group_size, version, reordered) in layers {
        let source = gptq(GptqTensors {
            rows: ROWS,
            columns: COLUMNS,
            group_size,
            weights: part(name, "qweight"),
            zeros: Some(part(name, "qzeros")),
            scales: scales(name),
            group_index: Some(part(name, "g_idx")),
            version,
        })
        .unwrap();
        assert_eq!(source.quantized().unwrap().order().is_some(), reordered);
        expect(name, &source, &data.values(name));
    }
}
