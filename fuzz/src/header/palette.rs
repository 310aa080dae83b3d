//! Wrong and extreme values for what a leaf of the arguments takes.

use super::interface::Role;

/// xorshift64*: the valid part of a call is drawn from it, seeded by the step's bytes alone.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    pub fn below(&mut self, count: usize) -> usize {
        (self.next() % count.max(1) as u64) as usize
    }

    /// True once in `count` times.
    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    pub fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
}

const NUMBERS: [u64; 32] = [
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    16,
    31,
    32,
    33,
    64,
    65,
    100,
    127,
    128,
    129,
    255,
    256,
    257,
    512,
    1 << 16,
    i32::MAX as u64,
    1 << 31,
    u32::MAX as u64,
    1 << 32,
    1 << 62,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];

const REALS: [f64; 16] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1e-6,
    1e-30,
    1e30,
    f32::MAX as f64,
    f32::MIN_POSITIVE as f64,
    1e-40,
    f64::MAX,
    f64::MIN_POSITIVE,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
];

/// Extents and strides of tensors; those beyond the arenas are refused, or the tensor gets no memory.
const EXTENTS: [i64; 20] =
    [0, 1, 2, 3, 4, 7, 8, 16, 31, 63, 64, 65, 128, 1000, -1, 1 << 31, 1 << 40, 1 << 62, i64::MAX, i64::MIN];

/// Sizes of memory that is asked for: small, around the borders of the manager's classes, and beyond all memory. None
/// between, which would be taken and then have to be filled.
const SIZES: [u64; 24] = [
    0,
    1,
    2,
    255,
    256,
    257,
    511,
    512,
    4095,
    4096,
    65_536,
    65_537,
    (1 << 20) - 1,
    1 << 20,
    (1 << 20) + 1,
    2 << 20,
    (2 << 20) + 1,
    5 << 20,
    16 << 20,
    1 << 47,
    1 << 62,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];

/// The bits of a wrong number for the role. Values that occur in no list come from flipping bits of the valid one.
pub fn number(role: Role, name: &str, valid: u64, value: u8) -> u64 {
    let value = usize::from(value);
    match role {
        Role::Real { bytes: 4 } => u64::from((REALS[value % REALS.len()] as f32).to_bits()),
        Role::Real { .. } => REALS[value % REALS.len()].to_bits(),
        _ if value >= 192 => valid ^ 1 << (value % 64),
        _ if is_size(name) => SIZES[value % SIZES.len()],
        _ => NUMBERS[value % NUMBERS.len()],
    }
}

pub fn is_size(name: &str) -> bool {
    name.contains("bytes") || name == "limit" || name == "memory_limit" || name == "margin" || name == "keep"
}

pub fn size(random: &mut Random) -> u64 {
    // Mostly what fits an arena, so that operations can work on it.
    let small = !random.one_in(4);
    SIZES[1 + random.below(if small { 10 } else { 18 })]
}

pub fn extent(value: u8) -> i64 {
    EXTENTS[usize::from(value) % EXTENTS.len()]
}

/// Names of fields, kernels, devices, and values of configurations: half of what is asked for by name has one that exists.
pub fn text(parameter: &str, random: &mut Random) -> &'static [u8] {
    match parameter {
        "device" => random.of(&[&b"cpu"[..], b"auto", b"cpu", b"cpu"]),
        "field" => random.of(&[
            &b"device"[..],
            b"architecture",
            b"precision",
            b"fp8",
            b"tensor_cores",
            b"attention",
            b"vendor_libraries",
            b"quantized_activations",
            b"batch_invariant",
            b"memory.initial_bytes",
            b"memory.growth",
            b"memory.limit",
            b"memory.limit_fraction",
            b"memory.margin",
            b"memory.limit_of",
            b"memory.range_bytes",
            b"memory.pooling",
            b"memory.thread_cache_bytes",
            b"memory.zero_on_free",
            b"memory.leak_tracking",
            b"memory.trace_events",
            b"memory.spill",
            b"timing.profiling",
            b"logging.level",
        ]),
        "value" => random.of(&[
            &b"cpu"[..],
            b"auto",
            b"off",
            b"plain",
            b"true",
            b"false",
            b"f32",
            b"bf16",
            b"1GiB",
            b"0.5",
            b"0",
            b"debug",
            b"sampled",
            b"pinned",
            b"managed",
            b"none",
            b"80",
        ]),
        "json" => random.of(&[
            &b"{\"preset\": \"throughput\", \"memory\": {\"limit_fraction\": 0.8}}"[..],
            b"{\"memory\": {\"limit\": \"8GB\", \"growth\": false}, \"device\": \"cpu\"}",
            b"{}",
        ]),
        "linear_kernel" => random.of(&[&b""[..], b"linear_cpu", b"linear_cpu_16"]),
        "key" => random.of(&[&b"general.architecture"[..], b"tokenizer.ggml.tokens", b"test.texts", b"test.numbers"]),
        "name" => random.of(&[&b"pool"[..], b"", b"linear_cpu_64", b"token_embd.weight", b"q4_0.values"]),
        _ => random.of(&[&b"name"[..], b""]),
    }
}

pub fn wrong_text(value: u8) -> &'static [u8] {
    const LONG: &[u8] = &[b'x'; 5000];
    const DEEP: &[u8] = &[b'['; 20_000];
    [
        &b""[..],
        b" ",
        b"\xff\xfe",
        b"\xc3",
        b"cuda",
        b"cuda:0",
        b"cuda:-1",
        b"cuda:99999999999999999999",
        b"tpu:0",
        b"memory.",
        b"%s%n%d",
        b"1e400",
        b"-1",
        b"nan",
        b"18446744073709551616",
        b"99999999999TiB",
        b"{\"memory\": {\"limit\": 1e400}}",
        b"{\"a\": 1, \"a\": 2}",
        b"{\"preset\": [}",
        b"null",
        LONG,
        DEEP,
        "π – \u{1f600}".as_bytes(),
        b"\n\t\x01",
    ][usize::from(value) % 24]
}
