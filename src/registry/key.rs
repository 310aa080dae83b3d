//! What a choice is kept for: a product's shape, its rows rounded up to a power of two, and all that decides which kernels
//! can take it.

use crate::operation::linear_product::LinearProduct;
use crate::operation::Activation;
use crate::tensor::DType;
use crate::weight::{BlockFormat, Encoding, Scales, BLOCK};
use std::fmt;
use std::str::FromStr;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProductKey {
    /// A power of two: of all M above half of it.
    pub rows: usize,
    pub n: usize,
    pub k: usize,
    pub input: DType,
    pub encoding: Encoding,
    pub reach: Reach,
    /// Whether Int4 has zero points.
    pub zero_points: bool,
    pub output: DType,
    pub gated: bool,
    /// Whether a bias or an activation follows.
    pub epilogue: bool,
    /// Whether a residual is added.
    pub residual: bool,
    /// Whether the backend may round the input to 8 bits.
    pub rounded_input: bool,
}

/// How far a scale of the weight reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reach {
    None,
    Rows,
    Groups(usize),
    Blocks,
}

impl Reach {
    pub fn of(scales: Scales) -> Reach {
        match scales {
            Scales::None => Reach::None,
            Scales::Rows(_) => Reach::Rows,
            Scales::Groups { size, .. } => Reach::Groups(size),
            Scales::Blocks(_) => Reach::Blocks,
        }
    }
}

impl ProductKey {
    /// `rounded_input`: whether the backend may round the input to 8 bits.
    pub fn of(op: &LinearProduct, rounded_input: bool) -> ProductKey {
        ProductKey {
            rows: op.input.rows.next_power_of_two(),
            n: op.weight.rows,
            k: op.weight.columns,
            input: op.input.dtype,
            encoding: op.weight.encoding,
            reach: Reach::of(op.weight.scales),
            zero_points: !op.weight.zero_points.is_null(),
            output: op.output.dtype,
            gated: op.weight.gated,
            epilogue: op.bias.is_some() || op.activation != Activation::None,
            residual: op.residual.is_some(),
            rounded_input,
        }
    }
}

/// The names that tuning files write for encodings, without spaces.
const ENCODINGS: [(Encoding, &str); 8] = [
    (Encoding::Float(DType::F32), "f32"),
    (Encoding::Float(DType::F16), "f16"),
    (Encoding::Float(DType::Bf16), "bf16"),
    (Encoding::Fp8E4m3, "fp8_e4m3"),
    (Encoding::Fp8E5m2, "fp8_e5m2"),
    (Encoding::Int8, "int8"),
    (Encoding::Int4, "int4"),
    (Encoding::Sfp, "sfp"),
];

/// `bf16`, `int4`: one word.
pub fn encoding_name(encoding: Encoding) -> &'static str {
    if let Encoding::Blocks(format) = encoding {
        return format.name();
    }
    ENCODINGS.iter().find(|(known, _)| *known == encoding).map_or("i32", |(_, name)| name)
}

fn encoding_of(name: &str) -> Option<Encoding> {
    let blocks =
        || BlockFormat::ALL.iter().find(|format| format.name() == name).map(|&format| Encoding::Blocks(format));
    ENCODINGS.iter().find(|(_, known)| *known == name).map(|(encoding, _)| *encoding).or_else(blocks)
}

const FLAGS: [&str; 5] = ["zero_points", "gated", "epilogue", "residual", "rounded_input"];

/// `m16 n14336 k4096 bf16 int4 groups128 bf16 gated`
impl fmt::Display for ProductKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "m{} n{} k{} {} {}", self.rows, self.n, self.k, self.input, encoding_name(self.encoding))?;
        match self.reach {
            Reach::None => {}
            Reach::Rows => formatter.write_str(" rows")?,
            Reach::Groups(size) => write!(formatter, " groups{size}")?,
            Reach::Blocks => write!(formatter, " blocks{BLOCK}")?,
        }
        write!(formatter, " {}", self.output)?;
        let set = [self.zero_points, self.gated, self.epilogue, self.residual, self.rounded_input];
        FLAGS.iter().zip(set).filter(|(_, set)| *set).try_for_each(|(name, _)| write!(formatter, " {name}"))
    }
}

