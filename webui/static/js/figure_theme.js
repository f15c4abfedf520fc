// The theme of all figures, made from the variables in tokens.css.

const probe = document.createElement("span");
probe.hidden = true;
document.documentElement.append(probe);

// The browser resolves light-dark() and var() when a property takes the colour.
function color(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

// Cached, because every drawing needs the theme and each colour requires the page's computed style.
let made = null;
document.addEventListener("rhyme:theme", () => {
  made = null;
});

export const template = () => (made ??= make());

function make() {
  const style = getComputedStyle(document.body);
  const soft = color("ink-soft");
  const axis = {
    gridcolor: color("grid"),
    linecolor: color("line-strong"),
    zerolinecolor: color("line-strong"),
    tickcolor: color("line-strong"),
    tickfont: { color: soft },
    title: { font: { color: soft, size: 12 }, standoff: 8 },
    automargin: true,
    zeroline: false,
  };
  return {
    layout: {
      font: { family: style.fontFamily, size: 12, color: color("ink") },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 56, r: 20, t: 16, b: 48 },
      xaxis: { ...axis, showgrid: false, showline: true, ticks: "outside", ticklen: 4 },
      yaxis: { ...axis, ticks: "outside", ticklen: 4, tickcolor: "rgba(0,0,0,0)" },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: soft }, bgcolor: "rgba(0,0,0,0)" },
      hoverlabel: { bgcolor: color("raised"), bordercolor: color("line-strong"), font: { family: style.fontFamily, size: 12, color: color("ink") } },
      hoverdistance: 30,
      annotationdefaults: { font: { color: soft } },
    },
  };
}

// The background of a saved picture; figures on the page are transparent.
export const paper = () => color("surface");
