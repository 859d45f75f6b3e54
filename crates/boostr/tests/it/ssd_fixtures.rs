//! All SSD fixtures (float64, per-token recurrence) on the trait: portable bodies and CPU kernels.

use std::path::Path;

use boostr::backend::{Cpu, CpuClient, Tensor};
use boostr::checkpoint::Checkpoint;
use boostr::ops::{Client, Decay, SsdInput, SsmKernelOps, generic, tensor, to_vec};
use boostr_kernels::Rows;
use boostr_kernels::ssd::{Ssd, SsdGradients, ssd_backward};

use crate::common::cpu;

/// The bound that the fixtures suggest: |got - want| <= 1e-5 (1 + max |want|).
const TOLERANCE: f64 = 1e-5;

const CASES: [&str; 13] = [
    "dt_limit",
    "exact_chunks",
    "groups_eq_heads",
    "mixed_decay",
    "model_like",
    "no_softplus",
    "odd_sizes",
    "one_token",
    "packed",
    "ragged_tail",
    "shorter_than_chunk",
    "strong_decay",
    "weak_decay_long",
];

struct Case {
    name: &'static str,
    file: Checkpoint,
    client: CpuClient,
    chunk_size: usize,
    dt_softplus: bool,
    dt_limit: (f32, f32),
}

impl Case {
    fn open(name: &'static str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/ssd");
        let file = Checkpoint::open(&folder.join(format!("{name}.safetensors")), false).unwrap();
        let meta = file.metadata().clone();
        let limit: Vec<f32> = meta["dt_limit"]
            .trim_matches(['[', ']'])
            .split(", ")
            .map(|x| x.trim_matches('"').parse().unwrap())
            .collect();
        Self {
            name,
            client: cpu(),
            chunk_size: meta["chunk_size"].parse().unwrap(),
            dt_softplus: meta["dt_softplus"] == "true",
            dt_limit: (limit[0], limit[1]),
            file,
        }
    }

    fn shape(&self, name: &str) -> Vec<usize> {
        self.file.get(name).unwrap().shape.clone()
    }

    fn maybe(&self, name: &str) -> Option<Tensor<Cpu>> {
        let entry = self.file.get(name)?;
        Some(tensor(&self.client, &entry.to_f32().unwrap(), &entry.shape).unwrap())
    }

    fn input(&self, name: &str) -> Tensor<Cpu> {
        self.maybe(name).unwrap_or_else(|| panic!("{}: no {name}", self.name))
    }

    fn want(&self, name: &str) -> Vec<f64> {
        let entry = self.file.get(name).unwrap();
        entry.data.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
    }

    #[track_caller]
    fn check(&self, what: &str, got: &Tensor<Cpu>) {
        assert_eq!(got.shape(), self.shape(what), "{}: {what}", self.name);
        self.check_values(what, &to_vec(got).unwrap());
    }

    #[track_caller]
    fn check_values(&self, what: &str, got: &[f32]) {
        let want = self.want(what);
        assert_eq!(got.len(), want.len());
        let bound = TOLERANCE * (1.0 + want.iter().fold(0.0f64, |m, w| m.max(w.abs())));
        for (i, (&got, want)) in got.iter().zip(&want).enumerate() {
            let error = (f64::from(got) - want).abs();
            assert!(error <= bound, "{}: {what}[{i}] = {got}, not {want}", self.name);
        }
    }

    /// Lengths of the runs in batch row `row`, from seq_idx.
    fn runs(&self, seqlen: usize) -> Vec<usize> {
        let Some(entry) = self.file.get("in.seq_idx") else { return vec![seqlen] };
        let labels: Vec<&[u8; 4]> = entry.data.as_chunks().0.iter().collect();
        labels.chunk_by(|a, b| a == b).map(<[_]>::len).collect()
    }
}

#[derive(Clone, Copy)]
enum Bodies {
    Portable,
    Kernels,
}

