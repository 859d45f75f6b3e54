"""pydantic-ai: structured answers and tools by OpenAI's two APIs. Its part for Anthropic's does not run with this `anthropic`."""

from importlib.metadata import version
from typing import Literal

from checks import MODEL, URL, check, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Answer(BaseModel):
    kind: Literal["cat", "dog"]


OPENAI = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
MODELS = {
    "chat completions": OpenAIChatModel(MODEL, provider=OPENAI),
    "responses": OpenAIResponsesModel(MODEL, provider=OPENAI),
}


@check("an answer by a tool")
def _():
    for name, model in MODELS.items():
        agent = Agent(model, output_type=ToolOutput(Answer), model_settings={"max_tokens": 300})
        assert agent.run_sync("Who?").output.kind in ("cat", "dog"), name


@check("an answer that follows a schema")
def _():
    for name, model in MODELS.items():
        agent = Agent(model, output_type=NativeOutput(Answer), model_settings={"max_tokens": 300})
        assert agent.run_sync("Who?").output.kind in ("cat", "dog"), name


run(f"pydantic-ai {version('pydantic-ai-slim')}")
