//! The operations composed of the tensor library's own: slow, portable, and independent of
//! `boostr-kernels`.
//!
//! numr's softplus loses small results (6 % off at -16, 0 below -16.6), so it is composed here of
//! `log1p`. Its operations on views are avoided by making operands contiguous first.

mod attention;
mod delta;

pub use attention::{
    activate, add_rows, add_scaled, attention, concat_columns, glu, latent_attention, new_cache,
    rope, scale_columns,
};
pub use delta::{decay_gate, gated_delta, kda};

use numr::dtype::DType;
use numr::runtime::Runtime;
use numr::tensor::Tensor;

use super::norm::check_groups;
use super::{CausalConv, GatedNorm, SsdInput, TensorClient, Weight, expect, shape_error, zeros};
use crate::error::{Error, Result};

/// Chunk length of [`ssd`]. Short: stages know the exponents of a chunk to `f32::EPSILON` of their sum.
const CHUNK: usize = 16;

/// `max(x, 0) + log1p(exp(-|x|))`.
fn softplus<R, C>(client: &C, x: &Tensor<R>) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let u = client.exp(&client.neg(&client.abs(x)?)?)?;
    Ok(client.add(&client.relu(x)?, &client.log1p(&u)?)?)
}

/// The smaller of each element and `high`, or the larger of it and `low`, where given.
fn between<R, C>(client: &C, x: &Tensor<R>, low: f32, high: f32) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let full =
        |value: f32| Tensor::full_scalar(x.shape(), DType::F32, value.into(), client.device());
    let mut x = x.clone();
    if low > f32::NEG_INFINITY {
        x = client.maximum(&x, &full(low)?)?;
    }
    if high < f32::INFINITY {
        x = client.minimum(&x, &full(high)?)?;
    }
    Ok(x)
}

/// Appends zeros along dimension `dim` until it has `size`.
fn fill_up<R, C>(client: &C, x: &Tensor<R>, dim: usize, size: usize) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let mut shape = x.shape().to_vec();
    if shape[dim] == size {
        return Ok(x.contiguous()?);
    }
    shape[dim] = size - shape[dim];
    let rest = Tensor::zeros(&shape, DType::F32, client.device())?;
    Ok(client.cat(&[&x.contiguous()?, &rest], dim.cast_signed())?)
}

/// `[B, L, X, Y]` as chunks `[B, K, X, Q, Y]`, contiguous.
fn chunked<R, C>(client: &C, x: &Tensor<R>, nchunks: usize, q: usize) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let &[batch, _, heads, width] = x.shape() else {
        return Err(shape_error("x", &[0; 4], x.shape()));
    };
    let x = fill_up(client, x, 1, nchunks * q)?;
    let x = x.reshape(&[batch, nchunks, q, heads, width])?;
    Ok(x.permute(&[0, 1, 3, 2, 4])?.contiguous()?)
}

/// `b` or `c` `[B, L, G, N]` for each head: `[B, L, H, N]`.
fn for_heads<R, C>(client: &C, bc: &Tensor<R>, nheads: usize) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let &[_, _, ngroups, _] = bc.shape() else {
        return Err(shape_error("b", &[0; 4], bc.shape()));
    };
    if ngroups == 0 || !nheads.is_multiple_of(ngroups) {
        let reason = format!("{ngroups} groups do not divide {nheads} heads");
        return Err(Error::Argument { name: "b", reason });
    }
    Ok(client.repeat_interleave(&bc.contiguous()?, nheads / ngroups, Some(2))?)
}

/// `[B, H, K, Q]` as `[B, K, H, Q]`, contiguous.
fn by_chunk<R: Runtime<DType = DType>>(x: &Tensor<R>) -> Result<Tensor<R>> {
    Ok(x.permute(&[0, 2, 1, 3])?.contiguous()?)
}

