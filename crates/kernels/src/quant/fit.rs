//! The search behind the encoders: scales and codes of least squared error.
//!
//! Four shapes of block cover all formats: one scale ([`scaled`]), one scale and one minimum
//! ([`shifted`]), and both with scales of groups ([`scaled_groups`], [`shifted_groups`]). Each starts
//! from [`TRIES`] scales that put the largest value at, before or past the last level. It rounds to
//! levels, solves least squares for these, and repeats from there. In the end the errors with scales
//! *as stored* are compared. Then every code is the nearest for the stored scales.
//!
//! Errors may be weighted, each value's by its own weight: then the sums are of weighted terms. Without weights every
//! weight is 1, and no term is multiplied.
//!
//! A block is first multiplied by a power of two that brings its largest value to 1..2. So results do
//! not depend on the unit, and no sum overflows. The lanes of a vector are tries, not values, and
//! nothing is fused. Sums run in one order, and a file has the same bytes whichever processor wrote it.

use half::f16;

use super::parts::{Parts, SIGN};
use crate::simd::Simd;

/// The values that codes stand for, before any scale.
pub(super) trait Codebook {
    const LOW: f32;
    const HIGH: f32;
    /// The level nearest to each lane (or next to it, within 1/8 of a tie); the lowest for NaN.
    fn nearest<S: Simd>(simd: S, y: S::F) -> S::F;
    /// The code of the level nearest to `y`.
    fn code(y: f32) -> u8;
}

/// The integers `LOW..=HIGH`, stored with `OFFSET` added.
pub(super) struct Integers<const LOW: i8, const HIGH: i8, const OFFSET: i32>;

impl<const LOW: i8, const HIGH: i8, const OFFSET: i32> Codebook for Integers<LOW, HIGH, OFFSET> {
    const LOW: f32 = LOW as f32;
    const HIGH: f32 = HIGH as f32;

    #[inline(always)]
    fn nearest<S: Simd>(simd: S, y: S::F) -> S::F {
        simd.round(simd.min(simd.max(y, simd.splat(Self::LOW)), simd.splat(Self::HIGH)))
    }

    #[inline(always)]
    fn code(y: f32) -> u8 {
        // Not `clamp`: these comparisons are one instruction each, and send NaN to the end.
        let y = if y > Self::LOW { y } else { Self::LOW };
        let y = if y < Self::HIGH { y } else { Self::HIGH };
        (rounded(y) as i32 + OFFSET) as u8
    }
}

/// Scales tried at once.
const TRIES: usize = 16;

/// One number for each try.
type Tries = [f32; TRIES];

/// Where the largest value is put, as a multiple of the last level: a value cut off may be worth finer
/// steps for the others, and of several scales one happens to round well.
const STRETCHES: Tries = [
    0.82, 0.85, 0.88, 0.905, 0.93, 0.95, 0.97, 0.985, 1.0, 1.015, 1.03, 1.05, 1.07, 1.09, 1.115,
    1.14,
];

/// By how many steps a range of values is wider than the levels, or by this part of the levels if that is
/// less. What is over is cut off above, below, or half and half.
const EXCESS_STEPS: f32 = 1.3;
const EXCESS_PART: f32 = 0.13;

/// Rounds of rounding to levels and solving for the scale.
const ROUNDS: usize = 2;

/// Rounds of choosing the scales of groups for that of the block, and that for those.
const GROUP_ROUNDS: usize = 2;

/// Values of a normalized group below this are left at zero.
const TINY: f32 = 1.0 / (1u64 << 40) as f32;

/// One scale: `x = d * level`.
#[inline(always)]
pub(super) fn scaled<S: Simd, L: Codebook, const N: usize>(simd: S, x: &[f32], w: &[f32]) -> Parts {
    let mut parts = Parts::simple(0, 0, 0);
    let (x, unit) = normalized::<N>(x);
    let w = &Weighting::of(w);
    let (mut scales, _) = fit_scales::<S, L, N>(simd, &x, w);
    // Last two: the largest value on the last level; and rounded up, for where f16 has few digits.
    let extreme = extreme(&x);
    let natural = if L::LOW == -L::HIGH { extreme.abs() / L::HIGH } else { extreme / L::LOW };
    (scales[TRIES - 2], scales[TRIES - 1]) = (natural, natural);
    let mut bits = [0; TRIES];
    for t in 0..TRIES {
        bits[t] = unit.store(scales[t]);
        if t == TRIES - 1 {
            bits[t] = unit.store_up(scales[t]);
        }
        scales[t] = unit.stored(bits[t]);
    }
    let best = least(&Sums::of::<S, L, N>(simd, &x, w, &scales, &[0.0; TRIES]).rr);
    parts.d = bits[best];
    codes::<L, N>(&x, scales[best], 0.0, &mut parts.codes);
    parts
}

