//! Sizes in bytes as people write them: "8GB", "1.5 GiB".

/// Bytes of each unit, in lower case. As the standards have it, a GB is 10⁹ bytes and a GiB 2³⁰.
const UNITS: [(&str, u64); 10] = [
    ("", 1),
    ("b", 1),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
];

/// The bytes of a number, which may have decimals, and a unit in capitals or not. None for anything else, also for a size
/// that is no whole number of bytes or does not fit into 64 bits.
pub fn parse_size(text: &str) -> Option<u64> {
    let end = text.find(|character: char| !character.is_ascii_digit() && character != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.strip_prefix(' ').unwrap_or(unit).to_ascii_lowercase();
    let (_, bytes) = UNITS.iter().find(|(name, _)| *name == unit)?;
    let (whole, decimals) = number.split_once('.').unwrap_or((number, "0"));
    // Nine decimals of the largest unit fit into 128 bits many times over.
    if whole.is_empty() || decimals.is_empty() || decimals.len() > 9 {
        return None;
    }
    let scale = 10_u128.pow(decimals.len() as u32);
    let decimals: u128 = decimals.parse().ok()?;
    let scaled = (u128::from(whole.parse::<u64>().ok()?) * scale + decimals).checked_mul(u128::from(*bytes))?;
    match scaled % scale {
        0 => u64::try_from(scaled / scale).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_decimal_and_binary_units() {
        for (text, bytes) in [
            ("0", 0),
            ("18446744073709551615", u64::MAX),
            ("512B", 512),
            ("8GB", 8_000_000_000),
            ("8gb", 8_000_000_000),
            ("8 GiB", 8 << 30),
            ("1.5GiB", 3 << 29),
            ("0.000001TB", 1_000_000),
            ("2kB", 2_000),
            ("2KiB", 2_048),
            ("3mib", 3 << 20),
            ("16777215TiB", 16_777_215 << 40),
        ] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_none() {
        for text in [
            "",
            "GB",
            ".5GB",
            "5.GB",
            "1.2.3GB",
            "8G",
            "8GBs",
            "8  GB",
            " 8GB",
            "8GB ",
            "-8GB",
            "+8GB",
            "8e9",
            "0x8",
            "0.3B",
            "1.0001kB",
            "18446744073709551616",
            "16777216TiB",
            "99999999999999999999999GB",
            "1.0000000000GB",
            "８GB",
            "8\u{a0}GB",
        ] {
            assert_eq!(parse_size(text), None, "{text:?}");
        }
    }
}
