// The answers of a conversation, or of single prompts, one under the other.

import { Answer } from "./answer.js";
import { element, showBelow, showFigures } from "./figures.js";
import { showLegend } from "./tokens.js";

const part = (id) => document.getElementById(id);

export class Conversation {
  constructor() {
    this.turns = []; // of a chat
  }

  get empty() {
    return !part("turns").childElementCount;
  }

  clear() {
    this.turns = [];
    part("turns").replaceChildren();
    part("empty").hidden = false;
    part("about").hidden = true;
  }

  /** Asks; `again(request)` is called where somebody wants the same once more. `done` gives the request with its
   * seed, if it was answered. */
  send(request, again) {
    const chat = "messages" in request.body;
    const text = chat ? request.body.messages.at(-1).content : request.body.prompt;
    const figures = element("p", "figures");
    const place = element("div", "answer");
    place.setAttribute("aria-label", "Answer");
    const turn = element("article", chat ? "turn" : "turn code", element("p", "asked", text), place, figures);
    const before = [...part("turns").children];
    part("turns").replaceChildren(...(chat ? before : []), turn);
    part("empty").hidden = true;
    showBelow(turn);
    if (chat && request.whole === undefined) part("prompt").value = "";
    const answer = new Answer(place, (told) => {
      showFigures(figures, told);
      if (told.tokens.known.length) {
        part("about").hidden = false;
        showLegend(part("legend"), told.tokens);
      }
    });
    return { stop: () => answer.stop(), done: this.#run(answer, request, chat, { before, figures }, again) };
  }

  async #run(answer, request, chat, { before, figures }, again) {
    try {
      await answer.run(request);
    } finally {
      if (!answer.seed) part("turns").replaceChildren(...before); // it was refused
      part("empty").hidden = !this.empty;
    }
    if (!answer.seed) return request;
    const same = { ...request, seed: answer.seed, whole: answer.whole };
    const replay = element("button", "quiet", "Replay");
    replay.type = "button";
    replay.addEventListener("click", () => again(same));
    figures.append(element("span", "", "seed ", element("b", "", answer.seed)), replay);
    if (request.whole !== undefined && answer.reason !== "stopped") {
      figures.append(element("span", "", answer.whole === request.whole ? "the same text" : "another text"));
    }
    if (chat) {
      const thought = answer.thought && { reasoning: answer.thought };
      this.turns = [...request.body.messages, { role: "assistant", content: answer.text, ...thought }];
    }
    return same;
  }
}