/// `x · y` of the last two dimensions, all others equal.
fn product<R, C>(client: &C, x: &Tensor<R>, y: &Tensor<R>) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let (outer, rows, inner, columns) = {
        let (outer, last) = x.shape().split_at(x.ndim() - 2);
        (outer.to_vec(), last[0], last[1], y.shape()[y.ndim() - 1])
    };
    let count: usize = outer.iter().product();
    let x = x.contiguous()?.reshape(&[count, rows, inner])?;
    let y = y.contiguous()?.reshape(&[count, inner, columns])?;
    let out = if inner == 0 || count * rows * columns == 0 {
        Tensor::zeros(&[count, rows, columns], DType::F32, client.device())?
    } else {
        client.matmul(&x, &y)?
    };
    let shape = [&outer[..], &[rows, columns]].concat();
    Ok(out.contiguous()?.reshape(&shape)?)
}

fn transposed<R: Runtime<DType = DType>>(x: &Tensor<R>) -> Result<Tensor<R>> {
    Ok(x.transpose(-1, -2)?.contiguous()?)
}

/// Portable [`ssd_chunk_cumsum`](super::SsmKernelOps::ssd_chunk_cumsum).
///
/// # Errors
///
/// When arguments disagree.
pub fn ssd_chunk_cumsum<R, C>(
    client: &C,
    dt: &Tensor<R>,
    a: &Tensor<R>,
    dt_bias: Option<&Tensor<R>>,
    chunk_size: usize,
    dt_softplus: bool,
) -> Result<(Tensor<R>, Tensor<R>)>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let &[batch, seqlen, nheads] = dt.shape() else {
        return Err(shape_error("dt", &[0, 0, 0], dt.shape()));
    };
    if chunk_size == 0 {
        let reason = "expected at least 1, found 0".into();
        return Err(Error::Argument { name: "chunk_size", reason });
    }
    expect("dt", dt, &[batch, seqlen, nheads])?;
    expect("a", a, &[nheads])?;
    let steps = timestep(client, dt, dt_bias, dt_softplus, (0.0, f32::INFINITY))?;
    let nchunks = seqlen.div_ceil(chunk_size);
    let steps = fill_up(client, &steps, 1, nchunks * chunk_size)?;
    let steps = steps.permute(&[0, 2, 1])?.contiguous()?;
    let steps = steps.reshape(&[batch, nheads, nchunks, chunk_size])?;
    let a = a.contiguous()?.reshape(&[1, nheads, 1, 1])?;
    let da_cumsum = client.cumsum(&client.mul(&steps, &a)?, -1)?;
    Ok((steps, da_cumsum))
}

fn timestep<R, C>(
    client: &C,
    dt: &Tensor<R>,
    dt_bias: Option<&Tensor<R>>,
    dt_softplus: bool,
    limit: (f32, f32),
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let mut dt = dt.contiguous()?;
    if let Some(bias) = dt_bias {
        expect("dt_bias", bias, &dt.shape()[dt.ndim() - 1..])?;
        dt = client.add(&dt, bias)?;
    }
    if dt_softplus {
        dt = softplus(client, &dt)?;
    }
    between(client, &dt, limit.0, limit.1)
}

/// Portable [`ssd_chunk_state`](super::SsmKernelOps::ssd_chunk_state).
///
/// # Errors
///
/// When arguments disagree.
pub fn ssd_chunk_state<R, C>(
    client: &C,
    x: &Tensor<R>,
    b: &Tensor<R>,
    dt: &Tensor<R>,
    da_cumsum: &Tensor<R>,
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let (nchunks, q) = check_chunks(x, da_cumsum)?;
    expect("dt", dt, da_cumsum.shape())?;
    check_bc("b", b, x)?;
    let last = da_cumsum.narrow(3, q - 1, 1)?.contiguous()?;
    let weight = client.mul(&decay(client, &last, da_cumsum)?, dt)?;
    let weight = by_chunk(&weight)?.unsqueeze(-1)?;
    let x = client.mul(&chunked(client, x, nchunks, q)?, &weight)?;
    let b = chunked(client, &for_heads(client, b, x.shape()[2])?, nchunks, q)?;
    product(client, &transposed(&x)?, &b) // [B, K, H, P, Q] · [B, K, H, Q, N]
}