/// One scale and one minimum: `x = d * level + m`, with `m` negated in the result.
#[inline(always)]
pub(super) fn shifted<S: Simd, L: Codebook, const N: usize>(
    simd: S,
    x: &[f32],
    w: &[f32],
) -> Parts {
    let mut parts = Parts::simple(0, 0, 1);
    let (x, unit) = normalized::<N>(x);
    let w = &Weighting::of(w);
    let (low, high) = range(&x);
    let (_, mut shifts, _) = fit_shifts::<S, L, N>(simd, &x, w, f32::INFINITY);
    // The last two tries start at the smallest value. One stores it rounded to the nearest; the other rounds
    // it down, so that no value lies below it, and the scale covers what that adds.
    shifts[TRIES - 2] = low;
    shifts[TRIES - 1] = low;
    let (mut d, mut m) = ([0; TRIES], [0; TRIES]);
    let mut scales = [0.0; TRIES];
    for t in 0..TRIES {
        m[t] = unit.store(shifts[t]);
        if t == TRIES - 1 {
            m[t] = not_above(m[t], unit.value(low));
        }
        shifts[t] = unit.stored(m[t]);
        scales[t] = (high - shifts[t]) / L::HIGH;
    }
    let sums = Sums::of::<S, L, N>(simd, &x, w, &scales, &shifts);
    for t in 0..TRIES {
        let more = if sums.qq[t] > 0.0 && t < TRIES - 2 { sums.rq[t] / sums.qq[t] } else { 0.0 };
        d[t] = unit.store(scales[t] + more);
        if t == TRIES - 1 {
            d[t] = unit.store_up(scales[t]);
        }
        scales[t] = unit.stored(d[t]);
    }
    let best = least(&Sums::of::<S, L, N>(simd, &x, w, &scales, &shifts).rr);
    (parts.d, parts.m) = (d[best], m[best] ^ SIGN);
    codes::<L, N>(&x, scales[best], shifts[best], &mut parts.codes);
    parts
}

/// Groups of `N` with signed scales in `LOW..=HIGH`: `x = d * scale * level`.
#[inline(always)]
pub(super) fn scaled_groups<S: Simd, L: Codebook, const N: usize, const LOW: i8, const HIGH: i8>(
    simd: S,
    x: &[f32],
    w: &[f32],
) -> Parts {
    let mut parts = Parts::simple(0, 0, 0);
    let (x, unit) = normalized::<256>(x);
    let all = Weighting::<256>::of(w);
    let (groups, _) = x.as_chunks::<N>();
    let mut wanted = [0.0f32; 16];
    let mut widest = 0.0f32;
    for (g, x) in groups.iter().enumerate() {
        let (scales, errors) = fit_scales::<S, L, N>(simd, x, &all.group(g));
        wanted[g] = scales[least(&errors)];
        if wanted[g].abs() > widest.abs() {
            widest = wanted[g];
        }
    }
    let (low, high) = (f32::from(LOW), f32::from(HIGH));
    let mut smallest = f32::INFINITY;
    let mut d = unit.store_up(widest / low);
    for _ in 0..GROUP_ROUNDS {
        let step = unit.stored(d);
        let per_step = inverse(step);
        let mut chosen = [0i8; 16];
        let (mut total, mut up, mut down) = (0.0, 0.0, 0.0);
        for (g, x) in groups.iter().enumerate() {
            let w = &all.group(g);
            let centre = rounded((wanted[g] * per_step).clamp(low, high));
            let (mut multiples, mut scales) = ([0.0; TRIES], [0.0; TRIES]);
            for t in 0..TRIES {
                multiples[t] = (centre + (t as f32 - 7.0)).clamp(low, high);
                scales[t] = step * multiples[t];
            }
            let sums = Sums::of::<S, L, N>(simd, x, w, &scales, &[0.0; TRIES]);
            let best = least(&sums.rr);
            chosen[g] = multiples[best] as i8;
            total += sums.rr[best];
            up += multiples[best] * sums.rq[best];
            down += multiples[best] * multiples[best] * sums.qq[best];
        }
        if total < smallest {
            (smallest, parts.d, parts.scales) = (total, d, chosen);
        }
        d = unit.store(step + if down > 0.0 { up / down } else { 0.0 });
    }
    let step = unit.stored(parts.d);
    for (g, x) in groups.iter().enumerate() {
        let scale = step * f32::from(parts.scales[g]);
        codes::<L, N>(x, scale, 0.0, &mut parts.codes[N * g..]);
    }
    parts
}

