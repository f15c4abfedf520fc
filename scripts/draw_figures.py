#!/usr/bin/env python3
"""Draw the figures of the pages on how things work: `docs/images/how/*.svg`.

    scripts/draw_figures.py            # writes all figures

A figure is a list of boxes, arrows and labels. The files are plain SVG: they load nothing, and their colours follow the
reader's light or dark scheme. `tests/scripts/test_draw_figures.py` compares the files with what this script draws.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "images" / "how"
WIDTH = 760
# Mean width of a character of a title (13 pixels, bold) and of a line (11.5 pixels); wider text is an error.
TITLE_CHARACTER, LINE_CHARACTER = 7.2, 5.8
LINE_HEIGHT = 15

STYLE = """
:root { color: #1c2430; --back: #ffffff; --box: #f2f5f9; --line: #7b8794; --soft: #55606e;
  --a: #d7e6fb; --b: #fde7c8; --c: #d8f0dc; }
@media (prefers-color-scheme: dark) { :root { color: #e8ecf1; --back: #14181f; --box: #222935; --line: #8996a6;
  --soft: #aab4c0; --a: #1f3f66; --b: #5c4316; --c: #1f4d2b; } }
text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 11.5px; fill: currentColor; }
.title { font-size: 13px; font-weight: 600; }
.label { fill: var(--soft); paint-order: stroke; stroke: var(--back); stroke-width: 4px; stroke-linejoin: round; }
.back { fill: var(--back); }
.box, .a, .b, .c { fill: var(--box); stroke: var(--line); }
.a { fill: var(--a); }
.b { fill: var(--b); }
.c { fill: var(--c); }
.room { fill: none; stroke: var(--line); stroke-dasharray: 5 4; }
.thin { fill: none; stroke: var(--line); }
.arrow { fill: none; stroke: currentColor; stroke-width: 1.3; }
.dashed { stroke-dasharray: 4 3; }
.tip { fill: currentColor; }
"""

Point = tuple[float, float]


def text(x: float, y: float, words: str, kind: str = "text", anchor: str = "middle") -> str:
    """Return one line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words, quote=False)}</text>'


def box(x: float, y: float, width: float, height: float, title: str, *lines: str, kind: str = "box") -> str:
    """Return a box with a title and lines of text in its middle. Raise ValueError for text that does not fit."""
    for words, each in [(title, TITLE_CHARACTER), *((line, LINE_CHARACTER) for line in lines)]:
        if len(words) * each > width:
            raise ValueError(f"{words!r} is wider than its box of {width:g}")
    if (len(lines) + 1) * LINE_HEIGHT > height:
        raise ValueError(f"the box {title!r} is lower than its {len(lines) + 1} lines")
    middle, first = x + width / 2, y + height / 2 - len(lines) * LINE_HEIGHT / 2 + 4.5
    parts = [f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>']
    parts.append(text(middle, first, title, "title"))
    parts += [text(middle, first + LINE_HEIGHT * (row + 1), line) for row, line in enumerate(lines)]
    return "\n".join(parts)


def room(x: float, y: float, width: float, height: float, title: str) -> str:
    """Return a dashed frame around what belongs together, with its title in the upper left corner."""
    frame = f'<rect class="room" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"/>'
    return f"{frame}\n{text(x + 10, y + 17, title, 'label', 'start')}"


def arrow(*points: Point, label: str = "", at: Point | None = None, dashed: bool = False) -> str:
    """Return an arrow along the points. Its label stands above the middle of the first stretch, or at a point."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    kind = "arrow dashed" if dashed else "arrow"
    parts = [f'<polyline class="{kind}" points="{path}" marker-end="url(#tip)"/>']
    if label:
        (x1, y1), (x2, y2) = points[0], points[1]
        x, y = at or ((x1 + x2) / 2, (y1 + y2) / 2 - 6)
        parts.append(text(x, y, label, "label"))
    return "\n".join(parts)


def line(start: Point, end: Point) -> str:
    """Return a thin line."""
    return f'<path class="thin" d="M{start[0]:g} {start[1]:g} L{end[0]:g} {end[1]:g}"/>'


def figure(title: str, height: float, *elements: str) -> str:
    """Return the SVG file of some elements."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}"'
            f' height="{height:g}" role="img">',
            f"<title>{escape(title, quote=False)}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path class="tip" d="M0 0.5 L8 4 L0 7.5 Z"/></marker></defs>',
            f'<rect class="back" width="{WIDTH}" height="{height:g}" rx="8"/>',
            *elements,
            "</svg>",
            "",
        ]
    )


