//! `/v1/sessions`: conversations that are kept, as trees of turns.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use boostr::backend::Backend;
use boostr::session::{Session, Summary};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::{Id, Page};
use crate::app::{App, Loaded};
use crate::body::{JsonBody, OptionalJson};
use crate::desk::Taken;
use crate::error::{ApiError, Result};
use crate::turn::{kept, refused};

/// A session that is to be.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes a body")]
pub(crate) struct NewFields {
    /// Its name: 1 to 64 of `A-Z a-z 0-9 . _ -`; one is made up when none is given
    id: Option<String>,
    /// What the model is told before everything
    system: Option<String>,
}

/// A copy of a session, up to a turn.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes a body")]
pub(crate) struct BranchFields {
    /// The name of the copy; one is made up when none is given
    id: Option<String>,
    /// The last turn that it has; the head unless said otherwise
    turn: Option<u32>,
}

/// Where a session goes on from.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes a body")]
pub(crate) struct RewindFields {
    /// The turn; 0 is the beginning
    turn: Option<u32>,
    /// How many turns to go back; 1 when neither is given
    turns: Option<u32>,
}

/// A session.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionCard {
    id: String,
    /// `session`
    object: &'static str,
    /// In seconds since 1970
    created: u64,
    updated: u64,
    model: String,
    /// What the user said first
    title: String,
    /// Turns from the beginning to the head
    turns: usize,
    /// The turn that the next one goes on from; 0 at the beginning
    head: u32,
    /// Tokens of the sequence
    position: usize,
    /// Bytes of its state on disk
    state_bytes: u64,
    parent: Option<ParentTurn>,
    /// The file of its state, when it was asked to be saved
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
}

/// Where a session was branched off.
#[derive(Debug, Serialize, ToSchema)]
struct ParentTurn {
    session: String,
    turn: u32,
}

/// Bytes of JSON after which a page of turns ends.
const PAGE_BYTES: usize = 1 << 20;

/// A session with its turns, or a page of them.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionTree {
    #[serde(flatten)]
    card: SessionCard,
    /// By their numbers
    tree: Vec<TreeTurn>,
    /// Whether there are more: ask again with `after`, the number of the last one
    has_more: bool,
}

/// What was said once, and answered.
#[derive(Debug, Serialize, ToSchema)]
struct TreeTurn {
    id: u32,
    /// The turn that it goes on from; 0 at the beginning
    parent: u32,
    #[schema(value_type = Vec<Object>)]
    messages: Vec<Value>,
    position: usize,
    created: u64,
    /// Whether the answer was ended before its own end, by a limit or by hand
    is_cut: bool,
    /// The turn whose answer this one's begins with, if it went on from there
    #[serde(skip_serializing_if = "Option::is_none")]
    continues: Option<u32>,
}

/// All sessions, or a page of them; the one that was used last first.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionList {
    /// `list`
    object: &'static str,
    data: Vec<SessionCard>,
    /// Whether there are more: ask again with `after`, the name of the last one
    has_more: bool,
}

/// A session that is no more.
#[expect(clippy::struct_field_names, reason = "the names are OpenAI's")]
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Deleted {
    id: String,
    /// `session.deleted`
    object: &'static str,
    deleted: bool,
}

impl From<Summary> for SessionCard {
    fn from(summary: Summary) -> Self {
        let parent = summary.parent;
        Self {
            id: summary.id,
            object: "session",
            created: summary.created,
            updated: summary.updated,
            model: summary.model,
            title: summary.title,
            turns: summary.turns,
            head: summary.head,
            position: summary.position,
            state_bytes: summary.state_bytes,
            parent: parent.map(|of| ParentTurn { session: of.session, turn: of.turn }),
            file: None,
        }
    }
}

fn card<B: Backend>(session: &Session<B>) -> SessionCard {
    session.summary().into()
}

fn open<'a, B: Backend>(loaded: &'a Loaded<B>, id: &str) -> Result<(Session<B>, Taken<'a>)> {
    kept(loaded)?.open(&loaded.room, id, "id", 0)
}

pub(crate) async fn list<B: Backend>(
    State(app): State<Arc<App<B>>>,
    page: Page,
) -> Result<Json<SessionList>> {
    let loaded = app.ready()?;
    app.desks
        .sessions
        .blocking(&app, move || {
            let all = kept(&loaded)?.sessions.list().map_err(|error| refused(&error, "id"))?;
            let start = match &page.after {
                None => 0,
                Some(id) => {
                    all.iter().position(|summary| summary.id == *id).map_or(all.len(), |i| i + 1)
                }
            };
            let has_more = all.len() > start + page.limit;
            let cards = all.into_iter().skip(start).take(page.limit).map(SessionCard::from);
            Ok(Json(SessionList { object: "list", data: cards.collect(), has_more }))
        })
        .await
}