/// Groups of `N` with scales and minima in `0..=MAX`: `x = d * scale * level - m * minimum`.
#[inline(always)]
pub(super) fn shifted_groups<S: Simd, L: Codebook, const N: usize, const MAX: i8>(
    simd: S,
    x: &[f32],
    w: &[f32],
) -> Parts {
    let mut parts = Parts::simple(0, 0, 0);
    let (x, unit) = normalized::<256>(x);
    let all = Weighting::<256>::of(w);
    let (groups, _) = x.as_chunks::<N>();
    let (mut wanted, mut lowered) = ([0.0f32; 16], [0.0f32; 16]);
    let (mut widest, mut deepest) = (0.0f32, 0.0f32);
    for (g, x) in groups.iter().enumerate() {
        let (scales, shifts, errors) = fit_shifts::<S, L, N>(simd, x, &all.group(g), 0.0);
        let best = least(&errors);
        (wanted[g], lowered[g]) = (scales[best], -shifts[best]);
        widest = widest.max(wanted[g]);
        deepest = deepest.max(lowered[g]);
    }
    let max = f32::from(MAX);
    let mut smallest = f32::INFINITY;
    let (mut d, mut m) = (unit.store_up(widest / max), unit.store_up(deepest / max));
    for _ in 0..GROUP_ROUNDS {
        let (step, drop) = (unit.stored(d), unit.stored(m));
        let (per_step, per_drop) = (inverse(step), inverse(drop));
        let (mut chosen, mut minima) = ([0i8; 16], [0u8; 16]);
        let mut total = 0.0;
        let mut normal = Normal::default();
        for (g, x) in groups.iter().enumerate() {
            let w = &all.group(g);
            let centre = rounded((wanted[g] * per_step).clamp(0.0, max));
            let [mut multiples, mut mins, mut scales, mut shifts] = [[0.0; TRIES]; 4];
            for t in 0..TRIES {
                multiples[t] = (centre + ((t % 5) as f32 - 2.0)).clamp(0.0, max);
                scales[t] = step * multiples[t];
                // The middle of the range stays where it is.
                let lowered = lowered[g] + (scales[t] - wanted[g]) * (L::HIGH * 0.5);
                let middle = rounded((lowered * per_drop).clamp(0.0, max));
                mins[t] = (middle + ((t / 5) as f32 - 1.0)).clamp(0.0, max);
                shifts[t] = -drop * mins[t];
            }
            let sums = Sums::of::<S, L, N>(simd, x, w, &scales, &shifts);
            let best = least(&sums.rr);
            (chosen[g], minima[g]) = (multiples[best] as i8, mins[best] as u8);
            total += sums.rr[best];
            normal.add(&sums, best, multiples[best], -mins[best], w.total);
        }
        if total < smallest {
            (smallest, parts.d, parts.m) = (total, d, m);
            (parts.scales, parts.mins) = (chosen, minima);
        }
        let (more_step, more_drop) = normal.solve();
        d = unit.store((step + more_step).max(0.0));
        m = unit.store((drop + more_drop).max(0.0));
    }
    let (step, drop) = (unit.stored(parts.d), unit.stored(parts.m));
    for (g, x) in groups.iter().enumerate() {
        let scale = step * f32::from(parts.scales[g]);
        let shift = -drop * f32::from(parts.mins[g]);
        codes::<L, N>(x, scale, shift, &mut parts.codes[N * g..]);
    }
    parts
}