def drafts() -> str:
    """Draw a draft in one decode step."""
    return figure(
        "A draft in one decode step",
        390,
        box(20, 20, 226, 60, "History", "earlier responses to the prompt:", "one draft index, a mapped file", kind="a"),
        box(267, 20, 226, 60, "Siblings", "the prompt's other samples", "on this engine", kind="a"),
        box(514, 20, 226, 60, "Own text", "the sample's prompt", "and response so far", kind="a"),
        arrow((133, 80), (133, 104), (300, 104), (300, 128)),
        arrow((380, 80), (380, 128)),
        arrow((627, 80), (627, 104), (460, 104), (460, 128)),
        box(230, 128, 300, 48, "The longest match drafts", "what followed the sample's last 2 to 16 tokens"),
        arrow((380, 176), (380, 194), (100, 194), (100, 222)),
        box(20, 222, 160, 64, "Drafts", "one for each sample,", "up to 32 tokens"),
        arrow((180, 254), (207, 254)),
        box(207, 222, 160, 64, "Draft budget", "cuts all drafts together", "by predicted step times", kind="b"),
        arrow((367, 254), (394, 254)),
        box(394, 222, 160, 64, "vLLM forward pass", "computes every draft", "token of the step"),
        arrow((554, 254), (580, 254)),
        box(580, 222, 160, 64, "Rejection sampler", "accepts a beginning, and", "samples one token more", kind="c"),
        arrow((610, 286), (610, 320), (287, 320), (287, 288), label="accepted or not", at=(448, 315), dashed=True),
        arrow((690, 286), (690, 362), (8, 362), (8, 152), (228, 152), label="new tokens of each sample", at=(350, 357)),
    )


def history() -> str:
    """Draw the way of a response to the drafts of the next epoch."""
    return figure(
        "A response becomes the drafts of the next epoch",
        330,
        box(20, 38, 160, 60, "Trainer", "response, reward, length,", "in the background"),
        arrow((180, 68), (252, 68), label="by prompt", at=(207, 62)),
        room(234, 12, 506, 190, "history worker: a Ray actor on CPUs, for some of the prompts"),
        box(254, 38, 210, 60, "Responses", "last two rollouts, compressed:", "about 1 byte a token", kind="a"),
        arrow((464, 68), (550, 68), label="append"),
        box(552, 38, 172, 60, "Journal", "worker-N.journal, read", "after a restart"),
        arrow((359, 98), (359, 130), label="build", at=(382, 119)),
        box(254, 132, 210, 54, "Draft index", "a suffix array: 15 bytes a token", kind="b"),
        arrow((464, 148), (550, 148), label="no room"),
        box(552, 132, 172, 54, "Spilled indexes", "compressed, on the disk"),
        arrow((552, 168), (466, 168), label="announced", at=(508, 182)),
        arrow((359, 186), (359, 244), label="Ray object", at=(396, 216)),
        room(20, 222, 720, 96, "engine"),
        box(254, 246, 210, 56, "File on tmpfs", "mapped by the engine core,", "then its name is removed"),
        arrow((254, 274), (208, 274)),
        box(40, 246, 166, 56, "Scheduler", "drafts from the index", kind="c"),
        box(552, 246, 172, 56, "Prompt arrives", "the engine asks the worker"),
        arrow((638, 246), (638, 212), (440, 212), (440, 188), dashed=True),
    )


def latency() -> str:
    """Draw how a measured profile becomes predictions, and who asks for them."""
    return figure(
        "From a measured profile to a predicted step time",
        310,
        box(20, 30, 168, 64, "rhyme profile", "or the run's first engine:", "steps, prefills, transfers", kind="a"),
        arrow((188, 62), (222, 62)),
        box(222, 30, 150, 64, "Profile", "one JSON file: model,", "hardware, TP size"),
        arrow((372, 62), (406, 62)),
        box(406, 30, 150, 64, "Step model", "seconds by samples,", "tokens and context", kind="b"),
        arrow((556, 62), (590, 62)),
        box(590, 30, 150, 64, "Correction", "by the run's own", "timed steps", kind="b"),
        arrow((665, 94), (665, 132), (110, 132), (110, 168), label="predicted seconds", at=(390, 127)),
        arrow((290, 132), (290, 168)),
        arrow((470, 132), (470, 168)),
        arrow((650, 132), (650, 168)),
        box(30, 168, 160, 60, "Draft budget", "how many tokens a", "decode step verifies", kind="c"),
        box(210, 168, 160, 60, "Scheduling", "shares of engines, moves,", "TP switches"),
        box(390, 168, 160, 60, "Simulator", "rhyme simulate,", "the new run's estimate"),
        box(570, 168, 160, 60, "Emulation", "engines slowed to", "another machine"),
        arrow((110, 228), (110, 254)),
        box(30, 254, 160, 40, "Decode step"),
        arrow((190, 274), (752, 274), (752, 62), (742, 62), label="measured seconds", at=(470, 269), dashed=True),
    )


