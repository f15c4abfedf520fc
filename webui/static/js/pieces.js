// Pieces: parts of the page that the server renders, fetched again when they are stale.
//   data-piece="/ui/..."   where it comes from
//   data-on="kind kind"    the kinds of events that change it; without it, all do
//   data-every="15"        seconds after which it is fetched again anyway
// What the reader is doing in a piece (typing, selecting, clicking) is not taken away: it waits for the next time.
import { ask } from "./ask.js";

const shown = new WeakMap();

// What the pointer is pressed on: replaced before it is let go, it would not be clicked.
let pressed = null;
document.addEventListener("pointerdown", (event) => (pressed = event.target), true);
for (const end of ["pointerup", "pointercancel"]) document.addEventListener(end, () => (pressed = null), true);

export const all = () => [...document.querySelectorAll("[data-piece]")];

export async function refresh(piece) {
  const response = await ask(piece.dataset.piece);
  const text = await response.text();
  if (shown.get(piece) === text) return;
  if (inUse(piece)) {
    piece.dataset.stale = "";
    return;
  }
  replace(piece, text);
  shown.set(piece, text);
}

function inUse(piece) {
  // A question is open: its button, to which the focus goes back, must still be there.
  if (document.querySelector("dialog[open]")) return true;
  if (pressed && piece.contains(pressed)) return true;
  const focused = document.activeElement;
  if (piece.contains(focused) && focused.matches("input:not([type=checkbox]), select, textarea")) return true;
  const selection = document.getSelection();
  return !selection.isCollapsed && piece.contains(selection.anchorNode);
}

function replace(piece, text) {
  const focused = piece.contains(document.activeElement) ? mark(document.activeElement) : null;
  const open = new Set([...piece.querySelectorAll("details[open][id]")].map((one) => one.id));
  const template = document.createElement("template");
  template.innerHTML = text; // from our own server, whose templates escape
  for (const details of template.content.querySelectorAll("details[id]")) details.open = open.has(details.id);
  piece.replaceChildren(template.content);
  if (focused) piece.querySelector(focused)?.focus({ preventScroll: true });
  document.dispatchEvent(new CustomEvent("rhyme:replaced", { detail: piece }));
}

// A selector by which the same element is found in the new piece.
function mark(element) {
  for (const name of ["id", "data-action", "href"]) {
    const value = element.getAttribute(name);
    if (value) return `[${name}="${CSS.escape(value)}"]`;
  }
  return null;
}
