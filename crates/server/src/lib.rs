//! HTTP over one model: the OpenAI API, sessions, and a web page.
