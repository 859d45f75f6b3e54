//! Gradients of the whole operation.
//!
//! Every run and every team of neighbouring heads is a task of its own: nothing of one reaches another.
//! What all heads of a group add to the gradients of b and c is summed within a team by the task, and over
//! teams, in their order, when all tasks are done. So no result depends on threads or on company, and
//! the memory beyond the outputs is a task's for each worker, and two `[T, N]` for each team.
//!
//! The mathematics is that of one task: [`backward_team`](super::backward_team).

use std::ops::Range;

use rayon::prelude::*;

use super::Ssd;
use super::backward_team::{Sums, Task, Worker};
use super::cumsum::timestep;
use crate::rows::{Rows, column_blocks};
use crate::simd::Level;

/// Most heads of a team. They share products with B and C; teams run in parallel.
const TEAM: usize = 4;
/// Tokens of a parallel task that sums over teams.
const ROW_BLOCK: usize = 64;

/// Where the gradients of [`ssd_backward`] go: those of activations are written, those of parameters
/// are added to what is there.
#[derive(Debug)]
pub struct SsdGradients<'a> {
    /// `[T, H, P]`
    pub dx: &'a mut [f32],
    /// Of the raw steps, `[T, H]`.
    pub ddt: &'a mut [f32],
    /// `[T, G, N]`
    pub db: &'a mut [f32],
    /// `[T, G, N]`
    pub dc: &'a mut [f32],
    /// `[T, H, P]`; none where there is no gate.
    pub dz: Option<&'a mut [f32]>,
    /// `[H]`
    pub da: &'a mut [f32],
    /// `[H]`; may be left out.
    pub ddt_bias: Option<&'a mut [f32]>,
    /// `[H]` or `[H, P]`, as `d`; may be left out.
    pub dd: Option<&'a mut [f32]>,
}

/// Turns the gradients of what [`ssd`](super::ssd) returns into those of what it was given.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `input` | see [`Ssd`] | what the forward was given |
/// | `runs` | lengths, sum T | tokens of each sequence; may be 0 |
/// | `states` | a `[H, P, N]` for each run | state before its first token |
/// | `dout` | `[T, H * P]` | gradient of y |
/// | `dstates` | a `[H, P, N]` for each run | gradient of the state after the last token, replaced by that of the state before the first |
/// | `out` | see [`SsdGradients`] | |
///
/// A step that a limit replaces has no gradient. Gradients of activations and states have the same bits
/// whatever runs are in the call; those of parameters are summed run by run.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn ssd_backward(
    input: &Ssd<'_>,
    runs: &[usize],
    states: &[&[f32]],
    dout: Rows<'_>,
    dstates: &mut [&mut [f32]],
    out: SsdGradients<'_>,
) {
    ssd_backward_at(Level::detect(), input, runs, states, dout, dstates, out);
}

#[track_caller]
pub(super) fn ssd_backward_at(
    level: Level,
    input: &Ssd<'_>,
    runs: &[usize],
    states: &[&[f32]],
    dout: Rows<'_>,
    dstates: &mut [&mut [f32]],
    mut out: SsdGradients<'_>,
) {
    input.check(runs);
    let Ssd { nheads, headdim, dstate, .. } = *input;
    let state_len = nheads * headdim * dstate;
    assert_eq!(states.len(), runs.len(), "states");
    assert!(states.iter().all(|s| s.len() == state_len), "states");
    assert_eq!((dout.len(), dout.width()), (input.x.len(), nheads * headdim), "dout");
    assert_eq!(dstates.len(), runs.len(), "dstates");
    assert!(dstates.iter().all(|s| s.len() == state_len), "dstates");
    out.check(input);

    if nheads * headdim == 0 {
        out.ddt.fill(0.0);
        out.db.fill(0.0);
        out.dc.fill(0.0);
        return;
    }
    let call = Call::new(level, input, dout);
    let team = team_size(nheads / input.ngroups);
    let nteams = nheads / team;
    let mut parts = vec![0.0; input.x.len() * nteams * 2 * dstate];
    let tasks = tasks(input, team, runs, states, dstates, &mut parts, &mut out);
    let worker = || Worker::new(team, headdim, dstate);
    let run = |worker: &mut Worker, task: Task<'_>| worker.run(&call, task);
    let sums: Vec<Sums> = tasks.into_par_iter().map_init(worker, run).collect();
    for (i, sums) in sums.iter().enumerate() {
        let first = i % nteams * team;
        out.add(first..first + team, headdim, sums);
    }
    sum_teams(input, nteams, runs, &parts, &mut out);
}

