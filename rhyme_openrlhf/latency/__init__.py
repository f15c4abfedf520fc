"""The times of decode steps, prefills, transfers and weight loads: measured once, used by many.

Read in this order:

1. `profile` is what was measured of one model on one kind of hardware, its file, and the names of both.
2. `measure` says which points are measured, walks over them at an engine, and writes the profile.
3. `curve` passes through measured points.
4. `step_model` gives the seconds of a decode step, and says how well it predicts the profile's own points.
5. `transfer_model` gives the seconds of a sample's way to another engine, and of a weight load.
6. `predictor` corrects the model by what the steps of now take.
7. `pace` says how long an engine waits to emulate another machine.
8. `page` draws a profile.

No file here imports ray, vllm or torch. `engine/actor_parts/measuring.py` runs the steps that `measure` asks for.
"""
