//! Chat templates: as Python renders them, and what becomes of bad ones.
//!
//! `fixtures/templates` holds templates of published models with the texts that Python makes of them. `BOOSTR_TEMPLATES`
//! may name another folder of templates for which `scripts/chat_goldens.py` has made texts.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{env, fs};

use boostr::Error;
use boostr::chat::{ChatTemplate, MAX_SOURCE, Options, Source};
use boostr::checkpoint::gguf::Metadata;
use boostr::generation_config::SpecialTokens;
use boostr::tokenizer::{Part, Tokenizer};
use serde_json::{Map, Value, json};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/templates")
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// 2026-03-09 14:05:07 UTC, the moment of `scripts/chat_goldens.py`.
fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_773_065_107)
}

fn list(value: &Value) -> Vec<Value> {
    value.as_array().unwrap().clone()
}

/// What a template makes of a conversation in the fixtures' form.
fn rendered(template: &ChatTemplate, conversation: &Value, tools: &Value) -> Result<String, Error> {
    let options = conversation["options"].as_object().unwrap();
    let options = Options {
        add_generation_prompt: options.contains_key("add_generation_prompt"),
        tools: options.get("tools").map(|name| list(&tools[name.as_str().unwrap()])),
        documents: options.get("documents").map(list),
        kwargs: options.get("kwargs").map_or_else(Map::new, |kw| kw.as_object().unwrap().clone()),
        now: Some(now()),
        continue_last: false,
        skip_thought: false,
    };
    template.render(&list(&conversation["messages"]), &options)
}

#[test]
fn every_conversation_is_rendered_as_python_does() {
    let folder = env::var_os("BOOSTR_TEMPLATES").map_or_else(fixtures, PathBuf::from);
    let conversations = list(&read(&fixtures().join("conversations.json")));
    let tools = read(&fixtures().join("tools.json"));
    let (mut templates, mut texts, mut differ) = (0, 0, Vec::new());
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    for path in paths.iter().filter(|path| path.extension().is_some_and(|e| e == "jinja")) {
        let file = path.file_stem().unwrap().to_string_lossy();
        let golden = read(&path.with_extension("json"));
        let special = SpecialTokens::from_json(path, &golden["special"].to_string()).unwrap();
        let text = fs::read_to_string(path).unwrap();
        let template = match ChatTemplate::new(path, &text, &special) {
            Ok(template) => template,
            Err(error) => {
                differ.push(format!("{file}: {error}"));
                continue;
            }
        };
        templates += 1;
        for conversation in &conversations {
            let name = conversation["name"].as_str().unwrap();
            let want = &golden["rendered"][name];
            let got = rendered(&template, conversation, &tools);
            let same = match (&got, want) {
                (Ok(got), Value::String(want)) => got == want,
                (Err(Error::Argument { name: "messages", reason }), want) => {
                    want["raises"] == *reason
                }
                (Err(_), want) => want["fails"].is_string(),
                // The one thing that is refused by Python alone.
                (Ok(_), want) => want["fails"] == "TypeError: 'NoneType' object is not iterable",
            };
            texts += 1;
            if !same {
                let got = got.unwrap_or_else(|error| error.to_string());
                differ.push(format!("{file}: {name}:\n  got  {got:?}\n  want {want}"));
            }
        }
    }
    assert!(differ.is_empty(), "{} of {texts}:\n{}", differ.len(), differ.join("\n"));
    assert!(templates >= 12 && texts >= 12 * 12, "{templates} templates, {texts} texts");
}

fn compile(source: &str) -> Result<ChatTemplate, String> {
    ChatTemplate::new("t.jinja", source, &SpecialTokens::default()).map_err(|e| e.to_string())
}

fn render_with(source: &str, options: &Options) -> Result<String, String> {
    let messages = [json!({"role": "user", "content": "Hi"})];
    compile(source)?.render(&messages, options).map_err(|e| e.to_string())
}

fn render(source: &str) -> Result<String, String> {
    render_with(source, &Options::default())
}

