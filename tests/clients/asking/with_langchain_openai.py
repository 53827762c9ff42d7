import json
import sys

from langchain_openai import ChatOpenAI, OpenAI

told = {
    "base_url": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "model": "outrider-demo",
    "temperature": 0,
    "max_tokens": 24,
}
chat, text = ChatOpenAI(**told), OpenAI(**told)
responses = ChatOpenAI(**told, use_responses_api=True)
print(
    json.dumps(
        {
            "chat": [
                chat.invoke(sys.argv[2]).content,
                "".join(chunk.content for chunk in chat.stream(sys.argv[2])),
                responses.invoke(sys.argv[2]).text,
            ],
            "completion": [text.invoke(sys.argv[2]), "".join(text.stream(sys.argv[2]))],
        }
    )
)
