//! Heads, bodies, names and keys, before a request is understood. Ids in names: `fixtures/CASES.md`.

use std::io::Write;
use std::net::Shutdown;
use std::thread;
use std::time::{Duration, Instant};

use boostr_server::{Config, Keys, Limits};
use serde_json::json;

use crate::client::{connect, raw, read, read_until, request};
use crate::server::{Setup, TestServer, endless, with};

fn quick(limits: Limits) -> TestServer {
    TestServer::with(Setup { config: Config { limits, ..Config::default() }, ..Setup::default() })
}

#[test]
fn r_d1_a_body_that_is_no_json_object_is_refused() {
    let server = TestServer::start();
    let deep = format!("{}{}", "[".repeat(5000), "]".repeat(5000));
    for body in ["{", "", "[]", "null", "\"x\"", "{\"prompt\": \"a\"", "\u{feff}[]", deep.as_str()]
    {
        let reply = server.send("POST", "/v1/completions", "", body);
        assert_eq!(reply.status, 400, "{body:.20}: {reply:?}");
        assert!(reply.error().starts_with("body: "), "{reply:?}");
    }
    // The mark that some programs begin with says nothing.
    let marked = "\u{feff}{\"prompt\": \"a\", \"max_tokens\": 1}";
    assert_eq!(server.send("POST", "/v1/completions", "", marked).status, 200);
    // Of a key that is there twice the last value counts.
    let twice = r#"{"prompt": "a", "max_tokens": "x", "max_tokens": 1}"#;
    assert_eq!(server.send("POST", "/v1/completions", "", twice).status, 200);
    let twice = r#"{"prompt": "a", "max_tokens": 1, "max_tokens": "x"}"#;
    assert_eq!(server.send("POST", "/v1/completions", "", twice).status, 400);
}

