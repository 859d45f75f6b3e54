use boostr::backend::{DType, cpu};
use boostr::checkpoint::ConfigFile;
use boostr::models::mamba2::*;
use boostr_kernels::probe;
use std::time::Instant;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let threads: usize = a[1].parse().unwrap();
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().unwrap();
    let dt = if a.get(2).is_some_and(|s| s == "bf16") { DType::BF16 } else { DType::F32 };
    let json = r#"{"d_model": 768, "n_layer": 24, "vocab_size": 50277, "tie_embeddings": true, "pad_vocab_size_multiple": 16, "ssm_cfg": {"layer": "Mamba2"}}"#;
    let m = Mamba2::<boostr::backend::Cpu>::synthetic(
        Config::read(&ConfigFile::parse("x", json).unwrap()).unwrap(),
        dt,
        cpu(),
    )
    .unwrap();
    let ids: Vec<u32> = (0..512).map(|i: u32| i.wrapping_mul(2654435761) % 50277).collect();
    let mem = vec![1.0f32; 1 << 26];
    let nonemb = 24.0 * (3352.0 * 768.0 + 1536.0 * 768.0 + 1792.0 * 5.0);
    for _ in 0..5 {
        let t = Instant::now();
        let o = probe::multiply_adds(1 << 21);
        let fma = o / t.elapsed().as_secs_f64() / 1e9;
        let mut s = m.new_state().unwrap();
        let t = Instant::now();
        m.forward(&mut [Run { tokens: &ids, state: &mut s }], Logits::Last).unwrap();
        let e = t.elapsed().as_secs_f64();
        let gf = 2.0 * nonemb * 512.0 / e / 1e9;
        let t = Instant::now();
        std::hint::black_box(probe::read(&mem));
        let rd = 4.0 * mem.len() as f64 / t.elapsed().as_secs_f64() / 1e9;
        let t = Instant::now();
        for i in 0..8 {
            m.forward(&mut [Run { tokens: &ids[i..i + 1], state: &mut s }], Logits::Last).unwrap();
        }
        let e2 = t.elapsed().as_secs_f64() / 8.0;
        let gb = (m.weight_bytes() + 2 * s.size_in_bytes()) as f64 / e2 / 1e9;
        println!(
            "fma {fma:.0} prompt {:.0} tok/s {gf:.1} GF/s = {:.2} of fma | read {rd:.1} decode {:.1} tok/s {gb:.1} GB/s = {:.2}",
            512.0 / e,
            gf / fma,
            1.0 / e2,
            gb / rd
        );
    }
}