/// Scales that each try ends at, and their errors, before anything is stored.
#[inline(always)]
fn fit_scales<S: Simd, L: Codebook, const N: usize>(
    simd: S,
    x: &[f32; N],
    w: &Weighting<N>,
) -> (Tries, Tries) {
    let mut scales = [0.0; TRIES];
    let mut errors = [0.0; TRIES];
    let extreme = extreme(x);
    if extreme.abs() < TINY {
        return (scales, errors);
    }
    for t in 0..TRIES {
        let end = STRETCHES[t] * if t % 2 == 0 { L::LOW } else { L::HIGH };
        scales[t] = if L::LOW == -L::HIGH { extreme.abs() / end.abs() } else { extreme / end };
    }
    for _ in 0..ROUNDS {
        let sums = Sums::of::<S, L, N>(simd, x, w, &scales, &[0.0; TRIES]);
        for t in 0..TRIES {
            let more = if sums.qq[t] > 0.0 { sums.rq[t] / sums.qq[t] } else { 0.0 };
            scales[t] += more;
            errors[t] = sums.rr[t] - more * sums.rq[t];
        }
    }
    (scales, errors)
}

/// Scales and shifts that each try ends at, and their errors, before anything is stored; no shift is
/// above `ceiling`.
#[inline(always)]
fn fit_shifts<S: Simd, L: Codebook, const N: usize>(
    simd: S,
    x: &[f32; N],
    w: &Weighting<N>,
    ceiling: f32,
) -> (Tries, Tries, Tries) {
    let n = w.total;
    let (low, high) = range(x);
    let low = low.min(ceiling);
    let width = high - low;
    let [mut scales, mut shifts, mut errors] = [[0.0; TRIES], [low; TRIES], [0.0; TRIES]];
    if width < TINY {
        return (scales, shifts, errors);
    }
    for t in 0..TRIES {
        // From as much too narrow to as much too wide; the last try is the range as it is.
        let part = if t == TRIES - 1 { 0.0 } else { (t / 3) as f32 * 0.5 - 1.0 };
        let excess = part * EXCESS_STEPS.min(EXCESS_PART * L::HIGH);
        let covered = width * L::HIGH / (L::HIGH + excess);
        let below = (t % 3) as f32 * 0.5;
        scales[t] = covered / L::HIGH;
        shifts[t] = (low + (width - covered) * below).min(ceiling);
    }
    for _ in 0..ROUNDS {
        let sums = Sums::of::<S, L, N>(simd, x, w, &scales, &shifts);
        for t in 0..TRIES {
            let (r, rr, rq) = (sums.r[t], sums.rr[t], sums.rq[t]);
            let (q, qq) = (sums.q[t], sums.qq[t]);
            let det = n * qq - q * q;
            let free = if det > 1e-6 * n * qq { (n * rq - q * r) / det } else { 0.0 };
            let down = if n > 0.0 { (r - free * q) / n } else { 0.0 };
            let held = ceiling - shifts[t];
            let stopped = if qq > 0.0 { (rq - held * q) / qq } else { 0.0 };
            let (more, down) = if down > held { (stopped, held) } else { (free, down) };
            errors[t] = rr - 2.0 * (down * r + more * rq)
                + (down * down * n + 2.0 * down * more * q + more * more * qq);
            scales[t] += more;
            shifts[t] += down;
        }
    }
    (scales, shifts, errors)
}

/// The weights of a group's errors, the largest of the block 1.
struct Weighting<const N: usize> {
    of: [f32; N],
    /// Their sum.
    total: f32,
    /// Whether each is 1.
    is_even: bool,
}

impl<const N: usize> Weighting<N> {
    /// Of a block; none are all 1. What is no number above 0 is a weight of 0, and a block of such alone is even.
    #[inline(always)]
    fn of(weights: &[f32]) -> Self {
        let even = Self { of: [1.0; N], total: N as f32, is_even: true };
        if weights.is_empty() {
            return even;
        }
        let weights: &[f32; N] = weights.try_into().expect("weights: one for each value");
        let counts = |w: f32| w > 0.0 && w < f32::INFINITY;
        let largest = weights.iter().copied().filter(|&w| counts(w)).fold(0.0, f32::max);
        if largest == 0.0 {
            return even;
        }
        let mut of = [0.0; N];
        for (to, &w) in of.iter_mut().zip(weights) {
            *to = if counts(w) { w / largest } else { 0.0 };
        }
        Self { of, total: of.iter().sum(), is_even: false }
    }