/// `exp(min(to - from, 0))`.
fn decay<R, C>(client: &C, to: &Tensor<R>, from: &Tensor<R>) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let difference = client.sub(to, &from.contiguous()?)?;
    Ok(client.exp(&between(client, &difference, f32::NEG_INFINITY, 0.0)?)?)
}

/// `(K, Q)` of cumulative sums that belong to x `[B, L, H, P]`.
fn check_chunks<R: Runtime<DType = DType>>(
    x: &Tensor<R>,
    da_cumsum: &Tensor<R>,
) -> Result<(usize, usize)> {
    let &[batch, seqlen, nheads, _] = x.shape() else {
        return Err(shape_error("x", &[0; 4], x.shape()));
    };
    expect("x", x, x.shape())?;
    let q = da_cumsum.shape().last().copied().unwrap_or(0);
    let nchunks = seqlen.div_ceil(q.max(1));
    if q == 0 {
        return Err(shape_error("da_cumsum", &[batch, nheads, nchunks, 1], da_cumsum.shape()));
    }
    expect("da_cumsum", da_cumsum, &[batch, nheads, nchunks, q])?;
    Ok((nchunks, q))
}

/// Checks that b or c belongs to the tokens of x `[B, L, H, P]`.
fn check_bc<R: Runtime<DType = DType>>(
    name: &'static str,
    bc: &Tensor<R>,
    x: &Tensor<R>,
) -> Result<()> {
    let (&[batch, seqlen, ..], &[_, _, ngroups, dstate]) = (x.shape(), bc.shape()) else {
        return Err(shape_error(name, &[0; 4], bc.shape()));
    };
    expect(name, bc, &[batch, seqlen, ngroups, dstate])
}

/// Portable [`ssd_state_passing`](super::SsmKernelOps::ssd_state_passing).
///
/// # Errors
///
/// When arguments disagree.
pub fn ssd_state_passing<R, C>(
    client: &C,
    states: &Tensor<R>,
    da_cumsum: &Tensor<R>,
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    pass_from(client, states, da_cumsum, None)
}

/// The state after each chunk, from `initial` `[B, H, P, N]`.
fn pass_from<R, C>(
    client: &C,
    states: &Tensor<R>,
    da_cumsum: &Tensor<R>,
    initial: Option<&Tensor<R>>,
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let &[batch, nchunks, nheads, _, _] = states.shape() else {
        return Err(shape_error("states", &[0; 5], states.shape()));
    };
    let q = da_cumsum.shape().last().copied().unwrap_or(0);
    expect("states", states, states.shape())?;
    expect("da_cumsum", da_cumsum, &[batch, nheads, nchunks, q])?;
    if nchunks == 0 || q == 0 {
        return Ok(states.clone());
    }
    let last = client.exp(&by_chunk(&da_cumsum.narrow(3, q - 1, 1)?)?)?; // [B, K, H, 1]
    let mut after = Vec::with_capacity(nchunks);
    let mut before = initial.map(|initial| initial.unsqueeze(1)).transpose()?;
    for chunk in 0..nchunks {
        let mut state = states.narrow(1, chunk, 1)?.contiguous()?;
        if let Some(before) = before {
            let decay = last.narrow(1, chunk, 1)?.contiguous()?.unsqueeze(-1)?;
            state = client.add(&state, &client.mul(&before, &decay)?)?;
        }
        after.push(state.clone());
        before = Some(state);
    }
    let after: Vec<&Tensor<R>> = after.iter().collect();
    Ok(client.cat(&after, 1)?)
}

/// Portable [`ssd_chunk_scan`](super::SsmKernelOps::ssd_chunk_scan).
///
/// # Errors
///
/// When arguments disagree.
pub fn ssd_chunk_scan<R, C>(
    client: &C,
    x: &Tensor<R>,
    states: &Tensor<R>,
    c: &Tensor<R>,
    da_cumsum: &Tensor<R>,
    d: Option<&Tensor<R>>,
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    scan_from(client, x, states, c, da_cumsum, d, None)
}

