"""Thin commands: `rhyme train`, `rhyme demo`, `rhyme doctor`, `rhyme fetch-model`. Nothing imports this package."""
