"""The prefix-caching emitter: its place, and its refusals."""

from typing import Any, NoReturn

from neuronjax.primitives.contracts import Contract, add, contracted
from neuronjax.primitives.registry import PREFIX_CACHING_NAMES


@contracted(lambda call: dict(tiled=False))
def attention_prefix_caching_fwd_kernel(
    *operands: Any, kernel_name: str, **options: Any
) -> NoReturn:
    """Refuses: attention behind a cached prefix is not built yet.

    Args:
        *operands: queries, keys, values and those of the prefix.
        kernel_name: one of the attention NAMEs without a swap.
        **options: as in `attention_kernel`.

    Raises:
        ValueError: no prefix-caching leaf has that name.
        NotImplementedError: one has, but it is not built yet.
    """
    raise NotImplementedError(
        f"attention_prefix_caching_fwd_kernel: {kernel_name} with a prefix is not "
        "built yet; attention_kernel attends without one, attention_tkg_fwd_kernel to "
        "a cache"
    )


add(
    Contract(
        "prefix_caching.name",
        ("attention_prefix_caching_fwd_kernel",),
        "Prefix caching is not implemented for this kernel name {kernel_name}",
        lambda c: c.kernel_name not in PREFIX_CACHING_NAMES,
        example=lambda function: dict(kernel_name="AttentionMMSoftmaxMM"),
        stage=0,
        literal=True,
    )
)
