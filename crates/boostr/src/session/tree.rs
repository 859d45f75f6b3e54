//! What the records of a log say: turns as a tree, and where in it the session stands.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Number of a turn in its session, from 1; 0 stands for the beginning, before any.
pub type TurnId = u32;

/// Of the format of a log.
const VERSION: u32 = 1;

/// What was said once, and answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// Its number.
    pub id: TurnId,
    /// The turn that it goes on from; 0 at the beginning.
    pub parent: TurnId,
    /// What was new: messages as the API of OpenAI has them, of which the last is the answer.
    pub messages: Vec<Value>,
    /// Tokens of the sequence after it.
    pub position: usize,
    /// When it was over, in seconds since 1970.
    pub created: u64,
    /// Name of the model that answered, for people.
    pub model: String,
    /// Its fingerprint.
    pub(super) fingerprint: String,
    /// The turn after whose ids those of this one come: the parent, or an earlier one where the template has changed
    /// what lies between.
    pub(super) base: TurnId,
    /// What the template wrote after the answer of `base`, up to where this answer begins.
    pub(super) text: String,
    /// All ids after those of `base`.
    pub(super) ids: Vec<u32>,
    /// How many of them, at the end, the model made.
    pub(super) generated: usize,
    /// Whether the answer was ended before its own end, by a limit or by hand.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_cut: bool,
    /// The turn whose answer this one's begins with: it went on from there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub continues: Option<TurnId>,
    /// The text of those, where it is not the content of the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) answer: Option<String>,
}

impl Turn {
    /// The text that the model made.
    pub(super) fn answer(&self) -> &str {
        let content = || self.messages.last()?.get("content")?.as_str();
        self.answer.as_deref().or_else(content).unwrap_or_default()
    }
}

/// Where a session was branched off.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The session.
    pub session: String,
    /// Its turn.
    pub turn: TurnId,
}

/// One entry of a log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Record {
    /// The first of all.
    Session {
        version: u32,
        created: u64,
        #[serde(default)]
        parent: Option<Origin>,
    },
    /// What the model is told before everything, from now on.
    System { created: u64, content: Option<String> },
    /// A turn, which is the head now.
    Turn(Turn),
    /// Another turn is the head.
    Head { created: u64, turn: TurnId },
}

impl Record {
    pub(super) fn session(created: u64, parent: Option<Origin>) -> Self {
        Self::Session { version: VERSION, created, parent }
    }
}

/// All turns of a session.
#[derive(Debug, Clone, Default)]
pub(super) struct Tree {
    pub(super) created: u64,
    pub(super) updated: u64,
    pub(super) parent: Option<Origin>,
    pub(super) system: Option<String>,
    pub(super) head: TurnId,
    turns: BTreeMap<TurnId, Turn>,
    places: BTreeMap<TurnId, Place>,
}

/// Where a turn is in the tree, and another before it, so far back that the way to any turn is short.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    depth: u64,
    jump: TurnId,
}

impl Tree {
    /// What the records of a log make, or what is wrong with them.
    pub(super) fn of(records: Vec<Record>) -> Result<Self, String> {
        let mut records = records.into_iter();
        let mut tree = match records.next() {
            Some(Record::Session { version: VERSION, created, parent }) => {
                Self { created, updated: created, parent, ..Self::default() }
            }
            Some(Record::Session { version, .. }) => {
                return Err(format!("version: expected {VERSION}, found {version}"));
            }
            Some(_) => return Err("expected a first record of type `session`".into()),
            None => return Err("expected a record, found none".into()),
        };
        records.try_for_each(|record| tree.apply(record))?;
        Ok(tree)
    }

    /// Takes in a record.
    pub(super) fn apply(&mut self, record: Record) -> Result<(), String> {
        let time = match record {
            Record::Session { .. } => return Err("a second record of type `session`".into()),
            Record::System { created, content } => {
                self.system = content;
                created
            }
            Record::Head { created, turn } => {
                if turn != 0 && !self.turns.contains_key(&turn) {
                    return Err(format!("record `head`: there is no turn {turn}"));
                }
                self.head = turn;
                created
            }
            Record::Turn(turn) => {
                self.check(&turn).map_err(|reason| format!("turn {}: {reason}", turn.id))?;
                self.head = turn.id;
                let created = turn.created;
                self.places.insert(turn.id, self.place_after(turn.parent));
                self.turns.insert(turn.id, turn);
                created
            }
        };
        self.updated = self.updated.max(time);
        Ok(())
    }

