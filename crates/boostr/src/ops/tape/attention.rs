//! Attention and rotary positions.
//!
//! A cache of the tape keeps keys and values as tensors `[L, Hk, D]`, a new pair after each call: so
//! gradients go through what a sequence has kept as through any other tensor.

use boostr_kernels::{self as kernels, Rows, attention};
use numr::runtime::cpu::CpuRuntime;

use super::gradients::Gradients;
use super::{Cpu, Tape};
use crate::error::{Error, Result};
use crate::ops::attention::KvStorage;
use crate::ops::cpu::{per_head, with_rows};
use crate::ops::{
    ActivationOps, Attention, AttentionOps, KvCache, KvSizes, LatentAttention, Level, LinearOps,
    Rope, Weight, generic, host, split_last,
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
            let kept = tensors(cache)?;
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
        self.all_outs(&outs, [dims.tokens, dims.nheads, dims.sizes.d_value])
    }

    fn latent_attention(
        &self,
        input: &LatentAttention<'_, CpuRuntime>,
        runs: &[usize],
        caches: &mut [&mut KvCache<CpuRuntime>],
    ) -> Result<Cpu> {
        let dims = input.dims(runs, caches)?;
        let KvSizes { d_key, d_value: d_c, .. } = dims.sizes;
        let rows = self.concat_columns(input.c, input.k_pe)?; // [T, d_c + d_r]
        let mut outs = Vec::with_capacity(runs.len());
        let mut first = 0;
        for (&len, cache) in runs.iter().zip(caches).filter(|(len, _)| **len > 0) {
            let kept = tensors(cache)?;
            let part = |x: &Cpu| -> Result<Cpu> { Ok(x.narrow(0, first, len)?) };
            let [q_nope, q_pe, new] = [part(input.q_nope)?, part(input.q_pe)?, part(&rows)?];
            first += len;
            let old = kept.take().map(|[keys, _]| keys);
            let keys = self.all_rows(old.as_ref(), &split_last(&new, &[1, d_key])?)?;
            outs.push(self.attend_latent(input, [&q_nope, &q_pe, &keys], d_c)?);
            let values = keys.narrow(2, 0, d_c)?;
            *kept = Some([keys, values]);
        }
        self.all_outs(&outs, [dims.tokens, dims.nheads, dims.d_value])
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

/// The keys and values of a cache of the tape.
fn tensors(cache: &mut KvCache<CpuRuntime>) -> Result<&mut Option<[Cpu; 2]>> {
    match &mut cache.storage {
        KvStorage::Tensors(kept) => Ok(kept),
        KvStorage::Pages(_) => {
            Err(Error::Unsupported { what: "a cache of pages on a tape".into() })
        }
    }
}

/// The kernel of latent attention with these matrices.
fn latent_kernel(
    level: Level,
    nheads: usize,
    scale: f32,
    [w_uk, w_uv]: [&Weight<CpuRuntime>; 2],
) -> Result<attention::LatentAttention<'_>> {
    let (w_uk, w_uv) = (per_head("w_uk", w_uk)?, per_head("w_uv", w_uv)?);
    Ok(attention::LatentAttention { level, nheads, scale, w_uk, w_uv })
}

impl Tape {
    /// What all runs give, `[len, H d_value]` each, as `[T, H, d_value]`.
    fn all_outs(&self, outs: &[Cpu], [tokens, nheads, d_value]: [usize; 3]) -> Result<Cpu> {
        match outs {
            [] => {
                let out = host::zeros(&[tokens, nheads, d_value])?;
                self.add_constants(&[&out]);
                Ok(out)
            }
            [one] => split_last(one, &[nheads, d_value]),
            many => split_last(&self.concat_rows(many)?, &[nheads, d_value]),
        }
    }

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

