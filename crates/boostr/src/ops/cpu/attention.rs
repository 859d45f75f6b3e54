//! Attention and elementwise steps on the CPU.

use boostr_kernels::{self as kernels, Level, Weights, activation, attention};
use numr::runtime::cpu::CpuRuntime;

use super::{Cpu, KernelClient, contiguous, elements, with_rows};
use crate::error::{Error, Result};
use crate::ops::activation::{check_add_rows, check_columns, check_pair};
use crate::ops::attention::{KvStorage, check_bounds, check_rope};
use crate::ops::weight::Storage;
use crate::ops::{
    Activation, ActivationOps, Attention, AttentionOps, KvCache, KvSizes, LatentAttention, Rope,
    Weight, expect, host, shape_error,
};

/// Refuses pages for instructions of another level.
fn check_level(level: Level, pages: &attention::KvCache) -> Result<()> {
    let found = pages.level();
    if found == level {
        return Ok(());
    }
    let reason = format!("expected pages of level {level}, found {found}");
    Err(Error::Argument { name: "caches", reason })
}

/// The kernel's own caches, which are pages for instructions of one level.
fn pages<'a>(
    level: Level,
    caches: &'a mut [&mut KvCache<CpuRuntime>],
) -> Result<Vec<&'a mut attention::KvCache>> {
    let pages = caches.iter_mut().map(|cache| match &mut cache.storage {
        KvStorage::Pages(pages) => check_level(level, pages).map(|()| pages),
        KvStorage::Tensors(_) => {
            let what = "a cache of tensors in the CPU's attention".into();
            Err(Error::Unsupported { what })
        }
    });
    pages.collect()
}

/// The elements of a weight that has one matrix for each head.
pub fn per_head<'a>(name: &str, w: &'a Weight<CpuRuntime>) -> Result<Weights<'a>> {
    match &w.storage {
        Storage::Dense(w, _) => elements(w),
        Storage::Packed(_) => {
            let what = format!("quantized blocks as {name} of the CPU's latent attention");
            Err(Error::Unsupported { what })
        }
    }
}

impl<C: KernelClient> AttentionOps<CpuRuntime> for C {
    fn new_cache(&self, sizes: KvSizes) -> Result<KvCache<CpuRuntime>> {
        KvCache::pages(self.level(), sizes)
    }

    fn check_cache(&self, cache: &KvCache<CpuRuntime>) -> Result<()> {
        match &cache.storage {
            KvStorage::Pages(pages) => check_level(self.level(), pages),
            KvStorage::Tensors(_) => Ok(()),
        }
    }

    fn attention(
        &self,
        input: &Attention<'_, CpuRuntime>,
        runs: &[usize],
        caches: &mut [&mut KvCache<CpuRuntime>],
    ) -> Result<Cpu> {
        let dims = input.dims(runs, caches)?;
        let [q, k, v] = [with_rows(input.q)?, with_rows(input.k)?, with_rows(input.v)?];
        let (keys, values) = (host::rows("k", &k)?, host::rows("v", &v)?);
        check_bounds(caches, runs, &[("keys", keys), ("values", values)])?;
        let mut pages = pages(self.level(), caches)?;
        let kernel = attention::Attention {
            level: self.level(),
            nheads: dims.nheads,
            scale: input.scale,
            window: input.window,
            softcap: input.softcap,
        };
        let mut out = host::zeros(&[dims.tokens, dims.nheads, dims.sizes.d_value])?;
        attention::attention(
            &kernel,
            host::rows("q", &q)?,
            keys,
            values,
            runs,
            &mut pages,
            host::slice_mut("out", &mut out)?,
        );
        Ok(out)
    }

    fn latent_attention(
        &self,
        input: &LatentAttention<'_, CpuRuntime>,
        runs: &[usize],
        caches: &mut [&mut KvCache<CpuRuntime>],
    ) -> Result<Cpu> {
        let dims = input.dims(runs, caches)?;
        let [q_nope, q_pe] = [with_rows(input.q_nope)?, with_rows(input.q_pe)?];
        let [c, k_pe] = [with_rows(input.c)?, with_rows(input.k_pe)?];
        let (channels, rotated) = (host::rows("c", &c)?, host::rows("k_pe", &k_pe)?);
        let added = [("compressed keys and values", channels), ("keys", rotated)];
        check_bounds(caches, runs, &added)?;
        let mut pages = pages(self.level(), caches)?;
        let kernel = attention::LatentAttention {
            level: self.level(),
            nheads: dims.nheads,
            scale: input.scale,
            w_uk: per_head("w_uk", input.w_uk)?,
            w_uv: per_head("w_uv", input.w_uv)?,
        };
        let mut out = host::zeros(&[dims.tokens, dims.nheads, dims.d_value])?;
        let tokens = attention::LatentInput {
            q_nope: host::rows("q_nope", &q_nope)?,
            q_pe: host::rows("q_pe", &q_pe)?,
            c: channels,
            k_pe: rotated,
        };
        let to = host::slice_mut("out", &mut out)?;
        attention::latent_attention(&kernel, &tokens, runs, &mut pages, to);
        Ok(out)
    }

