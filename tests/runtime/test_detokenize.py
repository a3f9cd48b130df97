"""Incremental text against decoding everything at once, on tokenizers small enough to build here."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from trtllm_shadowkv.errors import StateError
from trtllm_shadowkv.runtime.detokenize import Detokenizer, StopScanner

CORPUS = [
    "the cat sat on the mat.",
    "Der Hase läuft über die Straße",
    "你好,世界",
    "👩‍👩‍👧 e\u0301 नमस्ते",
    "  indented\n\n",
] * 20
ALPHABET = [*"ab \n.é你好世界😀👩‍👩‍👧🇩🇪\u0301\u0327नम\ufffd\0", "the ", "cat", " sat"]


class Counting:
    """A tokenizer that records how many ids it was asked to decode."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.ids = 0

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str:
        self.ids += len(token_ids)
        return str(self.inner.decode(token_ids, skip_special_tokens=skip_special_tokens))


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    tok.add_special_tokens(["<|end|>"])
    tok.add_tokens([AddedToken("<tool>", special=False)])
    return tok


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """SentencePiece as Llama 2 has it: spaces as U+2581, bytes as <0x..>, the first space of a text stripped."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcthesm.", "▁the", "▁cat", "▁▁"]
    tok = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>"))
    tok.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tok.add_special_tokens(["<s>", "</s>"])
    return tok


@pytest.fixture(scope="module")
def metaspace() -> Tokenizer:
    tokens = ["<unk>", *"▁abcthesm.", "▁the", "▁cat", "▁▁"]
    tok = Tokenizer(models.Unigram([(t, -1.0) for t in tokens], 0, False))
    tok.decoder = decoders.Metaspace()
    return tok


def token(tok: Tokenizer, text: str) -> int:
    found = tok.token_to_id(text)
    assert found is not None
    return int(found)


def fallback_ids(tok: Tokenizer, text: str) -> list[int]:
    ids: list[int] = []
    for char in text.replace(" ", "▁"):
        known = tok.token_to_id(char)
        ids += [known] if known is not None else [token(tok, f"<0x{b:02X}>") for b in char.encode()]
    return ids


def stream(d: Detokenizer, ids: Iterable[int]) -> list[str]:
    deltas = []
    for i in ids:
        deltas.append(d.push(i))
        assert d.text == "".join(deltas)
    deltas.append(d.finish())
    assert d.text == "".join(deltas)
    return deltas


def byte_ids(tok: Tokenizer, data: bytes) -> list[int]:
    """One token a byte, in byte-level BPE's own spelling of bytes."""
    visible = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    hidden = [b for b in range(256) if b not in visible]
    chars = {b: chr(b) for b in visible} | {b: chr(256 + n) for n, b in enumerate(hidden)}
    return [token(tok, chars[b]) for b in data]


def test_real_text_comes_out_whole_and_at_once(byte_level: Tokenizer) -> None:
    rng = random.Random(1)
    for _ in range(150):
        text = "".join(rng.choices(ALPHABET, k=rng.randint(1, 40)))
        ids = byte_level.encode(text).ids
        deltas = stream(Detokenizer(byte_level), ids)
        assert "".join(deltas) == text
        # A token that completes a character shows it in the same step.
        for n in range(len(ids)):
            so_far = byte_level.decode(ids[: n + 1])
            if not so_far.endswith("\ufffd"):
                assert "".join(deltas[: n + 1]) == so_far


def test_no_half_characters(byte_level: Tokenizer) -> None:
    text = "a😀b👩‍👩‍👧你e\u0301"
    deltas = stream(Detokenizer(byte_level), byte_ids(byte_level, text.encode()))
    assert "".join(deltas) == text
    assert not any("\ufffd" in d for d in deltas)
    assert [d for d in deltas if d] == list(text)


