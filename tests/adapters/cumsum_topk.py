"""Cases of `cumsum`, `topk` and the index lists."""

import jax
import numpy as np

import neuronjax
from tests.adapters import adapter, comparison, take, within


@adapter("cumsum")
def cumsum(inputs, options):
    return {"output_0": neuronjax.cumsum(**inputs, **take(options, axis="axis"))}


@adapter("topk")
def topk(inputs, options):
    named = take(options, k="k", sorted="sorted")
    values, indices = neuronjax.topk(**inputs, **named)
    # What an index names, so that any of equal values will do.
    found = jax.numpy.take_along_axis(inputs["inp"], indices, -1)
    return {"topk_values": values, "topk_indices": indices, "found": found}


@comparison("topk")
def compare(name, got, wanted, case):
    """Values as sorted multisets; indices by what they name, no place twice."""
    expected = np.sort(np.asarray(wanted["topk_values"], np.float64))
    if name == "topk_values":
        return within(name, np.sort(np.asarray(got[name], float)), expected, case)
    places = np.asarray(got[name])
    assert places.shape == wanted[name].shape
    assert all(
        len(set(row)) == len(row)
        for row in places.reshape(-1, places.shape[-1]).tolist()
    )
    return within(name, np.sort(np.asarray(got["found"], float)), expected, case)


@adapter("find_nonzero_indices")
def find_nonzero_indices(inputs, options):
    named = take(options, n_cols="n_cols", chunk_size="chunk_size")
    got = neuronjax.find_nonzero_indices(**inputs, **named)
    return dict(zip(("indices", "nonzero_counts"), got, strict=True))


@adapter("find_nonzero_indices_with_count")
def find_nonzero_indices_with_count(inputs, options):
    return {"output": neuronjax.find_nonzero_indices_with_count(**inputs)}


@adapter("indexed_flatten")
def indexed_flatten(inputs, options):
    return {"flattened_array": neuronjax.indexed_flatten(**inputs, **options)}


@adapter("dynamic_elementwise_add")
def dynamic_elementwise_add(inputs, options):
    return {"result": neuronjax.dynamic_elementwise_add(**inputs)}


@comparison("dynamic_elementwise_add")
def compare_rows(name, got, wanted, case):
    """Only the rows that are computed are defined, and only these are stored."""
    rows = wanted[name].shape[0]
    return within(name, got[name][:rows], wanted[name], case)