#[test]
fn r_d2_wrong_types_and_ranges_are_named() {
    let server = TestServer::start();
    for (body, param) in [
        (r#"{"prompt": "a", "temperature": "hot"}"#, "temperature"),
        (r#"{"prompt": "a", "max_tokens": -2}"#, "max_tokens"),
        (r#"{"prompt": "a", "n": 1e9}"#, "n"),
        (r#"{"prompt": "a", "stop": [1]}"#, "stop"),
        (r#"{"prompt": "a", "min_p": 1.5}"#, "min_p"),
        (r#"{"prompt": "a", "logprobs": true}"#, "logprobs"),
        (r#"{"prompt": "a", "suffix": "b"}"#, "suffix"),
        (r#"{"prompt": "a", "best_of": 9}"#, "best_of"),
        (r#"{"prompt": "a", "n": 3, "best_of": 2}"#, "best_of"),
        (r#"{"prompt": "a", "best_of": 2, "stream": true}"#, "best_of"),
        (r#"{"prompt": [[1], "x"]}"#, "prompt"),
        (r#"{"prompt": [99999999]}"#, "prompt"),
        (r#"{"prompt": []}"#, "prompt"),
        (r#"{"prompt": ""}"#, "prompt"),
        ("{}", "prompt"),
    ] {
        let reply = server.send("POST", "/v1/completions", "", body);
        assert_eq!(reply.status, 400, "{body}: {reply:?}");
        assert_eq!(reply.json()["error"]["param"], param, "{body}: {reply:?}");
        assert!(reply.error().contains(param), "{reply:?}");
    }
    // JSON has no NaN, and fields that are not known are ignored.
    assert_eq!(
        server.send("POST", "/v1/completions", "", r#"{"prompt": "a", "top_p": NaN}"#).status,
        400
    );
    let unknown =
        json!({"prompt": "a", "max_tokens": 1, "n_discard": -1, "top_k": 0, "top_p": null});
    assert_eq!(server.post("/v1/completions", &unknown).status, 200);
}

#[test]
fn r_d4_messages_that_are_none_are_named() {
    let server = TestServer::start();
    for messages in [
        json!([]),
        json!([{"role": "robot", "content": "x"}]),
        json!([{"role": "user", "content": null}]),
        json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ] {
        let reply = server.post("/v1/chat/completions", &json!({"messages": messages}));
        assert_eq!(reply.status, 400, "{reply:?}");
        assert!(reply.error().contains("messages"), "{reply:?}");
    }
}

#[test]
fn r_d5_a_prompt_that_is_too_long_is_refused_with_both_counts() {
    let server = quick(Limits { max_prompt: 8, ..Limits::default() });
    let body = json!({"prompt": "one two three four five six seven eight nine ten eleven twelve"});
    let reply = server.post("/v1/completions", &body);
    assert_eq!(reply.status, 400, "{reply:?}");
    let message = reply.error();
    assert!(message.contains("expected at most 8") && message.contains("tokens"), "{message}");
    assert_eq!(reply.json()["error"]["code"], "context_length_exceeded");
}

#[test]
fn r_d6_bodies_that_are_too_large_or_encoded_are_refused_early() {
    let server = quick(Limits { max_body: 10_000, ..Limits::default() });
    let head =
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    let reply = raw(server.address, format!("{head}Content-Length: 1073741824\r\n\r\n{{"));
    assert_eq!((reply.status, reply.error().contains("10000")), (413, true), "{reply:?}");

    let chunk = format!("1000\r\n{}\r\n", " ".repeat(0x1000));
    let chunked = format!("{head}Transfer-Encoding: chunked\r\n\r\n{}", chunk.repeat(1000));
    assert_eq!(raw(server.address, chunked).status, 413);

    let gzip = raw(
        server.address,
        format!("{head}Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{{}}"),
    );
    assert_eq!((gzip.status, gzip.error().is_empty()), (415, false));
    for kind in
        ["", "Content-Type: text/plain\r\n", "Content-Type: application/x-www-form-urlencoded\r\n"]
    {
        let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n";
        let reply = raw(server.address, format!("{head}{kind}Content-Length: 2\r\n\r\n{{}}"));
        assert_eq!((reply.status, reply.error().is_empty()), (415, false), "{kind}");
    }
    assert_eq!(raw(server.address, format!("{head}\r\n")).status, 411);
}

#[test]
fn r_d7_heads_that_are_too_large_are_refused() {
    let server = TestServer::start();
    let with_headers = |headers: &str| server.send("GET", "/livez", headers, "");
    let large = with_headers(&format!("X-Large: {}\r\n", "x".repeat(70_000)));
    assert_eq!((large.status, large.error().is_empty()), (431, false));
    let many = (0..101).map(|i| format!("X-{i}: x")).collect::<Vec<_>>().join("\r\n") + "\r\n";
    assert_eq!(with_headers(&many).status, 431);
    // These hyper refuses, which does not keep so much, and says nothing about it.
    let huge = with_headers(&format!("X-Huge: {}\r\n", "x".repeat(1 << 20)));
    assert_eq!((huge.status, huge.error()), (431, large.error()), "{huge:?}");
    let many = (0..300).map(|i| format!("X-{i}: x")).collect::<Vec<_>>().join("\r\n") + "\r\n";
    assert_eq!(with_headers(&many).error(), large.error());
    let path = server.send("GET", &format!("/{}", "x".repeat(70_000)), "", "");
    assert_eq!((path.status, path.error().contains("path")), (414, true), "{path:?}");
    for reply in [&huge, &path] {
        assert_eq!(reply.header("content-type"), Some("application/json"), "{reply:?}");
        assert_eq!(reply.header("connection"), Some("close"), "{reply:?}");
        assert!(reply.header("x-request-id").unwrap().starts_with("req-"), "{reply:?}");
        assert_eq!(reply.header("x-content-type-options"), Some("nosniff"), "{reply:?}");
    }
    let metrics = server.get("/metrics").body;
    assert!(metrics.contains("boostr_requests_total{code=\"414\",route=\"other\"} 1"));
    assert_eq!(with_headers("X-Small: x\r\n").status, 200);
}

#[test]
fn r_d8_clients_that_send_slowly_are_cut() {
    let limits = Limits {
        header_time: Duration::from_millis(300),
        body_time: Duration::from_millis(300),
        idle_time: Duration::from_millis(900),
        ..Limits::default()
    };
    let server = quick(limits);
    // No head, half a head, and a head that comes byte by byte.
    let start = Instant::now();
    assert!(read(&mut connect(server.address)).is_none());
    let mut half = connect(server.address);
    half.write_all(b"GET /livez HTTP/1.1\r\nHost: loc").unwrap();
    assert!(read(&mut half).is_none());
    let mut slow = connect(server.address);
    for byte in b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Slow: xxxxxxxxxxxxxxxx" {
        if slow.write_all(&[*byte]).is_err() {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    assert!(read(&mut slow).is_none());
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());

    let body = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{";
    let reply = raw(server.address, body);
    assert_eq!((reply.status, reply.error().is_empty()), (408, false), "{reply:?}");

    // Between requests there is more time than for a head, and it ends too.
    let mut idle = connect(server.address);
    for _ in 0..2 {
        idle.write_all(request("GET", "/livez", "", "").as_bytes()).unwrap();
        assert_eq!(read(&mut idle).unwrap().status, 200);
        thread::sleep(Duration::from_millis(500));
    }
    assert!(read(&mut idle).is_none());

    // A client that closes its side has gone, and harms nobody.
    let mut gone = server.begin("/v1/completions", &endless(4000));
    gone.shutdown(Shutdown::Write).unwrap();
    let _ = read(&mut gone);
    server.wait(Duration::from_secs(2), |stats| stats.running == 0);
    assert_eq!(server.get("/livez").status, 200);
}

#[test]
fn r_d13_other_names_and_other_sites_are_refused() {
    let server = TestServer::start();
    let port = server.address.port();
    let get = |host: &str| {
        raw(
            server.address,
            format!("GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"),
        )
    };
    for host in ["localhost", "LOCALHOST", "127.0.0.1", "[::1]"] {
        assert_eq!(get(host).status, 200, "{host}");
        assert_eq!(get(&format!("{host}:{port}")).status, 200, "{host}");
    }
    for host in
        ["evil.com", "localhost.evil.com", "127.0.0.1.evil.com", "evil.com:8080", "10.0.0.1"]
    {
        let reply = get(host);
        assert_eq!((reply.status, reply.error().contains("Host")), (403, true), "{host}");
    }
    for host in ["", "a b", "localhost\r\nHost: evil.com"] {
        assert_eq!(get(host).status, 400, "{host}");
    }
    let absolute = "GET http://evil.com/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n";
    assert_eq!(raw(server.address, absolute).status, 403);

    let post = |origin: &str| {
        server.send("POST", "/tokenize", &format!("Origin: {origin}\r\n"), "{\"content\": \"a\"}")
    };
    for origin in ["https://evil.com", "null", "http://localhost.evil.com", "http://localhost:1"] {
        let reply = post(origin);
        assert_eq!((reply.status, reply.error().contains("Origin")), (403, true), "{origin}");
    }
    assert_eq!(post("http://localhost").status, 200);
    let read = server.send("GET", "/v1/models", "Origin: https://evil.com\r\n", "");
    assert_eq!((read.status, read.header("access-control-allow-origin")), (200, None));
}

#[test]
fn pages_that_are_named_may_use_the_server() {
    let config = Config {
        cors_origins: vec!["https://good.org".into()],
        allowed_hosts: vec!["box.local".into()],
        ..Config::default()
    };
    let server = TestServer::with(Setup { config, ..Setup::default() });
    let origin = "Origin: https://good.org\r\n";
    let reply = server.send("POST", "/tokenize", origin, "{\"content\": \"a\"}");
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("access-control-allow-origin"), Some("https://good.org"));
    let asked = server.send(
        "OPTIONS",
        "/tokenize",
        &format!("{origin}Access-Control-Request-Method: POST\r\n"),
        "",
    );
    assert_eq!(asked.status, 204);
    assert!(asked.header("access-control-allow-headers").unwrap().contains("authorization"));
    let host = "GET /livez HTTP/1.1\r\nHost: box.local:1\r\n\r\n";
    assert_eq!(raw(server.address, host).status, 200);
}

#[test]
fn p_cors_x_stainless_a_page_that_is_named_may_send_what_headers_it_likes() {
    let config = Config { cors_origins: vec!["http://localhost:5173".into()], ..Config::default() };
    let server = TestServer::with(Setup { config, ..Setup::default() });
    let ask = |origin: &str, headers: &str| {
        let headers = format!(
            "Origin: {origin}\r\nAccess-Control-Request-Method: POST\r\n\
             Access-Control-Request-Headers: {headers}\r\n"
        );
        server.send("OPTIONS", "/v1/chat/completions", &headers, "")
    };
    for headers in ["authorization,content-type,x-stainless-os", "openai-beta, x-title", "baggage"]
    {
        let reply = ask("http://localhost:5173", headers);
        assert_eq!(
            (reply.status, reply.header("access-control-allow-headers")),
            (204, Some(headers))
        );
        assert!(reply.header("vary").unwrap().contains("access-control-request-headers"));
    }
    let other = ask("http://localhost:5174", "x-stainless-os");
    assert_eq!(other.header("access-control-allow-headers"), None, "{other:?}");
}

#[test]
fn p_public_no_auth_rebinding_an_open_server_goes_by_numbers_and_named_names() {
    let config =
        Config { loopback: false, allowed_hosts: vec!["box.local".into()], ..Config::default() };
    let open = Config { loopback: false, ..Config::default() };
    let closed = Config { loopback: false, keys: Keys::new(["secret"]), ..Config::default() };
    let start = |config| TestServer::with(Setup { config, ..Setup::default() });
    let (named, open, closed) = (start(config), start(open), start(closed));
    let ask = |server: &TestServer, host: &str| {
        let head = format!(
            "POST /tokenize HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nx-api-key: secret\r\n\
             Content-Type: application/json\r\nContent-Length: 15\r\n\r\n{{\"content\":\"a\"}}"
        );
        raw(server.address, head).status
    };
    for host in ["127.0.0.1:1", "192.168.1.7:8080", "[::1]", "[fe80::1]:8080", "localhost:8080"] {
        assert_eq!((ask(&open, host), ask(&named, host)), (200, 200), "{host}");
    }
    for host in
        ["evil.com:8080", "evil.com", "1.2.3.4.evil.com", "localhost.evil.com", "127.0.0.1."]
    {
        assert_eq!((ask(&open, host), ask(&named, host)), (403, 403), "{host}");
        // A page has no key.
        assert_eq!(ask(&closed, host), 200, "{host}");
    }
    assert_eq!((ask(&open, "box.local:1"), ask(&named, "box.local:1")), (403, 200));
}

#[test]
fn a_path_without_v1_is_told_of_it() {
    let server = TestServer::start();
    for (path, meant) in
        [("/chat/completions", "`/v1/chat/completions`"), ("/models", "`/v1/models`")]
    {
        let reply = server.get(path);
        assert_eq!((reply.status, reply.error().contains(meant)), (404, true), "{reply:?}");
    }
    assert!(!server.get("/nothing").error().contains("perhaps"));
}

#[test]
fn p_json_object_schema_ignored_unknown_fields_are_told_or_refused() {
    let start = |strict_fields| {
        let config = Config { strict_fields, ..Config::default() };
        TestServer::with(Setup { config, ..Setup::default() })
    };
    let body =
        json!({"prompt": "a", "max_tokens": 1, "format": "json", "n_discard": -1, "user": "x"});
    let reply = start(false).post("/v1/completions", &body);
    assert_eq!(
        (reply.status, reply.header("x-boostr-ignored")),
        (200, Some("format, n_discard")),
        "{reply:?}"
    );
    let strict = start(true);
    let reply = strict.post("/v1/completions", &body);
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("format")));
    let known =
        json!({"prompt": "a", "max_tokens": -1, "max_completion_tokens": 1, "format": null});
    let reply = strict.post("/v1/completions", &known);
    assert_eq!((reply.status, reply.header("x-boostr-ignored")), (200, None), "{reply:?}");
}

#[test]
fn r_d14_a_missing_or_wrong_key_opens_nothing() {
    let config = Config { keys: Keys::new(["secret"]), ..Config::default() };
    let server = TestServer::with(Setup { config, ..Setup::default() });
    let get = |path: &str, headers: &str| server.send("GET", path, headers, "");
    let huge = format!("Authorization: Bearer {}\r\n", "x".repeat(60_000));
    for headers in [
        "",
        "Authorization: Bearer wrong\r\n",
        "Authorization: secret\r\n",
        "x-api-key: secre\r\n",
        &huge,
    ] {
        let reply = get("/v1/models", headers);
        assert_eq!((reply.status, reply.error().is_empty()), (401, false), "{headers:.40}");
        assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
    }
    // Also for what is not there.
    assert_eq!(get("/nothing", "").status, 401);
    assert_eq!(get("/v1/models", "Authorization: Bearer secret\r\n").status, 200);
    assert_eq!(get("/v1/models", "x-api-key: secret\r\n").status, 200);
    for path in ["/", "/js/app.js", "/js/tree.js", "/livez", "/health", "/metrics", "/openapi.json"]
    {
        assert_eq!(get(path, "").status, 200, "{path}");
    }
    let config = Config { keys: Keys::new(["secret"]), loopback: false, ..Config::default() };
    let server = TestServer::with(Setup { config, ..Setup::default() });
    assert_eq!(server.get("/metrics").status, 401);
    assert_eq!(server.get("/health").status, 401);
    assert_eq!(server.get("/livez").status, 200);
}

#[test]
fn r_d18_old_and_odd_http_is_answered_or_refused() {
    let server = TestServer::start();
    let old = raw(server.address, "GET /livez HTTP/1.0\r\n\r\n");
    assert_eq!(old.status, 200);
    // Two requests at once get two answers in order.
    let mut piped = connect(server.address);
    let first = request("POST", "/tokenize", "", "{\"content\": \"a\"}");
    piped.write_all(format!("{first}{}", request("GET", "/livez", "", "")).as_bytes()).unwrap();
    let both = read_until(&mut piped, "\"status\":\"ok\"");
    assert!(both.find("\"tokens\"") < both.find("\"status\""), "{both}");

    // Both lengths: the chunks count, and what follows is no request of its own.
    let smuggled = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
                    Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n\
                    10\r\n{\"content\": \"ab\"\r\n1\r\n}\r\n0\r\n\r\n";
    let reply = raw(server.address, smuggled);
    assert!(matches!(reply.status, 200 | 400), "{reply:?}");
    for request in [
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n{}",
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n{}",
        "GET /livez HTTP/1.1\r\nHost : localhost\r\n\r\n",
        "GET /livez HTTP/9.9\r\nHost: localhost\r\n\r\n",
        "nonsense\r\n\r\n",
    ] {
        let reply = raw(server.address, request);
        assert_eq!((reply.status, reply.error().is_empty()), (400, false), "{request}: {reply:?}");
    }
    // What comes behind a good request on the same connection too, of the old version as well.
    let mut old = connect(server.address);
    let good = "GET /livez HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n";
    old.write_all(format!("{good}nonsense\r\n\r\n").as_bytes()).unwrap();
    let both = read_until(&mut old, "\"code\":null}}");
    assert!(both.find("\"status\"") < both.find("invalid_request_error"), "{both}");
    let mut piped = connect(server.address);
    let good = request("GET", "/livez", "", "");
    piped.write_all(format!("{good}nonsense\r\n\r\n").as_bytes()).unwrap();
    let both = read_until(&mut piped, "\"code\":null}}");
    assert!(both.find("\"status\"") < both.find("invalid_request_error"), "{both}");
    let trace = server.send("TRACE", "/livez", "X-Secret: x\r\n", "");
    assert_eq!((trace.status, trace.body.contains("X-Secret")), (405, false));
    let method = server.send("PUT", "/v1/completions", "", "{}");
    assert_eq!((method.status, method.header("allow")), (405, Some("POST")));
    assert!(!method.error().is_empty());
}

#[test]
fn r_d19_what_is_not_there_is_said_in_json() {
    let server = TestServer::start();
    for path in ["/nothing", "/v1", "/v1/models/other", "/../etc/passwd", "/%00", "/v1/sessions"] {
        let reply = server.get(path);
        assert_eq!((reply.status, reply.error().is_empty()), (404, false), "{path}");
    }
    let reply = server.post("/v1/completions", &with(endless(1), json!({"model": "gpt-9"})));
    assert_eq!((reply.status, reply.error().contains("`demo`")), (404, true), "{reply:?}");
    assert_eq!(reply.json()["error"]["code"], "model_not_found");
}

#[test]
fn every_answer_has_an_id_and_headers_against_harm() {
    let server = TestServer::start();
    let reply = server.get("/livez");
    assert!(reply.header("x-request-id").unwrap().starts_with("req-"));
    assert_eq!(reply.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(reply.header("cache-control"), Some("no-store"));
    let given = server.send("GET", "/nothing", "X-Request-Id: mine-1\r\n", "");
    assert_eq!(given.header("x-request-id"), Some("mine-1"));
    let harmful = server.send("GET", "/livez", "X-Request-Id: a\"b<c>\r\n", "");
    assert!(harmful.header("x-request-id").unwrap().starts_with("req-"));
    let page = server.get("/");
    assert!(page.header("content-security-policy").unwrap().contains("default-src 'none'"));
    assert!(page.header("content-type").unwrap().starts_with("text/html"));
    assert!(page.body.contains(r#"<script src="/js/app.js" type="module">"#));
    for path in ["/js/app.js", "/js/talk.js", "/style.css", "/icon.svg"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
}

#[test]
fn the_description_of_the_api_has_all_that_it_names() {
    let server = TestServer::start();
    let document = server.get("/openapi.json").json();
    let text = document.to_string();
    let schemas = document["components"]["schemas"].as_object().unwrap();
    for part in text.split("#/components/schemas/").skip(1) {
        let name = part.split('"').next().unwrap();
        assert!(schemas.contains_key(name), "no schema {name}");
    }
    assert!(document["paths"]["/v1/chat/completions"]["post"]["requestBody"].is_object());
    let options = &schemas["GenerationOptions"]["properties"];
    assert_eq!(options["temperature"]["maximum"], 2);
}
