//! Products `x · Wᵀ` as one parallel step, whatever the types of their weights.
//!
//! What one token's products cost beside the reading of weights is the start and the end of each step. So
//! products that do not wait for one another are computed in one.

use std::ops::Range;

use crate::linear::{self, OUT_BLOCK, Weights};
use crate::parallel::{self, PIECES};
use crate::quant::{Packed, product as quantized};
use crate::rows::{Rows, columns_to};
use crate::simd::Level;

/// Nanoseconds of work that are worth a task of their own: shorter streams of weights come slower from memory.
const PIECE: usize = 8_000;

/// A weight matrix `[out, in]`, and what becomes of the activations.
#[derive(Debug, Clone, Copy)]
pub enum Matrix<'a> {
    /// Floats: see [`linear`](crate::linear).
    Floats(Weights<'a>),
    /// Quantized blocks: see [`linear_quantized`](crate::quant::linear_quantized).
    Quantized(&'a Packed),
    /// The same with activations of two terms: see
    /// [`linear_quantized_precise`](crate::quant::linear_quantized_precise).
    Precise(&'a Packed),
}

/// One product.
#[derive(Debug)]
pub struct Product<'a> {
    /// Activations, `[rows, in]`.
    pub x: Rows<'a>,
    /// Weights, `[out, in]`.
    pub w: Matrix<'a>,
    /// `[rows, out]`, added to: zeros, a bias or a residual before the call.
    pub out: &'a mut [f32],
}

/// Computes all products: each has the bits that it has alone.
///
/// # Panics
///
/// If the lengths of a product disagree.
#[track_caller]
pub fn products(level: Level, products: Vec<Product<'_>>) {
    watched(level, products, &|_, _| ());
}

/// The same; `watch` hears of each task, on the thread that runs it: its product and features.
#[track_caller]
pub(crate) fn watched(
    level: Level,
    mut products: Vec<Product<'_>>,
    watch: &(dyn Fn(usize, Range<usize>) + Sync),
) {
    products.iter().for_each(Product::check);
    products.retain(|product| !product.out.is_empty() && product.x.width() > 0);
    let operands: Vec<Operand<'_>> = products.iter().map(|p| Operand { x: p.x, w: p.w }).collect();
    let ns = operands.iter().map(|operand| operand.ns(operand.x.len())).sum();
    let prepared: Vec<Prepared> = operands.iter().map(|operand| operand.prepare(level)).collect();
    // Without a region, the only share is all.
    let threads = if parallel::pieces(ns) == 1 { 1 } else { rayon::current_num_threads() };
    let mut shares: Vec<Vec<Task<'_>>> = Vec::new();
    shares.resize_with(threads, Vec::new);
    for (number, (product, operand)) in products.iter_mut().zip(&operands).enumerate() {
        let cuts = operand.cuts(threads);
        let bands = columns_to(product.out, operand.features(), &cuts.iter().map(|(_, end)| *end));
        let mut first = 0;
        for (&(thread, end), out) in cuts.iter().zip(bands) {
            shares[thread].push(Task { number, first, out });
            first = end;
        }
    }
    let mut ends: Vec<usize> = shares.iter().map(Vec::len).collect();
    (1..threads).for_each(|i| ends[i] += ends[i - 1]);
    let of = |_, i: usize| if i == 0 { 0..ends[0] } else { ends[i - 1]..ends[i] };
    let tasks = shares.into_iter().flatten().collect();
    parallel::for_each_of(tasks, of, ns, Panels::default, |panels, mut task: Task<'_>| {
        let Task { number, first, out } = &mut task;
        let Operand { x, w } = operands[*number];
        watch(*number, *first..*first + out[0].len());
        match (w, &prepared[*number]) {
            (Matrix::Floats(w), Prepared::Rows(rows)) => {
                linear::task(level, x, rows.as_deref(), w, *first, out, &mut panels.floats);
            }
            (Matrix::Quantized(w) | Matrix::Precise(w), Prepared::Integers(x)) => {
                quantized::task(level, x, w, *first, out, &mut panels.integers);
            }
            _ => unreachable!("prepared for another matrix"),
        }
    });
}

