"""Equality of what environments return."""

import numpy as np


def assert_same(ours, theirs, where="result", rtol=0.0):
    """Equal values, types, dtypes and keys, all the way down; NaN equals NaN. With `rtol`, floats may round."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_same(ours[key], theirs[key], f"{where}[{key!r}]", rtol)
    elif isinstance(ours, tuple):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, other, f"{where}[{index}]", rtol)
    elif isinstance(ours, np.ndarray):
        assert ours.dtype == theirs.dtype, where
        if rtol and ours.dtype.kind == "f":
            np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol / 10, err_msg=where)
        else:
            np.testing.assert_array_equal(ours, theirs, where)
    else:
        assert ours == theirs, where
