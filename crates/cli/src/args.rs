//! The command line's grammar.
//!
//! `boostr MODEL ...` and `boostr -p ...` mean `boostr run ...`: [`parse`] puts the word in before
//! clap reads the rest, so that the grammar itself has no special case.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, ColorChoice, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

pub mod batch;
pub mod bench;
pub mod serve;
pub mod state;
pub mod talk;
pub mod training;

/// Reads a command line, the program's name first; also tells whether it is `boostr` alone.
pub fn parse(mut line: Vec<OsString>) -> Result<(Cli, bool), clap::Error> {
    let mut command = Cli::command();
    if line.windows(2).any(|pair| pair[0] == "--color" && pair[1] == "off")
        || line.iter().any(|word| word == "--color=off")
    {
        command = command.color(ColorChoice::Never);
    }
    if line.get(1).is_some_and(|word| word == "--help-all") {
        return Err(help_all(&mut command));
    }
    let at = skip_common(&line);
    let bare = at == line.len();
    let first = line.get(at).and_then(|word| word.to_str()).unwrap_or_default();
    let is_known = ["help", "-h", "--help", "-V", "--version"].contains(&first)
        || command
            .get_subcommands()
            .any(|c| c.get_name() == first || c.get_all_aliases().any(|alias| alias == first));
    if !is_known {
        line.insert(at, "run".into());
    }
    let matches = command.try_get_matches_from_mut(line)?;
    Ok((Cli::from_arg_matches(&matches).map_err(|e| e.format(&mut command))?, bare))
}

/// The help of every command, one after another, as clap's way to end with a text.
fn help_all(command: &mut clap::Command) -> clap::Error {
    command.build();
    let mut text = command.render_long_help().to_string();
    for command in command.get_subcommands_mut().filter(|command| command.get_name() != "help") {
        text.push_str(&format!("\n\nboostr {}\n", command.get_name()));
        text.push_str(&command.render_long_help().to_string());
    }
    clap::Error::raw(clap::error::ErrorKind::DisplayHelp, text)
}

/// Index of the first word that is no common option.
fn skip_common(line: &[OsString]) -> usize {
    let mut at = 1.min(line.len());
    while let Some(word) = line.get(at).and_then(|word| word.to_str()) {
        match word {
            "-t" | "--threads" | "--color" => at += 2,
            "--verbose" | "--quiet" => at += 1,
            _ if word.starts_with("--threads=") || word.starts_with("--color=") => at += 1,
            _ if word.len() > 2 && word.starts_with("-t") => at += 1,
            _ if word.len() > 1 && word.trim_end_matches(['v', 'q']) == "-" => at += 1,
            _ => break,
        }
    }
    at.min(line.len())
}

/// Mamba-2 language models on your CPU.
#[derive(Debug, Parser)]
#[command(name = "boostr", version, help_template = include_str!("help.txt"))]
pub struct Cli {
    #[command(flatten)]
    pub common: Common,
    #[command(subcommand)]
    pub command: Command,
}

/// What every command takes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Common options")]
pub struct Common {
    /// Threads; all processors by default. `bench` takes several: 1,2
    #[arg(short, long, global = true, value_name = "N", env = "BOOSTR_THREADS", hide_env = true)]
    #[arg(value_parser = parse_threads, value_delimiter = ',')]
    pub threads: Vec<usize>,
    /// Timings and choices on stderr
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Only errors on stderr
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Colours; NO_COLOR and CLICOLOR_FORCE are honoured
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: Color,
}