def moves() -> str:
    """Draw the orders and data of one move, in the order of time."""
    source, mover, destination = 120.0, 380.0, 640.0

    def order(y: float, to: float, words: str) -> str:
        end = to + (68 if to < mover else -68)
        return arrow((mover, y), (end, y), label=words, at=((mover + to) / 2 + (30 if to < mover else -30), y - 5))

    return figure(
        "A sample moves between two engines of one node",
        470,
        box(source - 90, 16, 180, 40, "Source engine"),
        box(mover - 90, 16, 180, 40, "Mover", "beside the samples' home"),
        box(destination - 90, 16, 180, 40, "Destination engine"),
        *(line((x, 56), (x, 456)) for x in (source, mover, destination)),
        box(source - 66, 66, 132, 220, "generates", "the sample", kind="c"),
        order(84, destination, "1. reserve blocks and a seat"),
        order(120, source, "2. stage"),
        order(156, destination, "3. expect"),
        box(mover - 100, 182, 200, 50, "KV buffer in /dev/shm", "full blocks of the sample", kind="a"),
        arrow((source + 66, 207), (mover - 102, 207)),
        arrow((mover + 100, 207), (destination - 68, 207)),
        box(destination - 66, 190, 132, 34, "copies blocks in"),
        order(262, source, "4. stop"),
        box(source - 66, 286, 132, 40, "keeps it", kind="b"),
        box(mover - 100, 288, 200, 54, "Handover", "last blocks, tokens, generator,", "written in one piece", kind="a"),
        arrow((source + 66, 306), (mover - 102, 306)),
        arrow((mover + 100, 316), (destination - 68, 316)),
        box(destination - 66, 302, 132, 150, "generates", "the sample", kind="c"),
        order(372, destination, "5., 6. start: is it running?"),
        arrow((destination - 66, 398), (mover + 2, 398), label="yes, and its new tokens", at=(475, 393), dashed=True),
        order(430, source, "7. forget"),
        box(source - 66, 414, 132, 34, "sample is gone"),
    )


def pipeline() -> str:
    """Draw two steps on their way through two engines and the trainer."""

    def lane(y: float, name: str) -> str:
        return f"{text(14, y + 26, name, 'title', 'start')}\n{line((96, y + 50), (746, y + 50))}"

    return figure(
        "Two steps on their way",
        340,
        lane(16, "Engine 0"),
        box(106, 18, 170, 42, "step 4, short", "weights 2", kind="a"),
        box(284, 18, 250, 42, "step 5, long", "weights 3", kind="b"),
        box(542, 18, 200, 42, "step 6, short", "weights 4", kind="c"),
        lane(84, "Engine 1"),
        box(106, 86, 250, 42, "step 4, long", "weights 2", kind="a"),
        box(364, 86, 84, 42, "5, short", "weights 3", kind="b"),
        box(474, 86, 268, 42, "step 6, long", "weights 4", kind="c"),
        arrow((190, 128), (190, 188), label="prompt groups, as they end", at=(190, 162)),
        arrow((406, 128), (406, 154), (510, 154), (510, 188)),
        lane(186, "Trainer"),
        box(106, 190, 66, 38, "train 3"),
        box(178, 190, 178, 38, "passes of step 4", kind="a"),
        box(364, 190, 92, 38, "train 4", kind="a"),
        box(464, 190, 70, 38, "passes", kind="b"),
        box(542, 190, 92, 38, "train 5", kind="b"),
        lane(250, "Weights"),
        arrow((172, 228), (172, 256)),
        arrow((456, 228), (456, 256)),
        arrow((634, 228), (634, 256)),
        box(96, 258, 74, 32, "2"),
        box(172, 258, 282, 32, "3"),
        box(456, 258, 176, 32, "4"),
        box(634, 258, 112, 32, "5"),
        text(
            380,
            326,
            "Engine 1 waits for weights 4 before step 6, because weights 3 would be two steps off policy.",
            "label",
        ),
    )


