import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel


class Weather(BaseModel, extra="forbid"):
    unit: Literal["celsius", "fahrenheit"]


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
turns = [{"role": "user", "content": sys.argv[2]}]
told = {"max_tokens": 24, "temperature": 0}

chat = client.chat.completions.create(model="", messages=turns, user="ada", **told)
chunks = list(client.chat.completions.create(model="", messages=turns, stream=True, **told))
text = client.completions.create(model="", prompt=sys.argv[2], **told)
pieces = list(client.completions.create(model="", prompt=sys.argv[2], stream=True, **told))
asked = {"model": "", "temperature": 0, "max_output_tokens": 24, "store": False}
whole = client.responses.create(input=sys.argv[2], **asked)
with client.responses.stream(input=[{"role": "user", "content": sys.argv[2]}], **asked) as stream:
    events = list(stream)
deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
final = events[-1].response
tool = openai.pydantic_function_tool(Weather)
forced = {"tool_choice": "required", "parallel_tool_calls": False}
call = {"model": "", "messages": turns, "tools": [tool], "temperature": 0, **forced}
parsed = client.chat.completions.parse(**call).choices[0]
with client.chat.completions.stream(**call) as stream:
    streamed = stream.get_final_completion().choices[0]
flat = {"type": "function", **tool["function"]}
asked_call = {"model": "", "input": sys.argv[2], "tools": [flat], "temperature": 0, **forced}
responded = client.responses.create(**asked_call).output[-1]
with client.responses.stream(**asked_call) as stream:
    response = stream.get_final_response().output[-1]
formatted = client.chat.completions.parse(
    model="", messages=turns, response_format=Weather, temperature=0
).choices[0]
texted = client.responses.parse(model="", input=sys.argv[2], text_format=Weather, temperature=0)
try:
    client.responses.create(model="nothing", input="x")
    refused = None
except openai.NotFoundError as error:
    refused = error.code
print(
    json.dumps(
        {
            "chat": [
                chat.choices[0].message.content,
                "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
                whole.output_text,
                "".join(deltas),
                final.output_text,
            ],
            "completion": [text.choices[0].text, "".join(piece.choices[0].text for piece in pieces)],
            "call": [
                *(each.message.tool_calls[0].function.parsed_arguments.unit for each in (parsed, streamed)),
                *(json.loads(each.arguments)["unit"] for each in (responded, response)),
            ],
            "ended": [parsed.finish_reason, streamed.finish_reason],
            "format": [formatted.message.parsed.unit, texted.output_parsed.unit],
            "refused": [refused],
            "tokens": [whole.usage.output_tokens, final.usage.output_tokens],
        }
    )
)
