// Pieces: parts of the page that the server renders, and that are reloaded when they are stale.
//   data-piece="/ui/..."   its address
//   data-on="kind kind"    the kinds of events that make it stale; all kinds by default
//   data-every="15"        seconds after which it is reloaded in any case
// A piece in which the reader is typing, selecting or clicking is not replaced until the next reload.
import { ask } from "./ask.js";

const shown = new WeakMap();

// The element under a pressed pointer; if it were replaced before the release, the click would be lost.
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
  // A dialog is open: the button that gets the focus back must still exist.
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
  template.innerHTML = text; // rendered by our own server, whose templates escape
  for (const details of template.content.querySelectorAll("details[id]")) details.open = open.has(details.id);
  piece.replaceChildren(template.content);
  if (focused) piece.querySelector(focused)?.focus({ preventScroll: true });
  document.dispatchEvent(new CustomEvent("rhyme:replaced", { detail: piece }));
}

// A selector that finds the same element in the new piece.
function mark(element) {
  for (const name of ["id", "data-action", "href"]) {
    const value = element.getAttribute(name);
    if (value) return `[${name}="${CSS.escape(value)}"]`;
  }
  return null;
}