def tp_switch() -> str:
    """Draw a node before and after a switch of layouts."""
    elements = [
        text(380, 26, "Before: the aligned layout, four engines of one device each", "title"),
        text(380, 196, "After: the tail layout, two engines of two devices each, on the same devices", "title"),
    ]
    left = [3, 1, 1, 2]
    for number, samples in enumerate(left):
        x = 30 + number * 180
        elements.append(box(x, 40, 160, 62, f"Engine {number} (TP 1)", f"{samples} unfinished of 16", kind="a"))
    elements.append(arrow((200, 102), (200, 124), (200, 176), label="", at=None))
    elements.append(arrow((560, 102), (560, 176)))
    elements.append(
        box(80, 124, 600, 34, "A convoy of moves: all 7 samples stop together, and begin together", kind="b")
    )
    for number, samples in enumerate((4, 3)):
        x = 30 + number * 360
        title = f"Engine {number + 4} (TP 2)"
        elements.append(box(x, 210, 340, 62, title, f"{samples} samples, each generated faster", kind="c"))
    for number in range(4):
        x = 30 + number * 180
        elements.append(box(x, 300, 160, 62, f"Device {number}", "weights of both layouts,", "KV cache of one or both"))
        elements.append(line((x + 80, 272), (x + 80, 300)))
    return figure("A node switches to more tensor parallelism", 380, *elements)


def control_plane() -> str:
    """Draw the way of events from a run to a page, and of wishes back."""
    return figure(
        "Events from a run to a page, and wishes back",
        410,
        room(20, 12, 720, 132, "the run: a Ray job, or any rhyme train"),
        box(36, 40, 150, 66, "Run's processes", "trainer, engines,", "history workers", kind="c"),
        arrow((186, 73), (220, 73)),
        box(222, 40, 150, 66, "Recorder", "writes all events"),
        arrow((372, 73), (402, 73)),
        box(404, 40, 150, 66, "events.jsonl", "the outbox, in the", "run directory", kind="a"),
        arrow((554, 73), (584, 73)),
        box(586, 40, 140, 66, "Reporter", "a process of its own,", "sends batches"),
        arrow((680, 106), (680, 196), label="HTTP batches", at=(680, 164)),
        arrow((624, 198), (624, 108), label="stop?", at=(606, 164), dashed=True),
        arrow((600, 106), (600, 130), (110, 130), (110, 108), label="stop-request.json", at=(360, 126), dashed=True),
        room(20, 174, 720, 160, "the service: rhyme serve"),
        box(586, 198, 140, 50, "ingest", "checks, stores"),
        arrow((586, 223), (556, 223)),
        box(404, 198, 150, 50, "SQL store", "events, derived rows", kind="a"),
        arrow((404, 223), (374, 223)),
        box(222, 198, 150, 50, "read", "queries of pages"),
        arrow((222, 223), (188, 223)),
        box(36, 198, 150, 50, "API and pages", "JSON, HTML, figures", kind="b"),
        arrow((640, 248), (640, 261), (297, 261), (297, 274), label="news", at=(380, 266)),
        box(222, 276, 150, 44, "live", "streams of news"),
        box(404, 276, 322, 44, "launch", "a queue; starts, watches and stops Ray jobs"),
        arrow((479, 276), (479, 250)),
        arrow((726, 298), (752, 298), (752, 73), (742, 73), dashed=True),
        box(36, 358, 336, 40, "Browser, rhyme runs, scripts"),
        arrow((80, 248), (80, 356)),
        arrow((140, 358), (140, 250), label="requests", at=(112, 310)),
        arrow((297, 320), (297, 356), label="server-sent events", at=(297, 346)),
    )


def simulator() -> str:
    """Draw what goes into a simulation, what decides in it, and what comes out."""
    return figure(
        "A simulation: real decisions, no engine",
        330,
        box(20, 24, 200, 58, "Profiles", "step times, one for each TP size", kind="a"),
        box(20, 98, 200, 58, "Lengths", "a preset, a trace,", "or a recorded run", kind="a"),
        box(20, 172, 200, 58, "Features and cluster", "nodes, devices, trainer", kind="a"),
        arrow((220, 53), (282, 53), (282, 110), (310, 110)),
        arrow((220, 127), (308, 127)),
        arrow((220, 201), (282, 201), (282, 144), (310, 144)),
        box(310, 92, 170, 70, "Simulated engines", "and a simulated trainer,", "from change to change", kind="b"),
        arrow((370, 162), (370, 232), label="what is seen", at=(324, 204)),
        arrow((420, 232), (420, 164), label="decision", at=(454, 204)),
        box(
            250,
            232,
            290,
            76,
            "scheduling/ and drafting/",
            "the decisions of a run: dispatch, turns,",
            "moves, switches, draft budget",
            kind="c",
        ),
        arrow((480, 110), (510, 110), (510, 53), (538, 53)),
        arrow((480, 127), (538, 127)),
        arrow((480, 144), (510, 144), (510, 201), (538, 201)),
        box(540, 24, 200, 58, "Table", "throughput, bubbles, moves"),
        box(540, 98, 200, 58, "Page", "--html, and --json"),
        box(540, 172, 200, 58, "Settings to use", "options of rhyme train"),
    )


