"""Parts of the scheduler plug-in: the process of vLLM's engine core, one decode step after the other.

Read in this order:

1. `part` is what a part is told of a decode step.
2. `meter` counts what steps did: counters, traces of drafts, figures of an engine's status.
3. `clock` says how long decode steps take, or makes them as long as a profile says.
4. `drafting` asks the source for drafts (`drafting/`), keeps them within a step, and learns what drafts gain.
5. `moves` stops, keeps and takes up samples that go from engine to engine.
"""
