"""A running sample goes on at another engine: who awaits it, who decides, who carries it (docs/moves.md).

Read in this order:

1. `home` is where every sample's caller waits; `home_actor` is the home as a Ray actor.
2. `keeper` knows where each sample is and what it has generated.
3. `mover` carries one move out; `move_record` says what is known of it; `convoy` binds moves that go together.
4. `engine_reports` and `layout_reports` hold what engines reported last.
5. `home_watch` asks what moves: `reallocator` (full to empty engines), `tp_switcher` (to engines of more devices).
6. `awake_layout` says which layout has its KV cache; `turn_holds` keeps engines from their next turn.

Decisions are in `scheduling/`, blocks in `kv/`, the engine's side in `engine/`.
"""
