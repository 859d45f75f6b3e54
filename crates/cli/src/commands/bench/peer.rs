//! The `gemm` crate, called as the measure of what matrix products can reach on this machine.

/// `c = a · b` for square row-major matrices of `n`, on the threads of the current pool.
///
/// # Panics
///
/// If a slice is not `n * n` long.
pub fn square_product(n: usize, a: &[f32], b: &[f32], c: &mut [f32]) {
    assert!(a.len() == n * n && b.len() == n * n && c.len() == n * n, "matrices of {n}");
    let threads = rayon::current_num_threads();
    let parallelism =
        if threads == 1 { gemm::Parallelism::None } else { gemm::Parallelism::Rayon(threads) };
    let stride = n.cast_signed();
    #[expect(unsafe_code, reason = "the gemm crate has no other entry")]
    // SAFETY: the three slices hold n rows of n elements (asserted), which is what these strides
    // address; `c` is borrowed mutably, so it overlaps neither `a` nor `b`.
    unsafe {
        gemm::gemm(
            n,
            n,
            n,
            c.as_mut_ptr(),
            1,
            stride,
            false,
            a.as_ptr(),
            1,
            stride,
            b.as_ptr(),
            1,
            stride,
            0.0f32,
            1.0f32,
            false,
            false,
            false,
            parallelism,
        );
    }
}
