//! Formats against PyPI's `gguf` 0.19.0 and ggml. `testdata` is written by `scripts/quant_goldens.py`.

use super::*;
use crate::testing::Rng;

fn encodable() -> impl Iterator<Item = Format> {
    Format::ALL.into_iter().filter(|format| format.can_encode())
}

fn encoded(format: Format, x: &[f32]) -> Vec<u8> {
    let mut blocks = vec![0xaa; format.bytes_of(x.len()).unwrap()];
    encode(Level::detect(), format, x, &mut blocks);
    blocks
}

fn decoded(format: Format, blocks: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; blocks.len() / format.block_bytes() * format.block_len()];
    decode(format, blocks, &mut out);
    out
}

fn round_trip(format: Format, x: &[f32]) -> Vec<f32> {
    decoded(format, &encoded(format, x))
}

/// Sum of squared differences.
fn squared_error(x: &[f32], y: &[f32]) -> f64 {
    x.iter().zip(y).map(|(&x, &y)| (f64::from(x) - f64::from(y)).powi(2)).sum()
}

fn random_bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut bytes: Vec<u8> =
        (0..count.div_ceil(8)).flat_map(|_| rng.next().to_le_bytes()).collect();
    bytes.truncate(count);
    bytes
}

/// Where the f16 scales of a block are.
fn scales_at(format: Format) -> &'static [usize] {
    match format {
        Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => &[0, 2],
        Format::Q2K => &[80, 82],
        Format::Q3K => &[108],
        Format::Q6K => &[208],
        Format::Tq1_0 => &[52],
        Format::Tq2_0 => &[64],
        Format::Iq1M | Format::Mxfp4 | Format::Q8K => &[],
        _ => &[0],
    }
}

/// Random blocks with finite scales; for Q8_0 the scales are all the finite ones in turn.
fn random_blocks(format: Format, seed: u64, count: usize) -> Vec<u8> {
    let mut blocks = random_bytes(seed, count * format.block_bytes());
    let mut finite = (0..=u16::MAX).filter(|bits| bits & 0x7c00 != 0x7c00);
    for block in blocks.chunks_exact_mut(format.block_bytes()) {
        for &at in scales_at(format) {
            if block[at + 1] & 0x7c == 0x7c {
                block[at + 1] &= 0xbf;
            }
        }
        if format == Format::Q8_0 {
            block[..2].copy_from_slice(&finite.next().unwrap().to_le_bytes());
        }
        if format == Format::Iq1M {
            block[55] &= 0xbf;
        }
    }
    blocks
}

/// h = h * K + bits for each value in turn.
fn hash(values: &[f32]) -> u64 {
    values
        .iter()
        .fold(0, |h: u64, v| h.wrapping_mul(0x100_0000_01b3).wrapping_add(u64::from(v.to_bits())))
}

#[test]
fn decoded_values_have_the_bits_of_the_gguf_package() {
    let mut formats = 0;
    for line in include_str!("testdata/decode.txt").lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let format = Format::from_name(fields[0]).unwrap();
        let blocks = random_blocks(format, fields[1].parse().unwrap(), fields[2].parse().unwrap());
        let values = decoded(format, &blocks);
        for (i, (value, want)) in values.iter().zip(&fields[4..]).enumerate() {
            assert_eq!(format!("{:08x}", value.to_bits()), *want, "{} value {i}", fields[0]);
        }
        assert_eq!(format!("{:016x}", hash(&values)), fields[3], "{}", fields[0]);
        formats += 1;
    }
    assert_eq!(formats, Format::ALL.len() - 1, "all but q8_k, which the package does not decode");
}

#[test]
fn q8_k_is_its_scale_times_its_bytes() {
    let mut block = random_bytes(1, Format::Q8K.block_bytes());
    block[..4].copy_from_slice(&0.3f32.to_le_bytes());
    let want: Vec<f32> = block[4..260].iter().map(|&q| 0.3 * f32::from(q as i8)).collect();
    assert_eq!(decoded(Format::Q8K, &block), want);
}

#[test]
fn packing_undoes_taking_apart() {
    macro_rules! check {
        ($($format:ident)*) => {$(
            let bytes = random_bytes(3, 50 * $format::BYTES);
            for block in bytes.chunks_exact($format::BYTES) {
                let mut again = [0xaa; $format::BYTES];
                $format::pack(&$format::parts(block), &mut again);
                assert_eq!(again, block, stringify!($format));
            }
        )*};
    }
    check!(q8_0 q4_0 q4_1 q5_0 q5_1 q2_k q3_k q4_k q5_k q6_k iq4_nl iq4_xs);
}