    /// One sequence's queries `[len, H, d_nope]` and `[len, H, d_r]` with all rows `[L, 1, d_c + d_r]` that it has:
    /// `[len, H d_v]`.
    fn attend_latent(
        &self,
        input: &LatentAttention<'_, CpuRuntime>,
        [q_nope, q_pe, keys]: [&Cpu; 3],
        d_c: usize,
    ) -> Result<Cpu> {
        let (&[len, nheads, _], &[count, _, d_key]) = (q_nope.shape(), keys.shape()) else {
            return Err(crate::ops::shape_error("q_nope", &[0, 0, 0], q_nope.shape()));
        };
        let (d_v, d_r, kept) = (input.w_uv.shape()[1], d_key - d_c, count - len);
        let (level, scale) = (self.level(), input.scale);
        let mut out = host::zeros(&[len, nheads * d_v])?;
        {
            let [q_nope, q_pe] = [with_rows(q_nope)?, with_rows(q_pe)?];
            let rows = host::rows("keys", keys)?;
            let mut pages = attention::KvCache::latent(level, d_c, d_r, attention::KvType::F32);
            pages.append(rows.slice(0, kept), Rows::new(&[], kept, 0, 0, 0));
            let new = rows.slice(kept, len);
            attention::latent_attention(
                &latent_kernel(level, nheads, scale, [input.w_uk, input.w_uv])?,
                &attention::LatentInput {
                    q_nope: host::rows("q_nope", &q_nope)?,
                    q_pe: host::rows("q_pe", &q_pe)?,
                    c: new.columns(0, d_c),
                    k_pe: new.columns(d_c, d_r),
                },
                &[len],
                &mut [&mut pages],
                host::slice_mut("out", &mut out)?,
            );
        }
        let mut inputs = vec![("q_nope", q_nope), ("q_pe", q_pe), ("keys", keys)];
        inputs.extend(input.w_uk.floats().map(|w| ("w_uk", w)));
        inputs.extend(input.w_uv.floats().map(|w| ("w_uv", w)));
        let [q_nope, q_pe, keys] = [q_nope, q_pe, keys].map(Clone::clone);
        let (w_uk, w_uv) = (input.w_uk.clone(), input.w_uv.clone());
        self.record(&inputs, out, move |gradients, dout| {
            let [mut dq_nope, mut dq_pe, mut dkeys] =
                [&q_nope, &q_pe, &keys].map(|x| vec![0.0; x.numel()]);
            let wanted = |gradients: &Gradients, w: &Weight<CpuRuntime>| {
                w.floats().filter(|w| gradients.wants(w)).map(|w| vec![0.0; w.numel()])
            };
            let [mut dw_uk, mut dw_uv] = [wanted(gradients, &w_uk), wanted(gradients, &w_uv)];
            let [nope_rows, pe_rows] = [with_rows(&q_nope)?, with_rows(&q_pe)?];
            let rows = host::rows("keys", &keys)?;
            attention::latent_attention_backward(
                &latent_kernel(level, nheads, scale, [&w_uk, &w_uv])?,
                &attention::LatentInput {
                    q_nope: host::rows("q_nope", &nope_rows)?,
                    q_pe: host::rows("q_pe", &pe_rows)?,
                    c: rows.columns(0, d_c),
                    k_pe: rows.columns(d_c, d_r),
                },
                Rows::dense(&dout, nheads * d_v),
                attention::LatentGradients {
                    dq_nope: &mut dq_nope,
                    dq_pe: &mut dq_pe,
                    dkeys: &mut dkeys,
                    dw_uk: dw_uk.as_deref_mut(),
                    dw_uv: dw_uv.as_deref_mut(),
                },
            );
            for (w, dw) in [(&w_uk, dw_uk), (&w_uv, dw_uv)] {
                if let (Some(w), Some(dw)) = (w.floats(), dw) {
                    gradients.give(w, dw)?;
                }
            }
            gradients.give(&q_nope, dq_nope)?;
            gradients.give(&q_pe, dq_pe)?;
            gradients.give(&keys, dkeys)
        })
    }
}
