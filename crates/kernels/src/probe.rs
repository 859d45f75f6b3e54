//! What the machine can do, for benchmarks that state their results as ratios to it.

use rayon::prelude::*;

use crate::simd::{Level, Simd, dispatch};

/// Multiply-adds on registers only, on every thread of the pool: returns the operations done, two for
/// each multiply-add of each lane.
#[must_use]
pub fn multiply_adds(level: Level, rounds: usize) -> f64 {
    let threads = rayon::current_num_threads();
    let sums = rayon::broadcast(|_| {
        let mut sum = [0.0f32; 16];
        let operations = multiply_add_rounds(level, rounds, &mut sum);
        (sum, operations)
    });
    std::hint::black_box(&sums);
    debug_assert_eq!(sums.len(), threads);
    sums.iter().map(|(_, operations)| operations).sum()
}

dispatch! { fn multiply_add_rounds = multiply_add_rounds_body(rounds: usize, out: &mut [f32; 16]) -> f64 }

#[inline(always)]
fn multiply_add_rounds_body<S: Simd>(simd: S, rounds: usize, out: &mut [f32; 16]) -> f64 {
    let (scale, step) = (simd.splat(std::hint::black_box(0.999)), simd.splat(0.001));
    let mut acc = [simd.splat(1.0); 12];
    for _ in 0..rounds {
        for acc in &mut acc {
            *acc = simd.mul_add(*acc, scale, step);
        }
    }
    let mut sum = acc[0];
    for acc in &acc[1..] {
        sum = simd.add(sum, *acc);
    }
    simd.store(sum, &mut S::chunks_mut(out).0[0]);
    (rounds * acc.len() * S::LANES * 2) as f64
}

/// Reads all of `data` once, in parts on all threads of the pool; returns a sum so that it is done.
#[must_use]
pub fn read(level: Level, data: &[f32]) -> f32 {
    let part = data.len().div_ceil(rayon::current_num_threads() * 4).max(1024);
    data.par_chunks(part).map(|part| sum(level, part)).sum()
}

dispatch! { fn sum = sum_body(data: &[f32]) -> f32 }

/// Four streams, which memory serves faster than one.
#[inline(always)]
fn sum_body<S: Simd>(simd: S, data: &[f32]) -> f32 {
    let quarter = data.len() / 4;
    let mut streams: [&[[S::Chunk; 2]]; 4] = [&[]; 4];
    for i in 0..4 {
        streams[i] = S::chunks(&data[i * quarter..][..quarter]).0.as_chunks().0;
    }
    let mut acc = [[simd.splat(0.0); 2]; 4];
    for block in 0..streams[0].len() {
        for i in 0..4 {
            let [a, b] = &streams[i][block];
            acc[i] = [simd.add(acc[i][0], simd.load(a)), simd.add(acc[i][1], simd.load(b))];
        }
    }
    let mut total = simd.splat(0.0);
    for acc in acc {
        total = simd.add(total, simd.add(acc[0], acc[1]));
    }
    simd.reduce(total)
}

/// Reads all of `data` once and writes it back, halved, in parts on all threads of the pool.
pub fn rewrite(level: Level, data: &mut [f32]) {
    let part = data.len().div_ceil(rayon::current_num_threads() * 4).max(1024);
    data.par_chunks_mut(part).for_each(|part| halve(level, part));
}

dispatch! { fn halve = halve_body(data: &mut [f32]) }

#[inline(always)]
fn halve_body<S: Simd>(simd: S, data: &mut [f32]) {
    let (half, least) = (simd.splat(0.5), simd.splat(1e-30));
    let (chunks, rest) = S::chunks_mut(data);
    for chunk in chunks {
        // Never so small that arithmetic slows down.
        simd.store(simd.max(least, simd.mul(half, simd.load(chunk))), chunk);
    }
    for x in rest {
        *x *= 0.5;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewriting_touches_everything() {
        for &level in Level::present() {
            let mut data = vec![2.0; (1 << 16) + 3];
            rewrite(level, &mut data);
            assert!(data.iter().all(|x| *x == 1.0), "{level}");
        }
    }

    #[test]
    fn reading_touches_everything() {
        let data = vec![1.0; 1 << 16];
        for &level in Level::present() {
            assert_eq!(read(level, &data), 65_536.0, "{level}");
        }
    }

    #[test]
    fn operations_are_counted_for_every_thread() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        assert_eq!(
            pool.install(|| multiply_adds(Level::Baseline, 10)),
            3.0 * one.install(|| multiply_adds(Level::Baseline, 10))
        );
    }
}
