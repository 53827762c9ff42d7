// The live service: workers as they come and go, who drafts for whom, and what becomes of drafts.

import { Refused, ask, events } from "./api.js";
import { HUES, bars, dots, lines } from "./chart.js";
import { element, short } from "./figures.js";

const KEPT = 240; // moments, at two a second
const LEFT_SECONDS = 20; // that a worker which has left is still shown
const AGAIN_MILLISECONDS = 2000; // after which it asks again, where the connection broke off
const REFUSED_MILLISECONDS = 15000; // and where as many look as may: a refusal costs more than a moment told
const MOST_LINES = HUES; // of a chart
const MOST_NEWS = 12;
const ENOUGH = 50; // draft tokens at a place: of fewer the bar is paler

const percent = (share) => `${Math.round(100 * share)} %`;
const ms = (seconds) => (seconds ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 2 : 1)} ms` : "–");
/** What drafts bring at a verifier, as it compared last; they rest where that is little. */
const worth = ({ drafts_rest: rest, draft_gain: gain }) =>
  [rest ? "rest" : "", gain ? `${gain.toFixed(2)} ×` : ""].filter(Boolean).join(", ") || "–";

/** Why a session has no drafts, in the words of its row. */
const WHY = {
  unwanted: () => "drafts are not asked for",
  rest: (gain) => `they rest: ${gain ? `${gain.toFixed(2)} × as fast with them` : "they do not pay"}`,
  no_drafter: () => "no drafter is connected",
  none_chosen: () => "no drafter fits, is free, or paid off lately",
  price: () => "a place in a step costs more than they bring",
};

class Board {
  constructor(place) {
    this.moments = [];
    this.gone = new Map(); // worker id -> [role, what it was, when it left]
    this.known = null; // worker id -> role, of the moment before
    this.own = []; // {id, hue} of the sessions that began last, whose lines are shown
    this.begun = 0; // sessions so far
    this.steps = []; // [tokens, milliseconds]
    this.last = new Map(); // verifier id -> as it was after its last step
    this.state = element("p", "state");
    this.figures = element("p", "figures large");
    this.verifiers = table("Verifiers", [
      "Verifier",
      "Model",
      "#Running",
      "#Waiting",
      "#KV in use",
      "#Step",
      "#Its tokens",
      "#Price",
      "#Tokens/s",
      "#Undrafted",
      "#Drafts bring",
    ]);
    this.drafters = table("Drafters", [
      "Drafter",
      "Drafts with",
      "#Sessions",
      "#A token takes",
      "#Busy",
      "#KV in use",
      "#Round trip",
    ]);
    this.sessions = table("Your sessions", [
      "Session",
      "At",
      "Drafted by",
      "#k",
      "#Window",
      "#Acceptance",
      "#Tokens",
    ]);
    this.pairs = table("Who drafts for whom", ["Verifier", "Drafter", "#Sessions"]);
    this.sources = table("Guesses, by who made them", ["Source", "#Verified", "#Kept", "#Share kept"]);
    this.positions = chart("Drafts kept, by place in the draft");
    this.times = chart("Step time against its tokens");
    this.price = chart("Price of a token in a step");
    this.k = chart("k of your sessions");
    this.window = chart("Window of your sessions");
    this.kv = chart("KV in use");
    this.news = element("ul", "news");
    this.still = element("p", "still", "Nobody since you look.");
    const charts = [this.positions, this.times, this.price, this.k, this.window, this.kv].map(
      (one) => one.whole,
    );
    place.replaceChildren(
      this.state,
      this.figures,
      this.verifiers.whole,
      this.drafters.whole,
      element("div", "charts", ...charts),
      this.sessions.whole,
      this.pairs.whole,
      this.sources.whole,
      element("h3", "", "Came and went"),
      this.still,
      this.news,
    );
  }

  add(told) {
    this.#begin(told);
    this.moments.push(told);
    if (this.moments.length > KEPT) this.moments.shift();
    for (const one of told.service.verifiers) {
      if (!one.step_tokens) continue; // it had no step lately
      this.last.set(one.id, one);
      this.steps.push([one.step_tokens, 1000 * one.step_seconds]);
    }
    this.steps = this.steps.slice(-KEPT);
    this.#follow(told);
    this.#figures(told);
    this.#tables(told);
    this.#charts();
  }

  /** A session keeps its colour, and its line after its end for as long as there is some of it. */
  #begin({ sessions }) {
    const before = new Set(this.moments.at(-1)?.sessions.map((one) => one.id));
    for (const { id } of [...sessions].reverse()) {
      if (!before.has(id)) this.own.push({ id, hue: this.begun++ % HUES });
    }
    const shown = (id) => (moment) => moment.sessions.some((one) => one.id === id);
    this.own = this.own
      .filter(({ id }) => shown(id)({ sessions }) || this.moments.some(shown(id)))
      .slice(-MOST_LINES);
  }

  #follow({ seconds, service }) {
    const now = new Map();
    for (const role of ["verifiers", "drafters"]) {
      for (const worker of service[role]) now.set(worker.id, role);
    }
    for (const [id, role] of this.known ?? []) {
      if (now.has(id)) continue;
      this.gone.set(id, { role, seconds });
      this.last.delete(id);
      this.#say(`${short(id)} left`);
    }
    for (const id of now.keys()) {
      if (this.known && !this.known.has(id)) this.#say(`${short(id)} came`);
      this.gone.delete(id);
    }
    for (const [id, one] of this.gone) if (seconds - one.seconds > LEFT_SECONDS) this.gone.delete(id);
    this.known = now;
  }

  #say(sentence) {
    const time = new Date().toLocaleTimeString([], { hour12: false });
    this.still.hidden = true;
    this.news.prepend(element("li", "", element("span", "when", time), sentence));
    while (this.news.childElementCount > MOST_NEWS) this.news.lastChild.remove();
  }

  #figures({ service }) {
    const speed = service.verifiers.reduce((sum, one) => sum + (one.running ? one.goodput : 0), 0);
    const { verifiers, drafters, sessions } = service.counts;
    const of = (count, one, many) =>
      element("span", "", element("b", "", String(count)), ` ${count === 1 ? one : many}`);
    this.figures.replaceChildren(
      of(sessions, "session", "sessions"),
      of(Math.round(speed), "token/s", "tokens/s"),
      of(verifiers, "verifier", "verifiers"),
      of(drafters, "drafter", "drafters"),
    );
  }

  #tables({ service, sessions }) {
    const gone = (role) =>
      [...this.gone].filter(([, one]) => one.role === role).map(([id]) => ["left", [short(id), "has left"]]);
    const gains = new Map(service.verifiers.map((one) => [one.id, one.draft_gain]));
    const draftedBy = ({ drafters, undrafted, verifier }) => {
      const names = drafters.map(short).join(" and ");
      const why = undrafted && WHY[undrafted](gains.get(verifier));
      return [names || "nobody", why].filter(Boolean).join(": ");
    };
    this.verifiers.show([
      ...service.verifiers.map((one) => [
        one.draining ? "draining" : "",
        [
          short(one.id),
          one.model,
          one.running,
          one.waiting,
          meter(one.kv_usage),
          ms(this.last.get(one.id)?.step_seconds),
          this.last.get(one.id)?.step_tokens ?? "–",
          one.price.toFixed(3),
          one.running ? one.goodput.toFixed(1) : "–",
          percent(one.starvation),
          worth(one),
        ],
      ]),
      ...gone("verifiers"),
    ]);
    this.drafters.show([
      ...service.drafters.map((one) => [
        "",
        [
          short(one.id),
          one.model || "no model",
          one.sessions,
          ms(one.token_seconds),
          percent(one.busy),
          meter(one.kv_usage),
          one.round_trips.map((trip) => ms(trip.seconds)).join(", ") || "–",
        ],
      ]),
      ...gone("drafters"),
    ]);
    this.sources.show(
      service.sources.map((one) => [
        "",
        [one.source, one.verified, one.accepted, percent(one.verified ? one.accepted / one.verified : 0)],
      ]),
      "No guesses yet.",
    );
    this.sessions.show(
      sessions.map((one) => [
        "",
        [
          one.id.slice(0, 8),
          short(one.verifier || "waits"),
          draftedBy(one),
          one.k,
          one.window,
          one.undrafted ? "–" : percent(one.acceptance),
          one.tokens,
        ],
      ]),
      "None at the moment.",
    );
    this.pairs.show(
      service.pairs.map((one) => ["", [short(one.verifier), short(one.drafter || "nobody"), one.sessions]]),
      "No session at the moment.",
    );
  }

  #charts() {
    const { service } = this.moments.at(-1);
    const shares = service.positions.map((one) => one.accepted / one.verified);
    const told =
      shares.map((share, at) => `place ${at + 1}: ${percent(share)}`).join(", ") || "no drafts yet";
    const weights = service.positions.map((one) => Math.max(0.15, Math.min(1, one.verified / ENOUGH)));
    bars(this.positions.place, told, shares, weights, percent);
    dots(this.times.place, `${this.steps.length} steps`, this.steps, {
      x: (tokens) => `${tokens} tokens`,
      y: (value) => `${short(String(+value.toPrecision(3)))} ms`,
    });
    const verifiers = service.verifiers.slice(0, MOST_LINES).map(({ id }, at) => ({ id, hue: at }));
    const of = (role, field) => (id) => (moment) => role(moment).find((one) => one.id === id)?.[field];
    const ofVerifier = (field) => of((moment) => moment.service.verifiers, field);
    const ofSession = (field) => of((moment) => moment.sessions, field);
    const number = (value) => String(+value.toPrecision(3));
    this.#lines(this.price, verifiers, ofVerifier("price"), { y: number, least: 0.01 });
    this.#lines(this.kv, verifiers, ofVerifier("kv_usage"), { y: percent, least: 0.1 });
    const stepped = { y: number, least: 4, stepped: true };
    this.#lines(this.k, this.own, ofSession("k"), stepped);
    this.#lines(this.window, this.own, ofSession("window"), stepped);
  }

  /** `shown`: {id, hue} of each line. */
  #lines(chart, shown, field, { y, least, stepped = false }) {
    const last = this.moments.at(-1).seconds;
    const series = shown.map(({ id }) =>
      this.moments.map((moment) => [moment.seconds - last, field(id)(moment)]),
    );
    const values = shown.map(({ id }, at) => `${short(id)}: ${y(series[at].at(-1)[1] ?? 0)}`);
    const hues = shown.map(({ hue }) => hue);
    lines(chart.place, values.join(", ") || "nothing yet", series, hues, {
      x: [Math.min(-10, Math.floor(this.moments[0].seconds - last)), 0],
      name: { x: (at) => (at ? `${at} s` : "now"), y },
      stepped,
      least,
    });
    const names = shown.map(({ id }) => short(id.length === 32 ? id.slice(0, 8) : id));
    chart.key.replaceChildren(...names.map((name, at) => element("li", `hue-${hues[at]}`, name)));
  }
}

function meter(share) {
  const bar = element("meter");
  bar.value = share;
  bar.setAttribute("aria-label", "KV in use");
  return element("span", "kv", bar, percent(share));
}

function chart(title) {
  const [place, key] = [element("div"), element("ul", "key")];
  return { whole: element("figure", "", element("figcaption", "", title), place, key), place, key };
}

function table(title, columns) {
  const body = element("tbody");
  const kinds = columns.map((name) => (name.startsWith("#") ? "number" : ""));
  const head = element(
    "tr",
    "",
    ...columns.map((name, at) => element("th", kinds[at], name.replace("#", ""))),
  );
  for (const cell of head.children) cell.scope = "col";
  const caption = element("caption", "", title);
  const whole = element("div", "wide-table", element("table", "", caption, element("thead", "", head), body));
  whole.tabIndex = 0;
  whole.setAttribute("role", "region");
  whole.setAttribute("aria-label", title);
  return {
    whole,
    show(rows, empty = "None is connected.") {
      body.replaceChildren(...rows.map(([classes, cells]) => row(classes, cells, kinds)));
      if (!rows.length) body.append(row("none", [empty], kinds));
    },
  };
}

function row(classes, cells, kinds) {
  const made = cells.map((cell, at) =>
    element("td", kinds[at], cell instanceof Element ? cell : String(cell)),
  );
  if (cells.length < kinds.length) {
    made.at(-1).colSpan = kinds.length - cells.length + 1;
    made.at(-1).className = "";
  }
  return element("tr", classes, ...made);
}

let board = null;
let listening = null;

async function listen(signal) {
  board ??= new Board(document.getElementById("board"));
  while (!signal.aborted) {
    let wait = AGAIN_MILLISECONDS;
    try {
      for await (const told of events(await ask("v1/live", { signal }))) {
        board.state.textContent = "";
        board.add(told);
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) {
        board.state.textContent = error.message;
        listening = null;
        return;
      }
      if (!(error instanceof Refused) && !(error instanceof TypeError)) throw error;
      const why = error instanceof Refused ? error.message : "The connection broke off.";
      board.state.textContent = `${why} Trying again.`;
      if (error.status) wait = REFUSED_MILLISECONDS;
    }
    await new Promise((over) => setTimeout(over, wait));
  }
}

export const live = {
  /** Listens while the view is shown. */
  async show(shown) {
    if (shown && !listening) {
      listening = new AbortController();
      await listen(listening.signal);
    } else if (!shown && listening) {
      listening.abort();
      listening = null;
    }
  },
};
