// The theme switch: system -> light -> dark. It announces each change by the event "rhyme:theme".
import { keep } from "./kept.js";

const NEXT = { system: "light", light: "dark", dark: "system" };
const NAMES = { system: "Theme: auto", light: "Theme: light", dark: "Theme: dark" };
const root = document.documentElement;

const current = () => root.dataset.theme ?? "system";

function show(button) {
  button.querySelector("[data-theme-name]").textContent = NAMES[current()];
}

function announce() {
  document.dispatchEvent(new CustomEvent("rhyme:theme"));
}

export function start() {
  const button = document.querySelector("[data-theme-switch]");
  show(button);
  button.addEventListener("click", () => {
    const next = NEXT[current()];
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    keep("theme", next === "system" ? null : next);
    show(button);
    announce();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announce);
}
