"""What our requests tell the scheduler plug-in: keys of vLLM's `SamplingParams.extra_args`."""

# The prompt whose history the request may draft from (prompt_keys.py::prompt_key).
PROMPT_KEY = "rhyme_prompt_key"
# The request is a check of ours, not a sample: it does not appear in the engine's counters.
UNCOUNTED = "rhyme_uncounted"
# The name under which the scheduler keeps which of the request's tokens came from drafts, until they are asked for.
TRACE = "rhyme_trace"
# The size of the speculation window that the request's sample had at another engine.
WINDOW = "rhyme_window"
