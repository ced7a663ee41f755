"""Text from a trained checkpoint, with a key/value cache.

text = generate_text(Path("checkpoint-250"), "def ", max_new_tokens=64, seed=0)
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from moe_train.checkpoint import read_part
from moe_train.errors import TrainValueError, check_type
from moe_train.layout import read_decoder, single_rank_layouts, stage_tensors, stored_tensors
from moe_train.model import DecoderStage, KeyValueCache, StageOptions

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(checkpoint: Path, device: torch.device | None = None) -> DecoderStage:
    """The whole decoder on this device, with the weights of `checkpoint`, in their dtype.

    Raises:
        ValueError: the folder is not a checkpoint of a known family, or a tensor does not fit.
    """
    check_type("checkpoint", checkpoint, Path)
    if not checkpoint.is_dir():
        raise TrainValueError(f"{checkpoint} is not a folder; name a checkpoint-N folder")
    config = read_decoder(checkpoint)
    dtype_name = str(config.extra.get("dtype", config.extra.get("torch_dtype", "float32")))
    stage = DecoderStage(
        config,
        StageOptions(
            layers=range(config.num_hidden_layers),
            first=True,
            last=True,
            device=device,
            dtype=_DTYPES.get(dtype_name, torch.float32),
        ),
    )
    layouts = single_rank_layouts(stage, config)
    stored = stored_tensors(layouts, stage_tensors(stage), rank=0)
    read_part(checkpoint, "model", [stored], cast=True)
    return stage.eval()


def generate_text(
    checkpoint: Path, prompt: str, *, max_new_tokens: int, temperature: float, top_k: int, seed: int
) -> str:
    """Continue `prompt`; the answer holds the prompt and ends before an end-of-text token.

    Args:
        temperature: 0 takes the most probable token each time.
        top_k: sample among this many most probable tokens; 0 means all.

    Raises:
        ValueError: an argument is out of range, or the checkpoint cannot be read.
    """
    check_type("checkpoint", checkpoint, Path)
    check_type("prompt", prompt, str)
    check_type("max_new_tokens", max_new_tokens, int)
    check_type("temperature", temperature, int, float)
    check_type("top_k", top_k, int)
    check_type("seed", seed, int)
    if max_new_tokens < 1 or temperature < 0 or top_k < 0:
        raise TrainValueError(
            f"max_new_tokens={max_new_tokens}, temperature={temperature}, top_k={top_k}; expected "
            "at least 1, at least 0 and at least 0"
        )
    file = checkpoint / "tokenizer.json"
    if not file.is_file():
        raise TrainValueError(f"{checkpoint} holds no tokenizer.json; name a checkpoint-N folder")
    tokenizer = Tokenizer.from_file(str(file))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stage = load_model(checkpoint, device)
    tokens = tokenizer.encode(prompt).ids or [stage.config.eos_token_id or 0]
    limit = stage.config.max_position_embeddings
    if len(tokens) >= limit:
        raise TrainValueError(
            f"the prompt has {len(tokens)} tokens; the model takes fewer than {limit}"
        )
    generator = torch.Generator().manual_seed(seed)
    cache = KeyValueCache()
    fresh = tokens
    for _ in range(min(max_new_tokens, limit - len(tokens))):
        start = len(tokens) - len(fresh)
        logits_V = next_logits(stage, fresh, start, cache)
        token = pick(logits_V, temperature, top_k, generator)
        if token in stage.config.eos_token_ids:
            break
        tokens = [*tokens, token]
        fresh = [token]
    return str(tokenizer.decode(tokens))


@torch.no_grad()
def next_logits(stage: DecoderStage, fresh: list[int], start: int, cache: KeyValueCache) -> Tensor:
    """Logits [V], in fp32 on the CPU, after the tokens `fresh` at positions from `start`."""
    device = next(stage.parameters()).device
    input_ids = torch.tensor([fresh], device=device)
    positions = torch.arange(start, start + len(fresh), device=device)[None]
    hidden_BSd, _ = stage.hidden_states(input_ids, positions, cache)
    return stage.logits(hidden_BSd[:, -1:])[0, 0].float().cpu()


def pick(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One token id from the distribution."""
    if temperature == 0:
        return int(logits_V.argmax())
    scaled_V = logits_V / temperature
    if 0 < top_k < scaled_V.numel():
        smallest = scaled_V.topk(top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < smallest, -torch.inf)
    return int(torch.multinomial(scaled_V.softmax(0), 1, generator=generator))
