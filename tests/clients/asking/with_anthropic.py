import json
import sys
from typing import Literal

import anthropic
from pydantic import BaseModel


class Weather(BaseModel, extra="forbid"):
    unit: Literal["celsius", "fahrenheit"]


client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none")
asked = {"model": "", "messages": [{"role": "user", "content": sys.argv[2]}], "max_tokens": 24}
told = {**asked, "extra_body": {"temperature": 0}}

whole = client.messages.create(**told)
with client.messages.stream(**told) as stream:
    pieces = list(stream.text_stream)
    final = stream.get_final_message()
counted = client.messages.count_tokens(model="", messages=asked["messages"])
schema = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
call = {
    **told,
    "max_tokens": 80,
    "tools": [{"name": "Weather", "description": "the weather", "input_schema": schema}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}
used = client.messages.create(**call)
with client.messages.stream(**call) as stream:
    streamed = stream.get_final_message()
formatted = client.messages.parse(**{**told, "max_tokens": 80}, output_format=Weather)
try:
    client.messages.create(**{**told, "model": "nothing"})
    refused = None
except anthropic.NotFoundError as error:
    refused = error.body["error"]["type"]
print(
    json.dumps(
        {
            "chat": [whole.content[0].text, "".join(pieces), final.content[0].text],
            "call": [each.content[-1].input["unit"] for each in (used, streamed)],
            "format": [formatted.parsed_output.unit],
            "valid": [used.stop_reason == streamed.stop_reason == "tool_use"],
            "refused": [refused],
            "tokens": [whole.usage.output_tokens, final.usage.output_tokens],
            "prompt": [whole.usage.input_tokens + whole.usage.cache_read_input_tokens, counted.input_tokens],
            "reasons": [whole.stop_reason, final.stop_reason],
        }
    )
)
