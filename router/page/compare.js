// The same request twice, at the same time: with drafts and without.

import { Answer } from "./answer.js";
import { element, showBelow, showFigures } from "./figures.js";
import { showLegend } from "./tokens.js";

const part = (id) => document.getElementById(id);
const MOST = 2 ** 32; // of seeds that are drawn here

function column(name, shown) {
  const clock = element("span", "clock", "0.00 s");
  const place = element("div", "answer");
  place.setAttribute("aria-label", name);
  const figures = element("p", "figures");
  const whole = element("div", "column", element("h3", "", name, clock), place, figures);
  const answer = new Answer(place, (told) => {
    clock.textContent = `${told.seconds.toFixed(2)} s`;
    showFigures(figures, told);
    shown(told);
  });
  return { whole, answer };
}

/** `done` gives the request with its seed. */
export function compare(request) {
  const seed = request.seed || String(crypto.getRandomValues(new Uint32Array(1))[0] % MOST);
  const { num_speculative_tokens: _, ...body } = request.body;
  const drafted = column("With drafts", (told) => {
    part("about").hidden = !told.tokens.known.length;
    showLegend(part("legend"), told.tokens);
  });
  const alone = column("Without drafts", () => {});
  part("columns").replaceChildren(drafted.whole, alone.whole);
  part("columns").classList.toggle("code", "prompt" in body);
  part("verdict").textContent = "";
  showBelow(part("view-compare"));
  const answers = [drafted.answer, alone.answer];
  const stop = () => answers.forEach((answer) => answer.stop());
  const run = async () => {
    try {
      await Promise.all([
        drafted.answer.run({ ...request, seed, body }),
        alone.answer.run({ ...request, seed, body: { ...body, num_speculative_tokens: 0 } }),
      ]);
    } finally {
      stop();
    }
    tell(...answers, seed);
    return { ...request, seed };
  };
  return { stop, done: run() };
}

function tell(drafted, alone, seed) {
  if (drafted.reason === "stopped" || alone.reason === "stopped") {
    part("verdict").textContent = "Stopped.";
    return;
  }
  const times = alone.seconds / drafted.seconds;
  const quicker =
    alone.rate === null || drafted.rate === null
      ? "They were over too soon to compare their times."
      : `With drafts it came ${ratio(times)} as without, while both shared the machine.`;
  part("verdict").replaceChildren(
    element(
      "strong",
      "",
      drafted.whole === alone.whole ? "The same text, byte for byte." : "The texts differ.",
    ),
    ` ${quicker} Seed ${seed}.`,
  );
}

const ratio = (times) =>
  times >= 1 ? `${times.toFixed(2)} times as fast` : `${(1 / times).toFixed(2)} times as slow`;
