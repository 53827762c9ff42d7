import json
import sys
from typing import Literal

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Weather(BaseModel, extra="forbid"):
    unit: Literal["celsius", "fahrenheit"]


told = {
    "base_url": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "model": "outrider-demo",
    "temperature": 0,
    "max_tokens": 24,
}
chat, text = ChatOpenAI(**told), OpenAI(**told)
responses = ChatOpenAI(**told, use_responses_api=True)
more = {**told, "max_tokens": 80}
bound = [
    ChatOpenAI(**more, use_responses_api=way).bind_tools(
        [Weather], tool_choice="required", parallel_tool_calls=False
    )
    for way in (False, True)
]
calls = [each.invoke(sys.argv[2]).tool_calls[0] for each in bound]
merged = None
for chunk in bound[0].stream(sys.argv[2]):
    merged = chunk if merged is None else merged + chunk
calls.append(merged.tool_calls[0])
shaped = ChatOpenAI(**more).with_structured_output(Weather).invoke(sys.argv[2])
by_call = ChatOpenAI(**more).with_structured_output(Weather, method="function_calling").invoke(sys.argv[2])
print(
    json.dumps(
        {
            "chat": [
                chat.invoke(sys.argv[2]).content,
                "".join(chunk.content for chunk in chat.stream(sys.argv[2])),
                responses.invoke(sys.argv[2]).text,
            ],
            "call": [*(each["args"]["unit"] for each in calls), by_call.unit],
            "format": [shaped.unit],
            "completion": [text.invoke(sys.argv[2]), "".join(text.stream(sys.argv[2]))],
        }
    )
)
