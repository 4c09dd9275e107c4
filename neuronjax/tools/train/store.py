"""The checkpoints of a run, written by orbax.

A checkpoint is written beside its place and renamed into it, so it is there whole or
not at all; older ones go only then. Saving waits until that has happened: a run that is
killed loses what came after its last checkpoint and nothing else.
"""

import fcntl
from pathlib import Path
from typing import Any

import jax

try:
    import orbax.checkpoint as ocp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "training needs orbax: pip install 'neuronjax[train]'", name=error.name
    ) from error

_ARRAYS, _FACTS = "arrays", "facts"


def finished_steps(folder: str | Path) -> list[int]:
    """The finished checkpoints in a folder, oldest first; none if there is no folder.

    Like `read_facts` it leaves jax unstarted, so that a command may still ask for the
    devices that a run says it needs.
    """
    folder = Path(folder)
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []


def read_facts(folder: str | Path, step: int) -> dict[str, Any]:
    """What was saved beside the arrays of a checkpoint."""
    # Any: orbax names the path type of etils, and takes this one.
    place: Any = Path(folder).absolute() / str(step) / _FACTS
    return dict(ocp.JsonCheckpointHandler().restore(place))


class Store:
    """Checkpoints by step, in one folder that one process writes at a time.

    Args:
        folder: made if need be.
        keep: how many stay, the newest.
        writing: take the folder for this process; another that holds it is an error.

    Raises:
        ValueError: another process writes here.
    """

    def __init__(self, folder: str | Path, *, keep: int = 1, writing: bool = False):
        self.folder = Path(folder).absolute()
        self._lock = _lock(self.folder) if writing else None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep if writing else None,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=writing,
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    @property
    def steps(self) -> list[int]:
        """The finished checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, arrays: Any, facts: dict[str, Any]) -> None:
        """Writes a checkpoint and waits until it is finished.

        Args:
            step: its number.
            arrays: a pytree of arrays, on one device or on a mesh.
            facts: what JSON can hold.
        """
        items = {
            _ARRAYS: ocp.args.StandardSave(_by_name(arrays)),
            _FACTS: ocp.args.JsonSave(facts),
        }
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def facts(self, step: int) -> dict[str, Any]:
        """What was saved beside the arrays."""
        items = {_FACTS: ocp.args.JsonRestore()}
        return self._manager.restore(step, args=ocp.args.Composite(**items))[_FACTS]

    def arrays(self, step: int, like: Any, *, partial: bool = False) -> Any:
        """The arrays of a checkpoint.

        Args:
            step: its number.
            like: `jax.ShapeDtypeStruct`s in the structure of what was saved; their
                shardings say where each array goes, whatever mesh it came from.
            partial: `like` has only some of the arrays.

        Raises:
            ValueError: the files are damaged.
        """
        named = _by_name(like)
        if partial:
            restore: Any = ocp.args.PyTreeRestore(
                named,
                restore_args=ocp.checkpoint_utils.construct_restore_args(named),
                partial_restore=True,
            )
        else:
            restore = ocp.args.StandardRestore(named)
        items = {_ARRAYS: restore}
        try:
            held = self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # orbax raises that itself, for damaged numbers
            if type(error) is not Exception and "OCDBT" not in str(error):
                raise
            cause = str(error.__cause__ or error).partition("\n")[0]
            raise ValueError(
                f"{self.folder / str(step)}: cannot be read; without this folder a run "
                f"goes on from the checkpoint before it: {cause}"
            ) from error
        found = held[_ARRAYS]
        return jax.tree.unflatten(jax.tree.structure(like), [found[k] for k in named])

    def close(self) -> None:
        """Lets the folder go."""
        self._manager.close()
        if self._lock is not None:
            self._lock.close()


def _by_name(tree: Any) -> dict[str, Any]:
    """Every leaf under the words of its path; optax keeps named tuples in tuples."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    name = jax.tree_util.keystr
    return {name(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _lock(folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"{folder}: another run writes here") from None
    return file