/// An answer that a grammar holds has no thought: what opens one in the prompt is closed there.
#[test]
fn a_thought_that_a_prompt_opens_is_closed_where_none_is_wanted() {
    let tokenizer = crate::constrained::tokenizer("qwen2").0;
    let messages = [json!({"role": "user", "content": "Hi"})];
    for (name, open, closed) in [
        ("Qwen-Qwen3.5-4B", "assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n"),
        ("Qwen-Qwen3-0.6B", "<|im_start|>assistant\n", "<|im_start|>assistant\n"),
        (
            "moonshotai-Kimi-K3",
            "<|open|>think<|sep|>",
            "<|open|>think<|sep|>\n<|close|>think<|sep|><|open|>response<|sep|>",
        ),
    ] {
        let path = fixtures().join(format!("{name}.jinja"));
        let text = fs::read_to_string(&path).unwrap();
        let template = ChatTemplate::new(&path, &text, &SpecialTokens::default()).unwrap();
        for (skip_thought, end) in [(false, open), (true, closed)] {
            let options =
                Options { add_generation_prompt: true, skip_thought, ..Options::default() };
            let text = template.rendered(&tokenizer, &messages, &options).unwrap();
            assert!(text.text().ends_with(end), "{name}: {:?}", text.text());
        }
    }
}

#[test]
fn the_language_is_that_of_transformers() {
    for (source, text) in [
        // Blocks are trimmed, and one newline at the end is none.
        ("a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a\n  b\nc"),
        ("a  {%- if true -%}  b  {%- endif +%}\nc\n\n", "ab\nc\n"),
        ("{# a remark #}\nx {#- another -#} y", "xy"),
        // Values are printed as Python does.
        (
            "{{ none }} {{ true }} {{ 1.0 }} {{ 1e100 }} {{ [1, 'a', none] }} {{ {'k': false} }}",
            "None True 1.0 1e+100 [1, 'a', None] {'k': False}",
        ),
        (
            "{{ missing }}|{{ messages[0].missing }}|{{ 'a' ~ 1 ~ none }}|{{ true | string }}",
            "||a1None|True",
        ),
        (
            "{{ [1, none, 'a'] | join('-') }} {{ [{'b': 1}, {'b': 2.0}] | join(attribute='b') }} {{ 'x' | upper }} {{ ' \\n x ' | trim }}",
            "1-None-a 12.0 X x",
        ),
        // Loops, variables and macros.
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}\
          {% endif %}{{ i }}{{ loop.index0 }}{% endfor %}",
            "002233",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            "3",
        ),
        (
            "{% macro f(x, y='z') %}{{ x }}{{ y }}{% endmacro %}{{ f('a') }}{{ f(y='b', x=1) }}",
            "az1b",
        ),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}", "a1B"),
        ("{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}{{ v }}{% endfor %}", "b1a2"),
        ("{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}", "a2b1"),
        // Slices and tests.
        (
            "{{ [1, 2, 3][::-1] }} {{ 'abc'[1:] }} {{ [1, 2, 3][-2:] }} {{ 'abc'[-1] }}",
            "[3, 2, 1] bc [2, 3] c",
        ),
        (
            "{{ {} is mapping }} {{ [] is mapping }} {{ 'a' is sequence }} {{ {} is sequence }} {{ 1 is sequence }}",
            "True False True True False",
        ),
        (
            "{{ 'a' is iterable }} {{ 'a' is string }} {{ 1 is number }} {{ true is boolean }} {{ x is defined }}",
            "True True True True False",
        ),
        // Functions and filters of transformers.
        (
            "{{ {'b': 'é<\\'', 'a': [1, 2.5, none]} | tojson }}",
            "{\"b\": \"é<'\", \"a\": [1, 2.5, null]}",
        ),
        (
            "{{ {'b': [1], 'a': 'é'} | tojson(indent=2, sort_keys=true, ensure_ascii=true) }}",
            "{\n  \"a\": \"\\u00e9\",\n  \"b\": [\n    1\n  ]\n}",
        ),
        ("{{ [1, {'a': 2}] | tojson(separators=(',', ':')) }}", "[1,{\"a\":2}]"),
        ("{{ strftime_now('%d %B %Y, %H:%M') }}", "09 March 2026, 14:05"),
        ("a{% generation %}\n b {%- endgeneration %} c", "a b c"),
    ] {
        let options = Options { now: Some(now()), ..Options::default() };
        assert_eq!(render_with(source, &options).as_deref(), Ok(text), "{source}");
    }
}

