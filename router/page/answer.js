// One answer as it comes: its text, token by token where the service tells them, its clock and its figures.

import { ask, events } from "./api.js";
import { bodyText } from "./request.js";
import { Tokens } from "./tokens.js";

const LEAST_SECONDS = 0.1; // that a rate is told of: what takes less is mostly how exact clocks are

export class Answer {
  /** `place`: an element for the text. `told(answer)` is called whenever there is something new. */
  constructor(place, told) {
    this.tokens = new Tokens(place);
    this.told = told;
    this.text = "";
    this.thought = ""; // before it
    this.seed = "";
    this.usage = null;
    this.speculation = null;
    this.reason = null;
    this.seconds = 0;
    this.stopping = new AbortController();
  }

  stop() {
    this.stopping.abort();
  }

  /** Asks, and shows what comes. Throws what refuses it; a stop is no error. */
  async run({ path, body, seed }) {
    const begun = performance.now();
    const clock = () => (performance.now() - begun) / 1000;
    const ticking = setInterval(() => this.#tell(clock()), 100);
    const stream = {
      ...body,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      return_speculation: true,
    };
    try {
      const response = await ask(path, { text: bodyText(stream, seed), signal: this.stopping.signal });
      for await (const chunk of events(response)) {
        this.seed = chunk.seed;
        this.usage = chunk.usage;
        if (chunk.metrics) this.speculation = chunk.metrics.speculative_decoding;
        for (const choice of chunk.choices) this.#add(choice);
        this.tokens.think(chunk.usage.completion_tokens_details?.reasoning_tokens ?? 0);
        this.#tell(clock());
      }
    } catch (error) {
      if (!this.stopping.signal.aborted) throw error;
      this.reason = "stopped";
    } finally {
      clearInterval(ticking);
      this.tokens.end(this.text);
      this.#tell(clock());
    }
  }

  #add(choice) {
    const { delta } = choice;
    this.text += (delta ? delta.content : choice.text) ?? "";
    this.thought += delta?.reasoning ?? "";
    if (choice.finish_reason) this.reason = choice.finish_reason;
    if (choice.speculation) this.tokens.add(choice.speculation.steps);
  }

  #tell(seconds) {
    this.seconds = seconds;
    this.told(this);
  }

  /** Returns all that it says, to compare it with what another one says. */
  get whole() {
    return JSON.stringify([this.thought, this.text]);
  }

  /** Returns the number of tokens so far. */
  get count() {
    return this.usage ? this.usage.completion_tokens : this.tokens.count;
  }

  /** Returns its tokens a second; null = it was over too soon to tell. */
  get rate() {
    return this.tokens.rate(LEAST_SECONDS);
  }

  /** Returns what is known of it as pairs of a figure and what it counts. */
  figures() {
    const { speculation, seconds, count, rate } = this;
    const told = [
      [String(count), count === 1 ? "token" : "tokens"],
      [`${seconds.toFixed(2)} s`, ""],
    ];
    if (rate !== null) told.push([rate.toFixed(1), "tokens/s"]);
    if (speculation?.num_spec_steps) {
      told.push([speculation.mean_acceptance_length.toFixed(2), "tokens a step with drafts"]);
      told.push([`${Math.round(100 * speculation.draft_acceptance_rate)} %`, "of drafts kept"]);
    }
    if (this.reason === "stopped") told.push(["stopped", ""]);
    if (this.reason === "length") told.push(["", "reached max tokens"]);
    return told;
  }
}
