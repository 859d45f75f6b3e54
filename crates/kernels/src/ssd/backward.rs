//! Gradients of the whole operation.
//!
//! Every run and every team of neighbouring heads is a task of its own: nothing of one reaches another.
//! What all heads of a group add to the gradients of b and c is summed within a team by the task, and over
//! teams, in their order, when all tasks are done. So no result depends on threads or on company.
//!
//! Memory beyond the outputs: a `[K, heads, P, N]` of states for each worker, for the run and the team
//! that it is at, and two `[T, N]` for each team of a group but the first.
//!
//! The mathematics is that of one task: [`backward_team`](super::backward_team).

use std::ops::Range;

use rayon::prelude::*;

use super::Ssd;
use super::backward_team::{Call, Sums, Task, Worker};
use crate::rows::{Rows, column_blocks};

/// Most heads of a team: they share loads and products of b and c, but do not run in parallel.
const TEAM: usize = 6;
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
    // Enters the thread pool once, not anew for each parallel loop in there.
    rayon::scope(|_| {
        let call = Call::new(input, dout);
        let team = team_size(input);
        let nteams = nheads / team;
        let mut parts = vec![0.0; (nteams - input.ngroups) * 2 * input.x.len() * dstate];
        let tasks = tasks(input, team, runs, states, dstates, &mut parts, &mut out);
        let worker = || Worker::new(team, headdim, dstate);
        let run = |worker: &mut Worker, task: Task<'_>| worker.run(&call, task);
        let sums: Vec<Sums> = tasks.into_par_iter().map_init(worker, run).collect();
        for (i, sums) in sums.iter().enumerate() {
            let first = i % nteams * team;
            out.add(first..first + team, headdim, sums);
        }
        sum_teams(input, team, runs, &parts, &mut out);
    });
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

/// Heads of a team: an equal share of a group's, and at most half of all.
fn team_size(input: &Ssd<'_>) -> usize {
    let most = TEAM.min(input.nheads.div_ceil(2));
    let heads_per_group = input.nheads / input.ngroups;
    (1..=most).rev().find(|team| heads_per_group.is_multiple_of(*team)).unwrap_or(1)
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
    let Ssd { nheads, headdim: p, ngroups, dstate: n, .. } = *input;
    let teams_per_group = nheads / ngroups / team;
    let mut tasks = Vec::with_capacity(runs.len() * nheads / team);
    let (mut dx, mut ddt, mut parts) = (Rest(out.dx), Rest(out.ddt), Rest(parts));
    let (mut db, mut dc) = (Rest(out.db), Rest(out.dc));
    let mut dz = out.dz.as_deref_mut().map(Rest);
    let mut first = 0;
    for ((&len, state), dstate) in runs.iter().zip(states).zip(dstates) {
        let dx = column_blocks(dx.take(len * nheads * p), nheads * p, team * p);
        let mut dz = dz
            .as_mut()
            .map(|dz| column_blocks(dz.take(len * nheads * p), nheads * p, team * p).into_iter());
        let ddt = column_blocks(ddt.take(len * nheads), nheads, team);
        let bands = |rest: &mut Rest<'a>| {
            let rows = rest.take(len * ngroups * n);
            column_blocks(rows, (ngroups * n).max(1), n.max(1)).into_iter()
        };
        let (mut db, mut dc) = (bands(&mut db), bands(&mut dc));
        let mut dstate = Rest(dstate);
        for (i, (dx, ddt)) in dx.into_iter().zip(ddt).enumerate() {
            let state_len = team * p * n;
            // The first team of a group writes to the outputs themselves.
            let is_first = i % teams_per_group == 0;
            let (db, dc) = if is_first { (db.next(), dc.next()) } else { (None, None) };
            tasks.push(Task {
                tokens: first..first + len,
                heads: i * team..(i + 1) * team,
                state: &state[i * state_len..][..state_len],
                dstate: dstate.take(state_len),
                dx,
                ddt,
                dz: dz.as_mut().and_then(Iterator::next),
                db: db.unwrap_or_else(|| rows(parts.take(len * n), n)),
                dc: dc.unwrap_or_else(|| rows(parts.take(len * n), n)),
            });
        }
        first += len;
    }
    tasks
}

/// What is left of a slice that is given away in pieces.
struct Rest<'a>(&'a mut [f32]);

impl<'a> Rest<'a> {
    /// Takes off the first `len` elements.
    fn take(&mut self, len: usize) -> &'a mut [f32] {
        let (piece, rest) = std::mem::take(&mut self.0).split_at_mut(len);
        self.0 = rest;
        piece
    }
}

/// Rows of `width` floats; none if they are empty.
fn rows(data: &mut [f32], width: usize) -> Vec<&mut [f32]> {
    data.chunks_exact_mut(width.max(1)).collect()
}

/// Adds to dB and dC the parts of all teams of a group but the first, whose part is there already;
/// `parts` is `[teams, 2, L, N]` for each run.
fn sum_teams(
    input: &Ssd<'_>,
    team: usize,
    runs: &[usize],
    parts: &[f32],
    out: &mut SsdGradients<'_>,
) {
    let (n, ngroups, row) = (input.dstate, input.ngroups, input.ngroups * input.dstate);
    let more = input.nheads / ngroups / team - 1;
    if more * n == 0 {
        return;
    }
    let (mut db, mut dc) = (Rest(out.db), Rest(out.dc));
    let mut first = 0;
    for &len in runs {
        let parts = &parts[first * ngroups * more * 2 * n..];
        for (which, out) in [db.take(len * row), dc.take(len * row)].into_iter().enumerate() {
            out.par_chunks_mut(ROW_BLOCK * row).enumerate().for_each(|(block, out)| {
                for (i, out) in out.chunks_exact_mut(n).enumerate() {
                    let (t, group) = (block * ROW_BLOCK + i / ngroups, i % ngroups);
                    for part in group * more..(group + 1) * more {
                        let part = &parts[((part * 2 + which) * len + t) * n..][..n];
                        out.iter_mut().zip(part).for_each(|(out, part)| *out += part);
                    }
                }
            });
        }
        first += len;
    }
}