#[test]
fn what_generation_encloses_has_variables_of_its_own() {
    let source =
        "{% set x = 1 %}{% generation %}{{ x }}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}";
    assert_eq!(render(source).as_deref(), Ok("121"));
}

#[test]
fn messages_lose_what_is_null_and_reasoning_has_both_names() {
    let template = compile("{% for m in messages %}{{ m | tojson }}\n{% endfor %}").unwrap();
    let messages = [
        json!({"role": "assistant", "content": null, "reasoning": "r", "z": 1}),
        json!({"thinking": null, "reasoning_content": "c"}),
    ];
    let text = "{\"thinking\": \"r\", \"role\": \"assistant\", \"reasoning\": \"r\", \"z\": 1, \"reasoning_content\": \"r\"}\n\
                {\"thinking\": \"c\", \"reasoning_content\": \"c\"}\n";
    assert_eq!(template.render(&messages, &Options::default()).unwrap(), text);
    let error = template.render(&[json!("hi")], &Options::default()).unwrap_err();
    assert!(error.to_string().contains("expected objects"), "{error}");
}

#[test]
fn variables_are_given_and_may_replace_special_tokens() {
    let special = SpecialTokens { bos_token: Some("<s>".into()), ..SpecialTokens::default() };
    let source =
        "{{ bos_token }}{{ eos_token is defined }}{{ deep.a[0] }}{{ tools }}{{ documents }}";
    let template = ChatTemplate::new("t", source, &special).unwrap();
    let options = Options {
        kwargs: json!({"deep": {"a": [7]}, "tools": "no"}).as_object().unwrap().clone(),
        ..Options::default()
    };
    assert_eq!(template.render(&[], &options).unwrap(), "<s>False7NoneNone");
    let kwargs = json!({"bos_token": "B", "deep": {"a": "b"}}).as_object().unwrap().clone();
    let text = template.render(&[], &Options { kwargs, ..Options::default() }).unwrap();
    assert_eq!(text, "BFalsebNoneNone");
}

#[test]
fn of_several_templates_the_one_for_tools_is_used_with_tools() {
    let json = r#"{"chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]}"#;
    let source = Source::from_json("tokenizer_config.json", json).unwrap().unwrap();
    let template = source.compile().unwrap();
    let render = |tools| template.render(&[], &Options { tools, ..Options::default() }).unwrap();
    assert_eq!((render(None), render(Some(vec![]))), ("plain".into(), "tools".into()));

    let json = r#"{"chat_template": [{"name": "rag", "template": "x"}]}"#;
    let template = Source::from_json("c.json", json).unwrap().unwrap().compile().unwrap();
    let error = template.render(&[], &Options::default()).unwrap_err().to_string();
    assert!(error.contains("`c.json`") && error.contains("rag"), "{error}");
    assert_eq!(Source::from_json("c.json", "{}").unwrap(), None);
    for bad in [r#"{"chat_template": 1}"#, r#"{"chat_template": [{"name": "x"}]}"#] {
        let error = Source::from_json("c.json", bad).unwrap_err().to_string();
        assert!(error.contains("`chat_template`"), "{error}");
    }
}

