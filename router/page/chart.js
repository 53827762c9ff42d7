// Small charts: lines over time, points, bars. An SVG each, made anew when there is something new.

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [340, 150, 50, 10, 10, 22];
export const HUES = 4;

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Returns the round number at or above a largest value that makes a readable axis. */
export function ceiling(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 2.5, 5, 10].find((step) => step * power >= most * 0.999) * power;
}

class Plane {
  constructor(place, label, { x, y, name }) {
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
    this.x = (value) => LEFT + ((value - x[0]) / (x[1] - x[0] || 1)) * (WIDTH - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - (value / y) * (HEIGHT - TOP - BOTTOM);
    for (const [share, value] of [
      [0, 0],
      [0.5, y / 2],
      [1, y],
    ]) {
      const at = this.y(share * y);
      this.svg.append(
        shape("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at, class: share ? "grid" : "axis" }),
      );
      this.svg.append(shape("text", { x: LEFT - 6, y: at + 4, class: "tick end" }, name.y(value)));
    }
    this.svg.append(shape("text", { x: LEFT, y: HEIGHT - 6, class: "tick" }, name.x(x[0])));
    this.svg.append(shape("text", { x: WIDTH - RIGHT, y: HEIGHT - 6, class: "tick end" }, name.x(x[1])));
    place.replaceChildren(this.svg);
  }
}

/** `series`: arrays of [x, y], one a line; undefined y = a gap. `hues`: the colour of each. `stepped`: a value holds
 * until the next. */
export function lines(place, label, series, hues, { x, name, stepped = false, least = 0 }) {
  const values = series
    .flat()
    .map(([, value]) => value)
    .filter((value) => value !== undefined);
  const plane = new Plane(place, label, { x, y: ceiling(Math.max(least, ...values)), name });
  series.forEach((points, index) => {
    let path = "";
    let before;
    for (const [at, value] of points) {
      if (value !== undefined) {
        const to = `${plane.x(at).toFixed(1)} ${plane.y(value).toFixed(1)}`;
        if (before === undefined) path += `M${to}`;
        else path += stepped ? `H${plane.x(at).toFixed(1)}V${plane.y(value).toFixed(1)}` : `L${to}`;
      }
      before = value;
    }
    plane.svg.append(shape("path", { d: path, class: `line hue-${hues[index] % HUES}` }));
  });
}

/** `points`: [x, y] of each, the newest last. */
export function dots(place, label, points, name) {
  const most = ceiling(Math.max(0, ...points.map(([at]) => at)));
  const plane = new Plane(place, label, {
    x: [0, most],
    y: ceiling(Math.max(0, ...points.map(([, v]) => v))),
    name,
  });
  points.forEach(([at, value], index) => {
    const newest = index >= points.length - 3 ? " newest" : "";
    plane.svg.append(shape("circle", { cx: plane.x(at), cy: plane.y(value), r: 2.6, class: `dot${newest}` }));
  });
}

/** `shares`: 0 to 1 of each, from left to right; `weights`: how much each counts, 0 to 1. */
export function bars(place, label, shares, weights, y) {
  const name = { x: () => "", y };
  const plane = new Plane(place, label, { x: [0.5, Math.max(shares.length, 4) + 0.5], y: 1, name });
  shares.forEach((share, index) => {
    const [from, to] = [plane.x(index + 0.62), plane.x(index + 1.38)];
    const top = plane.y(share);
    const middle = { x: (from + to) / 2, y: HEIGHT - 6, class: "tick middle" };
    plane.svg.append(
      shape("text", middle, String(index + 1)),
      shape("rect", {
        x: from,
        width: to - from,
        y: top,
        height: plane.y(0) - top,
        class: "bar",
        opacity: weights[index],
      }),
    );
  });
}
