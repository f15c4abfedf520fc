"""How long a decode step, a prefill, a transfer or a weight load takes: measured once, asked by many.

Read in this order:

1. `profile` is what was measured of one model on one kind of hardware, and its file; `subject` names both.
2. `grid` says which points are measured; `measure` walks the grid at an engine and writes the profile.
3. `curve` and `power_curve` pass through measured points.
4. `step_model` gives the seconds of a decode step; `step_kernels` computes many at once.
5. `transfer_model` gives the seconds of a sample's way to another engine, and of a weight load.
6. `correction` learns how far the steps of now differ from the profile; `predictor` joins model and correction.
7. `pace` says how long an engine waits to emulate another machine.
8. `quality` says how well a profile predicts its own points; `page` draws a profile.

No file here imports ray, vllm or torch. `engine/actor_parts/measuring.py` runs the steps that `measure` asks for.
"""
