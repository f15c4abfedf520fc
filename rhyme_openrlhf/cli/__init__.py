"""Thin commands, one a module: `rhyme train`, `rhyme demo`, `rhyme doctor` and so on. Nothing imports this package."""