fn stages(case: &Case, bodies: Bodies) {
    let client = &case.client;
    let (x, b, c, a) =
        (case.input("in.x"), case.input("in.B"), case.input("in.C"), case.input("in.A"));
    let (mut dt, d, mut bias) = (case.input("in.dt"), case.maybe("in.D"), case.maybe("in.dt_bias"));
    let (q, mut softplus) = (case.chunk_size, case.dt_softplus);
    if case.dt_limit != (0.0, f32::INFINITY) {
        // The stage knows no limit: it is given steps that went through it.
        (dt, bias, softplus) = (case.input("out.dt"), None, false);
    }
    let (d, bias) = (d.as_ref(), bias.as_ref());
    let (y, z);
    match bodies {
        Bodies::Portable => {
            let (steps, sums) =
                generic::ssd_chunk_cumsum(client.library(), &dt, &a, bias, q, softplus).unwrap();
            case.check("stage.dt_out", &steps);
            case.check("stage.dA_cumsum", &sums);
            let own = generic::ssd_chunk_state(client.library(), &x, &b, &steps, &sums).unwrap();
            case.check("stage.chunk_states", &own);
            let passed = generic::ssd_state_passing(client.library(), &own, &sums).unwrap();
            case.check("stage.passed_states", &passed);
            y = generic::ssd_chunk_scan(client.library(), &x, &passed, &c, &sums, d).unwrap();
            z = generic::ssd_chunk_intra(client.library(), &x, &b, &c, &steps, &sums).unwrap();
        }
        Bodies::Kernels => {
            let (steps, sums) = client.ssd_chunk_cumsum(&dt, &a, bias, q, softplus).unwrap();
            case.check("stage.dt_out", &steps);
            case.check("stage.dA_cumsum", &sums);
            let own = client.ssd_chunk_state(&x, &b, &steps, &sums).unwrap();
            case.check("stage.chunk_states", &own);
            let passed = client.ssd_state_passing(&own, &sums).unwrap();
            case.check("stage.passed_states", &passed);
            y = client.ssd_chunk_scan(&x, &passed, &c, &sums, d).unwrap();
            z = client.ssd_chunk_intra(&x, &b, &c, &steps, &sums).unwrap();
        }
    }
    case.check("stage.scan_inter", &y);
    case.check("stage.scan_intra", &z);
    let sum: Vec<f32> =
        to_vec(&y).unwrap().iter().zip(to_vec(&z).unwrap()).map(|(y, z)| y + z).collect();
    case.check_values("out.y", &sum);
}

/// The batch as runs of one call: rows one after another, cut where a sequence begins.
fn whole(case: &Case, bodies: Bodies) {
    let client = &case.client;
    let shape = case.shape("in.x");
    let (batch, seqlen, nheads, headdim) = (shape[0], shape[1], shape[2], shape[3]);
    let bc = case.shape("in.B");
    let tokens = batch * seqlen;
    let flat = |name: &str, inner: &[usize]| {
        case.maybe(name).map(|x| x.reshape(&[&[tokens], inner].concat()).unwrap())
    };
    let x = flat("in.x", &[nheads, headdim]).unwrap();
    let dt = flat("in.dt", &[nheads]).unwrap();
    let b = flat("in.B", &bc[2..]).unwrap();
    let c = flat("in.C", &bc[2..]).unwrap();
    let z = flat("in.z", &[nheads, headdim]);
    let (a, d, bias) = (case.input("in.A"), case.maybe("in.D"), case.maybe("in.dt_bias"));
    let a = Decay::new(a).unwrap();
    let input = SsdInput::new(&x, &dt, &a, &b, &c)
        .dt_bias(bias.as_ref())
        .d(d.as_ref())
        .z(z.as_ref())
        .dt_softplus(case.dt_softplus)
        .dt_limit(case.dt_limit);
    let runs: Vec<usize> = (0..batch).flat_map(|_| case.runs(seqlen)).collect();
    let per_row = runs.len() / batch;
    let state_shape = [nheads, headdim, bc[3]];
    let zeros =
        Tensor::<Cpu>::zeros(&state_shape, numr::dtype::DType::F32, &Default::default()).unwrap();
    let initial = case.maybe("in.initial_states");
    let mut states: Vec<Tensor<Cpu>> = (0..runs.len())
        .map(|run| match &initial {
            Some(initial) if run % per_row == 0 => {
                initial.narrow(0, run / per_row, 1).unwrap().squeeze(Some(0))
            }
            _ => zeros.clone(),
        })
        .collect();
    let mut views: Vec<&mut Tensor<Cpu>> = states.iter_mut().collect();
    let y = match bodies {
        Bodies::Portable => generic::ssd(client.library(), &input, &runs, &mut views),
        Bodies::Kernels => client.ssd(&input, &runs, &mut views),
    }
    .unwrap();
    case.check_values("out.y", &to_vec(&y).unwrap());
    // The fixture keeps the state of each row's last sequence.
    let last: Vec<f32> =
        (0..batch).flat_map(|row| to_vec(&states[(row + 1) * per_row - 1]).unwrap()).collect();
    case.check_values("out.final_state", &last);
    if let Some(initial) = initial {
        case.check_unchanged(&initial);
    }
}

impl Case {
    /// States that were lent as views of one tensor must have been copied before they were written.
    #[track_caller]
    fn check_unchanged(&self, initial: &Tensor<Cpu>) {
        let want = self.file.get("in.initial_states").unwrap().to_f32().unwrap();
        assert_eq!(to_vec(initial).unwrap(), want, "{}: initial states", self.name);
    }
}

