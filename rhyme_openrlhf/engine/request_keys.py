"""What an engine's actor tells our plug-ins of vLLM: their paths, and keys of vLLM's dictionaries."""

# vLLM imports these by name, in the engine core's process and in the workers'.
SCHEDULER = "rhyme_openrlhf.engine.scheduler.engine_scheduler"
WORKER_EXTENSION = "rhyme_openrlhf.engine.worker.WorkerExtension"
PROPOSER = "rhyme_openrlhf.engine.proposers.NullProposer"

# Of vLLM's `additional_config`: the fields of HistoSpecSettings and of DraftingSettings, of an engine that speculates;
# the path of the profile whose times the engine keeps; and whether its samples can move.
SETTINGS_KEY = "rhyme_histospec"
DRAFTING_KEY = "rhyme_drafting"
PACE_KEY = "rhyme_emulate"
MOVES_KEY = "rhyme_moves"

# Of a request's `SamplingParams.extra_args`.
# The prompt whose history the request may draft from (prompt_keys.py::prompt_key).
PROMPT_KEY = "rhyme_prompt_key"
# The request is a check of ours, not a sample: it does not appear in the engine's counters.
UNCOUNTED = "rhyme_uncounted"
# The name under which the scheduler keeps which of the request's tokens came from drafts, until they are asked for.
TRACE = "rhyme_trace"
# The size of the speculation window that the request's sample had at another engine.
WINDOW = "rhyme_window"
