"""vLLM's source (0.29.0, 0.32.0) as our engine code was written from it: a change must fail here, not in a run."""

from __future__ import annotations

import importlib
import inspect

import pytest

from rhyme_openrlhf.engine.worker import KV_TAG

pytest.importorskip("vllm.v1.engine.core")

CORE, SCHEDULER = "v1.engine.core:EngineCore", "v1.core.sched.scheduler:Scheduler"
RUNNER, RUNNER_V2 = "v1.worker.gpu_model_runner:GPUModelRunner", "v1.worker.gpu.model_runner:GPUModelRunner"
WORKER, UNIPROC = "v1.worker.gpu_worker:Worker", "v1.executor.uniproc_executor:"
SAMPLER, SAMPLER_V2 = (f"v1.{at}rejection_sampler:RejectionSampler" for at in ("sample.", "worker.gpu.spec_decode."))
OUTPUT, ASYNC = "v1.worker.gpu.async_utils:AsyncOutput", "v1.core.sched.async_scheduler:AsyncScheduler"
DUMMY = "rhyme_openrlhf.engine.patches.rejection_sampling:_vllm_dummy_run"

# A function or class, and what stands in its source.
PRESENT: list[tuple[str, ...]] = [
    # Not padded where draft lengths are looked up, and then as long as is looked up.
    (f"{SCHEDULER}.schedule", "(self.num_spec_tokens > 0 and self.dynamic_sd_lookup is None)"),
    (f"{SCHEDULER}.update_from_output", "scheduled_spec_decode_tokens"),
    # patches/core_channel.py: utilities are looked up by name, in the order of requests.
    (f"{CORE}.__init__", "self.model_executor = executor_class(vllm_config)"),
    (f"{CORE}.step", "if not self.scheduler.has_requests():\n            return {}, False"),
    (f"{CORE}Proc.has_work", "self.scheduler.has_requests()"),
    (f"{CORE}Proc._handle_client_request", "getattr(self, method_name)"),
    (f"{CORE}Proc._process_input_queue", "self.input_queue.get_nowait()", "while not self.input_queue.empty()"),
    # patches/rejection_sampling.py
    (f"{RUNNER}.profile_run", "self._dummy_sampler_run(last_hidden_states)"),
    (DUMMY, "def _dummy_sampler_run("),
    # patches/second_runner.py: drafts, and how many rows are verified at a time where the KV cache is sized.
    (f"{RUNNER_V2}.execute_model", "max_query_len=max_query_len"),
    (f"{RUNNER_V2}.prepare_inputs", "scheduled_spec_decode_tokens", "self.req_states.draft_tokens"),
    (f"{RUNNER_V2}.initialize_kv_cache", "varlen_decode="),
    (f"{RUNNER_V2}.profile_run", "self._dummy_sampler_run(sample_hidden_states)"),
    (f"{SAMPLER_V2}.__call__", "get_max_chunk_logits(logits.shape[1])"),
    # patches/late_drafts.py: room is kept behind each scheduled step, as a list that is not changed.
    (f"{UNIPROC}AsyncOutputFuture", "self.async_output = async_output"),
    (f"{UNIPROC}UniProcExecutor.collective_rpc", "AsyncOutputFuture("),
    (f"{RUNNER_V2}.sample_tokens", "AsyncOutput(", "return async_output"),
    (OUTPUT, "self.copy_event", "self.num_sampled_tokens_np", "self.sampled_token_ids", "self.model_runner_output"),
    (f"{ASYNC}._update_after_schedule", "request.spec_token_ids = self._spec_token_placeholders"),
    # worker.py: weights are reloaded in place. A discarded tag keeps no copy on the host. KV caches of given size are
    # measured by nobody, but the device must have the engine's share free.
    (f"{WORKER}.reload_weights", "set_current_vllm_config", "self.model_runner.reload_weights(*args, **kwargs)"),
    (WORKER, "if kv_cache_memory_bytes := self.cache_config.kv_cache_memory_bytes"),
    (WORKER, f'tag="{KV_TAG}"', "enable_cumem_allocator"),
    ("v1.worker.utils:request_memory", "free_memory < requested_memory"),
    ("device_allocator.cumem:CuMemAllocator.discard", "is_asleep"),
    # proposers.py
    ("v1.spec_decode.ngram_proposer:NgramProposer.propose", "self.batch_propose("),
]
# What stands there so often: nothing else looks lengths up, or samples.
COUNTED: list[tuple[str, str, int]] = [
    (f"{SCHEDULER}.schedule", "self.dynamic_sd_lookup", 3),
    (f"{RUNNER}.__init__", "self.rejection_sampler = RejectionSampler(", 1),
    (f"{SAMPLER}.forward", "self._get_logprobs_tensors(", 1),
    (DUMMY, "self.rejection_sampler(", 2),
    ("config.vllm:VllmConfig", "self.speculative_config.method not in get_args(NgramGPUTypes)", 2),
]
# What comes before what. Grammar masks are made while the forward pass runs, so what parts do in `computing` delays no
# step. Whether to block is asked after the scheduler was. Steps are computed in the order in which they were scheduled.
# States of requests are updated before drafts are used, by what is done ahead (patches/second_runner.py). Graphs are
# made right behind the mode.
IN_ORDER: list[tuple[str, ...]] = [
    (f"{CORE}.step", "execute_model(", "get_grammar_bitmask(", "future.result()"),
    (
        f"{CORE}Proc._process_input_queue",
        "while not self.has_work()", "block = self.process_input_queue_block", "self.input_queue.get(block=block)",
    ),
    (f"{CORE}.step_with_batch_queue", ".schedule(", ".execute_model(", ".sample_tokens("),
    (
        f"{RUNNER_V2}.execute_model",
        "self.add_requests(", "self.update_requests(", "self.gather_batch_req_state(", "self.prepare_inputs(",
    ),
    (
        f"{RUNNER_V2}.execute_model",
        "self.update_pp_decode_requests(", "self.finish_requests(", "self.free_states(", "self.add_requests(",
        "self.update_requests(", "self.block_tables.apply_staged_writes(", "self.gather_batch_req_state(",
    ),
    (f"{RUNNER_V2}.initialize_kv_cache", "resolve_cudagraph_mode_and_sizes(", "= ModelCudaGraphManager("),
]  # fmt: skip


def source(address: str) -> str:
    """Return the source of vLLM's own function, also where it is patched here."""
    module, _, names = address.partition(":")
    found = importlib.import_module(module if address == DUMMY else f"vllm.{module}")
    for name in names.split("."):
        found = getattr(found, name)
    return inspect.getsource(inspect.unwrap(found))


@pytest.mark.parametrize("row", PRESENT, ids=lambda row: row[0])
def test_vllm_has_what_was_read(row: tuple[str, ...]) -> None:
    text = source(row[0])
    assert [part for part in row[1:] if part not in text] == []


@pytest.mark.parametrize(("address", "part", "count"), COUNTED)
def test_vllm_has_it_so_often(address: str, part: str, count: int) -> None:
    assert source(address).count(part) == count


@pytest.mark.parametrize("row", IN_ORDER, ids=lambda row: row[0])
def test_vllm_does_it_in_this_order(row: tuple[str, ...]) -> None:
    address, *parts = row
    text = source(address)
    places = [text.find(part) for part in parts]
    assert min(places) >= 0 and places == sorted(places)
