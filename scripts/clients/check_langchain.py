"""langchain-openai: chats, streams, tools, structured answers, by both of OpenAI's APIs."""

from importlib.metadata import version
from typing import Literal

from checks import MODEL, URL, check, run
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]


@tool
def temperature(day: int) -> str:
    """The temperature of a day."""
    return f"{day}"


def chat(**more):
    return ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0, temperature=0, **more)


@check("a chat, whole and as a stream, by chat completions and by responses")
def _():
    for is_new in (False, True):
        model = chat(max_tokens=12, use_responses_api=is_new)
        whole = model.invoke("What is the sea?").text
        text = "".join(chunk.text for chunk in model.stream("What is the sea?"))
        assert text and text == whole, (is_new, text, whole)


@check("a tool that has to be called")
def _():
    for is_new in (False, True):
        model = chat(max_tokens=300, use_responses_api=is_new)
        done = model.bind_tools([temperature], tool_choice="temperature").invoke("How warm is it?")
        assert isinstance(done.tool_calls[0]["args"]["day"], int), done


@check("a structured answer")
def _():
    for method in ("json_schema", "function_calling"):
        done = chat(max_tokens=300).with_structured_output(Answer, method=method).invoke("Who?")
        assert done.kind in ("cat", "dog"), method


run(f"langchain-openai {version('langchain-openai')}")
