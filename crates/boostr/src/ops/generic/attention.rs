//! Attention and elementwise steps composed of the tensor library's own operations.

use numr::dtype::DType;
use numr::runtime::Runtime;
use numr::tensor::Tensor;

use super::{product, transposed};
use crate::error::Result;
use crate::ops::activation::{check_add_rows, check_columns, check_pair};
use crate::ops::attention::{AttentionDims, KvStorage, check_rope};
use crate::ops::{
    Activation, Attention, KvCache, KvSizes, LatentAttention, Rope, RopeStyle, TensorClient,
    Weight, expect, shape_error, tensor, to_vec,
};

/// What a score that may not be seen gets: its exponential is 0, and unlike infinity it makes no NaN.
const UNSEEN: f32 = -1e30;

/// Portable [`new_cache`](crate::ops::AttentionOps::new_cache): keys and values as f32 tensors.
///
/// # Errors
///
/// [`Error::Unsupported`](crate::Error::Unsupported) for another type of elements,
/// [`Error::Argument`](crate::Error::Argument) for sizes that no cache has.
pub fn new_cache<R: Runtime<DType = DType>>(sizes: KvSizes) -> Result<KvCache<R>> {
    KvCache::tensors(sizes)
}

/// Portable [`attention`](crate::ops::AttentionOps::attention): all scores of a head at once.
///
/// # Errors
///
/// When arguments disagree, or a cache is of another device.
pub fn attention<R, C>(
    client: &C,
    input: &Attention<'_, R>,
    runs: &[usize],
    caches: &mut [&mut KvCache<R>],
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let dims = input.dims(runs, caches)?;
    attend(client, input, dims, runs, caches)
}

/// The rows that were kept, if any, and then `new` ones.
fn appended<R, C>(client: &C, kept: Option<&Tensor<R>>, new: Tensor<R>) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    match kept {
        None => Ok(new),
        Some(kept) => Ok(client.cat(&[kept, &new], 0)?),
    }
}

/// [`attention`] with sizes that are checked; in latent caches `v` is what `k` begins with.
fn attend<R, C>(
    client: &C,
    input: &Attention<'_, R>,
    dims: AttentionDims,
    runs: &[usize],
    caches: &mut [&mut KvCache<R>],
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let mut outs = Vec::new();
    let mut first = 0;
    for (&len, cache) in runs.iter().zip(caches).filter(|(len, _)| **len > 0) {
        let rows =
            |x: &Tensor<R>| -> Result<Tensor<R>> { Ok(x.narrow(0, first, len)?.contiguous()?) };
        let [q, k, v] = [rows(input.q)?, rows(input.k)?, rows(input.v)?];
        first += len;
        let KvStorage::Tensors(kept) = &mut cache.storage else {
            let what = "a cache of CPU pages in the portable attention".into();
            return Err(crate::Error::Unsupported { what });
        };
        let [keys, values] = match kept {
            None => [None, None],
            Some([keys, values]) => [Some(&*keys), Some(&*values)],
        };
        let keys = appended(client, keys, k)?;
        let values = if dims.sizes.latent {
            keys.narrow(2, 0, dims.sizes.d_value)?
        } else {
            appended(client, values, v)?
        };
        let before = keys.shape()[0] - len;
        let mask = tensor(client, &mask(len, before, input.window), &[len, before + len])?;
        let mut heads = Vec::new();
        for head in 0..dims.nheads {
            let of = head / (dims.nheads / dims.sizes.nheads);
            let q = q.narrow(1, head, 1)?.contiguous()?.reshape(&[len, dims.sizes.d_key])?;
            let k =
                keys.narrow(1, of, 1)?.contiguous()?.reshape(&[before + len, dims.sizes.d_key])?;
            let v = values
                .narrow(1, of, 1)?
                .contiguous()?
                .reshape(&[before + len, dims.sizes.d_value])?;
            let k = k.transpose(0, 1)?.contiguous()?;
            let mut scores = client.mul_scalar(&product(client, &q, &k)?, input.scale.into())?;
            if let Some(cap) = input.softcap {
                let bounded = client.tanh(&client.div_scalar(&scores, cap.into())?)?;
                scores = client.mul_scalar(&bounded, cap.into())?;
            }
            let weights = client.softmax(&client.add(&scores, &mask)?, -1)?;
            heads.push(product(client, &weights, &v)?.reshape(&[len, 1, dims.sizes.d_value])?);
        }
        *kept = Some([keys, values]);
        outs.push(client.cat(&heads.iter().collect::<Vec<_>>(), 1)?);
    }
    if outs.is_empty() {
        let shape = [0, dims.nheads, dims.sizes.d_value];
        return Ok(Tensor::zeros(&shape, DType::F32, client.device())?);
    }
    Ok(client.cat(&outs.iter().collect::<Vec<_>>(), 0)?)
}