/// When to use colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// At a terminal
    Auto,
    /// Always
    On,
    /// Never
    Off,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Complete a prompt, or answer it
    #[command(alias = "generate", before_help = RUN_EXAMPLES, after_help = RUN_NOTES)]
    Run(Box<RunArgs>),
    /// Talk: answers in turn, kept under a name, branched and rewound
    #[command(before_help = talk::EXAMPLES, after_help = talk::NOTES)]
    Chat(Box<talk::TalkArgs>),
    /// A model over HTTP: the OpenAI API, sessions, a web page
    #[command(alias = "server", before_help = serve::EXAMPLES, after_help = serve::NOTES)]
    Serve(Box<serve::ServeArgs>),
    /// Answer a file of requests, many at once
    #[command(before_help = batch::EXAMPLES, after_help = batch::NOTES)]
    Batch(batch::BatchArgs),
    /// Layers, sizes, types and memory of a model
    #[command(alias = "inspect", before_help = SHOW_EXAMPLES)]
    Show(ShowArgs),
    /// Check a model folder or a file of one, and say what is wrong
    #[command(before_help = VERIFY_EXAMPLES)]
    Verify(VerifyArgs),
    /// Text to ids, ids to text, and counts
    #[command(before_help = TOKENIZER_EXAMPLES)]
    Tokenizer(TokenizerArgs),
    /// Logits, and states, of given tokens, to a safetensors file
    #[command(before_help = LOGITS_EXAMPLES)]
    Logits(LogitsArgs),
    /// A model in another file: folder to GGUF, GGUF to folder
    #[command(before_help = CONVERT_EXAMPLES, after_help = CONVERT_NOTES)]
    Convert(ConvertArgs),
    /// A model in fewer bits, and what that changes
    #[command(before_help = QUANTIZE_EXAMPLES, after_help = CONVERT_NOTES)]
    Quantize(QuantizeArgs),
    /// A new model from text, or on with one that was stopped
    #[command(before_help = training::TRAIN_EXAMPLES, after_help = training::TRAIN_NOTES)]
    Train(Box<training::TrainArgs>),
    /// A model changed by text: all of it, or adapters beside it
    #[command(before_help = training::TUNE_EXAMPLES, after_help = training::TRAIN_NOTES)]
    Tune(Box<training::TuneArgs>),
    /// Saved states: list, copy, mix, compare, remove
    #[command(before_help = state::EXAMPLES, after_help = state::NOTES)]
    State(state::StateArgs),
    /// How well a model predicts a text, or continuations
    #[command(before_help = training::EVAL_EXAMPLES)]
    Eval(training::EvalArgs),
    /// Speeds, beside what this machine can do
    #[command(before_help = bench::EXAMPLES)]
    Bench(bench::BenchArgs),
    /// Check this machine and the built-in model
    #[command(before_help = DOCTOR_EXAMPLES)]
    Doctor(DoctorArgs),
    /// Completions of a shell
    #[command(before_help = COMPLETIONS_EXAMPLES)]
    Completions(CompletionsArgs),
}

const RUN_EXAMPLES: &str = "\
Examples:
  boostr run ./mamba2-370m -p \"The sea was\" -n 64
  boostr run ./mamba2-370m --temp 0 --json < notes.txt
  boostr run smollm2-instruct.gguf -p \"What is the capital of France?\"
  boostr run smollm2-instruct.gguf --raw -p \"The capital of France is\"
  boostr run ./mamba2-370m -f book.txt -n 0 --save-state book.state
  boostr run ./mamba2-370m --state book.state -p \"The moral is\"";

const RUN_NOTES: &str = "\
A model with a chat template is told the prompt as a message of the user and answers it; --raw completes the text as \
it is, as every other model does. The text goes to stdout, everything else to stderr. One newline at the end of a file or of stdin is no \
part of the prompt. Without -n, generation ends at the model's end token or after max_new_tokens of \
generation_config.json, else 128 tokens. Sampling follows generation_config.json: without do_sample \
it is greedy, until --temp, --top-k, --top-p or --min-p ask for more. Each option here is also an \
environment variable (BOOSTR_TEMP, BOOSTR_TOP_K, ...); an option wins over its variable.";

const SHOW_EXAMPLES: &str = "\
Examples:
  boostr show ./mamba2-370m --tensors
  boostr show --json | jq .parameters";

