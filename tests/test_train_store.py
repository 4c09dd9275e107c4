"""What a damaged checkpoint says."""

import jax
import jax.numpy as jnp
import pytest

from neuronjax.tools.train.store import Store


def test_a_damaged_checkpoint_is_named(tmp_path):
    like = {"x": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    store = Store(tmp_path, writing=True)
    store.save(3, {"x": jax.random.normal(jax.random.key(0), (64, 64))}, {})
    for file in (tmp_path / "3" / "arrays").glob("**/d/*"):
        file.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"3: cannot be read; without this folder"):
        store.arrays(3, like)
    store.close()
