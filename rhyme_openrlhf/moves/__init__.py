"""A running sample goes on at another engine: who awaits it, who decides, who carries it (docs/moves.md).

Read in this order:

1. `home` is where every sample's caller waits, as a Ray actor.
2. `keeper` knows where each sample is and what it has generated.
3. `mover` carries one move out, or several that go together.
4. `engine_reports` holds what engines reported last.
5. `home_watch` asks what moves: from full to empty engines, or, by `tp_switcher`, to engines of more devices.

Decisions are in `scheduling/`, blocks in `kv/`, the engine's side in `engine/`.
"""
