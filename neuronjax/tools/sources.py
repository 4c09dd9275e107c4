"""`--from`: what registers a user's kernels before a command runs."""

import importlib
import importlib.util
import pathlib
import sys


def load(source: str | None) -> None:
    """Imports a `.py` file by its path, or a module by its name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: there is no such module.
    """
    if source is None:
        return
    path = pathlib.Path(source)
    if path.suffix == ".py":
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise FileNotFoundError(f"--from: there is no file {source}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, str(pathlib.Path.cwd()))
        if importlib.util.find_spec(source) is None:
            raise ValueError(f"--from: there is no module {source}")
        importlib.import_module(source)