    /// Of the group `g` of a block.
    #[inline(always)]
    fn group<const M: usize>(&self, g: usize) -> Weighting<M> {
        let mut of = [1.0; M];
        let mut total = M as f32;
        if !self.is_even {
            of.copy_from_slice(&self.of[M * g..M * (g + 1)]);
            total = of.iter().sum();
        }
        Weighting { of, total, is_even: self.is_even }
    }
}

/// Sums over a group, for each try: of the levels q nearest to `(x - shift) / scale`, and of what they
/// leave, `r = x - shift - scale * q`.
struct Sums {
    r: Tries,
    rr: Tries,
    rq: Tries,
    q: Tries,
    qq: Tries,
}

impl Sums {
    #[inline(always)]
    fn of<S: Simd, L: Codebook, const N: usize>(
        simd: S,
        x: &[f32; N],
        w: &Weighting<N>,
        scales: &Tries,
        shifts: &Tries,
    ) -> Self {
        let zero = [0.0; TRIES];
        let mut sums = Self { r: zero, rr: zero, rq: zero, q: zero, qq: zero };
        let mut inverses = zero;
        for t in 0..TRIES {
            inverses[t] = inverse(scales[t]);
        }
        let (scales, _) = S::chunks(scales);
        let (shifts, _) = S::chunks(shifts);
        let (inverses, _) = S::chunks(&inverses);
        let (to_r, _) = S::chunks_mut(&mut sums.r);
        let (to_rr, _) = S::chunks_mut(&mut sums.rr);
        let (to_rq, _) = S::chunks_mut(&mut sums.rq);
        let (to_q, _) = S::chunks_mut(&mut sums.q);
        let (to_qq, _) = S::chunks_mut(&mut sums.qq);
        for c in 0..TRIES / S::LANES {
            let scale = simd.load(&scales[c]);
            let shift = simd.load(&shifts[c]);
            let inverse = simd.load(&inverses[c]);
            let [mut sum_r, mut sum_rr, mut sum_rq, mut sum_q, mut sum_qq] = [simd.splat(0.0); 5];
            for i in 0..N {
                let y = simd.sub(simd.splat(x[i]), shift);
                let q = L::nearest(simd, simd.mul(y, inverse));
                let r = simd.sub(y, simd.mul(scale, q));
                let (mut weighted_r, mut weighted_q) = (r, q);
                if !w.is_even {
                    let weight = simd.splat(w.of[i]);
                    (weighted_r, weighted_q) = (simd.mul(r, weight), simd.mul(q, weight));
                }
                sum_r = simd.add(sum_r, weighted_r);
                sum_rr = simd.add(sum_rr, simd.mul(weighted_r, r));
                sum_rq = simd.add(sum_rq, simd.mul(weighted_r, q));
                sum_q = simd.add(sum_q, weighted_q);
                sum_qq = simd.add(sum_qq, simd.mul(weighted_q, q));
            }
            simd.store(sum_r, &mut to_r[c]);
            simd.store(sum_rr, &mut to_rr[c]);
            simd.store(sum_rq, &mut to_rq[c]);
            simd.store(sum_q, &mut to_q[c]);
            simd.store(sum_qq, &mut to_qq[c]);
        }
        sums
    }
}

/// Normal equations of the two scales of a block, in what they are off by.
#[derive(Default)]
struct Normal {
    aa: f32,
    ab: f32,
    bb: f32,
    ra: f32,
    rb: f32,
}

impl Normal {
    /// A group of `n` values, `d * scale * q + m * min`.
    #[inline(always)]
    fn add(&mut self, sums: &Sums, t: usize, scale: f32, min: f32, n: f32) {
        self.aa += scale * scale * sums.qq[t];
        self.ab += scale * min * sums.q[t];
        self.bb += min * min * n;
        self.ra += scale * sums.rq[t];
        self.rb += min * sums.r[t];
    }

    #[inline(always)]
    fn solve(&self) -> (f32, f32) {
        let det = self.aa * self.bb - self.ab * self.ab;
        if det > 1e-6 * self.aa * self.bb {
            (
                (self.ra * self.bb - self.rb * self.ab) / det,
                (self.rb * self.aa - self.ra * self.ab) / det,
            )
        } else if self.aa > 0.0 {
            (self.ra / self.aa, 0.0)
        } else if self.bb > 0.0 {
            (0.0, self.rb / self.bb)
        } else {
            (0.0, 0.0)
        }
    }
}

