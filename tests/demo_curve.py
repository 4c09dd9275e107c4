"""The losses behind the README's plot, which every `neuronjax demo` has to follow.

`python -m tests.demo_curve FOLDER` compares a finished demo with them; with `--store`
its losses and its curve become those of the README.
"""

import shutil
import sys
from pathlib import Path

import numpy as np

from neuronjax.tools.train.curve import save_curve
from neuronjax.tools.train.log import Record, read_log
from neuronjax.tools.train.run import LOG

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
STORED, PLOT = PICTURES / "demo.jsonl", PICTURES / "demo.svg"
# Between JAX 0.10 on Python 3.11 and JAX 0.12 on 3.13 the losses of one processor
# differ by 1.5e-5 nats after 200 steps; another processor adds in another order.
NATS = 1e-3, 3e-2  # of the first 20 steps, and of all


def require_alike(records: list[Record]) -> None:
    """Refuses losses, of learnt windows or of the text kept aside, off the plot."""
    stored = read_log(STORED)[: len(records)]
    assert [r.step for r in records] == [r.step for r in stored] != []
    for name in ("loss", "validation"):
        found, wanted = (
            np.array([getattr(r, name) for r in rows], float)
            for rows in (records, stored)
        )
        np.testing.assert_allclose(found[:20], wanted[:20], rtol=0, atol=NATS[0])
        np.testing.assert_allclose(found, wanted, rtol=0, atol=NATS[1])


def main(folder: str, *flags: str) -> None:
    log = Path(folder) / LOG
    if "--store" in flags:
        PICTURES.mkdir(exist_ok=True)
        shutil.copyfile(log, STORED)
        save_curve(read_log(log), PLOT)
    records = read_log(log)
    require_alike(records)
    print(f"{len(records)} steps follow the README's plot")


if __name__ == "__main__":
    main(*sys.argv[1:])