pub(crate) async fn create<B: Backend>(
    State(app): State<Arc<App<B>>>,
    OptionalJson(mut fields): OptionalJson,
) -> Result<(StatusCode, Json<SessionCard>)> {
    let loaded = app.ready()?;
    let id = fields.text("id")?.unwrap_or_else(|| app.ids.name("s-"));
    let system = fields.text("system")?;
    fields.finish()?;
    app.desks
        .sessions
        .blocking(&app, move || {
            let session = kept(&loaded)?.sessions.create(&id, system.as_deref());
            let session = session.map_err(|error| refused(&error, "id"))?;
            Ok((StatusCode::CREATED, Json(card(&session))))
        })
        .await
}

pub(crate) async fn one<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Id(id): Id,
    page: Page,
) -> Result<Json<SessionTree>> {
    let loaded = app.ready()?;
    let after = page.after.as_deref().map(str::parse).transpose();
    let after = after.map_err(|_| ApiError::field("after", "expected the number of a turn"))?;
    app.desks
        .sessions
        .blocking(&app, move || {
            let (session, _memory) = open(&loaded, &id)?;
            let (turns, has_more) = session.turns_after(after.unwrap_or(0), page.limit, PAGE_BYTES);
            let tree = turns.into_iter().map(|turn| TreeTurn {
                id: turn.id,
                parent: turn.parent,
                messages: turn.messages,
                position: turn.position,
                created: turn.created,
                is_cut: turn.is_cut,
                continues: turn.continues,
            });
            Ok(Json(SessionTree { card: card(&session), tree: tree.collect(), has_more }))
        })
        .await
}

pub(crate) async fn delete<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Id(id): Id,
) -> Result<Json<Deleted>> {
    let loaded = app.ready()?;
    app.desks
        .sessions
        .blocking(&app, move || {
            kept(&loaded)?.sessions.delete(&id).map_err(|error| refused(&error, "id"))?;
            Ok(Json(Deleted { id, object: "session.deleted", deleted: true }))
        })
        .await
}

pub(crate) async fn branch<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Id(id): Id,
    JsonBody(mut fields): JsonBody,
) -> Result<(StatusCode, Json<SessionCard>)> {
    let loaded = app.ready()?;
    let name = fields.text("id")?.unwrap_or_else(|| app.ids.name("s-"));
    let turn = fields.count("turn", 0..=u32::MAX as usize)?;
    fields.finish()?;
    app.desks
        .sessions
        .blocking(&app, move || {
            let (from, _memory) = open(&loaded, &id)?;
            let turn = turn.map_or_else(|| from.head(), |turn| turn as u32);
            let session = kept(&loaded)?.sessions.branch(&from, &name, turn);
            let session = session.map_err(|error| refused(&error, "id"))?;
            Ok((StatusCode::CREATED, Json(card(&session))))
        })
        .await
}

pub(crate) async fn rewind<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Id(id): Id,
    JsonBody(mut fields): JsonBody,
) -> Result<Json<SessionCard>> {
    let loaded = app.ready()?;
    let turn = fields.count("turn", 0..=u32::MAX as usize)?;
    let turns = fields.count("turns", 0..=u32::MAX as usize)?;
    fields.finish()?;
    if turn.is_some() && turns.is_some() {
        return Err(ApiError::field("turns", "not together with `turn`"));
    }
    app.desks
        .sessions
        .blocking(&app, move || {
            let (session, _memory) = open(&loaded, &id)?;
            let turn = match turn {
                Some(turn) => turn as u32,
                None => session.before_head(turns.unwrap_or(1)),
            };
            session.rewind(turn).map_err(|error| refused(&error, "turn"))?;
            Ok(Json(card(&session)))
        })
        .await
}

/// Every turn is on disk when its answer ends, so this says where.
pub(crate) async fn save<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Id(id): Id,
    OptionalJson(fields): OptionalJson,
) -> Result<Json<SessionCard>> {
    let loaded = app.ready()?;
    fields.finish()?;
    app.desks
        .sessions
        .blocking(&app, move || {
            let (session, _memory) = open(&loaded, &id)?;
            let file = session.state_file();
            let name = file.and_then(|file| Some(file.file_name()?.to_string_lossy().into_owned()));
            Ok(Json(SessionCard { file: name, ..card(&session) }))
        })
        .await
}
