//! Attention and rotary positions.
//!
//! A cache of the tape keeps keys and values as tensors `[L, Hk, D]`, a new pair after each call: so
//! gradients go through what a sequence has kept as through any other tensor.

use boostr_kernels::{self as kernels, Rows, attention};
use numr::runtime::cpu::CpuRuntime;

use super::{Cpu, Tape};
use crate::error::{Error, Result};
use crate::ops::attention::KvStorage;
use crate::ops::cpu::with_rows;
use crate::ops::{
    Attention, AttentionOps, KvCache, KvSizes, LatentAttention, LinearOps, Rope, generic, host,
    split_last,
};

impl AttentionOps<CpuRuntime> for Tape {
    fn new_cache(&self, sizes: KvSizes) -> Result<KvCache<CpuRuntime>> {
        generic::new_cache(sizes)
    }

    fn attention(
        &self,
        input: &Attention<'_, CpuRuntime>,
        runs: &[usize],
        caches: &mut [&mut KvCache<CpuRuntime>],
    ) -> Result<Cpu> {
        let dims = input.dims(runs, caches)?;
        let kernel = attention::Attention {
            level: self.level(),
            nheads: dims.nheads,
            scale: input.scale,
            window: input.window,
            softcap: input.softcap,
        };
        let mut outs = Vec::with_capacity(runs.len());
        let mut first = 0;
        for (&len, cache) in runs.iter().zip(caches).filter(|(len, _)| **len > 0) {
            let KvStorage::Tensors(kept) = &mut cache.storage else {
                let what = "a cache of pages on a tape".into();
                return Err(Error::Unsupported { what });
            };
            let part = |x: &Cpu| -> Result<Cpu> { Ok(x.narrow(0, first, len)?) };
            let [q, k, v] = [part(input.q)?, part(input.k)?, part(input.v)?];
            first += len;
            let old = kept.take();
            let [keys, values] = match old {
                None => [self.all_rows(None, &k)?, self.all_rows(None, &v)?],
                Some([keys, values]) => {
                    [self.all_rows(Some(&keys), &k)?, self.all_rows(Some(&values), &v)?]
                }
            };
            outs.push(self.attend(kernel, [&q, &keys, &values])?);
            *kept = Some([keys, values]);
        }
        let [nheads, d_value] = [dims.nheads, dims.sizes.d_value];
        match &outs[..] {
            [] => {
                let out = host::zeros(&[dims.tokens, nheads, d_value])?;
                self.add_constants(&[&out]);
                Ok(out)
            }
            [one] => split_last(one, &[nheads, d_value]),
            many => split_last(&self.concat_rows(many)?, &[nheads, d_value]),
        }
    }

    fn latent_attention(
        &self,
        _: &LatentAttention<'_, CpuRuntime>,
        _: &[usize],
        _: &mut [&mut KvCache<CpuRuntime>],
    ) -> Result<Cpu> {
        Err(Error::Unsupported { what: "gradients of latent attention".into() })
    }

    fn rope(&self, x: &Cpu, positions: &[usize], rope: &Rope) -> Result<Cpu> {
        let out = self.inner.rope(x, positions, rope)?;
        let (saved, positions, rope) = (x.clone(), positions.to_vec(), rope.clone());
        self.record(&[("x", x)], out, move |gradients, dout| {
            let &[_, nheads, headdim] = saved.shape() else { return Ok(()) };
            let mut dx = vec![0.0; dout.len()];
            let dout = Rows::dense(&dout, nheads * headdim);
            kernels::rope_backward(dout, nheads, headdim, &positions, &rope, &mut dx);
            gradients.give(&saved, dx)
        })
    }
}

impl Tape {
    /// What a sequence has kept, and the new rows `x` `[len, Hk, D]` after it: `[L, Hk, D]`.
    fn all_rows(&self, kept: Option<&Cpu>, x: &Cpu) -> Result<Cpu> {
        let &[len, nheads, width] = x.shape() else {
            return Err(crate::ops::shape_error("x", &[0, 0, 0], x.shape()));
        };
        let before = kept.map_or(0, |kept| kept.shape()[0]);
        let mut out = host::zeros(&[before + len, nheads, width])?;
        let to = host::slice_mut("out", &mut out)?;
        let (old, new) = to.split_at_mut(before * nheads * width);
        if let Some(kept) = kept {
            old.copy_from_slice(host::slice("kept", kept)?);
        }
        let rows = with_rows(x)?;
        let rows = host::rows("x", &rows)?;
        for (t, to) in new.chunks_exact_mut(nheads * width).enumerate() {
            to.copy_from_slice(rows.row(t));
        }
        // What was kept may be of before the recording.
        let mut inputs = vec![("x", x)];
        inputs.extend(kept.filter(|kept| self.is_carried(kept)).map(|kept| ("kept", kept)));
        let (x, kept) = (x.clone(), kept.cloned());
        self.record(&inputs, out, move |gradients, dout| {
            let (of_kept, of_x) = dout.split_at(dout.len() - x.numel());
            if let Some(kept) = kept {
                gradients.give(&kept, of_kept.to_vec())?;
            }
            gradients.give(&x, of_x.to_vec())
        })
    }

    /// One sequence's queries `[len, H, d_key]` with all keys and values that it has: `[len, H d_value]`.
    fn attend(&self, kernel: attention::Attention, [q, keys, values]: [&Cpu; 3]) -> Result<Cpu> {
        let (&[len, nheads, _], &[count, nheads_kv, d_value]) = (q.shape(), values.shape()) else {
            return Err(crate::ops::shape_error("q", &[0, 0, 0], q.shape()));
        };
        let q_rows = with_rows(q)?;
        let [k_rows, v_rows] = [host::rows("keys", keys)?, host::rows("values", values)?];
        let kept = count - len;
        let (d_key, kind) = (keys.shape()[2], attention::KvType::F32);
        let mut pages = attention::KvCache::new(kernel.level, nheads_kv, d_key, d_value, kind);
        pages.append(k_rows.slice(0, kept), v_rows.slice(0, kept));
        let mut out = host::zeros(&[len, nheads * d_value])?;
        attention::attention(
            &kernel,
            host::rows("q", &q_rows)?,
            k_rows.slice(kept, len),
            v_rows.slice(kept, len),
            &[len],
            &mut [&mut pages],
            host::slice_mut("out", &mut out)?,
        );
        let inputs = [("q", q), ("keys", keys), ("values", values)];
        let (result, [q, keys, values]) = (out.clone(), [q, keys, values].map(Clone::clone));
        self.record(&inputs, out, move |gradients, dout| {
            let q_rows = with_rows(&q)?;
            let [mut dq, mut dk, mut dv] = [&q, &keys, &values].map(|x| vec![0.0; x.numel()]);
            let input = attention::AttentionInput {
                nheads_kv,
                q: host::rows("q", &q_rows)?,
                keys: &[host::rows("keys", &keys)?],
                values: &[host::rows("values", &values)?],
                out: host::rows("out", &result)?,
            };
            let to = attention::AttentionGradients {
                dq: &mut dq,
                dk: &mut [&mut dk],
                dv: &mut [&mut dv],
            };
            let dout = Rows::dense(&dout, nheads * d_value);
            attention::attention_backward(&kernel, &input, &[len], dout, to);
            gradients.give(&q, dq)?;
            gradients.give(&keys, dk)?;
            gradients.give(&values, dv)
        })
    }
}
