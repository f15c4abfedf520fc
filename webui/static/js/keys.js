// Keys of every page; `?` shows them. A reader who types, or holds a modifier, means no key of the page.
import { writes } from "./typing.js";

const MEANINGS = {
  "?": (dialog) => dialog.showModal(),
  "/": () => document.querySelector("main input[type=search]")?.focus(),
  p: () => document.querySelector("[data-pause]:not([hidden])")?.click(),
};

export function start() {
  const dialog = document.querySelector("[data-keys]");
  document.addEventListener("keydown", (event) => {
    const meaning = MEANINGS[event.key];
    if (!meaning || !dialog || document.querySelector("dialog[open]") || writes(event)) return;
    event.preventDefault();
    meaning(dialog);
  });
}
