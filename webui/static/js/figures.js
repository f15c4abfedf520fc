// Figures: fetched when they come into sight, drawn with the page's theme, updated without losing the reader's zoom.
//   data-figure="/ui/..."   where its JSON comes from; layout.meta: see webui/figures/drawing/base.py
//   data-name="..."         what its files are called
//   data-named              the page lists its names where windows are narrow
import { ask } from "./ask.js";
import { clear, draw } from "./figure_drawing.js";
import { paper, template } from "./figure_theme.js";
import { blobOf, csvOf, save } from "./figure_files.js";
import { toast } from "./toasts.js";
import { inTurn } from "./turns.js";

// Fetched shortly before they come into sight.
const MARGIN = "200px";
// A telephone's width, and how many names fit above a drawing there.
const NARROW = 560;
const MOST_NAMES = 5;
// After it was drawn, a figure rests for this long, and for as many times what the drawing took, whichever is longer.
const REST_MS = 2000;
const REST_DRAWINGS = 10;
// Pictures for a paper or a slide.
const PICTURE = { width: 1200, height: 600, scale: 2 };

const visible = new WeakSet();
const waiting = new WeakSet(); // out of sight when they became stale
const drawn = new WeakMap(); // figure -> the server's JSON, as text: plotly.js writes into what it is given
const rests = new WeakMap(); // figure -> until when it rests
const latest = new WeakMap(); // figure -> its newest question
let plotly = null; // the promise of window.Plotly

export const all = () => [...document.querySelectorAll("[data-figure]")];

export function start() {
  document.addEventListener("rhyme:theme", () => all().forEach((figure) => void redraw(figure)));
  document.addEventListener("rhyme:replaced", () => all().forEach(adopt));
  all().forEach(adopt);
}

// Fetch a figure again, now or when it comes into sight.
export async function refresh(figure) {
  if (visible.has(figure)) await load(figure);
  else waiting.add(figure);
}

// The moment from which on events may have this figure drawn again. One out of sight is only marked.
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
    // The reader may have asked for another window meanwhile, or a newer answer has come.
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
  // Their names, one below the other, would take the drawing's place: the page shows them beside it.
  if (plot.clientWidth < NARROW && ("named" in figure.dataset || data.length > MOST_NAMES)) layout.showlegend = false;
  await draw(plot, data, layout);
  show(figure, "drawn", "");
  figure.dispatchEvent(new CustomEvent("rhyme:drawn", { bubbles: true }));
}

function show(figure, state, text) {
  figure.dataset.state = state;
  // One element for the whole sentence: each child of the box is laid out by itself.
  const sentence = document.createElement("span");
  // The names of options stay in one piece: browsers break lines after hyphens.
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
  // An old drawing says more than none.
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

// Already shown in the figure.
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
      reject(Object.assign(new Error("The drawing library did not load."), { status: 0, away: true }));
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
    toast(`The picture could not be made: ${error.message ?? error}`, true);
  }
}

function saveValues(figure) {
  if (drawn.has(figure)) save(`${figure.dataset.name}.csv`, new Blob([csvOf(serversJson(figure))], { type: "text/csv" }));
}