#[test]
fn a_gguf_file_has_all_templates_by_name() {
    let special = || SpecialTokens { bos_token: Some("<s>".into()), ..SpecialTokens::default() };
    let json = json!({"chat_template": [
        {"name": "default", "template": "{{ bos_token }}plain"},
        {"name": "tool_use", "template": "{{ bos_token }}{{ tools | length }} tools"},
        {"name": "rag", "template": "{{ documents | length }} documents"},
    ]});
    let source = Source::from_json("c.json", &json.to_string()).unwrap().unwrap();
    let mut metadata = Metadata::new("m.gguf");
    assert_eq!(source.to_gguf(&mut metadata), [""; 0]);
    let text = |key: &str| metadata.text(&format!("tokenizer.chat_template{key}")).unwrap();
    assert_eq!(text(""), Some("{{ bos_token }}plain"));
    assert_eq!(text(".rag"), Some("{{ documents | length }} documents"));
    let names = metadata.strings("tokenizer.chat_templates").unwrap();
    assert_eq!(names, Some(vec!["tool_use", "rag"]));

    // The list of names is for other programs: the keys count.
    metadata.retain(|key| key != "tokenizer.chat_templates");
    let back = Source::from_gguf(&metadata, special()).unwrap().unwrap();
    assert_eq!(back.templates, source.templates);
    assert_eq!(back.to_json(), json["chat_template"]);
    let template = back.compile().unwrap();
    let render = |tools| template.render(&[], &Options { tools, ..Options::default() }).unwrap();
    assert_eq!((render(None), render(Some(vec![]))), ("<s>plain".into(), "<s>0 tools".into()));

    metadata.set("tokenizer.chat_template.rag", 1_u32);
    let error = Source::from_gguf(&metadata, special()).unwrap_err().to_string();
    assert!(error.contains("`tokenizer.chat_template.rag`: expected a string"), "{error}");
    metadata.retain(|key| !key.starts_with("tokenizer.chat_template"));
    assert_eq!(Source::from_gguf(&metadata, special()).unwrap(), None);
}

#[test]
fn a_single_template_is_a_text_in_both_kinds_of_file() {
    let source = Source::new("t.jinja", "text", SpecialTokens::default());
    assert_eq!(source.to_json(), "text");
    let mut metadata = Metadata::new("m.gguf");
    source.to_gguf(&mut metadata);
    assert_eq!(metadata.len(), 1);
    assert_eq!(metadata.text("tokenizer.chat_template").unwrap(), Some("text"));
}

#[test]
fn names_that_a_gguf_key_cannot_have_are_spelled_as_llama_cpp_does_or_told() {
    let named = |names: &[&str]| Source {
        templates: names.iter().map(|&name| (name.to_owned(), name.to_owned())).collect(),
        ..Source::new("t", "", SpecialTokens::default())
    };
    let mut metadata = Metadata::new("m.gguf");
    let lost = named(&["tool use", "ä.b", "tool-use", ""]).to_gguf(&mut metadata);
    let names = metadata.strings("tokenizer.chat_templates").unwrap();
    assert_eq!(names, Some(vec!["tool_use", "__b"]));
    assert_eq!(metadata.text("tokenizer.chat_template.tool_use").unwrap(), Some("tool use"));
    let message = |name: &str| format!("GGUF has no name for the chat template `{name}`");
    assert_eq!(lost, [message("tool-use"), message("")]);
}

#[test]
fn a_broken_template_is_an_error_only_for_whom_it_is() {
    let source = |default: &str, tool_use: &str| {
        let json = json!({"chat_template": [{"name": "tool_use", "template": tool_use},
            {"name": "default", "template": default}]});
        Source::from_json("c.json", &json.to_string()).unwrap().unwrap()
    };
    let template = source("plain", "\n{% if %}").compile().unwrap();
    let render = |tools| template.render(&[], &Options { tools, ..Options::default() });
    assert_eq!(render(None).unwrap(), "plain");
    let error = render(Some(vec![])).unwrap_err().to_string();
    assert!(error.starts_with("`c.json`: chat template `tool_use`: line 2: "), "{error}");
    let error = source("{% if %}", "tools").compile().unwrap_err().to_string();
    assert!(error.starts_with("`c.json`: chat template: line 1: "), "{error}");
}

