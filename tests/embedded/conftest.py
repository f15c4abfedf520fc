"""What was embedded is made by scripts, which import one another by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