impl SsdGradients<'_> {
    #[track_caller]
    fn check(&self, input: &Ssd<'_>) {
        let (tokens, heads, groups) = (input.x.len(), input.nheads, input.ngroups);
        assert_eq!(self.dx.len(), tokens * heads * input.headdim, "dx");
        assert_eq!(self.ddt.len(), tokens * heads, "ddt");
        assert_eq!(self.db.len(), tokens * groups * input.dstate, "db");
        assert_eq!(self.dc.len(), tokens * groups * input.dstate, "dc");
        assert_eq!(self.dz.is_some(), input.z.is_some(), "dz");
        assert!(self.dz.as_ref().is_none_or(|dz| dz.len() == self.dx.len()), "dz");
        assert_eq!(self.da.len(), heads, "da");
        assert!(self.ddt_bias.as_ref().is_none_or(|db| db.len() == heads), "ddt_bias");
        assert!(
            self.dd.as_ref().is_none_or(|dd| Some(dd.len()) == input.d.map(<[f32]>::len)),
            "dd"
        );
    }

    /// Adds what a task has for the parameters of its heads.
    fn add(&mut self, heads: Range<usize>, headdim: usize, sums: &Sums) {
        let nheads = self.da.len();
        for (i, head) in heads.enumerate() {
            self.da[head] += sums.da[i] as f32;
            if let Some(ddt_bias) = self.ddt_bias.as_deref_mut() {
                ddt_bias[head] += sums.ddt_bias[i] as f32;
            }
            let channels = &sums.dd[i * headdim..][..headdim];
            match self.dd.as_deref_mut() {
                Some(dd) if dd.len() == nheads => dd[head] += channels.iter().sum::<f64>() as f32,
                Some(dd) => {
                    let dd = &mut dd[head * headdim..][..headdim];
                    dd.iter_mut().zip(channels).for_each(|(dd, sum)| *dd += *sum as f32);
                }
                None => {}
            }
        }
    }
}

/// What is the same for all tasks.
pub(super) struct Call<'a> {
    pub(super) level: Level,
    pub(super) input: &'a Ssd<'a>,
    pub(super) dout: Rows<'a>,
    /// Steps `[T, H]`, after their limits.
    pub(super) dt: Vec<f32>,
    /// Their derivatives by the raw steps, `[T, H]`.
    pub(super) slopes: Vec<f32>,
}

impl<'a> Call<'a> {
    fn new(level: Level, input: &'a Ssd<'a>, dout: Rows<'a>) -> Self {
        let mut dt = Vec::with_capacity(input.dt.len() * input.nheads);
        (0..input.dt.len()).for_each(|t| dt.extend_from_slice(input.dt.row(t)));
        let no_limit = (f32::NEG_INFINITY, f32::INFINITY);
        timestep(&mut dt, input.dt_bias, input.dt_softplus, no_limit);
        let mut slopes = dt.clone();
        timestep(&mut dt, None, false, input.dt_limit);
        let slope = |(slope, dt): (&mut f32, &f32)| {
            let limited = *slope != *dt;
            *slope = match (limited, input.dt_softplus) {
                (true, _) => 0.0,
                // The sigmoid of what softplus was taken of.
                (false, true) => -(-dt).exp_m1(),
                (false, false) => 1.0,
            };
        };
        slopes.par_iter_mut().zip(&dt).with_min_len(1 << 12).for_each(slope);
        Self { level, input, dout, dt, slopes }
    }
}

