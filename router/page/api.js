// Asks the service that this page came from, and reads its streams. Knows the key, and nothing of the page.

const KEPT = "outrider-key"; // until the tab is closed
let key = sessionStorage.getItem(KEPT) ?? "";
let keyWanted = async () => false; // asks for another key; false = none was given

export class Refused extends Error {
  constructor(sentence, status) {
    super(sentence);
    this.status = status;
  }
}

export function onKeyWanted(ask) {
  keyWanted = ask;
}

export function useKey(value) {
  key = value;
  if (value) sessionStorage.setItem(KEPT, value);
  else sessionStorage.removeItem(KEPT);
}

export const hasKey = () => key !== "";

/** Returns an answer that is no refusal. `text`: JSON to send. Throws Refused with the service's sentence. */
export async function ask(path, { text, signal } = {}) {
  for (;;) {
    const headers = text === undefined ? {} : { "content-type": "application/json" };
    if (key) headers.authorization = `Bearer ${key}`;
    const asked = key;
    let response;
    try {
      response = await fetch(path, {
        method: text === undefined ? "GET" : "POST",
        headers,
        body: text,
        signal,
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Refused("The service cannot be reached.");
    }
    if (response.ok) return response;
    const sentence = await refusal(response);
    if (response.status !== 401) throw new Refused(sentence, response.status);
    if (asked === key && !(await keyWanted(asked ? sentence : ""))) throw new Refused(sentence, 401);
  }
}

async function refusal(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.trim() || `The service answered ${response.status}.`;
  }
}

/** Yields what each event of a stream carries, up to its end. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").find((line) => line.startsWith("data: "));
        if (data === undefined) continue;
        if (data === "data: [DONE]") return;
        // A seed may be larger than this language's numbers: it stays text. In texts quotes are escaped.
        const told = JSON.parse(data.slice(6).replace(/"seed":(\d+)/, '"seed":"$1"'));
        if (told.error) throw new Refused(told.error.message);
        yield told;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
