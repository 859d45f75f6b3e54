//! CRC-32, the checksum of zip and gzip (`zlib.crc32` in Python), eight bytes at a time.
//!
//! It finds files that were cut or have rotted, not files that were forged. Up to 32 neighbouring bits that
//! changed are found for certain.

#![allow(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    reason = "indices are bytes, and counters end at the sizes of the tables"
)]

/// The polynomial of IEEE 802.3, bits reversed.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// `TABLES[k][b]`: what byte `b` does to the checksum when `k` bytes follow it.
const TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut i = 0;
    while i < 256 {
        let mut crc = i as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (POLYNOMIAL * (crc & 1));
            bit += 1;
        }
        tables[0][i] = crc;
        i += 1;
    }
    let mut k = 1;
    while k < 8 {
        let mut i = 0;
        while i < 256 {
            let before = tables[k - 1][i];
            tables[k][i] = (before >> 8) ^ tables[0][(before & 0xff) as usize];
            i += 1;
        }
        k += 1;
    }
    tables
}

/// The checksum of some bytes, after `crc`, that of those before them; 0 at the start.
pub fn crc32(crc: u32, bytes: &[u8]) -> u32 {
    let mut crc = !crc;
    let (chunks, rest) = bytes.as_chunks::<8>();
    for chunk in chunks {
        let mixed = u64::from_le_bytes(*chunk) ^ u64::from(crc);
        crc = 0;
        for (k, byte) in mixed.to_le_bytes().into_iter().enumerate() {
            crc ^= TABLES[7 - k][usize::from(byte)];
        }
    }
    for byte in rest {
        crc = (crc >> 8) ^ TABLES[0][usize::from(crc as u8 ^ byte)];
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition: a division of polynomials, bit by bit.
    fn reference(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (POLYNOMIAL * (crc & 1)))
        })
    }

    #[test]
    fn the_published_check_value() {
        assert_eq!(crc32(0, b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn any_length_and_any_cut_gives_the_remainder_of_the_division() {
        let bytes: Vec<u8> = (0..100u32).map(|i| (i * i * 7 + 3) as u8).collect();
        for len in 0..bytes.len() {
            let (whole, cut) = (&bytes[..len], len * 3 / 7);
            assert_eq!(crc32(0, whole), reference(whole));
            assert_eq!(crc32(crc32(0, &whole[..cut]), &whole[cut..]), reference(whole));
        }
    }
}
