import json
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel, extra="forbid"):
    unit: Literal["celsius", "fahrenheit"]


provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
settings = {"max_tokens": 24, "extra_body": {"temperature": 0}}
texts = []
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    agent = Agent(kind("outrider-demo", provider=provider), model_settings=settings)
    texts.append(agent.run_sync(sys.argv[2]).output)
valid, formats = [], []
told = {**settings, "max_tokens": 80, "parallel_tool_calls": False}
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind("outrider-demo", provider=provider)
    found = Agent(model, model_settings=told, output_type=Weather).run_sync(sys.argv[2]).output
    valid.append(isinstance(found, Weather))
    native = Agent(model, model_settings=told, output_type=NativeOutput(Weather))
    formats.append(native.run_sync(sys.argv[2]).output.unit)
print(json.dumps({"chat": texts, "valid": valid, "format": formats}))
