"""Every option of `rhyme train`: one frozen dataclass a feature, from which flags, checks, schema and form are made.

Read in this order:

1. `options` turns a settings dataclass into command-line options and back.
2. One file a feature holds its options: `drafting`, `history`, `latency`, `histopipe` (with dispatch), `moves` (with
   reallocation), `tp_switch`, `weights`, `engine` (with a CPU's), `run` (with limits), `telemetry`, `control`.
3. `config` holds `RhymeSettings`, the settings of a whole run.
4. `features` names the features for people, by what each is for.
5. `upstream_kinds` says what OpenRLHF's own options name; `upstream_options.json` is OpenRLHF's parser as a schema.
6. `redaction` hides the secrets of a command and of a configuration before anybody else sees them.
7. `recorded` names the settings of a run's record.
8. `varied` reads the values of an option that differs between the runs of a sweep.

No file here imports ray, vllm or torch.
"""