/// Portable [`latent_attention`](crate::ops::AttentionOps::latent_attention): [`attention`] with keys
/// `[c | k_pe]` and values c.
///
/// # Errors
///
/// When arguments disagree, or a cache is of another device.
pub fn latent_attention<R, C>(
    client: &C,
    input: &LatentAttention<'_, R>,
    runs: &[usize],
    caches: &mut [&mut KvCache<R>],
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let dims = input.dims(runs, caches)?;
    let (tokens, nheads, d_c) = (dims.tokens, dims.nheads, dims.sizes.d_value);
    // [T, H, ..] as [H, T, ..] and back
    let swapped = |x: &Tensor<R>| -> Result<Tensor<R>> { Ok(x.permute(&[1, 0, 2])?.contiguous()?) };
    let per_head = |x: &Tensor<R>, w: &Weight<R>| -> Result<Tensor<R>> {
        let w = client.cast(&w.to_tensor(client.device())?, DType::F32)?;
        swapped(&product(client, &swapped(x)?, &transposed(&w)?)?)
    };
    let beside = |x: &Tensor<R>, y: &Tensor<R>, heads: usize| -> Result<Tensor<R>> {
        let rows = |x: &Tensor<R>| -> Result<Tensor<R>> {
            let width = x.shape().last().copied().unwrap_or(0);
            Ok(x.contiguous()?.reshape(&[tokens * heads, width])?)
        };
        let both = concat_columns(client, &rows(x)?, &rows(y)?)?;
        Ok(both.reshape(&[tokens, heads, dims.sizes.d_key])?)
    };
    let absorbed = per_head(input.q_nope, input.w_uk)?; // [T, H, d_c]
    let q = beside(&absorbed, input.q_pe, nheads)?; // [T, H, d_c + d_r]
    let k = beside(input.c, input.k_pe, 1)?; // [T, 1, d_c + d_r]
    let v = k.narrow(2, 0, d_c)?;
    let dims = AttentionDims { tokens, nheads, sizes: dims.sizes };
    let (window, softcap) = (None, None);
    let inner = Attention { q: &q, k: &k, v: &v, scale: input.scale, window, softcap };
    let mixed = attend(client, &inner, dims, runs, caches)?; // [T, H, d_c]
    per_head(&mixed, input.w_uv)
}

/// `[len, before + len]`: 0 where the row's token sees the column's, [`UNSEEN`] elsewhere.
fn mask(len: usize, before: usize, window: Option<usize>) -> Vec<f32> {
    let sees = |row: usize, key: usize| {
        let position = before + row;
        key <= position && window.is_none_or(|window| position - key < window)
    };
    (0..len)
        .flat_map(|row| (0..before + len).map(move |key| (row, key)))
        .map(|(row, key)| if sees(row, key) { 0.0 } else { UNSEEN })
        .collect()
}

/// Portable [`rope`](crate::ops::AttentionOps::rope): `x * cos + rotated(x) * sin`.
///
/// # Errors
///
/// When arguments disagree.
pub fn rope<R, C>(client: &C, x: &Tensor<R>, positions: &[usize], rope: &Rope) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let (tokens, nheads, headdim) = check_rope(x, positions, rope)?;
    if tokens * nheads * headdim == 0 {
        return Ok(x.clone());
    }
    let half = rope.rotary_dim() / 2;
    // The partner of each channel that turns, the number of their pair, and the sign of the partner's part.
    let partner = |channel: usize| match rope.style() {
        _ if channel >= 2 * half => None,
        RopeStyle::Half if channel < half => Some((channel + half, channel, -1.0)),
        RopeStyle::Half => Some((channel - half, channel - half, 1.0)),
        RopeStyle::Interleaved if channel.is_multiple_of(2) => {
            Some((channel + 1, channel / 2, -1.0))
        }
        RopeStyle::Interleaved => Some((channel - 1, channel / 2, 1.0)),
    };
    let (mut cos, mut sin) = (Vec::new(), Vec::new());
    let (mut cos_of, mut sin_of) = (vec![0.0; half], vec![0.0; half]);
    for &position in positions {
        rope.turns(position, &mut cos_of, &mut sin_of);
        for channel in 0..headdim {
            let (c, s) = partner(channel)
                .map_or((1.0, 0.0), |(_, pair, sign)| (cos_of[pair], sign * sin_of[pair]));
            cos.push(c);
            sin.push(s);
        }
    }
    let shape = [tokens, 1, headdim];
    let [cos, sin] = [tensor(client, &cos, &shape)?, tensor(client, &sin, &shape)?];
    let x = x.contiguous()?;
    let columns: Vec<Tensor<R>> = (0..headdim)
        .map(|channel| {
            let partner = partner(channel).map_or(channel, |(partner, ..)| partner);
            Ok(x.narrow(2, partner, 1)?.contiguous()?)
        })
        .collect::<Result<_>>()?;
    let partners = client.cat(&columns.iter().collect::<Vec<_>>(), 2)?;
    Ok(client.add(&client.mul(&x, &cos)?, &client.mul(&partners, &sin)?)?)
}