fn scan_from<R, C>(
    client: &C,
    x: &Tensor<R>,
    states: &Tensor<R>,
    c: &Tensor<R>,
    da_cumsum: &Tensor<R>,
    d: Option<&Tensor<R>>,
    initial: Option<&Tensor<R>>,
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let (nchunks, q) = check_chunks(x, da_cumsum)?;
    let &[batch, seqlen, nheads, headdim] = x.shape() else {
        return Err(shape_error("x", &[0; 4], x.shape()));
    };
    check_bc("c", c, x)?;
    let dstate = c.shape()[3];
    expect("states", states, &[batch, nchunks, nheads, headdim, dstate])?;
    let first = match initial {
        Some(initial) => initial.unsqueeze(1)?.contiguous()?,
        None => zeros(client, &[batch, 1, nheads, headdim, dstate])?,
    };
    let entering = match nchunks {
        0 => states.clone(),
        1 => first,
        _ => {
            let before = states.narrow(1, 0, nchunks - 1)?.contiguous()?;
            client.cat(&[&first, &before], 1)?
        }
    };
    let c = chunked(client, &for_heads(client, c, nheads)?, nchunks, q)?;
    let y = product(client, &c, &transposed(&entering)?)?; // [B, K, H, Q, P]
    let through = client.exp(&by_chunk(da_cumsum)?)?.unsqueeze(-1)?;
    let y = unchunked(&client.mul(&y, &through)?, seqlen)?;
    match d {
        None => Ok(y),
        Some(d) => Ok(client.add(&y, &client.mul(&x.contiguous()?, &skip(d, nheads, headdim)?)?)?),
    }
}

/// `d` `[H]` or `[H, P]` as it multiplies x.
fn skip<R: Runtime<DType = DType>>(
    d: &Tensor<R>,
    nheads: usize,
    headdim: usize,
) -> Result<Tensor<R>> {
    if d.shape() == [nheads] {
        return Ok(d.contiguous()?.reshape(&[nheads, 1])?);
    }
    expect("d", d, &[nheads, headdim])?;
    Ok(d.contiguous()?)
}

/// `[B, K, H, Q, P]` back to the first L tokens `[B, L, H, P]`.
fn unchunked<R: Runtime<DType = DType>>(y: &Tensor<R>, seqlen: usize) -> Result<Tensor<R>> {
    let &[batch, nchunks, nheads, q, headdim] = y.shape() else {
        return Err(shape_error("y", &[0; 5], y.shape()));
    };
    let y = y.permute(&[0, 1, 3, 2, 4])?.contiguous()?;
    let y = y.reshape(&[batch, nchunks * q, nheads, headdim])?;
    Ok(y.narrow(1, 0, seqlen)?.contiguous()?)
}

/// Portable [`ssd_chunk_intra`](super::SsmKernelOps::ssd_chunk_intra).
///
/// # Errors
///
/// When arguments disagree.
pub fn ssd_chunk_intra<R, C>(
    client: &C,
    x: &Tensor<R>,
    b: &Tensor<R>,
    c: &Tensor<R>,
    dt: &Tensor<R>,
    da_cumsum: &Tensor<R>,
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let (nchunks, q) = check_chunks(x, da_cumsum)?;
    expect("dt", dt, da_cumsum.shape())?;
    let &[_, seqlen, nheads, _] = x.shape() else {
        return Err(shape_error("x", &[0; 4], x.shape()));
    };
    check_bc("b", b, x)?;
    expect("c", c, b.shape())?;
    let b = chunked(client, &for_heads(client, b, nheads)?, nchunks, q)?;
    let c = chunked(client, &for_heads(client, c, nheads)?, nchunks, q)?;
    let cb = product(client, &c, &transposed(&b)?)?; // [B, K, H, Q, Q]
    let sums = by_chunk(da_cumsum)?;
    let decay = decay(client, &sums.unsqueeze(-1)?, &sums.unsqueeze(-2)?)?;
    let mask: Vec<f32> = (0..q * q).map(|i| if i % q <= i / q { 1.0 } else { 0.0 }).collect();
    let mask = Tensor::from_slice(&mask, &[q, q], client.device())?;
    let m = client.mul(&client.mul(&cb, &decay)?, &mask)?;
    let m = client.mul(&m, &by_chunk(dt)?.unsqueeze(-2)?)?;
    let x = chunked(client, x, nchunks, q)?;
    unchunked(&product(client, &m, &x)?, seqlen)
}

