import json
import sys

import openai

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
            "refused": [refused],
            "tokens": [whole.usage.output_tokens, final.usage.output_tokens],
        }
    )
)
