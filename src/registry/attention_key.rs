//! What a choice among the kernels of attention is kept for: heads and dtypes, where the keys lie, what the softmax has beside
//! scores, and the numbers of sequences, rows and keys rounded up to powers of two.

use super::key::NoKey;
use crate::operation::attention::{AttentionConfig, AttentionDecode, AttentionPrefill, HeadTerms};
use crate::operation::OperationKind;
use crate::tensor::{DType, Placement};
use std::fmt;
use std::str::FromStr;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionKey {
    pub is_prefill: bool,
    /// Powers of two, as are the next three: of all numbers above half of it.
    pub sequences: usize,
    /// Of the sequence with the most.
    pub rows: usize,
    /// Of the longest sequence, or what the call says that none passes.
    pub keys: usize,
    /// 0: none.
    pub window: usize,
    pub query_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub place: Place,
    /// Of queries, keys, values and outputs.
    pub dtypes: [DType; 4],
    /// Which of `FLAGS` are set.
    pub flags: [bool; FLAGS.len()],
}

/// Where the tokens of a sequence lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    Contiguous,
    Ring,
    /// In pages of so many tokens.
    Pages(usize),
}

/// What decides which kernels can do an attention, beside its numbers.
const FLAGS: [&str; 11] = [
    "bidirectional",
    "soft_cap",
    "sink_tokens",
    "dropout",
    "chunk",
    "mask",
    "sinks",
    "slopes",
    "scales",
    "device_lengths",
    "rope",
];

/// The names of dtypes in a file, without spaces.
const DTYPES: [(DType, &str); 8] = [
    (DType::F32, "f32"),
    (DType::F16, "f16"),
    (DType::Bf16, "bf16"),
    (DType::F8E4m3, "fp8_e4m3"),
    (DType::F8E5m2, "fp8_e5m2"),
    (DType::KvInt8, "kv_int8"),
    (DType::KvQ8_0, "kv_q8_0"),
    (DType::KvQ4_0, "kv_q4_0"),
];

impl Place {
    fn of(placement: &Placement) -> Place {
        match placement {
            Placement::Contiguous => Place::Contiguous,
            Placement::Ring { .. } => Place::Ring,
            Placement::Paged(table) => Place::Pages(table.page_tokens),
        }
    }
}

impl AttentionKey {
    pub fn of_prefill(op: &AttentionPrefill) -> AttentionKey {
        let (sequences, rows) = match &op.lengths {
            Some(lengths) => (lengths.count, lengths.max_rows),
            None => (op.sequences.len(), op.sequences.iter().map(|span| span.query_count).max().unwrap_or(0)),
        };
        let scales = op.query_scales.is_some() || !op.key.scales.is_null() || !op.value.scales.is_null();
        AttentionKey {
            is_prefill: true,
            place: Place::of(&op.key.placement),
            dtypes: [op.query.dtype, op.key.dtype, op.value.dtype, op.output.dtype],
            ..AttentionKey::of(
                &op.config,
                [sequences, rows, op.longest()],
                &op.terms,
                [op.mask.is_some(), scales, op.lengths.is_some(), false, op.dropout.is_some()],
            )
        }
    }

    pub fn of_decode(op: &AttentionDecode) -> AttentionKey {
        let scales = !op.cache.key_scales.is_null() || !op.cache.value_scales.is_null();
        AttentionKey {
            is_prefill: false,
            place: Place::of(&op.cache.placement),
            dtypes: [op.query.dtype, op.cache.dtype, op.cache.value_dtype, op.output.dtype],
            ..AttentionKey::of(
                &op.config,
                [op.sequence_count(), op.rows.per_sequence, op.rows.max_kv_length],
                &op.terms,
                [false, scales, false, op.rope.is_some(), false],
            )
        }
    }

    fn of(
        config: &AttentionConfig,
        [sequences, rows, keys]: [usize; 3],
        terms: &HeadTerms,
        [mask, scales, device_lengths, rope, dropout]: [bool; 5],
    ) -> AttentionKey {
        let AttentionConfig { query_heads, kv_heads, head_dim, value_dim, soft_cap, window, causal, chunk, .. } =
            *config;
        let (sinks, slopes) = (terms.sinks.is_some(), terms.slopes.is_some());
        AttentionKey {
            is_prefill: true,
            sequences: sequences.next_power_of_two(),
            rows: rows.next_power_of_two(),
            keys: keys.next_power_of_two(),
            window: if window == 0 { 0 } else { window.next_power_of_two() },
            query_heads,
            kv_heads,
            head_dim,
            value_dim,
            place: Place::Contiguous,
            dtypes: [DType::F32; 4],
            flags: [
                !causal,
                soft_cap > 0.0,
                config.sink_tokens > 0,
                dropout,
                chunk > 0,
                mask,
                sinks,
                slopes,
                scales,
                device_lengths,
                rope,
            ],
        }
    }

    pub fn operation(&self) -> OperationKind {
        if self.is_prefill {
            OperationKind::AttentionPrefill
        } else {
            OperationKind::AttentionDecode
        }
    }
}

