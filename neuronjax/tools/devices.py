"""The devices that a command needs, asked for before jax looks for any."""

import contextlib

_MOST = 1024  # a CPU that is cut into tens of thousands answers nothing for minutes


def ask_for_devices(count: int) -> None:
    """Asks for at least `count` CPU devices; in vain where jax has started already."""
    import jax

    now = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if count > now:
        # RuntimeError: a program that calls the command has started jax.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)


def start_devices(count: int, option: str) -> None:
    """Asks for `count` CPU devices, which has to come before jax looks for devices.

    Args:
        count: how many there must be.
        option: what the user asked for them with, for the error.

    Raises:
        ValueError: `count` is over 1024, or there are fewer, since the program has
            started jax already or has a backend other than the CPU.
    """
    import jax

    if count > _MOST:
        raise ValueError(f"{option}: expected at most {_MOST} devices, got {count}")
    ask_for_devices(count)
    if len(jax.devices()) < count:
        raise ValueError(
            f"{option}: expected at most {len(jax.devices())}, which are all that "
            f"{jax.default_backend()} has here, got {count}"
        )
