// Draws a figure. If only its curves have changed, only these are redrawn, which takes half as long.
import { template } from "./figure_theme.js";

const CONFIG = { displayModeBar: false, responsive: false, doubleClick: "reset", showTips: false };
// The keys of a trace that grow with a run; all others define its style.
const VALUES = ["x", "y", "text", "customdata"];
// Curves move to their new positions without an animation, and nothing else is redrawn.
const AT_ONCE = { mode: "immediate", transition: { duration: 0 }, frame: { duration: 0, redraw: false } };

const looks = new WeakMap(); // plot -> its style and theme, for plots whose layout fixes the axes

export async function draw(plot, data, layout) {
  const theme = template();
  const look = layout.meta.framed ? lookOf(data, layout) : null;
  const before = looks.get(plot);
  if (look !== null && before?.look === look && before.theme === theme) {
    const traces = data.map((_, index) => index);
    return window.Plotly.animate(plot, { data: data.map(valuesOf), traces }, AT_ONCE);
  }
  looks.delete(plot);
  await window.Plotly.react(plot, data, { ...layout, template: theme, uirevision: "kept", autosize: true }, CONFIG);
  if (look !== null) looks.set(plot, { look, theme });
}

export function clear(plot) {
  looks.delete(plot);
  window.Plotly.purge(plot);
}

// Serialised before plotly.js modifies the objects.
const lookOf = (data, { meta, ...layout }) =>
  JSON.stringify([layout, data.map((trace) => ({ ...trace, ...Object.fromEntries(VALUES.map((name) => [name, name in trace])) }))]);

const valuesOf = (trace) => Object.fromEntries(VALUES.filter((name) => name in trace).map((name) => [name, trace[name]]));