/// The text is not what `Display` writes.
#[derive(Debug, PartialEq, Eq)]
pub struct NoKey;

impl FromStr for ProductKey {
    type Err = NoKey;

    fn from_str(text: &str) -> Result<ProductKey, NoKey> {
        let key = parse(text).ok_or(NoKey)?;
        // One spelling a key, so that a file holds no key twice under two names.
        if key.to_string() == text {
            Ok(key)
        } else {
            Err(NoKey)
        }
    }
}

fn parse(text: &str) -> Option<ProductKey> {
    let mut words = text.split(' ').peekable();
    let mut number = |prefix: char| words.next()?.strip_prefix(prefix)?.parse::<usize>().ok();
    let (rows, n, k) = (number('m')?, number('n')?, number('k')?);
    let float = |word: &str| DType::FLOATS.into_iter().find(|dtype| dtype.to_string() == word);
    let input = float(words.next()?)?;
    let encoding = encoding_of(words.next()?)?;
    let reach = match encoding {
        Encoding::Float(_) | Encoding::Blocks(_) => Reach::None,
        _ => match words.next()? {
            "rows" => Reach::Rows,
            "blocks128" => Reach::Blocks,
            other => Reach::Groups(other.strip_prefix("groups")?.parse().ok()?),
        },
    };
    let output = float(words.next()?)?;
    let [zero_points, gated, epilogue, residual, rounded_input] = FLAGS.map(|flag| words.next_if_eq(&flag).is_some());
    let whole = words.next().is_none() && rows.is_power_of_two();
    whole.then_some(ProductKey {
        rows,
        n,
        k,
        input,
        encoding,
        reach,
        zero_points,
        output,
        gated,
        epilogue,
        residual,
        rounded_input,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn keys() -> impl Strategy<Value = ProductKey> {
        let encodings = prop::sample::select(ENCODINGS.map(|(encoding, _)| encoding).to_vec());
        let floats = prop::sample::select(DType::FLOATS.to_vec());
        let reach = prop::sample::select(vec![Reach::Rows, Reach::Groups(32), Reach::Groups(128), Reach::Blocks]);
        (0..20u32, 1..300_000usize, 1..300_000usize, floats.clone(), encodings, reach, floats, any::<[bool; 5]>())
            .prop_map(
                |(
                    bits,
                    n,
                    k,
                    input,
                    encoding,
                    reach,
                    output,
                    [zero_points, gated, epilogue, residual, rounded_input],
                )| {
                    ProductKey {
                        rows: 1 << bits,
                        n,
                        k,
                        input,
                        encoding,
                        reach: if encoding.is_float() { Reach::None } else { reach },
                        zero_points,
                        output,
                        gated,
                        epilogue,
                        residual,
                        rounded_input,
                    }
                },
            )
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn keys_go_through_text(key in keys()) {
            prop_assert_eq!(key.to_string().parse(), Ok(key));
        }

        #[test]
        fn no_text_panics(text in "[ mnk0-9a-z_]{0,60}") {
            let _ = text.parse::<ProductKey>();
        }
    }

    #[test]
    fn a_key_reads_as_the_product() {
        let text = "m16 n14336 k4096 bf16 int4 groups128 bf16 zero_points gated residual";
        let key: ProductKey = text.parse().unwrap();
        assert_eq!((key.rows, key.reach, key.gated, key.epilogue), (16, Reach::Groups(128), true, false));
        assert!(key.residual && !key.rounded_input);
        for wrong in [
            "",
            "m16",
            "m15 n1 k1 f32 f32 f32",
            "m016 n1 k1 f32 f32 f32",
            "m1 n1 k1 f32 f32 f32 f32",
            "m1 n1 k1 f32 int8 f32",
        ] {
            assert_eq!(wrong.parse::<ProductKey>(), Err(NoKey), "{wrong}");
        }
    }
}
