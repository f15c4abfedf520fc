"""OpenRLHF's trainers, samples generator and model actors, each subclassed once.

Read in this order:

1. `trainer` is what both kinds of training do around upstream's step, and the synchronous trainer; `trainer_async` the
   asynchronous one. `failure` says how a fault or a stop request reaches the driver.
2. `samples_generator` gives out rollouts, sends prompts where there is least predicted work; `rollout_watch` records.
   `coming_prompts` sees the next ones ahead of time, for engines that rehearse.
3. `experience` makes experiences and hands responses to history and to the run directory.
4. `model_actors` are one rank of policy and critic.
5. `checkpoint` adds what upstream does not save, in `checkpoint_directory`; `resume` chooses what a run goes on from;
   `reproducible` has seeds, orders and random states.
6. `layouts` plans engines and their memory; `engines` starts them, gives them profiles, and leaves lost ones out.
"""