/// `attention_decode b32 r1 k8192 w0 h32 g8 d128 v128 pages16 bf16 bf16 bf16 soft_cap`; values of another dtype than the keys
/// follow these as in `bf16 bf16/kv_q4_0 bf16`
impl fmt::Display for AttentionKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AttentionKey { sequences, rows, keys, window, query_heads, kv_heads, head_dim, value_dim, .. } = self;
        write!(formatter, "{} b{sequences} r{rows} k{keys} w{window} ", self.operation().name())?;
        write!(formatter, "h{query_heads} g{kv_heads} d{head_dim} v{value_dim}")?;
        match self.place {
            Place::Contiguous => formatter.write_str(" contiguous")?,
            Place::Ring => formatter.write_str(" ring")?,
            Place::Pages(tokens) => write!(formatter, " pages{tokens}")?,
        }
        let name = |dtype: DType| DTYPES.iter().find(|known| known.0 == dtype).map_or("i32", |known| known.1);
        let [query, key, value, output] = self.dtypes;
        write!(formatter, " {} {}", name(query), name(key))?;
        if value != key {
            write!(formatter, "/{}", name(value))?;
        }
        write!(formatter, " {}", name(output))?;
        FLAGS.iter().zip(self.flags).filter(|(_, set)| *set).try_for_each(|(name, _)| write!(formatter, " {name}"))
    }
}

impl FromStr for AttentionKey {
    type Err = NoKey;

    fn from_str(text: &str) -> Result<AttentionKey, NoKey> {
        let key = parse(text).ok_or(NoKey)?;
        // One spelling a key, so that a file holds no key twice under two names.
        if key.to_string() == text {
            Ok(key)
        } else {
            Err(NoKey)
        }
    }
}

fn parse(text: &str) -> Option<AttentionKey> {
    let mut words = text.split(' ').peekable();
    let is_prefill = match words.next()? {
        name if name == OperationKind::AttentionPrefill.name() => true,
        name if name == OperationKind::AttentionDecode.name() => false,
        _ => return None,
    };
    let mut number = |prefix: char| words.next()?.strip_prefix(prefix)?.parse::<usize>().ok();
    let (sequences, rows, keys, window) = (number('b')?, number('r')?, number('k')?, number('w')?);
    let (query_heads, kv_heads, head_dim, value_dim) = (number('h')?, number('g')?, number('d')?, number('v')?);
    let place = match words.next()? {
        "contiguous" => Place::Contiguous,
        "ring" => Place::Ring,
        pages => Place::Pages(pages.strip_prefix("pages")?.parse().ok()?),
    };
    let dtype = |name: &str| DTYPES.iter().find(|known| known.1 == name).map(|known| known.0);
    let query = dtype(words.next()?)?;
    let (key, value) = words.next().map(|pair| pair.split_once('/').unwrap_or((pair, pair)))?;
    let dtypes = [query, dtype(key)?, dtype(value)?, dtype(words.next()?)?];
    let flags = FLAGS.map(|flag| words.next_if_eq(&flag).is_some());
    let powers = [sequences, rows, keys].iter().all(|number| number.is_power_of_two());
    let whole = words.next().is_none() && powers && (window == 0 || window.is_power_of_two());
    whole.then_some(AttentionKey {
        is_prefill,
        sequences,
        rows,
        keys,
        window,
        query_heads,
        kv_heads,
        head_dim,
        value_dim,
        place,
        dtypes,
        flags,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn keys() -> impl Strategy<Value = AttentionKey> {
        let dtype = prop::sample::select(DTYPES.map(|known| known.0).to_vec());
        let place = prop::sample::select(vec![Place::Contiguous, Place::Ring, Place::Pages(1), Place::Pages(256)]);
        let numbers =
            (any::<bool>(), [0..12u32, 0..20, 0..30], prop::option::of(0..20u32), [1..600usize, 1..99, 1..577, 1..513]);
        (numbers, place, [dtype.clone(), dtype.clone(), dtype.clone(), dtype], any::<[bool; FLAGS.len()]>()).prop_map(
            |((is_prefill, powers, window, heads), place, dtypes, flags)| AttentionKey {
                is_prefill,
                sequences: 1 << powers[0],
                rows: 1 << powers[1],
                keys: 1 << powers[2],
                window: window.map_or(0, |bits| 1 << bits),
                query_heads: heads[0],
                kv_heads: heads[1],
                head_dim: heads[2],
                value_dim: heads[3],
                place,
                dtypes,
                flags,
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
        fn no_text_panics(text in "(attention_decode )?[ bwrkhgdv0-9a-z_]{0,60}") {
            let _ = text.parse::<AttentionKey>();
        }
    }

    #[test]
    fn a_key_reads_as_the_attention() {
        let text = "attention_decode b32 r1 k8192 w1024 h32 g8 d128 v128 pages16 bf16 fp8_e4m3 bf16 soft_cap scales";
        let key: AttentionKey = text.parse().unwrap();
        assert_eq!((key.operation(), key.place, key.window), (OperationKind::AttentionDecode, Place::Pages(16), 1024));
        assert_eq!(key.dtypes, [DType::Bf16, DType::F8E4m3, DType::F8E4m3, DType::Bf16]);
        for wrong in [
            "",
            "attention_decode",
            "attention b1 r1 k1 w0 h1 g1 d1 v1 ring f32 f32 f32",
            "attention_decode b3 r1 k1 w0 h1 g1 d1 v1 ring f32 f32 f32",
            "attention_decode b1 r1 k1 w3 h1 g1 d1 v1 ring f32 f32 f32",
            "attention_decode b01 r1 k1 w0 h1 g1 d1 v1 ring f32 f32 f32",
            "attention_decode b1 r1 k1 w0 h1 g1 d1 v1 ring f32 f32 f32 rope mask",
            "attention_decode b1 r1 k1 w0 h1 g1 d1 v1 pages f32 f32 f32",
            "attention_decode b1 r1 k1 w0 h1 g1 d1 v1 ring f32 i32 f32",
            "attention_decode b1 r1 k1 w0 h1 g1 d1 v1 ring f32 f32/f32 f32",
            "attention_decode b1 r1 k1 w0 h1 g1 d1 v1 ring f32 f32/ f32",
        ] {
            assert_eq!(wrong.parse::<AttentionKey>(), Err(NoKey), "{wrong}");
        }
    }
}
