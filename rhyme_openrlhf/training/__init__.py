"""OpenRLHF's trainers, samples generator and model actors, subclassed: a step from prompts to trained weights.

Read in this order:

1. `base_trainer` is what our trainers share; `trainer` is the synchronous one, `trainer_async` the asynchronous one.
2. `samples_generator` draws prompts and records each rollout; `dispatch` sends prompts where the policy says.
3. `experience` makes experiences, and hands responses to history and record.
4. `policy` and `critic` are the model actors.
5. `layouts` plans the engines of a run; `layout_placement` starts them; `engine_profiles` gives them step times.
6. `checkpoint` saves what OpenRLHF does not; `checkpoint_directory` knows what is complete; `resume` goes on from it.
7. `random_state` is part of a checkpoint; `failure` says how a fault or a wish to stop reaches the driver.

The streaming pipeline is `pipeline/`.
"""
