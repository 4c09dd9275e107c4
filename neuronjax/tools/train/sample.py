"""Text from a decoder whose tokens are bytes."""

from neuronjax.models.llama import Llama
from neuronjax.tools.train.config import TrainConfig


def sample(
    model: Llama,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """Continues `prompt`.

    The decoder sees at most the window that it was trained for: a longer text goes on
    from its last half window.

    Args:
        model: a decoder of bytes, such as `load_run` gives.
        prompt: text, not empty, of fewer bytes than the model's window.
        tokens: how many bytes to add.
        temperature: 0 takes the likeliest.
        seed: of the draws.

    Returns:
        The prompt with what follows. Bytes that are no UTF-8, and control characters
        but line ends, are shown as "·".

    Raises:
        ValueError: the prompt is empty or fills the window.
    """
    ids, window = list(prompt.encode()), model.config.max_seq
    if not 0 < len(ids) < window:
        raise ValueError(
            f"sample: prompt must have 1 to {window - 1} bytes, got {len(ids)}"
        )
    left, context = tokens, ids
    while left:
        count = min(left, window - len(context))
        (new,) = model.generate(
            [context],
            max_tokens=count,
            temperature=temperature,
            seed=seed + left,
            eos_ids=(),
        )
        ids, left = ids + new, left - count
        context = ids[-(window // 2) :]
    return shown(bytes(ids).decode("utf-8", "replace"))


def sample_of(model: Llama, config: TrainConfig) -> str:
    """Continues the prompt of a run, as its settings say."""
    return sample(
        model,
        config.prompt,
        tokens=config.sample_tokens,
        temperature=config.temperature,
        seed=config.seed,
    )


def shown(text: str) -> str:
    """`text` with a dot for each character that a terminal would not show."""
    return "".join(c if c == "\n" or _visible(c) else "·" for c in text)


def _visible(c: str) -> bool:
    return c.isprintable() and c != "\ufffd"