/// Codes nearest to the values of a group.
#[inline(always)]
fn codes<L: Codebook, const N: usize>(x: &[f32; N], scale: f32, shift: f32, codes: &mut [u8]) {
    let inverse = inverse(scale);
    for (code, &x) in codes[..N].iter_mut().zip(x) {
        *code = L::code((x - shift) * inverse);
    }
}

/// The first of the least errors.
#[inline(always)]
fn least(errors: &Tries) -> usize {
    let mut best = 0;
    for t in 1..TRIES {
        if errors[t] < errors[best] {
            best = t;
        }
    }
    best
}

/// A power of two by which a block was multiplied, and scales in and out of it.
#[derive(Clone, Copy)]
struct Unit {
    up: f32,
    down: f32,
}

impl Unit {
    /// A normalized value in the block's own unit.
    #[inline(always)]
    fn value(self, normalized: f32) -> f32 {
        normalized * self.down
    }

    /// Bits of the f16 nearest to a normalized scale, at most its largest finite value.
    #[inline(always)]
    fn store(self, scale: f32) -> u16 {
        f16::from_f32(self.value(scale).clamp(-65504.0, 65504.0)).to_bits()
    }

    /// The same, next to it where that is nearer to zero than `scale`.
    #[inline(always)]
    fn store_up(self, scale: f32) -> u16 {
        let bits = self.store(scale);
        let short = self.stored(bits).abs() < scale.abs() && bits & !SIGN < 0x7bff;
        bits + u16::from(short)
    }

    /// The normalized scale that bits stand for.
    #[inline(always)]
    fn stored(self, bits: u16) -> f32 {
        f16::from_bits(bits).to_f32() * self.up
    }
}

/// Multiplies a block by the power of two that brings its largest value to 1..2 (to 1..4 next to the
/// end of f32). NaN becomes 0 and infinity the largest finite value; blocks too small for any f16
/// scale become zeros.
#[inline(always)]
fn normalized<const N: usize>(x: &[f32]) -> ([f32; N], Unit) {
    let x: &[f32; N] = x.try_into().expect("x: one block");
    let mut out = [0.0; N];
    for i in 0..N {
        let v = if x[i] > f32::MIN { x[i] } else { f32::MIN };
        let v = if v < f32::MAX { v } else { f32::MAX };
        out[i] = if x[i].is_nan() { 0.0 } else { v };
    }
    let largest = extreme(&out).abs();
    let exponent = ((largest.to_bits() >> 23) as i32 - 127).min(126);
    if exponent < -26 {
        return ([0.0; N], Unit { up: 1.0, down: 1.0 });
    }
    let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    let unit = Unit { up: power(-exponent), down: power(exponent) };
    for v in &mut out {
        *v *= unit.up;
    }
    (out, unit)
}

/// Least and largest value.
#[inline(always)]
fn range<const N: usize>(x: &[f32; N]) -> (f32, f32) {
    let (mut low, mut high) = ([f32::INFINITY; 8], [f32::NEG_INFINITY; 8]);
    let (eights, _) = x.as_chunks::<8>();
    for x in eights {
        for l in 0..8 {
            low[l] = if x[l] < low[l] { x[l] } else { low[l] };
            high[l] = if x[l] > high[l] { x[l] } else { high[l] };
        }
    }
    (low.into_iter().fold(low[0], f32::min), high.into_iter().fold(high[0], f32::max))
}

/// The value of largest magnitude.
#[inline(always)]
fn extreme<const N: usize>(x: &[f32; N]) -> f32 {
    let (low, high) = range(x);
    if -low > high { low } else { high }
}

/// The f16 next to `bits` that is not above `value`, of which `bits` is the nearest.
#[inline(always)]
fn not_above(bits: u16, value: f32) -> u16 {
    if f16::from_bits(bits).to_f32() <= value {
        bits
    } else if bits & !SIGN == 0 {
        SIGN | 1
    } else if bits & SIGN == 0 {
        bits - 1
    } else {
        (bits + 1).min(SIGN | 0x7bff)
    }
}

/// `1 / scale`, and 0 for 0.
#[inline(always)]
fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// The nearest integer to `y` of magnitude below 2^22: 1.5 * 2^23, added and taken away, rounds.
#[inline(always)]
fn rounded(y: f32) -> f32 {
    (y + 12_582_912.0) - 12_582_912.0
}
