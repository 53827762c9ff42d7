import json
import sys

import litellm

turns = [{"role": "user", "content": sys.argv[2]}]
told = {"messages": turns, "api_key": "none", "max_tokens": 24, "temperature": 0}
openai = {**told, "model": "openai/outrider-demo", "api_base": f"{sys.argv[1]}/v1"}
vllm = {**told, "model": "hosted_vllm/outrider-demo", "api_base": f"{sys.argv[1]}/v1"}
anthropic = {**told, "model": "anthropic/outrider-demo", "api_base": sys.argv[1]}
all_three = (openai, vllm, anthropic)
schema = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
tool = {"type": "function", "function": {"name": "Weather", "parameters": schema}}
called = [
    litellm.completion(
        **{**each, "max_tokens": 80}, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    for each in all_three
]
print(
    json.dumps(
        {
            "chat": [
                *(
                    litellm.completion(**each).choices[0].message.content
                    for each in (openai, vllm, anthropic)
                ),
                *(
                    "".join(
                        chunk.choices[0].delta.content or ""
                        for chunk in litellm.completion(**each, stream=True)
                    )
                    for each in (openai, anthropic)
                ),
            ],
            "call": [
                json.loads(each.choices[0].message.tool_calls[0].function.arguments)["unit"]
                for each in called
            ],
        }
    )
)
