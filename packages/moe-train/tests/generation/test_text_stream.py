"""Text that comes token by token is the text of all tokens, cut at the first stop string."""

import json
import random

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Metaspace

from moe_train.generation.text_stream import TextStream
from moe_train.tokenization import TextTokenizer, load_tokenizer


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "byte level":
        vocab = {"<|endoftext|>": 0}
        vocab |= {c: n for n, c in enumerate(sorted(ByteLevel.alphabet()), start=1)}
        vocab |= {"de": 257, "def": 258, "Ġx": 259}
        model = BPE(vocab, [("d", "e"), ("de", "f"), ("Ġ", "x")])
        whole = Tokenizer(model)
        whole.pre_tokenizer, whole.decoder = ByteLevel(add_prefix_space=False), Decoder()
    else:
        vocab = {"<|endoftext|>": 0}
        vocab |= {f"<0x{n:02X}>": n + 1 for n in range(256)}
        vocab |= {c: n for n, c in enumerate("▁defx\n", start=257)}
        whole = Tokenizer(BPE(vocab, [], byte_fallback=True))
        whole.pre_tokenizer = Metaspace(prepend_scheme="first")
        steps = [Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)]
        whole.decoder = Sequence(steps)
    whole.add_special_tokens(["<|endoftext|>"])
    whole.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return load_tokenizer(folder)


def texts(count: int) -> list[str]:
    rng = random.Random(7)
    return ["".join(rng.choices("de fx\né☂𝄞", k=rng.randint(1, 30))) for _ in range(count)]


def pieces_of(
    tokenizer: TextTokenizer, prompt: str, rest: str, stop: list[str]
) -> tuple[list[str], TextStream]:
    whole = tokenizer.encode_prompt(prompt + rest)
    ids = tokenizer.encode_prompt(prompt)
    assert whole[: len(ids)] == ids
    stream, pieces = TextStream(tokenizer, ids, stop), []
    for token in whole[len(ids) :]:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream


def test_pieces_are_whole_characters_and_together_the_text(tokenizer: TextTokenizer) -> None:
    for rest in texts(40):
        pieces, stream = pieces_of(tokenizer, "é de fx\n", rest, [])
        assert "".join(pieces) == stream.text == rest
        assert not any("\ufffd" in piece for piece in pieces)


def test_the_text_ends_before_the_first_stop_string(tokenizer: TextTokenizer) -> None:
    stop = ["f x", "é☂", "\n\n", "xx"]
    for rest in texts(60):
        pieces, stream = pieces_of(tokenizer, "de\n", rest, stop)
        places = [rest.index(s) for s in stop if s in rest]
        expected = rest[: min(places)] if places else rest
        assert "".join(pieces) == stream.text == expected
        assert stream.stopped == bool(places)


def test_no_piece_shows_what_a_stop_string_may_take_back(tokenizer: TextTokenizer) -> None:
    pieces, _ = pieces_of(tokenizer, "x", "de fe d", ["de fx"])
    shown = [len("".join(pieces[: n + 1])) for n in range(len(pieces))]
    assert shown[2] == 0
    assert "".join(pieces) == "de fe d"


def test_half_a_character_at_the_end_is_shown_as_such_at_last(tokenizer: TextTokenizer) -> None:
    first, *_ = tokenizer.encode_batch(["☂"])[0].tolist()[-3:]
    stream = TextStream(tokenizer, tokenizer.encode_prompt("x"))
    assert stream.push(first) == ""
    assert stream.finish() == stream.text == "\ufffd"


def test_special_tokens_are_no_text(tokenizer: TextTokenizer) -> None:
    stream = TextStream(tokenizer, [])
    ids = [0, *tokenizer.encode_batch(["de"])[0].tolist(), 0]
    assert "".join([*map(stream.push, ids), stream.finish()]).strip() == "de"