/// 65536 weights of a distribution, the same numbers as in Python.
fn weights(kind: &str) -> Vec<f32> {
    const COUNT: usize = 65536;
    let mut rng = Rng::new(1000);
    let uniforms: Vec<f64> = (0..48 * COUNT).map(|_| (rng.next() >> 40) as f64).collect();
    let uniform = |i: usize, j: usize| uniforms[12 * i + j] / f64::from(1 << 24);
    let normal = |i: usize| uniforms[12 * i..][..12].iter().sum::<f64>() / f64::from(1 << 24) - 6.0;
    let weight = |i: usize| {
        let [a, b, c, d] = [0, 1, 2, 3].map(|k| normal(i + k * COUNT));
        match kind {
            "normal" => a,
            "laplace" => a * b + c * d,
            "student" => a / ((b * b + c * c + d * d) / 3.0).sqrt(),
            "outliers" => a * if i.is_multiple_of(251) { 20.0 } else { 1.0 },
            "shifted" => a + 2.5,
            "uniform" => uniform(i, 0) - 0.5,
            _ => panic!("{kind}"),
        }
    };
    (0..COUNT).map(|i| (0.02 * weight(i)) as f32).collect()
}

#[test]
fn errors_are_not_above_those_of_the_gguf_package_or_else_of_ggml() {
    let mut known = std::collections::HashMap::new();
    let mut compared = 0;
    for line in include_str!("testdata/errors.txt").lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let x = known.entry(fields[1]).or_insert_with(|| weights(fields[1]));
        if fields[0] == "weights" {
            assert_eq!(format!("{:016x}", hash(x)), fields[2], "weights {}", fields[1]);
            continue;
        }
        let format = Format::from_name(fields[0]).unwrap();
        let error = (squared_error(x, &round_trip(format, x)) / x.len() as f64).sqrt();
        let theirs: f64 = fields[3].parse().unwrap();
        assert!(error <= theirs, "{line}: {error:e}");
        compared += 1;
    }
    assert_eq!(compared, 6 * encodable().count());
}

#[test]
fn the_bytes_do_not_depend_on_the_instruction_set() {
    let x = &weights("student")[..8192];
    for format in encodable() {
        let want = encoded(format, x);
        for &level in Level::present() {
            let mut blocks = vec![0; want.len()];
            encode(level, format, x, &mut blocks);
            assert!(blocks == want, "{} on {}", format.name(), level.name());
        }
    }
}

#[test]
fn no_other_code_is_nearer() {
    let x = &weights("laplace")[..4096];
    for format in encodable() {
        let scheme = scheme(format).unwrap();
        // All but the -128 of Q8_0, which is not written: its levels are -127..=127.
        let codes =
            (0..=((1u16 << scheme.bits) - 1) as u8).filter(|&code| scheme.values.of(code) != -128);
        let blocks = encoded(format, x);
        for (x, block) in
            x.chunks_exact(format.block_len()).zip(blocks.chunks_exact(format.block_bytes()))
        {
            let parts = parts(format, block);
            let value = |i: usize, code: u8| {
                let g = i / scheme.group;
                let d = f64::from(half::f16::from_bits(parts.d)) * f64::from(parts.scales[g]);
                let m = f64::from(half::f16::from_bits(parts.m)) * f64::from(parts.mins[g]);
                d * f64::from(scheme.values.of(code)) - m
            };
            for (i, &x) in x.iter().enumerate() {
                let off = |code: u8| (value(i, code) - f64::from(x)).abs();
                let nearest = codes.clone().map(off).fold(f64::INFINITY, f64::min);
                // `(x - shift) * (1 / scale)` is rounded three times, so that at a tie the code may be
                // of the side that is further by twice that.
                let shift = f64::from(half::f16::from_bits(parts.m))
                    * f64::from(parts.mins[i / scheme.group]);
                let bound = 6.0 * 2f64.powi(-24) * (f64::from(x) + shift).abs();
                assert!(off(parts.codes[i]) <= nearest + bound, "{} value {i}", format.name());
            }
        }
    }
}

#[test]
fn a_block_is_off_by_half_a_step_at_most() {
    let formats = [(Format::Q8_0, 254.0), (Format::Q4_1, 15.0), (Format::Q5_1, 31.0)];
    for kind in ["normal", "laplace", "student", "outliers", "shifted", "uniform"] {
        let x = &weights(kind)[..16384];
        for (format, steps) in formats {
            for (x, y) in x.chunks_exact(32).zip(round_trip(format, x).chunks_exact(32)) {
                let low = x.iter().copied().fold(f32::INFINITY, f32::min);
                let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let range = if format == Format::Q8_0 { 2.0 * high.max(-low) } else { high - low };
                // Rounding of the scale and the minimum to f16 is the rest.
                let bound = f64::from(range) / steps / 2.0 + 5e-4 * f64::from(high.max(-low));
                let error = (squared_error(x, y) / 32.0).sqrt();
                assert!(error <= bound, "{} {kind}: {error} > {bound}", format.name());
            }
        }
    }
}