#[test]
fn what_a_template_raises_is_the_error() {
    for source in [
        "{{ raise_exception('roles must alternate: ' ~ messages[0].role) }}",
        "{% macro f(x) %}{{ raise_exception('roles must alternate: ' + x) }}{% endmacro %}{{ f('user') }}",
    ] {
        let template = compile(source).unwrap();
        let messages = [json!({"role": "user"})];
        let error = template.render(&messages, &Options::default()).unwrap_err();
        let Error::Argument { name: "messages", reason } = error else { panic!("{error}") };
        assert_eq!(reason, "roles must alternate: user");
    }
}

#[test]
fn a_template_that_is_none_is_an_error_with_its_line() {
    for (source, words) in [
        ("a\n{% if %}", ["line 2", "t.jinja"]),
        ("{% for x in y %}", ["line 1", "end of block"]),
        ("\n\n{{ 'a", ["line 3", "string"]),
        ("{% unheard_of %}", ["line 1", "unheard_of"]),
        ("{{ a | }}", ["line 1", "t.jinja"]),
    ] {
        let error = compile(source).unwrap_err();
        for word in words {
            assert!(error.contains(word), "{source}: {error}");
        }
    }
    assert!(compile(&"{".repeat(MAX_SOURCE + 1)).unwrap_err().contains("bytes"));
}

#[test]
fn a_template_that_fails_says_where_and_why() {
    for (source, words) in [
        ("\n{{ 1 | no_such }}", ["line 2", "no_such"]),
        ("{{ 1 is no_such }}", ["line 1", "no_such"]),
        ("{{ no_such() }}", ["line 1", "no_such"]),
        ("{{ (1, 2).append(3) }}", ["line 1", "append"]),
        ("{{ [1].append() }}", ["line 1", "append"]),
        ("\n{{ [].pop() }}", ["line 2", "pop: no such place among 0"]),
        ("{{ {}.update({}) }}", ["line 1", "update"]),
        ("{{ missing.field }}", ["line 1", "undefined"]),
        ("{{ 'a' + 1 }}", ["line 1", "+"]),
        ("{{ missing | tojson }}", ["line 1", "JSON"]),
        ("{% include 'other' %}", ["line 1", "include"]),
        ("{{ ''.__class__.__mro__ }}", ["line 1", "undefined"]),
        ("{{ messages.__init__.__globals__ }}", ["line 1", "undefined"]),
    ] {
        let error = render(source).unwrap_err();
        for word in words {
            assert!(error.contains(word), "{source}: {error}");
        }
    }
}

