// Elements, and the line of figures below an answer.

const NARROW = 832; // pixels, below which the answer is below the form: as page.css has it

export function element(name, classes = "", ...children) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  made.append(...children);
  return made;
}

/** Returns the name of a worker, so that it can be told from others in little room. */
export const short = (name) => (name.length > 24 ? `${name.slice(0, 18)}…${name.slice(-4)}` : name);

export function showFigures(place, answer) {
  place.replaceChildren(
    ...answer
      .figures()
      .map(([figure, what]) => element("span", "", element("b", "", figure), what && ` ${what}`)),
  );
}

/** Scrolls to an answer where it begins below what is seen. */
export function showBelow(place) {
  if (innerWidth < NARROW) place.scrollIntoView({ block: "start" });
}