/// Heads of a team, of those of a group: a share of them, so that teams are equal.
fn team_size(heads_per_group: usize) -> usize {
    (1..=TEAM).rev().find(|team| heads_per_group.is_multiple_of(*team)).unwrap_or(1)
}

/// The tasks of one run after another, each with its own piece of every output.
fn tasks<'a>(
    input: &Ssd<'_>,
    team: usize,
    runs: &[usize],
    states: &[&'a [f32]],
    dstates: &'a mut [&mut [f32]],
    parts: &'a mut [f32],
    out: &'a mut SsdGradients<'_>,
) -> Vec<Task<'a>> {
    let Ssd { nheads, headdim: p, dstate: n, .. } = *input;
    let nteams = nheads / team;
    let mut tasks = Vec::with_capacity(runs.len() * nteams);
    let (mut dx, mut ddt, mut parts) = (&mut *out.dx, &mut *out.ddt, parts);
    let mut dz = out.dz.as_deref_mut();
    let mut first = 0;
    for ((&len, state), dstate) in runs.iter().zip(states).zip(dstates) {
        let dx = column_blocks(cut(&mut dx, len * nheads * p), nheads * p, team * p);
        let mut dz = dz
            .as_mut()
            .map(|dz| column_blocks(cut(dz, len * nheads * p), nheads * p, team * p).into_iter());
        let ddt = column_blocks(cut(&mut ddt, len * nheads), nheads, team);
        let mut dstate = &mut **dstate;
        for (i, (dx, ddt)) in dx.into_iter().zip(ddt).enumerate() {
            let state_len = team * p * n;
            tasks.push(Task {
                tokens: first..first + len,
                heads: i * team..(i + 1) * team,
                state: &state[i * state_len..][..state_len],
                dstate: cut(&mut dstate, state_len),
                dx,
                ddt,
                dz: dz.as_mut().and_then(Iterator::next),
                db: cut(&mut parts, len * n),
                dc: cut(&mut parts, len * n),
            });
        }
        first += len;
    }
    tasks
}

/// Takes the first `len` elements off a slice.
#[expect(clippy::mut_mut, reason = "a slice that is shortened in its place")]
fn cut<'a>(data: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (piece, rest) = std::mem::take(data).split_at_mut(len);
    *data = rest;
    piece
}

/// Writes dB and dC, the sums over the teams of a group; `parts` is `[nteams, 2, L, N]` for each run.
fn sum_teams(
    input: &Ssd<'_>,
    nteams: usize,
    runs: &[usize],
    parts: &[f32],
    out: &mut SsdGradients<'_>,
) {
    let (n, row) = (input.dstate, input.ngroups * input.dstate);
    if n == 0 {
        return;
    }
    let (mut db, mut dc) = (&mut *out.db, &mut *out.dc);
    let mut first = 0;
    for &len in runs {
        let parts = &parts[first * nteams * 2 * n..][..len * nteams * 2 * n];
        for (which, out) in
            [cut(&mut db, len * row), cut(&mut dc, len * row)].into_iter().enumerate()
        {
            out.par_chunks_mut(ROW_BLOCK * row).enumerate().for_each(|(block, out)| {
                for (i, out) in out.chunks_exact_mut(n).enumerate() {
                    let (t, group) = (block * ROW_BLOCK + i / input.ngroups, i % input.ngroups);
                    let teams =
                        group * nteams / input.ngroups..(group + 1) * nteams / input.ngroups;
                    out.fill(0.0);
                    for team in teams {
                        let part = &parts[((team * 2 + which) * len + t) * n..][..n];
                        out.iter_mut().zip(part).for_each(|(out, part)| *out += part);
                    }
                }
            });
        }
        first += len;
    }
}
