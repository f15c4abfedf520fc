"""Events of a run, and everything that is made of events alone: record, metrics, displays, summary, report.

Read in this order:

1. `events` is the schema, in parts: `event_base`, `draft_events`, `history_events`; `event_json` is its JSON form.
2. `metrics` says what an engine counts, and which figures are made of the counts.
3. `engine_events` and `engine_samples` turn an engine's answers into events; `system_sample` looks at a machine.
4. `recorder` is the actor to which all processes send events, and what every process knows of the run.
5. `event_log` is the record on disk; `run_files` names the files of a run directory, `run_directory` makes one.
6. `sample_rounds`, `sample_records`, `sample_files` and `length_records` keep responses and their lengths.
7. `progress` shows a run on the terminal: `progress_state`, `progress_bars`, `progress_lines`, `wording`.
8. `summary` says what a run did; `figure_page` writes figures as a page.
9. `reporter` sends events to a control plane: `batches` decides, `control_connection` connects.
10. `recording` packs runs for the demonstration; `synthetic_run` makes events of a run that never was.

All but `recorder` import neither ray, vllm nor torch.
"""