/// What another encoder wrote with the ends of the levels in use comes back as it was.
#[test]
fn blocks_that_use_all_levels_are_encoded_to_their_own_values() {
    let ends: [(Format, &[u8]); 5] = [
        (Format::Q8_0, &[0x81]),
        (Format::Q4_0, &[0]),
        (Format::Q5_0, &[0]),
        (Format::Q4_1, &[0, 15]),
        (Format::Q5_1, &[0, 31]),
    ];
    for (format, ends) in ends {
        let mut rng = Rng::new(5);
        for _ in 0..500 {
            // Scales of 1/64..1/4, so that d * code + m is exact in f32.
            let scale = |rng: &mut Rng| (0x2400 + rng.next() % 0x1000) as u16;
            let mut parts = Parts::simple(scale(&mut rng), 0, 0);
            if scheme(format).unwrap().has_min {
                (parts.m, parts.mins) = (scale(&mut rng), [1; 16]);
            }
            let mask = ((1u16 << scheme(format).unwrap().bits) - 1) as u8;
            for (i, code) in parts.codes[..32].iter_mut().enumerate() {
                let drawn = rng.next() as u8 & mask;
                let drawn = if format == Format::Q8_0 && drawn == 0x80 { 0 } else { drawn };
                *code = ends.get(i).copied().unwrap_or(drawn);
            }
            let mut block = vec![0; format.block_bytes()];
            match format {
                Format::Q8_0 => q8_0::pack(&parts, &mut block),
                Format::Q4_0 => q4_0::pack(&parts, &mut block),
                Format::Q5_0 => q5_0::pack(&parts, &mut block),
                Format::Q4_1 => q4_1::pack(&parts, &mut block),
                _ => q5_1::pack(&parts, &mut block),
            }
            let x = decoded(format, &block);
            assert_eq!(round_trip(format, &x), x, "{}", format.name());
        }
    }
}

#[test]
fn zeros_are_encoded_exactly() {
    for format in encodable() {
        let blocks = encoded(format, &[0.0; 512]);
        assert!(decoded(format, &blocks).iter().all(|&y| y == 0.0), "{}", format.name());
    }
}

#[test]
fn constants_are_kept_to_the_digits_of_a_scale() {
    for format in encodable() {
        for constant in [1.0f32, -1.0, 0.3, -0.3, 1234.5, -2e4] {
            for y in round_trip(format, &[constant; 256]) {
                let bound = constant.abs() / 2048.0;
                assert!((y - constant).abs() <= bound, "{} {constant}: {y}", format.name());
            }
        }
    }
}

#[test]
fn an_outlier_is_kept_and_the_rest_is_no_worse_than_zeros() {
    for format in encodable() {
        for outlier in [100.0f32, -100.0] {
            let mut x = Rng::new(9).floats(256);
            x[77] = outlier;
            let y = round_trip(format, &x);
            let kept = squared_error(&[0.0; 256], &x) - f64::from(outlier).powi(2);
            assert!((y[77] - outlier).abs() <= 1.0, "{}: {}", format.name(), y[77]);
            assert!(squared_error(&x, &y) <= kept, "{}", format.name());
        }
    }
}

#[test]
fn no_unit_makes_it_worse_than_zeros() {
    let x = &weights("student")[..2048];
    for format in encodable() {
        let at_one = squared_error(x, &round_trip(format, x));
        for exponent in -40..=40 {
            let unit = 2f32.powi(exponent);
            let scaled: Vec<f32> = x.iter().map(|x| x * unit).collect();
            let y = round_trip(format, &scaled);
            let error = squared_error(&scaled, &y);
            let zeros = squared_error(&scaled, &vec![0.0; scaled.len()]);
            assert!(y.iter().all(|y| y.is_finite()), "{} 2^{exponent}", format.name());
            assert!(error <= zeros, "{} 2^{exponent}", format.name());
            // Where scales are normal f16 numbers the codes stay, and the error is in proportion.
            if (4..=16).contains(&exponent) {
                let want = at_one * f64::from(unit) * f64::from(unit);
                assert!((error - want).abs() <= 1e-2 * want, "{} 2^{exponent}", format.name());
            }
        }
    }
}

