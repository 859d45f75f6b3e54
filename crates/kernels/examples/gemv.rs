use boostr_kernels::*;
use std::time::Instant;
fn main() {
    let threads: usize = std::env::args().nth(1).map_or(1, |s| s.parse().unwrap());
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().unwrap();
    let (k, n) = (768, 100576);
    let a: Vec<f32> = (0..k).map(|i| (i % 7) as f32 - 3.0).collect();
    let wb: Vec<u16> = (0..n*k).map(|i| ((i % 5) as f32 - 2.0).to_bits().wrapping_shr(16) as u16).collect();
    let mem = vec![1.0f32; 1<<26];
    let mut c = vec![0.0; n];
    let mut r = vec![]; let mut gb=0.0f64; let mut rb=0.0f64;
    for _ in 0..15 {
        let t=Instant::now(); std::hint::black_box(probe::read(&mem)); let rd = mem.len() as f64*4.0/1e9/t.elapsed().as_secs_f64();
        let t=Instant::now(); linear(Rows::dense(&a,k), Weights::Bf16(&wb), &mut c); let g = (n*k*2) as f64/1e9/t.elapsed().as_secs_f64();
        r.push(g/rd); gb=gb.max(g); rb=rb.max(rd);
    }
    r.sort_by(f64::total_cmp);
    println!("bf16 gemv ratio {:.3} best {gb:.1} of read {rb:.1}", r[7]);
}