const VERIFY_EXAMPLES: &str = "\
Examples:
  boostr verify ./mamba2-370m --values
  boostr verify model-00001-of-00002.safetensors";

const TOKENIZER_EXAMPLES: &str = "\
Examples:
  boostr tokenizer encode ./mamba2-370m \"It is a truth\"
  boostr tokenizer decode ./mamba2-370m 1147,310,247,5083";

const LOGITS_EXAMPLES: &str = "\
Examples:
  boostr logits -m ./mamba2-370m --tokens 5,17,3 --out logits.safetensors
  boostr logits -m ./mamba2-370m --tokens 5,17,3 --split 2,1 --states --out F.safetensors";

const CONVERT_EXAMPLES: &str = "\
Examples:
  boostr convert ./mamba2-370m mamba2-370m.gguf
  boostr convert mamba2-370m-q4_k_m.gguf ./mamba2-370m-again --type bf16";

const QUANTIZE_EXAMPLES: &str = "\
Examples:
  boostr quantize ./mamba2-370m mamba2-370m-q4_k_m.gguf --measure notes.txt
  boostr quantize ./mamba2-370m out.gguf -T q4_0 --tensor-type ssm_in=q8_0 --embedding q6_k";

const CONVERT_NOTES: &str = "\
Types: f32, f16, bf16; q8_0, q4_0, q4_1, q5_0, q5_1, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs; mixes \
q4_k_m, q5_k_m. Only matrices change type: convolutions, A, D, dt_bias, norms and all vectors are written as f32. A matrix \
whose rows are not whole blocks of a type gets the next wider one that fits; the table says so. \
--tensor-type goes by the names in GGUF files; the first that fits a name counts.";

const DOCTOR_EXAMPLES: &str = "\
Examples:
  boostr doctor
  boostr doctor ./mamba2-370m --json";

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  boostr completions bash > ~/.local/share/bash-completion/completions/boostr
  boostr completions fish > ~/.config/fish/completions/boostr.fish";

/// Which model, and how to open it.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Folder with config.json and weights, weight file in one, or GGUF file [env: BOOSTR_MODEL]
    #[arg(short, long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Use this tokenizer.json in place of the model's
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Read pytorch_model.bin, with a closed list of types and without running it
    #[arg(long)]
    pub allow_pickle: bool,
    /// Read all of the model into memory, so that nothing that becomes of its files matters; by default files of more
    /// than 64 MiB are mapped
    #[arg(long)]
    pub no_mmap: bool,
    /// What attention keeps keys and values as
    #[arg(long, value_name = "TYPE", value_enum, default_value_t)]
    pub kv_type: KvKind,
    /// Adapters beside the model: a folder of `boostr tune --lora` or PEFT. That folder in place of a model
    /// stands for the model that it names, with them
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Decode quantized weights to f32 first: slower, four to eight times the memory, nothing rounded
    #[arg(long)]
    pub exact: bool,
}

/// A type of kept keys and values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum KvKind {
    #[default]
    F32,
    F16,
    Bf16,
    #[value(name = "q8_0")]
    Q8_0,
}

impl From<KvKind> for boostr::ops::KvType {
    fn from(kind: KvKind) -> Self {
        match kind {
            KvKind::F32 => Self::F32,
            KvKind::F16 => Self::F16,
            KvKind::Bf16 => Self::Bf16,
            KvKind::Q8_0 => Self::Q8_0,
        }
    }
}