/// Portable [`ssd`](super::SsmKernelOps::ssd).
///
/// # Errors
///
/// When arguments disagree.
pub fn ssd<R, C>(
    client: &C,
    input: &SsdInput<'_, R>,
    runs: &[usize],
    states: &mut [&mut Tensor<R>],
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let dims = input.dims(runs, states)?;
    let dt = timestep(client, input.dt, input.dt_bias, input.dt_softplus, input.dt_limit)?;
    let mut parts = Vec::new();
    let mut first = 0;
    for (&len, state) in runs.iter().zip(states) {
        if len == 0 {
            continue;
        }
        let part = |x: &Tensor<R>| -> Result<Tensor<R>> {
            Ok(x.narrow(0, first, len)?.contiguous()?.unsqueeze(0)?)
        };
        let (x, b, c) = (part(input.x)?, part(input.b)?, part(input.c)?);
        let (steps, sums) =
            ssd_chunk_cumsum(client, &part(&dt)?, input.a.rates(), None, CHUNK, false)?;
        let own = ssd_chunk_state(client, &x, &b, &steps, &sums)?;
        let initial = state.unsqueeze(0)?;
        let after = pass_from(client, &own, &sums, Some(&initial))?;
        let inter = scan_from(client, &x, &after, &c, &sums, input.d, Some(&initial))?;
        let intra = ssd_chunk_intra(client, &x, &b, &c, &steps, &sums)?;
        parts.push(client.add(&inter, &intra)?.squeeze(Some(0)));
        let last = after.narrow(1, after.shape()[1] - 1, 1)?.contiguous()?;
        **state = last.reshape(&[dims.nheads, dims.headdim, dims.dstate])?;
        first += len;
    }
    if parts.is_empty() {
        return zeros(client, &[dims.tokens, dims.nheads, dims.headdim]);
    }
    let y = client.cat(&parts.iter().collect::<Vec<_>>(), 0)?;
    match input.z {
        None => Ok(y),
        Some(z) => Ok(client.mul(&y, &client.silu(&z.contiguous()?)?)?),
    }
}

/// Portable [`causal_conv1d`](super::CausalConvOps::causal_conv1d).
///
/// # Errors
///
/// When arguments disagree.
pub fn causal_conv1d<R, C>(
    client: &C,
    x: &Tensor<R>,
    conv: &CausalConv<'_, R>,
    runs: &[usize],
    windows: &mut [&mut Tensor<R>],
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let (tokens, channels) = conv.check(x, runs, windows)?;
    let taps = conv.weight.shape()[0];
    let mut parts = Vec::new();
    let mut first = 0;
    for (&len, window) in runs.iter().zip(windows) {
        if len == 0 {
            continue;
        }
        let run = x.narrow(0, first, len)?.contiguous()?;
        first += len;
        let input = match taps {
            1 => run,
            _ => client.cat(&[&window.contiguous()?, &run], 0)?, // [K - 1 + L, C]
        };
        let mut sum = zeros(client, &[len, channels])?;
        if let Some(bias) = conv.bias {
            sum = client.add(&sum, bias)?;
        }
        for k in 0..taps {
            let tap = conv.weight.narrow(0, k, 1)?.contiguous()?;
            let term = client.mul(&input.narrow(0, k, len)?.contiguous()?, &tap)?;
            sum = client.add(&sum, &term)?;
        }
        parts.push(if conv.silu { client.silu(&sum)? } else { sum });
        if taps > 1 {
            **window = input.narrow(0, len, taps - 1)?.contiguous()?;
        }
    }
    match parts.len() {
        0 => zeros(client, &[tokens, channels]),
        _ => Ok(client.cat(&parts.iter().collect::<Vec<_>>(), 0)?),
    }
}

