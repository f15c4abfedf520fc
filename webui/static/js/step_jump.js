// A click on a bar opens its steps in the timeline; the arrow keys go from step to step.
//   data-jump="/runs/x/timeline?..."   around a figure whose bars have their last step as `customdata`
//   data-key="ArrowLeft"               a link that this key follows, unless the reader is typing or in a figure
import { writes } from "./typing.js";

const listening = new WeakSet();

document.addEventListener("rhyme:drawn", (event) => {
  const frame = event.target.closest("[data-jump]");
  const plot = frame?.querySelector("[data-figure-plot]");
  if (!plot || listening.has(plot)) return;
  listening.add(plot);
  plot.on("plotly_click", ({ points }) => {
    const step = points.find((point) => point.customdata !== undefined)?.customdata;
    if (step === undefined) return;
    const target = new URL(frame.dataset.jump, location.href);
    target.searchParams.set("step", step);
    location.assign(target);
  });
});

document.addEventListener("keydown", (event) => {
  if (event.shiftKey || writes(event) || event.target.closest("[data-figure], .tabs, .table-box")) return;
  document.querySelector(`a[data-key="${CSS.escape(event.key)}"]`)?.click();
});
