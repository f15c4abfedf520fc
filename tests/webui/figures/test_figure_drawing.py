"""A figure whose frame stays is drawn by its curves alone, and looks as if all of it had been drawn."""

import json
from typing import Any

import pytest
from playwright.sync_api import expect

from rhyme_openrlhf.api.read.curves import Curve
from rhyme_openrlhf.webui.figures.drawing.axes import MARKED_POINTS
from tests.webui.figure_rows import draw

# Draws each figure after the other into one place, and the last one into a new place. Gives how each was drawn, and
# what stands in both places.
DRAW = """
async ([module, figures]) => {
  const { draw } = await import(module);
  const ways = [];
  for (const way of ["react", "animate"]) {
    const done = Plotly[way];
    Plotly[way] = (...given) => { ways.push(way); return done(...given); };
  }
  const main = document.querySelector("main");
  const place = () => {
    const box = document.createElement("div");
    box.style.width = "600px";
    box.style.height = "300px";
    main.append(box);
    return box;
  };
  const old = place();
  for (const text of figures) {
    const { data, layout } = JSON.parse(text);
    await draw(old, data, layout);
  }
  const fresh = place();
  const { data, layout } = JSON.parse(figures.at(-1));
  await draw(fresh, data, layout);
  const all = (box, selector, attribute) =>
    [...box.querySelectorAll(selector)].map((one) => `${one.textContent} ${one.getAttribute(attribute)}`);
  const seen = (box) => ({
    paths: all(box, ".scatterlayer path.js-line, .scatterlayer path.js-fill", "d"),
    labels: all(box, ".xtick text, .ytick text", "transform"),
    ranges: [box._fullLayout.xaxis.range, box._fullLayout.yaxis.range],
    values: box.data.map((trace) => trace.y),
  });
  return [ways, seen(old), seen(fresh)];
}
"""


def mean_reward(steps: int, top: float = 0.8) -> str:
    """A reward with a spread, of a run that has come so far: it wanders, and is `top` once."""
    x = [float(step) for step in range(1, steps + 1)]
    mean = Curve("reward", x, [top if step == 20 else 0.3 + step % 7 / 50 for step in range(1, steps + 1)], steps)
    spread = Curve("group_reward_std", x, [0.1] * steps, steps)
    none = Curve("rollout_reward", [], [], 0)
    figure = draw("reward", {"reward": mean, "rollout_reward": none, "group_reward_std": spread})
    text: str = figure.to_json()
    return text


def drawn(dashboard: Any, page: Any, figures: list[str]) -> Any:
    page.goto(dashboard.link(path=f"/runs/{dashboard.run_uid}"))
    expect(page.locator("[data-figure]").first).to_have_attribute("data-state", "drawn")
    module = page.locator("link[rel=modulepreload][href$='/figure_drawing.js']").get_attribute("href")
    return page.evaluate(DRAW, [module, figures])


def test_new_steps_in_the_same_frame_draw_curves_only(dashboard: Any, browser_page: Any) -> None:
    ways, old, fresh = drawn(dashboard, browser_page, [mean_reward(996), mean_reward(998), mean_reward(1000)])
    assert ways == ["react", "animate", "animate", "react"]
    assert old == fresh and old["paths"] and len(old["values"][-1]) == 1000


def test_a_new_extreme_draws_the_axes_too(dashboard: Any, browser_page: Any) -> None:
    ways, old, fresh = drawn(dashboard, browser_page, [mean_reward(996), mean_reward(998, 1.4), mean_reward(1000, 1.4)])
    assert ways == ["react", "react", "animate", "react"]
    assert old == fresh and old["ranges"][1][1] > 1.4


def test_the_frame_is_around_all_that_is_drawn() -> None:
    layout = json.loads(mean_reward(1000))["layout"]
    assert layout["meta"]["framed"] is True
    assert layout["xaxis"]["autorangeoptions"]["include"] == [1, 1000]
    low, high = layout["yaxis"]["autorangeoptions"]["include"]
    assert (low, high) == (pytest.approx(0.2), pytest.approx(0.9))


def test_few_points_have_no_frame() -> None:
    # Marks at their points need room beyond them.
    assert '"framed"' not in mean_reward(MARKED_POINTS - 1)
    assert '"framed"' in mean_reward(MARKED_POINTS)
