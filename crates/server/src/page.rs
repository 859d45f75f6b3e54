//! The web page, whose files are part of the program.

use axum::Router;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::IntoResponse;
use axum::routing::get;

/// Nothing but what this server gives, and no code but that of its files: what a model writes stays text.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SVG: &str = "image/svg+xml";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// A file of the folder `js` by its name.
macro_rules! script {
    ($name:literal) => {
        (concat!("/js/", $name), SCRIPT, include_str!(concat!("../page/js/", $name)))
    };
}

const TEXT: &str = "text/plain; charset=utf-8";

/// Path, type and text of each file.
const FILES: [(&str, &str, &str); 24] = [
    ("/", HTML, include_str!("../page/index.html")),
    ("/style.css", CSS, include_str!("../page/style.css")),
    ("/icon.svg", SVG, include_str!("../page/icon.svg")),
    ("/vendor/marked.esm.js", SCRIPT, include_str!("../page/vendor/marked.esm.js")),
    ("/vendor/marked.LICENSE.md", TEXT, include_str!("../page/vendor/marked.LICENSE.md")),
    script!("actions.js"),
    script!("answer.js"),
    script!("app.js"),
    script!("composer.js"),
    script!("conversation.js"),
    script!("dialogs.js"),
    script!("dom.js"),
    script!("markdown.js"),
    script!("memory.js"),
    script!("prose.js"),
    script!("scroll.js"),
    script!("server.js"),
    script!("sessions.js"),
    script!("settings.js"),
    script!("state.js"),
    script!("talk.js"),
    script!("tree.js"),
    script!("trouble.js"),
    script!("words.js"),
];

/// Whether there is a file of the page at a path.
pub(crate) fn has(path: &str) -> bool {
    FILES.iter().any(|(file, ..)| *file == path)
}

/// The paths of the page.
pub(crate) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    FILES.into_iter().fold(Router::new(), |router, (path, kind, text)| {
        let file = get(move || async move {
            let headers: [(HeaderName, HeaderValue); 3] = [
                (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
                (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
                (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
            ];
            (headers, text).into_response()
        });
        router.route(path, file)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_module_that_another_imports_is_served() {
        let scripts = FILES.iter().filter(|(path, ..)| path.starts_with("/js/"));
        for (path, _, text) in scripts.clone() {
            for import in text.lines().filter(|line| line.starts_with("import ")) {
                let name = import.split('\'').nth(1).unwrap_or_default();
                let file = name.strip_prefix("./").map(|name| format!("/js/{name}"));
                let file = file.or_else(|| name.strip_prefix("..").map(str::to_owned));
                assert!(file.is_some_and(|file| has(&file)), "{path}: {import}");
            }
        }
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/page/js");
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), scripts.count());
    }

    /// What a model writes becomes elements and texts, never markup that the browser reads.
    #[test]
    fn no_script_of_ours_makes_markup_of_text() {
        let ways = ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("];
        let ways =
            ways.into_iter().chain(["new Function", "DOMParser", "createContextualFragment"]);
        let scripts = FILES.iter().filter(|(path, ..)| path.starts_with("/js/"));
        for (way, (path, _, text)) in ways.flat_map(|way| scripts.clone().map(move |it| (way, it)))
        {
            assert!(!text.contains(way), "{path} has {way}");
        }
    }
}
