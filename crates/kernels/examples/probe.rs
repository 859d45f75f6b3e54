use boostr_kernels::*;
use std::time::Instant;
fn med(mut f: impl FnMut(), n: usize) -> f64 {
    let mut v: Vec<f64> = (0..n)
        .map(|_| {
            let t = Instant::now();
            f();
            t.elapsed().as_secs_f64()
        })
        .collect();
    v.sort_by(f64::total_cmp);
    v[0]
}
fn gemm_nt(m: usize, n: usize, k: usize, a: &[f32], w: &[f32], c: &mut [f32], par: bool) {
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr(),
            1,
            n as isize,
            false,
            a.as_ptr(),
            1,
            k as isize,
            w.as_ptr(),
            k as isize,
            1,
            0.0f32,
            1.0f32,
            false,
            false,
            false,
            if par { gemm::Parallelism::Rayon(0) } else { gemm::Parallelism::None },
        )
    }
}
fn ssd_probe(gf: f64) {
    use boostr_kernels::ssd::*;
    let (l, h, p, g, n) = (2048, 24, 64, 1, 128);
    let f = |k: usize, n: usize| -> Vec<f32> {
        (0..n).map(|i| ((i * k) % 17) as f32 / 17.0 - 0.5).collect()
    };
    let w = h * p + 2 * g * n;
    let xbc = f(3, l * w);
    let dt = f(5, l * h);
    let a: Vec<f32> = (0..h).map(|i| -(i as f32 + 1.0)).collect();
    let d = f(7, h);
    let r = Rows::dense(&xbc, w);
    let input = Ssd {
        nheads: h,
        headdim: p,
        ngroups: g,
        dstate: n,
        x: r.columns(0, h * p),
        b: r.columns(h * p, g * n),
        c: r.columns(h * p + g * n, g * n),
        dt: Rows::dense(&dt, h),
        a: &a,
        dt_bias: None,
        d: Some(&d),
        z: None,
        dt_softplus: true,
        dt_limit: (0.0, f32::INFINITY),
    };
    let mut s = vec![0.0; h * p * n];
    let mut y = vec![0.0; l * h * p];
    let ops = (4 * l * h * p * n + l * 64 * (g * n + h * p)) as f64 / 1e9;
    let (m, k, nn) = (1024, 1024, 1024);
    let a1 = f(3, m * k);
    let w1 = f(5, k * nn);
    let mut c1 = vec![0.0; m * nn];
    let par = rayon::current_num_threads() > 1;
    let mut rs = vec![];
    let _ = gf;
    for _ in 0..9 {
        let tg = med(|| gemm_nt(m, nn, k, &a1, &w1, &mut c1, par), 1);
        let t = med(|| ssd(&input, &[l], &mut [&mut s], &mut y), 1);
        rs.push(((ops / t) / (2.0 * (m * k * nn) as f64 / 1e9 / tg), ops / t, t));
    }
    rs.sort_by(|a, b| a.0.total_cmp(&b.0));
    println!("ssd: {:?}", rs[4]);
    let mut st = vec![vec![0f32; h * p * n]];
    let t = Instant::now();
    std::hint::black_box(recurrence(&input, &[l], &mut st));
    println!("recurrence {} s", t.elapsed().as_secs_f64());
}
fn main() {
    let threads: usize = std::env::args().nth(1).map_or(1, |s| s.parse().unwrap());
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().unwrap();
    if std::env::args().nth(2).is_none_or(|a| a != "g") { ssd_probe(0.0); }
    if std::env::args().nth(2).is_some_and(|a| a == "x") {
        return;
    }
    for _ in 0..1 {
        for (m, k, n) in [
            (1024, 1024, 1024),
            (512, 768, 3352),
            (512, 1536, 768),
            (16, 768, 3352),
            (4, 768, 3352),
        ] {
            let a: Vec<f32> = (0..m * k).map(|i| (i % 7) as f32 - 3.0).collect();
            let w: Vec<f32> = (0..n * k).map(|i| (i % 5) as f32 - 2.0).collect();
            let wb: Vec<u16> = w.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
            let mut c = vec![0.0; m * n];
            let fl = 2.0 * (m * k * n) as f64 / 1e9;
            let r = 15;
            let mut rf = vec![];
            let mut rb = vec![];
            let (mut tg, mut t, mut tb) = (1e9f64, 1e9f64, 1e9f64);
            for _ in 0..r {
                let g = med(|| gemm_nt(m, n, k, &a, &w, &mut c, threads > 1), 1);
                let f = med(|| linear(Rows::dense(&a, k), Weights::F32(&w), &mut c), 1);
                let b = med(|| linear(Rows::dense(&a, k), Weights::Bf16(&wb), &mut c), 1);
                let g2 = med(|| gemm_nt(m, n, k, &a, &w, &mut c, threads > 1), 1);
                tg = tg.min(g).min(g2);
                t = t.min(f);
                tb = tb.min(b);
                rf.push((g + g2) / 2.0 / f);
                rb.push((g + g2) / 2.0 / b);
            }
            rf.sort_by(f64::total_cmp);
            rb.sort_by(f64::total_cmp);
            println!(
                "{m}x{n}x{k}: gemm {:.1} ours f32 {:.1} bf16 {:.1} GF/s  ratio {:.2} {:.2}",
                fl / tg,
                fl / t,
                fl / tb,
                rf[r / 2],
                rb[r / 2]
            );
        }
        for (k, n) in [(768, 3352), (768, 50288)] {
            let a: Vec<f32> = (0..k).map(|i| (i % 7) as f32 - 3.0).collect();
            let w: Vec<f32> = (0..n * k).map(|i| (i % 5) as f32 - 2.0).collect();
            let wb: Vec<u16> = w.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
            let mut c = vec![0.0; n];
            let gb = (n * k * 4) as f64 / 1e9;
            let t = med(|| linear(Rows::dense(&a, k), Weights::F32(&w), &mut c), 21);
            let tb = med(|| linear(Rows::dense(&a, k), Weights::Bf16(&wb), &mut c), 21);
            let mut s = 0.0;
            let tr =
                med(|| s += w.chunks_exact(64).map(|c| c.iter().sum::<f32>()).sum::<f32>(), 11);
            println!(
                "gemv {k}x{n}: f32 {:.1} GB/s bf16 {:.1} GB/s naive read {:.1} {s}",
                gb / t,
                gb / 2.0 / tb,
                gb / tr
            );
        }
    }
}
