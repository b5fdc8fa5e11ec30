"""LiteLLM as a client, through which many programs use a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from draftproof import LLM, SamplingParams
from tests.server.running import ENGINE, Running, drafting, running

MESSAGES: Any = [{"role": "user", "content": "What is 12 * 7?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(drafting(), served_model_name=("tiny",)) as started:
        yield started


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches prices from the network
    return pytest.importorskip("litellm", reason="litellm is not installed: pip install litellm")


def test_litellm_reads_chats_and_completions(litellm: Any, server: Running) -> None:
    where = {"api_base": f"{server.url}/v1", "api_key": "none", "seed": 4, "max_tokens": 12}
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=12)
    with LLM(**ENGINE) as plain:
        chat = plain.chat(MESSAGES, params, use_tqdm=False)[0].outputs[0]
        text = plain.generate("def f(", params, use_tqdm=False)[0].outputs[0]
    asked = {"model": "hosted_vllm/tiny", "temperature": 0.8, **where}
    whole = litellm.completion(messages=MESSAGES, **asked)
    assert whole.choices[0].message.content == chat.text
    assert whole.usage.completion_tokens == len(chat.token_ids)
    chunks = litellm.completion(messages=MESSAGES, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat.text
    asked["model"] = "text-completion-openai/tiny"
    assert litellm.text_completion(prompt="def f(", **asked).choices[0].text == text.text


def test_litellm_raises_what_it_raises_for_others(litellm: Any, server: Running) -> None:
    with pytest.raises(litellm.BadRequestError, match="top_p=7"):
        litellm.completion(
            model="hosted_vllm/tiny",
            messages=MESSAGES,
            api_base=f"{server.url}/v1",
            api_key="none",
            top_p=7,
            num_retries=0,
        )
