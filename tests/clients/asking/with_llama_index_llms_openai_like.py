import json
import sys
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Weather(BaseModel, extra="forbid"):
    unit: Literal["celsius", "fahrenheit"]


told = {"model": "outrider-demo", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "temperature": 0}
turns = [ChatMessage(role="user", content=sys.argv[2])]
chat = OpenAILike(**told, max_tokens=24, is_chat_model=True)
text = OpenAILike(**told, max_tokens=24)
calling = OpenAILike(**told, max_tokens=80, is_chat_model=True, is_function_calling_model=True)
print(
    json.dumps(
        {
            "chat": [
                chat.chat(turns).message.content,
                "".join(each.delta for each in chat.stream_chat(turns)),
            ],
            "completion": [
                text.complete(sys.argv[2]).text,
                "".join(each.delta for each in text.stream_complete(sys.argv[2])),
            ],
            "call": [calling.as_structured_llm(Weather).chat(turns).raw.unit],
        }
    )
)
