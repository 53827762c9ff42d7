// The form: what is asked for, and the same as curl and as Python.

const field = (id) => document.getElementById(id);
const number = (id) => (field(id).value === "" ? undefined : Number(field(id).value));

export const mode = () => document.querySelector("input[name=mode]:checked").value;

/** Returns the path and the body that the form asks for. `turns`: of the conversation so far. */
export function asked(turns = []) {
  const text = field("prompt").value;
  const stop = field("stop").value.replaceAll("\\n", "\n");
  const body = {
    model: field("model").value,
    ...(mode() === "chat" ? { messages: [...turns, { role: "user", content: text }] } : { prompt: text }),
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    ...(stop && { stop: [stop] }),
    ...(field("drafts").value !== "" && { num_speculative_tokens: Number(field("drafts").value) }),
  };
  const path = mode() === "chat" ? "v1/chat/completions" : "v1/completions";
  return { path, body, seed: field("seed").value };
}

/** Returns the body as text. A seed may be larger than numbers here: it goes in as it was written. */
export function bodyText(body, seed) {
  const text = JSON.stringify(body, null, 2);
  return seed ? `${text.slice(0, -2)},\n  "seed": ${seed}\n}` : text;
}

const address = (path) => new URL(path, document.baseURI).href;
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function asCurl({ path, body, seed }, keyed) {
  const key = keyed ? ' \\\n  -H "authorization: Bearer $OUTRIDER_API_KEY"' : "";
  const told = `  -H 'content-type: application/json' \\\n  -d ${quoted(bodyText(body, seed))}\n`;
  return `curl ${address(path)}${key} \\\n${told}`;
}

// In Python, true, false and null have other names; nothing of the body is one of them but inside of a text.
export function asPython({ path, body, seed }, keyed) {
  const { top_p, num_speculative_tokens, ...rest } = body;
  const extra = num_speculative_tokens === undefined ? {} : { extra_body: { num_speculative_tokens } };
  const told = Object.entries({ ...rest, top_p, ...extra }).filter(([, value]) => value !== undefined);
  const lines = told.map(([name, value]) => `    ${name}=${JSON.stringify(value)},`);
  if (seed) lines.push(`    seed=${seed},`);
  const chat = path === "v1/chat/completions";
  const key = keyed ? 'os.environ["OUTRIDER_API_KEY"]' : '"none"';
  return [
    ...(keyed ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(address("v1"))}, api_key=${key})`,
    `answer = client.${chat ? "chat." : ""}completions.create(`,
    ...lines,
    ")",
    `print(answer.choices[0].${chat ? "message.content" : "text"})`,
    "",
  ].join("\n");
}
