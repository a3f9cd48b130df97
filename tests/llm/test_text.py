"""Text in, text out, and tokenizers of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_llm import assert_drained, ids, one, params, prompt
from tests.tiny_models import write_tiny
from tests.tiny_tokenizer import write_tokenizer
from trtllm_shadowkv import LLM, SamplingParams
from trtllm_shadowkv.build.builder import build_engine
from trtllm_shadowkv.config import BuildConfig
from trtllm_shadowkv.errors import GenerationError, RequestError

# --- text ---------------------------------------------------------------------------------------------------------


def test_text_and_chats_go_through_the_tokenizer(llm: LLM) -> None:
    text = "Grüße, 世界"
    output = one(llm, text, params(4))
    assert output.prompt == text
    assert output.prompt_token_ids == list(text.encode())
    chat = llm.chat([{"role": "user", "content": "hi"}], params(4))
    assert chat.prompt_token_ids == list(b"user:hi\nassistant:")
    assert ids(chat) == ids(one(llm, "user:hi\nassistant:", params(4)))
    assert llm.chat_ids(({"role": "user", "content": "hi"},)) == chat.prompt_token_ids


@pytest.mark.parametrize(
    "messages",
    ["hi", [], None, 5, [1], ["hi"], {"role": "user", "content": "x"}, [{"content": "x"}], [{"role": "user"}],
     [{"role": "user", "content": None}], [[{"role": "user", "content": "x"}]]],
)  # fmt: skip
def test_messages_that_are_no_conversation_are_one_clear_error(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match=r"messages|prompt is empty"):
        llm.chat(messages)


def test_half_a_surrogate_pair_is_one_clear_error(llm: LLM) -> None:
    with pytest.raises(RequestError, match="expected valid Unicode"):
        llm.generate("a\ud800b")


def test_without_a_tokenizer_there_are_token_ids_alone(tmp_path: Path) -> None:
    engine = build_engine(write_tiny(tmp_path / "m"), tmp_path / "e", BuildConfig(max_batch_size=2))
    with LLM(engine.path) as llm:
        assert one(llm, [5, 6], params(3)).text == ""
        calls: list[Callable[[], Any]] = [
            lambda: llm.generate("text"),
            lambda: llm.chat([{"role": "user", "content": "x"}]),
            lambda: llm.generate([5], SamplingParams(stop="x")),
            lambda: llm.generate([5], SamplingParams(bad=["x"])),
        ]
        for call in calls:
            with pytest.raises(RequestError, match="needs a tokenizer and this engine has none"):
                call()
        write_tokenizer(tmp_path)
        with LLM(engine.path, tokenizer=tmp_path) as other:
            assert one(other, [5, 6], params(3)).outputs[0].token_ids == ids(one(llm, [5, 6], params(3)))
            with pytest.raises(RequestError, match="refuses these messages"):
                other.chat([{"role": "user", "content": 5}])
        write_tokenizer(tmp_path, chat_template=None)
        with LLM(engine.path, tokenizer=tmp_path) as other, pytest.raises(RequestError, match="no chat template"):
            other.chat([{"role": "user", "content": "x"}])


def test_a_tokenizer_that_wants_to_cut_texts_does_not_get_its_way(engine_dir: Path, tmp_path: Path) -> None:
    """And is not changed while another thread is inside it, which its library would answer with an error."""
    write_tokenizer(tmp_path, truncation=4)
    with LLM(engine_dir, tokenizer=tmp_path, threads=1) as llm, ThreadPoolExecutor(8) as pool:
        texts = [chr(97 + i) * 200 for i in range(24)]
        outputs = list(pool.map(lambda t: one(llm, t, params(4)), texts))
    assert [o.prompt_token_ids for o in outputs] == [list(t.encode()) for t in texts]


class _Broken:
    """A tokenizer of the caller's own that cannot decode what the model says."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], **_: Any) -> str:
        if self.broken:
            raise RuntimeError("no such token")
        return "".join(map(chr, ids))

    broken = False


def test_a_tokenizer_that_fails_ends_one_request_and_no_other(engine_dir: Path) -> None:
    broken = _Broken()
    with LLM(engine_dir, tokenizer=broken, threads=1) as llm:
        handles = [llm.generate_async(prompt(n), params(2000)) for n in (5, 300)]
        for handle in handles:
            next(iter(handle))
        broken.broken = True
        for handle in handles:
            with pytest.raises(GenerationError, match="no such token"):
                handle.result(timeout=180)
        assert_drained(llm)
        broken.broken = False
        handle = llm.generate_async(prompt(5), params(2000))
        next(iter(handle))
        broken.broken = True
        handle.abort()  # its held-back text is asked for once more
        with pytest.raises(GenerationError, match="no such token"):
            handle.result(timeout=180)
        assert_drained(llm)
        broken.broken = False
        assert len(ids(one(llm, prompt(5), params(3)))) == 3
