"""instructor: answers of a class, by a schema and by tools."""

from importlib.metadata import version
from typing import Literal

import instructor
import openai
from checks import MODEL, URL, check, run
from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else the embedded model makes up fields until its limit
    kind: Literal["cat", "dog"]


@check("an answer of a class, by a schema and by a tool")
def _():
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)
        messages = [{"role": "user", "content": "Who?"}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, response_model=Answer, max_tokens=300, max_retries=0)
        assert answer.kind in ("cat", "dog"), mode


run(f"instructor {version('instructor')}")
