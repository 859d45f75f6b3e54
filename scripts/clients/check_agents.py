"""OpenAI's Agents SDK: an agent with a tool, by the Responses API and by chat completions."""

import asyncio
from importlib.metadata import version

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import MODEL, URL, check, run
from openai import AsyncOpenAI

set_tracing_disabled(True)
asked = []


@function_tool
def temperature(day: int) -> str:
    """The temperature of a day."""
    asked.append(day)
    return "21 degrees"


def agent(kind):
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    # It must call once; then the SDK lets it speak. An answer that is cut off is an error to it, so it ends with a sentence.
    settings = ModelSettings(tool_choice="required", max_tokens=800, temperature=0, parallel_tool_calls=False,
                             extra_body={"stop": ["."]})
    model = kind(model=MODEL, openai_client=client)
    return Agent(name="Guide", instructions="Be brief.", model=model, tools=[temperature], model_settings=settings)


def answers(kind, is_streamed):
    asked.clear()

    async def go():
        if not is_streamed:
            return await Runner.run(agent(kind), "How warm is it?", max_turns=4)
        result = Runner.run_streamed(agent(kind), "How warm is it?", max_turns=4)
        async for _ in result.stream_events():
            pass
        return result

    result = asyncio.run(go())
    assert asked and isinstance(asked[0], int), asked
    assert isinstance(result.final_output, str)


@check("an agent calls its tool and answers, by responses")
def _():
    answers(OpenAIResponsesModel, False)


@check("the same as a stream")
def _():
    answers(OpenAIResponsesModel, True)


@check("the same by chat completions")
def _():
    answers(OpenAIChatCompletionsModel, False)
    answers(OpenAIChatCompletionsModel, True)


run(f"openai-agents {version('openai-agents')}")
