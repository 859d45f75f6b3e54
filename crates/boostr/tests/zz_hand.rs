//! By hand.
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};
use boostr::backend::{Cpu, cpu};
use boostr::checkpoint::Checkpoint;
use boostr::convert::{Options, Types, convert};
use boostr::load::LanguageModel;
use boostr::models::{Logits, Run};
use boostr::ops::to_vec;

fn diff(model: &Path, golden: &Path) -> Option<f64> {
    let lm = match LanguageModel::<Cpu>::open(model, &Default::default(), cpu()) {
        Ok(lm) => lm,
        Err(e) => { println!("{}: {e}", model.display()); return None; }
    };
    let file = Checkpoint::open(golden, false).unwrap();
    let data = |name: &str| file.get(name).map(|t| t.data.as_chunks::<8>().0.to_vec());
    let ids: Vec<u32> = data("input_ids").unwrap().into_iter().map(|b| i64::from_le_bytes(b) as u32).collect();
    let want: Vec<f64> = data("noclamp.logits_f64").or(data("logits_f64")).unwrap().into_iter().map(f64::from_le_bytes).collect();
    let mut state = lm.model.new_state().unwrap();
    let mut run = [Run { tokens: &ids, state: &mut state }];
    let got = to_vec(&lm.model.forward(&mut run, Logits::All).unwrap()).unwrap();
    assert_eq!(got.len(), want.len());
    Some(got.iter().zip(&want).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max))
}

#[test]
fn by_hand() {
    let base = Path::new("/work/scratch/f3");
    let fix = Path::new("/work/shared/fixtures/models");
    let mut list: Vec<(PathBuf, PathBuf)> = Vec::new();
    for n in ["latent", "groups", "mixed", "dense"] {
        let d = base.join(format!("var-{n}"));
        list.push((d.clone(), d.join("golden.safetensors")));
    }
    for n in ["nemotron-h-tiny", "nemotron-h-moe-tiny"] {
        list.push((fix.join(n), fix.join(n).join("golden.safetensors")));
    }
    for orig in ["True", "False"] {
        list.push((base.join(format!("resaved-nemotron-h-moe-tiny-{orig}")), fix.join("nemotron-h-moe-tiny/golden.safetensors")));
    }
    for n in ["nemotron-h-tiny", "nemotron-h-moe-tiny"] {
        list.push((base.join(format!("gguf/{n}-theirs-f32.gguf")), fix.join(n).join("golden.safetensors")));
    }
    for (model, golden) in list {
        println!("{}: {:?}", model.display(), diff(&model, &golden));
        let name = model.file_name().unwrap().to_string_lossy().into_owned();
        if name.ends_with(".gguf") { continue; }
        for dtype in ["f32", "q8_0"] {
            let out = base.join(format!("gguf/{name}-ours-{dtype}.gguf"));
            let options = Options { types: Types::named(dtype).unwrap(), overwrite: true, ..Options::default() };
            match convert(&model, &out, &options, &mut |_, _| Continue(())) {
                Ok(c) => println!("   {dtype}: {:?} {:?}", diff(&out, &golden), c.warnings),
                Err(e) => println!("   {dtype}: {e}"),
            }
        }
    }
}