    fn check(&self, turn: &Turn) -> Result<(), String> {
        if turn.id <= self.last() {
            return Err(format!("expected a number above {}", self.last()));
        }
        if turn.parent != 0 && !self.turns.contains_key(&turn.parent) {
            return Err(format!("its parent {} is not there", turn.parent));
        }
        if !self.is_on_the_way(turn.base, turn.parent) {
            return Err(format!("its base {} is not before it", turn.base));
        }
        let position = self.position(turn.base).saturating_add(turn.ids.len());
        if turn.position != position {
            return Err(format!("position: expected {position}, found {}", turn.position));
        }
        if turn.generated > turn.ids.len() {
            let (expected, found) = (turn.ids.len(), turn.generated);
            return Err(format!("generated: expected at most {expected}, found {found}"));
        }
        Ok(())
    }

    fn place(&self, turn: TurnId) -> Place {
        self.places.get(&turn).copied().unwrap_or_default()
    }

    /// The place of a turn whose parent is `parent`: two jumps of one length make a longer one.
    fn place_after(&self, parent: TurnId) -> Place {
        let own = self.place(parent);
        let next = self.place(own.jump);
        let lengths = [
            own.depth.saturating_sub(next.depth),
            next.depth.saturating_sub(self.place(next.jump).depth),
        ];
        let jump = if lengths[0] == lengths[1] { next.jump } else { parent };
        Place { depth: own.depth.saturating_add(1), jump }
    }

    /// Whether a turn is `from` or one before it, or none at all.
    fn is_on_the_way(&self, turn: TurnId, mut from: TurnId) -> bool {
        let depth = self.place(turn).depth;
        while self.place(from).depth > depth {
            let Place { jump, .. } = self.place(from);
            let parent = self.get(from).map_or(0, |turn| turn.parent);
            from = if self.place(jump).depth >= depth { jump } else { parent };
        }
        turn == 0 || turn == from
    }

    pub(super) fn get(&self, turn: TurnId) -> Option<&Turn> {
        self.turns.get(&turn)
    }

    pub(super) fn turns(&self) -> impl Iterator<Item = &Turn> {
        self.turns.values()
    }

    /// The largest number of a turn.
    pub(super) fn last(&self) -> TurnId {
        self.turns.keys().next_back().copied().unwrap_or(0)
    }

    /// Tokens of the sequence after a turn.
    pub(super) fn position(&self, turn: TurnId) -> usize {
        self.get(turn).map_or(0, |turn| turn.position)
    }

    /// A turn and those before it, backwards. Parents have smaller numbers, so it ends.
    pub(super) fn path(&self, turn: TurnId) -> impl Iterator<Item = &Turn> {
        std::iter::successors(self.get(turn), |turn| self.get(turn.parent))
    }

    /// The turns whose ids make up those of one, forwards.
    pub(super) fn chain(&self, turn: TurnId) -> Vec<&Turn> {
        let chain = std::iter::successors(self.get(turn), |turn| self.get(turn.base));
        let mut chain: Vec<&Turn> = chain.collect();
        chain.reverse();
        chain
    }

    /// All ids of the sequence after a turn.
    pub(super) fn ids(&self, turn: TurnId) -> Vec<u32> {
        self.chain(turn).into_iter().flat_map(|turn| &turn.ids).copied().collect()
    }

    /// All messages up to a turn, what the model is told before everything first.
    pub(super) fn messages(&self, turn: TurnId) -> Vec<Value> {
        let mut turns: Vec<&Turn> = self.path(turn).collect();
        turns.reverse();
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        system.chain(turns.into_iter().flat_map(|turn| turn.messages.iter().cloned())).collect()
    }

    /// The records of a new session that stands after `turn`.
    pub(super) fn branch(&self, turn: TurnId, created: u64, parent: Origin) -> Vec<Record> {
        let mut turns: Vec<&Turn> = self.path(turn).collect();
        turns.reverse();
        let system = Record::System { created, content: self.system.clone() };
        let system = Some(system).filter(|_| self.system.is_some());
        let turns = turns.into_iter().cloned().map(Record::Turn);
        [Record::session(created, Some(parent))].into_iter().chain(system).chain(turns).collect()
    }
}