/// Portable [`rmsnorm`](super::NormOps::rmsnorm).
///
/// # Errors
///
/// When arguments disagree.
pub fn rmsnorm<R, C>(client: &C, x: &Tensor<R>, weight: &Tensor<R>, eps: f32) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let &[_, width] = x.shape() else {
        return Err(shape_error("x", &[0, 0], x.shape()));
    };
    expect("x", x, x.shape())?;
    expect("weight", weight, &[width])?;
    normalized(client, &x.contiguous()?, weight, 1, eps)
}

/// Rows of `x` by groups, each over the root of its mean square, times `weight`.
fn normalized<R, C>(
    client: &C,
    x: &Tensor<R>,
    weight: &Tensor<R>,
    ngroups: usize,
    eps: f32,
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let (tokens, width) = (x.shape()[0], x.shape()[1]);
    let groups = x.reshape(&[tokens, ngroups, width / ngroups])?;
    let mean = client.mean(&client.square(&groups)?, &[2], true)?;
    let scale = client.rsqrt(&client.add_scalar(&mean, eps.into())?)?;
    let x = client.mul(&groups, &scale)?.contiguous()?.reshape(&[tokens, width])?;
    // A weight of one group is that of all.
    match weight.shape() {
        [len] if *len != width => {
            let x = x.reshape(&[tokens, ngroups, width / ngroups])?;
            Ok(client.mul(&x, &weight.contiguous()?)?.contiguous()?.reshape(&[tokens, width])?)
        }
        _ => Ok(client.mul(&x, weight)?),
    }
}

/// Portable [`l2norm`](super::NormOps::l2norm).
///
/// # Errors
///
/// When arguments disagree.
pub fn l2norm<R, C>(client: &C, x: &Tensor<R>, group: usize, eps: f32) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let (tokens, width) = check_groups(x, group)?;
    if tokens * width == 0 {
        return zeros(client, &[tokens, width]);
    }
    let groups = x.contiguous()?.reshape(&[tokens, width / group, group])?;
    let sum = client.sum(&client.square(&groups)?, &[2], true)?;
    let length = client.sqrt(&client.add_scalar(&sum, eps.into())?)?;
    Ok(client.div(&groups, &length)?.contiguous()?.reshape(&[tokens, width])?)
}

/// Portable [`gated_rmsnorm`](super::NormOps::gated_rmsnorm).
///
/// # Errors
///
/// When arguments disagree.
pub fn gated_rmsnorm<R, C>(
    client: &C,
    y: &Tensor<R>,
    z: &Tensor<R>,
    norm: &GatedNorm<'_, R>,
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    norm.check(y, z)?;
    let (y, gate) = (y.contiguous()?, activate(client, norm.activation, z)?);
    if norm.norm_before_gate {
        let y = normalized(client, &y, norm.weight, norm.ngroups, norm.eps)?;
        return Ok(client.mul(&y, &gate)?);
    }
    normalized(client, &client.mul(&y, &gate)?, norm.weight, norm.ngroups, norm.eps)
}

/// `(T, out)` of a product that fits.
pub(super) fn check_linear<R: Runtime<DType = DType>>(
    x: &Tensor<R>,
    w: &Weight<R>,
    bias: Option<&Tensor<R>>,
    add_to: Option<&Tensor<R>>,
) -> Result<(usize, usize)> {
    let (&[tokens, _], &[features, width]) = (x.shape(), w.shape()) else {
        return Err(shape_error("x", &[0, 0], x.shape()));
    };
    expect("x", x, &[tokens, width])?;
    if let Some(bias) = bias {
        expect("bias", bias, &[features])?;
    }
    if let Some(add_to) = add_to {
        expect("add_to", add_to, &[tokens, features])?;
    }
    Ok((tokens, features))
}

