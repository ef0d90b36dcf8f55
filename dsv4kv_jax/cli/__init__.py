"""The command line `dsv4kv`. Each command is a module of this package, imported when it is called."""

import importlib
import sys
from typing import Any


def main() -> None:
    """Entry point of the `dsv4kv` script. Exit codes: 0 done, 1 a check failed, 2 bad input (one line on stderr)."""
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        sys.exit(f"dsv4kv: {error}; the command line needs an extra: pip install 'dsv4kv_jax[cli]'")
    from dsv4kv_jax.cli import _options

    _options.run(_lazy_group())


def _lazy_group() -> Any:
    import click

    commands = {
        "plan": "Plan the memory: groups, layout, number of blocks.",
        "capacity": "How many requests of which length fit.",
        "picture": "Draw the slab.",
        "demo": "Run a small model through the cache and check it with PyTorch.",
        "check": "Check every invariant of a saved plan or cache.",
    }

    class Commands(click.Group):
        """Imports a command's module only when it is asked for, so that `plan` starts fast."""

        def list_commands(self, ctx: click.Context) -> list[str]:
            return list(commands)

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            if cmd_name not in commands:
                return None
            return importlib.import_module(f"dsv4kv_jax.cli.{cmd_name}").command

        def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            with formatter.section("Commands"):
                formatter.write_dl(list(commands.items()))

    group = Commands(
        name="dsv4kv",
        no_args_is_help=False,
        help="The DeepSeek-V4 KV cache for JAX: plan, explain, picture and demonstrate it.",
    )
    return click.version_option(package_name="dsv4kv_jax")(group)
