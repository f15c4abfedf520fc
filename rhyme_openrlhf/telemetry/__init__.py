"""Events of a run, and everything that is made of events alone: record, metrics, displays, summary, report.

Read in this order:

1. `events` is the schema and its JSON form.
2. `metrics` says what an engine counts, and which figures are made of the counts.
3. `engine_events` turns an engine's answers into events; `system_sample` looks at a machine.
4. `services` is what every process knows of the run; `recorder` is the actor to which all processes send events.
5. `run_directory` makes a run's directory and names its files; `event_log` is the record in it.
6. `samples` keeps responses and their lengths; `sample_table` is the table of a step's samples.
7. `phase` says what a run does now; `progress` shows a run on the terminal, as `progress_state` says; `wording`
   writes figures.
8. `summary` says what a run did; `figure_page` writes figures as a page.
9. `reporter` sends events to a control plane: `batches` decides, `control_connection` connects.

All but `recorder` and `services` import neither ray, vllm nor torch.
"""
