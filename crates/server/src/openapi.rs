//! `/openapi.json`: the endpoints in a form that programs read, with the schemas of the types that the handlers use.

use axum::Json;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::api::{
    BranchFields, ChatChunk, ChatCompletion, ChatFields, CompletionFields, Deleted,
    DetokenizeFields, EmbeddingFields, Embeddings, Health, ModelCard, ModelList, NewFields, Prompt,
    Props, RewindFields, SessionCard, SessionList, SessionTree, TemplateFields, Text,
    TextCompletion, TokenizeFields, Tokens,
};
use crate::error::ErrorBody;
use crate::options::GenerationOptions;
use crate::shape::Shape;

/// An endpoint: method, path, what it does, the schemas of what it takes and gives.
type Endpoint = (&'static str, &'static str, &'static str, &'static [&'static str], Answer);

/// The form of a success.
enum Answer {
    Json(&'static str),
    /// JSON, with the status of what was made.
    Created(&'static str),
    /// JSON, or events of which each is JSON of the second.
    Stream(&'static str, &'static str),
    Plain,
}

const ENDPOINTS: &[Endpoint] = &[
    (
        "post",
        "/v1/chat/completions",
        "The assistant's turn in a conversation",
        &["GenerationOptions", "ChatFields", "ShapeFields"],
        Answer::Stream("ChatCompletion", "ChatChunk"),
    ),
    (
        "post",
        "/v1/completions",
        "A text goes on",
        &["GenerationOptions", "CompletionFields"],
        Answer::Stream("TextCompletion", "TextCompletion"),
    ),
    (
        "post",
        "/v1/embeddings",
        "Texts as vectors",
        &["EmbeddingFields"],
        Answer::Json("Embeddings"),
    ),
    ("get", "/v1/models", "What models there are: one", &[], Answer::Json("ModelList")),
    ("get", "/v1/models/{id}", "A model", &[], Answer::Json("ModelCard")),
    ("get", "/v1/sessions", "All sessions", &[], Answer::Json("SessionList")),
    ("post", "/v1/sessions", "A new session", &["NewFields"], Answer::Created("SessionCard")),
    ("get", "/v1/sessions/{id}", "A session with its turns", &[], Answer::Json("SessionTree")),
    ("delete", "/v1/sessions/{id}", "No more of a session", &[], Answer::Json("Deleted")),
    (
        "post",
        "/v1/sessions/{id}/branch",
        "A copy of a session, up to a turn",
        &["BranchFields"],
        Answer::Created("SessionCard"),
    ),
    (
        "post",
        "/v1/sessions/{id}/rewind",
        "Back to an earlier turn",
        &["RewindFields"],
        Answer::Json("SessionCard"),
    ),
    (
        "post",
        "/v1/sessions/{id}/save",
        "Where the state of a session is",
        &[],
        Answer::Json("SessionCard"),
    ),
    ("post", "/tokenize", "The tokens of a text", &["TokenizeFields"], Answer::Json("Tokens")),
    ("post", "/detokenize", "The text of tokens", &["DetokenizeFields"], Answer::Json("Text")),
    (
        "post",
        "/apply-template",
        "The text that a model is given for messages",
        &["TemplateFields"],
        Answer::Json("Prompt"),
    ),
    ("get", "/props", "What the model and its defaults are", &[], Answer::Json("Props")),
    ("get", "/health", "Whether requests are answered", &[], Answer::Json("Health")),
    ("get", "/livez", "Whether the process is up", &[], Answer::Json("Health")),
    ("get", "/metrics", "Counters, for Prometheus", &[], Answer::Plain),
];

/// Adds a type and those in it.
fn add<T: ToSchema>(schemas: &mut Map<String, Value>) {
    let mut all = Vec::new();
    T::schemas(&mut all);
    all.push((T::name().into_owned(), T::schema()));
    for (name, schema) in all {
        schemas.insert(name, serde_json::to_value(schema).unwrap_or_default());
    }
}

fn schemas() -> Map<String, Value> {
    let mut schemas = Map::new();
    add::<GenerationOptions>(&mut schemas);
    add::<ChatFields>(&mut schemas);
    add::<Shape>(&mut schemas);
    add::<ChatCompletion>(&mut schemas);
    add::<ChatChunk>(&mut schemas);
    add::<CompletionFields>(&mut schemas);
    add::<TextCompletion>(&mut schemas);
    add::<EmbeddingFields>(&mut schemas);
    add::<Embeddings>(&mut schemas);
    add::<ModelCard>(&mut schemas);
    add::<ModelList>(&mut schemas);
    add::<NewFields>(&mut schemas);
    add::<BranchFields>(&mut schemas);
    add::<RewindFields>(&mut schemas);
    add::<SessionCard>(&mut schemas);
    add::<SessionList>(&mut schemas);
    add::<SessionTree>(&mut schemas);
    add::<Deleted>(&mut schemas);
    add::<TokenizeFields>(&mut schemas);
    add::<Tokens>(&mut schemas);
    add::<DetokenizeFields>(&mut schemas);
    add::<Text>(&mut schemas);
    add::<TemplateFields>(&mut schemas);
    add::<Prompt>(&mut schemas);
    add::<Props>(&mut schemas);
    add::<Health>(&mut schemas);
    add::<ErrorBody>(&mut schemas);
    schemas
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

fn operation((method, path, summary, body, answer): &Endpoint) -> Value {
    let content = match answer {
        Answer::Json(name) | Answer::Created(name) => {
            json!({"application/json": {"schema": reference(name)}})
        }
        Answer::Stream(whole, piece) => json!({
            "application/json": {"schema": reference(whole)},
            "text/event-stream": {"schema": reference(piece)},
        }),
        Answer::Plain => json!({"text/plain": {"schema": {"type": "string"}}}),
    };
    let error = json!({"application/json": {"schema": reference("ErrorBody")}});
    let mut operation = json!({
        "summary": summary,
        "operationId": format!("{method}{}", path.replace(['/', '-'], "_").replace(['{', '}'], "")),
        "responses": {"default": {"description": "Refused or failed", "content": error}},
    });
    let status = if matches!(answer, Answer::Created(_)) { "201" } else { "200" };
    operation["responses"][status] = json!({"description": "Done", "content": content});
    if path.contains("{id}") {
        let schema = json!({"type": "string", "minLength": 1});
        operation["parameters"] =
            json!([{"name": "id", "in": "path", "required": true, "schema": schema}]);
    }
    if *path == "/health" {
        let health = json!({"application/json": {"schema": reference("Health")}});
        operation["responses"]["503"] = json!({"description": "Not now", "content": health});
    }
    if !body.is_empty() {
        let schema = match body {
            [one] => reference(one),
            many => json!({"allOf": many.iter().map(|name| reference(name)).collect::<Vec<_>>()}),
        };
        operation["requestBody"] = json!({"required": !matches!(body, ["NewFields"]), "content": {"application/json": {"schema": schema}}});
    }
    operation
}

pub(crate) async fn document() -> Json<Value> {
    let mut paths = Map::new();
    for endpoint in ENDPOINTS {
        let (method, path, ..) = endpoint;
        let item = paths.entry(*path).or_insert_with(|| json!({}));
        item[*method] = operation(endpoint);
    }
    Json(json!({
        "openapi": "3.1.0",
        "info": {
            "title": "boostr",
            "description": "The OpenAI API over one model, and what belongs to it",
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": "MIT OR Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }))
}