/// Portable [`activate`](crate::ops::ActivationOps::activate).
///
/// # Errors
///
/// When the argument is no matrix of f32.
pub fn activate<R, C>(client: &C, act: Activation, x: &Tensor<R>) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    check_pair(["x", "x"], x, x)?;
    let x = x.contiguous()?;
    Ok(match act {
        Activation::Silu => client.silu(&x)?,
        Activation::Gelu => client.gelu_erf(&x)?,
        Activation::GeluTanh => client.gelu(&x)?,
        Activation::Relu2 => client.square(&client.relu(&x)?)?,
        Activation::Sigmoid => client.sigmoid(&x)?,
        Activation::Identity => x,
    })
}

/// Portable [`glu`](crate::ops::ActivationOps::glu).
///
/// # Errors
///
/// When arguments disagree.
pub fn glu<R, C>(client: &C, act: Activation, gate: &Tensor<R>, up: &Tensor<R>) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    check_pair(["gate", "up"], gate, up)?;
    Ok(client.mul(&activate(client, act, gate)?, &up.contiguous()?)?)
}

/// Portable [`add_scaled`](crate::ops::ActivationOps::add_scaled).
///
/// # Errors
///
/// When arguments disagree.
#[expect(
    clippy::needless_pass_by_value,
    reason = "the trait's signature, for backends that add in place"
)]
pub fn add_scaled<R, C>(client: &C, to: Tensor<R>, x: &Tensor<R>, factor: f32) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    check_pair(["to", "x"], &to, x)?;
    Ok(client.add(&to, &client.mul_scalar(&x.contiguous()?, factor.into())?)?)
}

/// Portable [`scale_columns`](crate::ops::ActivationOps::scale_columns).
///
/// # Errors
///
/// When arguments disagree.
pub fn scale_columns<R, C>(client: &C, x: &Tensor<R>, factors: &Tensor<R>) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let &[tokens, width] = x.shape() else {
        return Err(shape_error("x", &[0, 0], x.shape()));
    };
    expect("x", x, &[tokens, width])?;
    expect("factors", factors, &[width])?;
    Ok(client.mul(&x.contiguous()?, factors)?)
}

/// Portable [`add_rows`](crate::ops::ActivationOps::add_rows): the sum of rows is a product with the
/// matrix of their factors.
///
/// # Errors
///
/// When arguments disagree.
pub fn add_rows<R, C>(
    client: &C,
    to: Tensor<R>,
    x: &Tensor<R>,
    rows: &[usize],
    factors: &Tensor<R>,
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let width = check_add_rows(&to, x, rows, factors)?;
    let tokens = to.shape()[0];
    if rows.is_empty() || tokens * width == 0 {
        return Ok(to);
    }
    let mut shares = vec![0.0; tokens * rows.len()];
    for (i, (&row, factor)) in rows.iter().zip(to_vec(factors)?).enumerate() {
        shares[row * rows.len() + i] = factor;
    }
    let shares = tensor(client, &shares, &[tokens, rows.len()])?;
    Ok(client.add(&to, &product(client, &shares, x)?)?)
}

/// Portable [`concat_columns`](crate::ops::ActivationOps::concat_columns).
///
/// # Errors
///
/// When arguments disagree.
pub fn concat_columns<R, C>(client: &C, x: &Tensor<R>, y: &Tensor<R>) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let (tokens, [left, right]) = check_columns(x, y)?;
    if tokens * left * right == 0 {
        let wide = if left == 0 { y } else { x };
        return Ok(wide.contiguous()?.reshape(&[tokens, left + right])?);
    }
    Ok(client.cat(&[&x.contiguous()?, &y.contiguous()?], 1)?)
}
