//! Experts beside one for all that has a gate of its own: the feed-forward part of Qwen's mixtures.
//!
//! The two families spell it alike in `config.json` and in GGUF, and keep it under `mlp`. A file of either may have its
//! experts one by one or stacked.

use super::fields::{Fields, Need::Class, Need::Missing};
use super::gguf::{mlp_table, moe_table};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::nn::{GatedMixture, LayerSpec, MlpConfig, MoeConfig, MoePart, Routing, Row};

/// The parameters of the part.
const MLP: &str = "model.layers.#.mlp";

/// Sizes of the experts and of the one for all.
#[derive(Debug, Clone, PartialEq)]
pub struct GatedExperts {
    /// Those that are chosen from.
    pub moe: MoeConfig,
    /// The one that every token gets.
    pub shared: MlpConfig,
}

impl GatedExperts {
    /// The sizes of nothing, to be read into; weights of a token's experts sum to 1.
    pub(super) fn blank() -> Self {
        let mlp = MlpConfig::swiglu(0, 0);
        let moe = MoeConfig::new(0, mlp.clone(), Routing::SoftmaxTopK);
        Self { moe: MoeConfig { normalized: true, ..moe }, shared: mlp }
    }

    /// Visits the sizes; `class` is how many experts there are, and how many a token gets, where a file does not say.
    /// Where no layer `has_experts` they may be 0.
    pub(super) fn fields(
        &mut self,
        f: &mut Fields<'_>,
        d_model: usize,
        class: [usize; 2],
        has_experts: bool,
    ) -> Result<()> {
        let Self { moe, shared } = self;
        (moe.d_model, moe.expert.d_model, shared.d_model) = (d_model, d_model, d_model);
        let [experts, used] = class;
        for (names, value, class) in [
            (["num_experts", "expert_count"], &mut moe.experts, experts),
            (["num_experts_per_tok", "expert_used_count"], &mut moe.used, used),
            (["moe_intermediate_size", "expert_feed_forward_length"], &mut moe.expert.d_ff, 512),
            (
                ["shared_expert_intermediate_size", "expert_shared_feed_forward_length"],
                &mut shared.d_ff,
                512,
            ),
        ] {
            if has_experts {
                f.size(names, value, Class(class))?;
            } else {
                f.count(names, value, Missing(class))?;
            }
        }
        Ok(())
    }

    /// The layer with the part after its norm.
    pub(super) fn add_to(&self, layer: LayerSpec) -> LayerSpec {
        let Self { moe, shared } = self.clone();
        layer
            .described(MoePart { moe: moe.clone(), shared: Some(shared.clone()) })
            .beside("mlp", GatedMixture { moe, shared })
    }

    /// The rows of a folder whose experts are stacked.
    pub(super) fn stacks() -> Vec<Row> {
        let expert = |part: &str| format!("{MLP}.experts.@.{part}.weight");
        vec![
            Row::joined(
                format!("{MLP}.experts.gate_up_proj"),
                &[expert("gate_proj"), expert("up_proj")],
            ),
            Row::new(format!("{MLP}.experts.down_proj"), expert("down_proj")),
        ]
    }

    /// The rows of GGUF's table.
    pub(super) fn gguf_table() -> Vec<Row> {
        let mut table = moe_table(MLP);
        table.extend(mlp_table(&format!("{MLP}.shared_expert"), "_shexp"));
        let gate = format!("{MLP}.shared_expert_gate.weight");
        table.push(Row::new("blk.#.ffn_gate_inp_shexp.weight", gate));
        table
    }

    /// Gives stacks of experts the one name that they have with and without an end.
    pub(super) fn normalise(checkpoint: &mut Checkpoint) -> Result<()> {
        checkpoint.rename(|name| {
            let stack = name.strip_suffix(".weight")?;
            let is_stack = [".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"];
            is_stack.iter().any(|end| stack.ends_with(end)).then(|| stack.to_owned())
        })
    }
}