/// Portable [`linear`](super::LinearOps::linear).
///
/// # Errors
///
/// When arguments disagree.
pub fn linear<R, C>(
    client: &C,
    x: &Tensor<R>,
    w: &Weight<R>,
    bias: Option<&Tensor<R>>,
    add_to: Option<Tensor<R>>,
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    check_linear(x, w, bias, add_to.as_ref())?;
    let w = client.cast(&w.to_tensor(client.device())?, DType::F32)?;
    let mut out = product(client, x, &transposed(&w)?)?;
    if let Some(bias) = bias {
        out = client.add(&out, bias)?;
    }
    match add_to {
        None => Ok(out),
        Some(add_to) => Ok(client.add(&add_to, &out)?),
    }
}

/// The width of a weight `[vocab, width]` that has all rows `ids`.
pub(super) fn check_ids<R: Runtime<DType = DType>>(w: &Weight<R>, ids: &[u32]) -> Result<usize> {
    let &[vocab, width] = w.shape() else {
        return Err(shape_error("w", &[0, 0], w.shape()));
    };
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
        let reason = format!("token id {id} is not one of the {vocab} rows of the embedding");
        return Err(Error::Argument { name: "ids", reason });
    }
    Ok(width)
}

/// Portable [`embedding`](super::LinearOps::embedding).
///
/// # Errors
///
/// When an id is not a row.
pub fn embedding<R, C>(client: &C, w: &Weight<R>, ids: &[u32]) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let width = check_ids(w, ids)?;
    let rows: Vec<usize> = ids.iter().map(|&id| id as usize).collect();
    let w = w.to_tensor(client.device())?;
    let rows = gather(client, &w, &rows, width, w.dtype())?;
    Ok(client.cast(&rows, DType::F32)?)
}

/// Rows of a 2-D tensor, by slices: numr's index operations read zeros past the end.
fn gather<R, C>(
    client: &C,
    x: &Tensor<R>,
    rows: &[usize],
    width: usize,
    dtype: DType,
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    if rows.is_empty() {
        return Ok(Tensor::zeros(&[0, width], dtype, client.device())?);
    }
    let parts: Vec<Tensor<R>> =
        rows.iter().map(|&row| Ok(x.narrow(0, row, 1)?.contiguous()?)).collect::<Result<_>>()?;
    Ok(client.cat(&parts.iter().collect::<Vec<_>>(), 0)?)
}

/// The width of `x` `[T, width]` that has all `rows`.
pub(super) fn check_rows<R: Runtime<DType = DType>>(
    x: &Tensor<R>,
    rows: &[usize],
) -> Result<usize> {
    let &[tokens, width] = x.shape() else {
        return Err(shape_error("x", &[0, 0], x.shape()));
    };
    expect("x", x, &[tokens, width])?;
    if let Some(row) = rows.iter().find(|&&row| row >= tokens) {
        let reason = format!("row {row} is not one of {tokens}");
        return Err(Error::Argument { name: "rows", reason });
    }
    Ok(width)
}

/// Checks the arguments of a loss.
pub(super) fn check_targets<R: Runtime<DType = DType>>(
    h: &Tensor<R>,
    head: &Weight<R>,
    targets: &[u32],
    weights: &[f32],
) -> Result<()> {
    let (tokens, rows) = check_linear(h, head, None, None)?;
    if (targets.len(), weights.len()) != (tokens, tokens) {
        let (targets, weights) = (targets.len(), weights.len());
        let reason = format!(
            "expected one for each of {tokens} rows, found {targets} and {weights} weights"
        );
        return Err(Error::Argument { name: "targets", reason });
    }
    if let Some(id) = targets.iter().find(|&&id| id != super::IGNORE && id as usize >= rows) {
        let reason = format!("token id {id} is not below the vocabulary's {rows} rows");
        return Err(Error::Argument { name: "targets", reason });
    }
    Ok(())
}

/// Portable [`select_rows`](super::LinearOps::select_rows).
///
/// # Errors
///
/// When there is no such row.
pub fn select_rows<R, C>(client: &C, x: &Tensor<R>, rows: &[usize]) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let width = check_rows(x, rows)?;
    gather(client, x, rows, width, DType::F32)
}
