//! Q8_K: 256 signed bytes, a scale and sums of groups; 9.125 bits a value. What ggml makes of
//! activations; hardly ever in a file.
//!
//! | bytes | holds |
//! |---|---|
//! | 0..4 | `d`, f32 |
//! | 4..260 | `q`, i8, in order |
//! | 260..292 | sums of 16 `q` each, i16; not needed to decode |
//!
//! `value = d * q`

pub(super) const LEN: usize = 256;
pub(super) const BYTES: usize = 292;

pub(super) fn decode(block: &[u8], out: &mut [f32]) {
    let block: &[u8; BYTES] = block.try_into().expect("block: 292 bytes");
    let d = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
    for (&q, out) in block[4..260].iter().zip(out) {
        *out = d * f32::from(q as i8);
    }
}