#[derive(Debug, Args)]
pub struct RunArgs {
    /// The model, unless -m names it; then this is the prompt
    #[arg(value_name = "MODEL")]
    pub first: Option<OsString>,
    /// The prompt
    #[arg(value_name = "PROMPT")]
    pub second: Option<OsString>,
    /// The prompt; - reads it from stdin
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    #[arg(conflicts_with_all = ["file", "tokens"])]
    pub prompt: Option<String>,
    /// Read the prompt from a file
    #[arg(short, long, value_name = "PATH", conflicts_with = "tokens")]
    pub file: Option<PathBuf>,
    /// Token ids as the prompt, like 5,17,3; ids are printed in place of text
    #[arg(long, value_name = "IDS")]
    #[arg(conflicts_with_all = ["system", "chat_template", "chat_template_kwargs"])]
    pub tokens: Option<String>,
    /// Most tokens to generate; -1 for no limit
    #[arg(short = 'n', long, alias = "n-predict", value_name = "N", allow_negative_numbers = true)]
    #[arg(env = "BOOSTR_MAX_TOKENS", hide_env = true, value_parser = parse_max_tokens)]
    pub max_tokens: Option<usize>,
    /// End before this text; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    #[command(flatten)]
    pub draft: DraftArgs,
    /// One JSON object with text, ids, finish_reason and timings
    #[arg(long)]
    pub json: bool,
    /// Accepted and ignored: the state is constant, there is no context limit
    #[arg(short, long, value_name = "N", hide = true, allow_negative_numbers = true)]
    pub ctx_size: Option<i64>,
    #[command(flatten)]
    pub state: state::RunStateArgs,
    #[command(flatten)]
    pub chat: ChatArgs,
    #[command(flatten)]
    pub grammar: GrammarArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// Where guesses come from.
#[derive(Debug, Clone, Args)]
pub struct DraftArgs {
    /// Guess tokens before they are computed, which changes no output: `lookup`, from what was said before, or a
    /// smaller model of the same vocabulary
    #[arg(long, value_name = "lookup|MODEL")]
    pub draft: Option<PathBuf>,
}

/// What the text has to be.
#[derive(Debug, Args)]
#[command(next_help_heading = "Grammar")]
pub struct GrammarArgs {
    /// The text is JSON of this schema: a file, or the schema itself
    #[arg(long, value_name = "FILE|JSON", conflicts_with_all = ["grammar", "regex"])]
    pub json_schema: Option<String>,
    /// The text follows the rules of this file, in Lark's notation
    #[arg(long, value_name = "FILE", conflicts_with = "regex")]
    pub grammar: Option<PathBuf>,
    /// The text is one that this regular expression matches, all of it
    #[arg(long, value_name = "REGEX", allow_hyphen_values = true)]
    pub regex: Option<String>,
}

/// How a prompt becomes a message, for models with a chat template.
#[derive(Debug, Args)]
#[command(next_help_heading = "Chat")]
pub struct ChatArgs {
    /// Complete the prompt as it is, without the model's chat template
    #[arg(long)]
    pub raw: bool,
    /// What the model is told before the prompt, as a system message
    #[arg(long, alias = "system-prompt", value_name = "TEXT", allow_hyphen_values = true)]
    #[arg(conflicts_with = "raw")]
    pub system: Option<String>,
    /// Use this chat template in place of the model's
    #[arg(long, value_name = "FILE", conflicts_with = "raw")]
    pub chat_template: Option<PathBuf>,
    /// More variables of the template, as a JSON object: {"enable_thinking": false}
    #[arg(long, value_name = "JSON", conflicts_with = "raw")]
    pub chat_template_kwargs: Option<String>,
}

/// How tokens are chosen.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Seed of the random choice; from the clock by default
    #[arg(short, long, value_name = "N", env = "BOOSTR_SEED", hide_env = true)]
    pub seed: Option<u64>,
    /// Temperature; 0 takes the likeliest token each time
    #[arg(long, alias = "temperature", value_name = "X", allow_negative_numbers = true)]
    #[arg(env = "BOOSTR_TEMP", hide_env = true)]
    pub temp: Option<f32>,
    /// Choose among the N likeliest; 0 for all
    #[arg(long, value_name = "N", env = "BOOSTR_TOP_K", hide_env = true)]
    pub top_k: Option<usize>,
    /// Choose among the likeliest that together reach X; 1 for all
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    #[arg(env = "BOOSTR_TOP_P", hide_env = true)]
    pub top_p: Option<f32>,
    /// Choose among those at least X times as likely as the likeliest; 0 for all
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    #[arg(env = "BOOSTR_MIN_P", hide_env = true)]
    pub min_p: Option<f32>,
    /// Make tokens less likely that have come already; 1 is off
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    #[arg(env = "BOOSTR_REPEAT_PENALTY", hide_env = true)]
    pub repeat_penalty: Option<f32>,
    /// How many of the last tokens --repeat-penalty looks at; 0 for all [default: 64]
    #[arg(long, value_name = "N", env = "BOOSTR_REPEAT_LAST_N", hide_env = true)]
    pub repeat_last_n: Option<usize>,
}

