//! What tests of gradients share: differences, objectives, and pools of several sizes.

/// The gradient of `f` at `x` by central differences: within about 1e-8 for smooth `f` of size 1.
pub(crate) fn numeric_gradient(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let (at, step) = (x[i], 1e-5 * x[i].abs().max(1.0));
            x[i] = at + step;
            let above = f(&x);
            x[i] = at - step;
            let below = f(&x);
            x[i] = at;
            (above - below) / (2.0 * step)
        })
        .collect()
}

/// The slope of `f` along each element of `x`, by central differences of the fourth order.
///
/// Elements of [`Rng`](crate::testing::Rng) are multiples of 2^-23 below 1, so a step to either side is exact.
pub(crate) fn slopes(x: &[f32], f: impl Fn(&[f32]) -> f64) -> Vec<f32> {
    let step = 2.0f32.powi(-9);
    let mut moved = x.to_vec();
    (0..x.len())
        .map(|i| {
            let mut at = |steps: f32| {
                moved[i] = x[i] + steps * step;
                f(&moved)
            };
            let near = at(1.0) - at(-1.0);
            let far = at(2.0) - at(-2.0);
            moved[i] = x[i];
            ((8.0 * near - far) / (12.0 * f64::from(step))) as f32
        })
        .collect()
}

/// Asserts that a gradient by definition is what differences give: the test of a test's own truth.
#[track_caller]
pub(crate) fn assert_gradient(name: &str, got: &[f64], numeric: &[f64]) {
    assert_eq!(got.len(), numeric.len(), "{name}");
    for (i, (got, numeric)) in got.iter().zip(numeric).enumerate() {
        let error = (got - numeric).abs();
        assert!(error <= 1e-7 * (1.0 + numeric.abs()), "{name}[{i}]: {got}, not {numeric}");
    }
}

/// `sum of a[i] * b[i]`: with the gradient of an output as `b`, the number that is differentiated.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(crate) fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().copied().map(f64::from).collect()
}

/// Asserts that `f` returns the same in pools of 1, 2, 3 and 64 threads.
#[track_caller]
pub(crate) fn assert_threads_do_not_matter<T: PartialEq + std::fmt::Debug + Send>(
    f: impl Fn() -> T + Sync,
) {
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(&f)
    };
    let one = with(1);
    assert_eq!(with(2), one, "2 threads");
    assert_eq!(with(3), one, "3 threads");
    assert_eq!(with(64), one, "64 threads");
}
