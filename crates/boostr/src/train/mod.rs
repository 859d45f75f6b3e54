//! Training: from text and a model to a better model, in runs that survive being stopped.
//!
//! ```text
//! files ─ data::TokenFile ─ Batches ─ Trainer: Model<Recorded> ─ Tape ─ gradients ─ Optimizer ─ parameters ┐
//!                                        └──────────────────── the next step's model ─────────────────────┘
//! ```
//!
//! There is no second forward. A step makes the model of `models` on a client that records
//! ([`Tape`](crate::ops::Tape)), and takes its parameters back when it has the gradients.

pub mod bpe;
pub mod data;
mod gradients;
mod log;
mod lora;
mod model;
mod optimizer;
mod plot;
mod random;
mod run;
mod save;
mod schedule;
mod shape;
mod trainer;

pub use gradients::Gradients;
pub use log::{Metrics, MetricsLog, read_metrics};
pub use lora::LoraConfig;
pub use model::TrainableModel;
pub use optimizer::{AdamWConfig, Optimizer, Parameter, Parameters, decays};
pub use plot::{Scale, loss_svg, write_loss_svg};
pub use random::Random;
pub use run::{Ended, Event, Loss, MAY_CHANGE, Method, RunConfig, TrainRun, evaluate};
pub use save::{
    Checkpoints, Latest, NamedTensor, Saved, TrainerState, Written, differing_keys,
    has_checkpoints, latest,
};
pub use schedule::{Schedule, ScheduleKind};
pub use shape::{Shape, TrainFile};
pub use trainer::{StepReport, Trainer};