    fn rope(&self, x: &Cpu, positions: &[usize], rope: &Rope) -> Result<Cpu> {
        let (tokens, nheads, headdim) = check_rope(x, positions, rope)?;
        let x = with_rows(x)?;
        let mut out = host::zeros(&[tokens, nheads, headdim])?;
        let to = host::slice_mut("out", &mut out)?;
        kernels::rope(host::rows("x", &x)?, nheads, headdim, positions, rope, to);
        Ok(out)
    }
}

impl<C: KernelClient> ActivationOps<CpuRuntime> for C {
    fn glu(&self, act: Activation, gate: &Cpu, up: &Cpu) -> Result<Cpu> {
        let (tokens, width) = check_pair(["gate", "up"], gate, up)?;
        let [gate, up] = [with_rows(gate)?, with_rows(up)?];
        let mut out = host::zeros(&[tokens, width])?;
        let to = host::slice_mut("out", &mut out)?;
        activation::glu(self.level(), act, host::rows("gate", &gate)?, host::rows("up", &up)?, to);
        Ok(out)
    }

    fn activate(&self, act: Activation, x: &Cpu) -> Result<Cpu> {
        let (tokens, width) = check_pair(["x", "x"], x, x)?;
        let x = with_rows(x)?;
        let mut out = host::zeros(&[tokens, width])?;
        activation::activate(
            self.level(),
            act,
            host::rows("x", &x)?,
            host::slice_mut("out", &mut out)?,
        );
        Ok(out)
    }

    fn add_scaled(&self, mut to: Cpu, x: &Cpu, factor: f32) -> Result<Cpu> {
        check_pair(["to", "x"], &to, x)?;
        let x = with_rows(x)?;
        activation::add_scaled(host::slice_mut("to", &mut to)?, host::rows("x", &x)?, factor);
        Ok(to)
    }

    fn scale_columns(&self, x: &Cpu, factors: &Cpu) -> Result<Cpu> {
        let &[tokens, width] = x.shape() else {
            return Err(shape_error("x", &[0, 0], x.shape()));
        };
        expect("x", x, &[tokens, width])?;
        expect("factors", factors, &[width])?;
        let x = with_rows(x)?;
        let [factors] = contiguous([factors])?;
        let mut out = host::zeros(&[tokens, width])?;
        let to = host::slice_mut("out", &mut out)?;
        activation::scale_columns(host::rows("x", &x)?, host::slice("factors", &factors)?, to);
        Ok(out)
    }

    fn add_rows(&self, mut to: Cpu, x: &Cpu, rows: &[usize], factors: &Cpu) -> Result<Cpu> {
        let width = check_add_rows(&to, x, rows, factors)?;
        let x = with_rows(x)?;
        let x = host::rows("x", &x)?;
        let [factors] = contiguous([factors])?;
        let factors = host::slice("factors", &factors)?;
        let sums = host::slice_mut("to", &mut to)?;
        for (i, (&row, &factor)) in rows.iter().zip(factors).enumerate() {
            let to = &mut sums[row * width..(row + 1) * width];
            to.iter_mut().zip(x.row(i)).for_each(|(to, x)| *to += factor * x);
        }
        Ok(to)
    }

    fn concat_columns(&self, x: &Cpu, y: &Cpu) -> Result<Cpu> {
        let (tokens, [left, right]) = check_columns(x, y)?;
        let [x, y] = [with_rows(x)?, with_rows(y)?];
        let [x, y] = [host::rows("x", &x)?, host::rows("y", &y)?];
        let mut out = host::zeros(&[tokens, left + right])?;
        let rows = host::slice_mut("out", &mut out)?.chunks_exact_mut((left + right).max(1));
        for (t, row) in rows.enumerate() {
            row[..left].copy_from_slice(x.row(t));
            row[left..].copy_from_slice(y.row(t));
        }
        Ok(out)
    }
}
