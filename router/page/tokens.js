// The tokens of an answer, coloured by where they came from. One of them at a time is told of in words.

import { element, short } from "./figures.js";

const KINDS = {
  accepted: "guessed by a drafter, and kept",
  correction: "the target's own, in the place of a wrong guess",
  bonus: "the target's own, after guesses that were all kept",
  plain: "the target's own, without a guess",
};
const HUES = 4;
const drafters = []; // by hue, the oldest first

const hue = (drafter) => {
  if (!drafters.includes(drafter)) drafters.push(drafter);
  return drafters.indexOf(drafter) % HUES;
};

export class Tokens {
  constructor(place) {
    this.place = place;
    this.count = 0;
    this.known = []; // {span, step, token}
    this.kinds = { accepted: 0, correction: 0, bonus: 0, plain: 0 };
    this.decoder = new TextDecoder();
    this.chosen = -1;
    this.fold = null; // of the reasoning, if there is any
    this.folded = 0; // tokens in it
    this.answering = false; // tokens have come behind it
    place.tabIndex = 0;
    place.setAttribute("role", "group");
    place.addEventListener("keydown", (event) => this.#key(event));
    place.addEventListener("pointerover", (event) => this.#point(event.target));
    place.addEventListener("click", (event) => this.#point(event.target));
  }

  add(steps) {
    for (const step of steps) {
      step.tokens.forEach((token, index) => this.#push(step, token, index, step.tokens.length));
    }
  }

  #push(step, token, index, length) {
    const text = this.decoder.decode(new Uint8Array(token.bytes), { stream: true });
    const span = document.createElement("span");
    const by = token.source === "accepted" ? [`by-${hue(token.drafter)}`] : [];
    span.classList.add("token", token.source, ...by);
    span.classList.toggle("first", index === 0 && step.drafted > 0);
    span.classList.toggle("last", index === length - 1 && step.drafted > 0);
    span.classList.toggle("line", text.startsWith("\n"));
    span.textContent = text;
    span.dataset.index = this.known.length;
    this.known.push({ span, step, token, text });
    this.kinds[token.source] += 1;
    this.count += 1;
    this.place.append(span);
  }

  /** The first `count` tokens are reasoning. They stand in a fold, which closes when the answer begins. */
  think(count) {
    if (!count || this.answering) return;
    if (!this.fold) {
      this.fold = element("details", "thought", element("summary", ""));
      this.fold.open = true;
      this.place.prepend(this.fold);
    }
    // What stands between the two is line ends.
    const next = () => this.known[this.folded];
    while (next() && (this.folded < count || /^\n+$/.test(next().text))) {
      this.fold.append(next().span);
      this.folded += 1;
    }
    this.fold.firstChild.textContent = `Reasoning, ${count} ${count === 1 ? "token" : "tokens"}`;
    this.answering = next() !== undefined;
    this.fold.open = !this.answering;
  }

  /** All has come. What a stop string cut off is no part of the text. */
  end(text) {
    const told = this.known.slice(this.folded);
    const whole = told.map((one) => one.text).join("");
    let length = this.fold ? whole.indexOf(text) : 0; // a token may begin with the line ends before an answer
    if (!whole.startsWith(text, length)) return;
    const most = length + text.length;
    length = 0;
    for (const { span, text: piece } of told) {
      length += piece.length;
      span.classList.toggle("cut", length > most && piece !== "");
    }
  }

  /** Returns the tokens a second from the first step on, by the service's clock; null = it was over sooner than
   * `least` seconds, or nobody knows when its steps were. */
  rate(least) {
    const [first, last] = [this.known[0]?.step, this.known.at(-1)?.step];
    const taken = (last?.seconds ?? NaN) - (first?.seconds ?? NaN);
    return taken >= least ? (this.count - first.tokens.length) / taken : null;
  }

  #point(target) {
    const span = target.closest?.(".token");
    if (span) this.choose(Number(span.dataset.index));
  }

  #key(event) {
    const moves = {
      ArrowRight: this.chosen + 1,
      ArrowLeft: this.chosen - 1,
      Home: 0,
      End: this.known.length - 1,
    };
    if (!(event.key in moves) || !this.known.length) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(moves[event.key], 0), this.known.length - 1));
  }

  choose(index) {
    this.known[this.chosen]?.span.classList.remove("chosen");
    this.chosen = index;
    if (index < this.folded) this.fold.open = true;
    this.known[index].span.classList.add("chosen");
    document.getElementById("detail").replaceChildren(...described(this.known[index]));
  }
}

function quote(text) {
  const shown = document.createElement("q");
  shown.textContent = text === "" ? "no text" : text.replaceAll("\n", "↵");
  return shown;
}

function described({ step, token, text }) {
  const told = [quote(text), ` ${KINDS[token.source]}`];
  if (token.source === "accepted") {
    told.push(
      `: ${token.drafter ? short(token.drafter) : "a drafter"} was ${percent(token.probability)} sure`,
    );
  }
  if (step.rejected && token.source === "correction") {
    told.push(
      " ",
      quote(step.rejected.token),
      `, of which the drafter was ${percent(step.rejected.probability)} sure`,
    );
  }
  told.push(` · step ${step.step + 1}`);
  if (step.seconds !== null) told.push(` · after ${step.seconds.toFixed(2)} s`);
  return told;
}

const percent = (share) => (share === null ? "?" : `${Math.round(100 * share)} %`);

/** Shows what the colours mean, with how many tokens of each an answer has. */
export function showLegend(list, tokens) {
  const entries = [];
  const by = new Map();
  for (const { token } of tokens.known) {
    if (token.source === "accepted") by.set(token.drafter, (by.get(token.drafter) ?? 0) + 1);
  }
  for (const [drafter, count] of by) {
    entries.push([
      ["accepted", `by-${hue(drafter)}`],
      drafter ? `kept, from ${short(drafter)}` : "kept",
      count,
    ]);
  }
  if (!by.size) entries.push([["accepted"], "kept", 0]);
  entries.push([["correction"], "in the place of a wrong guess", tokens.kinds.correction]);
  entries.push([["bonus"], "after guesses all kept", tokens.kinds.bonus]);
  entries.push([["plain"], "without a guess", tokens.kinds.plain]);
  list.replaceChildren(
    ...entries.map(([classes, name, count]) => {
      const item = document.createElement("li");
      const sample = document.createElement("span");
      sample.classList.add("token", ...classes);
      const figure = document.createElement("b");
      figure.textContent = count;
      sample.append(figure);
      item.append(sample, name);
      return item;
    }),
  );
}