/// Templates that would never end, or take all memory.
fn bombs() -> Vec<(&'static str, String, &'static str)> {
    let long = "{% set x = 'aaaaaaaaaaaaaaaa' %}";
    let doubled = |step: &str| format!("{long}{}{{{{ x }}}}", step.repeat(60));
    let in_loop = |step: &str, after: &str| {
        format!(
            "{{% set n = namespace(x='aaaaaaaa') %}}{{% for i in range(99999) %}}{step}{{% endfor %}}{after}"
        )
    };
    vec![
        (
            "loops in loops",
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}".into(),
            "steps",
        ),
        ("a long range", "{% for a in range(999999999999) %}{% endfor %}".into(), "range"),
        (
            "100 MB of text",
            "{% for a in range(99999) %}{{ 'x' * 1001 }}{% endfor %}".into(),
            "bytes",
        ),
        (
            "100 MB of raw text",
            format!("{{% for a in range(99999) %}}{}{{% endfor %}}", "x".repeat(1001)),
            "bytes",
        ),
        (
            "1 GB in a variable",
            format!(
                "{{% set x %}}{{% for a in range(99999) %}}{}{{% endfor %}}{{% endset %}}",
                "x".repeat(10_010)
            ),
            "bytes",
        ),
        ("recursion", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".into(), "recursion"),
        ("~ doubles", doubled("{% set x = x ~ x %}"), "bytes"),
        ("+ doubles", doubled("{% set x = x + x %}"), "bytes"),
        ("* multiplies", "{{ 'x' * 999999999999 }}".into(), "bytes"),
        ("* multiplies again", doubled("{% set x = x * 1000 %}"), "bytes"),
        ("lists multiply", "{{ [1] * 999999999999 }}".into(), ""),
        ("replace doubles", doubled("{% set x = x | replace('a', 'aa') %}"), "bytes"),
        ("replace method doubles", doubled("{% set x = x.replace('a', 'aa') %}"), "bytes"),
        ("join doubles", doubled("{% set x = [x, x] | join %}"), "bytes"),
        ("format doubles", doubled("{% set x = '{}{}'.format(x, x) %}"), "bytes"),
        ("capture doubles", doubled("{% set x %}{{ x }}{{ x }}{% endset %}"), "bytes"),
        (
            "ever longer in a loop",
            in_loop("{% set n.x = n.x ~ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' %}", ""),
            "",
        ),
        ("indent", "{{ 'a\\nb' | indent(999999999999) }}".into(), ""),
        (
            "lists in lists, shown",
            format!("{{% set x = 1 %}}{}{{{{ x }}}}", "{% set x = [x, x] %}".repeat(60)),
            "bytes",
        ),
        (
            "lists in lists, as JSON",
            format!("{{% set x = 1 %}}{}{{{{ x | tojson }}}}", "{% set x = [x, x] %}".repeat(60)),
            "bytes",
        ),
        (
            "lists in lists, joined",
            format!("{{% set x = 1 %}}{}{{{{ x | join }}}}", "{% set x = [x, x] %}".repeat(60)),
            "bytes",
        ),
        (
            "a list that grows while it is gone through",
            "{% set a = [1] %}{% for x in a %}{% set _ = a.append(x) %}{% endfor %}".into(),
            "steps",
        ),
        (
            "a list that is doubled",
            format!("{{% set a = [1] %}}{}", "{% set _ = a.extend(a) %}".repeat(60)),
            "steps",
        ),
        (
            "a long list that is shifted",
            format!(
                "{{% set a = [1] * 99999 %}}{}",
                "{% for x in range(99999) %}{% set _ = a.insert(0, x) %}{% endfor %}".repeat(9)
            ),
            "steps",
        ),
        ("a list in itself", "{% set a = [] %}{{ a.append(a) }}".into(), "cannot hold itself"),
        (
            "a list in itself by others",
            "{% set a = [] %}{% set b = {'x': (a, 1)} %}{{ a.insert(0, [b.values()]) }}".into(),
            "cannot hold itself",
        ),
        (
            "a list that a method, a macro or what is left of it has",
            "{% set a = [1] %}{% macro m() %}{{ a }}{% endmacro %}{{ a.append(a.append) }}".into(),
            "cannot hold itself",
        ),
        (
            "a list in what is extended",
            "{% set a = [1] %}{{ a.extend([2, a]) }}".into(),
            "cannot hold itself",
        ),
        ("parentheses", format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000)), ""),
        ("brackets", format!("{{{{ {}1{} }}}}", "[".repeat(100_000), "]".repeat(100_000)), ""),
        ("blocks", "{% if 1 %}".repeat(20_000), ""),
    ]
}

#[test]
fn a_template_that_would_not_end_is_an_error_soon() {
    for (name, source, words) in bombs() {
        let start = Instant::now();
        let error = render(&source).expect_err(name);
        let took = start.elapsed();
        assert!(took < Duration::from_secs(5), "{name}: {took:?}");
        assert!(error.contains(words) && error.len() < 1000, "{name}: {error}");
    }
}

#[test]
fn a_value_as_deep_as_the_steps_allow_is_dropped_without_harm() {
    let step = "{% set n.x = [n.x] %}";
    let source = format!(
        "{{% set n = namespace(x=1) %}}{{% for i in range(99999) %}}{}{{% endfor %}}",
        step.repeat(100)
    );
    assert!(render(&source).unwrap_err().contains("steps"));
    let source = "{% set n = namespace(x=1) %}{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}\
                  {{ n.x | tojson }}{{ n.x }}";
    assert_eq!(render(source).unwrap().matches('[').count(), 2 * 99_999);
    // A long chain is a deep expression.
    let chain = format!("{{{{ 1{} }}}}", "+1".repeat(100_000));
    assert!(matches!(render(&chain).as_deref(), Ok("100001") | Err(_)));
}