#[derive(Debug, Args)]
pub struct ShowArgs {
    /// The model; the built-in one by default
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub path: Option<PathBuf>,
    /// List every tensor with type, shape and bytes
    #[arg(long)]
    pub tensors: bool,
    /// Tokens of a sequence, for the memory that its state needs
    #[arg(long, value_name = "TOKENS", default_value_t = 4096)]
    pub context: usize,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
    /// The model [env: BOOSTR_MODEL]
    #[arg(short, long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Read pytorch_model.bin, with a closed list of types and without running it
    #[arg(long)]
    pub allow_pickle: bool,
}

#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Folder or file to check; the built-in model by default
    #[arg(value_name = "PATH", conflicts_with = "model")]
    pub path: Option<PathBuf>,
    /// Look for NaN and infinity in every weight, and run one token
    #[arg(long)]
    pub values: bool,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
    /// The model [env: BOOSTR_MODEL]
    #[arg(short, long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Read pytorch_model.bin, with a closed list of types and without running it
    #[arg(long)]
    pub allow_pickle: bool,
}

#[derive(Debug, Args)]
pub struct TokenizerArgs {
    #[command(subcommand)]
    pub command: TokenizerCommand,
}

#[derive(Debug, Subcommand)]
pub enum TokenizerCommand {
    /// Ids of a text, as a prompt of it would have
    Encode(TokenizerInput),
    /// Text of ids
    Decode(TokenizerInput),
    /// Number of ids of a text
    Count(TokenizerInput),
}

#[derive(Debug, Args)]
pub struct TokenizerInput {
    /// The model (a path that exists), then the text or the ids; stdin when there is no more
    #[arg(value_name = "[MODEL] TEXT|IDS")]
    pub words: Vec<OsString>,
    /// The text; - reads it from stdin
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "file")]
    pub prompt: Option<String>,
    /// Read the text from a file
    #[arg(short, long, value_name = "PATH")]
    pub file: Option<PathBuf>,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
    /// Model folder, or a tokenizer.json [env: BOOSTR_MODEL]
    #[arg(short, long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// A tokenizer.json
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct LogitsArgs {
    /// The model; the built-in one by default
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub path: Option<PathBuf>,
    /// Token ids, like 5,17,3; - reads them from stdin
    #[arg(long, value_name = "IDS")]
    pub tokens: String,
    /// The safetensors file to write: `logits` [T, V] in f32
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    /// Also write `conv_state.i` [1, conv_dim, d_conv - 1] and `ssm_state.i` [1, H, P, N]
    #[arg(long)]
    pub states: bool,
    /// Feed the tokens in pieces of these lengths, like 20,17
    #[arg(long, value_name = "LENGTHS", value_delimiter = ',')]
    pub split: Vec<usize>,
    #[command(flatten)]
    pub model: ModelArgs,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// A model to check too
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub path: Option<PathBuf>,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
    /// A model to check too [env: BOOSTR_MODEL]
    #[arg(short, long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Read pytorch_model.bin, with a closed list of types and without running it
    #[arg(long)]
    pub allow_pickle: bool,
}

