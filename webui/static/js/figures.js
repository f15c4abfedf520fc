// Figures: loaded when they scroll into view, drawn with the page's theme, updated without losing the reader's zoom.
//   data-figure="/ui/..."   the address of its JSON; layout.meta: see webui/figures/drawing/base.py
//   data-name="..."         the name of its saved files
//   data-named              in narrow windows, the page lists the names of its colours
import { ask } from "./ask.js";
import { clear, draw } from "./figure_drawing.js";
import { paper, template } from "./figure_theme.js";
import { blobOf, csvOf, save } from "./figure_files.js";
import { toast } from "./toasts.js";
import { inTurn } from "./turns.js";

// Figures load shortly before they scroll into view.
const MARGIN = "200px";
// The width of a phone, and how many names fit above a drawing there.
const NARROW = 560;
const MOST_NAMES = 5;
// Pause of a figure after a drawing: the longer of this time and this multiple of the drawing's duration.
const REST_MS = 2000;
const REST_DRAWINGS = 10;
// The size of saved pictures, for a paper or a slide.
const PICTURE = { width: 1200, height: 600, scale: 2 };

const visible = new WeakSet();
const waiting = new WeakSet(); // stale figures that are out of view
const drawn = new WeakMap(); // figure -> the server's JSON as text, because plotly.js modifies its input
const rests = new WeakMap(); // figure -> the end of its pause
const latest = new WeakMap(); // figure -> its newest request
let plotly = null; // a promise of window.Plotly

export const all = () => [...document.querySelectorAll("[data-figure]")];

export function start() {
  document.addEventListener("rhyme:theme", () => all().forEach((figure) => void redraw(figure)));
  document.addEventListener("rhyme:replaced", () => all().forEach(adopt));
  all().forEach(adopt);
}

// Reloads a figure, now or when it scrolls into view.
export async function refresh(figure) {
  if (visible.has(figure)) await load(figure);
  else waiting.add(figure);
}

// The moment from which events may redraw this figure. A figure out of view is only marked as stale.
export const dueAt = (figure) => (visible.has(figure) ? (rests.get(figure) ?? 0) : 0);

const sight = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) {
        visible.delete(target);
        continue;
      }
      visible.add(target);
      if (waiting.delete(target) || !drawn.has(target)) void load(target).catch(ignoreAskErrors);
    }
  },
  { rootMargin: MARGIN },
);

const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const figure = target.closest("[data-figure]");
    if (figure?.dataset.state === "drawn" && target.clientWidth > 0) void window.Plotly.Plots.resize(target);
  }
});

function adopt(figure) {
  if ("adopted" in figure.dataset) return;
  figure.dataset.adopted = "";
  figure.querySelector("[data-figure-png]").addEventListener("click", () => void savePicture(figure));
  figure.querySelector("[data-figure-csv]").addEventListener("click", () => saveValues(figure));
  figure.querySelector("[data-figure-full]").addEventListener("click", () => {
    if (document.fullscreenElement) void document.exitFullscreen();
    else void figure.requestFullscreen();
  });
  sight.observe(figure);
  sizes.observe(plotOf(figure));
}

const plotOf = (figure) => figure.querySelector("[data-figure-plot]");

async function load(figure) {
  const asked = Symbol();
  latest.set(figure, asked);
  try {
    const address = figure.dataset.figure;
    const [response] = await Promise.all([ask(address), loadPlotly()]);
    const text = await response.text();
    // Meanwhile the reader may have chosen another window, or a newer response may have arrived.
    if (address !== figure.dataset.figure || asked !== latest.get(figure)) return;
    let took = 0;
    if (text !== drawn.get(figure) || figure.dataset.state !== "drawn") {
      drawn.set(figure, text);
      await inTurn(async () => {
        const began = performance.now();
        await redraw(figure);
        took = performance.now() - began;
      });
    }
    rests.set(figure, Date.now() + Math.max(REST_MS, REST_DRAWINGS * took));
  } catch (error) {
    showError(figure, error);
    throw error;
  }
}

const serversJson = (figure) => JSON.parse(drawn.get(figure));

async function redraw(figure) {
  if (!drawn.has(figure)) return;
  const plot = plotOf(figure);
  const { data, layout } = serversJson(figure);
  const { description, empty } = layout.meta;
  plot.setAttribute("aria-label", description);
  if (empty) {
    clear(plot);
    return show(figure, "empty", empty);
  }
  // The names would cover the drawing, so the page shows them beside it.
  if (plot.clientWidth < NARROW && ("named" in figure.dataset || data.length > MOST_NAMES)) layout.showlegend = false;
  await draw(plot, data, layout);
  show(figure, "drawn", "");
  figure.dispatchEvent(new CustomEvent("rhyme:drawn", { bubbles: true }));
}

function show(figure, state, text) {
  figure.dataset.state = state;
  // One element for the whole sentence, because the box lays out each child separately.
  const sentence = document.createElement("span");
  // Names of options stay on one line; browsers would break them after hyphens.
  sentence.append(...text.split(/(--[\w.]+)/).map((part, index) => (index % 2 === 0 ? part : whole(part))));
  figure.querySelector("[data-figure-state]").replaceChildren(...(text ? [sentence] : []));
}

function whole(text) {
  const span = document.createElement("span");
  span.className = "whole";
  span.textContent = text;
  return span;
}

function showError(figure, error) {
  if (!("status" in error)) throw error;
  const state = figure.querySelector("[data-figure-state]");
  // An old drawing is better than none.
  show(figure, drawn.has(figure) ? "old" : "error", drawn.has(figure) ? `Not up to date: ${error.message}` : error.message);
  const again = document.createElement("button");
  again.type = "button";
  again.className = "small";
  again.textContent = "Try again";
  again.addEventListener("click", () => {
    if (!drawn.has(figure)) show(figure, "loading", "Loading …");
    void load(figure).catch(ignoreAskErrors);
  });
  state.append(document.createElement("br"), again);
}

// The error is already shown in the figure.
function ignoreAskErrors(error) {
  if (!("status" in error)) throw error;
}

function loadPlotly() {
  plotly ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = document.querySelector("script[data-plotly]").dataset.plotly;
    script.addEventListener("load", resolve);
    script.addEventListener("error", () => {
      plotly = null;
      script.remove();
      reject(Object.assign(new Error("The drawing library could not be loaded."), { status: 0, away: true }));
    });
    document.head.append(script);
  });
  return plotly;
}

async function savePicture(figure) {
  if (!drawn.has(figure)) return;
  const { data, layout } = serversJson(figure);
  const title = figure.querySelector("h3").textContent;
  const themed = { ...layout, template: template(), paper_bgcolor: paper(), title: { text: title }, margin: { t: 70 } };
  try {
    const url = await window.Plotly.toImage({ data, layout: themed }, { format: "png", ...PICTURE });
    save(`${figure.dataset.name}.png`, blobOf(url, "image/png"));
  } catch (error) {
    toast(`The picture could not be saved: ${error.message ?? error}`, true);
  }
}

function saveValues(figure) {
  if (drawn.has(figure)) save(`${figure.dataset.name}.csv`, new Blob([csvOf(serversJson(figure))], { type: "text/csv" }));
}