#[test]
fn stages_equal_the_recurrence_in_both_bodies() {
    let mut tested = 0;
    for name in CASES {
        let case = Case::open(name);
        if case.file.get("stage.dt_out").is_some() {
            stages(&case, Bodies::Portable);
            stages(&case, Bodies::Kernels);
            tested += 1;
        }
    }
    assert!(tested >= 5, "only {tested} fixtures hold stages");
}

#[test]
fn the_whole_equals_the_recurrence_in_both_bodies() {
    for name in CASES {
        let case = Case::open(name);
        whole(&case, Bodies::Portable);
        whole(&case, Bodies::Kernels);
    }
}

/// The bound that the fixtures suggest for gradients.
const GRADIENT_TOLERANCE: f64 = 1e-4;

#[test]
fn gradients_are_those_of_the_recurrence() {
    for name in CASES {
        let case = Case::open(name);
        let shape = case.shape("in.x");
        let (batch, seqlen, nheads, headdim) = (shape[0], shape[1], shape[2], shape[3]);
        let [ngroups, dstate] = [case.shape("in.B")[2], case.shape("in.B")[3]];
        let values = |name: &str| case.file.get(name).map(|entry| entry.to_f32().unwrap());
        let of = |name: &str| values(name).unwrap();
        let [x, dt, a, b, c] = ["in.x", "in.dt", "in.A", "in.B", "in.C"].map(of);
        let [z, dt_bias, d] = ["in.z", "in.dt_bias", "in.D"].map(values);
        let (width, state_len) = (nheads * headdim, nheads * headdim * dstate);
        let input = Ssd {
            level: cpu().level(),
            nheads,
            headdim,
            ngroups,
            dstate,
            x: Rows::dense(&x, width),
            dt: Rows::dense(&dt, nheads),
            a: &a,
            b: Rows::dense(&b, ngroups * dstate),
            c: Rows::dense(&c, ngroups * dstate),
            dt_bias: dt_bias.as_deref(),
            d: d.as_deref(),
            z: z.as_deref().map(|z| Rows::dense(z, width)),
            dt_softplus: case.dt_softplus,
            dt_limit: case.dt_limit,
        };
        // A row's first sequence has its initial state, its last one its final state.
        let own = case.runs(seqlen);
        let runs = own.repeat(batch);
        let initial = values("in.initial_states").unwrap_or_else(|| vec![0.0; batch * state_len]);
        let last = of("in.grad_final_state");
        let (mut states, mut dstates) = (Vec::new(), Vec::new());
        for row in 0..batch {
            let part = |all: &[f32]| all[row * state_len..][..state_len].to_vec();
            for run in 0..own.len() {
                let zeros = vec![0.0; state_len];
                states.push(if run == 0 { part(&initial) } else { zeros.clone() });
                dstates.push(if run + 1 == own.len() { part(&last) } else { zeros });
            }
        }
        let states: Vec<&[f32]> = states.iter().map(Vec::as_slice).collect();
        let mut of_states: Vec<&mut [f32]> = dstates.iter_mut().map(Vec::as_mut_slice).collect();
        let zeros = |x: &[f32]| vec![0.0; x.len()];
        let [mut dx, mut ddt, mut da, mut db, mut dc] = [&x, &dt, &a, &b, &c].map(|x| zeros(x));
        let [mut dz, mut ddt_bias, mut dd] = [&z, &dt_bias, &d].map(|x| x.as_deref().map(zeros));
        let dout = of("in.grad_y");
        let out = SsdGradients {
            dx: &mut dx,
            ddt: &mut ddt,
            db: &mut db,
            dc: &mut dc,
            dz: dz.as_deref_mut(),
            da: &mut da,
            ddt_bias: ddt_bias.as_deref_mut(),
            dd: dd.as_deref_mut(),
        };
        ssd_backward(&input, &runs, &states, Rows::dense(&dout, width), &mut of_states, out);
        let firsts: Vec<f32> = dstates.iter().step_by(own.len()).flatten().copied().collect();
        let initial = case.file.get("in.initial_states").map(|_| firsts);
        let got = [
            ("grad.x", Some(dx)),
            ("grad.dt", Some(ddt)),
            ("grad.A", Some(da)),
            ("grad.B", Some(db)),
            ("grad.C", Some(dc)),
            ("grad.z", dz),
            ("grad.dt_bias", ddt_bias),
            ("grad.D", dd),
            ("grad.initial_states", initial),
        ];
        for (what, got) in got {
            let Some(got) = got else { continue };
            let want = case.want(what);
            assert_eq!(got.len(), want.len(), "{name}: {what}");
            let most = want.iter().fold(0.0f64, |most, w| most.max(w.abs()));
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let error = (f64::from(*got) - want).abs();
                let bound = GRADIENT_TOLERANCE * (1.0 + most);
                assert!(error <= bound, "{name}: {what}[{i}] = {got}, not {want}");
            }
        }
    }
}
