import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel


class Weather(BaseModel, extra="forbid"):
    unit: Literal["celsius", "fahrenheit"]


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
asked = {
    "model": "outrider-demo",
    "messages": [{"role": "user", "content": sys.argv[2]}],
    "response_model": Weather,
    "temperature": 0,
    "max_retries": 0,
}
by_call = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
by_format = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
*_, last = by_call.chat.completions.create_partial(**asked)
print(
    json.dumps(
        {
            "call": [by_call.chat.completions.create(**asked).unit],
            # These describe the tool, or the format, in words of their own.
            "valid": [
                last.unit in ("celsius", "fahrenheit"),
                by_format.chat.completions.create(**asked).unit in ("celsius", "fahrenheit"),
            ],
        }
    )
)