#[test]
fn any_bits_are_encoded_to_finite_values() {
    let mut rng = Rng::new(11);
    let mut x: Vec<f32> = (0..4096).map(|_| f32::from_bits(rng.next() as u32)).collect();
    x.extend([f32::NAN; 256]);
    x.extend([f32::INFINITY; 256]);
    x.extend([f32::NEG_INFINITY; 256]);
    x.extend([f32::MAX; 256]);
    x.extend([f32::from_bits(1); 256]);
    for format in encodable() {
        let y = round_trip(format, &x);
        assert!(y.iter().all(|y| y.is_finite()), "{}", format.name());
        assert!(y[4096..4352].iter().all(|&y| y == 0.0), "{}: NaN", format.name());
        assert!(y[4352..4608].iter().all(|&y| y > 6e4), "{}: infinity", format.name());
        assert!(y[4608..4864].iter().all(|&y| y < -6e4), "{}: negative infinity", format.name());
        assert!(y[5120..].iter().all(|&y| y == 0.0), "{}: the smallest float", format.name());
    }
}

#[test]
fn names_are_ggml_s_in_any_case() {
    for format in Format::ALL {
        assert_eq!(Format::from_name(format.name()), Some(format));
        assert_eq!(Format::from_name(&format.name().to_uppercase()), Some(format));
    }
    assert_eq!(Format::from_name("q4_k_m"), None);
}

#[test]
fn bytes_are_of_whole_blocks() {
    assert_eq!(Format::Q4K.bytes_of(1024), Some(576));
    assert_eq!(Format::Q4K.bytes_of(1023), None);
    assert_eq!(Format::Q4K.bytes_of(0), Some(0));
    assert_eq!(Format::Q8_0.bytes_of(usize::MAX - 31), None);
}

#[test]
#[should_panic(expected = "blocks: not whole q4_0")]
fn a_part_of_a_block_is_named() {
    decode(Format::Q4_0, &[0; 17], &mut [0.0; 32]);
}

#[test]
#[should_panic(expected = "out: values of 1 blocks")]
fn an_output_of_another_length_is_named() {
    decode(Format::Q4_0, &[0; 18], &mut [0.0; 31]);
}

#[test]
#[should_panic(expected = "x: not whole blocks of q4_k")]
fn weights_of_part_of_a_block_are_named() {
    encode(Level::detect(), Format::Q4K, &[0.0; 32], &mut [0; 18]);
}

#[test]
#[should_panic(expected = "format: iq1_s is not written")]
fn a_format_that_is_only_read_is_named() {
    encode(Level::detect(), Format::Iq1S, &[0.0; 256], &mut [0; 50]);
}

/// Sum of weighted squared differences.
fn weighted_error(x: &[f32], w: &[f32], y: &[f32]) -> f64 {
    let squares = x.iter().zip(y).map(|(&x, &y)| (f64::from(x) - f64::from(y)).powi(2));
    squares.zip(w).map(|(square, &w)| square * f64::from(w)).sum()
}

#[test]
fn weights_lower_the_weighted_error_of_every_format() {
    let mut rng = Rng::new(77);
    let x = rng.floats(64 * 256);
    // As of inputs of a layer: some columns of a thousand times the power of others.
    let w: Vec<f32> = rng.floats(x.len()).iter().map(|w| (w * 3.5).exp()).collect();
    for format in encodable() {
        let mut blocks = vec![0; format.bytes_of(x.len()).unwrap()];
        encode_weighted(Level::detect(), format, &x, &w, &mut blocks);
        let with = weighted_error(&x, &w, &decoded(format, &blocks));
        let without = weighted_error(&x, &w, &round_trip(format, &x));
        assert!(with < without, "{format:?}: {with} with weights, {without} without");
    }
}

#[test]
fn equal_weights_are_none_and_weights_of_no_use_too() {
    let mut rng = Rng::new(78);
    let x = rng.floats(2 * 256);
    for format in encodable() {
        let want = encoded(format, &x);
        for weight in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let mut blocks = vec![0; want.len()];
            encode_weighted(Level::detect(), format, &x, &vec![weight; x.len()], &mut blocks);
            assert_eq!(blocks, want, "{format:?}: {weight}");
        }
        for weight in [1e-30, 1.0, 1e30] {
            let mut blocks = vec![0; want.len()];
            encode_weighted(Level::detect(), format, &x, &vec![weight; x.len()], &mut blocks);
            assert_eq!(blocks, want, "{format:?}: {weight}");
        }
    }
}
