"""A reward that does not come, comes late or is no number ends the rollout, and says which reward it was."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from openrlhf.utils.agent import SingleTurnAgentExecutor
from vllm import SamplingParams

from rhyme_openrlhf.engine.checked_reward import CheckedExecutor, RewardError, RewardLateError, check_response

LIMIT_S = 1.0


class Tokenizer:
    """One token a character."""

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        import torch

        return {"input_ids": torch.tensor([[ord(character) for character in text]])}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(map(chr, tokens))


class Engine:
    """Answers every prompt with "42"."""

    async def generate(self, tokens: list[int], parameters: Any, multi_modal_data: Any = None) -> Any:
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[52, 50], finish_reason="stop", logprobs=None)])


def rewarded(tmp_path: Path, body: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
    reward = tmp_path / "reward.py"
    reward.write_text(f"import time\ndef reward_func(queries, prompts, labels, **kwargs):\n    {body}\n")
    executor = CheckedExecutor(str(reward), limit_s)
    return asyncio.run(executor.execute("6*7=", "42", SamplingParams(max_tokens=8), 64, Tokenizer(), Engine()))


def test_a_right_reward_passes(tmp_path: Path) -> None:
    output = rewarded(tmp_path, "return {'rewards': 1.0, 'scores': 0.5}")
    assert (output["reward"], output["scores"]) == (1.0, 0.5)
    check_response(output)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('answer')", "raised KeyError: 'answer'"),
        ("raise TimeoutError('the judge')", "raised TimeoutError: the judge"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt for"),
        # Ray replaces sys.exit by one that names 0.
        ("import sys; sys.exit()", "raised SystemExit"),
        ("time.sleep(3)", "did not answer within 1 s (--limits.reward_s)"),
        ("return {'reward': 1.0}", "returned no 'rewards'"),
        ("return None", "returned no 'rewards'"),
    ],
)
def test_no_reward_is_an_error(tmp_path: Path, body: str, says: str) -> None:
    with pytest.raises(RewardError) as error:
        # A busy machine starts a thread late: only what hangs meets the limit.
        rewarded(tmp_path, body, LIMIT_S if "within" in says else 300)
    assert says in str(error.value)
    assert "reward.py" in str(error.value) and "6*7=" in str(error.value)
    assert isinstance(error.value, RewardLateError) == ("within" in says)


def test_a_late_reward_is_asked_for_again_for_the_same_response(tmp_path: Path) -> None:
    """The first answer counts, of the first call or of the second one."""
    asked = tmp_path / "asked"
    body = (
        f"with open({str(asked)!r}, 'a') as file: print(queries[0], file=file)\n"
        f"    time.sleep(WAIT if len(open({str(asked)!r}).readlines()) == 1 else AGAIN)\n"
        "    return {'rewards': 1.0}"
    )
    assert rewarded(tmp_path, body.replace("WAIT", "3").replace("AGAIN", "0"))["reward"] == 1.0
    assert asked.read_text().splitlines() == ["6*7=42"] * 2
    asked.unlink()
    assert rewarded(tmp_path, body.replace("WAIT", "1.5").replace("AGAIN", "3"))["reward"] == 1.0
    assert asked.read_text().splitlines() == ["6*7=42"] * 2


def test_waiting_for_a_thread_is_not_the_rewards_time(tmp_path: Path) -> None:
    """asyncio has few threads: here one, for five rewards of a third of the limit each."""
    reward = tmp_path / "reward.py"
    reward.write_text("import time\ndef reward_func(q, p, l):\n    time.sleep(0.3)\n    return {'rewards': 1.0}\n")
    executor = CheckedExecutor(str(reward), LIMIT_S)

    async def run() -> list[dict[str, Any]]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        one = executor.execute
        return await asyncio.gather(
            *(one("6*7=", "42", SamplingParams(max_tokens=8), 64, Tokenizer(), Engine()) for _ in range(5))
        )

    assert [output["reward"] for output in asyncio.run(run())] == [1.0] * 5


def test_rewards_that_hang_take_no_thread_from_others(tmp_path: Path) -> None:
    """One thread of asyncio's, and more hanging rewards than that."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import time\ndef reward_func(q, p, l):\n"
        "    time.sleep(2 if l == ['hang'] else 0)\n    return {'rewards': 1.0}\n"
    )
    executor = CheckedExecutor(str(reward), 0.2)

    async def run() -> list[Any]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        labels = ["hang", "hang", "42"]
        return await asyncio.gather(
            *(
                executor.execute("6*7=", label, SamplingParams(max_tokens=8), 64, Tokenizer(), Engine())
                for label in labels
            ),
            return_exceptions=True,
        )

    *late, answered = asyncio.run(run())
    assert all(isinstance(error, RewardLateError) for error in late) and answered["reward"] == 1.0


