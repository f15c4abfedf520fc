"""The embedded model and task: a real GRPO run that learns in minutes, with no GPU and no download.

- `reward` judges the answers by rule. It is loaded by file path and must stay light, so nothing is imported here.
- `data/` and `model/` hold what `scripts/make_embedded_tasks.py` and `scripts/train_embedded_model.py` wrote.
- `demo` has the options of `rhyme demo`.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
MODEL = FOLDER / "model"
# Half as deep, for `--drafting.source draft_model`; made by `scripts/train_embedded_draft_model.py`.
DRAFT_MODEL = FOLDER / "draft_model"
DATA = FOLDER / "data"
REWARD = FOLDER / "reward.py"
# Recorded runs of this model, for `rhyme serve --demo`; made by `scripts/record_demo.py`.
RECORDING = FOLDER / "recording" / "demo.tar.xz"