def weights() -> str:
    """Draw the way of a weight version from the policy to the engines."""
    return figure(
        "A weight version on its way",
        330,
        room(12, 12, 440, 200, "node with policy ranks"),
        box(32, 40, 150, 56, "Policy rank 0", "buckets 1, 3, 5", kind="a"),
        box(32, 132, 150, 56, "Policy rank 1", "buckets 2, 4, 6", kind="a"),
        arrow((182, 68), (222, 68), (222, 100), (248, 100)),
        arrow((182, 160), (222, 160), (222, 124), (248, 124)),
        box(250, 76, 180, 72, "Two files in memory", "one version each; a mark", "for each parameter", kind="b"),
        arrow((340, 148), (340, 240), label="as marks appear", at=(392, 230)),
        box(250, 242, 180, 64, "vLLM workers", "load each parameter", "as soon as it is there", kind="c"),
        room(482, 12, 266, 200, "node with engines alone"),
        arrow((430, 112), (500, 112), label="buckets", at=(466, 104)),
        box(502, 76, 226, 72, "Two files in memory", "fetched by bucket", "through Ray's object store", kind="b"),
        arrow((615, 148), (615, 240)),
        box(525, 242, 180, 64, "vLLM workers", "load each parameter", "as soon as it is there", kind="c"),
    )


# What a room is for, in few words; its docstring says it in full.
IDEAS = {
    "settings": "options",
    "platform": "with and without GPU",
    "embedded": "model and tasks",
    "telemetry": "events of a run",
    "latency": "how long things take",
    "history": "earlier responses",
    "drafting": "history to drafts",
    "scheduling": "pure decisions",
    "weights": "trainer to engines",
    "kv": "caches on their way",
    "engine": "one vLLM engine",
    "moves": "samples that move",
    "training": "OpenRLHF's trainers",
    "pipeline": "the streaming trainer",
    "run": "a run's life",
    "proof": "drafts change nothing",
    "simulation": "simulated engines",
    "verify": "checks on site",
    "client": "the service's client",
    "api": "control plane",
    "webui": "dashboard",
    "cli": "thin commands",
}
# Rooms in one row of the figure.
COLUMNS = 4


def room_names() -> list[str]:
    """Return the rooms from bottom to top, as the test of imports lists them, without folders inside of rooms."""
    tree = ast.parse((FOLDER.parents[2] / "tests" / "test_import_rules.py").read_text(encoding="utf-8"))
    found = next(
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROOMS"
    )
    return [name for name in ast.literal_eval(found) if "/" not in name]


def rooms() -> str:
    """Draw the rooms of the package in their order: a room imports rooms of its own row's left and of lower rows."""
    names = room_names()
    rows = [names[at : at + COLUMNS] for at in range(0, len(names), COLUMNS)]
    height, elements = 62, []
    for number, row in enumerate(rows):
        y = 16 + (len(rows) - 1 - number) * (height + 16)
        for column, name in enumerate(row):
            pure = "a" if name in ("settings", "latency", "drafting", "scheduling", "proof", "simulation") else "box"
            elements.append(box(40 + column * 178, y, 164, height - 12, name, IDEAS[name], kind=pure))
    bottom = 16 + len(rows) * (height + 16)
    elements.append(arrow((20, 20), (20, bottom - 30)))
    elements.append(text(40, bottom, "A room imports rooms of lower rows, and on its left.", "label", "start"))
    elements.append(text(722, bottom, "blue: imports no ray, vllm or torch", "label", "end"))
    return figure("The rooms of the package, from bottom to top", bottom + 16, *elements)


FIGURES: dict[str, Callable[[], str]] = {
    "rooms": rooms,
    "weights": weights,
    "drafts": drafts,
    "history": history,
    "latency": latency,
    "moves": moves,
    "pipeline": pipeline,
    "tp-switch": tp_switch,
    "control-plane": control_plane,
    "simulator": simulator,
}


def write(folder: Path) -> None:
    """Write every figure into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")


def main() -> None:
    """Write every figure of the documentation."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    write(FOLDER)


if __name__ == "__main__":
    main()
