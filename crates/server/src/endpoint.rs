//! The endpoints, each with its route and its part of `/openapi.json`: one list for both.

use std::sync::Arc;

use axum::handler::Handler;
use axum::routing::{self, MethodRouter};
use boostr::backend::Backend;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;
use utoipa::openapi::{RefOr, Schema};

use crate::app::App;
use crate::error::ErrorBody;

/// An endpoint: the handler of a method at a path, and what the document says of it.
pub(crate) struct Endpoint<B: Backend> {
    pub(crate) path: &'static str,
    pub(crate) route: MethodRouter<Arc<App<B>>>,
    method: &'static str,
    operation: Value,
    /// References to the types of its body.
    body: Vec<Value>,
    body_is_required: bool,
    schemas: Vec<(String, RefOr<Schema>)>,
}

impl<B: Backend> Endpoint<B> {
    pub(crate) fn get<H, T>(path: &'static str, summary: &str, handler: H) -> Self
    where
        H: Handler<T, Arc<App<B>>>,
        T: 'static,
    {
        Self::new("get", path, summary, routing::get(handler))
    }

    pub(crate) fn post<H, T>(path: &'static str, summary: &str, handler: H) -> Self
    where
        H: Handler<T, Arc<App<B>>>,
        T: 'static,
    {
        Self::new("post", path, summary, routing::post(handler))
    }

    pub(crate) fn delete<H, T>(path: &'static str, summary: &str, handler: H) -> Self
    where
        H: Handler<T, Arc<App<B>>>,
        T: 'static,
    {
        Self::new("delete", path, summary, routing::delete(handler))
    }

    fn new(
        method: &'static str,
        path: &'static str,
        summary: &str,
        route: MethodRouter<Arc<App<B>>>,
    ) -> Self {
        let id = path.replace(['/', '-'], "_").replace(['{', '}'], "");
        let operation = json!({"summary": summary, "operationId": format!("{method}{id}")});
        let (body, schemas) = (Vec::new(), Vec::new());
        let mut endpoint =
            Self { path, route, method, operation, body, body_is_required: true, schemas };
        if path.contains("{id}") {
            let schema = json!({"type": "string", "minLength": 1});
            endpoint.operation["parameters"] =
                json!([{"name": "id", "in": "path", "required": true, "schema": schema}]);
        }
        let error = endpoint.json::<ErrorBody>();
        endpoint.responds("default", "Refused or failed", &error)
    }

    /// The body has the fields of `T`, beside those of other types.
    pub(crate) fn takes<T: ToSchema>(mut self) -> Self {
        let reference = self.reference::<T>();
        self.body.push(reference);
        self
    }

    /// The body may have the fields of `T`, and may be left out.
    pub(crate) fn may_take<T: ToSchema>(mut self) -> Self {
        self.body_is_required = false;
        self.takes::<T>()
    }

    /// A success is a `T` as JSON.
    pub(crate) fn gives<T: ToSchema>(mut self) -> Self {
        let content = self.json::<T>();
        self.responds("200", "Done", &content)
    }

    /// A success made something: a `T` as JSON.
    pub(crate) fn creates<T: ToSchema>(mut self) -> Self {
        let content = self.json::<T>();
        self.responds("201", "Done", &content)
    }

    /// A success is a `T` as JSON, or events of which each is an `E` as JSON.
    pub(crate) fn streams<T: ToSchema, E: ToSchema>(mut self) -> Self {
        let mut content = self.json::<T>();
        content["text/event-stream"] = json!({"schema": self.reference::<E>()});
        self.responds("200", "Done", &content)
    }

    /// A success is a `T` as JSON, or lines of which each is one.
    pub(crate) fn streams_lines<T: ToSchema>(mut self) -> Self {
        let mut content = self.json::<T>();
        content["application/x-ndjson"] = json!({"schema": self.reference::<T>()});
        self.responds("200", "Done", &content)
    }

    /// A success is plain text.
    pub(crate) fn gives_text(self) -> Self {
        self.responds("200", "Done", &json!({"text/plain": {"schema": {"type": "string"}}}))
    }

    /// The server cannot answer at present, and says so by a `T`.
    pub(crate) fn or_not_now<T: ToSchema>(mut self) -> Self {
        let content = self.json::<T>();
        self.responds("503", "Not now", &content)
    }

    fn responds(mut self, status: &str, description: &str, content: &Value) -> Self {
        self.operation["responses"][status] =
            json!({"description": description, "content": content});
        self
    }

    fn json<T: ToSchema>(&mut self) -> Value {
        json!({"application/json": {"schema": self.reference::<T>()}})
    }

    /// A reference to the schema of `T`, which is added with those in it.
    fn reference<T: ToSchema>(&mut self) -> Value {
        T::schemas(&mut self.schemas);
        self.schemas.push((T::name().into_owned(), T::schema()));
        json!({"$ref": format!("#/components/schemas/{}", T::name())})
    }

    fn operation(&self) -> Value {
        let mut operation = self.operation.clone();
        let schema = match &self.body[..] {
            [] => return operation,
            [one] => one.clone(),
            several => json!({"allOf": several}),
        };
        operation["requestBody"] = json!({
            "required": self.body_is_required,
            "content": {"application/json": {"schema": schema}},
        });
        operation
    }
}

/// `/openapi.json`: the endpoints in a form that programs read.
pub(crate) fn document<B: Backend>(endpoints: &[Endpoint<B>]) -> Value {
    let (mut paths, mut schemas) = (Map::new(), Map::new());
    for endpoint in endpoints {
        let item = paths.entry(endpoint.path).or_insert_with(|| json!({}));
        item[endpoint.method] = endpoint.operation();
        for (name, schema) in &endpoint.schemas {
            schemas.insert(name.clone(), serde_json::to_value(schema).unwrap_or_default());
        }
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "boostr",
            "description": "The OpenAI API over one model, and what belongs to it",
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": "MIT OR Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    })
}
