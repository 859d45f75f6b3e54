//! The numbers by which a GGUF file names the type of a tensor: `enum ggml_type` of ggml.h.

use boostr_kernels::quant::Format;

use crate::checkpoint::Dtype;

/// Types that are read and written.
const SUPPORTED: [(u32, Dtype); 31] = [
    (0, Dtype::F32),
    (1, Dtype::F16),
    (2, Dtype::Block(Format::Q4_0)),
    (3, Dtype::Block(Format::Q4_1)),
    (6, Dtype::Block(Format::Q5_0)),
    (7, Dtype::Block(Format::Q5_1)),
    (8, Dtype::Block(Format::Q8_0)),
    (10, Dtype::Block(Format::Q2K)),
    (11, Dtype::Block(Format::Q3K)),
    (12, Dtype::Block(Format::Q4K)),
    (13, Dtype::Block(Format::Q5K)),
    (14, Dtype::Block(Format::Q6K)),
    (15, Dtype::Block(Format::Q8K)),
    (16, Dtype::Block(Format::Iq2Xxs)),
    (17, Dtype::Block(Format::Iq2Xs)),
    (18, Dtype::Block(Format::Iq3Xxs)),
    (19, Dtype::Block(Format::Iq1S)),
    (20, Dtype::Block(Format::Iq4Nl)),
    (21, Dtype::Block(Format::Iq3S)),
    (22, Dtype::Block(Format::Iq2S)),
    (23, Dtype::Block(Format::Iq4Xs)),
    (24, Dtype::I8),
    (25, Dtype::I16),
    (26, Dtype::I32),
    (27, Dtype::I64),
    (28, Dtype::F64),
    (29, Dtype::Block(Format::Iq1M)),
    (30, Dtype::BF16),
    (34, Dtype::Block(Format::Tq1_0)),
    (35, Dtype::Block(Format::Tq2_0)),
    (39, Dtype::Block(Format::Mxfp4)),
];

/// Types that have a name only: removed from ggml, never meant for files, or too new.
const NAMED: [(u32, &str); 12] = [
    (4, "q4_2, which ggml removed"),
    (5, "q4_3, which ggml removed"),
    (9, "q8_1, which is no type for files"),
    (31, "q4_0_4_4, which ggml removed"),
    (32, "q4_0_4_8, which ggml removed"),
    (33, "q4_0_8_8, which ggml removed"),
    (36, "iq4_nl_4_4, which ggml removed"),
    (37, "iq4_nl_4_8, which ggml removed"),
    (38, "iq4_nl_8_8, which ggml removed"),
    (40, "nvfp4"),
    (41, "q1_0"),
    (42, "q2_0"),
];

/// The type of a number, or what is wrong with it.
pub(super) fn from_number(number: u32) -> Result<Dtype, String> {
    if let Some((_, dtype)) = SUPPORTED.iter().find(|(known, _)| *known == number) {
        return Ok(*dtype);
    }
    let named = NAMED.iter().find(|(known, _)| *known == number);
    let what = match named {
        Some((_, name)) => format!("type {number} ({name}) is not supported"),
        None => format!("unknown type {number}"),
    };
    Err(format!("{what}; supported: {}", supported()))
}

/// The number of a type; `None` for those that ggml lacks.
pub(super) fn number_of(dtype: Dtype) -> Option<u32> {
    SUPPORTED.iter().find(|(_, known)| *known == dtype).map(|(number, _)| *number)
}

/// All names, for messages.
pub(super) fn supported() -> String {
    SUPPORTED.map(|(_, dtype)| dtype.name().to_ascii_lowercase()).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_format_has_one_number() {
        for format in Format::ALL {
            let number = number_of(Dtype::Block(format)).unwrap();
            assert_eq!(from_number(number), Ok(Dtype::Block(format)));
        }
    }

    #[test]
    fn every_number_of_ggml_is_known_by_name() {
        for number in 0..43 {
            let named = NAMED.iter().any(|(known, _)| *known == number);
            assert_ne!(named, from_number(number).is_ok(), "{number}");
        }
        assert!(from_number(43).unwrap_err().starts_with("unknown type 43; supported: f32, f16, "));
        assert!(from_number(40).unwrap_err().starts_with("type 40 (nvfp4) is not supported; "));
    }
}