/// What is converted to what.
#[derive(Debug, Args)]
pub struct FileArgs {
    /// Model folder, weight file in one, or GGUF file
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// The file to write, ending in .gguf, or the folder to make
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// Type of the matrices whose name the regular expression finds; may be given several times
    #[arg(long, value_name = "REGEX=TYPE")]
    pub tensor_type: Vec<String>,
    /// Type of the table of token embeddings
    #[arg(long, value_name = "TYPE")]
    pub embedding: Option<String>,
    /// Type of the head, where it is not the embedding
    #[arg(long, value_name = "TYPE")]
    pub head: Option<String>,
    /// Use this tokenizer.json in place of the model's
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Read pytorch_model.bin, with a closed list of types and without running it
    #[arg(long)]
    pub allow_pickle: bool,
    /// Replace OUT when it is a file that is there already
    #[arg(long)]
    pub force: bool,
    /// A line for each tensor, not for each kind
    #[arg(long)]
    pub tensors: bool,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ConvertArgs {
    #[command(flatten)]
    pub files: FileArgs,
    /// Type of the matrices; by default each keeps its own, in a folder as f32 if it is quantized
    #[arg(short = 'T', long = "type", value_name = "TYPE")]
    pub dtype: Option<String>,
}

#[derive(Debug, Args)]
pub struct QuantizeArgs {
    #[command(flatten)]
    pub files: FileArgs,
    /// Type of the matrices, or a mix
    #[arg(short = 'T', long = "type", value_name = "TYPE", default_value = "q4_k_m")]
    pub dtype: String,
    /// Tell how many bits a byte of this text takes, before and after
    #[arg(long, value_name = "FILE")]
    pub measure: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    pub shell: clap_complete::Shell,
}

fn parse_threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(threads @ 1..=1024) => Ok(threads),
        _ => Err("expected a number from 1 to 1024".into()),
    }
}

fn parse_max_tokens(text: &str) -> Result<usize, String> {
    match text {
        "-1" => Ok(usize::MAX),
        _ => text.parse().map_err(|_| "expected a number, or -1 for no limit".into()),
    }
}

/// Names of the commands, for suggestions.
pub fn command_names() -> Vec<String> {
    Cli::command().get_subcommands().map(|c| c.get_name().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> (Cli, bool) {
        parse(line.split_whitespace().map(OsString::from).collect()).unwrap()
    }

    #[test]
    fn the_grammar_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_line_without_a_command_runs() {
        for (line, alone) in [
            ("boostr", true),
            ("boostr -v --threads 2 --color=off", true),
            ("boostr -t2 -q", true),
            ("boostr models/default", false),
            ("boostr -n 5", false),
            ("boostr -t 2 -v -p hi", false),
            ("boostr run", false),
            ("boostr generate", false),
        ] {
            let (cli, bare) = parsed(line);
            assert!(matches!(cli.command, Command::Run(_)), "{line}");
            assert_eq!(bare, alone, "{line}");
        }
        assert!(matches!(parsed("boostr -t 2 show").0.command, Command::Show(_)));
        assert!(matches!(parsed("boostr inspect").0.command, Command::Show(_)));
    }

    #[test]
    fn the_help_fits_a_screen_and_names_every_command() {
        let help = Cli::command().render_help().to_string();
        assert!(help.lines().count() <= 40);
        assert!(help.lines().all(|line| line.chars().count() <= 100));
        for command in Cli::command().get_subcommands() {
            let name = command.get_name();
            assert!(help.lines().any(|line| line.trim_start().starts_with(name)), "{name}");
        }
    }

    #[test]
    fn the_help_of_each_command_starts_with_two_examples() {
        for mut command in Cli::command().get_subcommands().cloned() {
            let help = command.render_help().to_string();
            let lines: Vec<&str> = help.lines().take(3).collect();
            assert_eq!(lines[0], "Examples:", "{}", command.get_name());
            assert!(lines[1..].iter().all(|line| line.starts_with("  boostr ")), "{lines:?}");
        }
    }
}