@pytest.mark.parametrize("kind", ["all tokens", "bytes", "continuations", "near misses", "half and special"])
def test_random_ids_equal_decoding_everything(byte_level: Tokenizer, kind: str) -> None:
    rng = random.Random(kind)
    end = token(byte_level, "<|end|>")
    for _ in range(120):
        count = rng.randint(1, 90)
        if kind == "all tokens":
            ids = rng.choices(range(byte_level.get_vocab_size() + 3), k=count)  # three ids that do not exist
        elif kind == "bytes":
            ids = byte_ids(byte_level, rng.randbytes(count))
        elif kind == "continuations":
            ids = byte_ids(byte_level, bytes(rng.choices([0x80, 0xBF, 0x9F, 0xF0, 0xE4, 0xED, 0xA0, 0xFF], k=count)))
        elif kind == "near misses":
            data = "".join(rng.choices("😀你é", k=count)).encode()
            ids = [i for i in byte_ids(byte_level, data) if rng.random() > 0.15]
        else:
            ids = [
                j
                for i in byte_ids(byte_level, "😀你".encode() * (count // 10 + 1))
                for j in [i, *[end] * rng.randint(0, 3)]
            ]
        assert "".join(stream(Detokenizer(byte_level), ids)) == byte_level.decode(ids, skip_special_tokens=True)
        prompt, output = ids[: count // 2], ids[count // 2 :]
        expected = byte_level.decode(output, skip_special_tokens=True)
        assert "".join(stream(Detokenizer(byte_level, prompt_ids=prompt), output)) == expected


def test_work_a_token_does_not_grow(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    end, start = token(byte_level, "<|end|>"), token(byte_fallback, "<s>")
    streams: list[tuple[Tokenizer, list[int]]] = [
        (byte_level, byte_level.encode("the cat sat on 你好 😀 the mat. ").ids * 100),
        (byte_level, byte_ids(byte_level, b"\xff" * 2000)),
        (byte_level, byte_ids(byte_level, b"\x80" * 2000)),
        (byte_level, byte_ids(byte_level, b"\xe4" * 2000)),
        (byte_level, byte_ids(byte_level, "\ufffd".encode() * 700)),
        (byte_level, [end] * 2000),
        (byte_level, [byte_ids(byte_level, b"\xf0")[0], *[end] * 2000]),
        (byte_level, [10**6] * 2000),
        (byte_fallback, fallback_ids(byte_fallback, "你好" * 400)),
        (byte_fallback, [token(byte_fallback, "<0xFF>")] * 2000),
        (byte_fallback, [*fallback_ids(byte_fallback, "a你"), *[token(byte_fallback, "<0xFF>")] * 2000]),
        (byte_fallback, [start] * 2000),
    ]
    for tok, ids in streams:
        counting = Counting(tok)
        d = Detokenizer(counting)
        for i in ids:
            d.push(i)
        d.finish()
        assert counting.ids <= 45 * len(ids), (len(ids), counting.ids)


def test_special_tokens_part_nothing(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    """However many stand between two bytes of a character, or before a word whose space must stay."""
    head, *rest = byte_ids(byte_level, "😀".encode())
    end = token(byte_level, "<|end|>")
    assert stream(Detokenizer(byte_level), [head, *[end] * 200, *rest])[-2:] == ["😀", ""]
    start, word = token(byte_fallback, "<s>"), token(byte_fallback, "▁the")
    for count in (1, 200):
        specials = [start] * count
        assert "".join(stream(Detokenizer(byte_fallback), [*specials, word, *specials, word])) == "the the"
        assert "".join(stream(Detokenizer(byte_fallback, prompt_ids=[word, *specials[:7]]), [word])) == " the"


def test_unreadable_output_is_shown_while_it_comes(byte_level: Tokenizer) -> None:
    d = Detokenizer(byte_level)
    for i in byte_ids(byte_level, b"\xff" * 500):
        d.push(i)
    assert 496 <= len(d.text) <= 500


def test_byte_fallback_text(byte_fallback: Tokenizer) -> None:
    rng = random.Random(3)
    for _ in range(200):
        text = "".join(rng.choices("abc  the.你😀é\u0301", k=rng.randint(1, 40)))
        ids = fallback_ids(byte_fallback, text)
        deltas = stream(Detokenizer(byte_fallback), ids)
        assert "".join(deltas) == byte_fallback.decode(ids)
        assert not any("\ufffd" in d for d in deltas)


@pytest.mark.parametrize("which", ["byte_fallback", "metaspace"])
def test_first_space_after_a_prompt_is_kept(which: str, request: pytest.FixtureRequest) -> None:
    tok: Tokenizer = request.getfixturevalue(which)
    rng = random.Random(4)
    pool = [token(tok, t) for t in ["▁", "a", "b", "▁the", "▁cat", "▁▁", "."]]
    for _ in range(200):
        prompt, output = rng.choices(pool, k=rng.randint(0, 12)), rng.choices(pool, k=rng.randint(1, 12))
        text = "".join(stream(Detokenizer(tok, prompt_ids=prompt), output))
        assert tok.decode(prompt) + text == tok.decode(prompt + output)
    assert "".join(stream(Detokenizer(tok, prompt_ids=[pool[4]]), [pool[3]])) == " the"


def test_shown_text_is_never_taken_back(byte_fallback: Tokenizer) -> None:
    """A run of fallback bytes whose end is invalid is unreadable as a whole to decode; its characters were shown."""
    a, bad = token(byte_fallback, "a"), token(byte_fallback, "<0xFF>")
    assert "".join(stream(Detokenizer(byte_fallback), [*fallback_ids(byte_fallback, "a你"), bad, a])) == "a你\ufffda"


def test_prompt_that_ends_inside_a_character(byte_level: Tokenizer) -> None:
    ids = byte_ids(byte_level, "a😀b".encode())
    d = Detokenizer(byte_level, prompt_ids=ids[:3])
    assert "".join(stream(d, ids[3:])) == byte_level.decode(ids[3:])


def reference_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Every occurrence, by its end and then its start."""
    hits = [(p + len(s), p, s) for s in stops for p in range(len(text)) if text.startswith(s, p)]
    if not hits:
        return text, None
    end, start, found = min(hits)
    return text[: end if include else start], found


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_against_a_search_of_the_whole_text(byte_level: Tokenizer, include: bool) -> None:
    rng = random.Random(5)
    met = 0
    for _ in range(400):
        alphabet = rng.choice(["ab", "ab ", "a你😀", "the cat"])
        text = "".join(rng.choices(alphabet, k=rng.randint(1, 40)))
        stops = ["".join(rng.choices(alphabet, k=rng.randint(1, 7))) for _ in range(rng.randint(1, 4))]
        expected, found = reference_stop(text, stops, include)
        d = Detokenizer(byte_level, stops, include)
        ids = byte_level.encode(text).ids if rng.random() < 0.5 else byte_ids(byte_level, text.encode())
        deltas = stream(d, ids)
        assert (d.text, d.stopped) == (expected, found), (text, stops)
        shown = ""
        for delta in deltas:
            shown += delta
            assert expected.startswith(shown)
        met += found is not None
    assert 100 < met < 400


@pytest.mark.parametrize(
    ("text", "stops", "shown", "found"),
    [
        ("aaab!", ["aab"], "a", "aab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("xx###yy", ["##", "###"], "xx", "##"),
        ("say user:", ["user:", " user:"], "say", " user:"),
        ("abcd", ["bcd", "c"], "ab", "c"),
        ("ab", ["abc"], "ab", None),
        ("stop", ["stop"], "", "stop"),
        ("a\n\nb", ["\n\n"], "a", "\n\n"),
    ],
)
def test_stop_examples(byte_level: Tokenizer, text: str, stops: list[str], shown: str, found: str | None) -> None:
    d = Detokenizer(byte_level, stops)
    stream(d, byte_level.encode(text).ids)
    assert (d.text, d.stopped) == (shown, found)


def test_held_back_only_while_a_stop_string_may_come() -> None:
    s = StopScanner(["\nUser:"], include=False)
    assert [s.feed(p) for p in ["hi", "\nUs", "ually", "\n", "\nUser", ":x"]] == ["hi", "", "\nUsually", "", "\n", ""]
    assert s.found == "\nUser:"


def test_tokens_after_a_stop_are_ignored_and_after_the_end_refused(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one. two").ids
    d = Detokenizer(byte_level, ["."], include_stop=True)
    stream(d, ids)
    assert d.text == "one."
    assert d.finish() == ""
    d = Detokenizer(byte_level)
    d.push(ids[0])
    d.finish()
    with pytest.raises(StateError, match="after finish"):
        d.push(ids[1])


def test_replacement_character_as_a_stop_string_is_met_at_the_end(byte_level: Tokenizer) -> None:
    d = Detokenizer(byte_level, ["\ufffd"])
    stream(d, byte_ids(byte_level, b"ab\xe4"))
    assert (d.text, d.stopped) == ("ab", "\ufffd")


def test_many_long_stop_strings_stay_cheap() -> None:
    from time import perf_counter

    stops = ["a" * 4000 + f"{n:04}" for n in range(1024)]
    s = StopScanner(stops, include=False)
    start = perf_counter()
    shown = "".join(s.feed("a") for _ in range(6000)) + s.feed("0999")
    assert shown == "a" * 2000
    assert s.found == stops[999]
    assert perf_counter() - start < 5  # about 0.3 s; a search over all beginnings takes minutes


def test_transformers_tokenizer_fits(byte_level: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    tok = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level)
    text = "the cat 😀 sat ."
    ids = tok.encode(text, add_special_tokens=False)
    assert "".join(stream(Detokenizer(tok, prompt_ids=ids), ids)) == text
