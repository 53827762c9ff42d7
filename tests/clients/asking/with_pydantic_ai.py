import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
settings = {"max_tokens": 24, "extra_body": {"temperature": 0}}
texts = []
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    agent = Agent(kind("outrider-demo", provider=provider), model_settings=settings)
    texts.append(agent.run_sync(sys.argv[2]).output)
print(json.dumps({"chat": texts}))