#[test]
fn a_long_conversation_is_rendered() {
    let path = fixtures().join("openai-gpt-oss-120b.jinja");
    let source = fs::read_to_string(&path).unwrap();
    let template = ChatTemplate::new(&path, &source, &SpecialTokens::default()).unwrap();
    let roles = ["user", "assistant"];
    let messages: Vec<Value> =
        (0..4000).map(|i| json!({"role": roles[i % 2], "content": "word ".repeat(100)})).collect();
    let text = template.render(&messages, &Options::default()).unwrap();
    assert!(text.matches("<|start|>user<|message|>word").count() == 2000);
}

fn tokenizer() -> Tokenizer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-tokenizer.json");
    Tokenizer::from_file(path).unwrap()
}

#[test]
fn an_answer_that_begins_a_conversation_goes_on_after_the_tools_and_its_own_head() {
    let tools = list(&read(&fixtures().join("tools.json"))["weather and sum"]);
    let tokenizer = tokenizer();
    let (mut alone, mut refused) = (Vec::new(), Vec::new());
    let mut paths: Vec<PathBuf> =
        fs::read_dir(fixtures()).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    for path in paths.iter().filter(|path| path.extension().is_some_and(|e| e == "jinja")) {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let golden = read(&path.with_extension("json"));
        let special = SpecialTokens::from_json(path, &golden["special"].to_string()).unwrap();
        let source = fs::read_to_string(path).unwrap();
        let template = ChatTemplate::new(path, &source, &special).unwrap();
        let options = Options {
            add_generation_prompt: true,
            continue_last: true,
            tools: Some(tools.clone()),
            now: Some(now()),
            ..Options::default()
        };
        let text = |messages: Value| {
            let rendered = template.rendered(&tokenizer, &list(&messages), &options);
            rendered.map(|rendered| rendered.text().to_owned())
        };
        let begun = json!({"role": "assistant", "content": "Once upon"});
        let asked = json!([{"role": "user", "content": "zq7asked"}, begun]);
        let asked = text(asked).unwrap_or_else(|error| panic!("{name}: {error}"));
        let head = asked.rsplit_once("zq7asked").unwrap().1;
        // What begins an answer, where it has a name.
        let role = if head.contains("ssistant") { "ssistant" } else { "" };
        match text(json!([begun])) {
            Ok(text) => {
                assert!(text.contains("weather"), "{name}: no tools in {text:?}");
                let (_, end) = text.rsplit_once(role).unwrap_or(("", "no role"));
                let is_near = end.len() < 100 && end.ends_with("Once upon");
                assert!(is_near || role.is_empty(), "{name}: {text:?} does not end as {head:?}");
                alone.push(name);
            }
            // In the words of the template, which wants a user first.
            Err(error) => refused.push(format!("{name}: {error}")),
        }
    }
    assert!(alone.len() > 3 * refused.len(), "{alone:?} {refused:#?}");
    // One that looks at its first message, whoever says it.
    let source = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{{ tools | tojson }}\
        {% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let template = ChatTemplate::new("t", source, &SpecialTokens::default()).unwrap();
    let tools = Some(vec![json!({"name": "f"})]);
    let options = Options { continue_last: true, tools, ..Options::default() };
    let begun = [json!({"role": "assistant", "content": "Once"})];
    let rendered = template.rendered(&tokenizer, &begun, &options).unwrap();
    assert_eq!(rendered.text(), "[{\"name\": \"f\"}]<assistant>Once");
}

#[test]
fn a_thought_that_was_cut_goes_on_where_it_ended() {
    let text = |end: &str, message: Value| {
        let end = end.replace('\n', "\\n");
        let messages = "{% for m in messages %}<{{ m.content }}>{% endfor %}";
        let source = format!("{messages}A:{{{{ '{end}' }}}}");
        let template = ChatTemplate::new("t", &source, &SpecialTokens::default()).unwrap();
        let options = Options { continue_last: true, ..Options::default() };
        let messages = [json!({"role": "user", "content": "Hi"}), message];
        let rendered = template.rendered(&tokenizer(), &messages, &options).unwrap();
        (rendered.text().to_owned(), rendered.within())
    };
    let think = Some("<think>");
    let tags = "<|open|>think<|sep|>";
    for (end, expected, within) in [
        ("<think>\n", "<Hi>A:<think>\nHm, so", think),
        ("", "<Hi>A:<think>\nHm, so", think),
        // A prompt that says that nothing is to be thought.
        ("<think>\n\n</think>\n\n", "<Hi>A:<think>\nHm, so", think),
        (tags, "<Hi>A:<|open|>think<|sep|>Hm, so", Some(tags)),
    ] {
        for content in [json!(""), Value::Null, json!([])] {
            for name in ["reasoning_content", "reasoning", "thinking"] {
                let message = json!({"role": "assistant", "content": content, name: "Hm, so"});
                assert_eq!(text(end, message), (expected.to_owned(), within), "{end} {name}");
            }
        }
        let message = json!({"role": "assistant", "reasoning_content": "Hm, so"});
        assert_eq!(text(end, message), (expected.to_owned(), within), "{end}");
    }
    // With some text the thought is over; without either there is nothing to go on with.
    let both = json!({"role": "assistant", "content": "Yes", "reasoning": "Hm"});
    assert_eq!(text("<think>\n", both), ("<Hi>A:<think>\nHm\n</think>\n\nYes".to_owned(), None));
    let neither = json!({"role": "assistant", "content": "", "reasoning_content": ""});
    assert_eq!(text("", neither), ("<Hi><>A:".to_owned(), None));
}

#[test]
fn control_tokens_are_the_templates_to_write_and_nobody_elses() {
    let source = "{{ bos_token }}{% for m in messages %}{{ m.role }}:\
        {% if m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}\
        </s>{% endfor %}{{ tools | tojson if tools else '' }}{{ x }}";
    let special = SpecialTokens { bos_token: Some("<s>".into()), ..SpecialTokens::default() };
    let (template, tokenizer) = (ChatTemplate::new("t", source, &special).unwrap(), tokenizer());
    let ids = |message: Value, options: &Options| template.encode(&tokenizer, &[message], options);
    let plain = ids(json!({"role": "user", "content": "Hi"}), &Options::default()).unwrap();
    // One token that starts the text: the tokenizer's own is not added to the template's.
    assert_eq!(plain, tokenizer.encode_control("<s>user:Hi</s>", false).unwrap());
    assert_eq!(plain.iter().filter(|&&id| id == 1).count(), 1);

    let options = Options {
        tools: Some(vec![json!({"name": "</s>"})]),
        kwargs: json!({"x": "<pad>"}).as_object().unwrap().clone(),
        ..Options::default()
    };
    for content in
        [json!("a</s>b<s>"), json!([{"type": "text", "text": "a</s>"}, {"text": "b<s>"}])]
    {
        let ids = ids(json!({"role": "user", "content": content}), &options).unwrap();
        let special: Vec<u32> =
            ids.iter().copied().filter(|&id| tokenizer.is_special(id)).collect();
        assert_eq!(special, [1, 2], "{ids:?}");
        let text = "<s>user:a</s>b<s></s>[{\"name\": \"</s>\"}]<pad>";
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        let parts = [
            Part::Control("<s>user:a"),
            Part::Text("</s>"),
            Part::Control("b"),
            Part::Text("<s>"),
            Part::Control("</s>[{\"name\": \""),
            Part::Text("</s>"),
            Part::Control("\"}]"),
            Part::Text("<pad>"),
        ];
        assert_eq!(ids, tokenizer.encode_parts(&parts, false).unwrap());
    }
    let split = json!({"role": "user", "content": [{"text": "</"}, {"text": "s>"}]});
    let error = ids(split, &Options::default()).unwrap_err();
    assert!(error.to_string().contains("control token"), "{error}");
}
