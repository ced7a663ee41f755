"""What a prepared corpus holds, in words: counts, lengths, what was left out, and a sample.

print(describe_corpus(prepare(config), sequence_length=config.data.sequence_length))
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from moe_train.data.prepare import PreparedCorpus, PreparedSource
from moe_train.data.token_store import TokenStore, open_store
from moe_train.tokenization import TextTokenizer

_SAMPLE_TOKENS = 200
_UNITS = {
    "chat": "conversations",
    "preference": "answers",
    "embedding": "texts",
}


def describe_corpus(prepared: PreparedCorpus, *, sequence_length: int) -> str:
    """The tokenizer, each source and each split; reads masks and lengths, and a sample.

    Args:
        sequence_length: documents that are longer are counted.
    """
    tokenizer = prepared.tokenizer
    lines = [
        f"tokenizer    {prepared.vocab_size} tokens, documents end with "
        f"{tokenizer.decode([prepared.eos_token_id], skip_special_tokens=False)!r} "
        f"(id {prepared.eos_token_id}): {prepared.tokenizer_file.parent}"
    ]
    for source in prepared.sources:
        lines += _describe_source(prepared, source, tokenizer, sequence_length)
    lines.append(f"fingerprint  {prepared.fingerprint}")
    return "\n".join(lines)


def _describe_source(
    prepared: PreparedCorpus,
    source: PreparedSource,
    tokenizer: TextTokenizer,
    sequence_length: int,
) -> Iterator[str]:
    total = sum(each.weight for each in prepared.sources)
    yield (
        f"source {source.name}: {source.kind}, {source.packing}, "
        f"{source.weight / total:.1%} of the samples, fingerprint {source.fingerprint}"
    )
    unit = _UNITS.get(source.kind, "documents")
    for name, path in (("train", source.train), ("validation", source.validation)):
        yield from _describe_split(name, path, unit, sequence_length)
    for reason, count in sorted(source.left_out.items()):
        yield f"  left out   {count:,} {reason}"
    text = _marked_sample(open_store(source.train), tokenizer)
    yield "  sample     the first of train; what is trained on stands between « and »:"
    yield from (f"    | {line}" for line in text.split("\n"))


def _describe_split(name: str, path: Path, unit: str, sequence_length: int) -> Iterator[str]:
    store = open_store(path)
    lengths = np.diff(store.starts)
    trained = len(store.tokens) if store.trained is None else int(np.sum(store.trained))
    low, median, high = np.quantile(lengths, [0, 0.5, 0.95], method="nearest")
    longer = int((lengths > sequence_length).sum())
    yield (
        f"  {name:<10} {len(lengths):,} {unit}, {len(store.tokens):,} tokens, {trained:,} of them "
        "trained on"
    )
    yield (
        f"  {'':<10} tokens of each: min {low:,}, median {median:,}, p95 {high:,}, max "
        f"{lengths.max():,}; {longer:,} longer than data.sequence_length={sequence_length}"
    )


def _marked_sample(store: TokenStore, tokenizer: TextTokenizer) -> str:
    """The beginning of the first document, the parts that are targets between marks."""
    end = min(int(store.starts[1]), _SAMPLE_TOKENS)
    mask = np.ones(end, np.uint8) if store.trained is None else store.trained[:end]
    pairs = zip(store.tokens[:end].tolist(), mask.tolist(), strict=True)
    text = ""
    for trained, run in groupby(pairs, key=lambda pair: bool(pair[1])):
        part = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        text += f"«{part}»" if trained else part
    return text + (" ..." if end < store.starts[1] else "")