/// Some of a product's features, of all rows.
struct Task<'a> {
    number: usize,
    first: usize,
    out: Vec<&'a mut [f32]>,
}

/// What is multiplied.
struct Operand<'a> {
    x: Rows<'a>,
    w: Matrix<'a>,
}

/// What a product makes of its rows first.
enum Prepared {
    Rows(Option<Vec<f32>>),
    Integers(quantized::Activations),
}

/// Unpacked weights, kept from task to task.
#[derive(Default)]
struct Panels {
    floats: Vec<f32>,
    integers: quantized::Panel,
}

impl Product<'_> {
    #[track_caller]
    fn check(&self) {
        let (rows, width) = (self.x.len(), self.x.width());
        match self.w {
            Matrix::Floats(_) if rows == 0 || width == 0 => (),
            Matrix::Floats(w) => {
                let features = w.len() / width;
                assert_eq!(w.len(), features * width, "w: not whole rows of {width}");
                assert_eq!(self.out.len(), rows * features, "out");
            }
            Matrix::Quantized(w) | Matrix::Precise(w) => {
                let expected = w.width();
                assert!(rows == 0 || width == expected, "x: width {width} is not {expected}");
                assert_eq!(self.out.len(), rows * w.features(), "out");
            }
        }
    }
}

impl Operand<'_> {
    fn features(&self) -> usize {
        match self.w {
            Matrix::Floats(w) => w.len() / self.x.width(),
            Matrix::Quantized(w) | Matrix::Precise(w) => w.features(),
        }
    }

    /// Nanoseconds that it takes one core, about, with so many rows.
    fn ns(&self, rows: usize) -> usize {
        match self.w {
            // To read 16 bytes, to multiply 16 floats.
            Matrix::Floats(w) => w.len().saturating_mul(w.size() + rows) / 16,
            Matrix::Quantized(w) => w.ns(rows),
            Matrix::Precise(w) => w.ns(2 * rows),
        }
    }

    fn prepare(&self, level: Level) -> Prepared {
        match self.w {
            Matrix::Floats(_) => Prepared::Rows(linear::prepare(self.x)),
            Matrix::Quantized(w) => Prepared::Integers(quantized::prepare(level, self.x, w, 1)),
            Matrix::Precise(w) => Prepared::Integers(quantized::prepare(level, self.x, w, 2)),
        }
    }

    /// Whose share each task is in, and the feature that it ends before: all features, in their order.
    fn cuts(&self, threads: usize) -> Vec<(usize, usize)> {
        let features = self.features();
        let mut cuts = Vec::new();
        match self.w {
            Matrix::Floats(_) => {
                let block = features.div_ceil(threads).next_multiple_of(16).min(OUT_BLOCK);
                let blocks = features.div_ceil(block);
                for thread in 0..threads {
                    let of = parallel::share(blocks, threads, thread);
                    cuts.extend(of.map(|i| (thread, features.min((i + 1) * block))));
                }
            }
            Matrix::Quantized(w) | Matrix::Precise(w) => {
                for thread in 0..threads {
                    let of = w.share(threads, thread);
                    let ns = self.ns(self.x.len()) / features * of.len();
                    let most = if threads == 1 { 1 } else { PIECES };
                    let count = (ns / PIECE).clamp(1, most);
                    cuts.extend(Packed::cut(of, count).map(|end| (thread, end)));
                }
            }
        }
        cuts
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::{Arc, Barrier, Mutex};

    use super::*;
    use crate::quant::Format;
    use crate::testing::Rng;

    fn packed(rng: &mut Rng, [features, width]: [usize; 2], format: Format) -> Packed {
        let mut blocks = vec![0; format.bytes_of(features * width).unwrap()];
        crate::quant::encode(Level::detect(), format, &rng.floats(features * width), &mut blocks);
        Packed::new(format, &blocks, width)
    }

    #[test]
    fn products_in_one_step_have_the_bits_of_each_alone_on_any_number_of_threads() {
        let mut rng = Rng::new(71);
        let shapes = [[40, 64], [1, 64], [530, 64], [300, 512], [16, 512]];
        let floats = rng.floats(530 * 64);
        let halves: Vec<u16> = (0..300 * 512).map(|_| (rng.next() as u16) & 0xbfff).collect();
        let [a, b] =
            [packed(&mut rng, shapes[0], Format::Q8_0), packed(&mut rng, shapes[1], Format::Q4_0)];
        let c = packed(&mut rng, [16, 512], Format::Q6K);
        let matrices = [
            Matrix::Quantized(&a),
            Matrix::Precise(&b),
            Matrix::Floats(Weights::F32(&floats)),
            Matrix::Floats(Weights::Bf16(&halves)),
            Matrix::Precise(&c),
        ];
        for level in Level::present().iter().copied() {
            for rows in [1, 2, 9] {
                let inputs: Vec<Vec<f32>> =
                    shapes.iter().map(|[_, width]| rng.floats(rows * width)).collect();
                let before: Vec<Vec<f32>> =
                    shapes.iter().map(|[features, _]| rng.floats(rows * features)).collect();
                let run = |of: &[usize], out: &mut [Vec<f32>]| {
                    let list = of.iter().zip(out).map(|(&i, out)| Product {
                        x: Rows::dense(&inputs[i], shapes[i][1]),
                        w: matrices[i],
                        out,
                    });
                    products(level, list.collect());
                };
                let mut want = before.clone();
                (0..5).for_each(|i| run(&[i], &mut want[i..=i]));
                for threads in [1, 2, 5, 64] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                    let mut out = before.clone();
                    pool.unwrap().install(|| run(&[0, 1, 2, 3, 4], &mut out));
                    assert_eq!(out, want, "{level:?}, {rows} rows, {threads} threads");
                }
            }
        }
    }

    #[test]
    fn products_without_rows_or_width_are_nothing() {
        let mut rng = Rng::new(72);
        let w = packed(&mut rng, [8, 32], Format::Q8_0);
        let (x, w) = (Rows::new(&[], 0, 32, 0, 32), Matrix::Quantized(&w));
        products(Level::detect(), vec![Product { x, w, out: &mut [] }]);
        products(Level::detect(), Vec::new());
        let (x, w) = (Rows::new(&[], 3, 0, 0, 0), Matrix::Floats(Weights::F32(&[])));
        products(Level::detect(), vec![Product { x, w, out: &mut [] }]);
    }

    /// Which thread had which rows, of threads that all run.
    fn watch(
        threads: usize,
        run: impl FnOnce(&(dyn Fn(Range<usize>) + Sync)) + Send,
    ) -> BTreeMap<usize, usize> {
        let (all_here, begun) = (Barrier::new(threads), Mutex::new(vec![false; threads]));
        let seen = Mutex::new(BTreeMap::new());
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            run(&|rows: Range<usize>| {
                let thread = rayon::current_thread_index().unwrap();
                let is_first = !std::mem::replace(&mut begun.lock().unwrap()[thread], true);
                // Nobody goes on before each has begun its own.
                if is_first {
                    all_here.wait();
                }
                if is_first {
                    seen.lock().unwrap().extend(rows.map(|row| (row, thread)));
                }
            });
        });
        seen.into_inner().unwrap()
    }

    #[test]
    fn the_thread_that_packs_rows_multiplies_them() {
        let (threads, [features, width]) = (4, [4 * 1024, 512]);
        let mut rng = Rng::new(73);
        let mut blocks = vec![0; Format::Q8_0.bytes_of(features * width).unwrap()];
        let values = rng.floats(features * width);
        crate::quant::encode(Level::detect(), Format::Q8_0, &values, &mut blocks);
        let mut weight = None;
        let packed_by = watch(threads, |seen| {
            weight = Some(Packed::watched(Format::Q8_0, &blocks, width, seen));
        });
        let weight = weight.unwrap();
        for rows in [1, 3, 40] {
            let (input, mut out) = (rng.floats(rows * width), vec![0.0; rows * features]);
            let multiplied_by = watch(threads, |seen| {
                let (x, w) = (Rows::dense(&input, width), Matrix::Quantized(&weight));
                watched(Level::detect(), vec![Product { x, w, out: &mut out }], &|_, rows| {
                    seen(rows);
                });
            });
            assert!(multiplied_by.len() >= features / PIECES, "{}", multiplied_by.len());
            for (row, thread) in &multiplied_by {
                assert!(weight.share(threads, *thread).contains(row));
            }
            // First tasks of a thread may be of more or fewer rows; those that both saw are of one thread.
            let both = packed_by.iter().filter(|(row, _)| multiplied_by.contains_key(row));
            assert!(both.clone().count() >= features / PIECES);
            assert!(both.clone().all(|(row, thread)| multiplied_by[row] == *thread), "{rows} rows");
        }
    }

    #[test]
    fn shares_of_a_matrix_are_all_its_rows_and_about_equal() {
        let mut rng = Rng::new(74);
        for (shape, threads) in [([4096, 512], 64), ([4096, 512], 3), ([48, 64], 8), ([7, 32], 2)] {
            let w = packed(&mut rng, shape, Format::Q8_0);
            let shares: Vec<Range<usize>> = (0..threads).map(|i| w.share(threads, i)).collect();
            let all: Vec<usize> = shares.iter().flat_map(Clone::clone).collect();
            assert_eq!(all, (0..shape[0]).collect::<Vec<_>>());
            let used = shares.iter().filter(|share| !share.is_empty()).map(ExactSizeIterator::len);
            let [most, least] = [used.clone().max().unwrap(), used.min().unwrap()];
            assert!(most - least <= 64, "{shape:?} on {threads}: {least} to {most}");
        }
    }

    /// A layer's products of one token, step by step, by name; widths of [out, in].
    const MAMBA2_2_7B: &[(&str, &[[usize; 2]])] = &[
        ("in_proj", &[[10_576, 2560]]),
        ("out_proj", &[[2560, 5120]]),
        ("head", &[[50_288, 2560]]),
    ];

    /// Of a hybrid of 9 billion parameters, with the sizes of Qwen3.5's.
    const HYBRID_9B: &[(&str, &[[usize; 2]])] = &[
        ("delta: q k v, a b, z", &[[8192, 4096], [64, 4096], [4096, 4096]]),
        ("delta: out_proj", &[[4096, 4096]]),
        ("attention: q k v", &[[10_240, 4096]]),
        ("attention: o_proj", &[[4096, 4096]]),
        ("mlp: gate, up", &[[24_576, 4096]]),
        ("mlp: down", &[[4096, 12_288]]),
        ("head", &[[248_320, 4096]]),
    ];

    /// Prints the table of docs/performance.md: `cargo test -p boostr-kernels suit_64 -- --nocapture`.
    #[test]
    fn tasks_of_large_models_suit_64_threads() {
        const THREADS: usize = 64;
        for (model, steps) in [("mamba2-2.7b", MAMBA2_2_7B), ("9B hybrid", HYBRID_9B)] {
            for (name, shapes) in steps {
                let weights: Vec<Packed> = shapes
                    .iter()
                    .map(|&shape| {
                        let size = Packed::size(Format::Q4K, shape).unwrap();
                        Packed::of_bytes(Format::Q4K, shape, Arc::new(vec![0; size]), 0..size)
                    })
                    .collect();
                let (mut tasks, mut bytes) = (0, vec![0; THREADS]);
                for w in &weights {
                    let x = vec![0.0; w.width()];
                    let cuts = Operand { x: Rows::dense(&x, w.width()), w: Matrix::Quantized(w) };
                    let mut first = 0;
                    for (thread, end) in cuts.cuts(THREADS) {
                        tasks += 1;
                        bytes[thread] += (end - first) * w.size_in_bytes() / w.features();
                        first = end;
                    }
                }
                let all: usize = bytes.iter().sum();
                let (mean, most) = (all / THREADS, bytes.into_iter().max().unwrap());
                println!(
                    "| {model} | {name} | {} | {tasks} | {} | {:.2} |",
                    all / 1024,
                    all / tasks / 1024,
                    most as f64 / mean as f64
                );
                assert!((THREADS..=PIECES * THREADS + 2).contains(&tasks), "{name}: {tasks} tasks");
                assert!(all / tasks >= 48 << 10, "{name}: tasks of {} bytes", all / tasks);
                assert!(most * 2 <= mean * 3, "{name}: {most} of a mean of {mean}");
            }
        }
    }
}