@pytest.mark.parametrize("field", ["reward", "scores"])
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, "high", "0.5", b"1", [1.0, math.nan], np.array([1.0, math.nan]), {"a": 1}, object()]
)
def test_a_reward_is_a_finite_number(field: str, value: Any) -> None:
    with pytest.raises(RewardError, match="6\\*7=") as error:
        check_response({"prompt": "6*7=", "reward": 1.0, "scores": 1.0, field: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [[1.0, 2.0], np.array([1.0, 2.0]), torch.tensor([1.0, 2.0])], ids=str)
def test_a_sample_has_one_reward_and_may_have_several_scores(value: Any) -> None:
    response = {"prompt": "6*7=", "reward": 1.0, "scores": value}
    check_response(response)
    assert response["scores"] == [1.0, 2.0]
    with pytest.raises(RewardError, match="must be one number"):
        check_response({"prompt": "6*7=", "reward": value})


@pytest.mark.parametrize("one", [np.array([0.5]), np.float32(0.5), torch.tensor([[0.5]]), 0.5, [0.5]], ids=repr)
def test_an_array_of_one_is_a_number(one: Any) -> None:
    response = {"prompt": "6*7=", "reward": one if not isinstance(one, list) else 0.5, "scores": one}
    check_response(response)
    assert (response["reward"], response["scores"]) == (0.5, 0.5)


def test_what_upstream_reads_only_if_it_is_there_may_be_left_out() -> None:
    check_response({"prompt": "6*7=", "reward": None, "scores": None})
    check_response({"prompt": "6*7="})


@pytest.mark.parametrize("logs", [["steps"], {"error": "timeout"}, {"steps": [1, 2]}], ids=str)
def test_extra_logs_are_numbers_by_name(logs: Any) -> None:
    with pytest.raises(RewardError, match=r"extra_logs.* for prompt '6\*7='"):
        check_response({"prompt": "6*7=", "reward": 1.0, "extra_logs": logs})
    check_response({"prompt": "6*7=", "reward": 1.0, "extra_logs": {"a": 1, "b": np.int64(2), "c": math.nan}})


def test_a_server_has_upstreams_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an answer takes longer than a function may."""

    async def slow(self: Any, *_: Any) -> Any:
        await asyncio.sleep(0.3)
        return [{"rewards": 1.0}]

    monkeypatch.setattr(SingleTurnAgentExecutor, "_fetch_rewards_via_http", slow)
    executor = CheckedExecutor("http://localhost:1", 0.1)
    output = asyncio.run(executor.execute("6*7=", "42", SamplingParams(max_tokens=8), 64, Tokenizer(), Engine()))
    assert output["reward"] == 1.0


def test_a_server_that_fails_is_named_with_what_it_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream would go on without a reward."""

    async def fail(self: Any, *_: Any) -> Any:
        raise ConnectionError("refused")

    monkeypatch.setattr(SingleTurnAgentExecutor, "_fetch_rewards_via_http", fail)
    executor = CheckedExecutor("http://localhost:1", 0.1)
    with pytest.raises(RewardError, match="http://localhost:1 raised ConnectionError: refused for prompt '6"):
        asyncio.run(executor.execute("6*7=", "42", SamplingParams(max_tokens=8), 64, Tokenizer(), Engine()))
