//! The gated delta rule composed of the tensor library's own operations, token by token.

use numr::dtype::DType;
use numr::runtime::Runtime;
use numr::tensor::Tensor;

use super::{product, softplus};
use crate::error::Result;
use crate::ops::{DecayGate, DeltaInput, TensorClient, zeros};

/// Portable [`gated_delta`](crate::ops::DeltaOps::gated_delta).
///
/// # Errors
///
/// When arguments disagree.
pub fn gated_delta<R, C>(
    client: &C,
    input: &DeltaInput<'_, R>,
    runs: &[usize],
    states: &mut [&mut Tensor<R>],
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    rule(client, input, false, runs, states)
}

/// Portable [`kda`](crate::ops::DeltaOps::kda).
///
/// # Errors
///
/// When arguments disagree.
pub fn kda<R, C>(
    client: &C,
    input: &DeltaInput<'_, R>,
    runs: &[usize],
    states: &mut [&mut Tensor<R>],
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    rule(client, input, true, runs, states)
}

fn rule<R, C>(
    client: &C,
    input: &DeltaInput<'_, R>,
    by_channel: bool,
    runs: &[usize],
    states: &mut [&mut Tensor<R>],
) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let dims = input.dims(by_channel, runs, states)?;
    let (heads, key_dim, value_dim) = (dims.value_heads, dims.key_dim, dims.value_dim);
    let of_head = if by_channel { key_dim } else { 1 };
    if dims.tokens * heads * key_dim * value_dim == 0 {
        return zeros(client, &[dims.tokens, heads, value_dim]);
    }
    let decay = client.exp(&input.g.contiguous()?)?;
    let row = |x: &Tensor<R>, t: usize, shape: &[usize]| -> Result<Tensor<R>> {
        Ok(x.narrow(0, t, 1)?.contiguous()?.reshape(shape)?)
    };
    let of_key = |x: &Tensor<R>, t: usize| -> Result<Tensor<R>> {
        let x = row(x, t, &[dims.key_heads, 1, key_dim])?;
        Ok(client.repeat_interleave(&x, heads / dims.key_heads, Some(0))?.contiguous()?)
    };
    let mut outputs = Vec::with_capacity(dims.tokens);
    let mut t = 0;
    for (&len, state) in runs.iter().zip(states) {
        for _ in 0..len {
            let (q, k) = (of_key(input.q, t)?, of_key(input.k, t)?); // [Hv, 1, Dk]
            let decay = row(&decay, t, &[heads, of_head, 1])?;
            let decayed = client.mul(&state.contiguous()?, &decay)?.contiguous()?;
            let read = product(client, &k, &decayed)?; // [Hv, 1, Dv]
            let v = row(input.v, t, &[heads, 1, value_dim])?;
            let beta = row(input.beta, t, &[heads, 1, 1])?;
            let u = client.mul(&client.sub(&v, &read)?, &beta)?.contiguous()?;
            let written = product(client, &k.reshape(&[heads, key_dim, 1])?, &u)?;
            **state = client.add(&decayed, &written)?;
            let out = client.mul_scalar(&product(client, &q, state)?, input.scale.into())?;
            outputs.push(out.reshape(&[1, heads, value_dim])?);
            t += 1;
        }
    }
    Ok(client.cat(&outputs.iter().collect::<Vec<_>>(), 0)?)
}

/// Portable [`decay_gate`](crate::ops::DeltaOps::decay_gate).
///
/// # Errors
///
/// When arguments disagree.
pub fn decay_gate<R, C>(client: &C, gate: &DecayGate<'_, R>) -> Result<Tensor<R>>
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    let (tokens, width, heads) = gate.check()?;
    if tokens * width == 0 {
        return zeros(client, &[tokens, width]);
    }
    let steps = client.add(&gate.a.contiguous()?, &gate.dt_bias.contiguous()?)?;
    let steps = softplus(client, &steps)?.contiguous()?.reshape(&[tokens, heads, width / heads])?;
    let rates = client.neg(&client.exp(&gate.a_log.contiguous()?)?)?.reshape(&[heads, 1])?;
    Ok(client.mul(&steps, &rates)?.contiguous()?.reshape(&[tokens, width])?)
}
