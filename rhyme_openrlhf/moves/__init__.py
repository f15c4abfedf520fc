"""A running sample goes on at another engine: who awaits it, who decides, who carries it (docs/moves.md).

Read in this order:

1. `home` is where every sample's caller waits, as a Ray actor.
2. `front` is where prompts are tokenized and agents and rewards run, an actor on each node; the home has its `fronts`.
3. `keeper` knows where each sample is and what it has generated.
4. `mover` carries one move out, or several that go together.
5. `engine_reports` holds what engines reported last.
6. `home_watch` asks what moves: from full to empty engines, or, by `tp_switcher`, to engines of more devices.

Decisions are in `scheduling/`, blocks in `kv/`, the engine's side in `engine/`.
"""
